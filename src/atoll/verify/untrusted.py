"""Checks of untrusted input: JSON, file names and manifests, before anything is built from them.

Nothing here unpacks, imports or executes the input. Input that is not exactly in the expected form is refused with a
reason. Sizes are bounded before the input is parsed, so that a small message cannot cost much memory or time.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.core.artifacts import Content, Manifest
from atoll.core.errors import AtollError, wrong_fields
from atoll.core.layout import MANIFEST_FILE

MAX_JSON = 4 << 20
"""Bytes of one manifest. A shard of 8,192 images takes 270 bytes, so 4 MB list 127 million images of one cluster."""
MAX_DEPTH = 32
"""Levels of nesting in JSON. Manifests have about 6; Python's parser recurses once per level."""
MAX_NUMBER = 65536
"""Largest number in a specification: nine times the widest layer of the presets (ddm24b: 7,168). Keys have others."""
MAX_TEXT = 200
"""Characters of one text in the specification of a network; the longest class names of diffusers have about 40."""
MAX_ENTRIES = 64
"""Entries of one list or object in the specification of a network; the UNet of Stable Diffusion has 48."""
LIMITS = {"depth": 512, "num_layers": 512, "layers_per_block": 64}
"""Other limits, by key. Each layer is built before the network's size can be checked; DiT-XL has 28."""
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


def check_bounded(value: Any, key: str, limits: Mapping[str, int] = LIMITS) -> None:
    """Raise `Refused` if a specification has too many entries, or too large numbers or texts.

    A network is built from it afterwards, so a specification must not be able to request a million layers. `limits` are
    those of numbers, by key.
    """
    if isinstance(value, dict | list):
        if len(value) > MAX_ENTRIES:
            raise Refused(f"{key} has {len(value)} entries; the limit is {MAX_ENTRIES}")
        for name, item in value.items() if isinstance(value, dict) else ((key, item) for item in value):
            check_bounded(item, str(name)[:40], limits)
    elif isinstance(value, int | float) and abs(value) > (limit := limits.get(key.rpartition(".")[2], MAX_NUMBER)):
        raise Refused(f"{key} is {value}; the limit is {limit}")
    elif isinstance(value, str) and len(value) > MAX_TEXT:
        raise Refused(f"{key} is a text of {len(value)} characters; the limit is {MAX_TEXT}")


def strict_name(name: str, what: str) -> str:
    """Return the name of a file inside an artifact. Raise `Refused` for hidden files and paths out of its folder."""
    if len(name) > 200 or not all(_NAME.fullmatch(part) for part in name.split("/")):
        reason = "only letters, digits, '.', '-', '_' below its folder are allowed, and 200 characters"
        raise Refused(f"{what} lists a file {name[:80]!r}; {reason}")
    if name == MANIFEST_FILE:
        raise Refused(f"{what} lists itself")
    return name


class _File(Content):
    # 2^50 bytes (1 PB) are far above any file, and far below what overflows a sum of sizes.
    size: int = Field(ge=0, lt=1 << 50)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Manifest(Content):
    format: Literal[1]
    kind: str
    version: int
    made_from: dict[str, Any]
    content: dict[str, Any]
    files: dict[str, _File]


def strict_manifest(data: bytes, what: str) -> Manifest:
    """Parse a manifest; every field must have the right type, and the bytes must be canonical (`to_json`)."""
    value = strict_json(data, what)
    try:
        files = _Manifest.model_validate(value, strict=True).files
    except ValidationError as error:
        raise Refused(f"{what} is not a manifest: {wrong_fields(error)}") from error
    names = [strict_name(name, what) for name in files]
    if len({name.casefold() for name in names}) != len(names):
        # On file systems that ignore case, the second of these files would replace the first.
        raise Refused(f"{what} lists file names that differ only in upper and lower case")
    manifest = Manifest.from_values(value)
    # The digest is computed from the parsed manifest. Other bytes with the same meaning would have the same digest.
    if manifest.to_json() != data:
        raise Refused(f"{what} is not canonical JSON: sorted keys, indentation of 1, UTF-8, a newline at the end")
    return manifest
