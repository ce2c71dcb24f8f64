"""Leases decide which worker trains which job. Each job has one key per epoch; a key is created once and never changed.

    leases/experts/003/000017       holder, state, progress, last published checkpoint

How it works. An *epoch* is the number of a record. The valid record with the highest one is the current record.
To acquire, renew or end a lease, a worker creates the key of the next epoch. The store guarantees that exactly one of
several concurrent creates succeeds (`Store.create`), so each epoch has exactly one author.

Takeover. A record in state `held` expires when it is older than its `duration` plus `MARGIN`. Any worker may then make
the next epoch with itself as the holder; it copies progress, overrides and the pointer to the last checkpoint. If the
old holder wakes up, the key of its next epoch is taken: it can no longer renew, move the checkpoint pointer, or commit
the job as `done`. This holds without synchronized clocks. Clocks only decide when a takeover may start: the age of a
record is measured with the clock of the store. The holder measures with its own monotonic clock, starting before its
request, so it stops no later than others may take over.

Nonce. Each acquisition draws a random `nonce`, and all renewals keep it. If a create succeeded but its response was
lost, the retry finds the key taken. The worker recognizes its own record by the nonce and continues.

Progress. The holder writes for how long it has trained no image. After `MAX_IDLE` others may take over, although the
lease is renewed: the thread that renews it can outlive a training loop that hangs.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from pydantic import ValidationError

from atoll.apps.share.lease_records import (
    LAST_EPOCH,
    MAX_WHY,
    LeaseState,
    LeaseStatus,
    Record,
    get_lease,
    key_of,
    list_keys,
    new_name,
)
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.store import Store
from atoll.core import layout
from atoll.core.artifacts import to_json
from atoll.core.errors import AtollError, wrong_fields

# A compromise, not a measurement: a dead worker delays its expert by two minutes, and a live one writes a record every
# 40 seconds (three renewals per duration, so two in a row may fail).
DURATION = 120.0
"""Seconds without renewal after which another worker may take over."""
# Readers list the keys first and read the newest one afterwards. With 16 epochs they have ten minutes
# (at the default duration) before the listed key is deleted.
KEPT_EPOCHS = 16
"""Number of epochs that stay in the store; the holder deletes older keys."""
_KEPT = {"checkpoint", "images", "published", "total", "manifest", "failures"}
"""Fields of a record that the next holder takes over."""


class LeaseLost(Exception):  # noqa: N818 - not an error: another worker continues
    """Another worker has taken over the job, or this one did not renew in time."""


def _validated(**values: Any) -> Record:
    """Return a record of this worker; raise an error before writing one that other workers would reject."""
    try:
        return Record.model_validate(values | {"why": str(values.get("why", ""))[:MAX_WHY]})
    except ValidationError as error:
        raise AtollError(f"these values cannot be written into a lease: {wrong_fields(error)[:MAX_WHY]}") from error


class Lease:
    """A lease that this worker holds. As a context manager, a background thread renews it until it ends or is lost."""

    def __init__(
        self,
        store: Store,
        job: str,
        record: Record,
        *,
        since: float,
        authority: RemoteRun | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.job, self.record, self.authority, self._clock = store, job, record, authority, clock
        self._progressed: float | None = None  # time of the last trained image; None before the first one
        self._deadline = since + record.duration
        self._pending: dict[str, Any] = {}
        self._lost = ""
        self._renew_lock, self._pending_lock = threading.Lock(), threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._renew_in_background, name=f"lease {job}", daemon=True)

    @classmethod
    def acquire(
        cls,
        store: Store,
        job: str,
        duration: float = DURATION,
        *,
        holder: str | None = None,
        overrides: dict[str, str] | None = None,
        over: LeaseStatus | None = None,
        authority: RemoteRun | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Lease | None":
        """Acquire a job that is free; return None if it is not, or on a lost race.

        With `over`, take it from this record in whatever state, unless there is a newer one. `clock` measures for how
        long this worker may hold the lease.
        """
        current = get_lease(store, job, authority=authority)
        before = current.record if current else None
        if before != over.record if over else current is not None and not current.free:
            return None
        if before is not None and before.epoch == LAST_EPOCH:
            return None
        since = clock()
        record = _validated(
            epoch=before.epoch + 1 if before else 0,
            state="held",
            holder=holder or new_name(),
            nonce=uuid4().hex,
            duration=duration,
            overrides=before.overrides if before and before.checkpoint else overrides or {},
            **before.model_dump(include=_KEPT) if before else {},
        )
        lease = cls(store, job, record, since=since, authority=authority, clock=clock)
        written = lease._create_record(record)
        if written is None:
            return None
        lease.record = written  # its epoch is higher if keys were occupied
        return lease

    @property
    def lost(self) -> bool:
        """Whether another worker holds the job, or may hold it by now."""
        return not self._ended and (bool(self._lost) or self._clock() >= self._deadline)

    def check(self) -> None:
        """Raise `LeaseLost` unless this worker holds the job."""
        if self.lost:
            raise LeaseLost(f"{self.job}: {self._lost or 'the lease expired before it could be renewed'}")

    def set_pending(self, **changes: Any) -> None:
        """Set fields of the record, to be written with the next renewal."""
        with self._pending_lock:
            if changes.get("images", 0) > self._pending.get("images", 0):
                self._progressed = self._clock()
            self._pending |= changes

    def renew(self, **changes: Any) -> None:
        """Create the record of the next epoch with all pending changes; raise `LeaseLost` if another worker did."""
        self._advance("held", changes)

    def end(self, state: LeaseState, **changes: Any) -> None:
        """Give up the job, finished or not. Only the holder can create this record."""
        self._advance(state, changes)
        self._wake.set()

    def _advance(self, state: LeaseState, changes: dict[str, Any]) -> None:
        with self._renew_lock:
            if self._ended:  # a renewal that waited for the lock while `end` ran must not reopen the lease
                raise LeaseLost(f"{self.job}: the lease has ended")
            self.check()
            since = self._clock()
            with self._pending_lock:
                values = {**self.record.model_dump(), **self._pending, **changes}
            idle = 0.0 if self._progressed is None else since - self._progressed
            values |= {"state": state, "epoch": self.record.epoch + 1, "idle": max(0.0, idle)}
            newest = self._newest()
            taken = newest is not None and newest.nonce != self.record.nonce
            record = None if taken else self._create_record(_validated(**values))
            if record is None:
                self._lost = "another worker has taken it"
                raise LeaseLost(f"{self.job}: {self._lost}")
            self.record, self._deadline = record, since + record.duration
            self._ended = self._ended or state != "held"
            # Only accepted values become pending. Otherwise the renewal after a failed `end` would publish them.
            with self._pending_lock:
                self._pending |= changes
        with suppress(Exception):  # keys that stay are harmless
            keys = list_keys(self.store, layout.leases(self.job)).get(self.job, {})
            old = [key_of(self.job, epoch) for epoch in keys if epoch <= self.record.epoch - KEPT_EPOCHS]
            self.store.delete(sorted(old))

    def _create_record(self, record: Record) -> Record | None:
        """Create a record and return it as written; return None if another worker holds the job.

        If the key exists, there are three cases. With our nonce, an earlier create succeeded and its response was lost:
        continue with the next epoch. An object that is no valid record is skipped in the same way. Any other record is
        a takeover.

        A successful create is not proof: a worker that slept for more than `KEPT_EPOCHS` epochs can create a key that
        the new holder has deleted. So our record must be the current one, before (`_advance`) and afterwards. A record
        that ends the lease may have a successor: another worker may acquire the job immediately.
        """
        while True:
            if self.authority is not None:
                signature = self.authority.sign("lease", self.job, record.digest)
                record = record.model_copy(update={"signature": signature})
            if self.store.create(key_of(self.job, record.epoch), to_json(record.model_dump(mode="json"))):
                break
            newest = self._newest()
            if newest is not None and newest.epoch >= record.epoch and newest.nonce != record.nonce:
                return None
            keys = list_keys(self.store, layout.leases(self.job)).get(self.job, {})
            epoch = next(epoch for epoch in count(record.epoch + 1) if epoch not in keys)
            record = _validated(**{**record.model_dump(), "epoch": epoch})
        newest = self._newest() if record.state == "held" else record
        return record if newest is not None and newest.nonce == record.nonce else None

    def _newest(self) -> Record | None:
        found = get_lease(self.store, self.job, authority=self.authority)
        return found.record if found else None

    def _renew_in_background(self) -> None:
        """Renew three times per duration. Errors of the store are retried until the lease expires."""
        while not self._wake.wait(self.record.duration / 3):
            try:
                self.renew()
            except LeaseLost:
                return
            except Exception as error:  # any error may be temporary, and the deadline ends the lease anyway
                print(f"{self.job}: the lease could not be renewed, retrying: {error}", flush=True)

    def __enter__(self) -> Self:
        """Start renewing."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing; a lease that was not ended expires."""
        self._ended = True
        self._wake.set()
        self._thread.join()
