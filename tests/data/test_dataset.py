import shutil
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image

from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS, ChannelStatistics, LatentSpec, ShardsContent
from atoll.data.dataset import Batch, Shards
from atoll.encoders.text import open_text_encoder
from streams import stream
from waiting import HOUR

ALL = [0, 1, 2]


def first(shards: Shards, count: int, **options: int) -> list[Batch]:
    return list(islice(stream(shards, **{"batch_size": 12, "seed": 5, **options}), count))


def test_every_image_is_in_one_cluster_and_split(prepared: Path, shapes: Path) -> None:
    ids = [
        id
        for cluster in ALL
        for split in ("train", "validation")
        for id in Shards.open(prepared, [cluster], split).ids()  # type: ignore[arg-type]
    ]
    stems = {path.stem for path in shapes.glob("*.png")} - {"broken"}
    assert sorted(ids) == sorted(stems)
    assert len(Shards.open(prepared, ALL)) + len(Shards.open(prepared, ALL, "validation")) == 99


def test_a_row_has_the_latents_and_caption_of_its_image(prepared: Path, shapes: Path) -> None:
    """The expected values come from the files of the source, without any stage of the preparation."""
    shards = Shards.open(prepared, ALL)
    chosen = np.array([3, 70, 0, 41, 3])
    batch, ids, captions = shards.read(chosen), shards.ids(chosen.tolist()), shards.captions(chosen.tolist())
    encoder = open_text_encoder("minilm", 12)
    states, mask, pooled = encoder(captions)
    for row, id in enumerate(ids):
        image = Image.open(shapes / f"{id}.png").resize((32, 32), Image.Resampling.LANCZOS)
        expected = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
        assert_allclose(batch.mean[row].float(), expected, atol=1e-3)
        assert (shapes / f"{id}.txt").read_text() == captions[row]
    assert batch.text is not None
    assert batch.mask is not None
    assert batch.pooled is not None
    assert torch.equal(batch.mask, mask)
    assert_allclose(batch.text.float(), states, atol=5e-3)
    assert_allclose(batch.pooled.float(), pooled, atol=1e-3)
    assert batch.std is None
    assert batch.index.tolist() == chosen.tolist()


def test_ids_of_a_few_images_are_read_from_their_files_alone(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared / "data/shards", run / "data/shards")
    shards = Shards.open(run, ALL)
    ids, captions = shards.ids(), shards.captions()
    wanted = [len(shards) - 1, 0, len(shards) - 2, 1, 0]  # of the first and the last file, out of order
    files = sorted((run / "data/shards").glob("*/train-*.parquet"))
    for file in files[1:-1]:
        file.unlink()
    assert len(files) > 2
    assert shards.ids(wanted) == [ids[row] for row in wanted]
    assert shards.captions(wanted) == [captions[row] for row in wanted]
    assert shards.ids([]) == []


