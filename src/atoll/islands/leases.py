"""Leases decide which worker trains which job. Each job has one key per epoch; a key is created once and never changed.

    leases/experts/003/000017       holder, state, progress, last published checkpoint

How it works. An *epoch* is the number of a record. The record with the highest epoch is the current one. To acquire,
renew or end a lease, a worker creates the key of the next epoch. The store guarantees that exactly one of several
concurrent creates succeeds (`Store.create`), so each epoch has exactly one author.

Takeover. A record in state `held` expires when it is older than its `duration` plus `MARGIN`. Any worker may then make
the next epoch with itself as the holder; it copies progress, overrides and the pointer to the last checkpoint. If the
old holder wakes up, the key of its next epoch is taken: it can no longer renew, move the checkpoint pointer, or commit
the job as `done`. This holds without synchronized clocks. Clocks only decide when a takeover may start: the age of a
record is measured with the clock of the store. The holder measures with its own monotonic clock, starting before its
request, so it stops no later than others may take over.

Nonce. Each acquisition draws a random `nonce`, and all renewals keep it. If a create succeeded but its response was
lost, the retry finds the key taken. The worker recognizes its own record by the nonce and continues.

Everybody with write access to the store can write records. Each field is therefore checked by type, pattern and bounds
when a record is read. A malformed record is ignored: the newest well-formed record below it is the current one, and
the key above it can be created.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypedDict, Unpack
from uuid import uuid4

from pydantic import Field, ValidationError, field_validator

from atoll.core import layout
from atoll.core.artifacts import to_json
from atoll.core.config_sections import Section
from atoll.core.errors import AtollError, wrong_fields
from atoll.core.untrusted import Refused, strict_json
from atoll.islands.store import Entry, Store

# A compromise, not a measurement: a dead worker delays its expert by two minutes, and a live one writes a record every
# 40 seconds (three renewals per duration, so two in a row may fail).
DURATION = 120.0
"""Seconds without renewal after which another worker may take over."""
# S3 reports modification times in whole seconds, so a measured age can be off by one second; twice that is safe.
MARGIN = 2.0
"""Seconds added to the duration before a takeover."""
# Readers list the keys first and read the newest one afterwards. With 16 epochs they have ten minutes
# (at the default duration) before the listed key is deleted.
KEPT_EPOCHS = 16
"""Number of epochs that stay in the store; the holder deletes older keys."""
# A convention: one failure can be due to one machine; after three, the job itself is the likely cause.
MAX_FAILURES = 3
"""Number of failures after which nobody takes the job."""
# An order of magnitude: reads wait for the network, not for the processor.
PARALLEL_READS = 16
"""Number of records that are read in parallel."""
MAX_WHY = 500
"""Maximum number of characters of a reason: two or three sentences, which fit into the table of `atoll status`."""
_MAX_OVERRIDES = 4096
"""Maximum number of bytes of the overrides. All allowed keys, with a network given field by field, take under 2,000."""
_MAX_RECORD = 8192
"""Maximum number of bytes of a record: overrides, reason and holder at their limits, at four bytes per character."""
_LAST_EPOCH = 999_999
"""Keys have six digits, enough for 460 days of renewals every 40 seconds."""
_MAX_COUNT = 1 << 53
"""The largest integer that every JSON parser represents exactly (double precision)."""
_KEY = re.compile(r"leases/([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)/([0-9]{6})", re.ASCII)
_OVERRIDE_KEY = r"^(experts|networks|train)(\.[A-Za-z0-9_-]{1,64}){0,3}$"
_HEX_32, _HEX_64 = r"^[0-9a-f]{32}$", r"^[0-9a-f]{64}$"
_CHECKPOINT = rf"^{layout.CHECKPOINTS_PATTERN}/[0-9a-f]{{16}}@[0-9a-f]{{64}}$"

State = Literal["held", "released", "failed", "proposed", "refused", "done"]


class Record(Section):
    """The content of a lease key."""

    epoch: int = Field(ge=0, le=_LAST_EPOCH)
    """Number of the record. The highest one is the current record of the job."""
    state: State
    """What the holder does with the job, or how it ended."""
    holder: str = Field(max_length=200)
    """Name of the worker, by default its host name and process."""
    nonce: str = Field(pattern=_HEX_32)
    """Random number of this acquisition, by which the holder recognizes its records."""
    issued: float
    """Unix time by the clock of the holder. Informative only: no decision depends on it."""
    duration: float = Field(gt=0, le=86400)
    """Seconds without renewal after which another worker may take over."""
    images: int = Field(0, ge=0, le=_MAX_COUNT)
    """Images seen so far."""
    total: int = Field(0, ge=0, le=_MAX_COUNT)
    """Images to train on in all."""
    rate: float = Field(0.0, ge=0, le=_MAX_COUNT)
    """Images per second."""
    overrides: dict[Annotated[str, Field(pattern=_OVERRIDE_KEY)], str] = Field(default_factory=dict, max_length=64)
    """Configuration overrides of the holder. A worker that takes over a checkpoint trains on with the same ones."""
    checkpoint: str | None = Field(None, pattern=_CHECKPOINT)
    """Name and digest of the last published checkpoint, as `NAME@DIGEST`."""
    manifest: str | None = Field(None, pattern=_HEX_64)
    """Digest of the manifest of the trained expert, in states `proposed` and `done`."""
    why: str = Field("", max_length=MAX_WHY)
    """Reason of a failure or a refusal."""
    failures: int = Field(0, ge=0, le=_MAX_COUNT)
    """Number of failures so far. After three, nobody takes the job."""

    @field_validator("overrides")
    @classmethod
    def _check_overrides(cls, overrides: dict[str, str]) -> dict[str, str]:
        if not all(value.isprintable() for value in overrides.values()) or len(to_json(overrides)) > _MAX_OVERRIDES:
            raise ValueError(f"expected printable settings of at most {_MAX_OVERRIDES:,} bytes")
        return overrides

    @field_validator("holder", "why")
    @classmethod
    def _replace_control_characters(cls, text: str) -> str:
        return "".join(letter if letter.isprintable() else " " for letter in text)


class RecordChanges(TypedDict, total=False):
    """The fields of a record that its holder may change; omitted fields keep their values."""

    images: int
    total: int
    rate: float
    overrides: dict[str, str]
    checkpoint: str | None
    manifest: str | None
    why: str
    failures: int


class LeaseLost(Exception):  # noqa: N818 - not an error: another worker continues
    """Another worker has taken over the job, or this one did not renew in time."""


@dataclass(frozen=True)
class LeaseStatus:
    """The current record of a job, and its age in seconds by the clock of the store."""

    record: Record
    age: float

    @property
    def expired(self) -> bool:
        """Whether the holder has not renewed for so long that another worker may take over."""
        return self.record.state == "held" and self.age > self.record.duration + MARGIN

    @property
    def free(self) -> bool:
        """Whether any worker may acquire the lease."""
        failed = self.record.state == "failed" and self.record.failures < MAX_FAILURES
        return self.expired or failed or self.record.state in ("released", "refused")

    @property
    def proposed(self) -> bool:
        """Whether a contribution waits for admission, including one whose reviewer stopped before a verdict."""
        return self.record.state == "proposed" or (self.expired and self.record.manifest is not None)


def key_of(job: str, epoch: int) -> str:
    """Return the key of one epoch of a lease."""
    return f"leases/{job}/{epoch:06d}"


def list_leases(store: Store, prefix: str = "leases") -> dict[str, LeaseStatus]:
    """Return the current record of every job that ever had a lease."""
    keys = _list_keys(store, prefix)
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        found = pool.map(lambda job: _newest_record(store, job, keys[job]), keys)
        newest = [(job, pair) for job, pair in zip(keys, found, strict=True) if pair is not None]
    return {job: LeaseStatus(record, max(0.0, store.now() - entry.modified)) for job, (entry, record) in newest}


def get_lease(store: Store, job: str) -> LeaseStatus | None:
    """Return the current record of one job, or None if it never had a lease."""
    return list_leases(store, f"leases/{job}").get(job)


def _list_keys(store: Store, prefix: str) -> dict[str, dict[int, Entry]]:
    """Return the stored object of every epoch of every job; skip objects whose key is not that of a lease."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in store.entries(prefix):
        if match := _KEY.fullmatch(entry.key):
            found.setdefault(match.group(1), {})[int(match.group(2))] = entry
    return found


