"""Holders without progress, and slow ones: who may take over, and who may not."""

import os
from pathlib import Path
from typing import Any

import pytest

from atoll.apps.share import lease_records
from atoll.apps.share.lease_records import key_of
from atoll.apps.share.leases import Lease, LeaseLost
from atoll.apps.share.remote_run import Access
from atoll.apps.share.store import Store
from atoll.apps.share.worker import Worker, open_worker, public_reason
from atoll.verify.trust import Network
from share.conftest import Published
from share.shared import lease_of, person, remote
from waiting import HOUR

JOB = "experts/001"


def worker(shared: Store, folder: Path, rate: float) -> Worker:
    made = open_worker(shared.url, folder, Access(None, True, person("ann")))
    made._rate = rate
    return made


def held(shared: Store, **changes: Any) -> Lease:
    lease = Lease.acquire(shared, JOB, HOUR, holder="slow", authority=remote(shared, by="ann"))
    assert lease is not None
    lease.set_pending(**changes)
    lease.renew()
    return lease


@pytest.fixture
def on_disk(pushed: dict[str, bytes], tmp_path: Path) -> Store:
    """A shared run in a folder, where a test can set the times of records."""
    store = Store.open(tmp_path / "store")
    for name, data in pushed.items():
        store.write(name, data)
    return store


def set_distance(store: Store, epoch: int, seconds: float, job: str = JOB) -> None:
    """Let the store have a record for some seconds longer than the one after it."""
    assert store.path is not None
    next_one = (store.path / key_of(job, epoch + 1)).stat().st_mtime
    os.utime(store.path / key_of(job, epoch), (next_one - seconds,) * 2)


@pytest.mark.parametrize("declared", [0.0, 0.001, 1.0, 1e9])
@pytest.mark.parametrize(
    ("rate", "images", "published", "taken"),
    [
        (2.1, 100, 100, True),  # half of the time: 450 s instead of 900 s
        (1.9, 100, 100, False),
        (10.0, 100, 0, True),
        (2.0, 100, 0, False),  # it would repeat 100 images
        (1000.0, 1000, 0, False),  # it has finished, and publishes
        (0.0, 0, 0, False),  # this worker has not measured its speed yet
    ],
)
def test_a_much_faster_worker_takes_over_from_the_last_checkpoint(
    on_disk: Store, tmp_path: Path, rate: float, images: int, published: int, taken: bool, declared: float
) -> None:
    """The store shows 100 images in 100 seconds, or 1,000 in 1,000, whatever rate the holder declares."""
    slow = held(on_disk, images=images, published=published, total=1000, rate=declared)
    set_distance(on_disk, 0, max(images, 1))
    lease, unfinished = worker(on_disk, tmp_path, rate)._acquire_any(1)
    assert unfinished
    assert (lease is not None) is taken
    if lease is not None:
        assert (lease.record.published, lease.record.total) == (published, 1000)
        with pytest.raises(LeaseLost, match="another worker has taken it"):
            slow.renew()
    else:
        slow.renew()
        assert lease_of(on_disk, JOB).record.holder == "slow"


def test_the_speed_of_a_holder_is_not_measured_over_few_seconds(on_disk: Store, tmp_path: Path) -> None:
    """Stores round times to seconds, so two records close to each other show no speed."""
    held(on_disk, images=1, published=1, total=1000, rate=0.001)
    set_distance(on_disk, 0, lease_records.MIN_MEASURED - 1)
    assert lease_of(on_disk, JOB).rate == 0
    assert worker(on_disk, tmp_path, 1e6)._acquire_any(1)[0] is None
    set_distance(on_disk, 0, lease_records.MIN_MEASURED + 1)
    assert lease_of(on_disk, JOB).rate == pytest.approx(1 / (lease_records.MIN_MEASURED + 1), rel=0.01)
    assert worker(on_disk, tmp_path, 1e6)._acquire_any(1)[0] is not None


def slow_lease(published: Published, store: Store, job: str) -> None:
    """Let Ann hold a lease, and train ten images in a hundred seconds."""
    published.copy(store)
    slow = Lease.acquire(store, job, HOUR, holder="slow", authority=remote(store, by="ann"))
    assert slow is not None
    slow.renew(images=10, published=10, total=1000)
    set_distance(store, 0, 100, job)


