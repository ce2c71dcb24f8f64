"""Measure the overhead and the traffic of a shared run for one island, and simulate runs with many islands.

The S3 server (moto) is a separate process on loopback. A proxy in front of it counts every byte, headers included.
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

from atoll.apps.share.checkpoint_publisher import CheckpointPublisher
from atoll.apps.share.lease_records import MARGIN
from atoll.apps.share.leases import DURATION, Lease
from atoll.apps.share.owners import push
from atoll.apps.share.remote_run import Access, RemoteRun
from atoll.apps.share.store import Store
from atoll.apps.share.worker import Worker
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.manifests import CHECKPOINT
from atoll.train import resolve_job, train_job
from atoll.verify.signing import Signer
from harness import Row, run
from train import make_run

sys.path.append(str(Path(__file__).parent.parent / "tests" / "islands"))
from servers import CREDENTIALS, Proxy, moto, new_bucket, proxy

PUBLISH_EVERY = 300.0
HOUR = 3600.0


@contextmanager
def shared_run(folder: Path, rows: int, **settings: object) -> Iterator[tuple[Store, Proxy]]:
    """Open a run of one cluster on S3, behind a proxy that counts bytes."""
    os.environ.update(CREDENTIALS)
    make_run(folder, rows, **settings)
    with moto() as server, proxy(server) as line:
        url = new_bucket(server)
        os.environ["AWS_ENDPOINT_URL"] = server
        os.environ["XDG_CONFIG_HOME"] = str(folder.parent / "config")
        push(folder, Store.open(url), signer(folder))
        os.environ["AWS_ENDPOINT_URL"] = line.address
        yield Store.open(url), line


def signer(folder: Path) -> Signer:
    """Return the key of the owner, who also trains."""
    return Signer.open(folder.parent / "key.pem")


def open_remote(store: Store, folder: Path) -> RemoteRun:
    """Open the shared run with a local copy in `folder`."""
    return RemoteRun.open(store, folder, Access(unsigned=True, signer=signer(folder)))


@dataclass(frozen=True)
class Measured:
    """Measurements of one machine."""

    rate: float
    """Images per second of the local job."""
    local: float
    """Seconds of the local job."""
    shared: float
    """Seconds of the same job with store and lease, publishing one checkpoint."""
    traffic: float
    """Bytes through the proxy over the size of shards, checkpoint and result."""
    renewal: float
    """CPU seconds of one lease renewal."""
    upload: float
    """CPU seconds of one published checkpoint."""


def measure(quick: bool) -> Measured:
    """Train one expert locally and as a contributor, in turn."""
    images, rounds = (256, 1) if quick else (4096, 5)
    # Without a warm-up, four steps suffice to be better than an untrained network, as shared runs demand.
    settings = {"total_images": images, "batch_size": 64, "save_every": images // 2, "lr": 1e-3, "warmup_images": 0}
    with tempfile.TemporaryDirectory() as scratch, shared_run(Path(scratch) / "run", 8192, **settings) as (store, line):
        local, shared, traffic = [], [], []
        remote = open_remote(store, Path(scratch) / "copy")
        config = remote.config
        own = Path(scratch) / "run"
        for _ in range(rounds):
            shutil.rmtree(own / "experts", ignore_errors=True)
            local.append(seconds(lambda: train_job(resolve_job(own, config, "expert", expert=0))))
            shared.append(seconds(lambda: train_job_shared(remote, Path(scratch) / "copy", config)))
            traffic.append(one_island(store, line, Path(scratch) / "island", own))
        renewal, upload = cost_of_sharing(remote, own, config)
    return Measured(images / min(local), min(local), min(shared), max(traffic), renewal, upload)


def seconds(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def train_job_shared(remote: RemoteRun, folder: Path, config: Config) -> None:
    """Run the job while its lease is renewed and its first checkpoint is published."""
    if not (folder / "data").exists():
        shutil.copytree(folder.parent / "run" / "data", folder / "data")
    shutil.rmtree(folder / "experts", ignore_errors=True)
    clear(remote.store)
    job = resolve_job(folder, config, "expert", expert=0)
    lease = Lease.acquire(remote.store, job.job, authority=remote)
    assert lease is not None
    with lease:
        publisher = CheckpointPublisher(remote, lease, job, every=PUBLISH_EVERY, stop=threading.Event())
        train_job(job, publisher)
        publisher.close()


def one_island(store: Store, line: Proxy, folder: Path, own: Path) -> float:
    """Return the traffic of a contributor for one expert over the size of shards, one checkpoint and the result."""
    shutil.rmtree(folder, ignore_errors=True)
    clear(store)
    line.up = line.down = 0
    remote = open_remote(store, folder)
    worker = Worker(remote, folder, remote.config, publish_every=PUBLISH_EVERY)
    checkpoint = checkpoint_size(own)
    worker.run()
    needed = size_of(folder / "data") + size_of(folder / "experts/000/final") + checkpoint
    return (line.up + line.down) / needed


def checkpoint_size(own: Path) -> int:
    """Return the size of a checkpoint: weights, two moments and the EMA, in float32."""
    weights = (own / "experts/000/final/diffusion_pytorch_model.safetensors").stat().st_size
    return 4 * weights


def cost_of_sharing(remote: RemoteRun, own: Path, config: Config) -> tuple[float, float]:
    """Return the CPU seconds of this process for one lease renewal, and for the upload of one checkpoint."""
    clear(remote.store)
    job = resolve_job(own, config, "expert", expert=0)
    lease = Lease.acquire(remote.store, job.job, 1000.0, authority=remote)
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
    artifact.commit({"images": 1, "seconds": 0.0})
    shutil.move(folder, own / "experts/000/000000000001")
    publisher = CheckpointPublisher(remote, lease, job, every=0.0, stop=threading.Event())
    before = time.process_time()
    publisher.on_checkpoint(Artifact(own, "experts/000/000000000001"))
    publisher.close()
    upload = time.process_time() - before
    shutil.rmtree(own / "experts/000/000000000001")
    return renewal, upload


def clear(store: Store) -> None:
    """Delete all experts, leases and snapshots from the store."""
    shutil.rmtree(Path(os.environ["XDG_CONFIG_HOME"]), ignore_errors=True)
    store.delete([entry.key for prefix in ("experts", "leases", "snapshot") for entry in store.entries(prefix)])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# Simulation of many islands


@dataclass(frozen=True)
class Plan:
    """Experts to train, and the properties of the islands."""

    islands: int
    experts: int
    images: float
    """Training images of one expert."""
    rate: float
    """Images per second of the median island."""
    between_failures: float = 24 * HOUR
    repair: float = 0.25 * HOUR
    publish_every: float = PUBLISH_EVERY
    overhead: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """Result of a simulation."""

    makespan: float
    """Relative to islands that never fail and divide the work evenly."""
    wasted: float
    """Repeated images over the required images."""


def simulate(plan: Plan, seed: int = 0) -> Outcome:
    """Simulate event by event: islands take free experts, fail and return; an expert resumes from its last checkpoint.

    Speeds are log-normal (sigma 0.35), and one island in twenty runs at a quarter of its speed. After a failure the
    expert is free when its lease has expired.
    """
    rng = random.Random(seed)
    factors = [rng.lognormvariate(0, 0.35) * (0.25 if rng.random() < 0.05 else 1.0) for _ in range(plan.islands)]
    speeds = [plan.rate * factor for factor in factors]
    left = [plan.images] * plan.experts
    free = [(0.0, expert) for expert in range(plan.experts)]
    islands = [(0.0, island) for island in range(plan.islands)]
    heapq.heapify(free)
    heapq.heapify(islands)
    wasted = end = 0.0
    while free:
        now, island = heapq.heappop(islands)
        since, expert = heapq.heappop(free)
        start = max(now, since)
        needed = left[expert] / speeds[island] * plan.overhead
        fails = rng.expovariate(1 / plan.between_failures)
        if fails >= needed:
            end = max(end, start + needed)
            heapq.heappush(islands, (start + needed, island))
            continue
        done = fails / plan.overhead * speeds[island]
        kept = fails - fails % plan.publish_every if plan.publish_every else 0.0
        kept = kept / plan.overhead * speeds[island]
        wasted += done - kept
        left[expert] -= kept
        heapq.heappush(free, (start + fails + DURATION + MARGIN, expert))
        heapq.heappush(islands, (start + fails + plan.repair, island))
    ideal = plan.images * plan.experts / sum(speeds)
    return Outcome(end / ideal, wasted / (plan.images * plan.experts))


def rows(quick: bool) -> Iterator[Row]:
    measured = measure(quick)
    yield Row("traffic of an island / (its shards + a checkpoint + its result)", measured.traffic, 1.05, "lower")
    added = max(0.0, measured.shared - measured.local) / PUBLISH_EVERY
    yield Row("seconds that lease and one checkpoint add / 300 s between checkpoints", added, 0.02, "lower")
    share = measured.renewal / (DURATION / 3) + measured.upload / PUBLISH_EVERY
    yield Row("CPU of renewals (every 40 s) and checkpoints (every 300 s) / time", share, 0.02, "lower")
    yield Row(
        f"a job of {measured.local:.0f} s that publishes one checkpoint / the local job",
        measured.shared / measured.local,
    )
    yield Row("CPU milliseconds of one renewal", 1000 * measured.renewal)
    yield Row("CPU seconds of one published checkpoint of 145 MB", measured.upload)
    sizes = (8, 64, 512) if quick else (8, 16, 32, 64, 128, 256, 512)
    for islands in sizes:
        # Four experts per island, each one day of work at the measured rate.
        plan = Plan(islands, 4 * islands, 24 * HOUR * measured.rate, measured.rate, overhead=max(1.0, 1.0 + share))
        outcomes = [simulate(plan, seed) for seed in range(5 if quick else 20)]
        unpublished = [simulate(replace(plan, publish_every=0.0), seed) for seed in range(5 if quick else 20)]
        yield Row(f"{islands} islands: makespan / ideal", sum(outcome.makespan for outcome in outcomes) / len(outcomes))
        yield Row(
            f"{islands} islands: repeated work / work", sum(outcome.wasted for outcome in outcomes) / len(outcomes)
        )
        yield Row(
            f"{islands} islands: the same without published checkpoints",
            sum(outcome.wasted for outcome in unpublished) / len(unpublished),
        )


if __name__ == "__main__":
    run("Shared runs", rows)
