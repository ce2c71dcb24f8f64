"""Pictures in folders: classes by subfolder, captions in .txt files beside them, or an imagefolder's metadata."""

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError
from atoll.data.images import SUFFIXES, BadImage
from atoll.data.sources.base import Options, Sample, bad_sample, digest
from atoll.data.sources.fields import CAPTIONS, Row, as_text, key_of, make_sample

METADATA = ("metadata.jsonl", "metadata.csv")

Rows = dict[str, tuple[str, Row]]
"""By the picture's path below the root: the file of metadata that has it, and its row."""


@dataclass(frozen=True)
class _Entry:
    """A picture's file and what is known of it."""

    file: Path
    row: Row
    caption_file: Path | None


class FolderSource:
    """A folder, however deep. A sample's id is its path below the folder, without the suffix.

    Its caption comes from metadata.jsonl or metadata.csv (`file_name` is relative to that file), else from the .txt
    file of the same stem. Its class is what the metadata say, else the name of the subfolder that holds it.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self.root = root
        self.options = options
        self.kind, self.fingerprint = self._survey()

    def _survey(self) -> tuple[str, str]:
        """Return how captions and classes are given, and a hash of all names, sizes and metadata."""
        captions = classes = metadata = False
        parts = [repr((self.options.caption, self.options.label, self.options.held_out))]
        for folder, files in folders(self.root):
            names = {file.name for file in files}
            for file in files:
                size = _size(file)
                parts.append(f"{file.relative_to(self.root).as_posix()} {'nowhere' if size is None else size}")
                if size is None:
                    continue
                if file.name in METADATA:
                    metadata = True
                    parts.append(digest(file.read_bytes()))
                if _is_picture(file):
                    captions = captions or f"{file.stem}.txt" in names
                    classes = classes or folder != self.root
        ways = {"metadata": metadata, ".txt captions": captions, "class subfolders": classes, "no captions": True}
        how = next(name for name, found in ways.items() if found)
        return f"folder of pictures with {how}", digest("folder", *parts)

    def samples(self) -> Iterator[Sample]:
        """Every picture, folder by folder, by name; metadata of pictures that are not there are listed as bad."""
        rows: Rows = {}
        for folder, files in folders(self.root):
            rows.update(self._metadata(folder, files))
        for _, files in folders(self.root):
            taken: set[str] = set()
            names = {file.name for file in files}
            for file in files:
                path = file.relative_to(self.root).as_posix()
                if not _is_picture(file) and path not in rows:
                    continue
                caption_file = file.with_suffix(".txt") if f"{file.stem}.txt" in names else None
                _, row = rows.pop(path, ("", {}))
                entry = _Entry(file, row, caption_file)
                # a.png beside a.jpg: the first takes the key, the second keeps its suffix
                id = key_of(path) if key_of(path) not in taken else path
                taken.add(id)
                yield self._sample(id, entry)
        for path, (listed, _) in rows.items():
            # with its suffix: a.jpg may be there and own the key without
            yield bad_sample(path, f"listed in {listed}, but there is no such file")

    def _metadata(self, folder: Path, files: list[Path]) -> Rows:
        """The metadata that lie in one folder, by path below the root."""
        rows: Rows = {}
        below = folder.relative_to(self.root)
        for file in files:
            if file.name in METADATA:
                listed = file.relative_to(self.root).as_posix()
                for name, row in _read_metadata(file):
                    rows[os.path.normpath(below / name).replace(os.sep, "/")] = (listed, row)
        return rows

    def _sample(self, id: str, entry: _Entry) -> Sample:
        row = dict(entry.row)
        column = next((name for name in (self.options.caption, *CAPTIONS) if name is not None and name in row), "text")
        try:
            if entry.caption_file is not None and as_text(row.get(column)) is None:
                row[column] = as_text(_read(str(entry.caption_file)))
        except BadImage as bad:
            return bad_sample(id, bad.reason)
        holder = entry.file.parent.name if entry.file.parent != self.root else None
        return make_sample(id, row, partial(_read, str(entry.file)), options=self.options, label=holder)


def folders(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[tuple[Path, list[Path]]]:
    """Each folder with its files, all in order of name; links are followed, but never in a circle."""
    real = os.path.realpath(folder)
    if real in above:
        return
    entries = [entry for entry in entries_of(folder) if not _is_hidden(entry.name)]
    yield folder, [folder / entry.name for entry in entries if _is_file(entry)]
    for entry in entries:
        if _is_folder(entry):
            yield from folders(folder / entry.name, above | {real})


def entries_of(folder: Path) -> list["os.DirEntry[str]"]:
    """What lies in a folder, in order of name."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise AtollError(f"{folder}: cannot be listed: {error.strerror}; make it readable or move it away") from error


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a file. A picture's link that leads nowhere counts, so that reading it says what is wrong."""
    if not entry.is_symlink():
        return entry.is_file()
    return os.path.isfile(entry.path) or (_is_picture(Path(entry.name)) and not os.path.exists(entry.path))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _size(file: Path) -> int | None:
    """Number of bytes; None for a link that leads nowhere."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _is_picture(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror}") from error


def _read_metadata(file: Path) -> Iterator[tuple[str, Row]]:
    """Name and row of every picture. Bytes that are not UTF-8 stay as surrogates, so that just their row is refused."""
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        rows: Iterator[Any] = csv.DictReader(lines) if file.suffix == ".csv" else _json_lines(file, lines)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict) or not row.get("file_name"):
                raise AtollError(f"{file}, row {number}: expected a file_name, got {str(row)[:80]}")
            yield row.pop("file_name"), row


def _json_lines(file: Path, lines: Iterator[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise AtollError(f"{file}, line {number}: not JSON: {error}") from error
