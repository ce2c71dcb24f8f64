"""A run in a store, opened by somebody who trusts its owner but not the store.

The fingerprint of the run's root comes with its URL (`s3://bucket/run#sha256=…`). Everything else is checked against
it: settings and shards by their digests in the root, finished networks by the signed snapshot, and everything that
contributors write by their signatures. Objects that fail a check count as absent, so that nobody who can only create
objects can stop the others.
"""

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from zlib import crc32

from pydantic import ValidationError

from atoll.apps.share.lease_records import Record
from atoll.apps.share.shared_settings import MAX_BYTES as MAX_SETTINGS
from atoll.apps.share.shared_settings import read_shared, shared_part
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import is_uploaded, read_manifest, signature_key
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest, to_json
from atoll.core.config import Config
from atoll.core.errors import AtollError, wrong_fields
from atoll.core.layout import CONFIG_FILE
from atoll.core.manifests import EXPERT, StartSpec
from atoll.verify.local_trust import check_seen, local_trust, save_root
from atoll.verify.signing import Role, Signature, Signer
from atoll.verify.trust import (
    MAX_BYTES,
    Network,
    Policy,
    Root,
    RootChain,
    Signed,
    Snapshot,
    parse_signed,
)
from atoll.verify.untrusted import Refused, strict_json

FRAGMENT = "#sha256="
_MAX_SIGNATURE = 1024
"""Maximum number of bytes of a signature; it takes 400."""


def split_url(url: str, fingerprint: str | None = None) -> tuple[str, str | None]:
    """Return the URL of a store and the fingerprint, which is given apart or in the fragment of the URL."""
    url, mark, fragment = url.partition(FRAGMENT)
    given = fragment if mark else fingerprint
    if given is not None and (len(given) != 64 or any(letter not in "0123456789abcdef" for letter in given)):
        raise AtollError(f"{given[:80]!r} is not a fingerprint; expected the 64 hexadecimal digits that push printed")
    if mark and fingerprint is not None and fingerprint != fragment:
        raise AtollError("the URL and --trust give different fingerprints")
    return url, given


@dataclass(frozen=True)
class Access:
    """How a verb opens a shared run."""

    fingerprint: str | None = None
    unsigned: bool = False
    """Accept a run without a fingerprint, which anybody could have written."""
    signer: Signer | None = None


