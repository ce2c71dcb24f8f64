"""Shared runs: what store and lease cost an island, what it moves, and how a plan of many islands would go.

The S3 server (moto) is a process of its own on loopback; a proxy in front of it counts every byte, headers included.
"""

import heapq
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.manifests import CHECKPOINT
from atoll.islands.checkpoint_publisher import Reporter
from atoll.islands.leases import DURATION, MARGIN, Lease
from atoll.islands.remote_run import open_config, push
from atoll.islands.store import Store
from atoll.islands.worker import Worker
from atoll.train import resolve_job, train_job
from harness import Row, run
from train import make_run

sys.path.append(str(Path(__file__).parent.parent / "tests" / "islands"))
from servers import CREDENTIALS, Proxy, moto, new_bucket, proxy

PUBLISH_EVERY = 300.0
HOUR = 3600.0


@contextmanager
def shared_run(folder: Path, rows: int, **settings: object) -> Iterator[tuple[Store, Proxy]]:
    """A run of one cluster on S3, behind a proxy that counts."""
    os.environ.update(CREDENTIALS)
    make_run(folder, rows, **settings)
    with moto() as server, proxy(server) as line:
        url = new_bucket(server)
        os.environ["AWS_ENDPOINT_URL"] = server
        push(folder, Store.open(url))
        os.environ["AWS_ENDPOINT_URL"] = line.address
        yield Store.open(url), line


@dataclass(frozen=True)
class Measured:
    """What one machine does."""

    rate: float
    """Samples a second of the plain job."""
    plain: float
    """Seconds of the plain job."""
    joined: float
    """Seconds of the same job under store and lease, publishing one checkpoint."""
    moved: float
    """Bytes through the line over those of shards, checkpoints and result."""
    renewal: float
    """CPU seconds of one renewal of the lease."""
    upload: float
    """CPU seconds of one published checkpoint."""


