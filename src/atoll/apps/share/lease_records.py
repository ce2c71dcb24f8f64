"""Lease records: their fields, and which one of a job counts, in a store that others can write to.

Everybody with write access to the store can write records. So each field is checked by type, pattern and bounds when a
record is read, and the signature of the holder against the root of the run (`authority`), which lists who may hold the
job. A record that fails is ignored and listed in `atoll status`. Of the others, the one with the highest epoch counts.
No time in a record, and none that the store gives to it, changes that. A local run has no root and no signatures.

A contributor whose key may hold the job can sign any record, also over a live lease. That costs time, and never changes
the model: docs/explanation/trust.md, "What is not protected".
"""

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple
from uuid import uuid4

from pydantic import AfterValidator, Field, ValidationError, field_validator

from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.store import Entry, Store
from atoll.core import layout
from atoll.core.artifacts import Content, to_json
from atoll.core.errors import wrong_fields
from atoll.verify.signing import Signature
from atoll.verify.untrusted import Refused, printable, strict_json

# S3 reports modification times in whole seconds, so a measured age can be off by one second; twice that is safe.
MARGIN = 2.0
"""Seconds added to the duration before a takeover."""
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
    """Number of the record. The highest valid one is the current record of the job."""
    state: LeaseState
    """What the holder does with the job, or how it ended."""
    holder: Annotated[str, AfterValidator(printable)] = Field(max_length=200)
    """Name of the worker, which the contributor chooses or which is random: a host name would be published."""
    nonce: str = Field(pattern=_HEX_32)
    """Random number of this acquisition, by which the holder recognizes its records."""
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
    """Images per second, as the holder measures it. Informative only."""
    loss: float | None = Field(None, ge=-_MAX_COUNT, le=_MAX_COUNT)
    """Training loss, averaged over the last steps. Informative only."""
    lr: float | None = Field(None, ge=0, le=_MAX_COUNT)
    """Learning rate. Informative only."""
    overrides: dict[Annotated[str, Field(pattern=_OVERRIDE_KEY)], str] = Field(default_factory=dict, max_length=64)
    """Configuration overrides of the holder. A worker that takes over a checkpoint trains on with the same ones."""
    checkpoint: str | None = Field(None, pattern=_CHECKPOINT)
    """Name and digest of the last published checkpoint, as `NAME@DIGEST`."""
    manifest: str | None = Field(None, pattern=_HEX_64)
    """Digest of the manifest of the trained expert, in states `proposed` and `done`."""
    why: Annotated[str, AfterValidator(printable)] = Field("", max_length=MAX_WHY)
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


@dataclass(frozen=True)
class LeaseStatus:
    """The current record of a job, and its age in seconds by the clock of the store."""

    record: Record
    age: float

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
    def waiting(self) -> bool:
        """Whether a job that no snapshot lists waits for admission.

        Also if its reviewer stopped before a verdict, or, in state `done`, before the snapshot; or if the key of the
        reviewer was withdrawn with all snapshots that it signed.
        """
        states = ("proposed", "done") if self.record.manifest else ("proposed",)
        return self.record.state in states or (self.expired and self.record.manifest is not None)


def new_name() -> str:
    """Return a random name of a worker."""
    return f"worker-{uuid4().hex[:8]}"


def key_of(job: str, epoch: int) -> str:
    """Return the key of one epoch of a lease."""
    return f"{layout.leases(job)}/{epoch:06d}"


class LeaseList(NamedTuple):
    """The current record of every job that ever had a lease, and why newer records were ignored, by job."""

    leases: dict[str, LeaseStatus]
    ignored: dict[str, str]


def list_leases(
    store: Store, prefix: str = layout.LEASES, *, authority: RemoteRun | None = None, now: float | None = None
) -> LeaseList:
    """Read the current records. `now` is the time; by default that of the store, which needs the right to write."""
    ignored: dict[str, str] = {}

    def read(job: str, keys: Mapping[int, Entry]) -> tuple[Record, Entry] | None:
        """Return the valid record with the highest epoch; note why higher ones are not valid."""
        for epoch in sorted(keys, reverse=True):
            try:
                if record := read_record(store, job, epoch, authority=authority):
                    return record, keys[epoch]
            except Refused as reason:
                ignored.setdefault(job, str(reason))
        return None

    keys = list_keys(store, prefix)
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        found = dict(zip(keys, pool.map(read, keys, keys.values()), strict=True))
    time_now = store.now() if now is None and any(found.values()) else now or 0.0
    leases = {
        job: LeaseStatus(one[0], max(0.0, time_now - one[1].modified)) for job, one in found.items() if one is not None
    }
    return LeaseList(leases, ignored)


def get_lease(store: Store, job: str, *, authority: RemoteRun | None = None) -> LeaseStatus | None:
    """Return the current record of one job, or None if it never had a lease."""
    return list_leases(store, layout.leases(job), authority=authority).leases.get(job)


def list_keys(store: Store, prefix: str) -> dict[str, dict[int, Entry]]:
    """Return the stored object of every epoch of every job; skip objects whose key is not that of a lease."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in store.entries(prefix):
        if match := _KEY.fullmatch(entry.key):
            found.setdefault(match.group(1), {})[int(match.group(2))] = entry
    return found


def read_record(store: Store, job: str, epoch: int, *, authority: RemoteRun | None) -> Record | None:
    """Return a record, or None if it was removed since it was listed; raise `Refused` if it is not valid."""
    key = key_of(job, epoch)
    data = store.read(key, _MAX_RECORD)
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
        if record.state == "done" and not authority.trust.current.admits(record.key or ""):
            raise Refused(f"{key} ends the job as done, which only admitters and owners do")
    return record
