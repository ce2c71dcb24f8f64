"""Lease records: their fields, and which of them count, in a store that others can write to.

Everybody with write access to the store can write records. So each field is checked by type, pattern and bounds when a
record is read, and the signature of the holder by an `Authority`, which knows who may hold the job. A record that fails
is ignored and listed in `atoll status`.

A contributor whose key may hold the job can sign any record. So the valid records must form a chain. It begins with the
record that the store has had for the longest time, and continues with the next epoch up to the first key that is free.
A record of another key counts only if the record before it had ended or expired, by the times that the store gave to
the two records. Owners and admitters may take every lease. A contributor with a network in the snapshot, who has shown
that they train, may take a live lease of another key once. All readers see the same times, so they agree.

The first record of the chain needs the clock because old records are deleted: nothing else distinguishes it from a
record that somebody writes later, below or far above the others. Without an authority, in a local run, signatures are
not checked and everybody may take every lease.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypedDict
from uuid import uuid4

from pydantic import Field, ValidationError, field_validator

from atoll.apps.share.store import Entry, Store
from atoll.core import layout
from atoll.core.artifacts import Content, to_json
from atoll.core.errors import wrong_fields
from atoll.verify.signing import Role, Signature
from atoll.verify.untrusted import Refused, printable, strict_json

# S3 reports modification times in whole seconds, so a measured age can be off by one second; twice that is safe.
MARGIN = 2.0
"""Seconds added to the duration before a takeover."""
# The times of two records can be off by two seconds together: 10 % of this.
MIN_MEASURED = 20.0
"""Seconds between two records from which the speed of a holder is measured."""
# A convention: one failure can be due to one machine; after three, the job itself is the likely cause.
MAX_FAILURES = 3
"""Number of failures after which nobody takes the job."""
# A choice: longer than any pause of training that works, such as compilation or the validation at the end.
MAX_IDLE = 3600.0
"""Seconds without a trained image after which another worker may take over."""
# An order of magnitude: reads wait for the network, not for the processor.
PARALLEL_READS = 16
"""Number of records that are read in parallel."""
MAX_WHY = 500
"""Maximum number of characters of a reason: two or three sentences, which fit into the table of `atoll status`."""
_MAX_OVERRIDES = 4096
"""Maximum number of bytes of the overrides. All allowed keys, with a network given field by field, take under 2,000."""
_MAX_RECORD = 8192
"""Maximum number of bytes of a record: overrides, reason, holder at their limits (four bytes a letter), signature."""
LAST_EPOCH = 999_999
"""The last epoch: keys have six digits."""
MAX_FIRST_EPOCH = LAST_EPOCH // 2
"""Highest epoch of the first record of a chain, so that nobody can leave a job without epochs. Half of all epochs are
enough for 230 days of renewals every 40 seconds."""
_MAX_COUNT = 1 << 53
"""The largest integer that every JSON parser represents exactly (double precision)."""
_KEY = re.compile(layout.LEASES + r"/([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)/([0-9]{6})", re.ASCII)
_OVERRIDE_KEY = r"^(experts|networks|train)(\.[A-Za-z0-9_-]{1,64}){0,3}$"
_HEX_32, _HEX_64 = r"^[0-9a-f]{32}$", r"^[0-9a-f]{64}$"
_CHECKPOINT = rf"^{layout.CHECKPOINTS_PATTERN}/[0-9a-f]{{16}}@[0-9a-f]{{64}}$"

LeaseState = Literal["held", "released", "failed", "proposed", "refused", "done"]


class Record(Content):
    """The content of a lease key."""

    epoch: int = Field(ge=0, le=LAST_EPOCH)
    """Number of the record. The last one of the chain is the current record of the job."""
    state: LeaseState
    """What the holder does with the job, or how it ended."""
    holder: str = Field(max_length=200)
    """Name of the worker, which the contributor chooses or which is random: a host name would be published."""
    nonce: str = Field(pattern=_HEX_32)
    """Random number of this acquisition, by which the holder recognizes its records."""
    issued: float
    """Unix time by the clock of the holder. Informative only: no decision depends on it."""
    duration: float = Field(gt=0, le=86400)
    """Seconds without renewal after which another worker may take over."""
    images: int = Field(0, ge=0, le=_MAX_COUNT)
    """Images seen so far."""
    published: int = Field(0, ge=0, le=_MAX_COUNT)
    """Images seen by the last published checkpoint."""
    idle: float = Field(0.0, ge=0, le=_MAX_COUNT)
    """Seconds since the last trained image."""
    total: int = Field(0, ge=0, le=_MAX_COUNT)
    """Images to train on in all."""
    rate: float = Field(0.0, ge=0, le=_MAX_COUNT)
    """Images per second, as the holder measures it. Informative only: others measure with the times of the records."""
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
    signature: Signature | None = None
    """The signature of the holder over all other fields."""

    @property
    def key(self) -> str | None:
        """The public key of the signer."""
        return self.signature.key if self.signature else None

    @property
    def digest(self) -> str:
        """SHA-256 of the signed fields."""
        return hashlib.sha256(to_json(self.model_dump(mode="json", exclude={"signature"}))).hexdigest()

    @field_validator("overrides")
    @classmethod
    def _check_overrides(cls, overrides: dict[str, str]) -> dict[str, str]:
        if not all(value.isprintable() for value in overrides.values()) or len(to_json(overrides)) > _MAX_OVERRIDES:
            raise ValueError(f"expected printable settings of at most {_MAX_OVERRIDES:,} bytes")
        return overrides

    @field_validator("holder", "why")
    @classmethod
    def _replace_control_characters(cls, text: str) -> str:
        return printable(text)


class RecordChanges(TypedDict, total=False):
    """The fields of a record that its holder may change; omitted fields keep their values."""

    images: int
    published: int
    total: int
    rate: float
    overrides: dict[str, str]
    checkpoint: str | None
    manifest: str | None
    why: str
    failures: int


class Authority(Protocol):
    """Signs the records of this worker, and decides whose records count."""

    def sign(self, role: Role, slot: str, digest: str) -> Signature | None:
        """Return this user's signature; None without a key."""

    def verify(self, signature: Signature | None, role: Role, slot: str, *, digest: str) -> str:
        """Return the name of the signer, or raise `Refused`."""

    def may_take(self, key: str | None, record: Record, *, keys: Collection[str | None]) -> bool:
        """Return whether a key may take the lease of this record although it is not free.

        `keys` are those that have held the lease.
        """

    def may_admit(self, key: str | None) -> bool:
        """Return whether a key may end a job as done."""


