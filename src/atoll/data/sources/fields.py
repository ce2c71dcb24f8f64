"""Shared by all kinds of source: from a row of metadata to a `SourceImage`."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from atoll.core.errors import AtollError, unknown
from atoll.data.foreign_files import MAX_CAPTION_BYTES, check_size
from atoll.data.images import SUFFIXES, BadImage
from atoll.data.sources.source import SourceImage, SourceOptions, digest, split_of, unreadable_image

# Usual names of columns and JSON keys, by priority, as found in public datasets.
CAPTIONS = ("caption", "text", "captions", "prompt", "description", "title")
LABELS = ("label", "class", "cls", "label_name", "class_name")
IDS = ("id", "key", "__key__", "image_id", "file_name", "filename", "path")

MAX_CAPTIONS = 100
"""Most captions of one image. Public datasets have up to about ten; all of them are encoded and stored."""
MAX_ID = 1024
"""Longest key in characters; a longer one ends in its hash. File names have at most 255, paths of few folders less."""

_PATH_SIGNS = frozenset("./\\")

MetadataRow = Mapping[str, object]
"""The metadata of one image in the user's table or JSON file: any columns by name, with values of any type."""


def make_image(
    id: str, row: MetadataRow, read: Callable[[], bytes], *, options: SourceOptions, label: str | None = None
) -> SourceImage:
    """Return an image from its row, an unreadable one if the row is invalid; `label` is for rows without a label."""
    try:
        columns = options.caption_weights
        if len(columns) > 1:
            # Of several columns, an image may have only some.
            columns = {name: weight for name, weight in columns.items() if name in row}
            if not columns:
                raise _lacks(f"none of {', '.join(options.caption_weights)}", row)
        elif (name := pick(row, next(iter(columns), None), CAPTIONS)) is not None:
            columns = {name: 1.0}
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
    # The first caption fixes the split. Other captions are dropped if they hash to the other split. So no caption is in
    # both splits, and the split of an image does not depend on the other images of the source.
    kept = {
        text: weight
        for text, weight in captions.items()
        if text == first or split_of(text, options.val_fraction) == split
    }
    weights = None if len(set(kept.values())) < 2 else tuple(kept.values())
    return SourceImage(id, tuple(kept), label, attributes, split, read, weights)


def _captions(row: MetadataRow, columns: Mapping[str, float]) -> dict[str, float]:
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


def text_file_captions(data: bytes, options: SourceOptions) -> str | list[str] | None:
    """Return the caption in a .txt file; with `data.caption_lines`, one per line."""
    text = as_text(data)
    return text.splitlines() if text and options.caption_lines else text


def pick(row: MetadataRow, wanted: str | None, usual: Iterable[str]) -> str | None:
    """Return the wanted name, which must be in the row, or the first usual name that is."""
    if wanted is None:
        return next((name for name in usual if name in row), None)
    if wanted not in row:
        raise _lacks(f"no {wanted!r}", row)
    return wanted


def _lacks(what: str, row: MetadataRow) -> BadImage:
    return BadImage(f"its metadata has {what}, only {', '.join(map(str, row)) or 'nothing'}")


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
    """The ids in use. A repeated key gets a mark of its origin, so that no image is lost.

    Ids are stored as hashes of 64 bits. Two of 158 million texts have the same hash with a probability of 0.07 %. Then
    the second image gets a mark without need, the same one in every worker.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._repeats: Counter[str] = Counter()

    def unique(self, key: str, mark: Callable[[], str]) -> str:
        """Return the key the first time, then `key@mark`, `key@mark@2` and so on."""
        if len(key) > MAX_ID:
            key = f"{key[:MAX_ID]}~{digest(key)}"
        if self._add(key):
            return key
        # Repeats are counted per marked key; searching from 1 each time would take quadratic time.
        marked = f"{key}@{mark()}"
        while True:
            self._repeats[marked] += 1
            id = marked if self._repeats[marked] == 1 else f"{marked}@{self._repeats[marked]}"
            if self._add(id):
                return id

    def _add(self, id: str) -> bool:
        """Add an id. Return whether it is new."""
        # Python's own hash differs from process to process.
        hashed = hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        before = len(self._seen)
        self._seen.add(int.from_bytes(hashed, "little"))
        return len(self._seen) > before


def fingerprint_of(kind: str, root: Path, files: Iterable[Path], *, options: SourceOptions) -> str:
    """Return a hash of the files' names below `root`, their sizes, and the options that change what is read."""
    names = (f"{file.relative_to(root).as_posix()} {file.stat().st_size}" for file in files)
    chosen = (options.image, options.caption, options.label, options.id, options.val_fraction)
    return digest(kind, repr(chosen), *(["lines"] if options.caption_lines else []), *names)
