"""Ed25519 keys and signatures.

Every signature of a shared run covers one `Statement`: the run, the role of the signer, the slot (what it is about),
the version of the run's root at that time, and a digest. So it cannot be reused in another run, for another expert, for
other weights or for another purpose. `verify/trust.py` decides whose signatures count.
"""

import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from atoll.core.artifacts import Content, to_json
from atoll.core.errors import AtollError
from atoll.verify.untrusted import Refused

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Role = Literal["root", "snapshot", "publish", "checkpoint", "lease"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 in hexadecimal."""
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Version = Annotated[int, Field(ge=1, le=999_999)]
"""The number of a root or snapshot: six digits in the names of its files."""


PublicKey = Digest
"""An ed25519 public key in hexadecimal, which `atoll keys` prints."""


class _Links(Content):
    version: Version
    """The version of the root under which it was signed."""
    previous: Digest | None = None
    """Of a checkpoint or network: the digest of the checkpoint before. These links make training a chain that can be
    audited."""
    weights: Digest | None = None
    """Of a network: the digest of its tensors, which an export in another layout still has."""


class Statement(_Links):
    """What a signature is about."""

    run: Digest | RunId
    """Digest of version 1 of the root, which identifies the run; in a statement about a root, its random number."""
    role: Role
    """In which role the signer signs."""
    slot: str = Field(max_length=200)
    """The signed thing: the name of an artifact, a job for a lease, or empty for the run's root and snapshot."""
    digest: Digest
    """SHA-256 of what is signed."""

    def to_bytes(self) -> bytes:
        """Return the signed message."""
        # The prefix separates these messages from everything else that the same key may sign.
        return b"atoll signature 1\n" + to_json(self.model_dump())


class Signature(_Links):
    """A signature as it is stored; slot, role and digest follow from where it is stored."""

    key: PublicKey
    """Public key of the signer."""
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")
    """The 64 bytes of the ed25519 signature, in hexadecimal."""

    def check(self, statement: Statement) -> None:
        """Raise `Refused` unless this is a signature of its key over the statement."""
        if not _is_valid(self.key, self.signature, statement.to_bytes()):
            what = statement.slot or statement.role
            raise Refused(f"{what}: the signature of {self.key[:8]}… does not match its content and slot")


# A model with many networks is opened network by network, each with the signatures of its whole snapshot.
@lru_cache(maxsize=4096)
def _is_valid(key: str, signature: str, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


class Signer:
    """A private ed25519 key."""

    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key

    @classmethod
    def open(cls, file: Path) -> "Signer":
        """Read a private key; if there is none, create one that only its owner can read."""
        try:
            from cryptography.hazmat.primitives import serialization as forms
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError as error:
            raise AtollError("signing needs the package cryptography; pip install 'atoll[islands]'") from error
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = Ed25519PrivateKey.generate()
            text = made.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
            # The mode is set when the file is created: a chmod afterwards would leave a moment to read the key.
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(text)
        mode = stat.S_IMODE(file.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            raise AtollError(f"{file} can be read by other users (mode {mode:04o}); protect it with: chmod 600 {file}")
        try:
            key = forms.load_pem_private_key(file.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise AtollError(f"{file}: not a private key without a password: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise AtollError(f"{file}: not an ed25519 key; move it away, then atoll keys creates a new one")
        return cls(key)

    @property
    def public(self) -> str:
        """The public key in hexadecimal."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, statement: Statement) -> Signature:
        """Return the signature over a statement."""
        fields = statement.model_dump(include={"version", "previous", "weights"})
        return Signature(key=self.public, signature=self._key.sign(statement.to_bytes()).hex(), **fields)


def config_folder() -> Path:
    """Return Atoll's folder among the user's settings."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "atoll"


def default_key_file() -> Path:
    """Return the file of the user's private key: `ATOLL_KEY`, or key.pem in the user's configuration folder."""
    return Path(os.environ.get("ATOLL_KEY") or config_folder() / "key.pem")