@dataclass(frozen=True)
class LeaseStatus:
    """The current record of a job, and its age in seconds by the clock of the store."""

    record: Record
    age: float
    rate: float = 0.0
    """Images per second between the stored records of this holder, by the clock of the store; 0 if that is unknown."""
    keys: frozenset[str | None] = frozenset()
    """The keys of the chain's records."""

    @property
    def expired(self) -> bool:
        """Whether the holder has not renewed for so long that another worker may take over."""
        # A reviewer trains nothing, so its lease only expires by age.
        idle = self.record.manifest is None and self.record.idle > MAX_IDLE
        return self.record.state == "held" and (idle or self.age > self.record.duration + MARGIN)

    @property
    def free(self) -> bool:
        """Whether any worker may acquire the lease."""
        failed = self.record.state == "failed" and self.record.failures < MAX_FAILURES
        return self.expired or failed or self.record.state in ("released", "refused")

    @property
    def proposed(self) -> bool:
        """Whether a contribution waits for admission, including one whose reviewer stopped before a verdict."""
        return self.record.state == "proposed" or (self.expired and self.record.manifest is not None)


def new_name() -> str:
    """Return a random name of a worker."""
    return f"worker-{uuid4().hex[:8]}"


def key_of(job: str, epoch: int) -> str:
    """Return the key of one epoch of a lease."""
    return f"{layout.leases(job)}/{epoch:06d}"


@dataclass(frozen=True)
class LeaseList:
    """The current record of every job that ever had a lease, and why newer records were ignored, by job."""

    leases: dict[str, LeaseStatus]
    ignored: dict[str, str]


def list_leases(
    store: Store, prefix: str = layout.LEASES, *, authority: Authority | None = None, now: float | None = None
) -> LeaseList:
    """Read the current records. `now` is the time; by default that of the store, which needs the right to write."""
    keys, ignored = list_keys(store, prefix), dict[str, str]()
    chains = read_chains(store, keys, authority=authority, ignored=ignored)
    time_now = store.now() if now is None and any(chains.values()) else now or 0.0
    leases = {job: _status(chain, time_now) for job, chain in chains.items() if chain}
    return LeaseList(leases, ignored)


def get_lease(store: Store, job: str, *, authority: Authority | None = None) -> LeaseStatus | None:
    """Return the current record of one job, or None if it never had a lease."""
    return list_leases(store, layout.leases(job), authority=authority).leases.get(job)


