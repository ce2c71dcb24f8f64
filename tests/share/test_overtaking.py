"""Holders without progress can be overtaken, and the reasons of failures name nothing private."""

from pathlib import Path
from typing import Any

import pytest

from atoll.apps.share import lease_records
from atoll.apps.share.leases import Lease, LeaseLost
from atoll.apps.share.remote_run import Access
from atoll.apps.share.store import Store
from atoll.apps.share.worker import Worker, open_worker, public_reason
from share.shared import lease_of, person, remote
from waiting import HOUR

JOB = "experts/001"


def worker(shared: Store, folder: Path) -> Worker:
    return open_worker(shared.url, folder, Access(None, True, person("ann")))


def held(shared: Store, **changes: Any) -> Lease:
    lease = Lease.acquire(shared, JOB, HOUR, holder="slow", authority=remote(shared, by="ann"))
    assert lease is not None
    lease.set_pending(**changes)
    lease.renew()
    return lease


def test_a_holder_without_progress_is_overtaken(shared: Store, tmp_path: Path) -> None:
    """Its renewals go on, but the training loop hangs."""
    hung = held(shared, images=8, total=1000, rate=0.0)
    ann = worker(shared, tmp_path)
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
