"""Who may publish in a run, and what: `policy.json` in the run, and ed25519 signatures over manifests.

A signature is over the job's name, the manifest's digest and what it says (`publish` or `admit`), so it cannot be moved
to another expert, to other weights, or to another purpose. A run without a policy trusts whoever can write to it.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, field_validator

from atoll.core.artifacts import Artifact, Manifest, to_json
from atoll.core.config import Section
from atoll.core.errors import AtollError
from atoll.core.names import OBJECTIVES, unknown_objective

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

POLICY_FILE = "policy.json"
SIGNATURES_FILE = "{name}.signatures.json"
"""Beside an artifact of a run's folder: the signatures over its manifest."""
Role = Literal["publish", "admit"]


class Policy(Section):
    """What contributors may do in a run."""

    publishers: dict[str, str] = Field({}, description="name: public key of everyone who may publish; empty is anyone")
    admitters: dict[str, str] = Field(
        {},
        description="name: public key of those whose check lets an expert in; empty lets publishers check themselves",
    )
    objectives: list[str] | None = Field(None, description="names of the objectives allowed; null is any")
    networks: list[str] = Field(["DiT"], description="kinds of networks (DiT, UNetExpert, …) allowed")
    max_parameters: int = Field(2_000_000_000, ge=1, description="of one expert")
    max_bytes: int = Field(32 << 30, ge=1, description="of all files of one expert")
    max_held_out_loss: float | None = Field(
        None, gt=0, description="the bar: held-out velocity error on the expert's own cluster; null is none"
    )

    @field_validator("publishers", "admitters")
    @classmethod
    def _are_keys(cls, keys: dict[str, str]) -> dict[str, str]:
        for name, key in keys.items():
            if len(key) != 64 or any(letter not in "0123456789abcdef" for letter in key):
                raise ValueError(f"the key of {name} is not 64 hexadecimal digits; atoll keys prints one's own")
        return keys

    @field_validator("objectives")
    @classmethod
    def _are_objectives(cls, names: list[str] | None) -> list[str] | None:
        for name in names or []:
            if name not in OBJECTIVES:
                raise ValueError(unknown_objective(name))
        return names

    def keys(self, role: Role) -> dict[str, str]:
        """Name and key of those who may sign in a role."""
        return self.publishers if role == "publish" else self.admitters


def read_policy(data: bytes | None, source: str) -> Policy | None:
    """The policy of a run, or None if it has none."""
    if data is None:
        return None
    try:
        return Policy.model_validate(json.loads(data))
    except (ValidationError, ValueError) as error:
        raise AtollError(f"{source}: not a policy: {error}") from error


def policy_of(run: Path) -> Policy | None:
    """The policy in a run's folder."""
    file = run / POLICY_FILE
    return read_policy(file.read_bytes() if file.is_file() else None, str(file))


# Keys


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


def verify(policy: Policy | None, role: Role, name: str, manifest: Manifest, signature: Any) -> str:
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


def open_trusted(artifact: Artifact, kind: str, verify_hashes: bool = False) -> Manifest:
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
    roles: tuple[Role, ...] = ("publish", "admit") if artifact.name.startswith("experts/") else ("publish",)
    for role in roles:
        try:
            verify(policy, role, artifact.name, manifest, signatures.get(role))
        except AtollError as error:
            raise AtollError(
                f"{error}. Networks come signed with atoll pull; one's own are signed by atoll push; "
                f"without {artifact.run / POLICY_FILE} nothing is asked for"
            ) from error
    return manifest