def list_keys(store: Store, prefix: str) -> dict[str, dict[int, Entry]]:
    """Return the stored object of every epoch of every job; skip objects whose key is not that of a lease."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in store.entries(prefix):
        if match := _KEY.fullmatch(entry.key):
            found.setdefault(match.group(1), {})[int(match.group(2))] = entry
    return found


@dataclass(frozen=True)
class Stored:
    """A valid record, and the time that the store gave to it."""

    record: Record
    time: float


@dataclass(frozen=True)
class Chain:
    """The records of a job that count, and the valid ones that do not, in the order of their epochs."""

    counted: tuple[Stored, ...] = ()
    others: tuple[Stored, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.counted)

    @property
    def last(self) -> Record | None:
        """The current record."""
        return self.counted[-1].record if self.counted else None

    def has(self, record: Record) -> bool:
        """Return whether a record counts."""
        return any(one.record == record for one in self.counted)


def read_chains(
    store: Store,
    keys: Mapping[str, Mapping[int, Entry]],
    *,
    authority: Authority | None,
    ignored: dict[str, str] | None = None,
) -> dict[str, Chain]:
    """Return the chain of each job; note in `ignored` why the newest record that does not count does not."""
    reasons: dict[str, dict[int, str]] = {job: {} for job in keys}

    def read(place: tuple[str, int, Entry]) -> Stored | None:
        job, epoch, entry = place
        try:
            record = read_record(store, job, epoch, authority=authority, entry=entry)
            return Stored(record, entry.modified) if record else None
        except Refused as reason:
            reasons[job][epoch] = str(reason)
            return None

    places = [(job, epoch, keys[job][epoch]) for job in keys for epoch in sorted(keys[job])]
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        found = list(pool.map(read, places))
    valid: dict[str, list[Stored]] = {job: [] for job in keys}
    for (job, _, _), stored in zip(places, found, strict=True):
        if stored is not None:
            valid[job].append(stored)
    chains = {
        job: _chain(store, job, valid[job], keys=keys[job], authority=authority, reasons=reasons[job]) for job in keys
    }
    if ignored is not None:
        ignored |= {job: found[max(found)] for job, found in reasons.items() if found}
    return chains


def _chain(
    store: Store,
    job: str,
    valid: list[Stored],
    *,
    keys: Collection[int],
    authority: Authority | None,
    reasons: dict[int, str],
) -> Chain:
    """Return the chain of valid records, which are sorted by epoch; note in `reasons` why others do not count."""
    starts = [one for one in valid if one.record.epoch <= MAX_FIRST_EPOCH]
    if not starts:
        high = "the first record of a job has a lower epoch"
        reasons |= {one.record.epoch: f"{key_of(job, one.record.epoch)} does not count: {high}" for one in valid}
        return Chain((), tuple(valid))
    counted, others = [min(starts, key=lambda one: (one.time, one.record.epoch))], []
    end = counted[0].record.epoch  # the highest epoch below which no key is free
    for one in valid:
        epoch, before, reason = one.record.epoch, counted[-1], ""
        if epoch <= counted[0].record.epoch:
            others += [one] if one is not counted[0] else []
            continue
        # In a folder, links and folders also occupy keys, and are not listed.
        while end < epoch and (end + 1 in keys or store.taken(key_of(job, end + 1))):
            end += 1
        if end < epoch:
            reason = f"epoch {end + 1} is free, so it is not the next one"
        elif one.record.nonce == before.record.nonce and one.record.key == before.record.key:
            reason = "" if before.record.state == "held" else "its holder had ended the lease"
        elif authority is not None and (reason := _too_early(before, one.time)):
            # Only now: the authority may have to read the snapshot, and most takeovers are of leases that had expired.
            held_by = {other.record.key for other in counted}
            reason = "" if authority.may_take(one.record.key, before.record, keys=held_by) else reason
        if reason:
            others.append(one)
            reasons[epoch] = f"{key_of(job, epoch)} does not count: {reason}"
        else:
            counted.append(one)
    return Chain(tuple(counted), tuple(others))


def _too_early(before: Stored, time: float) -> str:
    """Return why a record of another key, written at this time, does not count after `before`; empty if it does."""
    if time + MARGIN < before.time:
        return "it is older than the record before it"
    # Twice the margin: the taker has waited for one, and each of the two times can be rounded.
    lease_status = LeaseStatus(before.record, time - before.time + 2 * MARGIN)
    if lease_status.proposed:
        return "the contribution waits for admission"
    if lease_status.free:
        return ""
    held = before.record.state == "held"
    return f"the lease of {before.record.holder} had not expired" if held else f"the job was {before.record.state}"


def _status(chain: Chain, now: float) -> LeaseStatus:
    last = chain.counted[-1]
    first = next(one for one in chain.counted if one.record.nonce == last.record.nonce)
    seconds, images = last.time - first.time, last.record.images - first.record.images
    rate = images / seconds if seconds >= MIN_MEASURED and images > 0 else 0.0
    keys = frozenset(one.record.key for one in chain.counted)
    return LeaseStatus(last.record, max(0.0, now - last.time), rate, keys)


def read_record(
    store: Store, job: str, epoch: int, *, authority: Authority | None, entry: Entry | None = None
) -> Record | None:
    """Return a record, or None if it was removed since it was listed; raise `Refused` if it is not valid.

    With the `entry` of a listing, an object that was read before is not read again: nobody replaces a record.
    """
    key = key_of(job, epoch)
    data = store.read(key, _MAX_RECORD) if entry is None else store.read_once(entry, _MAX_RECORD)
    if data is None:
        return None
    try:
        record = Record.model_validate(strict_json(data, key), strict=True)
    except ValidationError as error:
        raise Refused(f"{store.url}/{key} is not a lease: {wrong_fields(error)}") from error
    # A record may only point at checkpoints of its own job; otherwise a worker would fetch those of another expert.
    owned = f"{layout.checkpoints(job)}/"
    if record.epoch != epoch or not (record.checkpoint or owned).startswith(owned):
        raise Refused(f"{store.url}/{key} is not a lease of {job} in epoch {epoch}")
    if authority is not None:
        authority.verify(record.signature, "lease", job, digest=record.digest)
        if record.state == "done" and not authority.may_admit(record.key):
            raise Refused(f"{key} ends the job as done, which only admitters and owners do")
    return record
