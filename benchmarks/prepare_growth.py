"""Measure how time and memory of `atoll prepare` grow with the number of images.

`images` prepares tiny generated images in parquet files, from the first byte to the shards, with every stage but text.
`rows` has the same source, but the chunks of the pass (parts of the index, features, latents) are generated before. So
it measures all that grows with the number of rows apart from decoding and networks: the listing of the source, the join
of the index, statistics, hashes, clusters and shards.

Every measurement is one `prepare` in a process of its own. CPU seconds are those of all threads of the process, which
other work on the machine affects less than wall time. The settings of the clustering are the same for all numbers of
rows: by default its number of centers and of fitted images grows until 131,072 images, and is constant from there on.

The constants at the end are those of the plan for 158 million images in docs/how-to/prepare-with-many-workers.md.
"""

import contextlib
import hashlib
import io
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.sizes import Size
from atoll.data.index import SCHEMA
from atoll.data.kmeans import nearest_center
from atoll.data.prepare import open_preparation, prepare, stages_of
from atoll.data.sources.fields import Ids
from atoll.data.stages import ingest, latents
from atoll.data.stages.ingest import open_configured
from atoll.encoders.autoencoder import open_codec
from atoll.encoders.text import open_text_encoder
from harness import Row, run
from prepare import write_large

T = TypeVar("T")
Part = Literal["images", "rows"]
SIDE = 8
CLUSTERS = 8
DIMENSIONS = 384
"""Of the generated features; that of the smallest DINOv2."""
MAX_SECONDS, MAX_MEMORY = 1.15, 1.3
"""Aims: per row, over those of the smallest number of rows."""
_FILE_ROWS, _GROUP_ROWS = 10_000, 1_000


