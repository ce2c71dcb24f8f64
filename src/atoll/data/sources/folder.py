"""Images in folders: classes by subfolder, captions in .txt files next to them, or metadata as in imagefolder."""

import csv
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError
from atoll.data.bounded import MAX_CAPTION_BYTES, MAX_TABLE_BYTES, check_size, link_outside, read_below
from atoll.data.images import SUFFIXES, BadImage
from atoll.data.sources.base import Options, SourceImage, digest, unreadable_image
from atoll.data.sources.fields import CAPTIONS, Row, as_text, key_of, make_image, text_file_captions

METADATA = ("metadata.jsonl", "metadata.csv")

_MAX_DEPTH = 100
"""Deepest subfolder. Python's recursion limit is 1000; this is more than any data set has."""

Rows = dict[str, tuple[str, Row]]
"""By the image's path below the root: the metadata file that lists it, and its row."""


@dataclass(frozen=True)
class _Entry:
    """An image's file and its metadata."""

    file: Path
    row: Row
    caption_file: Path | None


class FolderSource:
    """A folder with subfolders of any depth. An image's id is its path below the folder, without the suffix.

    Its caption comes from metadata.jsonl or metadata.csv (`file_name` is relative to that file), else from the .txt
    file of the same stem. Its label comes from the metadata, else it is the name of the image's subfolder. A link to a
    file of the folder is followed. A link out of the folder is listed as unreadable: whoever made the folder could have
    placed it to read private files of whoever prepares it.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self.root = root
        self.options = options
        self.kind, self.fingerprint = self._scan()

    def _scan(self) -> tuple[str, str]:
        """Return how captions and labels are given, and a hash of all names, sizes and metadata."""
        captions = classes = metadata = False
        parts = [repr((self.options.caption, self.options.label, self.options.val_fraction))]
        parts += ["lines"] if self.options.caption_lines else []
        for folder, files in folders(self.root):
            names = {file.name for file in files}
            for file in files:
                size = _size(file)
                if file.name in METADATA:
                    _check_table(self.root, file, size)
                parts.append(f"{file.relative_to(self.root).as_posix()} {'nowhere' if size is None else size}")
                if size is None:
                    continue
                if file.name in METADATA:
                    metadata = True
                    parts.append(digest(file.read_bytes()))
                if _is_image(file):
                    captions = captions or f"{file.stem}.txt" in names
                    classes = classes or folder != self.root
        ways = {"metadata": metadata, ".txt captions": captions, "class subfolders": classes, "no captions": True}
        how = next(name for name, found in ways.items() if found)
        return f"folder of images with {how}", digest("folder", *parts)

    def images(self) -> Iterator[SourceImage]:
        """Yield every image, by folder and name; then, as unreadable, those that only the metadata lists."""
        rows: Rows = {}
        for folder, files in folders(self.root):
            rows.update(self._metadata(folder, files))
        for _, files in folders(self.root):
            taken: set[str] = set()
            names = {file.name for file in files}
            for file in files:
                path = file.relative_to(self.root).as_posix()
                if file.is_symlink() and file.is_dir():
                    yield unreadable_image(path, f"it is {link_outside(self.root, file)}")
                    continue
                if not _is_image(file) and path not in rows:
                    continue
                caption_file = file.with_suffix(".txt") if f"{file.stem}.txt" in names else None
                _, row = rows.pop(path, ("", {}))
                entry = _Entry(file, row, caption_file)
                # With a.jpg and a.png, the first gets the id "a", and the second keeps its suffix.
                id = key_of(path) if key_of(path) not in taken else path
                taken.add(id)
                yield self._image(id, entry)
        for path, (listed, _) in rows.items():
            # With its suffix, because an existing a.jpg may have the id "a".
            yield unreadable_image(path, f"listed in {listed}, but there is no such file")

    def _metadata(self, folder: Path, files: list[Path]) -> Rows:
        """Return the metadata in one folder, by the images' paths below the root."""
        rows: Rows = {}
        below = folder.relative_to(self.root)
        for file in files:
            if file.name in METADATA:
                listed = file.relative_to(self.root).as_posix()
                for name, row in _read_metadata(file):
                    rows[os.path.normpath(below / name).replace(os.sep, "/")] = (listed, row)
        return rows

    def _image(self, id: str, entry: _Entry) -> SourceImage:
        row = dict(entry.row)
        columns = [name for name in (*self.options.caption_weights, *CAPTIONS) if name in row] or ["text"]
        # Without names of columns, the captions are in the first of the usual ones.
        given = columns if self.options.caption is not None else columns[:1]
        try:
            if entry.caption_file is not None and all(as_text(row.get(column)) is None for column in given):
                name = f"its caption {entry.caption_file.name}"
                caption = read_below(str(self.root), str(entry.caption_file), limit=MAX_CAPTION_BYTES, what=name)
                row[columns[0]] = text_file_captions(caption, self.options)
        except BadImage as bad:
            return unreadable_image(id, bad.reason)
        holder = entry.file.parent.name if entry.file.parent != self.root else None
        return make_image(
            id, row, partial(read_below, str(self.root), str(entry.file)), options=self.options, label=holder
        )


