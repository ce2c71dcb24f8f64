"""Leases: who works on what. One key for each job and epoch, created once, never changed.

    leases/experts/003/000017       who holds it, until when, how far it is, where its last checkpoint is

The record with the highest epoch counts. Taking a lease, renewing it and ending it are all the same act: creating the
next epoch's key, which succeeds for exactly one of any number of racing writers. So whoever was overtaken, however long
it slept, finds its next key taken: it can neither renew, nor move the pointer to the last checkpoint, nor say `done`.
No clock decides that. Clocks only decide when a silent holder may be overtaken, and there the age of a record is taken
by the store's own clock; a holder counts from before it asked, by its own steady clock, and gives up in time by itself.

Anyone who may write to the store can write a record. So every field is checked here, by type, pattern and bounds, when
a record is read. A malformed record counts as no record: the newest well-formed one below it counts instead, and the
next key above it can be created.
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

DURATION = 120.0
"""Seconds after which a silent holder may be overtaken."""
MARGIN = 2.0
"""Seconds added to it: stores tell the time in whole seconds."""
KEPT = 16
"""Epochs that are kept; older keys are removed by the holder."""
MAX_FAILURES = 3
READERS = 16
"""Records that are read at once."""
MAX_WHY = 500
"""Letters of a reason in a record; two or three sentences, which is what `atoll status` has room for."""
_MAX_CHOICE = 4096
"""Bytes of a holder's settings: all that can be chosen, with a network given by its parts, take less than 2,000."""
_MAX_RECORD = 8192
"""Bytes of a record: settings, a reason and a holder of the greatest length, with four bytes for each letter."""
_LAST_EPOCH = 999_999
"""Keys have six digits, which last for 460 days of renewals every 40 seconds."""
_MAX_COUNT = 1 << 53
"""The largest count that a JSON number holds exactly everywhere."""
_KEY = re.compile(r"leases/([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)/([0-9]{6})", re.ASCII)
_CHOICE_KEY = r"^(experts|networks|train)(\.[A-Za-z0-9_-]{1,64}){0,3}$"
_HEX_32, _HEX_64 = r"^[0-9a-f]{32}$", r"^[0-9a-f]{64}$"
_CHECKPOINT = rf"^{layout.CHECKPOINTS_PATTERN}/[0-9a-f]{{16}}@[0-9a-f]{{64}}$"

State = Literal["held", "released", "failed", "proposed", "refused", "done"]


class Record(Section):
    """What a lease's key says."""

    epoch: int = Field(ge=0, le=_LAST_EPOCH)
    state: State
    holder: str = Field(max_length=200)
    nonce: str = Field(pattern=_HEX_32)
    issued: float
    """The holder's clock, for people; nothing is decided by it."""
    duration: float = Field(gt=0, le=86400)
    images: int = Field(0, ge=0, le=_MAX_COUNT)
    total: int = Field(0, ge=0, le=_MAX_COUNT)
    rate: float = Field(0.0, ge=0, le=_MAX_COUNT)
    choice: dict[Annotated[str, Field(pattern=_CHOICE_KEY)], str] = Field(default_factory=dict, max_length=64)
    """Settings of the holder's own choice; whoever takes over goes on with them."""
    checkpoint: str | None = Field(None, pattern=_CHECKPOINT)
    """Name and digest of the last published checkpoint, as `NAME@DIGEST`."""
    manifest: str | None = Field(None, pattern=_HEX_64)
    why: str = Field("", max_length=MAX_WHY)
    failures: int = Field(0, ge=0, le=_MAX_COUNT)

    @field_validator("choice")
    @classmethod
    def _is_plain(cls, choice: dict[str, str]) -> dict[str, str]:
        if not all(value.isprintable() for value in choice.values()) or len(to_json(choice)) > _MAX_CHOICE:
            raise ValueError(f"expected printable settings of at most {_MAX_CHOICE:,} bytes")
        return choice

    @field_validator("holder", "why")
    @classmethod
    def _fit_for_a_terminal(cls, text: str) -> str:
        return "".join(letter if letter.isprintable() else " " for letter in text)


class News(TypedDict, total=False):
    """The fields of a record that its holder changes; those left out stay as they are."""

    images: int
    total: int
    rate: float
    choice: dict[str, str]
    checkpoint: str | None
    manifest: str | None
    why: str
    failures: int