def write_source(folder: Path, rows: int) -> Path:
    """Write parquet files with images of 8 pixels, captions and ids; 4,096 of the images are different."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    images = [_png(generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(min(rows, 4096))]
    for start in range(0, rows, _FILE_ROWS):
        numbers = range(start, min(rows, start + _FILE_ROWS))
        table = {
            "id": [f"image-{number:09d}" for number in numbers],
            "image": [images[number % len(images)] for number in numbers],
            "caption": [f"a small image with the number {number}" for number in numbers],
        }
        name = f"{start // _FILE_ROWS:06d}.parquet"
        pq.write_table(pa.table(table), folder / name, row_group_size=_GROUP_ROWS, compression="none")
    return folder


def _png(pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def settings(source: Path) -> Config:
    """Return the cheapest settings that use every stage but text: pixels as latents, a network at 32 pixels."""
    return configuration.resolve(
        {
            "data": {"source": str(source), "resolution": SIDE, "workers": 2},
            "features": {"resolution": 32, "batch_size": 256},
            "latents": {"autoencoder": "pixels", "batch_size": 256},
            "clusters": {"count": CLUSTERS, "num_fine": 128, "sample_rows": 8192},
            "text": {"encoder": "none"},
        }
    )


def write_pass(folder: Path, config: Config) -> None:
    """Write the chunks that the pass would write: parts of the index, random features, random latents."""
    preparation = open_preparation(folder, config)
    for stage in stages_of(preparation)[:3]:  # ingest, features, latents
        stage.begin()
    stream, generator = preparation.source.images(), torch.Generator().manual_seed(0)
    centers = torch.randn(CLUSTERS * 32, DIMENSIONS, generator=generator)
    size, chunk = Size.square(SIDE), 0
    while images := list(islice(stream, config.data.chunk)):
        kind = torch.randint(len(centers), (len(images),), generator=generator)
        vectors = centers[kind] + torch.randn(len(images), DIMENSIONS, generator=generator)
        part = [ingest.row_of(i, size=size, original=(SIDE, SIDE), reason=None, digest="0" * 32) for i in images]
        key = f"{chunk:032d}"
        features = {"features": torch.nn.functional.normalize(vectors, dim=1).half()}
        Artifact(folder, layout.FEATURES).write_tensors(f"{key}.safetensors", features)
        mean = {"mean": torch.rand(len(images), 3, SIDE, SIDE, generator=generator).half()}
        train = torch.tensor([image.split == "train" for image in images])
        Artifact(folder, layout.LATENTS).write_tensors(f"{key}.safetensors", {**mean, **latents.moments(mean, train)})
        ingest.write_part(preparation, chunk, key, part)
        chunk += 1


@dataclass(frozen=True)
class Cost:
    """The cost of one `prepare`."""

    rows: int
    wall: float
    cpu: float
    """Seconds of all threads, user and system."""
    start: float
    """Megabytes of the process before."""
    peak: float
    """Megabytes of the process at most."""
    disk: dict[str, int]
    """Bytes in the folder of every stage."""


def prepare_one(folder: Path, source: Path, rows: int) -> Cost:
    """Prepare a run, and return the cost."""
    torch.set_num_threads(1)  # waiting threads would count as CPU seconds
    before, used, clock = _memory("VmRSS"), _cpu(), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        prepare(folder, settings(source))
    wall, cpu = time.perf_counter() - clock, _cpu() - used
    stages = (folder / layout.DATA).iterdir()
    disk = {stage.name: sum(file.stat().st_size for file in stage.rglob("*") if file.is_file()) for stage in stages}
    return Cost(rows, wall, cpu, before, _memory("VmHWM"), disk)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _memory(field: Literal["VmRSS", "VmHWM"]) -> float:
    """Return the current (VmRSS) or peak (VmHWM) memory of this process in megabytes, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def in_new_process(work: Callable[..., T], *arguments: Path | int) -> T:
    """Measure in a new process, forked from one that has only imported the modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    with context.Pool(1) as pool:
        return pool.apply(work, arguments)


def costs(folder: Path, part: Part, counts: tuple[int, ...]) -> Iterator[Cost]:
    for rows in counts:
        source, prepared = folder / f"source-{rows}", folder / f"{part}-{rows}"
        if not source.is_dir():
            write_source(source, rows)
        prepared.mkdir()
        if part == "rows":
            write_pass(prepared, settings(source))
        yield in_new_process(prepare_one, prepared, source, rows)
        shutil.rmtree(prepared)


def table(part: Part, measured: list[Cost], quick: bool) -> Iterator[Row]:
    """Yield what was measured, and the ratios to the smallest number of rows."""
    # The report of the clusters has up to 4,096 images, so memory grows until then.
    seconds, memory = (None, None) if quick else (MAX_SECONDS, MAX_MEMORY)
    for cost in measured:
        yield Row(f"{part}, {cost.rows:,} rows: wall ms per row", 1e3 * cost.wall / cost.rows)
        yield Row(f"{part}, {cost.rows:,} rows: CPU ms per row", 1e3 * cost.cpu / cost.rows)
        yield Row(f"{part}, {cost.rows:,} rows: peak MB ({cost.start:.0f} before)", cost.peak)
    for stage, size in sorted(measured[-1].disk.items()):
        yield Row(f"{part}, {measured[-1].rows:,} rows: bytes per image of {stage}", size / measured[-1].rows)
    first = measured[0]
    for cost in measured[1:]:
        name = f"{part}, {cost.rows:,} rows over {first.rows:,}"
        yield Row(f"{name}: CPU per row", cost.cpu / cost.rows / first.cpu * first.rows, seconds, "lower")
        yield Row(f"{name}: wall per row", cost.wall / cost.rows / first.wall * first.rows, seconds, "lower")
        yield Row(f"{name}: memory", cost.peak / first.peak, memory, "lower")
        # Without what every run costs, such as loading networks and the report on 4,096 images.
        added = (cost.cpu - first.cpu) / (cost.rows - first.rows)
        yield Row(f"{part}, from {first.rows:,} to {cost.rows:,} rows: CPU ms per added row", 1e3 * added)


def constants(folder: Path, quick: bool) -> Iterator[Row]:
    """Measure single steps, in one thread."""
    torch.set_num_threads(1)
    rows = 10_000 if quick else 100_000
    source, used = open_configured(settings(write_source(folder / "listed", rows)).data), _cpu()
    assert sum(1 for _ in source.images()) == rows
    yield Row("listing parquet files: CPU µs per image", 1e6 * (_cpu() - used) / rows)
    before, known = _memory("VmRSS"), Ids()
    for number in range(1_000_000):
        known.unique(f"image-{number:09d}", str)
    yield Row("ids of a source of 1,000,000 images: bytes per image", 2**20 * (_memory("VmRSS") - before) / 1e6)
    chunks = 20_000
    row = {
        "id": "image",
        "captions": ["a caption"],
        "split": "train",
        "attributes": "{}",
        "width": SIDE,
        "height": SIDE,
    }
    table = pa.Table.from_pylist([row] * 2, schema=SCHEMA)
    with pq.ParquetWriter(folder / "index.parquet", SCHEMA) as writer:
        for _ in range(chunks):
            writer.write_table(table)
    yield Row(
        "footer of the index: bytes of memory per chunk", in_new_process(footer, folder / "index.parquet") / chunks
    )
    generator = np.random.default_rng(0)
    vectors, centers = (generator.normal(size=(1024, 1280)).astype(np.float32) for _ in range(2))
    yield Row(
        "nearest of 1,024 centers (1,280 dimensions): CPU µs per image", _cost(lambda: nearest_center(vectors, centers))
    )
    encoder, captions = (
        open_text_encoder("minilm", 32),
        [f"a photograph of {n} red boats on a lake" for n in range(1024)],
    )
    yield Row("text encoder minilm: CPU µs per caption of 9 words", _cost(lambda: encoder(captions)))
    block = generator.bytes(2**28)
    yield Row("SHA-256: CPU seconds per GB", _cost(lambda: hashlib.sha256(block)) * 1024 / 1e6 * 1e9 / 2**28)
    images = generator.integers(0, 256, (4, 256, 256, 3), dtype=np.uint8)
    codec = open_codec(str(write_large(folder / "vae")))
    yield Row(
        "autoencoder as large as Stable Diffusion's, 256 px: CPU ms per image",
        _cost(lambda: codec.encode(images)) * 1024 / 4 / 1e3,
    )


def footer(table: Path) -> float:
    """Return the bytes of memory that the footer of a parquet file takes."""
    before = _memory("VmRSS")
    kept = pq.read_metadata(table)
    return (_memory("VmRSS") - before) * 2**20 if kept.num_rows else 0.0


def _cost(work: Callable[[], object]) -> float:
    """Return the CPU microseconds of some work, divided by 1,024: the least of three times."""
    times = []
    for _ in range(3):
        used = _cpu()
        work()
        times.append(_cpu() - used)
    return 1e6 * min(times) / 1024


def measure(quick: bool) -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    try:
        sizes: dict[Part, tuple[int, ...]] = {"images": (10_000, 100_000), "rows": (10_000, 100_000, 1_000_000)}
        for part, counts in sizes.items():
            yield from table(part, list(costs(folder, part, (2_000, 8_000) if quick else counts)), quick)
        yield from constants(folder, quick)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    run("growth of atoll prepare", measure)
