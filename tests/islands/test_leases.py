"""Leases: one winner whoever races, and no word from whoever was overtaken."""

import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from atoll.core.errors import AtollError
from atoll.islands import leases
from atoll.islands.leases import KEPT, Lease, LeaseLost, key_of, look, survey
from atoll.islands.store import Store
from islands import workers as workers  # the processes of this test are forks of theirs
from islands.servers import access
from train.workers import wait_for

WRITERS, ROUNDS = 8, 200


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin covers clocks that tell whole seconds; memory and files tell more."""
    monkeypatch.setattr(leases, "MARGIN", 0.1)


def race(url: str, environment: dict[str, str], number: int, gate: Any, wins: Any) -> None:
    os.environ.update(environment)
    store = Store.open(url)
    for epoch in range(ROUNDS):
        if epoch % 10 == 0:
            gate.wait()  # keep them together, or the first to start wins everything
        if store.create(key_of("experts/000", epoch), f"{number} {uuid4().hex}".encode()):
            wins.put((epoch, number))
    wins.put(None)


@pytest.mark.parametrize("place", ["file", "s3"], indirect=True)
def test_eight_processes_race_for_two_hundred_leases(place: str) -> None:
    context = multiprocessing.get_context("forkserver")
    gate, wins = context.Barrier(WRITERS), context.Queue()
    processes = [context.Process(target=race, args=(place, access(), number, gate, wins)) for number in range(WRITERS)]
    for process in processes:
        process.start()
    found, ended = [], 0
    while ended < WRITERS:
        win = wins.get(timeout=120)
        ended += win is None
        found += [win] if win else []
    for process in processes:
        process.join()
    winners = Counter(epoch for epoch, _ in found)
    assert winners == Counter(range(ROUNDS)), "not exactly one winner in every round"
    store = Store.open(place)
    for epoch, number in found:
        assert (store.read(key_of("experts/000", epoch)) or b"").startswith(f"{number} ".encode())


def test_a_lease_is_taken_renewed_and_given_up(store: Store) -> None:
    first = Lease.take(store, "experts/003", 30, holder="a")
    assert first is not None
    assert Lease.take(store, "experts/003", 30, holder="b") is None
    first.tell(images=7)
    first.renew(total=100)
    seen = look(store, "experts/003")
    assert seen is not None
    assert (seen.record.epoch, seen.record.images, seen.record.total, seen.record.holder) == (1, 7, 100, "a")
    first.end("released")
    second = Lease.take(store, "experts/003", 30, holder="b")
    assert second is not None
    assert second.record.epoch == 3
    assert set(survey(store)) == {"experts/003"}


def test_a_silent_holder_is_overtaken_and_can_say_nothing_more() -> None:
    """It stalls past its lease: it cannot renew, move the pointer, or publish, before and after it is overtaken."""
    store = Store.open(f"memory://{uuid4().hex}")
    stalled = Lease.take(store, "experts/000", 2, holder="stalled")
    assert stalled is not None
    assert Lease.take(store, "experts/000", 5, holder="other") is None
    time.sleep(2.3)
    assert stalled.lost
    with pytest.raises(LeaseLost, match="ran out before it could be renewed"):
        stalled.end("done", manifest="0" * 64)
    other = Lease.take(store, "experts/000", 5, holder="other")
    assert other is not None
    stalled._deadline = time.monotonic() + 1000  # even if its clock stood still all the while
    for act in (stalled.renew, lambda: stalled.end("done", manifest="0" * 64)):
        with pytest.raises(LeaseLost):
            act()
    other.end("done", manifest="1" * 64)
    seen = look(store, "experts/000")
    assert seen is not None
    assert (seen.record.holder, seen.record.manifest) == ("other", "1" * 64)


def test_an_old_epoch_whose_key_was_removed_counts_nothing() -> None:
    store = Store.open(f"memory://{uuid4().hex}")
    sleeper = Lease.take(store, "experts/000", 0.1, holder="sleeper")
    assert sleeper is not None
    time.sleep(0.3)
    other = Lease.take(store, "experts/000", 1000, holder="other")
    assert other is not None
    for _ in range(KEPT + 3):
        other.renew()
    keys = [entry.key for entry in store.entries("leases")]
    assert len(keys) <= KEPT + 1
    assert key_of("experts/000", 1) not in keys
    sleeper._deadline = time.monotonic() + 1000
    with pytest.raises(LeaseLost, match="another worker has taken it"):
        sleeper.end("done")
    assert not other.lost
    other.end("done")


def test_a_lease_is_kept_by_itself_as_long_as_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(f"memory://{uuid4().hex}")
    lease = Lease.take(store, "experts/000", 3, holder="a")
    assert lease is not None
    with lease:
        wait_for(lambda: lease.record.epoch >= 4)  # it has outlived its own three seconds
        assert not lease.lost
        with monkeypatch.context() as patch:
            patch.setattr(Store, "create", silent)
            wait_for(lambda: lease.lost)
    wait_for(lambda: Lease.take(store, "experts/000", 5, holder="b"))


def test_a_renewal_that_waited_while_the_lease_ended_does_not_bring_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store, create, renewals = Store.open(f"memory://{uuid4().hex}"), Store.create, list[Future[None]]()
    lease = Lease.take(store, "experts/000", 30)
    assert lease is not None
    with ThreadPoolExecutor(1) as pool:

        def meanwhile(self: Store, key: str, data: bytes) -> bool:
            renewals.append(pool.submit(lease.renew))
            time.sleep(0.3)  # until it stands before the lock that `end` holds
            return create(self, key, data)

        monkeypatch.setattr(Store, "create", meanwhile)
        lease.end("done")
        with pytest.raises(LeaseLost, match="has ended"):
            renewals[0].result()
    seen = look(store, "experts/000")
    assert seen is not None
    assert seen.record.state == "done"


def silent(self: Store, key: str, data: bytes) -> bool:
    raise AtollError("does not answer")


def test_age_is_told_by_the_stores_clock_not_by_the_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder whose clock is a day wrong is neither overtaken early nor kept for ever."""
    store = Store.open(f"memory://{uuid4().hex}")
    true = time.time
    for wrong in (-86400, 86400):
        monkeypatch.setattr(leases.time, "time", lambda wrong=wrong: true() + wrong)
        lease = Lease.take(store, f"experts/{wrong % 7:03d}", 2, holder="wrong")
        assert lease is not None
        assert Lease.take(store, lease.job, 5, holder="other") is None
        time.sleep(2.3)
        assert Lease.take(store, lease.job, 5, holder="other") is not None


def test_a_job_that_failed_thrice_is_left_alone() -> None:
    store = Store.open(f"memory://{uuid4().hex}")
    for failures in (1, 2, 3):
        lease = Lease.take(store, "experts/000", 5)
        assert lease is not None
        lease.end("failed", why="it is broken", failures=failures)
    assert Lease.take(store, "experts/000", 5) is None


def test_what_a_holder_says_cannot_steer_a_terminal() -> None:
    store = Store.open(f"memory://{uuid4().hex}")
    assert Lease.take(store, "experts/000", 5, holder="ann\x1b[2J\nbob") is not None
    seen = look(store, "experts/000")
    assert seen is not None
    assert seen.record.holder == "ann [2J bob"
