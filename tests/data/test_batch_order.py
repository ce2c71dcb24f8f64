"""The order of batches of several sizes, against a plain simulation of its rule."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.artifacts import Artifact
from atoll.core.manifests import SHARDS, ChannelStatistics, LatentSpec, ShardsContent, TextSpec
from atoll.core.sizes import Size
from atoll.data.dataset import Batch, Shards
from atoll.data.shuffle import BatchOrder
from atoll.flow import rng
from streams import stream

SIZES = [(8, 8), (6, 12), (12, 6)]
ROWS = {0: [[37, 20], [41], []], 1: [[16], [], [9]]}
"""Images by cluster, size and file; the second cluster has none of the second size, the first none of the third."""


def write(run: Path, cluster: int, rows: list[list[int]], sizes: list[tuple[int, int]] = SIZES) -> None:
    """Write shards whose pixels are the number of the image, and whose captions are counted over the cluster."""
    artifact = Artifact(run, f"data/shards/cluster_{cluster:03d}")
    artifact.begin(SHARDS, {})
    number = files = 0
    for (height, width), counts in zip(sizes, rows, strict=True):
        for count in counts:
            images = torch.arange(number, number + count)
            mean = images.float()[:, None, None, None].expand(-1, 1, height, width).contiguous()
            captions = images % 3 + 1
            total = int(captions.sum())
            # Each caption is one token: (image, index of the caption). Caption k has the weight k + 1.
            index = torch.cat([torch.arange(int(own)) for own in captions])
            tokens = torch.stack([images.repeat_interleave(captions), index], 1).float()
            artifact.write_tensors(
                f"train-{files:06d}.safetensors",
                {
                    "mean": mean, "label": images.int(), "captions": captions.int(), "weights": index.float() + 1,
                    "tokens": tokens, "pooled": tokens.clone(), "lengths": torch.ones(total, dtype=torch.int32),
                },
            )  # fmt: skip
            number, files = number + count, files + 1
    several = tuple(sizes) if len(sizes) > 1 else None
    artifact.commit(
        ShardsContent(
            cluster=cluster, clusters=2, rows={"train": number}, labels=(), source="made up", fingerprint="",
            latents=LatentSpec(autoencoder="pixels", shape=(1, *sizes[0]), sizes=several),
            statistics=ChannelStatistics(mean=(0.0,), std=(1.0,)),
            text=TextSpec(encoder="none", max_tokens=2, dimensions=2, pooled=2, captions=True),
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    for cluster, rows in ROWS.items():
        write(folder, cluster, rows)
    return folder


def first(shards: Shards, count: int, **options: int) -> list[Batch]:
    return list(islice(stream(shards, **{"batch_size": 12, "seed": 5, **options}), count))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 2**63))
def test_an_epoch_has_its_batches_of_each_size(counts: list[int], batch_size: int, seed: int) -> None:
    """The oracle counts step by step; every batch of every size appears once, in its epoch."""
    order = BatchOrder(counts, batch_size, seed)
    found = [order.locate(step) for step in range(60)]
    assert len(set(found)) == len(found)
    step = epoch = 0
    seen: Counter[int] = Counter()
    while step < len(found):
        expected = {
            (size, batch)
            for size, count in enumerate(counts)
            for batch in range(epoch * count // batch_size, (epoch + 1) * count // batch_size)
        }
        here = found[step : step + len(expected)]
        assert set(here) <= expected
        for size, _ in here:
            seen[size] += 1
        step, epoch = step + len(expected), epoch + 1
        if step <= len(found):
            # After an epoch, the share of every size is exact up to one batch.
            assert all(0 <= epoch * count / batch_size - seen[size] < 1 for size, count in enumerate(counts))
    for steps in (0, 1, 17, 60):
        sizes = Counter(size for size, _ in found[:steps])
        assert order.images(steps) == [sizes[size] * batch_size for size in range(len(counts))]


def test_batches_of_an_epoch_are_mixed_and_depend_on_seed_and_epoch() -> None:
    order = BatchOrder([1000, 1000], 10, seed=0)
    epochs = [[order.locate(step)[0] for step in range(start, start + 200)] for start in (0, 200)]
    other = [BatchOrder([1000, 1000], 10, seed=1).locate(step)[0] for step in range(200)]
    for epoch in (*epochs, other):
        assert sum(epoch) == 100
        # Halves of an epoch have the same share of a size, within four standard deviations (of 5).
        assert abs(sum(epoch[:100]) - 50) < 20
    assert epochs[0] != epochs[1]
    assert epochs[0] != other


def test_every_image_appears_equally_often_and_a_batch_has_one_size(run: Path) -> None:
    shards = Shards.open(run, [0, 1])
    counts = shards.image_counts()
    assert counts == {Size(8, 8): 73, Size(6, 12): 41, Size(12, 6): 9}
    epochs = 40
    steps = sum(epochs * count // 12 for count in counts.values())
    batches = first(shards, steps)
    seen = Counter(number for batch in batches for number in batch.index.tolist())
    numbers = np.arange(len(shards))
    for size, own in shards.by_size(numbers).items():
        assert len(own) == counts[size]
        times = [seen[number] for number in own.tolist()]
        # The stream of a size is as long as its whole batches: its images appear `epochs` times, or once less or more
        # where the last batches end within an epoch of that size.
        assert sum(times) == epochs * counts[size] // 12 * 12
        assert max(times) - min(times) <= 1
    sizes = Counter(Size(*batch.mean.shape[2:]) for batch in batches)
    assert {size: own * 12 for size, own in sizes.items()} == shards.size_counts(12 * steps, 5, batch_size=12)


def test_every_image_is_read_with_its_own_pixels(run: Path) -> None:
    shards = Shards.open(run, [0, 1])
    starts = {cluster: numbers.start for cluster, numbers in shards.cluster_ranges().items()}
    for batch in first(shards, 25):
        expected = batch.index - torch.tensor([starts[cluster] for cluster in batch.cluster.tolist()])
        assert torch.equal(batch.label, expected)
        assert (batch.mean == expected[:, None, None, None]).all()


def test_the_stream_starts_at_any_step(run: Path) -> None:
    shards = Shards.open(run, [0, 1])
    whole = first(shards, 40)
    for start in (0, 1, 7, 33):
        for ours, theirs in zip(first(shards, 5, start=start * 12), whole[start:], strict=False):
            assert torch.equal(ours.index, theirs.index)
            assert torch.equal(ours.text, theirs.text)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_processes_sees_the_same_batches(run: Path, world_size: int) -> None:
    shards = Shards.open(run, [0, 1])
    ranks = [first(shards, 20, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step, expected in enumerate(first(shards, 20)):
        assert torch.equal(torch.cat([batches[step].index for batches in ranks]), expected.index)
        assert torch.equal(torch.cat([batches[step].text for batches in ranks]), expected.text)  # type: ignore[misc,arg-type]


def test_micro_batches_are_slices_of_the_batch(run: Path) -> None:
    shards = Shards.open(run, [0, 1])
    for step, expected in enumerate(first(shards, 10)):
        for part in range(3):
            start = step * 12 + part * 4
            ours = shards.draw(np.arange(start, start + 4, dtype=np.uint64), 5, batch_size=12)
            assert torch.equal(ours.index, expected.index[part * 4 : part * 4 + 4])


def old_order(position: int, count: int, seed: int) -> int:
    """The order from before there were sizes, in plain integers: a Feistel network with cycle walking per epoch."""
    mask64 = 2**64 - 1

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & mask64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask64
        return value ^ (value >> 31)

    epoch, value = divmod(position, count)
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [mix((number + mix(mix(seed) ^ epoch)) & mask64) for number in range(1, 9)]
    while True:
        left, right = value >> half, value & ((1 << half) - 1)
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & ((1 << half) - 1))
        value = (left << half) | right
        if value < count:
            return value


@pytest.mark.parametrize("several", [False, True])
def test_one_size_has_the_old_order(tmp_path: Path, several: bool) -> None:
    """Also if the run has more sizes than these clusters."""
    rows = [[30, 23], [], []] if several else [[30, 23]]
    write(tmp_path, 0, rows, SIZES if several else SIZES[:1])
    shards = Shards.open(tmp_path, [0])
    found = torch.cat([batch.index for batch in first(shards, 20)]).tolist()
    assert found == [old_order(position, 53, 5) for position in range(240)]
    assert shards.order(np.arange(240, dtype=np.uint64), 5).tolist() == found


def test_images_of_several_sizes_are_no_batch(run: Path) -> None:
    shards = Shards.open(run, [0, 1])
    with pytest.raises(ValueError, match="a batch has images of one size; got 12x6, 8x8"):
        shards.read(np.array([0, 60]))
    with pytest.raises(ValueError, match="depends on the batch size"):
        shards.draw(np.arange(4, dtype=np.uint64), 0)


def caption_of(batch: Batch) -> Any:
    assert batch.text is not None
    assert batch.pooled is not None
    assert torch.equal(batch.text[:, 0], batch.pooled)
    assert batch.mask is not None
    assert batch.mask.tolist() == [[True, False]] * len(batch.mask)
    return batch.text[:, 0, 0], batch.text[:, 0, 1].long()


def test_captions_are_drawn_by_weight_from_the_position(run: Path) -> None:
    shards = Shards.open(run, [0, 1])
    drawn: Counter[tuple[int, int]] = Counter()
    for step, batch in enumerate(first(shards, 1500)):
        image, index = caption_of(batch)
        assert torch.equal(image.long(), batch.label)
        draws = rng.uniform(12, seed=5, stream=16, first=step * 12).double()
        count = batch.label % 3 + 1
        # Caption k of an image has the weight k + 1: its part of [0, 1) ends at (k+1)(k+2) / (count (count+1)).
        for own, total, draw in zip(index.tolist(), count.tolist(), draws.tolist(), strict=True):
            low, high = ((own + k) * (own + k + 1) / (total * (total + 1)) for k in (0, 1))
            assert low - 1e-12 <= draw <= high + 1e-12
        drawn.update(zip(count.tolist(), index.tolist(), strict=True))
    for total in (1, 2, 3):
        shares = [drawn[total, own] / sum(drawn[total, k] for k in range(total)) for own in range(total)]
        weights = [(own + 1) * 2 / (total * (total + 1)) for own in range(total)]
        # 6,000 draws: four standard deviations are at most 0.026.
        np.testing.assert_allclose(shares, weights, atol=0.026)


def test_validation_reads_the_first_caption(run: Path) -> None:
    shards = Shards.open(run, [0])
    image, index = caption_of(shards.read(np.arange(57)))
    assert torch.equal(image.long(), torch.arange(57))
    assert not index.any()
