"""Shared by all kinds of source: from a row of metadata to a `SourceImage`."""

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


MAX_ID = 1024
"""Longest key in characters; a longer one ends in its hash. File names have at most 255, paths of few folders less."""

Row = Mapping[str, object]
"""The metadata of one image in the user's table or JSON file: any columns by name, with values of any type."""


def make_image(
    id: str, row: Row, read: Callable[[], bytes], *, options: Options, label: str | None = None
) -> SourceImage:
    """Return an image from its row, an unreadable one if the row is invalid; `label` is for rows without a label."""
    try:
        caption_name = pick(row, options.caption, CAPTIONS)
        label_name = pick(row, options.label, LABELS)
        caption = as_text(row[caption_name]) if caption_name else None
        label = (as_text(row[label_name]) if label_name else None) or label
    except BadImage as bad:
        return unreadable_image(id, bad.reason)
    used = {caption_name, label_name}
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
    return SourceImage(id, caption, label, attributes, split_of(caption or id, options.val_fraction), read)


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
    pure = PurePosixPath(path.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts:
        pure = PurePosixPath(pure.name)
    return str(pure.with_suffix("")) if pure.suffix.lower() in SUFFIXES else str(pure)


class Ids:
    """The ids in use. A repeated key gets a mark of its origin, so that no image is lost."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._repeats: Counter[str] = Counter()

    def unique(self, key: str, mark: str) -> str:
        """Return the key the first time, then `key@mark`, `key@mark@2` and so on."""
        if len(key) > MAX_ID:
            key = f"{key[:MAX_ID]}~{digest(key)}"
        # Repeats are counted per marked key; searching from 1 each time would take quadratic time.
        id, marked = key, f"{key}@{mark}"
        while id in self._seen:
            self._repeats[marked] += 1
            id = marked if self._repeats[marked] == 1 else f"{marked}@{self._repeats[marked]}"
        self._seen.add(id)
        return id


def fingerprint_of(kind: str, root: Path, files: Iterable[Path], *, options: Options) -> str:
    """Return a hash of the files' names below `root`, their sizes, and the options that change what is read."""
    names = (f"{file.relative_to(root).as_posix()} {file.stat().st_size}" for file in files)
    chosen = (options.image, options.caption, options.label, options.id, options.val_fraction)
    return digest(kind, repr(chosen), *names)
