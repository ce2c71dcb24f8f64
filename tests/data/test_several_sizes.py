"""Shards of images with several sizes and captions, compared with the files of the source."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image
from safetensors.torch import load_file

from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.images import fit, open_image
from atoll.data.prepare import prepare
from atoll.encoders.text import open_text_encoder
from photographs import write_photographs
from shapes import write_run
from streams import stream

BUCKETS = {"32x32": (64, 64), "48x24": (96, 48), "24x48": (50, 100), "40x28": (80, 56), "28x40": (63, 90)}
"""The size of each bucket, and that of the images that belong to it."""
NUMBERS = [50, 30, 20, 12, 8]
CLUSTERS = [0, 1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 images of five ratios; each has one to three captions of different weights."""
    folder = tmp_path_factory.mktemp("photographs") / "data"
    shapes = dict(zip(BUCKETS.values(), NUMBERS, strict=True))
    return write_photographs(folder, shapes, long_captions=lambda number: number % 3)


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several") / "run"
    data = {"buckets": list(BUCKETS), "caption": {"short": 1, "long": 3}, "flip": True, "shard_rows": 16}
    clusters = {"count": len(CLUSTERS)}
    network = {"default": {"name": "DiT-XS/4", "width": 32, "depth": 1, "heads": 2}}
    prepare(folder, write_run(folder, source, data=data, clusters=clusters, networks=network))
    return folder


def captions_of(source: Path) -> dict[str, dict[str, float]]:
    rows = map(json.loads, (source / "metadata.jsonl").read_text().splitlines())
    return {
        row["file_name"][:3]: {row["short"]: 1.0} | dict.fromkeys(row["long"], 3.0 / max(1, len(row["long"])))
        for row in rows
    }


def test_the_manifest_lists_the_sizes_of_the_run(run: Path) -> None:
    content = Shards.open(run, [0]).content
    train = Counter()
    for cluster in CLUSTERS:
        train.update({str(size): count for size, count in Shards.open(run, [cluster]).image_counts().items()})
    assert sum(train.values()) == content.rows["train"] + Shards.open(run, [1]).content.rows["train"]
    assert content.latents.shape == (3, 32, 32)
    assert content.latents.sizes is not None
    listed = [str(Size(*size)) for size in content.latents.sizes]
    assert sorted(listed) == sorted(BUCKETS)
    assert listed == sorted(listed, key=lambda size: (-train[size], Size.parse(size)))
    assert content.text is not None
    assert content.text.captions


def test_a_file_has_one_size_and_files_are_ordered_by_size_and_index(run: Path) -> None:
    for cluster in CLUSTERS:
        sizes = list(Shards.open(run, [cluster]).sizes)
        for split in ("train", "validation"):
            files = sorted((run / f"data/shards/cluster_{cluster:03d}").glob(f"{split}-*.safetensors"))
            order, ids = [], []
            for number, file in enumerate(files):
                assert file.name == f"{split}-{number:06d}.safetensors"
                tensors = load_file(file)
                order.append(sizes.index(Size(*tensors["mean"].shape[2:])))
                rows = pq.read_table(file.with_suffix(".parquet")).to_pydict()
                ids += [(order[-1], id) for id in rows["id"]]
                assert len(tensors["label"]) == len(rows["id"]) == len(tensors["captions"]) <= 16
                assert tensors["captions"].sum() == len(tensors["lengths"]) == len(tensors["weights"])
            assert order == sorted(order)
            # Names of the source are in the order of the index.
            assert ids == sorted(ids)
            full = Counter(order)
            assert all(full[size] == -(-sum(own == size for own, _ in ids) // 16) for size in full)


def test_every_row_has_the_pixels_and_captions_of_its_image(run: Path, source: Path) -> None:
    """The expected values come from the files of the source. Every image is in one cluster and split."""
    wanted, seen = captions_of(source), Counter()
    texts_in_order = [text for captions in wanted.values() for text in captions]
    _, masks, vectors = open_text_encoder("minilm", 12)(texts_in_order)
    number = {text: i for i, text in enumerate(texts_in_order)}
    shapes = {shape: Size.parse(bucket) for bucket, shape in BUCKETS.items()}
    texts: dict[str, set[str]] = {"train": set(), "validation": set()}
    for split in ("train", "validation"):
        for file in run.glob(f"data/shards/*/{split}-*.safetensors"):
            tensors, table = load_file(file), pq.read_table(file.with_suffix(".parquet")).to_pydict()
            ends = tensors["captions"].cumsum(0)
            words = tensors["lengths"].cumsum(0)
            for row, id in enumerate(table["id"]):
                seen[id] += 1
                data = (source / f"{id}.png").read_bytes()
                size = shapes[Image.open(source / f"{id}.png").size]
                pixels = np.asarray(fit(open_image(data, [size]), size))
                expected = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 127.5 - 1
                assert_allclose(tensors["mean"][row].float(), expected, atol=1e-3)
                own = slice(int(ends[row]) - int(tensors["captions"][row]), int(ends[row]))
                captions = table["captions"][row]
                assert table["caption"][row] == captions[0] == f"photo {int(id)}"
                # Captions of another split are left out; the others have their weights.
                assert set(captions) <= set(wanted[id])
                texts[split] |= set(captions)
                shares = np.array([wanted[id][caption] for caption in captions])
                stored = tensors["weights"][own].numpy()
                assert_allclose(stored / stored.sum(), shares / shares.sum(), atol=1e-6)
                chosen = [number[caption] for caption in captions]
                assert tensors["lengths"][own].tolist() == masks[chosen].sum(1).tolist()
                assert_allclose(tensors["pooled"][own].float(), vectors[chosen], atol=2e-3)
                assert int(words[own][-1]) <= len(tensors["tokens"])
    assert seen == Counter(dict.fromkeys(wanted, 1))
    assert not texts["train"] & texts["validation"]
    kept = texts["train"] | texts["validation"]
    assert len(kept) > 0.7 * sum(map(len, wanted.values()))


def test_training_draws_every_size_and_caption_with_flips(run: Path, source: Path) -> None:
    shards, wanted = Shards.open(run, CLUSTERS), captions_of(source)
    ids = shards.ids()
    sizes: Counter[Size] = Counter()
    texts = [text for captions in wanted.values() for text in captions]
    pooled_of = dict(zip(texts, open_text_encoder("minilm", 12)(texts)[2], strict=True))
    drawn: Counter[int] = Counter()
    batches = stream(shards, batch_size=8, seed=3)
    for _ in range(60):
        batch = next(batches)
        sizes[Size(*batch.mean.shape[2:])] += len(batch.index)
        for number, pooled in zip(batch.index.tolist(), batch.pooled, strict=True):  # type: ignore[arg-type]
            nearness = torch.stack([pooled_of[text] for text in wanted[ids[number]]]) @ pooled.float()
            assert nearness.max() > 0.99
            drawn[int(nearness.argmax())] += 1
    assert set(sizes) == {Size.parse(bucket) for bucket in BUCKETS}
    assert drawn[0] > 50
    assert drawn[1] > 50
