"""Measure the overhead of reading data, and compare the clustering with faiss and scikit-learn.

Each clustering runs in a separate process, one after the other, on the same feature files. Its
time includes the assignment of every row. Its memory is the peak above the memory before the first row was read.
"""

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from atoll.core import config as configuration
from atoll.core import layout, manifests
from atoll.core.artifacts import Artifact, to_json
from atoll.core.manifests import (
    FEATURES,
    INGEST,
    SHARDS,
    ChannelStatistics,
    FeaturesContent,
    IngestContent,
    LatentSpec,
    ShardsContent,
    TextSpec,
)
from atoll.data import kmeans
from atoll.data.chunks import Chunks, prefetch
from atoll.data.dataset import Batch, Shards
from atoll.data.index import CHUNKS, IMAGES, SCHEMA, Index
from atoll.data.stages import clusters, features, ingest
from atoll.encoders.pretrained import Pixels
from atoll.nets import Condition, DiT, DiTConfig
from harness import Row, interleave, run

Encode = Callable[[Pixels], dict[str, Tensor]]
DIMENSIONS = 384
CLUSTERS = 8


def measure(quick: bool) -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    try:
        return [*reading(folder, quick), *clustering(folder, quick)]
    finally:
        shutil.rmtree(folder)


# Reading


