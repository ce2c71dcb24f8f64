"""A store in a local folder: the part of obstore's interface that Atoll needs, without following symbolic links.

Everybody with write access to a shared folder can place a link in it. A program that follows the link would read,
overwrite or delete other files of the user who runs it. Checking first and opening afterwards is no defense: the link
could be placed in between. So each folder on the path to a key is opened relative to its parent with `O_NOFOLLOW`,
which checks and opens in one system call. Reading, writing or deleting through a link is refused, and links are not
listed. Only the folder of the store itself may be reached through links, because its user chose that path.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict
from uuid import uuid4

from obstore.exceptions import AlreadyExistsError

from atoll.verify.untrusted import Refused

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_DEPTH = 16
"""Maximum depth of listed folders; the keys of a run have at most six parts."""


class ObjectMeta(TypedDict):
    """Metadata of an object, with the field names of obstore."""

    path: str
    size: int
    last_modified: datetime


@dataclass(frozen=True)
class GetResult:
    """The result of `get`. The file is opened when its bytes are read."""

    folder: "Folder"
    key: str
    meta: ObjectMeta
    start: int
    end: int

    def stream(self, min_chunk_size: int = 1 << 20) -> Iterator[bytes]:
        """Yield the range in pieces."""
        with self.folder.opened(self.key) as file:
            file.seek(self.start)
            left = self.end - self.start
            while left > 0 and (block := file.read(min(min_chunk_size, left))):
                left -= len(block)
                yield block


@dataclass(frozen=True)
class Folder:
    """Keys as files below one folder. As in obstore, a file `NAME#NUMBER` is a partial write and is not listed."""

    prefix: Path

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """Open the store in a folder; create the folder if it is missing."""
        path.mkdir(parents=True, exist_ok=True)
        return cls(path.resolve())

    def put(self, key: str, data: bytes, *, mode: str = "overwrite", use_multipart: bool = False) -> None:
        """Write an object atomically; with mode "create", raise `AlreadyExistsError` if it exists."""
        del use_multipart  # an option of object stores without meaning for files
        with self._open_parent(key, create=True) as (parent, name):
            temporary = f"{name}#{uuid4().int}"
            writing = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            try:
                with os.fdopen(os.open(temporary, writing, 0o666, dir_fd=parent), "wb") as file:
                    file.write(data)
                if mode == "create":  # a hard link is atomic and, unlike a rename, fails if the name exists
                    os.link(temporary, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
                else:
                    with suppress(FileNotFoundError):
                        self._lstat(parent, name, key)
                    os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except FileExistsError as error:
                raise AlreadyExistsError(f"{self.prefix}: {name} exists") from error
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)

    def get(self, key: str, *, options: Mapping[str, tuple[int, int]] | None = None) -> GetResult:
        """Return an object, or the `range` of its bytes: the first one and the end."""
        meta = self.head(key)
        start, end = options["range"] if options else (0, meta["size"])
        return GetResult(self, key, meta, start, end)

    def head(self, key: str) -> ObjectMeta:
        """Return key, size and modification time of an object."""
        with self._open_parent(key) as (parent, name):
            found = self._lstat(parent, name, key)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(f"{self.prefix}/{key} is not a regular file")
            return _meta(key, found)

    def list(self, prefix: str = "") -> Iterator[Sequence[ObjectMeta]]:
        """Yield the objects below a prefix; skip links and everything behind them."""
        parts = _parts(prefix)
        with suppress(FileNotFoundError, NotADirectoryError, Refused), self._open_folder(parts) as start:
            yield [*self._list_folder(start, "/".join(parts))]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        for key in keys:
            with suppress(FileNotFoundError), self._open_parent(key) as (parent, name):
                self._lstat(parent, name, key)
                os.unlink(name, dir_fd=parent)

    @contextmanager
    def opened(self, key: str) -> Iterator[Any]:
        """Open an object for reading."""
        with self._open_parent(key) as (parent, name):
            self._lstat(parent, name, key)
            # Without O_NONBLOCK, opening a named pipe would block until somebody writes to it.
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        with os.fdopen(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise Refused(f"{self.prefix}/{key} is not a regular file")
            yield file

    @contextmanager
    def _open_parent(self, key: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a key; yield its descriptor and the last part of the key."""
        *parent, name = _parts(key) or [""]
        if not name:
            raise Refused(f"{self.prefix}: the key is empty")
        with self._open_folder(parent, create=create) as number:
            yield number, name

    @contextmanager
    def _open_folder(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """Open a folder part by part, each relative to its parent; yield its descriptor."""
        number = os.open(self.prefix, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for position, part in enumerate(parts):
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=number)
                try:
                    child = os.open(part, _FOLDER_FLAGS, dir_fd=number)
                except OSError:
                    self._lstat(number, part, "/".join(parts[: position + 1]))
                    raise
                os.close(number)
                number = child
            yield number
        finally:
            os.close(number)

    def _lstat(self, parent: int, name: str, key: str) -> os.stat_result:
        """Return the status of a file or folder without following links; refuse a link."""
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise Refused(f"{self.prefix}/{key} is a symbolic link; links inside a store are not followed, remove it")
        return found

    def _list_folder(self, folder: int, path: str, depth: int = 0) -> Iterator[ObjectMeta]:
        with os.scandir(folder) as entries:
            for entry in entries:
                key = f"{path}/{entry.name}" if path else entry.name
                # Entries that vanish or become links while the folder is listed are skipped.
                with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    if entry.is_file(follow_symlinks=False) and _is_complete(entry.name):
                        yield _meta(key, entry.stat(follow_symlinks=False))
                    elif entry.is_dir(follow_symlinks=False) and depth < _MAX_DEPTH:
                        number = os.open(entry.name, _FOLDER_FLAGS, dir_fd=folder)
                        try:
                            yield from self._list_folder(number, key, depth + 1)
                        finally:
                            os.close(number)


def _parts(key: str) -> list[str]:
    parts = key.rstrip("/").split("/") if key else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise Refused(f"{key[:200]!r} is not a valid key of a store")
    return parts


def _is_complete(name: str) -> bool:
    """Return whether a file is a complete object with a printable name."""
    _, mark, number = name.rpartition("#")
    return name.isprintable() and not (mark and number.isdigit())


def _meta(key: str, found: os.stat_result) -> ObjectMeta:
    return {"path": key, "size": found.st_size, "last_modified": datetime.fromtimestamp(found.st_mtime, UTC)}