class LeaseLost(Exception):  # noqa: N818 - not an error: someone else goes on
    """Another worker has the job, or this one was silent for too long."""


@dataclass(frozen=True)
class Seen:
    """The newest record of a job, and its age by the store's clock."""

    record: Record
    age: float

    @property
    def expired(self) -> bool:
        """Whether a holder was silent for so long that it may be overtaken."""
        return self.record.state == "held" and self.age > self.record.duration + MARGIN

    @property
    def free(self) -> bool:
        """Whether anyone may take the job."""
        failed = self.record.state == "failed" and self.record.failures < MAX_FAILURES
        return self.expired or failed or self.record.state in ("released", "refused")

    @property
    def proposed(self) -> bool:
        """Whether a contribution waits to be judged, also because whoever began to judge it has fallen silent."""
        return self.record.state == "proposed" or (self.expired and self.record.manifest is not None)


def key_of(job: str, epoch: int) -> str:
    """The key of a job's lease in one epoch."""
    return f"leases/{job}/{epoch:06d}"


def survey(store: Store, prefix: str = "leases") -> dict[str, Seen]:
    """Return the newest well-formed record of every job that ever had a lease."""
    keys = _keys(store, prefix)
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda job: _newest(store, job, keys[job]), keys)
        newest = [(job, pair) for job, pair in zip(keys, found, strict=True) if pair is not None]
    return {job: Seen(record, max(0.0, store.now() - entry.modified)) for job, (entry, record) in newest}


def look(store: Store, job: str) -> Seen | None:
    """Return the newest well-formed record of one job."""
    return survey(store, f"leases/{job}").get(job)


