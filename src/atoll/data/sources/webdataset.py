"""WebDataset tars: members with the same key belong to one image (KEY.jpg, KEY.txt, KEY.json, KEY.cls)."""

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from atoll.data.foreign_files import MAX_CAPTION_BYTES, MAX_IMAGE_BYTES, MAX_JSON_BYTES, check_size
from atoll.data.images import SUFFIXES, BadImage
from atoll.data.sources.fields import Ids, MetadataRow, as_text, fingerprint_of, make_image, text_file_captions
from atoll.data.sources.source import NONE_IGNORED, SourceImage, SourceOptions, unreadable_image

_SURPLUS = "a second image of the key {key!r}: keys end at the first dot; rename it without further dots"


# What tarfile raises on damaged headers, found by mutating tars. A chain of pax headers exceeds the recursion limit. A
# header that claims a terabyte exceeds the memory, but only bytes that the file has are read.
_DAMAGE = (
    tarfile.TarError, OSError, ValueError, OverflowError, IndexError, KeyError, TypeError, RecursionError, MemoryError
)  # fmt: skip


@dataclass(frozen=True)
class _Member:
    """Where a member is in the tar."""

    offset: int
    size: int
    problem: str | None = None
    """Why it must not be read."""


KeyFiles = dict[str, _Member]
"""The files of one key, by suffix."""


class TarSource:
    """Uncompressed tars, so that an image can be read by its offset. An image's id is its key.

    A repeated key becomes `key@tar`.
    """

    ignored = NONE_IGNORED

    def __init__(self, root: Path, files: list[Path], options: SourceOptions) -> None:
        self.root = root
        self.files = files
        self.options = options
        self.kind = f"WebDataset of {len(files)} tars"
        self.fingerprint = fingerprint_of("webdataset", root, files, options=options)

    def images(self) -> Iterator[SourceImage]:
        """Yield the image of every key, in the order of the tars and their members; a broken tar is one bad image."""
        ids = Ids()
        for file in self.files:
            shard = file.relative_to(self.root).as_posix()
            damage: list[str] = []
            mark = partial(shard.removesuffix, ".tar")
            for key, members in _groups(file, damage):
                id = ids.unique(key, mark)
                images = [suffix for suffix in members if f".{suffix.rsplit('.', 1)[-1]}" in SUFFIXES]
                if not images:
                    yield unreadable_image(id, f"no image among its members: {', '.join(members)}")
                    continue
                try:
                    row = _row(file, members, self.options)
                    read = partial(_read, str(file), members[images[0]], limit=MAX_IMAGE_BYTES)
                    yield make_image(id, row, read, options=self.options)
                except BadImage as bad:
                    yield unreadable_image(id, bad.reason)
                # Dots in names (a.1.jpg, a.2.jpg) have given several images the same key. With a plain KEY.jpg, the
                # others are taken for its variants, such as KEY.mask.png, and are not listed.
                for suffix in images[1:] if all("." in suffix for suffix in images) else ():
                    yield unreadable_image(ids.unique(f"{key}.{suffix}", mark), _SURPLUS.format(key=key))
            for reason in damage:
                yield unreadable_image(ids.unique(shard, lambda: "tar"), reason)


def _row(file: Path, members: KeyFiles, options: SourceOptions) -> MetadataRow:
    """Return the metadata in KEY.json, KEY.txt and KEY.cls; text files have priority over JSON."""
    row: dict[str, object] = {}
    if "json" in members:
        try:
            row = json.loads(_read(str(file), members["json"], limit=MAX_JSON_BYTES))
        except (ValueError, RecursionError) as error:
            raise BadImage(f"its .json is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadImage(f"its .json is a {type(row).__name__}, not an object")
    if "txt" in members:
        text = _read(str(file), members["txt"], limit=MAX_CAPTION_BYTES)
        row["caption"] = text_file_captions(text, options)
    if "cls" in members:
        row["label"] = as_text(_read(str(file), members["cls"], limit=MAX_CAPTION_BYTES))
    return row


def _groups(file: Path, damage: list[str]) -> Iterator[tuple[str, KeyFiles]]:
    """Yield each key with its members, which are consecutive. Append the tar's errors to `damage`."""
    last, group = "", KeyFiles()
    for member in _members(file, damage):
        folder, name = os.path.split(os.path.normpath(member.name))
        if member.isdir() or name.startswith(".") or "__MACOSX" in folder:
            continue
        stem, _, suffix = name.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if key != last or suffix.lower() in group:
            if group:
                yield last, group
            last, group = key, KeyFiles()
        problem = None
        if member.issym() or member.islnk():
            problem = f"it is a link to {member.linkname[:200]!r}; links in tars are not followed"
        elif not member.isfile() or member.issparse():
            problem = "it is not a plain file"
        group[suffix.lower()] = _Member(member.offset_data, member.size, problem)
    if group:
        yield last, group


def _members(file: Path, damage: list[str]) -> Iterator[tarfile.TarInfo]:
    """Yield all members of a file that is one tar or a concatenation of several."""
    with file.open("rb") as data:
        start, block = 0, b"\1"
        while block:
            data.seek(start)
            last = -1
            try:
                tar: Any
                with tarfile.open(fileobj=data, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        if member.size < 0 or tar.offset <= last:
                            raise tarfile.ReadError(f"the member {member.name[:200]!r} has a negative size")
                        last = tar.offset
                        tar.members.clear()  # the list would hold the headers of all members
                        yield member
            except _DAMAGE as error:
                damage.append(f"the tar is broken: {str(error)[:200] or type(error).__name__}")
                return
            # The next tar begins at the first block that is not zero.
            data.seek(tar.offset)
            while (block := data.read(tarfile.BLOCKSIZE)) and not any(block):
                pass
            start = data.tell() - len(block)
            # tarfile stops silently at a header that it cannot read.
            if block and start == tar.offset:
                damage.append(f"the tar is broken: no readable header at byte {start} of {file.stat().st_size}")
                return


def _read(file: str, member: _Member, *, limit: int) -> bytes:
    if member.problem is not None:
        raise BadImage(member.problem)
    check_size(member.size, limit, "its member of the tar")
    try:
        with open(file, "rb") as data:
            data.seek(member.offset)
            content = data.read(member.size)
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror}") from error
    if len(content) < member.size:
        raise BadImage(f"the tar ends within it: {len(content)} of {member.size} bytes")
    return content
