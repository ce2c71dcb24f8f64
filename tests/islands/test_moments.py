"""Things that happen at a bad moment: answers that get lost, people who leave, machines that stop in between."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.signing import Signer
from atoll.islands import admission, leases
from atoll.islands import worker as join
from atoll.islands.checkpoint_publisher import Reporter
from atoll.islands.leases import Lease, look
from atoll.islands.remote_run import admit, push
from atoll.islands.store import Store
from atoll.islands.worker import Worker, open_worker
from atoll.train import TrainSpec
from atoll.train.loop import stop_signals
from train.conftest import Copy
from train.workers import wait_for

JOB = "experts/000"
POINTER = f"{JOB}/checkpoints/{'0' * 16}@{'1' * 64}"
Create = Callable[[Store, str, bytes], bool]


@pytest.fixture
def store() -> Store:
    return Store.open(f"memory://{uuid4().hex}")


def held(store: Store, seconds: float = 60, **news: Any) -> Lease:
    lease = Lease.take(store, JOB, seconds, holder="a")
    assert lease is not None
    lease.renew(**news)
    return lease


def at_the_next_record(monkeypatch: pytest.MonkeyPatch, act: Callable[[Create, Store, str, bytes], bool]) -> None:
    """Whatever `act` does happens once, instead of creating a key."""
    create = Store.create

    def once(self: Store, key: str, data: bytes) -> bool:
        monkeypatch.setattr(Store, "create", create)
        return act(create, self, key, data)

    monkeypatch.setattr(Store, "create", once)


def fails(create: Create, store: Store, key: str, data: bytes) -> bool:
    raise AtollError("does not answer")


def test_an_end_that_failed_is_not_told_by_the_next_renewal(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = held(store, checkpoint=POINTER, images=7)
    at_the_next_record(monkeypatch, fails)
    with pytest.raises(AtollError, match="does not answer"):
        lease.end("done", manifest="0" * 64, checkpoint=None)
    lease.renew()
    seen = look(store, JOB)
    assert seen is not None
    assert (seen.record.state, seen.record.checkpoint, seen.record.manifest) == (
        "held", POINTER, None,
    )  # fmt: skip


def test_a_record_whose_answer_got_lost_is_still_ours(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def arrives(create: Create, store: Store, key: str, data: bytes) -> bool:
        assert create(store, key, data)
        raise AtollError("does not answer")

    lease = held(store)
    at_the_next_record(monkeypatch, arrives)
    with pytest.raises(AtollError, match="does not answer"):
        lease.renew(images=3)
    lease.renew(images=5)
    lease.end("released")
    seen = look(store, JOB)
    assert seen is not None
    assert (seen.record.state, seen.record.images, seen.record.epoch) == ("released", 5, 4)


def test_whoever_ends_a_lease_may_be_followed_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def followed(create: Create, store: Store, key: str, data: bytes) -> bool:
        assert create(store, key, data)
        return Lease.take(store, JOB, 60, holder="next") is not None

    lease = held(store)
    at_the_next_record(monkeypatch, followed)
    lease.end("released")
    assert lease.record.state == "released"
    seen = look(store, JOB)
    assert seen is not None
    assert (seen.record.holder, seen.record.epoch) == ("next", lease.record.epoch + 1)


def test_no_error_of_a_store_ends_renewal(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(create: Create, store: Store, key: str, data: bytes) -> bool:
        raise OSError("stale file handle")

    with held(store, 3) as lease:
        at_the_next_record(monkeypatch, stale)
        wait_for(lambda: lease.record.epoch >= 4)
        assert not lease.lost


def test_clearing_up_that_fails_undoes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "KEPT", 1)
    lease = held(store)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", lambda self, _: fails(Store.create, self, "", b""))
        lease.end("done")
    seen = look(store, JOB)
    assert seen is not None
    assert seen.record.state == "done"


def test_only_what_was_looked_at_is_taken(store: Store) -> None:
    lease = held(store)
    assert Lease.take(store, JOB, 60, holder="b", state=("held",), epoch=lease.record.epoch - 1) is None
    assert Lease.take(store, JOB, 60, holder="b", state=("held",), epoch=lease.record.epoch) is not None


# Contributors


@pytest.fixture
def worker(new_run: Copy, tmp_path: Path, store: Store) -> Worker:
    """On a run whose owner lets contributions in."""
    owner = Signer.open(tmp_path / "owner.pem")
    run = new_run()
    (run / "policy.json").write_text(json.dumps({"admitters": {"owner": owner.public}}))
    push(run, store)
    return open_worker(store.url, tmp_path / "a", signer=Signer.open(tmp_path / "ann.pem"), duration=2.0)


def test_leaving_without_publishing_is_no_failure(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C, while a checkpoint waits to be published."""

    def interrupted(job: TrainSpec, reporter: Reporter) -> None:
        reporter._waiting = Artifact(job.run, f"{job.job}/checkpoints/000000000032")
        monkeypatch.setattr(Artifact, "manifest", lambda _: object())
        raise KeyboardInterrupt

    monkeypatch.setattr(join, "train_job", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.run(expert=0)
    seen = look(worker.store, JOB)
    assert seen is not None
    assert (seen.record.state, seen.record.failures) == ("held", 0)


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), AtollError("no space left"), OSError("read-only")])
def test_a_contribution_that_could_not_be_judged_waits_on(
    worker: Worker, trouble: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.run(expert=0) == 1
    owner = Signer.open(tmp_path / "owner.pem")

    def broken(*_: Any, **options: Any) -> None:
        raise trouble

    with monkeypatch.context() as patch:
        patch.setattr(admission, "review", broken)
        with pytest.raises(type(trouble)):
            admit(worker.store, tmp_path / "o", owner)
    seen = look(worker.store, JOB)
    assert seen is not None
    assert seen.record.state == "proposed"
    assert admit(worker.store, tmp_path / "o", owner) == {JOB: "admitted"}


def test_a_contribution_whose_judge_was_killed_is_judged_by_the_next(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MARGIN", 0.0)
    assert worker.run(expert=0) == 1
    killed = Lease.take(worker.store, JOB, 0.1, holder="admission", state=("proposed",))
    assert killed is not None
    wait_for(lambda: (seen := look(worker.store, JOB)) is not None and seen.expired)
    worker._over.clear()
    lease, unfinished = worker._take(0)
    assert (lease, unfinished) == (None, True), "it must not be trained again"
    assert admit(worker.store, tmp_path / "o", Signer.open(tmp_path / "owner.pem")) == {JOB: "admitted"}


def test_what_came_after_the_lease_ended_is_left_alone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    later, end = f"{JOB}/checkpoints/{'0' * 16}/sha256/{'1' * 64}", Lease.end

    def slept(self: Lease, *how: Any, **news: Any) -> None:
        end(self, *how, **news)
        self.store.write(later, b"")

    monkeypatch.setattr(Lease, "end", slept)
    assert worker.run(expert=0) == 1
    assert [entry.key for entry in worker.store.entries(f"{JOB}/checkpoints")] == [later]


def test_a_signal_during_the_last_save_reaches_whoever_waited_for_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with stop_signals() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop == [signal.SIGTERM]
            assert heard == []
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