@dataclass
class RemoteRun:
    """A shared run whose root and settings are verified. It is the `lease_records.Authority` of its leases."""

    store: Store
    trust: RootChain
    config: Config
    signer: Signer | None = None

    @classmethod
    def open(cls, store: Store, folder: Path | None, access: Access) -> "RemoteRun":
        """Verify root and settings; write them to the local copy in `folder`, if one is given.

        A local copy that was verified before is the fingerprint, if no other is given.
        """
        known = local_trust(folder) if folder is not None else None
        fingerprint = access.fingerprint or (known.roots[0].digest if known else None)
        files = read_all(store, layout.ROOTS)
        if not files:
            raise AtollError(without_root(store))
        if fingerprint is None and not access.unsigned:
            raise AtollError(
                f"{store.url}: anyone could have written this run. Add the fingerprint that its owner got from atoll "
                f"push ('{store.url}{FRAGMENT}…', or --trust), or accept that risk with --unsigned"
            )
        trust = RootChain.of(files, fingerprint or RootChain.first(files, store.url), store.url)
        trust.check_valid(store.url)
        check_seen(trust)
        settings = _read_settings(store, trust)
        config = read_shared(settings, f"{store.url}/{CONFIG_FILE}")
        if folder is not None:
            config = _save_copy(folder, settings, config)
            for data in files.values():
                _keep_root(folder, trust, data)
        return cls(store, trust, config, access.signer)

    @property
    def policy(self) -> Policy:
        """The limits on contributions."""
        return self.trust.current.policy

    @property
    def key(self) -> str:
        """The public key of this user; empty without one."""
        return self.signer.public if self.signer else ""

    # Signatures

    def sign(self, role: Role, slot: str, digest: str, *, previous: str | None = None) -> Signature | None:
        """Return this user's signature; None without a key."""
        if self.signer is None:
            return None
        return self.signer.sign(self.trust.statement(role, slot, digest, previous=previous))

    def verify(self, signature: Signature | None, role: Role, slot: str, *, digest: str, listed: bool = False) -> str:
        """Return the name of the signer, or raise `Refused`; `listed` as in `RootChain.verify`."""
        if signature is None:
            raise Refused(f"{slot or role} is not signed")
        if signature.version > self.trust.current.version:
            self.refresh()
        return self.trust.verify(signature, role, slot, digest=digest, listed=listed)

    def may_take(self, key: str | None, record: Record, *, keys: Collection[str | None]) -> bool:
        """Return whether a key may take a lease that is not free: its own, or any as an owner or admitter.

        Others may take one that is being trained, if a network of theirs is finished and they have not held the lease.
        Anybody may take that of a contribution that was withdrawn.
        """
        if (key is not None and key == record.key) or self.may_admit(key):
            return True
        if record.state == "held" and record.manifest is None and key not in keys:
            # Nobody can check how fast somebody is. An admitted network shows at least that they train, and once is
            # enough for an honest worker and little for one that only wants to stop the others.
            return any(network.publisher == key for network in self.networks().values())
        return record.manifest in self.trust.current.withdrawn

    def may_admit(self, key: str | None) -> bool:
        """Return whether a key is that of an admitter or owner."""
        return key is not None and self.trust.current.admits(key)

    def refresh(self) -> None:
        """Read versions of the root that were published since the run was opened."""
        files = read_all(self.store, layout.ROOTS)
        self.trust = RootChain.of(files, self.trust.roots[0].digest, self.store.url)
        check_seen(self.trust)

    def write_signature(self, role: Role, name: str, digest: str, *, previous: str | None = None) -> None:
        """Sign an artifact. Its manifest is uploaded afterwards, so nobody can occupy the name of the signature."""
        if signature := self.sign(role, name, digest, previous=previous):
            self.store.write(signature_key(name, digest), to_json(signature.model_dump()))

    def read_signature(self, role: Role, name: str, digest: str, *, listed: bool = False) -> Signature:
        """Return the valid signature over an artifact, or raise `Refused`; `listed` as in `RootChain.verify`."""
        key = signature_key(name, digest)
        data = self.store.read(key, _MAX_SIGNATURE)
        if data is None:
            raise Refused(f"{name} is not signed")
        try:
            signature = Signature.model_validate(strict_json(data, key), strict=True)
        except ValidationError as error:
            raise Refused(f"{key} is not a signature: {wrong_fields(error)}") from error
        self.verify(signature, role, name, digest=digest, listed=listed)
        return signature

    # Data and networks

    def shards(self, cluster: int) -> Manifest:
        """Return the manifest of a cluster's shards, as the root lists it."""
        name = layout.shards(cluster)
        manifest = read_manifest(self.store, name, self.trust.current.shards[cluster])
        if manifest is None:
            raise Refused(
                f"{self.store.url} has no {name}; the owner publishes it with: atoll push RUN {self.store.url}"
            )
        return manifest

    def snapshot(self, *, check: bool = True) -> Signed[Snapshot] | None:
        """Return the newest valid snapshot; None if there is none yet. It must not be older than one seen before.

        Without `check` it may be: after the key of an admitter was withdrawn, its snapshots no longer count.
        """
        found = self.trust.newest_snapshot(read_all(self.store, layout.SNAPSHOTS))
        if check:
            check_seen(self.trust, found.content.order if found else (0, 0))
        return found

    def networks(self) -> dict[str, Network]:
        """Return the finished networks of the run, by job."""
        found = self.snapshot()
        return self.trust.usable(found.content) if found else {}

    def shared_start(self) -> StartSpec | None:
        """Return the shared start with which the experts begin; None if the run has none. Refuse one that is absent."""
        if not self.config.shared_start.flops_share:
            return None
        network, name = self.networks().get(layout.START), layout.final(layout.START)
        manifest = read_manifest(self.store, name, network.manifest) if network else None
        compute = EXPERT.parse(manifest, name).compute if manifest else None
        if manifest is None or compute is None:
            raise Refused(
                f"{self.store.url} has no shared start yet, with which the experts of this run begin; its owner trains "
                "it with atoll train RUN --start, and publishes it with atoll push"
            )
        return StartSpec(manifest=manifest.digest, compute=compute)

    def write_snapshot(self, networks: dict[str, Network], *, check: bool = True) -> Signed[Snapshot]:
        """Add networks to the newest snapshot and publish it as the next one. A job that it lists is not replaced.

        Two admitters may do this at the same time. The store lets one of them create each key; the other one reads the
        snapshot again, so that no network is lost.
        """
        assert self.signer is not None
        root, taken = self.trust.current.version, set[str]()
        while True:
            # Listed before the snapshot is read: a key that is skipped was looked at, and holds no later snapshot.
            taken |= {entry.key for entry in self.store.entries(layout.SNAPSHOTS)}
            found = self.snapshot(check=check)
            listed = self.trust.usable(found.content) if found else {}
            first = found.content.version + 1 if found and found.content.root == root else 1
            version = next(number for number in count(first) if layout.snapshot(root, number) not in taken)
            content = Snapshot(run=self.trust.run, root=root, version=version, networks=listed | networks)
            signed = Signed(content, (self.signer.sign(content.statement()),))
            if self.store.create(layout.snapshot(*content.order), signed.to_json()):
                check_seen(self.trust, content.order)
                return signed
            taken.add(layout.snapshot(*content.order))  # in a folder, a link takes a key and is not listed


