"""A run in a store, opened by somebody who trusts its owner but not the store.

The fingerprint of the run comes with its URL: `s3://bucket/run#sha256=…@4`, for at least version 4 of its root.
Everything else is checked against it: settings and shards by their digests in the root, finished networks by the signed
snapshot, and everything that contributors write by their signatures. Objects that fail a check count as absent, so that
nobody who can only create objects can stop the others.
"""

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from zlib import crc32

from pydantic import ValidationError

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
from atoll.verify.local_trust import check_seen, local_trust, open_chain, save_root
from atoll.verify.signing import Role, Signature, Signer
from atoll.verify.trust import FINGERPRINT_DIGITS, MAX_BYTES, Network, Objects, Policy, RootChain, Signed, Snapshot
from atoll.verify.untrusted import Refused, strict_json

FRAGMENT = "#sha256="
_FINGERPRINT = re.compile(rf"([0-9a-f]{{{FINGERPRINT_DIGITS},64}})(?:@([0-9]{{1,6}}))?", re.ASCII)
_SHARD_FILE = re.compile(r"[a-z]+-[0-9]{6,}\.(safetensors|parquet)|cluster\.safetensors|[a-z]+-[0-9x]+\.safetensors")
_MAX_SIGNATURE = 1024
"""Maximum number of bytes of a signature; it takes 400."""


def split_url(url: str, given: str | None = None) -> tuple[str, str | None]:
    """Return the URL of a store and the fingerprint, which is given apart or in the fragment of the URL."""
    url, mark, fragment = url.partition(FRAGMENT)
    if mark and given is not None and given != fragment:
        raise AtollError("the URL and --trust give different fingerprints")
    return url, fragment if mark else given


@dataclass(frozen=True)
class Access:
    """How a verb opens a shared run."""

    fingerprint: str | None = None
    """Fingerprint of a version of the root, as its owner gave it; `FINGERPRINT@4` needs at least version 4."""
    unsigned: bool = False
    """Accept a run without a fingerprint, which anybody could have written."""
    signer: Signer | None = None

    def parsed(self) -> tuple[str | None, int]:
        """Return the fingerprint and the lowest version that the run must have."""
        if self.fingerprint is None:
            return None, 1
        match = _FINGERPRINT.fullmatch(self.fingerprint)
        if match is None:
            raise AtollError(
                f"{self.fingerprint[:80]!r} is not a fingerprint; expected the {FINGERPRINT_DIGITS} hexadecimal digits "
                "that push printed, and @VERSION"
            )
        return match[1], int(match[2] or 1)


