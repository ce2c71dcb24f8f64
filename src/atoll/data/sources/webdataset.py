"""WebDataset tars: members with the same key belong to one image (KEY.jpg, KEY.txt, KEY.json, KEY.cls)."""

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from atoll.data.bounded import MAX_CAPTION_BYTES, MAX_IMAGE_BYTES, MAX_JSON_BYTES, check_size
from atoll.data.images import SUFFIXES, BadImage
from atoll.data.sources.base import Options, SourceImage, unreadable_image
from atoll.data.sources.fields import Ids, Row, as_text, fingerprint_of, make_image, text_file_captions

_SURPLUS = "a second image of the key {key!r}: keys end at the first dot; rename it without further dots"


# Largest header of a member: GNU and pax headers hold names and attributes. Python reads them into memory as a whole.
_MAX_HEADER_BYTES = 2**20
# What tarfile raises on damaged headers, found by mutating tars; a chain of pax headers exceeds the recursion limit.
_DAMAGE = (tarfile.TarError, OSError, ValueError, OverflowError, IndexError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True)
class _Member:
    """Where a member is in the tar."""

    offset: int
    size: int
    problem: str | None = None
    """Why it must not be read."""


@dataclass
class _Group:
    """The members of one key, by suffix."""

    key: str
    members: dict[str, _Member] = field(default_factory=dict)

    @property
    def images(self) -> list[str]:
        """The suffixes of its images."""
        return [suffix for suffix in self.members if f".{suffix.rsplit('.', 1)[-1]}" in SUFFIXES]

    @property
    def surplus(self) -> list[str]:
        """All images but the first, if dots in their names (a.1.jpg, a.2.jpg) have given them the same key."""
        # With a plain KEY.jpg, the others are taken for its variants, such as KEY.mask.png, and are not listed.
        return self.images[1:] if all("." in suffix for suffix in self.images) else []


class TarSource:
    """Uncompressed tars, so that an image can be read by its offset. An image's id is its key.

    A repeated key becomes `key@tar`.
    """

    def __init__(self, root: Path, files: list[Path], options: Options) -> None:
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
            for group in _groups(file, damage):
                yield self._image(file, ids.unique(group.key, mark), group)
                for suffix in group.surplus:
                    yield unreadable_image(ids.unique(f"{group.key}.{suffix}", mark), _SURPLUS.format(key=group.key))
            for reason in damage:
                yield unreadable_image(ids.unique(shard, lambda: "tar"), reason)

    def _image(self, file: Path, id: str, group: _Group) -> SourceImage:
        if not group.images:
            return unreadable_image(id, f"no image among its members: {', '.join(group.members)}")
        try:
            row = _row(file, group, self.options)
        except BadImage as bad:
            return unreadable_image(id, bad.reason)
        image = partial(_read, str(file), group.members[group.images[0]], limit=MAX_IMAGE_BYTES)
        return make_image(id, row, image, options=self.options)


def _row(file: Path, group: _Group, options: Options) -> Row:
    """Return the metadata in KEY.json, KEY.txt and KEY.cls; text files have priority over JSON."""
    row: dict[str, object] = {}
    if "json" in group.members:
        try:
            row = json.loads(_read(str(file), group.members["json"], limit=MAX_JSON_BYTES))
        except (ValueError, RecursionError) as error:
            raise BadImage(f"its .json is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadImage(f"its .json is a {type(row).__name__}, not an object")
    if "txt" in group.members:
        text = _read(str(file), group.members["txt"], limit=MAX_CAPTION_BYTES)
        row["caption"] = text_file_captions(text, options)
    if "cls" in group.members:
        row["label"] = as_text(_read(str(file), group.members["cls"], limit=MAX_CAPTION_BYTES))
    return row


def _groups(file: Path, damage: list[str]) -> Iterator[_Group]:
    """Yield groups of consecutive members with the same key, from the headers. Append the tar's errors to `damage`."""
    group: _Group | None = None
    for member in _members(file, damage):
        folder, name = os.path.split(os.path.normpath(member.name))
        if member.isdir() or name.startswith(".") or "__MACOSX" in folder:
            continue
        stem, _, suffix = name.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if group is None or group.key != key or suffix.lower() in group.members:
            if group is not None:
                yield group
            group = _Group(key)
        group.members[suffix.lower()] = _Member(member.offset_data, member.size, _problem(member))
    if group is not None:
        yield group


def _problem(member: tarfile.TarInfo) -> str | None:
    """Return why a member must not be read; None for a plain file."""
    if member.issym() or member.islnk():
        return f"it is a link to {member.linkname[:200]!r}; links in tars are not followed"
    if not member.isfile() or member.issparse():
        return "it is not a plain file"
    return None


class _Headers:
    """A tar from which only headers are read, none of them larger than `_MAX_HEADER_BYTES`."""

    def __init__(self, data: BinaryIO) -> None:
        self.seek, self.tell, self._data = data.seek, data.tell, data

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header claims {size:,} bytes; the limit is {_MAX_HEADER_BYTES:,}")
        return self._data.read(size)


def _members(file: Path, damage: list[str]) -> Iterator[tarfile.TarInfo]:
    """Yield all members of a file that is one tar or a concatenation of several."""
    start: int | None = 0
    with file.open("rb") as data:
        while start is not None:
            data.seek(start)
            last = -1
            try:
                headers: Any = _Headers(data)
                tar: Any
                with tarfile.open(fileobj=headers, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        if member.size < 0 or tar.offset <= last:
                            raise tarfile.ReadError(f"the member {member.name[:200]!r} has a negative size")
                        last = tar.offset
                        tar.members.clear()  # the list would hold the headers of all members
                        yield member
            except _DAMAGE as error:
                damage.append(f"the tar is broken: {str(error)[:200] or type(error).__name__}")
                return
            start = _next_block(data, tar.offset)
            # tarfile stops silently at a header that it cannot read.
            if start == tar.offset:
                damage.append(f"the tar is broken: no readable header at byte {start} of {file.stat().st_size}")
                return


def _next_block(data: BinaryIO, offset: int) -> int | None:
    """Return the offset of the first non-zero block; None if only the zeros at the end of a tar follow."""
    data.seek(offset)
    while block := data.read(tarfile.BLOCKSIZE):
        if any(block):
            return data.tell() - len(block)
    return None


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
