"""Images in folders: classes by subfolder, captions in .txt files next to them, or metadata as in imagefolder."""

import csv
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, first_line
from atoll.data.foreign_files import MAX_CAPTION_BYTES, MAX_TABLE_BYTES, link_outside, read_below
from atoll.data.images import SUFFIXES, BadImage
from atoll.data.sources.fields import CAPTIONS, MetadataRow, as_text, key_of, make_image, text_file_captions
from atoll.data.sources.source import SourceImage, SourceOptions, digest, unreadable_image

METADATA = ("metadata.jsonl", "metadata.csv")

_MAX_DEPTH = 100
"""Deepest subfolder. Python's recursion limit is 1000; this is more than any data set has."""


class FolderSource:
    """A folder with subfolders of any depth. An image's id is its path below the folder, without the suffix.

    Its caption comes from metadata.jsonl or metadata.csv (`file_name` is relative to that file), else from the .txt
    file of the same stem. Its label comes from the metadata, else it is the name of the image's subfolder. A link to a
    file of the folder is followed. A link out of the folder is listed as unreadable: whoever made the folder could have
    placed it to read private files of whoever prepares it.
    """

    def __init__(self, root: Path, options: SourceOptions) -> None:
        self.root = root
        self.options = options
        self.ignored: Mapping[str, int] = {}
        # How captions and labels are given, and a hash of all names, sizes and metadata.
        captions = classes = metadata = False
        parts = [repr((self.options.caption, self.options.label, self.options.val_fraction))]
        parts += ["lines"] if self.options.caption_lines else []
        for folder, files in folders(self.root):
            names = {file.name for file in files}
            for file in files:
                size = _size(file)
                if file.name in METADATA:
                    # An error, because all images would lose their captions.
                    if reason := link_outside(self.root, file):
                        raise AtollError(f"{file} is not read: it is {reason}")
                    if (size or 0) > MAX_TABLE_BYTES:
                        raise AtollError(f"{file} is not read: it has {size:,} bytes; the limit is {MAX_TABLE_BYTES:,}")
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
        self.kind, self.fingerprint = f"folder of images with {how}", digest("folder", *parts)

    def images(self) -> Iterator[SourceImage]:
        """Yield every image, by folder and name; then, as unreadable, those that only the metadata lists."""
        # By path below the root: the metadata file that lists an image, and its row.
        rows: dict[str, tuple[str, MetadataRow]] = {}
        bad: dict[str, str] = {}
        for folder, files in folders(self.root):
            for table in (file for file in files if file.name in METADATA):
                listed = table.relative_to(self.root).as_posix()
                for number, name, row in _read_metadata(table):
                    if name is None or isinstance(row, str):
                        bad[f"{listed}:{number}"] = f"row {number} of {listed}: {row}"
                        continue
                    rows[os.path.normpath(folder.relative_to(self.root) / name).replace(os.sep, "/")] = (listed, row)
        ignored: Counter[str] = Counter()
        for _, files in folders(self.root):
            taken: set[str] = set()
            names, stems = {file.name for file in files}, {file.stem for file in files if _is_image(file)}
            for file in files:
                path = file.relative_to(self.root).as_posix()
                if file.is_symlink() and file.is_dir():
                    yield unreadable_image(path, f"it is {link_outside(self.root, file)}")
                    continue
                if not _is_image(file) and path not in rows:
                    if file.name not in METADATA and not (file.suffix == ".txt" and file.stem in stems):
                        ignored[file.suffix.lower() or "without a suffix"] += 1
                    continue
                caption_file = file.with_suffix(".txt") if f"{file.stem}.txt" in names else None
                _, row = rows.pop(path, ("", {}))
                # With a.jpg and a.png, the first gets the id "a", and the second keeps its suffix.
                id = key_of(path) if key_of(path) not in taken else path
                taken.add(id)
                yield replace(self._image(id, file, row, caption_file=caption_file), file=path)
        for path, (listed, _) in rows.items():
            # With its suffix, because an existing a.jpg may have the id "a".
            yield unreadable_image(path, f"listed in {listed}, but there is no such file")
        for id, reason in bad.items():
            yield unreadable_image(id, reason)
        self.ignored = ignored

    def _image(self, id: str, file: Path, row: MetadataRow, *, caption_file: Path | None) -> SourceImage:
        columns = [name for name in (*self.options.caption_weights, *CAPTIONS) if name in row] or ["text"]
        # Without names of columns, the captions are in the first of the usual ones.
        given = columns if self.options.caption is not None else columns[:1]
        try:
            if caption_file is not None and all(as_text(row.get(column)) is None for column in given):
                what = f"its caption {caption_file.name}"
                caption = read_below(str(self.root), str(caption_file), limit=MAX_CAPTION_BYTES, what=what)
                row = {**row, columns[0]: text_file_captions(caption, self.options)}
        except BadImage as bad:
            return unreadable_image(id, bad.reason)
        label = file.parent.name if file.parent != self.root else None
        read = partial(read_below, str(self.root), str(file))
        return make_image(id, row, read, options=self.options, label=label)