def folders(root: Path, folder: Path | None = None, depth: int = 0) -> Iterator[tuple[Path, list[Path]]]:
    """Yield each folder with its files, all by name, and with its links to folders outside the root.

    Links to folders within the root are skipped: what they lead to is found at its own place. So each file is found
    once, and a loop of links does no harm.
    """
    folder = folder or root
    if depth > _MAX_DEPTH:
        raise AtollError(f"{folder}: folders are nested more than {_MAX_DEPTH} deep; move its images up")
    entries = [entry for entry in entries_of(folder) if not _is_hidden(entry.name)]
    yield folder, [folder / entry.name for entry in entries if _is_file(entry) or _leads_out(entry, root)]
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from folders(root, folder / entry.name, depth + 1)


def _leads_out(entry: "os.DirEntry[str]", root: Path) -> bool:
    """Return whether an entry is a link to a folder outside the root."""
    return entry.is_symlink() and os.path.isdir(entry.path) and link_outside(root, entry.path) is not None


def entries_of(folder: Path) -> list["os.DirEntry[str]"]:
    """Return the entries of a folder, by name."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise AtollError(f"{folder}: cannot be listed: {error.strerror}; make it readable or move it away") from error


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry is a file. An image's broken link counts, so that reading it gives the reason."""
    if not entry.is_symlink():
        return entry.is_file()
    return os.path.isfile(entry.path) or (_is_image(Path(entry.name)) and not os.path.exists(entry.path))


def _size(file: Path) -> int | None:
    """Return the number of bytes; None for a broken link and for a folder."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _check_table(root: Path, file: Path, size: int | None) -> None:
    """Raise AtollError if a metadata file is outside the root or too large: its images would lose their captions."""
    try:
        if reason := link_outside(root, file):
            raise BadImage(f"it is {reason}")
        check_size(size or 0, MAX_TABLE_BYTES, "it")
    except BadImage as bad:
        raise AtollError(f"{file} is not read: {bad.reason}") from bad


def _read_metadata(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield name and row of every image in a metadata file."""
    # Bytes that are not UTF-8 become surrogates, so that only their row is rejected, not the whole file.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        rows: Iterator[Any] = _csv_rows(file, lines) if file.suffix == ".csv" else _json_lines(file, lines)
        for number, row in enumerate(rows, start=1):
            name = row.pop("file_name", None) if isinstance(row, dict) else None
            if not isinstance(name, str) or not name:
                found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise AtollError(f"{file}, row {number}: expected a file_name, got {found[:80] or 'nothing'}")
            yield name, row


def _csv_rows(file: Path, lines: Iterator[str]) -> Iterator[Any]:
    try:
        yield from csv.DictReader(lines)
    except csv.Error as error:
        raise AtollError(f"{file}: not CSV: {error}") from error


def _json_lines(file: Path, lines: Iterator[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise AtollError(f"{file}, line {number}: not JSON: {error}") from error
