"""A store in a folder: the part of obstore's interface that Atoll needs, without ever following a symbolic link.

Whoever may write to a shared folder may put a link there. A program that follows it reads, overwrites or deletes files
of its own user somewhere else. So every folder on the way to a key is opened relative to the one above it, with
`O_NOFOLLOW`: no check comes before the use, and nothing can be exchanged in between. A link is refused where a key is
read, written or deleted, and it is not listed. The store's own folder may be a link: that is its user's choice.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict
from uuid import uuid4

from obstore.exceptions import AlreadyExistsError

from atoll.core.untrusted import Refused

Data = bytes
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_DEPTH = 16
"""Folders below one another that are listed; the keys of a run have at most six parts."""


class Meta(TypedDict):
    """What a store knows of an object, by the names that obstore has."""

    path: str
    size: int
    last_modified: datetime


Metas = list[Meta]


class Range(TypedDict):
    """Where the bytes that are wanted begin and end."""

    range: tuple[int, int]


@dataclass(frozen=True)
class Found:
    """An object that was asked for. It is opened when its bytes are."""

    folder: "Folder"
    key: str
    meta: Meta
    start: int
    end: int

    def bytes(self) -> Data:
        """Return the whole range at once."""
        return b"".join(self.stream())

    def stream(self, min_chunk_size: int = 1 << 20) -> Iterator[Data]:
        """Yield the range in pieces."""
        with self.folder.opened(self.key) as file:
            file.seek(self.start)
            left = self.end - self.start
            while left > 0 and (block := file.read(min(min_chunk_size, left))):
                left -= len(block)
                yield block


@dataclass(frozen=True)
class Folder:
    """Keys as files below one folder. As in obstore, a file `NAME#NUMBER` is half written and not listed."""

    prefix: Path

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """Return the store in a folder, which is made if it is not there."""
        path.mkdir(parents=True, exist_ok=True)
        return cls(path.resolve())

    def put(self, key: str, data: bytes, *, mode: str = "overwrite", use_multipart: bool = False) -> None:
        """Write an object, whole or not at all; with mode "create" only if there is none."""
        del use_multipart  # a file has no parts
        with self._above(key, create=True) as (above, name):
            temporary = f"{name}#{uuid4().int}"
            writing = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            try:
                with os.fdopen(os.open(temporary, writing, 0o666, dir_fd=above), "wb") as file:
                    file.write(data)
                if mode == "create":
                    self._link(temporary, name, above)
                else:
                    with suppress(FileNotFoundError):
                        self._status(above, name, key)
                    os.replace(temporary, name, src_dir_fd=above, dst_dir_fd=above)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=above)

    def _link(self, temporary: str, name: str, above: int) -> None:
        try:
            os.link(temporary, name, src_dir_fd=above, dst_dir_fd=above, follow_symlinks=False)
        except FileExistsError as error:
            raise AlreadyExistsError(f"{self.prefix}: {name} is there") from error

    def get(self, key: str, *, options: Range | None = None) -> Found:
        """Find an object, and the range of its bytes that is wanted."""
        meta = self.head(key)
        start, end = options["range"] if options else (0, meta["size"])
        return Found(self, key, meta, start, end)

    def head(self, key: str) -> Meta:
        """Return path, size and time of an object."""
        with self._above(key) as (above, name):
            found = self._status(above, name, key)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(f"{self.prefix}/{key} is no file")
            return _meta(key, found)

    def list(self, prefix: str = "") -> Iterator[Metas]:
        """Yield what is below a prefix; neither links nor what is behind them."""
        parts = _parts(prefix)
        with suppress(FileNotFoundError, NotADirectoryError, Refused), self._walk(parts) as start:
            yield [*self._below(start, "/".join(parts))]

    def delete(self, key: str) -> None:
        """Remove an object."""
        with self._above(key) as (above, name):
            self._status(above, name, key)
            os.unlink(name, dir_fd=above)

    @contextmanager
    def opened(self, key: str) -> Iterator[Any]:
        """Open an object to read it."""
        with self._above(key) as (above, name):
            self._status(above, name, key)
            # Without O_NONBLOCK, a named pipe that somebody put there would be waited for.
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        with os.fdopen(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise Refused(f"{self.prefix}/{key} is no file")
            yield file

    @contextmanager
    def _above(self, key: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a key, and return it with the key's own name."""
        *above, name = _parts(key) or [""]
        if not name:
            raise Refused(f"{self.prefix}: an empty key")
        with self._walk(above, create=create) as number:
            yield number, name

    @contextmanager
    def _walk(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """Open a folder, each part relative to the one before."""
        number = os.open(self.prefix, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for place, part in enumerate(parts):
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=number)
                try:
                    following = os.open(part, _FOLDER, dir_fd=number)
                except OSError:
                    self._status(number, part, "/".join(parts[: place + 1]))
                    raise
                os.close(number)
                number = following
            yield number
        finally:
            os.close(number)

    def _status(self, above: int, name: str, key: str) -> os.stat_result:
        """Return what stands under a name itself; refuse a link."""
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise Refused(f"{self.prefix}/{key} is a symbolic link; links inside a store are not followed, remove it")
        return found

    def _below(self, folder: int, path: str, depth: int = 0) -> Iterator[Meta]:
        with os.scandir(folder) as entries:
            for entry in entries:
                key = f"{path}/{entry.name}" if path else entry.name
                # What vanishes while it is listed, or turns into a link, is left out.
                with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    if entry.is_file(follow_symlinks=False) and _is_whole(entry.name):
                        yield _meta(key, entry.stat(follow_symlinks=False))
                    elif entry.is_dir(follow_symlinks=False) and depth < _MAX_DEPTH:
                        number = os.open(entry.name, _FOLDER, dir_fd=folder)
                        try:
                            yield from self._below(number, key, depth + 1)
                        finally:
                            os.close(number)


def _parts(key: str) -> list[str]:
    parts = key.rstrip("/").split("/") if key else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise Refused(f"{key[:200]!r} is no key of a store")
    return parts


def _is_whole(name: str) -> bool:
    """Whether a file is an object: not half written, and with a name that can be printed."""
    _, mark, number = name.rpartition("#")
    return name.isprintable() and not (mark and number.isdigit())


def _meta(key: str, found: os.stat_result) -> Meta:
    return {"path": key, "size": found.st_size, "last_modified": datetime.fromtimestamp(found.st_mtime, UTC)}
