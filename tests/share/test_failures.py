"""Failures at bad moments: lost responses, interrupted workers, killed reviewers."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from atoll.apps.share import lease_records
from atoll.apps.share import worker as join
from atoll.apps.share.admit import admit
from atoll.apps.share.checkpoint_publisher import CheckpointPublisher
from atoll.apps.share.lease_records import get_lease
from atoll.apps.share.leases import Lease
from atoll.apps.share.remote_run import Access
from atoll.apps.share.store import Store
from atoll.apps.share.worker import Worker, open_worker
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.train import TrainSpec
from atoll.train.loop import stop_signals
from share.shared import acquire, lease_of, person, publishers, remote, share
from train.conftest import Copy
from waiting import HOUR, Clock, wait_for

JOB = "experts/000"
POINTER = f"{JOB}/checkpoints/{'0' * 16}@{'1' * 64}"
Create = Callable[[Store, str, bytes], bool]


@pytest.fixture
def store() -> Store:
    return Store.open(f"memory://{uuid4().hex}")


def held(store: Store, seconds: float = HOUR, **news: Any) -> Lease:
    lease = acquire(store, JOB, seconds, holder="a", clock=Clock())
    lease.renew(**news)
    return lease


def at_the_next_record(monkeypatch: pytest.MonkeyPatch, act: Callable[[Create, Store, str, bytes], bool]) -> None:
    """Call `act` once instead of the next `Store.create`."""
    create = Store.create

    def once(self: Store, key: str, data: bytes) -> bool:
        monkeypatch.setattr(Store, "create", create)
        return act(create, self, key, data)

    monkeypatch.setattr(Store, "create", once)


def fails(create: Create, store: Store, key: str, data: bytes) -> bool:
    raise AtollError("does not respond")


def test_the_values_of_a_failed_end_are_not_written_by_the_next_renewal(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = held(store, checkpoint=POINTER, images=7)
    at_the_next_record(monkeypatch, fails)
    with pytest.raises(AtollError, match="does not respond"):
        lease.end("done", manifest="0" * 64, checkpoint=None)
    lease.renew()
    lease_status = lease_of(store, JOB)
    assert (lease_status.record.state, lease_status.record.checkpoint, lease_status.record.manifest) == (
        "held", POINTER, None,
    )  # fmt: skip


def test_a_record_whose_response_was_lost_is_recognized(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def arrives(create: Create, store: Store, key: str, data: bytes) -> bool:
        assert create(store, key, data)
        raise AtollError("does not respond")

    lease = held(store)
    at_the_next_record(monkeypatch, arrives)
    with pytest.raises(AtollError, match="does not respond"):
        lease.renew(images=3)
    lease.renew(images=5)
    lease.end("released")
    lease_status = lease_of(store, JOB)
    assert (lease_status.record.state, lease_status.record.images, lease_status.record.epoch) == ("released", 5, 4)


def test_another_worker_may_acquire_a_lease_right_after_its_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def followed(create: Create, store: Store, key: str, data: bytes) -> bool:
        assert create(store, key, data)
        return Lease.acquire(store, JOB, HOUR, holder="next") is not None

    lease = held(store)
    at_the_next_record(monkeypatch, followed)
    lease.end("released")
    assert lease.record.state == "released"
    lease_status = lease_of(store, JOB)
    assert (lease_status.record.holder, lease_status.record.epoch) == ("next", lease.record.epoch + 1)


def test_renewal_continues_after_any_error_of_the_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(create: Create, store: Store, key: str, data: bytes) -> bool:
        raise OSError("stale file handle")

    with held(store, 0.3) as lease:
        at_the_next_record(monkeypatch, stale)
        wait_for(lambda: lease.record.epoch >= 4)
        assert not lease.lost


def test_a_lease_is_acquired_only_at_the_given_epoch(store: Store) -> None:
    lease = held(store)
    before = get_lease(store, JOB)
    lease.renew()
    assert Lease.acquire(store, JOB, HOUR, holder="b", over=before) is None
    assert Lease.acquire(store, JOB, HOUR, holder="b", over=get_lease(store, JOB)) is not None


# Contributors


@pytest.fixture
def worker(new_run: Copy, tmp_path: Path, store: Store) -> Worker:
    """A worker of a run whose owner admits contributions."""
    share(new_run(), store, publishers=publishers("ann"))
    return open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")), duration=HOUR)


def test_a_second_interrupt_is_not_counted_as_a_failure(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C arrives while a checkpoint waits to be published."""

    def interrupted(job: TrainSpec, publisher: CheckpointPublisher) -> None:
        publisher._waiting = Artifact(job.run, f"{job.job}/checkpoints/000000000032")
        monkeypatch.setattr(Artifact, "manifest", lambda _: object())
        raise KeyboardInterrupt

    monkeypatch.setattr(join, "train_job", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.run(expert=0)
    lease_status = lease_of(worker.store, JOB)
    assert (lease_status.record.state, lease_status.record.failures) == ("held", 0)


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), AtollError("no space left"), OSError("read-only")])
def test_a_contribution_stays_proposed_if_its_review_fails(
    worker: Worker, trouble: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.run(expert=0) == 1
    owner = remote(worker.store, by="owner")

    def broken(*_: Any, **options: Any) -> None:
        raise trouble

    with monkeypatch.context() as patch:
        patch.setattr("atoll.apps.share.admit.review", broken)
        with pytest.raises(type(trouble)):
            admit(owner, tmp_path / "o")
    lease_status = lease_of(worker.store, JOB)
    assert lease_status.record.state == "proposed"
    assert admit(owner, tmp_path / "o") == {JOB: "admitted"}


def test_a_contribution_whose_reviewer_was_killed_is_reviewed_again(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_records, "MARGIN", 0.0)
    assert worker.run(expert=0) == 1
    owner = remote(worker.store, by="owner")
    waiting = get_lease(worker.store, JOB)
    acquire(worker.store, JOB, 0.1, holder="admission", over=waiting, authority=owner)
    wait_for(lambda: (lease_status := get_lease(worker.store, JOB)) is not None and lease_status.expired)
    worker._skipped.clear()
    lease, unfinished = worker._acquire_any(0)
    assert (lease, unfinished) == (None, True), "it must not be trained again"
    assert admit(owner, tmp_path / "o") == {JOB: "admitted"}


def test_checkpoints_written_after_the_end_of_the_lease_are_kept(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, end = f"{JOB}/checkpoints/{'0' * 16}/sha256/{'1' * 64}", Lease.end

    def slept(self: Lease, *options: Any, **news: Any) -> None:
        end(self, *options, **news)
        self.store.write(later, b"")

    monkeypatch.setattr(Lease, "end", slept)
    assert worker.run(expert=0) == 1
    kept = [entry.key for entry in worker.store.entries(f"{JOB}/checkpoints") if "/signatures/" not in entry.key]
    assert kept == [later]


def test_a_signal_during_the_last_save_reaches_the_previous_handler() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with stop_signals() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop == [signal.SIGTERM]
            assert received == []
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
