"""WebDataset tars: members that share a key make one sample (KEY.jpg, KEY.txt, KEY.json, KEY.cls)."""

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from atoll.data.pictures import SUFFIXES, BadPicture
from atoll.data.source import Options, Sample, bad_sample
from atoll.data.sources.fields import Ids, as_text, fingerprint_of, make_sample


@dataclass
class _Group:
    """The members of one key: by suffix, where each lies in the tar and how long it is."""

    key: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)


class TarSource:
    """Tars that are not compressed, so that any picture is read by its place. A sample's id is its key.

    A key that a later tar uses again becomes `key@tar`.
    """

    def __init__(self, root: Path, files: list[Path], options: Options) -> None:
        self.root = root
        self.files = files
        self.options = options

    @property
    def kind(self) -> str:
        """What this is, in a few words."""
        return f"WebDataset of {len(self.files)} tars"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tars' names and sizes."""
        return fingerprint_of("webdataset", self.root, self.files, self.options)

    def samples(self) -> Iterator[Sample]:
        """Every key, tar by tar, in the order in which they were written; a broken tar is listed itself, as bad."""
        ids = Ids()
        for file in self.files:
            shard = file.relative_to(self.root).as_posix()
            damage: list[str] = []
            for group in _groups(file, damage):
                yield self._sample(file, ids.unique(group.key, shard.removesuffix(".tar")), group)
            for reason in damage:
                yield bad_sample(ids.unique(shard, "tar"), reason)

    def _sample(self, file: Path, id: str, group: _Group) -> Sample:
        picture = next((suffix for suffix in group.members if f".{suffix.rsplit('.', 1)[-1]}" in SUFFIXES), None)
        if picture is None:
            return bad_sample(id, f"no picture among its members: {', '.join(group.members)}")
        try:
            row = _row(file, group)
        except BadPicture as bad:
            return bad_sample(id, bad.reason)
        return make_sample(id, row, partial(_read, str(file), *group.members[picture]), self.options)


def _row(file: Path, group: _Group) -> dict[str, Any]:
    """What KEY.json, KEY.txt and KEY.cls say; text files win over JSON."""
    row: dict[str, Any] = {}
    if "json" in group.members:
        try:
            row = json.loads(_read(str(file), *group.members["json"]))
        except ValueError as error:
            raise BadPicture(f"its .json is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadPicture(f"its .json is a {type(row).__name__}, not an object")
    for suffix, name in (("txt", "caption"), ("cls", "label")):
        if suffix in group.members:
            row[name] = as_text(_read(str(file), *group.members[suffix]))
    return row


def _groups(file: Path, damage: list[str]) -> Iterator[_Group]:
    """Neighbours of the same key, read from the headers alone. What is wrong with the tar is added to `damage`."""
    group: _Group | None = None
    try:
        with tarfile.open(file, "r:") as tar:
            while (member := tar.next()) is not None:
                folder, name = os.path.split(member.name)
                if not member.isfile() or name.startswith(".") or "__MACOSX" in folder:
                    continue
                stem, _, suffix = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if group is None or group.key != key:
                    if group is not None:
                        yield group
                    group = _Group(key)
                group.members.setdefault(suffix.lower(), (member.offset_data, member.size))
            damage.extend(_unread(file, tar.offset))
    except tarfile.TarError as error:
        damage.append(f"the tar is broken: {error}")
    if group is not None:
        yield group


def _unread(file: Path, offset: int) -> list[str]:
    """A good tar ends in zeros; tarfile stops without a word at a header that it cannot read."""
    with file.open("rb") as data:
        data.seek(offset)
        if not any(data.read(tarfile.BLOCKSIZE)):
            return []
    return [f"the tar is broken: no readable header at byte {offset} of {file.stat().st_size}"]


def _read(file: str, offset: int, size: int) -> bytes:
    try:
        with open(file, "rb") as data:
            data.seek(offset)
            content = data.read(size)
    except OSError as error:
        raise BadPicture(f"cannot be read: {error.strerror}") from error
    if len(content) < size:
        raise BadPicture(f"the tar breaks off within it: {len(content)} of {size} bytes are there")
    return content
