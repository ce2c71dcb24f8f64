"""Where a run is shared: a folder (a path, file://) or any place that obstore speaks (memory://, s3://, gs://, az://).

A store has keys and whole objects; nothing is ever half there. All that Atoll asks of it beyond that is *create*: write
a key unless it exists, with one winner whoever races. `Store.probe` tries it and refuses a server that only pretends.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname
from uuid import uuid4

from obstore import exceptions
from obstore.store import MemoryStore, from_url

from atoll.core.errors import AtollError, first_line
from atoll.core.untrusted import Refused
from atoll.islands.folder import Folder, Meta

Answer = TypeVar("Answer")
ATTEMPTS = 6
"""How often a request is tried, on top of what obstore tries by itself."""
_MEMORY: dict[str, MemoryStore] = {}


@dataclass(frozen=True)
class Entry:
    """One object: its key, its size, and when it was written by the store's own clock."""

    key: str
    size: int
    modified: float


@dataclass
class Store:
    """A run at a URL."""

    url: str
    backend: Any = field(repr=False)
    _clock: float | None = None

    @classmethod
    def open(cls, url: str | Path) -> "Store":
        """The store at a URL or a local path."""
        url = str(url)
        scheme = url.split("://")[0] if "://" in url else ""
        try:
            if scheme in ("", "file"):
                return cls(url, Folder.open(_path_of(url)))
            if scheme == "memory":
                return cls(url, _MEMORY.setdefault(url, MemoryStore()))
            return cls(url, from_url(url, client_options=_client_options(), retry_config=_RETRIES))
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise AtollError(
                f"{url}: cannot be opened ({_first_line(error)}); expected a path, file://, memory://, "
                "s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix"
            ) from error

    @property
    def path(self) -> Path | None:
        """The folder, if the store is one."""
        return self.backend.prefix if isinstance(self.backend, Folder) else None

    # Keys

    def create(self, key: str, data: bytes) -> bool:
        """Write a key unless it exists; whether what is there now is `data`.

        An answer that got lost on the way is no riddle: if the key exists, its content tells who wrote it. Whoever must
        know that it was them, and not someone with the same words, puts a nonce into `data`.
        """
        try:
            self._try(lambda: self.backend.put(key, data, mode="create"))
            return True
        except exceptions.AlreadyExistsError:
            with suppress(Refused):  # what is longer than `data` is not `data`, and is not read
                return self.read(key, len(data)) == data
            return False

    def write(self, key: str, data: bytes) -> None:
        """Write a key, whatever was there."""
        self._try(lambda: self.backend.put(key, data, use_multipart=False))

    def read(self, key: str, limit: int = 1 << 20) -> bytes | None:
        """A small object, or None; one that is larger than `limit` bytes is refused before it is read."""

        def get() -> bytes | None:
            try:
                answer = self.backend.get(key)
            except (exceptions.NotFoundError, FileNotFoundError):
                return None
            if answer.meta["size"] > limit:
                raise Refused(f"{self.url}/{key} has {answer.meta['size']:,} bytes; at most {limit:,} are expected")
            return bytes(answer.bytes())

        return self._try(get)

    def stream(self, key: str, start: int, end: int, *, chunk: int = 1 << 18) -> Iterator[bytes]:
        """The bytes `start` to `end` of an object, as they come. A cut raises; go on from where it was."""
        answer = self.backend.get(key, options={"range": (start, end)})
        if answer.meta["size"] < end:
            raise Refused(f"{self.url}/{key} has {answer.meta['size']:,} bytes; its manifest says {end:,}")
        for part in answer.stream(min_chunk_size=chunk):
            yield bytes(part)

    def entry(self, key: str) -> Entry | None:
        """What is known of one object, or None."""

        def head() -> Entry | None:
            try:
                return _entry(self.backend.head(key))
            except (exceptions.NotFoundError, FileNotFoundError):
                return None

        return self._try(head)

    def entries(self, prefix: str) -> list[Entry]:
        """Every object below a prefix, in the order of the keys."""
        found = self._try(lambda: [_entry(meta) for chunk in self.backend.list(prefix) for meta in chunk])
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: list[str]) -> None:
        """Remove objects; one that is not there is no matter."""
        if self.path is None and keys:
            with suppress(exceptions.NotFoundError, FileNotFoundError):  # a retry may find its work done
                self._try(lambda: self.backend.delete(keys))
            return
        for key in keys:
            with suppress(exceptions.NotFoundError, FileNotFoundError):
                self._try(partial(self.backend.delete, key))

    # What can be relied on

    def probe(self) -> None:
        """Create a key twice; refuse the store for shared work if the second time succeeds as well."""
        key = f"probe/{uuid4().hex}"
        if not self.create(key, b"first"):
            raise AtollError(f"{self.url}: a new key could not be created; check the store's permissions")
        second = self.create(key, b"second")
        self.delete([key])
        if second:
            raise AtollError(
                f"{self.url} overwrites a key that it was asked to create only if absent. Two islands could hold one "
                "expert's lease; use a store with conditional writes (S3, GCS, Azure, Ceph, a file system)"
            )

    def now(self) -> float:
        """The time by the store's clock: that of an object just written, moved on by this machine's steady clock."""
        if self._clock is None:
            key = f"probe/{uuid4().hex}"
            self.write(key, b"")
            entry = self.entry(key)
            assert entry is not None
            self._clock = entry.modified - time.monotonic()
            self.delete([key])
        return self._clock + time.monotonic()

    def _try(self, request: Callable[[], Answer]) -> Answer:
        """Repeat what failed on the way; what the store refuses, it refuses at once."""
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except FileNotFoundError:
                raise
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
                raise AtollError(f"{self.url} refuses access: {_first_line(error)}; check the credentials") from error
            except (exceptions.GenericError, exceptions.JoinError, OSError) as error:
                if attempt == ATTEMPTS - 1:
                    raise AtollError(f"{self.url} does not answer: {_first_line(error)}") from error
                time.sleep(pause(attempt))
        raise AssertionError("unreachable")


def pause(attempt: int) -> float:
    """Seconds before the next attempt: twice as long each time, and never two workers in step."""
    return min(10.0, 0.1 * 2.0**attempt) * random.uniform(0.5, 1.0)


_RETRIES: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=30)}


def _client_options() -> Any:
    """Time limits fit objects of 32 MB on slow lines; plain HTTP only where the endpoint asks for it."""
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return {
        "timeout": "300s",
        "connect_timeout": "10s",
        "read_timeout": "60s",
        **({"allow_http": True} if plain else {}),
    }


def _path_of(url: str) -> Path:
    """Return the folder that a path or a file:// URL names."""
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"the file is on the host {parts.netloc!r}; a path begins with file:///")
    return Path(url2pathname(parts.path))


def _entry(meta: Meta) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _first_line(error: BaseException) -> str:
    return first_line(error)[:300]
