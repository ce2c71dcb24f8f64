"""Who may do what in a shared run: its root, its snapshot, and the checks of signatures against them.

    RUN/root/000001-DIGEST.json       version 1 of the root, signed by an owner; and so on
    RUN/snapshot/000001-000004.json   snapshot 4 under version 1 of the root, signed by an admitter or owner

The *root* lists keys and what each may sign, the digests of the shared settings and of all shards, limits, and what was
withdrawn. Each version names the digest of the one before, and is signed by an owner that the version before lists. So
owners can add later versions and nobody else can. The beginning of a version's digest is its *fingerprint*. That of
version 1 identifies the run and never changes; a person must get it from the owner.

A fingerprint fixes all versions up to its own, because they are found by their digests (`RootChain.up_to`). After that
version, two valid versions of one number can exist if a key was stolen. The one that the store has had for longer
counts, so that the thief locks nobody out. Whoever has seen a version, or has its fingerprint, stays with it.

A *snapshot* lists the finished networks as one model, each with the signature of its publisher. Whoever reads the run
checks one signature over all of them, so networks cannot be mixed or replaced by older ones. Users keep the highest
versions that they have seen (`local_trust.check_seen`). These are the rules of TUF (theupdateframework.io) on an object
store, with one owner's signature instead of a threshold.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from atoll.core import layout
from atoll.core.artifacts import Content, to_json
from atoll.core.errors import AtollError, unknown, wrong_fields
from atoll.core.names import OBJECTIVES
from atoll.verify.signing import Digest, PublicKey, Role, RunId, Signature, Statement, Version
from atoll.verify.untrusted import Refused, strict_json

MAX_BYTES = 1 << 20
"""Bytes of a root or snapshot. An expert takes 150 bytes in one and 230 in the other, so 1 MB has room for 4,096."""
VALID_DAYS = 365
"""Days until a root expires. A choice: long enough to be no burden, and an abandoned run does not stay valid."""
FINGERPRINT_DIGITS = 32
"""Hexadecimal digits of a fingerprint. Nobody finds another root with the same 128 bits."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.@-]{0,63}$")]

_ROOT = re.compile(rf"{layout.ROOTS}/([0-9]{{6}})-([0-9a-f]{{64}})\.json", re.ASCII)
_SNAPSHOT = re.compile(rf"{layout.SNAPSHOTS}/([0-9]{{6}})-([0-9]{{6}})\.json", re.ASCII)


