"""`atoll train` holds the lease of its job, as launchers do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from atoll.apps.launch.train_lease import LeaseCallback
from atoll.apps.share.lease_records import Record, get_lease
from atoll.apps.share.leases import Lease
from atoll.apps.share.store import Store
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.train import resolve_job, train_job
from atoll.train.loop import Requeue
from launch.slurm import wait_for
from train.conftest import Copy
from train.workers import finish, start

JOB = "experts/000"


def record(run: Path) -> Record:
    found = get_lease(Store.open(run), JOB)
    assert found is not None, "there is no lease"
    return found.record


@contextmanager
def endless_training(run: Path) -> Iterator[BaseProcess]:
    """Train the job in another process, which is killed at the end."""
    process = start(run, "--expert", "0", "--train.total_images", "100000000")
    try:
        metrics = run / JOB / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, "it trains")
        yield process
    finally:
        process.kill()
        process.join()


def test_a_job_is_trained_once_at_a_time_and_a_killed_one_does_not_block_the_next(new_run: Copy) -> None:
    run = new_run(train={"save_every": 10**9})
    with endless_training(run) as first:
        assert finish(run, "--expert", "0") == 2
        assert f"{JOB} is being trained by {os.uname().nodename}:{first.pid}" in (run / "log.txt").read_text()
        assert finish(run, "--expert", "1") == 0, "another job is free"
        assert first.is_alive()
    assert record(run).state == "held"
    assert finish(run, "--expert", "0") == 0
    made = Artifact(run, f"{JOB}/final").manifest()
    assert made is not None
    assert (record(run).state, record(run).manifest, record(run).images) == ("done", made.digest, 160)


def test_a_stopped_job_releases_its_lease(new_run: Copy) -> None:
    run = new_run()
    with endless_training(run) as first:
        first.terminate()
        first.join()
        assert (first.exitcode, record(run).state) == (75, "released")


def test_a_job_that_loses_its_lease_saves_and_stops(new_run: Copy) -> None:
    run = new_run()
    lease = Lease.acquire(Store.open(run), JOB, duration=1e-9)  # expired at once, and never renewed
    assert lease is not None
    spec = resolve_job(run, config.load(run), "expert", expert=0)
    with pytest.raises(Requeue, match="saved at 8 images"):
        train_job(spec, LeaseCallback(lease, spec.settings.total_images))
