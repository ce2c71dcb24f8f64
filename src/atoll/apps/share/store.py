"""The store of a shared run: a folder (a path, file://) or an object store (memory://, s3://, gs://, az://; obstore).

A store maps keys to complete objects; a partly written object is never visible. Atoll needs one more guarantee, the
conditional write *create*: write a key unless it exists, with exactly one winner among concurrent writers.
`Store.probe` tests it, because some S3 servers accept the condition and ignore it.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname
from uuid import uuid4

from obstore import exceptions
from obstore.store import MemoryStore, from_url

from atoll.apps.share.folder_store import Folder, ObjectMeta
from atoll.core.errors import AtollError, first_line
from atoll.verify.untrusted import Refused

Result = TypeVar("Result")
_MISSING = (exceptions.NotFoundError, FileNotFoundError)
# The waits of `backoff` between six attempts add up to two or three seconds: enough for a dropped connection. Callers
# handle longer outages themselves: the next renewal or upload tries again.
ATTEMPTS = 6
"""Number of times a request is tried, in addition to the retries inside obstore."""
MAX_LISTED = 200_000
"""Number of objects below one prefix. The shards of one cluster with a billion images have as many; a listing of them
takes 60 MB."""
# Stores at memory:// URLs live as long as the process, so that two `Store.open` of one URL share their objects.
_MEMORY: dict[str, MemoryStore] = {}


@dataclass(frozen=True)
class Entry:
    """One object: its key, its size in bytes, and its modification time by the clock of the store."""

    key: str
    size: int
    modified: float


@dataclass
class Store:
    """The objects at a URL."""

    url: str
    backend: Any = field(repr=False)
    _clock: float | None = None

    @classmethod
    def open(cls, url: str | Path) -> "Store":
        """Open the store at a URL or a local path."""
        url = str(url)
        scheme = url.split("://")[0] if "://" in url else ""
        try:
            if scheme in ("", "file"):
                return cls(url, Folder.open(_local_path(url)))
            if scheme == "memory":
                return cls(url, _MEMORY.setdefault(url, MemoryStore()))
            return cls(url, from_url(url, client_options=_client_options(), retry_config=_RETRY_CONFIG))
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise AtollError(
                f"{url}: cannot be opened ({_first_line(error)}); expected a path, file://, memory://, "
                "s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix"
            ) from error

    @property
    def path(self) -> Path | None:
        """The folder, if the store is one; else None."""
        return self.backend.prefix if isinstance(self.backend, Folder) else None

    # Keys

    def create(self, key: str, data: bytes) -> bool:
        """Write a key unless it exists; return whether the key now holds `data`.

        If a create succeeded but its response was lost, the retry finds the key with the same content and returns True.
        A caller that must distinguish its own write from an equal one of another writer puts a nonce into `data`.
        """
        try:
            self._retry(lambda: self.backend.put(key, data, mode="create"))
            return True
        except exceptions.AlreadyExistsError:
            with suppress(Refused):  # an object longer than `data` differs from it and is not downloaded
                return self.read(key, len(data)) == data
            return False

    def write(self, key: str, data: bytes) -> None:
        """Write a key, replacing any earlier object."""
        self._retry(lambda: self.backend.put(key, data, use_multipart=False))

    def read(self, key: str, limit: int = 1 << 20) -> bytes | None:
        """Return a small object, or None if it is missing; refuse one of more than `limit` bytes without reading it."""

        def get() -> bytes:
            response = self.backend.get(key)
            if response.meta["size"] > limit:
                raise Refused(f"{self.url}/{key} has {response.meta['size']:,} bytes; the limit is {limit:,}")
            return b"".join(map(bytes, response.stream()))

        with suppress(*_MISSING):
            return self._retry(get)
        return None

    def stream(self, key: str, start: int, end: int, *, chunk: int = 1 << 18) -> Iterator[bytes]:
        """Yield the bytes `start` to `end` of an object as they arrive; the caller resumes a broken connection."""
        response = self.backend.get(key, options={"range": (start, end)})
        if response.meta["size"] < end:
            raise Refused(f"{self.url}/{key} has {response.meta['size']:,} bytes; its manifest lists {end:,}")
        for part in response.stream(min_chunk_size=chunk):
            yield bytes(part)

    def entry(self, key: str) -> Entry | None:
        """Return size and modification time of an object, or None if it is missing."""
        with suppress(*_MISSING):
            return self._retry(lambda: _to_entry(self.backend.head(key)))
        return None

    def entries(self, prefix: str) -> list[Entry]:
        """List the objects below a prefix, sorted by key."""
        most = MAX_LISTED + 1
        found = self._retry(lambda: [*islice(map(_to_entry, chain.from_iterable(self.backend.list(prefix))), most)])
        if len(found) == most:
            raise Refused(f"{self.url}/{prefix} has more than {MAX_LISTED:,} objects; its owner removes others'")
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: list[str]) -> None:
        """Delete objects; missing ones are ignored."""
        with suppress(*_MISSING):  # an earlier attempt may have deleted them
            if keys:
                self._retry(lambda: self.backend.delete(keys))

    # Guarantees and time

    def probe(self) -> None:
        """Create a key twice; raise an error if the second create succeeds, because leases would not be safe."""
        key = f"leases/probe/{uuid4().hex}"
        if not self.create(key, b"first"):
            raise AtollError(f"{self.url}: a new key could not be created; check the store's permissions")
        second = self.create(key, b"second")
        self.delete([key])
        if second:
            raise AtollError(
                f"{self.url} ignores conditional writes: it overwrote a key that exists. Two islands could hold the "
                "lease of one expert; use a store with conditional writes (S3, GCS, Azure, Ceph, a file system)"
            )

    def now(self) -> float:
        """Return the time by the clock of the store.

        The offset to the monotonic clock of this machine is measured once, with an object that is written for it.
        """
        if self._clock is None:
            key = f"leases/probe/{uuid4().hex}"
            self.write(key, b"")
            entry = self.entry(key)
            assert entry is not None
            self._clock = entry.modified - time.monotonic()
            self.delete([key])
        return self._clock + time.monotonic()

    def _retry(self, request: Callable[[], Result]) -> Result:
        """Repeat a request that failed on the network; raise an error at once if the store denies access."""
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except _MISSING:
                raise
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
                raise AtollError(f"{self.url} denies access: {_first_line(error)}; check the credentials") from error
            except (exceptions.GenericError, exceptions.JoinError, OSError) as error:
                if attempt == ATTEMPTS - 1:
                    raise AtollError(f"{self.url} does not respond: {_first_line(error)}") from error
                time.sleep(backoff(attempt))
        raise AssertionError("unreachable")


def backoff(attempt: int) -> float:
    """Return the seconds to wait before the next attempt: exponential, with jitter so that workers spread out."""
    return min(10.0, 0.1 * 2.0**attempt) * random.uniform(0.5, 1.0)


# Few retries inside obstore: `_retry` above repeats the whole request, with an error message of ours in the end.
_RETRY_CONFIG: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=30)}


def _client_options() -> Any:
    """Return options of the HTTP client. Plain HTTP is allowed only if the endpoint's URL is one."""
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    # 300 s for one object of 32 MB (`transfer.PART_BYTES`) allow for lines of 1 Mbit/s; the other limits are customary.
    return {
        "timeout": "300s",
        "connect_timeout": "10s",
        "read_timeout": "60s",
        **({"allow_http": True} if plain else {}),
    }


def _local_path(url: str) -> Path:
    """Return the folder that a path or a file:// URL names."""
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"the URL names the host {parts.netloc!r}; a local path begins with file:///")
    return Path(url2pathname(parts.path))


def _to_entry(meta: ObjectMeta) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _first_line(error: BaseException) -> str:
    return first_line(error)[:300]