@dataclass
class RemoteRun:
    """A shared run whose root and settings are verified."""

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
        fingerprint, least = access.parsed()
        fingerprint = fingerprint or (known.current.digest if known else None)
        objects = stored_objects(store, layout.ROOTS)
        if not objects.roots():
            raise AtollError(without_root(store))
        if fingerprint is None and not access.unsigned:
            raise AtollError(
                f"{store.url}: anyone could have written this run. Add the fingerprint that its owner got from atoll "
                f"push ('{store.url}{FRAGMENT}…', or --trust), or accept that risk with --unsigned"
            )
        trust = open_chain(objects, fingerprint, store.url)
        others = {digest for version, digest in objects.roots() if version == 1} - {trust.run}
        if fingerprint is None and others:
            used, shown = trust.roots[0].fingerprint, ", ".join(sorted(others)[:8])
            note = f"{store.url} has other roots ({shown}). The oldest, {used}, is used; choose another with --trust"
            print(f"note: {note}", file=sys.stderr, flush=True)
        if trust.current.version < least:
            raise AtollError(
                f"{store.url} shows version {trust.current.version} of the root, and its owner named version {least}: "
                "the store hides newer ones; ask the owner"
            )
        trust.check_valid(store.url)
        settings = _read_settings(store, trust)
        config = read_shared(settings, f"{store.url}/{CONFIG_FILE}")
        if folder is not None:
            config = _save_copy(folder, settings, config)
            for root in trust.roots:
                save_root(folder, objects.root(root.version, root.digest))
        return cls(store, trust, config, access.signer)

    @property
    def url(self) -> str:
        """The URL for others: with the fingerprint of the run, and its current version."""
        return f"{self.store.url}{FRAGMENT}{self.trust.roots[0].fingerprint}@{self.trust.current.version}"

    @property
    def policy(self) -> Policy:
        """The limits on contributions."""
        return self.trust.current.policy

    @property
    def key(self) -> str:
        """The public key of this user; empty without one."""
        return self.signer.public if self.signer else ""

    # Signatures

    def sign(self, role: Role, slot: str, digest: str, **links: str | None) -> Signature | None:
        """Return this user's signature; None without a key. `links` as in `RootChain.statement`."""
        return self.signer.sign(self.trust.statement(role, slot, digest, **links)) if self.signer else None

    def verify(self, signature: Signature | None, role: Role, slot: str, *, digest: str) -> str:
        """Return the name of the signer, or raise `Refused`."""
        if signature is None:
            raise Refused(f"{slot or role} is not signed")
        if signature.version > self.trust.current.version:
            self.refresh()
        return self.trust.verify(signature, role, slot, digest=digest)

    def refresh(self) -> None:
        """Read versions of the root that were published since the run was opened."""
        self.trust = self.trust.extended(stored_objects(self.store, layout.ROOTS))
        check_seen(self.trust)

    def write_signature(self, role: Role, name: str, digest: str, **links: str | None) -> Signature:
        """Sign an artifact. Its manifest is uploaded afterwards, so nobody can occupy the name of the signature."""
        signature = self.sign(role, name, digest, **links)
        assert signature is not None
        self.store.write(signature_key(name, digest), to_json(signature.model_dump()))
        return signature

    def read_signature(self, role: Role, name: str, digest: str) -> Signature:
        """Return the valid signature over an artifact, or raise `Refused`."""
        key = signature_key(name, digest)
        data = self.store.read(key, _MAX_SIGNATURE)
        if data is None:
            raise Refused(f"{name} is not signed")
        try:
            signature = Signature.model_validate(strict_json(data, key), strict=True)
        except ValidationError as error:
            raise Refused(f"{key} is not a signature: {wrong_fields(error)}") from error
        self.verify(signature, role, name, digest=digest)
        return signature

    # Data and networks

    def shards(self, cluster: int) -> Manifest:
        """Return the manifest of a cluster's shards, as the root lists it."""
        name = layout.shards(cluster)
        manifest = read_manifest(self.store, name, self.trust.current.shards[cluster])
        if others := [file for file in manifest.files if not _SHARD_FILE.fullmatch(file)]:
            raise Refused(f"{name} lists {others[0]!r}, which is no file of shards")
        return manifest

    def snapshot(self, *, check: bool = True) -> Signed[Snapshot] | None:
        """Return the newest valid snapshot; None if there is none yet. It must not be older than one seen before.

        Without `check` it may be: after the key of an admitter was withdrawn, its snapshots no longer count.
        """
        found = self.trust.newest_snapshot(stored_objects(self.store, layout.SNAPSHOTS))
        if check:
            check_seen(self.trust, found.content.order if found else (0, 0))
        return found

    def networks(self) -> dict[str, Network]:
        """Return the finished networks of the run, by job."""
        return self.trust.usable(self.snapshot())

    def shared_start(self) -> StartSpec | None:
        """Return the shared start with which the experts begin; None if the run has none. Refuse one that is absent."""
        if not self.config.shared_start.flops_share:
            return None
        network, name = self.networks().get(layout.START), layout.final(layout.START)
        compute = EXPERT.parse(read_manifest(self.store, name, network.manifest), name).compute if network else None
        if network is None or compute is None:
            raise Refused(
                f"{self.store.url} has no shared start yet, with which the experts of this run begin; its owner trains "
                "it with atoll train RUN --start, and publishes it with atoll push"
            )
        return StartSpec(manifest=network.manifest, compute=compute)

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
            first = found.content.version + 1 if found and found.content.root == root else 1
            version = next(number for number in count(first) if layout.snapshot(root, number) not in taken)
            content = Snapshot(
                run=self.trust.run, root=root, version=version, networks=self.trust.usable(found) | networks
            )
            signed = Signed(content, self.signer.sign(content.statement()))
            if self.store.create(layout.snapshot(*content.order), signed.to_json()):
                check_seen(self.trust, content.order)
                return signed
            taken.add(layout.snapshot(*content.order))  # in a folder, a link takes a key and is not listed


def stored_objects(store: Store, folder: str) -> Objects:
    """Return the roots or snapshots of a store, the oldest first. Objects that are too large count as absent."""
    entries = sorted(store.entries(folder), key=lambda entry: (entry.modified, entry.key))
    return Objects(
        tuple(entry.key for entry in entries if entry.size <= MAX_BYTES), lambda name: store.read(name, MAX_BYTES)
    )


def is_local(store: Store) -> bool:
    """Return whether this is the folder of a run that was never shared: without a root and without uploaded shards."""
    if store.path is None or store.entries(layout.ROOTS):
        return False
    return not any(is_uploaded(entry.key) for entry in store.entries(layout.SHARDS))


def without_root(store: Store) -> str:
    """Return why a store without a root is refused, and what to do."""
    if store.entry(CONFIG_FILE) is None:
        return f"{store.url} holds no run; upload one with: atoll push RUN {store.url}"
    return (
        f"{store.url} has a run, but its root is missing: its owner did not finish atoll push, or somebody deleted it; "
        f"the owner puts it back with: atoll push RUN {store.url}"
    )


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


def default_folder(url: str) -> Path:
    """Return the folder of the local copy of a shared run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Readable, and unique by the checksum: URLs that differ only in punctuation or beyond 60 characters differ in it.
    safe = "".join(letter if letter.isalnum() else "-" for letter in url)
    return cache / "atoll" / f"{safe[-60:].strip('-')}-{crc32(url.encode()):08x}"
