"""Share runs in tests: keys by name, and the short forms of the verbs."""

from pathlib import Path
from typing import Any

from atoll.apps.share.lease_records import LeaseStatus
from atoll.apps.share.lease_records import get_lease as read_lease
from atoll.apps.share.leases import Lease
from atoll.apps.share.owners import change_root, push
from atoll.apps.share.remote_run import Access, RemoteRun
from atoll.apps.share.store import Store
from atoll.verify.signing import Signer
from atoll.verify.trust import Network

KEYS: dict[str, Signer] = {}
POLICY = {
    "objectives": ["flow-matching", "ddpm"],
    "max_parameters": 10_000_000,
    "max_bytes": 1 << 30,
    "max_validation_loss": 50.0,
}


def person(name: str) -> Signer:
    """Return the key of a person, the same one in the whole session."""
    if name not in KEYS:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        KEYS[name] = Signer(Ed25519PrivateKey.generate())
    return KEYS[name]


def key_file(name: str, folder: Path) -> Path:
    """Write the private key of a person to a file."""
    from cryptography.hazmat.primitives import serialization as forms

    file = folder / f"{name}.pem"
    file.touch(mode=0o600)
    pem = person(name)._key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    file.write_bytes(pem)
    return file


def share(run: Path, store: Store, owner: str = "owner", **changes: Any) -> str:
    """Push a run, then change its root and push it again; return the fingerprint."""
    pushed, _ = push(run, store, person(owner))
    if changes:
        change_root(run, person(owner), **changes)
        pushed, _ = push(run, store, person(owner))
    return pushed.trust.roots[0].fingerprint


def publishers(*names: str, experts: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return the publishers of a root."""
    return {name: {"key": person(name).public, "experts": experts} for name in names}


def remote(store: Store, folder: Path | None = None, *, by: str | None = None, trust: str | None = None) -> RemoteRun:
    """Open a shared run as somebody; without a fingerprint, as `--unsigned` does."""
    return RemoteRun.open(store, folder, Access(trust, trust is None, person(by) if by else None))


def network_by(author: RemoteRun, job: str, manifest: str = "1" * 64, weights: str = "2" * 64) -> Network:
    """Return the entry of a snapshot for a network that somebody has signed."""
    signature = author.sign("publish", f"{job}/final", manifest, weights=weights)
    assert signature is not None
    return Network(manifest=manifest, signature=signature)


def lease_of(store: Store, job: str) -> LeaseStatus:
    """Return the current record of a job, whoever signed it."""
    found = read_lease(store, job)
    assert found is not None
    return found


def acquire(*options: Any, **named: Any) -> Lease:
    """Acquire a lease, which must be free."""
    lease = Lease.acquire(*options, **named)
    assert lease is not None
    return lease