def _keys(store: Store, prefix: str) -> dict[str, dict[int, Entry]]:
    """Return what is stored for every epoch of every job; objects whose key is not that of a lease are left out."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in store.entries(prefix):
        if match := _KEY.fullmatch(entry.key):
            found.setdefault(match.group(1), {})[int(match.group(2))] = entry
    return found


def _newest(store: Store, job: str, keys: Mapping[int, Entry]) -> tuple[Entry, Record] | None:
    """Return the well-formed record of the highest epoch."""
    for epoch in sorted(keys, reverse=True):
        with suppress(Refused):
            if record := _read(store, job, epoch):
                return keys[epoch], record
    return None


def _read(store: Store, job: str, epoch: int) -> Record | None:
    """Return a record; None if it was removed since it was listed. A malformed one raises `Refused`."""
    key = key_of(job, epoch)
    data = store.read(key, _MAX_RECORD)
    if data is None:
        return None
    try:
        record = Record.model_validate(strict_json(data, key), strict=True)
    except ValidationError as error:
        raise Refused(f"{store.url}/{key} is not a lease: {error}") from error
    owned = f"{layout.checkpoints(job)}/"
    if record.epoch != epoch or not (record.checkpoint or owned).startswith(owned):
        raise Refused(f"{store.url}/{key} is not a lease of {job} in epoch {epoch}")
    return record


def _record(**values: Any) -> Record:
    """Return a record of our own; what nobody could read is refused before it is written."""
    try:
        return Record.model_validate(values | {"why": str(values.get("why", ""))[:MAX_WHY]})
    except ValidationError as error:
        raise AtollError(f"this cannot be written into a lease: {wrong_fields(error)[:MAX_WHY]}") from error


class Lease:
    """A lease that is held. As a context it is renewed in the background until it ends or is lost."""

    def __init__(self, store: Store, job: str, record: Record, *, since: float) -> None:
        self.store, self.job, self.record = store, job, record
        self._deadline = since + record.duration
        self._news: News = {}
        self._lost = ""
        self._renewing, self._telling = threading.Lock(), threading.Lock()
        self._wake = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._keep, name=f"lease {job}", daemon=True)

    @classmethod
    def take(
        cls,
        store: Store,
        job: str,
        duration: float = DURATION,
        *,
        holder: str | None = None,
        choice: dict[str, str] | None = None,
        state: tuple[State, ...] = (),
        epoch: int | None = None,
    ) -> "Lease | None":
        """Take a job that is free (or in one of these states too); None if it is not, or someone was quicker.

        With `epoch`, only if the record of that epoch is still the newest.
        """
        seen = look(store, job)
        if seen is not None and not seen.free and seen.record.state not in state:
            return None
        if epoch is not None and (seen is None or seen.record.epoch != epoch):
            return None
        before = seen.record if seen else None
        if before is not None and before.epoch == _LAST_EPOCH:
            return None
        since = time.monotonic()
        record = _record(
            epoch=before.epoch + 1 if before else 0,
            state="held",
            holder=holder or f"{socket.gethostname()}:{uuid4().hex[:8]}",
            nonce=uuid4().hex,
            issued=time.time(),
            duration=duration,
            choice=before.choice if before and before.checkpoint else choice or {},
            checkpoint=before.checkpoint if before else None,
            images=before.images if before else 0,
            total=before.total if before else 0,
            manifest=before.manifest if before else None,
            failures=before.failures if before else 0,
        )
        lease = cls(store, job, record, since=since)
        written = lease._create(record)
        if written is None:
            return None
        lease.record = written  # its epoch is higher if what stood under the first key is no record
        return lease

    @property
    def lost(self) -> bool:
        """Whether the job is no longer ours, or may no longer be."""
        return not self._over and (bool(self._lost) or time.monotonic() >= self._deadline)

    def check(self) -> None:
        """Raise `LeaseLost` unless the job is ours."""
        if self.lost:
            raise LeaseLost(f"{self.job}: {self._lost or 'the lease ran out before it could be renewed'}")

    def tell(self, **news: Unpack[News]) -> None:
        """News for the next renewal, as fields of the record."""
        with self._telling:
            self._news |= news

    def renew(self, **news: Unpack[News]) -> None:
        """Create the next epoch's record, with all news; raises `LeaseLost` if someone else has."""
        self._next("held", news)

    def end(self, state: State, **news: Unpack[News]) -> None:
        """Give the job up, finished or not. This record is the commit: it succeeds only for whoever holds the lease."""
        self._next(state, news)
        self._wake.set()

    def _next(self, state: State, news: News) -> None:
        with self._renewing:
            if self._over:  # a renewal that waited while the lease was ended must not bring it back
                raise LeaseLost(f"{self.job}: the lease has ended")
            self.check()
            since = time.monotonic()
            with self._telling:
                changes = {**self._news, **news, "state": state, "epoch": self.record.epoch + 1, "issued": time.time()}
            record = self._create(_record(**{**self.record.model_dump(), **changes}))
            if record is None:
                self._lost = "another worker has taken it"
                raise LeaseLost(f"{self.job}: {self._lost}")
            self.record, self._deadline = record, since + record.duration
            self._over = self._over or state != "held"
            with self._telling:  # only what was accepted: an end that failed must not be told by the next renewal
                self._news |= news
        with suppress(Exception):  # whoever comes next removes it
            self.store.delete([key_of(self.job, record.epoch - KEPT)] if record.epoch >= KEPT else [])

    def _create(self, record: Record) -> Record | None:
        """The record as it was written; None if someone else has gone on.

        A key that is there already may be ours: the answer to an earlier attempt got lost. Then the next one is taken.
        The same holds for a key under which somebody put what is no record.
        An old key that was removed can be created, and counts nothing. Whoever ends a lease may be followed at once.
        """
        while not self.store.create(key_of(self.job, record.epoch), to_json(json.loads(record.model_dump_json()))):
            with suppress(Refused):
                there = _read(self.store, self.job, record.epoch)
                if there is None or there.nonce != record.nonce:
                    return None
            record = _record(**{**record.model_dump(), "epoch": record.epoch + 1})
        keys = _keys(self.store, f"leases/{self.job}").get(self.job, {})
        later = _newest(self.store, self.job, {epoch: keys[epoch] for epoch in keys if epoch > record.epoch})
        followed = later is not None and record.state != "held" and later[1].epoch < record.epoch + KEPT
        return record if later is None or followed else None

    def _keep(self) -> None:
        """Renew three times in a lease's length; a store that does not answer costs the lease only in the end."""
        while not self._wake.wait(self.record.duration / 3):
            try:
                self.renew()
            except LeaseLost:
                return
            except Exception as error:  # whatever it is, the next renewal may succeed
                print(f"{self.job}: the lease could not be renewed yet: {error}", flush=True)

    def __enter__(self) -> Self:
        """Start renewing."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing; a lease that was not ended runs out."""
        self._over = True
        self._wake.set()
        self._thread.join()
