"""Signatures over manifests (ed25519). A network of a run with a policy is opened only if it is signed as that asks.

A signature is over the job's name, the manifest's digest and the role (`publish` or `admit`), so it cannot be moved to
another expert, to other weights, or to another purpose.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core import layout
from atoll.core.artifacts import Artifact, Kind, Manifest, to_json
from atoll.core.errors import AtollError
from atoll.core.layout import POLICY_FILE
from atoll.core.policy import Policy, Role, policy_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


SIGNATURES_FILE = "{name}.signatures.json"
"""Beside an artifact of a run's folder: the signatures over its manifest."""


def default_key_file() -> Path:
    """Where a person's private key is: `ATOLL_KEY`, or the usual place for settings."""
    place = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(os.environ.get("ATOLL_KEY") or Path(place) / "atoll" / "key.pem")


class Signer:
    """A private key."""

    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key

    @classmethod
    def open(cls, file: Path) -> "Signer":
        """Read a private key, or make one that only its owner can read."""
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = Ed25519PrivateKey.generate()
            text = made.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(text)
        try:
            key = forms.load_pem_private_key(file.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise AtollError(f"{file}: not a private key without password: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise AtollError(f"{file}: not an ed25519 key; move it away, and atoll keys makes one")
        return cls(key)

    @property
    def public(self) -> str:
        """The public key, as policies list it."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, role: Role, name: str, manifest: Manifest) -> bytes:
        """A signature as it is stored."""
        return to_json({"key": self.public, "signature": self._key.sign(_message(role, name, manifest)).hex()})


def _message(role: Role, name: str, manifest: Manifest) -> bytes:
    return to_json({"atoll": role, "name": name, "manifest": manifest.digest})


def verify(policy: Policy | None, role: Role, name: str, *, manifest: Manifest, signature: Any) -> str:
    """Who signed a manifest in a role that the policy gives them; raises `AtollError` if nobody did."""
    allowed = policy.keys(role) if policy else {}
    if not allowed:
        return "anyone"
    what = {"publish": "published", "admit": "admitted"}[role]
    if not isinstance(signature, dict):
        raise AtollError(f"{name} is not signed, and the policy says who may have {what} it")
    who = next((person for person, key in allowed.items() if key == signature.get("key")), None)
    if who is None:
        raise AtollError(f"{name} is signed by a key that the policy does not list: {str(signature.get('key'))[:64]}")
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        given = bytes.fromhex(str(signature.get("signature")))
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(allowed[who])).verify(given, _message(role, name, manifest))
    except (InvalidSignature, ValueError):
        raise AtollError(f"{name}: the signature of {who} is not one of this manifest under this name") from None
    return who


def open_trusted(artifact: Artifact, kind: Kind[Any], verify_hashes: bool = False) -> Manifest:
    """Open a network of a run's folder; if the run has a policy, after checking hashes and the signatures beside it."""
    policy = policy_of(artifact.run)
    manifest = artifact.open(kind, verify=verify_hashes or policy is not None)
    if policy is None:
        return manifest
    file = artifact.run / SIGNATURES_FILE.format(name=artifact.name)
    try:
        signatures = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise AtollError(f"{file}: not readable as JSON: {error}") from error
    roles: tuple[Role, ...] = ("publish", "admit") if layout.is_expert(artifact.name) else ("publish",)
    for role in roles:
        try:
            verify(policy, role, artifact.name, manifest=manifest, signature=signatures.get(role))
        except AtollError as error:
            raise AtollError(
                f"{error}. Networks come signed with atoll pull; one's own are signed by atoll push; "
                f"without {artifact.run / POLICY_FILE} nothing is asked for"
            ) from error
    return manifest