def read_all(store: Store, folder: str) -> dict[str, bytes]:
    """Return the small objects below a folder, by key, the oldest first; skip those that are too large."""
    found = {}
    for entry in sorted(store.entries(folder), key=lambda entry: (entry.modified, entry.key)):
        if entry.size <= MAX_BYTES and (data := store.read(entry.key, MAX_BYTES)) is not None:
            found[entry.key] = data
    return found


def is_local(store: Store) -> bool:
    """Return whether this is the folder of a run that was never shared: without a root and without uploaded shards."""
    if store.path is None or store.entries(layout.ROOTS):
        return False
    return not any(is_uploaded(entry.key) for entry in store.entries(layout.SHARDS))


def without_root(store: Store) -> str:
    """Return why a store without a root is refused, and what to do."""
    if store.entry(CONFIG_FILE) is None:
        return f"{store.url} holds no run; upload one with: atoll push RUN {store.url}"
    return f"{store.url} has no signed root: its upload is not complete; its owner finishes it with: atoll push RUN URL"


def _read_settings(store: Store, trust: RootChain) -> bytes:
    settings = store.read(CONFIG_FILE, MAX_SETTINGS)
    if settings is None or hashlib.sha256(settings).hexdigest() != trust.current.settings:
        state = "is missing" if settings is None else "is not the one that the owners signed"
        raise Refused(f"{store.url}/{CONFIG_FILE} {state}; ask the owner to push the run again")
    return settings


def _save_copy(folder: Path, settings: bytes, config: Config) -> Config:
    """Write the settings to the local copy, and return them with the settings of this machine, such as `island`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG_FILE).exists():
        Artifact(folder, ".").write(CONFIG_FILE, settings)
        return config
    local = configuration.load(folder)
    if shared_part(local) != shared_part(config):
        raise AtollError(f"{folder / CONFIG_FILE} differs from that of the shared run; use another folder")
    return local


def _keep_root(folder: Path, trust: RootChain, data: bytes) -> None:
    """Write one object to the local copy, if it is a version of the verified root."""
    try:
        signed = parse_signed(Root, data, "root")
    except Refused:
        return
    if signed.content in trust.roots:
        save_root(folder, signed)


def default_folder(url: str) -> Path:
    """Return the folder of the local copy of a shared run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Readable, and unique by the checksum: URLs that differ only in punctuation or beyond 60 characters differ in it.
    safe = "".join(letter if letter.isalnum() else "-" for letter in url)
    return cache / "atoll" / f"{safe[-60:].strip('-')}-{crc32(url.encode()):08x}"
