"""Ed25519 signatures over manifests. In a run with a policy, a network is opened only with the required signatures.

The signed message contains the artifact's name, the manifest's digest and the role (`publish` or `admit`). So a
signature cannot be reused for another expert, for other weights or for another purpose.
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
"""File with the signatures over an artifact's manifest, next to the artifact's folder."""


def default_key_file() -> Path:
    """Return the file of the user's private key: `ATOLL_KEY`, or key.pem in the user's configuration folder."""
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(os.environ.get("ATOLL_KEY") or Path(folder) / "atoll" / "key.pem")


class Signer:
    """A private ed25519 key that signs manifests."""

    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key

    @classmethod
    def open(cls, file: Path) -> "Signer":
        """Read a private key; if there is none, create one that only its owner can read."""
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = Ed25519PrivateKey.generate()
            text = made.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
            # The mode is set when the file is created: a chmod afterwards would leave a moment to read the key.
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(text)
        try:
            key = forms.load_pem_private_key(file.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise AtollError(f"{file}: not a private key without a password: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise AtollError(f"{file}: not an ed25519 key; move it away, then atoll keys creates a new one")
        return cls(key)

    @property
    def public(self) -> str:
        """The public key in hexadecimal, as in a policy."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, role: Role, name: str, manifest: Manifest) -> bytes:
        """Return a signature in the stored form."""
        return to_json({"key": self.public, "signature": self._key.sign(_message(role, name, manifest)).hex()})


def _message(role: Role, name: str, manifest: Manifest) -> bytes:
    return to_json({"atoll": role, "name": name, "manifest": manifest.digest})


def verify(policy: Policy | None, role: Role, name: str, *, manifest: Manifest, signature: Any) -> str:
    """Check a signature. Return the name of the signer, or raise `AtollError` if the policy does not accept it."""
    allowed = policy.keys(role) if policy else {}
    if not allowed:
        return "anyone"
    what = {"publish": "published", "admit": "admitted"}[role]
    if not isinstance(signature, dict):
        raise AtollError(f"{name} is not signed, but the policy lists who may have {what} it")
    who = next((person for person, key in allowed.items() if key == signature.get("key")), None)
    if who is None:
        raise AtollError(f"{name} is signed by a key that the policy does not list: {str(signature.get('key'))[:64]}")
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        given = bytes.fromhex(str(signature.get("signature")))
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(allowed[who])).verify(given, _message(role, name, manifest))
    except (InvalidSignature, ValueError):
        raise AtollError(f"{name}: the signature of {who} does not match this manifest and name") from None
    return who


def open_trusted(artifact: Artifact, kind: Kind[Any], verify_hashes: bool = False) -> Manifest:
    """Return the manifest of a network; if the run has a policy, check all hashes and signatures first."""
    policy = policy_of(artifact.run)
    manifest = artifact.open(kind, verify=verify_hashes or policy is not None)
    if policy is None:
        return manifest
    file = artifact.run / SIGNATURES_FILE.format(name=artifact.name)
    try:
        signatures = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise AtollError(f"{file} is not JSON: {error}") from error
    roles: tuple[Role, ...] = ("publish", "admit") if layout.is_expert(artifact.name) else ("publish",)
    for role in roles:
        try:
            verify(policy, role, artifact.name, manifest=manifest, signature=signatures.get(role))
        except AtollError as error:
            raise AtollError(
                f"{error}. atoll pull fetches networks with their signatures, and atoll push signs yours; "
                f"without {artifact.run / POLICY_FILE} no signature is required"
            ) from error
    return manifest
