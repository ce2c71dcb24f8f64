"""Who may do what in a shared run: its root, its snapshot, and the checks of signatures against them.

    RUN/root/000001-DIGEST.json       version 1 of the root, signed by its owners; and so on
    RUN/snapshot/000001-000004.json   snapshot 4 under version 1 of the root, signed by an admitter or owner

The *root* lists keys and what each may sign, the digests of the shared settings and of all shards, limits, and what was
withdrawn. Its *fingerprint*, the digest of any of its versions, is what a person must get from the owner. Each version
names the digest of the one before, so a fingerprint fixes all versions up to it. Each version is signed by a threshold
of the owners of the version before and of its own, so owners can add later versions and nobody else can.

A *snapshot* lists the finished networks as one model. Whoever reads the run checks one signature over all of them, so
networks cannot be mixed or replaced by older ones. Users keep the highest versions that they have seen
(`local_trust.check_seen`). These are the rules of TUF (theupdateframework.io) on an object store.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping
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
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.@-]{0,63}$")]


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

    def may_publish(self, expert: int | None) -> bool:
        """Return whether an expert is delegated to this publisher. Router, monolith and student never are."""
        return expert is not None and (self.experts is None or expert in self.experts)


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
    threshold: int = Field(1, ge=1, description="number of owners that must sign a version")
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
        if not self.threshold <= len(set(self.owners.values())):
            raise ValueError(
                f"threshold is {self.threshold}, but there are {len(set(self.owners.values()))} owner keys"
            )
        if (self.previous is None) != (self.version == 1):
            raise ValueError("version 1, and only version 1, has no previous version")
        return self

    @property
    def digest(self) -> str:
        """The fingerprint of this version."""
        return hashlib.sha256(to_json(self.model_dump(mode="json"))).hexdigest()

    def statement(self) -> Statement:
        """Return what its owners sign."""
        return Statement(run=self.run, role="root", slot="", version=self.version, digest=self.digest)

    def signer_name(self, key: str, role: Role, slot: str) -> str | None:
        """Return the name of the holder of a key if it may sign in this role; else None."""
        names = {key: name for name, key in self.owners.items()}
        if role in ("snapshot", "lease"):
            names |= {key: name for name, key in self.admitters.items()}
        if role in ("publish", "checkpoint", "lease"):
            expert = layout.expert_number(slot)
            if self.publishers == "anyone":
                names.setdefault(key, f"{key[:8]}…" if expert is not None else "")
            else:
                names |= {one.key: name for name, one in self.publishers.items() if one.may_publish(expert)}
        return names.get(key) or None

    def admits(self, key: str) -> bool:
        """Return whether a key may sign snapshots."""
        return self.signer_name(key, "snapshot", "") is not None and key not in self.withdrawn_keys


class Network(Content):
    """A finished network of a snapshot."""

    manifest: Digest
    """Digest of its manifest, which lists the hash of every file."""
    weights: Digest
    """Digest of its tensors, by which copies are found whatever the file looks like."""
    publisher: PublicKey
    """Who signed it."""


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
    """A root or snapshot with its signatures."""

    content: Document
    signatures: tuple[Signature, ...] = ()

    def to_json(self) -> bytes:
        """Return the bytes of its file."""
        signatures = [one.model_dump() for one in self.signatures]
        return to_json({"signed": self.content.model_dump(mode="json"), "signatures": signatures})


def parse_signed(kind: type[Document], data: bytes, source: str) -> Signed[Document]:
    """Parse a root or snapshot that somebody else wrote; no signature is checked here."""
    value = strict_json(data, source, MAX_BYTES)
    if (
        not isinstance(value, dict)
        or set(value) != {"signed", "signatures"}
        or not isinstance(value["signatures"], list)
    ):
        raise Refused(f"{source} is not a {kind.__name__.lower()}: expected the fields signed and signatures")
    try:
        content = kind.model_validate_json(to_json(value["signed"]), strict=True)
        # 64 signatures: far more owners than a run has, and each costs a verification.
        signatures = tuple(Signature.model_validate_json(to_json(one), strict=True) for one in value["signatures"][:64])
    except ValidationError as error:
        raise Refused(f"{source} is not a {kind.__name__.lower()}: {wrong_fields(error)}") from error
    return Signed(content, signatures)


def signing_owners(root: Root, owners: Root, signatures: Iterable[Signature]) -> set[str]:
    """Return the keys of the owners that `owners` lists and whose signatures over `root` are valid."""
    valid = set()
    for signature in signatures:
        if signature.key in owners.owners.values() and signature.key not in owners.withdrawn_keys:
            try:
                signature.check(root.statement())
                valid.add(signature.key)
            except Refused:
                continue
    return valid


def missing_signatures(root: Root, previous: Root | None, signatures: Iterable[Signature]) -> int:
    """Return how many signatures of owners are missing: of its own owners, and of those of the version before."""
    signatures = tuple(signatures)
    return max(max(0, one.threshold - len(signing_owners(root, one, signatures))) for one in (root, previous or root))


def _may_follow(root: Root, previous: Root | None) -> bool:
    if previous is None:
        return root.version == 1
    linked = root.version == previous.version + 1 and root.previous == previous.digest and root.run == previous.run
    # What was withdrawn stays withdrawn, and a run does not change its data.
    return (
        linked
        and set(previous.withdrawn) <= set(root.withdrawn)
        and set(previous.withdrawn_keys) <= set(root.withdrawn_keys)
        and (root.settings, root.shards) == (previous.settings, previous.shards)
    )


def _names(chains: Iterable["RootChain"]) -> str:
    return ", ".join(chain.roots[0].digest for chain in list(chains)[:8])


@dataclass(frozen=True)
class RootChain:
    """All versions of a run's root, verified as a chain."""

    roots: tuple[Root, ...]
    forked: bool = False
    """Whether the owners signed two different next versions. It is an error, but not in the root of a stranger."""

    @classmethod
    def of(cls, files: Mapping[str, bytes], fingerprint: str | None, source: str) -> "RootChain":
        """Verify the versions of a root, by file name. Objects that are not valid versions are ignored.

        With a fingerprint, it must be that of one of the versions. Without one, anybody could have written the run: the
        caller must know that it is the right one.
        """
        chains, reasons = cls._chains(files)
        if fingerprint is not None:
            chains = [chain for chain in chains if fingerprint in {root.digest for root in chain.roots}]
        if not chains:
            wanted = f" with the fingerprint {fingerprint[:12]}…" if fingerprint else ""
            why = f" ({reasons[0]})" if reasons else ""
            raise AtollError(
                f"{source} has no valid root{wanted}{why}; compare the URL with the one of the run's owner"
            )
        if len(chains) > 1:
            raise AtollError(f"{source} has several roots ({_names(chains)}); choose one with #sha256=… or --trust")
        if chains[0].forked:
            next_version = chains[0].current.version + 1
            raise AtollError(f"the owners signed two different roots of version {next_version}; ask them")
        return chains[0]

    @classmethod
    def first(cls, files: Mapping[str, bytes], source: str) -> str | None:
        """Return the fingerprint of the root that comes first in `files`, and print which others there are.

        For a user who accepts that anybody could have written the run. Whoever can only create objects cannot add a
        root that the store has had for longer than that of the owner. None if there is no valid root.
        """
        chains, _ = cls._chains(files)
        if len(chains) > 1:
            print(
                f"note: {source} has the roots {_names(chains)}. The first is the oldest and is used; choose another "
                "with --trust",
                file=sys.stderr,
                flush=True,
            )
        return chains[0].roots[0].digest if chains else None

    @classmethod
    def _chains(cls, files: Mapping[str, bytes]) -> tuple[list["RootChain"], list[str]]:
        """Return the chain that each valid version 1 begins, and why objects are not versions of a root."""
        found: dict[int, list[Signed[Root]]] = {}
        reasons = []
        for name, data in files.items():
            try:
                signed = parse_signed(Root, data, name)
                found.setdefault(signed.content.version, []).append(signed)
            except Refused as reason:
                reasons.append(str(reason))
        # The same root under two names is one root.
        chains = {chain.roots[0].digest: chain for one in found.get(1, []) if (chain := cls._follow(one, found))}
        return list(chains.values()), reasons

    @classmethod
    def _follow(cls, last: Signed[Root], found: dict[int, list[Signed[Root]]]) -> "RootChain | None":
        """Return the chain of `last` and all valid versions after it; None if `last` is not valid."""
        if not _may_follow(last.content, None) or missing_signatures(last.content, None, last.signatures):
            return None
        roots: tuple[Root, ...] = (last.content,)
        while True:
            valid = {
                one.content.digest: one.content
                for one in found.get(roots[-1].version + 1, [])
                if _may_follow(one.content, roots[-1])
                and not missing_signatures(one.content, roots[-1], one.signatures)
            }
            if len(valid) != 1:
                return cls(roots, forked=bool(valid))
            roots = (*roots, *valid.values())

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
                "renews it with: atoll trust RUN renew, then atoll push"
            )

    def statement(self, role: Role, slot: str, digest: str, *, previous: str | None = None) -> Statement:
        """Return a statement under the current version."""
        version = self.current.version
        return Statement(run=self.run, role=role, slot=slot, version=version, digest=digest, previous=previous)

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
        signature.check(
            Statement(
                run=self.run,
                role=role,
                slot=slot,
                version=signature.version,
                digest=digest,
                previous=signature.previous,
            )
        )
        return name

    def newest_snapshot(self, files: Mapping[str, bytes]) -> Signed[Snapshot] | None:
        """Return the newest valid snapshot, without networks that were withdrawn. Objects of others are ignored."""
        valid = []
        for name, data in files.items():
            try:
                signed = parse_signed(Snapshot, data, name)
                content = signed.content
                if content.run == self.run and content.root <= self.current.version and signed.signatures:
                    # Of an earlier version, too: an owner's snapshot under the newest version is later than all these.
                    self.verify(signed.signatures[0], "snapshot", "", digest=content.digest, listed=True)
                    if signed.signatures[0].version == content.root:
                        valid.append(signed)
            except Refused:
                continue
        return max(valid, key=lambda signed: signed.content.order, default=None)

    def usable(self, snapshot: Snapshot) -> dict[str, Network]:
        """Return the networks of a snapshot that were not withdrawn since, themselves or their publishers' keys."""
        root = self.current
        return {
            job: network
            for job, network in snapshot.networks.items()
            if network.manifest not in root.withdrawn and network.publisher not in root.withdrawn_keys
        }