def fast_worker(store: Store, folder: Path, who: str) -> Worker:
    fast = open_worker(store.url, folder, Access(None, True, person(who)))
    fast._rate = 1e6
    return fast


@pytest.mark.parametrize(
    ("who", "admitted", "taken"), [("bob", False, False), ("bob", True, True), ("owner", False, True)]
)
def test_a_live_lease_of_another_key_is_taken_only_by_those_who_have_trained(
    published: Published, tmp_path: Path, who: str, admitted: bool, taken: bool
) -> None:
    """Bob may publish the expert, but nobody can check how fast he is: an admitted network must show that he trains."""
    job, store = "experts/002", Store.open(tmp_path / "store")
    slow_lease(published, store, job)
    if admitted:
        network = Network(manifest="1" * 64, weights="2" * 64, publisher=person(who).public)
        remote(store, by="owner").write_snapshot({"experts/001": network})
    assert (fast_worker(store, tmp_path / who, who)._acquire_any(2)[0] is not None) is taken
    assert lease_of(store, job).record.key == person(who if taken else "ann").public


def test_a_live_lease_of_another_key_is_taken_only_once(published: Published, tmp_path: Path) -> None:
    """Bob trains, takes the lease, gives it back, and cannot take it from Ann again."""
    job, store = "experts/002", Store.open(tmp_path / "store")
    slow_lease(published, store, job)
    network = Network(manifest="1" * 64, weights="2" * 64, publisher=person("bob").public)
    remote(store, by="owner").write_snapshot({"experts/001": network})
    bob = fast_worker(store, tmp_path / "bob", "bob")
    lease, _ = bob._acquire_any(2)
    assert lease is not None
    lease.end("released")
    again = Lease.acquire(store, job, HOUR, holder="slow", authority=remote(store, by="ann"))
    assert again is not None
    again.renew(images=20, published=20, total=1000)
    set_distance(store, again.record.epoch - 1, 100, job)
    assert bob._acquire_any(2)[0] is None
    assert lease_of(store, job).record.key == person("ann").public


def test_a_lease_under_review_is_not_taken_by_a_fast_worker(on_disk: Store, tmp_path: Path) -> None:
    held(on_disk, images=1, published=1, total=1000, rate=1.0, manifest="1" * 64)
    set_distance(on_disk, 0, 100)
    assert worker(on_disk, tmp_path, 1e6)._acquire_any(1)[0] is None


def test_a_holder_without_progress_is_overtaken(shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its renewals go on, but the training loop hangs."""
    hung = held(shared, images=8, total=1000, rate=0.0)
    ann = worker(shared, tmp_path, 0.0)
    assert ann._acquire_any(1)[0] is None
    assert hung._progressed is not None
    hung._progressed -= lease_records.MAX_IDLE + 1
    hung.renew()
    assert lease_of(shared, JOB).record.idle > lease_records.MAX_IDLE
    lease, _ = ann._acquire_any(1)
    assert lease is not None
    assert lease.record.idle == 0
    with pytest.raises(LeaseLost):
        hung.renew()


def test_a_holder_that_trains_or_downloads_is_not_idle(shared: Store) -> None:
    lease = held(shared)
    assert lease.record.idle == 0
    assert lease._progressed is None, "no image was trained yet: it may be downloading"
    lease.set_pending(images=8)
    before = lease._progressed
    lease.set_pending(images=8)
    assert lease._progressed == before
    lease.set_pending(images=16)
    assert before is not None
    assert lease._progressed is not None
    assert lease._progressed >= before


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("CUDA out of memory on node-17 (/home/ann/x)"), "RuntimeError; the contributor has the details"),
    ],
)
def test_reasons_in_leases_have_no_texts_of_other_libraries(error: Exception, reason: str) -> None:
    assert public_reason(error) == reason


@pytest.mark.parametrize(
    "path", ["/home/ann/run", "~/run", "./run/x", "../x", "C:\\Users\\ann", "\\\\host\\share\\x", "/data/a b"]
)
def test_reasons_in_leases_have_no_paths(path: str) -> None:
    from atoll.core.errors import AtollError

    reason = public_reason(AtollError(f"{path}: no space left; delete files of '{path}' (or {path})\n{path}"))
    assert "no space left" in reason
    for part in ("ann", "run", "Users", "host", "share", "data"):
        assert part not in reason