def reading(folder: Path, quick: bool) -> Iterator[Row]:
    """Measure training steps on batches from the reader over the same steps on tensors in memory."""
    batch_size, rows = 32, 2_000 if quick else 20_000
    write_shards(folder / "shards", rows)
    data = Shards.open(folder / "shards", [0])
    torch.manual_seed(0)
    config = DiTConfig.named("DiT-S/2", channels=8, out_channels=8, size=8, text_width=DIMENSIONS)
    network = DiT(config)
    optimizer = torch.optim.AdamW(network.parameters())
    held = [
        data.read(data.order(np.arange(i * batch_size, (i + 1) * batch_size, dtype=np.uint64), 0)) for i in range(16)
    ]
    positions, draw = data.positions(batch_size), partial(data.draw, seed=0, batch_size=batch_size)
    in_memory, stream = cycle(held), prefetch(positions, draw, 1)

    def step(batch: Batch) -> None:
        x0 = data.latents(batch, seed=0, position=0)
        condition = Condition(text=batch.text.float(), text_mask=batch.mask)  # type: ignore[union-attr]
        loss = (network(x0, torch.rand(batch_size) * 1000, condition) - x0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    sides = {"memory": lambda: step(next(in_memory)), "reader": lambda: step(next(stream))}
    times = interleave(sides, seconds=6 if quick else 60)
    yield Row("reader: training rate / from memory", times["memory"] / times["reader"], 0.97)
    start = time.perf_counter()
    for _ in islice(stream, 50):
        pass
    alone = (time.perf_counter() - start) / 50
    yield Row("reader alone: images per second", batch_size / alone)
    yield Row("reader alone: time of a training step / time to read its batch", times["memory"] / alone)


def write_shards(run: Path, rows: int) -> None:
    """Write shards with latents of 8 x 8 x 8 and captions of 4 to 16 tokens, like the emoji data."""
    generator = torch.Generator().manual_seed(0)
    artifact = Artifact(run, layout.shards(0))
    artifact.begin(SHARDS, {})
    for number, start in enumerate(range(0, rows, 4096)):
        count = min(4096, rows - start)
        lengths = torch.randint(4, 17, (count,), generator=generator, dtype=torch.int32)
        tokens = torch.randn(int(lengths.sum()), DIMENSIONS, generator=generator).half()
        latent = torch.randn(2, count, 8, 8, 8, generator=generator).half()
        tensors = {"mean": latent[0], "std": latent[1].abs(), "label": torch.zeros(count, dtype=torch.int32)}
        tensors |= {"tokens": tokens, "lengths": lengths, "pooled": torch.zeros(count, DIMENSIONS).half()}
        artifact.write_tensors(f"train-{number:06d}.safetensors", tensors)
    text = TextSpec(encoder="none", max_tokens=16, dimensions=DIMENSIONS, pooled=DIMENSIONS)
    latents = LatentSpec(autoencoder="pixels", shape=(8, 8, 8))
    statistics = ChannelStatistics(mean=(0.0,) * 8, std=(1.0,) * 8)
    artifact.commit(
        ShardsContent(
            cluster=0, clusters=1, rows={"train": rows}, labels=(), source="random", fingerprint="", latents=latents,
            statistics=statistics, text=text,
        )
    )  # fmt: skip


# Clustering


def write_features(run: Path, rows: int) -> None:
    """Write the index and features of a run: unit vectors around 2000 centers of very different weights."""
    chunk = 8192
    generator = np.random.default_rng(0)
    centers = generator.normal(size=(2000, DIMENSIONS)).astype(np.float32)
    weights = generator.pareto(1.5, 2000) + 0.1
    artifact = Artifact(run, ingest.NAME)
    artifact.begin(INGEST, {"chunk": chunk, "resolution": 64})
    target = Artifact(run, features.NAME)
    target.begin(FEATURES, {})
    chunks = Chunks(target, rows, chunk)
    with artifact.writing(IMAGES) as path, pq.ParquetWriter(path, SCHEMA) as writer:
        for number in range(chunks.count):
            count = chunks.length(number)
            kind = generator.choice(len(centers), count, p=weights / weights.sum())
            vectors = torch.from_numpy(centers[kind] + generator.normal(size=(count, DIMENSIONS)).astype(np.float32))
            target.write_tensors(
                chunks.file(number), {"features": torch.nn.functional.normalize(vectors, dim=1).half()}
            )
            ids = [f"{number}-{row}" for row in range(count)]
            table = {"id": ids, "captions": [[id] for id in ids], "split": ["train"] * count, "attributes": ids}
            missing = {name: [None] * count for name in SCHEMA.names if name not in table}
            writer.write_table(pa.table({**table, **missing}, schema=SCHEMA))
    artifact.write(CHUNKS, to_json([f"{number:06d}" for number in range(chunks.count)]))
    artifact.commit(IngestContent(rows=rows, rejected=0, captions=rows, splits={"train": rows}, labels={}))
    target.commit(FeaturesContent(rows=rows, dimensions=DIMENSIONS))


@dataclass(frozen=True)
class Outcome:
    """Cost and quality of one clustering."""

    seconds: float
    megabytes: float
    """Peak memory above that at the start."""
    fine_cosine: float
    """Mean cosine similarity of all rows to the nearest fine center."""
    imbalance: float = 0.0


def cluster_atoll(run: Path, fine: int) -> Outcome:
    """Cluster with Atoll: fine centers from a bounded sample, streamed assignment, balanced merging."""
    artifact, index = Artifact(run, "atoll"), Index.open(run)
    shutil.rmtree(artifact.folder, ignore_errors=True)
    artifact.begin(manifests.CLUSTERS, {})
    settings = configuration.Clusters(count=CLUSTERS, num_fine=fine)
    before, start = memory("VmRSS"), time.perf_counter()
    clusters.Partition(artifact, index, settings, index.chunks(Artifact(run, features.NAME))).assign()
    seconds = time.perf_counter() - start
    table = pq.read_table(artifact.path(clusters.ASSIGNMENTS))
    sizes = np.bincount(table["coarse"].to_numpy(), minlength=CLUSTERS)
    cosine = 1 - float(table["distance"].to_numpy().mean())
    return Outcome(seconds, memory("VmHWM") - before, cosine, float(sizes.max() / sizes.mean()))


def cluster_faiss(run: Path, fine: int) -> Outcome:
    """Cluster with faiss as in its documentation: all rows in memory, k-means with default settings, then search."""
    before, start = memory("VmRSS"), time.perf_counter()
    rows = all_rows(run)
    solver = faiss.Kmeans(DIMENSIONS, fine, niter=25, spherical=True, seed=0)
    solver.train(rows)
    cosine, _ = solver.index.search(rows, 1)
    return Outcome(time.perf_counter() - start, memory("VmHWM") - before, float(cosine.mean()))


def cluster_minibatch(run: Path, fine: int) -> Outcome:
    """Cluster with scikit-learn: all rows in memory, MiniBatchKMeans. Centers are normalized for the comparison."""
    before, start = memory("VmRSS"), time.perf_counter()
    rows = all_rows(run)
    solver = MiniBatchKMeans(fine, batch_size=8192, n_init=1, random_state=0).fit(rows)
    seconds = time.perf_counter() - start
    units = solver.cluster_centers_ / np.linalg.norm(solver.cluster_centers_, axis=1, keepdims=True)
    _, distance = kmeans.nearest_center(rows, units)
    return Outcome(seconds, memory("VmHWM") - before, 1 - float(distance.mean()))


def all_rows(run: Path) -> np.ndarray:
    index = Index.open(run)
    chunks = index.chunks(Artifact(run, features.NAME))
    rows = np.empty((index.rows, DIMENSIONS), dtype=np.float32)
    for number in range(chunks.count):
        start = number * chunks.size
        rows[start : start + chunks.length(number)] = features.read_chunk(chunks, number).numpy()
    return rows


def memory(field: Literal["VmRSS", "VmHWM"]) -> float:
    """Return the current (VmRSS) or peak (VmHWM) memory of this process in megabytes, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def in_new_process(cluster: Callable[[Path, int], Outcome], run: Path, fine: int) -> Outcome:
    """Run a clustering in a new process, forked from one that has only imported the modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    with context.Pool(1) as pool:
        return pool.apply(cluster, (run, fine))


def clustering(folder: Path, quick: bool) -> Iterator[Row]:
    sides = {"atoll": cluster_atoll, "faiss": cluster_faiss, "minibatch": cluster_minibatch}
    counts = (2_000, 8_000) if quick else (10_000, 100_000, 1_000_000)
    fine = 128 if quick else 1024
    found: dict[tuple[str, int], Outcome] = {}
    for rows in counts:
        run = folder / f"features-{rows}"
        write_features(run, rows)
        for name, cluster in sides.items():
            # Atoll uses fewer fine centers for few rows; the others get the same number.
            found[name, rows] = in_new_process(cluster, run, kmeans.fine_count(rows, CLUSTERS, fine))
        shutil.rmtree(run)
    large = counts[-1]
    # With few rows everything fits into the sample, so Atoll has no advantage to reach.
    at_least, at_most = (None, None) if quick else (1.0, 1.0)
    for peer in ("faiss", "minibatch"):
        ours, theirs = found["atoll", large], found[peer, large]
        yield Row(f"clustering {large:,} rows: time of {peer} / Atoll", theirs.seconds / ours.seconds, at_least)
        yield Row(f"clustering {large:,} rows: cosine of Atoll / {peer}", ours.fine_cosine / theirs.fine_cosine, 0.99)
        yield Row(
            f"clustering {large:,} rows: memory of Atoll / {peer}", ours.megabytes / theirs.megabytes, at_most, "lower"
        )
    yield Row("clustering: largest / mean cluster", found["atoll", large].imbalance, 1.25, "lower")
    for name in sides:
        for rows in counts:
            outcome = found[name, rows]
            yield Row(f"{name}, {rows:,} rows: seconds", outcome.seconds, None, "lower")
            yield Row(f"{name}, {rows:,} rows: peak MB", outcome.megabytes, None, "lower")
        growth = found[name, counts[-1]].megabytes / found[name, counts[-2]].megabytes
        yield Row(f"{name}: memory at {counts[-1]:,} rows / at {counts[-2]:,}", growth, None, "lower")


if __name__ == "__main__":
    run("atoll.data", measure)