def _newest_record(store: Store, job: str, keys: Mapping[int, Entry]) -> tuple[Entry, Record] | None:
    """Return the well-formed record of the highest epoch."""
    for epoch in sorted(keys, reverse=True):
        with suppress(Refused):
            if record := _read_record(store, job, epoch):
                return keys[epoch], record
    return None


def _read_record(store: Store, job: str, epoch: int) -> Record | None:
    """Return a record, or None if it was removed since it was listed; raise `Refused` if it is malformed."""
    key = key_of(job, epoch)
    data = store.read(key, _MAX_RECORD)
    if data is None:
        return None
    try:
        record = Record.model_validate(strict_json(data, key), strict=True)
    except ValidationError as error:
        raise Refused(f"{store.url}/{key} is not a lease: {error}") from error
    # A record may only point at checkpoints of its own job; otherwise a worker would fetch those of another expert.
    owned = f"{layout.checkpoints(job)}/"
    if record.epoch != epoch or not (record.checkpoint or owned).startswith(owned):
        raise Refused(f"{store.url}/{key} is not a lease of {job} in epoch {epoch}")
    return record


def _validated(**values: Any) -> Record:
    """Return a record of this worker; raise an error before writing one that other workers would reject."""
    try:
        return Record.model_validate(values | {"why": str(values.get("why", ""))[:MAX_WHY]})
    except ValidationError as error:
        raise AtollError(f"these values cannot be written into a lease: {wrong_fields(error)[:MAX_WHY]}") from error


