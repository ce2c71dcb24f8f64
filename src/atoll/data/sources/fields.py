"""Shared by all kinds of source: from a row of metadata to a `SourceImage`."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from atoll.core.errors import AtollError, unknown
from atoll.data.bounded import MAX_CAPTION_BYTES, check_size
from atoll.data.images import SUFFIXES, BadImage
from atoll.data.sources.base import Options, SourceImage, digest, split_of, unreadable_image

# Usual names of columns and JSON keys, by priority, as found in public datasets.
CAPTIONS = ("caption", "text", "captions", "prompt", "description", "title")
LABELS = ("label", "class", "cls", "label_name", "class_name")
IDS = ("id", "key", "__key__", "image_id", "file_name", "filename", "path")

MAX_CAPTIONS = 100
"""Most captions of one image. Public datasets have up to about ten; all of them are encoded and stored."""
MAX_ID = 1024
"""Longest key in characters; a longer one ends in its hash. File names have at most 255, paths of few folders less."""

_PATH_SIGNS = frozenset("./\\")

Row = Mapping[str, object]
"""The metadata of one image in the user's table or JSON file: any columns by name, with values of any type."""


def make_image(
    id: str, row: Row, read: Callable[[], bytes], *, options: Options, label: str | None = None
) -> SourceImage:
    """Return an image from its row, an unreadable one if the row is invalid; `label` is for rows without a label."""
    try:
        columns = _caption_columns(row, options)
        captions = _captions(row, columns)
        label_name = pick(row, options.label, LABELS)
        label = (as_text(row[label_name]) if label_name else None) or label
    except BadImage as bad:
        return unreadable_image(id, bad.reason)
    used = {*columns, label_name}
    attributes = {
        name: str(value)
        for name, value in row.items()
        if name not in used and isinstance(value, str | int | float) and value != ""
    }
    for name, value in attributes.items():
        if len(value) > MAX_CAPTION_BYTES or len(name) > MAX_CAPTION_BYTES:
            return unreadable_image(
                id, f"its {name[:80]} has {len(value):,} characters; the limit is {MAX_CAPTION_BYTES:,}"
            )
    first = next(iter(captions), id)
    split = split_of(first, options.val_fraction)
    # The first caption decides for the image. Its others are kept only if their own hash is in the same split. So no
    # caption is in both splits, and the split of an image does not depend on the other images of the source.
    kept = {
        text: weight
        for text, weight in captions.items()
        if text == first or split_of(text, options.val_fraction) == split
    }
    weights = None if len(set(kept.values())) < 2 else tuple(kept.values())
    return SourceImage(id, tuple(kept), label, attributes, split, read, weights)


def _caption_columns(row: Row, options: Options) -> dict[str, float]:
    """Return the columns of the row that have captions, with their weights."""
    wanted = options.caption_weights
    if len(wanted) > 1:
        # Of several columns, an image may have only some.
        found = {name: weight for name, weight in wanted.items() if name in row}
        if not found:
            raise BadImage(
                f"its metadata has none of {', '.join(wanted)}, only {', '.join(map(str, row)) or 'nothing'}"
            )
        return found
    name = pick(row, next(iter(wanted), None), CAPTIONS)
    return {} if name is None else {name: 1.0}


def _captions(row: Row, columns: Mapping[str, float]) -> dict[str, float]:
    """Return the captions of a row with their weights. A list has several, which share the weight of its column."""
    captions: dict[str, float] = {}
    for name, weight in columns.items():
        value = row[name]
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) > MAX_CAPTIONS:
            raise BadImage(f"its {name[:80]} has {len(values):,} captions; the limit is {MAX_CAPTIONS}")
        texts = [text for text in map(as_text, values) if text]
        for text in texts:
            captions[text] = captions.get(text, 0.0) + weight / len(texts)
    return captions


def text_file_captions(data: bytes, options: Options) -> str | list[str] | None:
    """Return the caption in a .txt file; with `data.caption_lines`, one per line."""
    text = as_text(data)
    return text.splitlines() if text and options.caption_lines else text


