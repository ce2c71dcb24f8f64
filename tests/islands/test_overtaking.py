"""Holders without progress, and slow ones: who may take over, and who may not."""

from pathlib import Path
from typing import Any

import pytest

from atoll.islands import lease_records
from atoll.islands.leases import Lease, LeaseLost
from atoll.islands.remote_run import Access
from atoll.islands.store import Store
from atoll.islands.worker import Worker, open_worker, public_reason
from islands.shared import lease_of, person, remote

JOB = "experts/001"


def worker(shared: Store, folder: Path, rate: float) -> Worker:
    made = open_worker(shared.url, folder, Access(None, True, person("ann")))
    made._rate = rate
    return made


def held(shared: Store, **changes: Any) -> Lease:
    lease = Lease.acquire(shared, JOB, 60, holder="slow", authority=remote(shared, by="ann"))
    assert lease is not None
    lease.set_pending(**changes)
    lease.renew()
    return lease


@pytest.mark.parametrize(
    ("rate", "images", "published", "taken"),
    [
        (2.0, 100, 100, True),  # half of the time: 450 s instead of 900 s
        (1.9, 100, 100, False),
        (10.0, 100, 0, True),
        (2.0, 100, 0, False),  # it would repeat 100 images
        (1000.0, 1000, 0, False),  # it has finished, and publishes
        (0.0, 0, 0, False),  # this worker has not measured its speed yet
    ],
)
def test_a_much_faster_worker_takes_over_from_the_last_checkpoint(
    shared: Store, tmp_path: Path, rate: float, images: int, published: int, taken: bool
) -> None:
    slow = held(shared, images=images, published=published, total=1000, rate=1.0)
    lease, unfinished = worker(shared, tmp_path, rate)._acquire_any(1)
    assert unfinished
    assert (lease is not None) is taken
    if lease is not None:
        assert (lease.record.published, lease.record.total) == (published, 1000)
        with pytest.raises(LeaseLost, match="another worker has taken it"):
            slow.renew()
    else:
        slow.renew()
        assert lease_of(shared, JOB).record.holder == "slow"


def test_a_lease_under_review_is_not_taken_by_a_fast_worker(shared: Store, tmp_path: Path) -> None:
    held(shared, images=1, published=1, total=1000, rate=1.0, manifest="1" * 64)
    assert worker(shared, tmp_path, 1e6)._acquire_any(1)[0] is None


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
