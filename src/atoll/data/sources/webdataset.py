"""WebDataset tars: members that share a key make one sample (KEY.jpg, KEY.txt, KEY.json, KEY.cls)."""

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from atoll.data.images import SUFFIXES, BadImage
from atoll.data.sources.base import Options, Sample, bad_sample
from atoll.data.sources.fields import Ids, Row, as_text, fingerprint_of, make_sample

_SURPLUS = "a second picture of the key {key!r}: keys end at the first dot; rename it without further dots"


@dataclass
class _Group:
    """The members of one key: by suffix, where each lies in the tar and how long it is."""

    key: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def pictures(self) -> list[str]:
        """The suffixes of its pictures."""
        return [suffix for suffix in self.members if f".{suffix.rsplit('.', 1)[-1]}" in SUFFIXES]

    @property
    def surplus(self) -> list[str]:
        """Pictures beyond the first where none is a plain KEY.jpg: dots in their names have made them share the key."""
        return self.pictures[1:] if all("." in suffix for suffix in self.pictures) else []


class TarSource:
    """Tars that are not compressed, so that any picture is read by its place. A sample's id is its key.

    A key that is used again becomes `key@tar`.
    """

    def __init__(self, root: Path, files: list[Path], options: Options) -> None:
        self.root = root
        self.files = files
        self.options = options
        self.kind = f"WebDataset of {len(files)} tars"
        self.fingerprint = fingerprint_of("webdataset", root, files, options=options)

    def samples(self) -> Iterator[Sample]:
        """Every key, tar by tar, in the order in which they were written; a broken tar is listed itself, as bad."""
        ids = Ids()
        for file in self.files:
            shard = file.relative_to(self.root).as_posix()
            damage: list[str] = []
            mark = shard.removesuffix(".tar")
            for group in _groups(file, damage):
                yield self._sample(file, ids.unique(group.key, mark), group)
                for suffix in group.surplus:
                    yield bad_sample(ids.unique(f"{group.key}.{suffix}", mark), _SURPLUS.format(key=group.key))
            for reason in damage:
                yield bad_sample(ids.unique(shard, "tar"), reason)

    def _sample(self, file: Path, id: str, group: _Group) -> Sample:
        if not group.pictures:
            return bad_sample(id, f"no picture among its members: {', '.join(group.members)}")
        try:
            row = _row(file, group)
        except BadImage as bad:
            return bad_sample(id, bad.reason)
        return make_sample(id, row, partial(_read, str(file), *group.members[group.pictures[0]]), options=self.options)


def _row(file: Path, group: _Group) -> Row:
    """What KEY.json, KEY.txt and KEY.cls say; text files win over JSON."""
    row: dict[str, object] = {}
    if "json" in group.members:
        try:
            row = json.loads(_read(str(file), *group.members["json"]))
        except ValueError as error:
            raise BadImage(f"its .json is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadImage(f"its .json is a {type(row).__name__}, not an object")
    for suffix, name in (("txt", "caption"), ("cls", "label")):
        if suffix in group.members:
            row[name] = as_text(_read(str(file), *group.members[suffix]))
    return row


def _groups(file: Path, damage: list[str]) -> Iterator[_Group]:
    """Neighbours of the same key, read from the headers alone. What is wrong with the tar is added to `damage`."""
    group: _Group | None = None
    for member in _members(file, damage):
        folder, name = os.path.split(os.path.normpath(member.name))
        if not member.isfile() or name.startswith(".") or "__MACOSX" in folder:
            continue
        stem, _, suffix = name.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if group is None or group.key != key or suffix.lower() in group.members:
            if group is not None:
                yield group
            group = _Group(key)
        group.members[suffix.lower()] = (member.offset_data, member.size)
    if group is not None:
        yield group


def _members(file: Path, damage: list[str]) -> Iterator[tarfile.TarInfo]:
    """Everything in a file of one tar or, put one after the other, of several."""
    start: int | None = 0
    with file.open("rb") as data:
        while start is not None:
            data.seek(start)
            try:
                with tarfile.open(fileobj=data, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        yield member
            except tarfile.TarError as error:
                damage.append(f"the tar is broken: {error}")
                return
            start = _next_block(data, tar.offset)
            if start == tar.offset:  # tarfile stops without a word at a header that it cannot read
                damage.append(f"the tar is broken: no readable header at byte {start} of {file.stat().st_size}")
                return


def _next_block(data: BinaryIO, offset: int) -> int | None:
    """Where the first block that is not zero begins; None if only the zeros that end a tar are left."""
    data.seek(offset)
    while block := data.read(tarfile.BLOCKSIZE):
        if any(block):
            return data.tell() - len(block)
    return None


def _read(file: str, offset: int, size: int) -> bytes:
    try:
        with open(file, "rb") as data:
            data.seek(offset)
            content = data.read(size)
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror}") from error
    if len(content) < size:
        raise BadImage(f"the tar breaks off within it: {len(content)} of {size} bytes are there")
    return content