class Lease:
    """A lease that this worker holds. As a context manager, a background thread renews it until it ends or is lost."""

    def __init__(self, store: Store, job: str, record: Record, *, since: float) -> None:
        self.store, self.job, self.record = store, job, record
        self._deadline = since + record.duration
        self._pending: RecordChanges = {}
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
        state: tuple[State, ...] = (),
        epoch: int | None = None,
    ) -> "Lease | None":
        """Acquire a job that is free or in one of the states `state`; return None if it is not, or on a lost race.

        With `epoch`, acquire only if the record of that epoch is still the current one.
        """
        lease_status = get_lease(store, job)
        if lease_status is not None and not lease_status.free and lease_status.record.state not in state:
            return None
        if epoch is not None and (lease_status is None or lease_status.record.epoch != epoch):
            return None
        before = lease_status.record if lease_status else None
        if before is not None and before.epoch == _LAST_EPOCH:
            return None
        since = time.monotonic()
        record = _validated(
            epoch=before.epoch + 1 if before else 0,
            state="held",
            holder=holder or f"{socket.gethostname()}:{uuid4().hex[:8]}",
            nonce=uuid4().hex,
            issued=time.time(),
            duration=duration,
            overrides=before.overrides if before and before.checkpoint else overrides or {},
            checkpoint=before.checkpoint if before else None,
            images=before.images if before else 0,
            total=before.total if before else 0,
            manifest=before.manifest if before else None,
            failures=before.failures if before else 0,
        )
        lease = cls(store, job, record, since=since)
        written = lease._create_record(record)
        if written is None:
            return None
        lease.record = written  # its epoch is higher if malformed records were skipped
        return lease

    @property
    def lost(self) -> bool:
        """Whether another worker holds the job, or may hold it by now."""
        return not self._ended and (bool(self._lost) or time.monotonic() >= self._deadline)

    def check(self) -> None:
        """Raise `LeaseLost` unless this worker holds the job."""
        if self.lost:
            raise LeaseLost(f"{self.job}: {self._lost or 'the lease expired before it could be renewed'}")

    def set_pending(self, **changes: Unpack[RecordChanges]) -> None:
        """Set fields of the record, to be written with the next renewal."""
        with self._pending_lock:
            self._pending |= changes

    def renew(self, **changes: Unpack[RecordChanges]) -> None:
        """Create the record of the next epoch with all pending changes; raise `LeaseLost` if another worker did."""
        self._advance("held", changes)

    def end(self, state: State, **changes: Unpack[RecordChanges]) -> None:
        """Give up the job, finished or not. This record is the commit: only the holder can create it."""
        self._advance(state, changes)
        self._wake.set()

    def _advance(self, state: State, changes: RecordChanges) -> None:
        with self._renew_lock:
            if self._ended:  # a renewal that waited for the lock while `end` ran must not reopen the lease
                raise LeaseLost(f"{self.job}: the lease has ended")
            self.check()
            since = time.monotonic()
            with self._pending_lock:
                values = {**self.record.model_dump(), **self._pending, **changes}
            values |= {"state": state, "epoch": self.record.epoch + 1, "issued": time.time()}
            record = self._create_record(_validated(**values))
            if record is None:
                self._lost = "another worker has taken it"
                raise LeaseLost(f"{self.job}: {self._lost}")
            self.record, self._deadline = record, since + record.duration
            self._ended = self._ended or state != "held"
            # Only accepted values become pending. Otherwise the renewal after a failed `end` would publish them.
            with self._pending_lock:
                self._pending |= changes
        with suppress(Exception):  # a key that stays is harmless: it is never the newest
            self.store.delete([key_of(self.job, record.epoch - KEPT_EPOCHS)] if record.epoch >= KEPT_EPOCHS else [])

    def _create_record(self, record: Record) -> Record | None:
        """Create a record and return it as written; return None if another worker holds the job.

        If the key exists, there are three cases. With our nonce, an earlier create succeeded and its response was lost:
        continue with the next epoch. A malformed record is skipped in the same way. Any other record is a takeover.

        A successful create is not proof: a worker that slept for more than `KEPT_EPOCHS` epochs can create a key that
        the new holder has deleted. A record with a higher epoch therefore means that the lease is lost. The exception
        is a record that ends the lease: another worker may acquire the job immediately afterwards.
        """
        while not self.store.create(key_of(self.job, record.epoch), to_json(json.loads(record.model_dump_json()))):
            with suppress(Refused):
                existing = _read_record(self.store, self.job, record.epoch)
                if existing is None or existing.nonce != record.nonce:
                    return None
            record = _validated(**{**record.model_dump(), "epoch": record.epoch + 1})
        keys = _list_keys(self.store, f"leases/{self.job}").get(self.job, {})
        later = _newest_record(self.store, self.job, {epoch: keys[epoch] for epoch in keys if epoch > record.epoch})
        followed = later is not None and record.state != "held" and later[1].epoch < record.epoch + KEPT_EPOCHS
        return record if later is None or followed else None

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
