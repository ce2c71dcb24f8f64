"""Leases: one winner of every race, and no writes by a worker that lost its lease."""

import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from atoll.apps.share import lease_records, leases
from atoll.apps.share.lease_records import key_of, list_leases
from atoll.apps.share.leases import KEPT_EPOCHS, Lease, LeaseLost
from atoll.apps.share.store import Store
from atoll.core.errors import AtollError
from share import workers as workers  # sets up the forkserver that the processes below use
from share.servers import access
from share.shared import acquire, lease_of
from waiting import HOUR, Clock, wait_for

WRITERS, ROUNDS = 8, 100


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the margin: it covers clocks with a resolution of one second, and memory and files have finer ones."""
    monkeypatch.setattr(lease_records, "MARGIN", 0.1)


def pass_time(store: Store, seconds: float) -> None:
    """Let some seconds pass by the clock of a store, as its reader sees it."""
    store._clock = store.now() - time.monotonic() + seconds


def race(url: str, environment: dict[str, str], number: int, gate: Any, wins: Any) -> None:
    os.environ.update(environment)
    store = Store.open(url)
    for epoch in range(ROUNDS):
        if epoch % 10 == 0:
            gate.wait()  # keep the processes in step, or the first to start wins every round
        if store.create(key_of("experts/000", epoch), f"{number} {uuid4().hex}".encode()):
            wins.put((epoch, number))
    wins.put(None)


@pytest.mark.parametrize("store_url", ["file", "s3"], indirect=True)
def test_eight_processes_race_for_a_hundred_leases(store_url: str) -> None:
    context = multiprocessing.get_context("forkserver")
    gate, wins = context.Barrier(WRITERS), context.Queue()
    processes = [
        context.Process(target=race, args=(store_url, access(), number, gate, wins)) for number in range(WRITERS)
    ]
    for process in processes:
        process.start()
    found, ended = [], 0
    while ended < WRITERS:
        win = wins.get(timeout=HOUR)
        ended += win is None
        found += [win] if win else []
    for process in processes:
        process.join()
    winners = Counter(epoch for epoch, _ in found)
    assert winners == Counter(range(ROUNDS)), "not exactly one winner in every round"
    store = Store.open(store_url)
    for epoch, number in found:
        assert (store.read(key_of("experts/000", epoch)) or b"").startswith(f"{number} ".encode())


def test_a_lease_is_acquired_renewed_and_released(store: Store) -> None:
    first = acquire(store, "experts/003", HOUR, holder="a")
    assert Lease.acquire(store, "experts/003", HOUR, holder="b") is None
    first.set_pending(images=7)
    first.renew(total=100)
    lease_status = lease_of(store, "experts/003")
    assert (
        lease_status.record.epoch,
        lease_status.record.images,
        lease_status.record.total,
        lease_status.record.holder,
    ) == (1, 7, 100, "a")
    first.end("released")
    second = acquire(store, "experts/003", HOUR, holder="b")
    assert second.record.epoch == 3
    assert set(list_leases(store).leases) == {"experts/003"}


def test_a_stalled_holder_cannot_write_after_a_takeover() -> None:
    """After its lease has expired, it cannot renew or commit, neither before nor after the takeover."""
    store = Store.open(f"memory://{uuid4().hex}")
    clock = Clock()
    stalled = acquire(store, "experts/000", HOUR, holder="stalled", clock=clock)
    assert not stalled.lost
    assert Lease.acquire(store, "experts/000", HOUR, holder="other") is None
    clock.now += HOUR
    assert stalled.lost
    with pytest.raises(LeaseLost, match="expired before it could be renewed"):
        stalled.end("done", manifest="0" * 64)
    pass_time(store, HOUR + lease_records.MARGIN + 1)
    other = acquire(store, "experts/000", HOUR, holder="other")
    clock.now = 0.0  # even if its clock had stopped
    for act in (stalled.renew, lambda: stalled.end("done", manifest="0" * 64)):
        with pytest.raises(LeaseLost):
            act()
    other.end("done", manifest="1" * 64)
    lease_status = lease_of(store, "experts/000")
    assert (lease_status.record.holder, lease_status.record.manifest) == ("other", "1" * 64)


def test_recreating_a_deleted_epoch_does_not_revive_a_lease() -> None:
    store = Store.open(f"memory://{uuid4().hex}")
    sleeper = acquire(store, "experts/000", HOUR, holder="sleeper", clock=Clock())
    pass_time(store, HOUR + lease_records.MARGIN + 1)
    other = acquire(store, "experts/000", HOUR, holder="other")
    for _ in range(KEPT_EPOCHS + 3):
        other.renew()
    keys = [entry.key for entry in store.entries("leases")]
    assert len(keys) <= KEPT_EPOCHS + 1
    assert key_of("experts/000", 1) not in keys
    with pytest.raises(LeaseLost, match="another worker has taken it"):
        sleeper.end("done")
    assert not other.lost
    other.end("done")


def test_a_lease_is_renewed_in_the_background_while_the_store_responds(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = Store.open(f"memory://{uuid4().hex}"), Clock()
    lease = acquire(store, "experts/000", 0.3, holder="a", clock=clock)
    with lease:
        for _ in range(3):  # longer than its duration
            clock.now += 0.2
            # The second renewal from now on began after the clock was set.
            wait_for(lambda epoch=lease.record.epoch: lease.record.epoch >= epoch + 2)
            assert not lease.lost
        with monkeypatch.context() as patch:
            patch.setattr(Store, "create", silent)
            clock.now += 0.3
            assert lease.lost
    wait_for(lambda: Lease.acquire(store, "experts/000", HOUR, holder="b"))


def test_a_renewal_that_waited_for_the_end_does_not_reopen_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    store, create, renewals = Store.open(f"memory://{uuid4().hex}"), Store.create, list[Future[None]]()
    lease = acquire(store, "experts/000", HOUR)
    with ThreadPoolExecutor(1) as pool:

        def meanwhile(self: Store, key: str, data: bytes) -> bool:
            renewals.append(pool.submit(lease.renew))
            time.sleep(0.3)  # until the renewal waits for the lock that `end` holds
            return create(self, key, data)

        monkeypatch.setattr(Store, "create", meanwhile)
        lease.end("done")
        with pytest.raises(LeaseLost, match="has ended"):
            renewals[0].result()
    lease_status = lease_of(store, "experts/000")
    assert lease_status.record.state == "done"


def silent(self: Store, key: str, data: bytes) -> bool:
    raise AtollError("does not respond")


def test_the_age_of_a_lease_is_measured_by_the_clock_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong clock of the holder (by a day) neither shortens nor extends its lease."""
    store = Store.open(f"memory://{uuid4().hex}")
    true = time.time
    for wrong in (-86400, 86400):
        monkeypatch.setattr(leases.time, "time", lambda wrong=wrong: true() + wrong)
        lease = acquire(store, f"experts/{wrong % 7:03d}", HOUR, holder="wrong")
        assert Lease.acquire(store, lease.job, HOUR, holder="other") is None
        pass_time(store, HOUR + lease_records.MARGIN + 1)
        assert Lease.acquire(store, lease.job, HOUR, holder="other") is not None
        pass_time(store, -HOUR - lease_records.MARGIN - 1)


