"""Checks of untrusted input: JSON, file names and manifests, before anything is built from them.

Nothing here unpacks, imports or executes the input. Input that is not exactly in the expected form is refused with a
reason. Sizes are bounded before the input is parsed, so that a small message cannot cost much memory or time.
"""

import json
import math
import re
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.core.artifacts import FORMAT, FileEntry, Manifest
from atoll.core.errors import AtollError, wrong_fields
from atoll.core.layout import MANIFEST_FILE

MAX_JSON = 4 << 20
"""Bytes of one manifest. A shard of 8,192 images takes 270 bytes, so 4 MB list 127 million images of one cluster."""
MAX_DEPTH = 32
"""Levels of nesting in JSON. Manifests have about 6; Python's parser recurses once per level."""
MAX_NUMBER = 65536
"""Largest number in the specification of a network: nine times the widest layer of the presets (ddm24b: 7,168)."""
MAX_TEXT = 200
"""Characters of one text in the specification of a network; the longest class names of diffusers have about 40."""
MAX_ENTRIES = 64
"""Entries of one list or object in the specification of a network; the UNet of Stable Diffusion has 48."""
_LIMITS = {"depth": 512, "num_layers": 512, "layers_per_block": 64}
"""Smaller limits for layers, since each layer is built before the network's size can be checked; DiT-XL has 28."""
_HEX = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Possessive quantifiers (++, *+) never give back what they matched, and the closing quote is optional. So a string
# without an end is scanned once. With backtracking, every quote in it would start another scan to the end of the text.
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class Refused(AtollError):  # noqa: N818 - a decision, not a fault of the program
    """Untrusted input was refused; the message is the reason, in printable characters and of bounded length."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


def printable(text: str, limit: int = 1000) -> str:
    """Return a text of others for a terminal: no control characters, which could move the cursor or hide lines."""
    # 1,000 characters: longer than our own messages, shorter than a screen.
    return "".join(letter if letter.isprintable() else " " for letter in text[:limit])


class Foreign(BaseModel):
    """The fields that Atoll needs of a JSON file that another library wrote; all others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read and check the file. Raise `AtollError` with the name of a wrong field."""
        try:
            return cls.model_validate(json.loads(file.read_text(encoding="utf-8")))
        except ValidationError as error:
            raise AtollError(f"{file}: {wrong_fields(error)}") from error
        except ValueError as error:
            raise AtollError(f"{file} is not JSON ({error}); copy the folder again") from error


def strict_json(data: bytes, what: str, limit: int = MAX_JSON) -> Any:
    """Parse JSON of bounded size and depth, without repeated keys, NaN or infinity; `what` names it in errors."""
    if len(data) > limit:
        raise Refused(f"{what} has {len(data):,} bytes; the limit is {limit:,}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(f"{what} is not UTF-8 text") from None
    # The depth is counted before parsing: json.loads would recurse until the interpreter's limit.
    depth = 0
    for found in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found.group(), 0)
        if depth > MAX_DEPTH:
            raise Refused(f"{what} is nested deeper than {MAX_DEPTH} levels")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant, parse_float=_finite)
    except ValueError as error:
        raise Refused(f"{what} is not plain JSON: {error}") from error


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} appears twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def check_bounded(value: Any, key: str) -> None:
    """Raise `Refused` if a network's specification has too many entries, or too large numbers or texts.

    The network is built from it afterwards, so a specification must not be able to request a million layers.
    """
    if isinstance(value, dict | list):
        if len(value) > MAX_ENTRIES:
            raise Refused(f"{key} has {len(value)} entries; the limit is {MAX_ENTRIES}")
        for name, item in value.items() if isinstance(value, dict) else ((key, item) for item in value):
            check_bounded(item, str(name)[:40])
    elif isinstance(value, int | float) and abs(value) > _LIMITS.get(key, MAX_NUMBER):
        raise Refused(f"{key} is {value}; the limit is {_LIMITS.get(key, MAX_NUMBER)}")
    elif isinstance(value, str) and len(value) > MAX_TEXT:
        raise Refused(f"{key} is a text of {len(value)} characters; the limit is {MAX_TEXT}")


def strict_name(name: object, what: str) -> str:
    """Return the name of a file inside an artifact. Raise `Refused` for hidden files and paths out of its folder."""
    if not isinstance(name, str) or len(name) > 200:
        raise Refused(f"{what} lists a file {str(name)[:80]!r}; expected a text of at most 200 characters")
    parts = PurePosixPath(name).parts
    if name != "/".join(parts) or not parts or not all(_NAME.fullmatch(part) for part in parts):
        raise Refused(f"{what} lists a file {name!r}; only letters, digits, '.', '-', '_' below its folder are allowed")
    if name == MANIFEST_FILE:
        raise Refused(f"{what} lists itself")
    return name


def strict_manifest(data: bytes, what: str) -> Manifest:
    """Parse a manifest; every field must have the right type, and the bytes must be canonical (`to_json`)."""
    value = strict_json(data, what)
    if not isinstance(value, dict) or set(value) != {"format", "kind", "version", "made_from", "content", "files"}:
        raise Refused(f"{what} is not a manifest: expected format, kind, version, made_from, content and files")
    if value["format"] != FORMAT or not isinstance(value["kind"], str) or type(value["version"]) is not int:
        found = f"format {value['format']!r}, kind {value['kind']!r} and version {value['version']!r}"
        raise Refused(f"{what} has {found}; expected {FORMAT}, a text and a number")
    if not all(isinstance(value[key], dict) for key in ("made_from", "content", "files")):
        raise Refused(f"{what}: made_from, content and files must be objects")
    files = {strict_name(name, what): _file_entry(entry, name, what) for name, entry in value["files"].items()}
    if len({name.casefold() for name in files}) != len(files):
        # On file systems that ignore case, the second of these files would replace the first.
        raise Refused(f"{what} lists file names that differ only in upper and lower case")
    manifest = Manifest(value["kind"], value["made_from"], value["content"], files, value["version"])
    # The digest is computed from the parsed manifest. Other bytes with the same meaning would have the same digest.
    if manifest.to_json() != data:
        raise Refused(f"{what} is not canonical JSON: sorted keys, indentation of 1, UTF-8, a newline at the end")
    return manifest


def _file_entry(entry: object, name: str, what: str) -> FileEntry:
    if not isinstance(entry, dict) or set(entry) != {"size", "sha256"}:
        raise Refused(f"{what}: {name} must have exactly the fields size and sha256")
    size, digest = entry["size"], entry["sha256"]
    # 2^50 bytes (1 PB) are far above any file, and far below what overflows a sum of sizes.
    if type(size) is not int or not 0 <= size < 1 << 50:
        raise Refused(f"{what}: the size of {name} is {str(size)[:40]}; expected a number of bytes")
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        raise Refused(f"{what}: the sha256 of {name} is not 64 hexadecimal digits")
    return FileEntry(size, digest)