class Policy(Content):
    """Limits on the networks of contributors."""

    objectives: tuple[str, ...] | None = Field(None, description="names of the allowed objectives; null allows all")
    networks: tuple[str, ...] = Field(("DiT",), description="allowed kinds of networks (DiT, UNetExpert, …)")
    # Both limits bound what a worker downloads and loads before it can judge an expert. Two billion parameters are
    # three times the 606 M of DiT-XL/2 with text; 32 GB hold them four times over in float32.
    max_parameters: int = Field(2_000_000_000, ge=1, description="largest number of parameters of one expert")
    max_bytes: int = Field(32 << 30, ge=1, description="largest size of all files of one expert, in bytes")
    max_validation_loss: float | None = Field(
        None, gt=0, description="largest validation velocity error on the expert's cluster; null allows any"
    )

    @field_validator("objectives")
    @classmethod
    def _are_objectives(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if name not in OBJECTIVES:
                raise ValueError(unknown("objective", name, OBJECTIVES))
        return names


class Publisher(Content):
    """A contributor: the public key, and the numbers of the experts that it may publish; null means all."""

    key: PublicKey
    experts: tuple[Annotated[int, Field(ge=0)], ...] | None = None


class Root(Content):
    """The root of trust of a shared run."""

    format: Literal[1] = Field(
        1, description="format of this file; a number that this version does not know is refused"
    )
    run: RunId = Field(description="random number, so that two runs never have the same digest of version 1")
    version: Version = Field(description="counts up by one")
    previous: Digest | None = Field(description="digest of the version before; null in version 1")
    expires: date = Field(description="last day on which this version is valid (UTC)")
    owners: dict[Name, PublicKey] = Field(description="name and public key of the owners", min_length=1)
    publishers: dict[Name, Publisher] | Literal["anyone"] = Field(
        description="name, public key and experts of the contributors, or `anyone`"
    )
    admitters: dict[Name, PublicKey] = Field(
        default_factory=dict, description="name and public key of those who admit contributions besides the owners"
    )
    settings: Digest = Field(description="SHA-256 of the shared atoll.yaml")
    shards: tuple[Digest, ...] = Field(description="digest of the manifest of each cluster's shards")
    withdrawn_keys: tuple[PublicKey, ...] = Field((), description="keys whose signatures no longer count")
    withdrawn: tuple[Digest, ...] = Field((), description="digests of networks that must not be used any more")
    policy: Policy = Field(default_factory=Policy, description="limits on contributions")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not set(self.owners.values()) - set(self.withdrawn_keys):
            raise ValueError("owners: at least one key must not be withdrawn")
        if (self.previous is None) != (self.version == 1):
            raise ValueError("version 1, and only version 1, has no previous version")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of this version."""
        return hashlib.sha256(to_json(self.model_dump(mode="json"))).hexdigest()

    @property
    def fingerprint(self) -> str:
        """The beginning of the digest, for people."""
        return self.digest[:FINGERPRINT_DIGITS]

    def statement(self) -> Statement:
        """Return what an owner signs."""
        return Statement(run=self.run, role="root", slot="", version=self.version, digest=self.digest)

    def signer_name(self, key: str, role: Role, slot: str) -> str | None:
        """Return the name of the holder of a key if it may sign in this role; else None."""
        names = {key: name for name, key in self.owners.items()}
        if role in ("snapshot", "lease"):
            names |= {key: name for name, key in self.admitters.items()}
        if role in ("publish", "checkpoint", "lease"):
            expert = layout.expert_number(slot)
            # Router, monolith and student are never delegated.
            if self.publishers == "anyone" and expert is not None:
                names.setdefault(key, f"{key[:8]}…")
            elif self.publishers != "anyone" and expert is not None:
                for name, one in self.publishers.items():
                    names |= {one.key: name} if one.experts is None or expert in one.experts else {}
        return names.get(key)

    def admits(self, key: str) -> bool:
        """Return whether a key may sign snapshots."""
        return self.signer_name(key, "snapshot", "") is not None and key not in self.withdrawn_keys


class Network(Content):
    """A finished network of a snapshot."""

    manifest: Digest
    """Digest of its manifest, which lists the hash of every file."""
    signature: Signature
    """The signature of its publisher over manifest and tensors. An admitter cannot list a network of another author."""
    error: float | None = None
    """Mean error of the velocity on the run's own images, as whoever signed the snapshot measured it; no claim of its
    author. For a router, its cross-entropy. None without validation images."""

    @property
    def publisher(self) -> str:
        """The public key of its author."""
        return self.signature.key

    @property
    def weights(self) -> str | None:
        """Digest of its tensors, by which copies are found whatever the file looks like."""
        return self.signature.weights


class Snapshot(Content):
    """The finished networks of a run as one model."""

    format: Literal[1] = 1
    """Format of this file."""
    run: Digest
    """Digest of version 1 of the root, which identifies the run."""
    root: Version
    """The version of the root under which it was signed."""
    version: Version
    """Counts the snapshots under one version of the root."""
    networks: dict[Annotated[str, Field(pattern=layout.JOB_PATTERN)], Network]
    """By job, such as `experts/003` or `router`."""

    @property
    def digest(self) -> str:
        """SHA-256 of the snapshot, which identifies the model."""
        return hashlib.sha256(to_json(self.model_dump(mode="json"))).hexdigest()

    @property
    def order(self) -> tuple[int, int]:
        """Later snapshots have a higher order."""
        return self.root, self.version

    def statement(self) -> Statement:
        """Return what its signer signs."""
        return Statement(run=self.run, role="snapshot", slot="", version=self.root, digest=self.digest)


Document = TypeVar("Document", Root, Snapshot)


@dataclass(frozen=True)
class Signed(Generic[Document]):
    """A root or snapshot with its signature."""

    content: Document
    signature: Signature

    def to_json(self) -> bytes:
        """Return the bytes of its file."""
        return to_json({"signed": self.content.model_dump(mode="json"), "signature": self.signature.model_dump()})


def parse_signed(kind: type[Document], data: bytes, source: str) -> Signed[Document]:
    """Parse a root or snapshot that somebody else wrote; no signature is checked here."""
    value = strict_json(data, source, MAX_BYTES)
    if not isinstance(value, dict) or set(value) != {"signed", "signature"}:
        raise Refused(f"{source} is not a {kind.__name__.lower()}: expected the fields signed and signature")
    try:
        content = kind.model_validate_json(to_json(value["signed"]), strict=True)
        signature = Signature.model_validate_json(to_json(value["signature"]), strict=True)
    except ValidationError as error:
        raise Refused(f"{source} is not a {kind.__name__.lower()}: {wrong_fields(error)}") from error
    return Signed(content, signature)


def _check_follows(signed: Signed[Root], previous: Root | None) -> None:
    """Raise `Refused` unless an owner of the version before has signed this one, and it may follow."""
    root, owners = signed.content, previous or signed.content
    if previous is not None:
        linked = root.version == previous.version + 1 and root.previous == previous.digest and root.run == previous.run
        # What was withdrawn stays withdrawn, and a run does not change its data.
        kept = set(previous.withdrawn) <= set(root.withdrawn)
        kept = kept and set(previous.withdrawn_keys) <= set(root.withdrawn_keys)
        if not linked or not kept or (root.settings, root.shards) != (previous.settings, previous.shards):
            raise Refused(f"version {root.version} of the root does not follow the one before it")
    if signed.signature.key not in owners.owners.values() or signed.signature.key in owners.withdrawn_keys:
        raise Refused(f"version {root.version} of the root is not signed by an owner")
    signed.signature.check(root.statement())


@dataclass(frozen=True)
class Objects:
    """The roots or snapshots of a store or a local run: their names, the oldest first, and how to read one."""

    names: tuple[str, ...]
    read: Callable[[str], bytes | None]

    def roots(self) -> list[tuple[int, str]]:
        """Return version and digest of every object whose name is that of a root."""
        return [(int(match[1]), match[2]) for name in self.names if (match := _ROOT.fullmatch(name))]

    def root(self, version: int, digest: str) -> Signed[Root]:
        """Read one version of the root; raise `Refused` if it is not the one of its name."""
        name = layout.root(version, digest)
        signed = parse_signed(Root, self.read(name) or b"", name)
        if (signed.content.version, signed.content.digest) != (version, digest):
            raise Refused(f"{name} does not match the digest in its name")
        return signed


@dataclass(frozen=True)
class RootChain:
    """All versions of a run's root, verified as a chain."""

    roots: tuple[Root, ...]

    @classmethod
    def up_to(cls, objects: Objects, fingerprint: str | None, source: str) -> "RootChain":
        """Return the versions from 1 to the one with this fingerprint.

        Each is read by the digest that the one after it names, so nobody can add another one. Without a fingerprint,
        anybody could have written the run; the oldest valid version 1 is used.
        """
        why = ""
        for version, digest in objects.roots():
            if not digest.startswith(fingerprint) if fingerprint else version > 1:
                continue
            try:
                chain = [objects.root(version, digest)]
                while (first := chain[0].content).previous is not None:
                    chain.insert(0, objects.root(first.version - 1, first.previous))
                for before, signed in zip([None, *chain], chain, strict=False):
                    _check_follows(signed, before.content if before else None)
                return cls(tuple(signed.content for signed in chain))
            except Refused as reason:
                why = why or f" ({reason})"
        wanted = f" with the fingerprint {fingerprint[:12]}…" if fingerprint else ""
        raise AtollError(f"{source} has no valid root{wanted}{why}; compare the URL with the one of the run's owner")

    def extended(self, objects: Objects) -> "RootChain":
        """Return the chain with all valid versions after it. Of several with one number, the oldest object counts."""
        roots = list(self.roots)
        for version, digest in sorted(objects.roots(), key=lambda one: one[0]):  # stable: the oldest stays first
            if version == roots[-1].version + 1:
                with suppress(Refused):
                    signed = objects.root(version, digest)
                    _check_follows(signed, roots[-1])
                    roots.append(signed.content)
        return RootChain(tuple(roots))

    @property
    def current(self) -> Root:
        """The newest version."""
        return self.roots[-1]

    @property
    def run(self) -> str:
        """The digest of version 1, which identifies the run. `Root.run` cannot: any author may pick it."""
        return self.roots[0].digest

    def check_valid(self, source: str) -> None:
        """Raise `AtollError` if the newest version has expired."""
        if datetime.now(UTC).date() > self.current.expires:
            raise AtollError(
                f"{source}: version {self.current.version} of the root expired on {self.current.expires}; the owner "
                "renews it with: atoll trust RUN renew --push"
            )

    def statement(self, role: Role, slot: str, digest: str, **links: str | None) -> Statement:
        """Return a statement under the current version; `links` are its fields `previous` and `weights`."""
        return Statement(run=self.run, role=role, slot=slot, version=self.current.version, digest=digest, **links)

    def verify(self, signature: Signature, role: Role, slot: str, *, digest: str, listed: bool = False) -> str:
        """Check a signature. Return the name of the signer, or raise `Refused`.

        The key must be allowed by the version of the root that the signature names and, since its signer chose that
        number, by the newest version. What a snapshot has `listed` stays valid when a key is replaced or loses a right.
        A withdrawn key is not valid in any version.
        """
        what = slot or role
        if signature.version > self.current.version:
            raise Refused(f"{what} is signed under version {signature.version} of the root, which is not published")
        if signature.key in self.current.withdrawn_keys:
            raise Refused(f"{what} is signed by the key {signature.key[:8]}…, which was withdrawn")
        if digest in self.current.withdrawn:
            raise Refused(f"{what} was withdrawn by the owners of the run")
        name = self.roots[signature.version - 1].signer_name(signature.key, role, slot)
        if name is None or not (listed or self.current.signer_name(signature.key, role, slot)):
            raise Refused(f"{what} is signed by a key that the root does not allow for it: {signature.key}")
        signed = self.statement(role, slot, digest, previous=signature.previous, weights=signature.weights)
        signature.check(signed.model_copy(update={"version": signature.version}))
        return name

    def newest_snapshot(self, objects: Objects) -> Signed[Snapshot] | None:
        """Return the newest valid snapshot. Objects are read from the highest number down to the first valid one."""
        named = [(int(match[1]), int(match[2]), name) for name in objects.names if (match := _SNAPSHOT.fullmatch(name))]
        for root, version, name in sorted(named, reverse=True):
            try:
                if root > self.current.version:
                    continue
                signed = parse_signed(Snapshot, objects.read(name) or b"", name)
                if (signed.content.run, signed.content.order) != (self.run, (root, version)):
                    continue
                # Of an earlier version, too: an owner's snapshot under the newest version is later than all these.
                self.verify(signed.signature, "snapshot", "", digest=signed.content.digest, listed=True)
                if signed.signature.version == root:
                    return signed
            except Refused:
                continue
        return None

    def usable(self, snapshot: Signed[Snapshot] | None, job: str | None = None) -> dict[str, Network]:
        """Return the networks of a snapshot, or that of one job, that may be used.

        Those whose publishers were allowed to publish them, and signed them, and that were not withdrawn since.
        """
        found = {}
        for name, network in snapshot.content.networks.items() if snapshot else ():
            if job in (None, name):
                with suppress(Refused):
                    slot, digest = layout.final(name), network.manifest
                    self.verify(network.signature, "publish", slot, digest=digest, listed=True)
                    found[name] = network
        return found