def measure(quick: bool) -> Measured:
    """One expert trained plainly and as a contributor does, in turn."""
    samples, rounds = (256, 1) if quick else (4096, 5)
    settings = {"samples": samples, "batch": 64, "save_every": samples // 2}
    with tempfile.TemporaryDirectory() as scratch, shared_run(Path(scratch) / "run", 8192, **settings) as (store, line):
        plain, joined, moved = [], [], []
        config, _ = open_config(store, Path(scratch) / "copy")
        own = Path(scratch) / "run"
        for _ in range(rounds):
            shutil.rmtree(own / "experts", ignore_errors=True)
            plain.append(seconds(lambda: train_job(resolve_job(own, config, "expert", expert=0))))
            joined.append(seconds(lambda: train_job_shared(store, Path(scratch) / "copy", config)))
            moved.append(one_island(store, line, Path(scratch) / "island", own))
        renewal, upload = cost_of_sharing(store, own, config)
    return Measured(samples / min(plain), min(plain), min(joined), max(moved), renewal, upload)


def seconds(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def train_job_shared(store: Store, folder: Path, config: Config) -> None:
    """The job alone, with its lease kept and its first checkpoint published while it trains."""
    if not (folder / "data").exists():
        shutil.copytree(folder.parent / "run" / "data", folder / "data")
    shutil.rmtree(folder / "experts", ignore_errors=True)
    clear(store)
    job = resolve_job(folder, config, "expert", expert=0)
    lease = Lease.take(store, job.job)
    assert lease is not None
    with lease:
        reporter = Reporter(store, lease, job, signer=None, every=PUBLISH_EVERY, stop=threading.Event())
        train_job(job, reporter)
        reporter.close()


def one_island(store: Store, line: Proxy, folder: Path, own: Path) -> float:
    """All that a contributor moves for one expert, over what must move: shards in, a checkpoint and the result out."""
    shutil.rmtree(folder, ignore_errors=True)
    clear(store)
    line.up = line.down = 0
    worker = Worker(store, folder, open_config(store, folder)[0], publish_every=PUBLISH_EVERY)
    checkpoint = checkpoint_size(own)
    worker.run()
    need = size_of(folder / "data") + size_of(folder / "experts/000/final") + checkpoint
    return (line.up + line.down) / need


def checkpoint_size(own: Path) -> int:
    """Weights, two moments and the averages in float32, as the plain job's checkpoints have them."""
    weights = (own / "experts/000/final/diffusion_pytorch_model.safetensors").stat().st_size
    return 4 * weights


def cost_of_sharing(store: Store, own: Path, config: Config) -> tuple[float, float]:
    """CPU seconds of this process for one renewal, and for one checkpoint from the disk into the store."""
    clear(store)
    job = resolve_job(own, config, "expert", expert=0)
    lease = Lease.take(store, job.job, 1000.0)
    assert lease is not None
    before = time.process_time()
    for _ in range(20):
        lease.renew()
    renewal = (time.process_time() - before) / 20
    folder = own / "experts/000/checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    artifact = Artifact(own, "experts/000/checkpoint")
    artifact.begin(CHECKPOINT, {})
    artifact.write("state.bin", os.urandom(checkpoint_size(own)))
    artifact.commit({"samples": 1, "seconds": 0.0})
    shutil.move(folder, own / "experts/000/000000000001")
    reporter = Reporter(store, lease, job, signer=None, every=0.0, stop=threading.Event())
    before = time.process_time()
    reporter.on_checkpoint(Artifact(own, "experts/000/000000000001"))
    reporter.close()
    upload = time.process_time() - before
    shutil.rmtree(own / "experts/000/000000000001")
    return renewal, upload


def clear(store: Store) -> None:
    """Forget that anyone ever worked here."""
    store.delete([entry.key for prefix in ("experts", "leases") for entry in store.entries(prefix)])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# A plan of many islands


@dataclass(frozen=True)
class Plan:
    """Experts to train, and what happens to islands."""

    islands: int
    experts: int
    samples: float
    """Of one expert."""
    rate: float
    """Samples a second of a usual island."""
    between_failures: float = 24 * HOUR
    repair: float = 0.25 * HOUR
    publish_every: float = PUBLISH_EVERY
    overhead: float = 1.0


@dataclass(frozen=True)
class Course:
    """How it went."""

    makespan: float
    """Over that of islands which never fail and divide the work without a remainder."""
    wasted: float
    """Samples trained again, over those needed."""


def simulate(plan: Plan, seed: int = 0) -> Course:
    """Event by event: islands take free experts, fail, and come back; an expert goes on from its last checkpoint.

    Speeds are log-normal (sigma 0.35), one island in twenty runs at a quarter. After a failure the expert is free
    once its lease has run out.
    """
    chance = random.Random(seed)
    factors = [chance.lognormvariate(0, 0.35) * (0.25 if chance.random() < 0.05 else 1.0) for _ in range(plan.islands)]
    speeds = [plan.rate * factor for factor in factors]
    left = [plan.samples] * plan.experts
    free = [(0.0, expert) for expert in range(plan.experts)]
    islands = [(0.0, island) for island in range(plan.islands)]
    heapq.heapify(free)
    heapq.heapify(islands)
    wasted = end = 0.0
    while free:
        now, island = heapq.heappop(islands)
        since, expert = heapq.heappop(free)
        start = max(now, since)
        need = left[expert] / speeds[island] * plan.overhead
        fails = chance.expovariate(1 / plan.between_failures)
        if fails >= need:
            end = max(end, start + need)
            heapq.heappush(islands, (start + need, island))
            continue
        done = fails / plan.overhead * speeds[island]
        kept = fails - fails % plan.publish_every if plan.publish_every else 0.0
        kept = kept / plan.overhead * speeds[island]
        wasted += done - kept
        left[expert] -= kept
        heapq.heappush(free, (start + fails + DURATION + MARGIN, expert))
        heapq.heappush(islands, (start + fails + plan.repair, island))
    ideal = plan.samples * plan.experts / sum(speeds)
    return Course(end / ideal, wasted / (plan.samples * plan.experts))


def rows(quick: bool) -> Iterator[Row]:
    found = measure(quick)
    yield Row("bytes moved by an island / (its shards + a checkpoint + its result)", found.moved, 1.05, "lower")
    added = max(0.0, found.joined - found.plain) / PUBLISH_EVERY
    yield Row("seconds that lease and one checkpoint add / the 300 s between two checkpoints", added, 0.02, "lower")
    share = found.renewal / (DURATION / 3) + found.upload / PUBLISH_EVERY
    yield Row("CPU of renewals (every 40 s) and checkpoints (every 300 s) / time", share, 0.02, "lower")
    yield Row(f"a job of {found.plain:.0f} s that publishes one checkpoint / the plain job", found.joined / found.plain)
    yield Row("CPU milliseconds of one renewal", 1000 * found.renewal)
    yield Row("CPU seconds of one published checkpoint of 145 MB", found.upload)
    sizes = (8, 64, 512) if quick else (8, 16, 32, 64, 128, 256, 512)
    for islands in sizes:
        # Four experts for each island, of a day's work each at the rate that was measured.
        plan = Plan(islands, 4 * islands, 24 * HOUR * found.rate, found.rate, overhead=max(1.0, 1.0 + share))
        courses = [simulate(plan, seed) for seed in range(5 if quick else 20)]
        lost = [simulate(replace(plan, publish_every=0.0), seed) for seed in range(5 if quick else 20)]
        yield Row(f"{islands} islands: makespan / ideal", sum(c.makespan for c in courses) / len(courses))
        yield Row(f"{islands} islands: work done twice / work", sum(c.wasted for c in courses) / len(courses))
        yield Row(f"{islands} islands: the same without published checkpoints", sum(c.wasted for c in lost) / len(lost))


if __name__ == "__main__":
    run("Shared runs", rows)