def test_an_epoch_has_every_image_once_and_epochs_differ(prepared: Path) -> None:
    shards = Shards.open(prepared, ALL)
    count = len(shards)
    order = [shards.order(np.arange(epoch * count, (epoch + 1) * count, dtype=np.uint64), seed=5) for epoch in (0, 1)]
    assert np.array_equal(np.sort(order[0]), np.arange(count))
    assert np.array_equal(np.sort(order[1]), np.arange(count))
    assert not np.array_equal(order[0], order[1])
    seen = torch.cat([batch.index for batch in first(shards, -(-2 * count // 12))])[: 2 * count]
    assert np.array_equal(seen.numpy(), np.concatenate(order))


def test_the_stream_starts_at_any_position(prepared: Path) -> None:
    shards = Shards.open(prepared, [1])
    whole = torch.cat([batch.index for batch in first(shards, 10)])
    for start in (0, 1, 12, 37):
        later = torch.cat([batch.index for batch in first(shards, 3, start=start)])
        assert torch.equal(later, whole[start : start + 36])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_processes_sees_the_same_batches(prepared: Path, world_size: int) -> None:
    shards = Shards.open(prepared, ALL)
    alone = [batch.index for batch in first(shards, 5)]
    ranks = [first(shards, 5, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step, expected in enumerate(alone):
        assert torch.equal(torch.cat([batches[step].index for batches in ranks]), expected)


def test_the_number_of_threads_does_not_change_the_batches(prepared: Path) -> None:
    shards = Shards.open(prepared, ALL)
    for one, four in zip(first(shards, 8), first(shards, 8, workers=4), strict=True):
        assert torch.equal(one.index, four.index)
        assert torch.equal(one.mean, four.mean)


def test_a_closed_stream_leaves_no_thread(prepared: Path) -> None:
    before = threading.active_count()
    batches = stream(Shards.open(prepared, ALL), batch_size=4, seed=0, workers=3)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


# An open stream is finalized when the interpreter exits: with the globals of __main__, or later than the modules that
# ThreadPoolExecutor needs. One that the module `queue` refers to is finalized after other globals of that module.
OPEN_AT_EXIT = {
    "a global": "",
    "finalized after other modules": "import queue; queue.stream = stream; del stream",
    "in a reference cycle": "import queue; queue.loop = [stream]; queue.loop.append(queue.loop); del stream",
    "never read": "import queue; queue.stream = prefetch(positions(), draw, 1); del stream",
}
READ_ONE_BATCH = """
import sys
from functools import partial
from atoll.data.chunks import prefetch
from atoll.data.dataset import Shards
shards = Shards.open(sys.argv[1], [0])
positions, draw = partial(shards.positions, 4), partial(shards.draw, seed=0)
stream = prefetch(positions(), draw, 3)
next(stream)
"""


@pytest.mark.parametrize(
    ("ending", "options"),
    [*((ending, []) for ending in OPEN_AT_EXIT), ("finalized after other modules", ["-X", "dev"])],
    ids=[*OPEN_AT_EXIT, "development mode"],
)
def test_an_open_stream_prints_nothing_at_exit(prepared: Path, ending: str, options: list[str]) -> None:
    # In development mode, torch and other packages print warnings when they are imported.
    script = READ_ONE_BATCH + OPEN_AT_EXIT[ending]
    command = [sys.executable, *options, "-W", "ignore", "-c", script, str(prepared)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HOUR)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_posterior_is_sampled_and_normalized(prepared: Path) -> None:
    shards = Shards.open(prepared, ALL)
    pixels = torch.cat(
        [shards.latents(shards.read(np.array([row])), seed=0, position=row) for row in range(len(shards))]
    )
    assert_allclose(pixels.mean((0, 2, 3)), torch.zeros(3), atol=2e-3)
    assert_allclose(pixels.std((0, 2, 3)), torch.ones(3), atol=2e-3)
    numbers = torch.zeros(2, dtype=torch.long)
    mean, std = torch.full((2, 3, 40, 40), 3.0), torch.full((2, 3, 40, 40), 2.0)
    batch = Batch(numbers, numbers, numbers, mean, std, None, None, None)
    one, two = (shards.latents(batch, seed=seed, position=5) for seed in (0, 1))
    raw = shards.statistics.denormalize(one)
    assert abs(raw.mean() - 3) < 0.1
    assert abs(raw.std() - 2) < 0.1
    assert not torch.equal(one, two)
    later = Batch(numbers[1:], numbers[1:], numbers[1:], mean[1:], std[1:], None, None, None)
    assert torch.equal(shards.latents(later, seed=0, position=6), one[1:])


def test_shards_can_be_read_without_the_rest_of_the_run(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "data/shards/cluster_001", tmp_path / "data/shards/cluster_001")
    alone, at_home = Shards.open(tmp_path, [1], verify=True), Shards.open(prepared, [1])
    assert alone.statistics == at_home.statistics
    for ours, theirs in zip(first(alone, 4), first(at_home, 4), strict=True):
        assert torch.equal(ours.mean, theirs.mean)
        assert torch.equal(ours.text, theirs.text)  # type: ignore[arg-type]
        assert (ours.cluster == 1).all()
    with pytest.raises(AtollError, match="cluster_000 does not exist"):
        Shards.open(tmp_path, [0])


def test_the_manifest_of_shards_declares_latents_text_and_statistics(prepared: Path) -> None:
    content = Shards.open(prepared, [2]).content
    assert content.cluster == 2
    assert content.clusters == 3
    assert content.latents.shape == (3, 32, 32)
    assert content.text is not None
    assert content.text.dimensions == 384
    assert content.text.max_tokens == 12
    assert len(content.statistics.mean) == 3


def test_no_shard_has_more_rows_than_shard_rows(prepared: Path) -> None:
    rows = [pq.ParquetFile(file).metadata.num_rows for file in prepared.glob("data/shards/*/train-*.parquet")]
    assert max(rows) == 20
    assert len(rows) > 3


def test_verify_finds_a_damaged_file(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "data/shards/cluster_000", tmp_path / "data/shards/cluster_000")
    file = tmp_path / "data/shards/cluster_000/train-000000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    Shards.open(tmp_path, [0])
    with pytest.raises(AtollError, match="SHA-256 differs"):
        Shards.open(tmp_path, [0], verify=True)


def test_shards_of_two_preparations_are_not_mixed(prepared: Path, tmp_path: Path) -> None:
    for cluster in (0, 1):
        shutil.copytree(
            prepared / f"data/shards/cluster_{cluster:03d}", tmp_path / f"data/shards/cluster_{cluster:03d}"
        )
    manifest = tmp_path / "data/shards/cluster_001/manifest.json"
    manifest.write_text(manifest.read_text().replace('"resolution": 32', '"resolution": 48'))
    with pytest.raises(AtollError, match="differ in latents; prepare them together"):
        Shards.open(tmp_path, [0, 1])


def test_a_batch_size_that_the_world_size_does_not_divide_is_an_error(prepared: Path) -> None:
    with pytest.raises(ValueError, match="a batch of 12 cannot be divided: rank 0, world size 5"):
        Shards.open(prepared, [0]).positions(12, world_size=5)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_files_are_memory_mapped(tmp_path: Path) -> None:
    def megabytes() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    artifact = Artifact(tmp_path, "data/shards/cluster_000")
    artifact.begin(SHARDS, {})
    mean, label = torch.zeros(40_000, 4, 16, 16), torch.zeros(40_000, dtype=torch.int32)
    artifact.write_tensors("train-000000.safetensors", {"mean": mean, "label": label})
    statistics = ChannelStatistics(mean=(0.0,) * 4, std=(1.0,) * 4)
    latents = LatentSpec(autoencoder="pixels", shape=(4, 16, 16))
    artifact.commit(
        ShardsContent(
            cluster=0, clusters=1, rows={"train": 40_000}, labels=(), source="made up", fingerprint="", latents=latents,
            statistics=statistics, text=None,
        )
    )  # fmt: skip
    del mean
    before = megabytes()
    shards = Shards.open(tmp_path, [0])
    shards.read(np.arange(0, 40_000, 4_000))
    assert len(shards) == 40_000
    assert megabytes() - before < artifact.path("train-000000.safetensors").stat().st_size / 2**20 / 2