def test_a_job_that_failed_three_times_is_not_free() -> None:
    store = Store.open(f"memory://{uuid4().hex}")
    for failures in (1, 2, 3):
        lease = acquire(store, "experts/000", HOUR)
        lease.end("failed", why="it is broken", failures=failures)
    assert Lease.acquire(store, "experts/000", HOUR) is None


def test_control_characters_in_a_record_are_replaced() -> None:
    store = Store.open(f"memory://{uuid4().hex}")
    assert Lease.acquire(store, "experts/000", HOUR, holder="ann\x1b[2J\nbob") is not None
    lease_status = lease_of(store, "experts/000")
    assert lease_status.record.holder == "ann [2J bob"


def test_a_holder_without_progress_is_overtaken() -> None:
    """Its renewals go on, but the training loop hangs. Before the first image, it may be downloading."""
    store, clock = Store.open(f"memory://{uuid4().hex}"), Clock()
    hung = acquire(store, "experts/000", 86400, holder="hung", clock=clock)

    def renewed(seconds: float, **changes: int) -> bool:
        """Let time pass, renew, and return whether another worker could take over."""
        clock.now += seconds
        hung.set_pending(**changes)
        hung.renew()
        return lease_of(store, "experts/000").free

    assert not renewed(2 * lease_records.MAX_IDLE)
    assert not renewed(0, images=8)
    assert not renewed(lease_records.MAX_IDLE - 1, images=8)
    assert not renewed(lease_records.MAX_IDLE - 1, images=16)
    assert renewed(lease_records.MAX_IDLE + 1, images=16)
    assert acquire(store, "experts/000", HOUR).record.idle == 0
    with pytest.raises(LeaseLost):
        hung.renew()