def folders(root: Path, folder: Path | None = None, depth: int = 0) -> Iterator[tuple[Path, list[Path]]]:
    """Yield each folder with its files, all by name, and with its links to folders outside the root.

    Links to folders within the root are skipped: what they lead to is found at its own place. So each file is found
    once, and a loop of links does no harm.
    """
    folder = folder or root
    if depth > _MAX_DEPTH:
        raise AtollError(f"{folder}: folders are nested more than {_MAX_DEPTH} deep; move its images up")
    found, subfolders = [], []
    for entry in entries_of(folder):
        if entry.name.startswith(".") or entry.name == "__MACOSX":
            continue
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            subfolders.append(path)
        elif not entry.is_symlink():
            found += [path] if entry.is_file() else []
        elif os.path.isdir(path):
            found += [path] if link_outside(root, path) else []
        # An image's broken link counts as a file, so that reading it gives the reason.
        elif os.path.isfile(path) or (_is_image(path) and not os.path.exists(path)):
            found.append(path)
    yield folder, found
    for subfolder in subfolders:
        yield from folders(root, subfolder, depth + 1)


def entries_of(folder: Path) -> list["os.DirEntry[str]"]:
    """Return the entries of a folder, by name."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise AtollError(f"{folder}: cannot be listed: {error.strerror}; make it readable or move it away") from error


def _size(file: Path) -> int | None:
    """Return the number of bytes; None for a broken link and for a folder."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _read_metadata(file: Path) -> Iterator[tuple[int, str, MetadataRow] | tuple[int, None, str]]:
    """Yield number, name and row of every image in a metadata file; instead of a bad row, None and the reason.

    If no row is good, the file is not what it seems, and all captions would be missing: an error.
    """
    good, first_reason = 0, ""
    # Bytes that are not UTF-8 become surrogates, so that only their row is rejected, not the whole file.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        stripped = (line for line in lines if line.strip())
        rows: Iterator[Any] = csv.DictReader(lines) if file.suffix == ".csv" else stripped
        for number in count(1):
            try:
                row = next(rows, None)
                if row is None:
                    break
                row = json.loads(row) if isinstance(row, str) else row
                name = row.pop("file_name", None) if isinstance(row, dict) else None
                if not isinstance(name, str) or not name:
                    found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                    raise ValueError(f"expected a file_name, got {found[:80] or 'nothing'}")
            except (ValueError, RecursionError, csv.Error) as error:
                reason = first_line(error)[:200]
                first_reason = first_reason or f"row {number}: {reason}"
                yield number, None, reason
            else:
                good += 1
                yield number, name, row
    if first_reason and not good:
        raise AtollError(f"{file}, {first_reason}")