def pick(row: Row, wanted: str | None, usual: Iterable[str]) -> str | None:
    """Return the wanted name, which must be in the row, or the first usual name that is."""
    if wanted is None:
        return next((name for name in usual if name in row), None)
    if wanted not in row:
        raise BadImage(f"its metadata has no {wanted!r}, only {', '.join(map(str, row)) or 'nothing'}")
    return wanted


def pick_column(columns: list[str], wanted: str | None, usual: Iterable[str], *, where: str) -> str | None:
    """Return the wanted column, or the first usual one; a missing column is an error of the whole table."""
    if wanted is not None and wanted not in columns:
        raise AtollError(f"{where}: {unknown('column', wanted, columns)}")
    return wanted or next((name for name in usual if name in columns), None)


def as_text(value: object) -> str | None:
    """Return a caption or label as text: the first one of a list; None if it is empty."""
    if isinstance(value, list | tuple):
        value = next((item for item in value if item), None)
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadImage(f"its caption is not UTF-8: {error.reason} at byte {error.start}") from error
    if value is None:
        return None
    try:
        text = str(value).strip()
    except RecursionError as error:
        raise BadImage("its caption is nested too deeply") from error
    check_size(len(text), MAX_CAPTION_BYTES, "its caption")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        given = text.encode("utf-8", "backslashreplace")[:60]
        raise BadImage(f"its caption is not UTF-8: {given!r}") from error
    return text or None


def key_of(path: str) -> str:
    """Return a relative path without the suffix of an image; for an absolute path only the name, since folders move."""
    if path and not _PATH_SIGNS.intersection(path):  # parsing a path takes a tenth of the time to list a table
        return path
    pure = PurePosixPath(path.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts:
        pure = PurePosixPath(pure.name)
    return str(pure.with_suffix("")) if pure.suffix.lower() in SUFFIXES else str(pure)


class Ids:
    """The ids in use. A repeated key gets a mark of its origin, so that no image is lost."""

    def __init__(self) -> None:
        self._seen = _Hashes()
        self._repeats: Counter[str] = Counter()

    def unique(self, key: str, mark: Callable[[], str]) -> str:
        """Return the key the first time, then `key@mark`, `key@mark@2` and so on."""
        if len(key) > MAX_ID:
            key = f"{key[:MAX_ID]}~{digest(key)}"
        if self._seen.add(key):
            return key
        # Repeats are counted per marked key; searching from 1 each time would take quadratic time.
        marked = f"{key}@{mark()}"
        while True:
            self._repeats[marked] += 1
            id = marked if self._repeats[marked] == 1 else f"{marked}@{self._repeats[marked]}"
            if self._seen.add(id):
                return id


class _Hashes:
    """A set of texts, as hashes of 64 bits in a table with open addressing: 12 to 24 bytes for a text.

    A Python set of texts of 15 characters takes 113, and every worker has one for the whole source. Two of 158 million
    texts have the same hash with a probability of 0.07 %. Then the second image gets a mark without need, the same one
    in every worker.
    """

    def __init__(self) -> None:
        self._table = array("Q", [0]) * 1024
        """Hashes, and 0 in empty slots. Its length is a power of two."""
        self._count = 0

    def add(self, text: str) -> bool:
        """Add a text. Return whether it is new."""
        # Python's own hash differs from process to process.
        value = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if not _insert(self._table, int.from_bytes(value, "little") or 1):
            return False
        self._count += 1
        if 3 * self._count > 2 * len(self._table):  # at most two thirds are full, so that searches are short
            larger = array("Q", [0]) * (2 * len(self._table))
            for known in self._table:
                if known:
                    _insert(larger, known)
            self._table = larger
        return True


def _insert(table: "array[int]", value: int) -> bool:
    """Insert a hash into a table. Return whether it was not there."""
    mask = len(table) - 1
    slot = value & mask
    while found := table[slot]:
        if found == value:
            return False
        slot = (slot + 1) & mask
    table[slot] = value
    return True


def fingerprint_of(kind: str, root: Path, files: Iterable[Path], *, options: Options) -> str:
    """Return a hash of the files' names below `root`, their sizes, and the options that change what is read."""
    names = (f"{file.relative_to(root).as_posix()} {file.stat().st_size}" for file in files)
    chosen = (options.image, options.caption, options.label, options.id, options.val_fraction)
    return digest(kind, repr(chosen), *(["lines"] if options.caption_lines else []), *names)
