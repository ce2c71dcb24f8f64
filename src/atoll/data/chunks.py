"""Chunks: the unit in which a stage is computed, committed, resumed and divided among workers.

A chunk covers `size` consecutive source images and stores the readable ones. It is cut into batches in the same way by
every worker and after every interruption, because the batch size can change the rounding of a network's output. So on
one machine a chunk of the same pass always has the same bytes. A chunk without a readable image has no file.

The file of a chunk is named by its key, a hash of its images, their metadata and the settings of the index. If the
source changes, its chunks keep their images as far as possible (`Listing`), and files of known keys are not made again.

If the images of a run have several sizes, tensors that depend on the size have one part for each size in a chunk, named
`mean/96x64`, with the rows of that size in the order of the index. `select_rows` reads them.
"""

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.progress import progress
from atoll.core.sizes import Size

T = TypeVar("T")
R = TypeVar("R")

MIRRORED = "_mirrored"
"""Suffix of the names of tensors of the mirror images."""


@dataclass(frozen=True)
class WorkerShare:
    """One of `count` workers that divide a stage. Worker `index` (from 0) computes consecutive chunks."""

    # Consecutive chunks are in the same tar or row group of the source, which then only one worker reads.
    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "WorkerShare":
        """Parse `i/n`, with i from 0 to n-1."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise AtollError(f"worker {text!r} is not i/n with i from 0 to n-1; for example 0/4, 1/4, 2/4 and 3/4")
        return cls(int(index), int(count))

    def share(self, chunks: int) -> range:
        """Return the chunks of this worker."""
        # Integer division distributes the chunks so that the numbers of two workers differ by at most one.
        return range(chunks * self.index // self.count, chunks * (self.index + 1) // self.count)


WHOLE = WorkerShare()
"""The share of a single worker."""


@dataclass(frozen=True)
class Chunks:
    """The chunk files of one artifact."""

    artifact: Artifact
    rows: int
    size: int
    files: str = "{}.safetensors"
    lengths: tuple[int, ...] | None = None
    """Number of images in each chunk; None if all but the last have `size`."""
    keys: Sequence[str | None] | None = None
    """Content hash of each chunk (None: not yet known). Without `keys`, files are numbered."""

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.rows // self.size) if self.lengths is None else len(self.lengths)

    def file(self, chunk: int) -> str:
        """Return the name of a chunk's file."""
        return self.files.format(f"{chunk:06d}" if self.keys is None else self.keys[chunk])

    def length(self, chunk: int) -> int:
        """Return the number of images in a chunk."""
        return min(self.size, self.rows - chunk * self.size) if self.lengths is None else self.lengths[chunk]

    def first_file(self) -> str:
        """Return the name of the first file that exists in a complete artifact."""
        return self.file(next(chunk for chunk in range(self.count) if self.length(chunk)))

    def missing(self, worker: WorkerShare = WHOLE) -> list[int]:
        """Return the chunks of this worker that have images but no file yet."""
        return [c for c in worker.share(self.count) if self.length(c) and not self.has(c)]

    def has(self, chunk: int) -> bool:
        """Return whether a chunk has its file."""
        known = self.keys is None or self.keys[chunk] is not None
        return known and self.artifact.path(self.file(chunk)).is_file()

    def remove_others(self, keep: Collection[str] = ()) -> None:
        """Remove files of chunks with other keys, which the source had before it changed, and files of killed jobs."""
        own = {self.file(chunk) for chunk in range(self.count)} | set(keep)
        for path in self.artifact.folder.glob(self.files.format("*") + "*"):
            if path.relative_to(self.artifact.folder).as_posix() not in own:
                path.unlink(missing_ok=True)

    def write_batches(
        self, what: str, missing: list[int], batches: Iterable[tuple[int, int, dict[str, Tensor]]]
    ) -> None:
        """Write the missing chunks from batches of (chunk, number of images, tensors by name), ordered by chunk."""
        done = self.rows - sum(map(self.length, missing))
        with progress(what, self.rows, done) as bar:
            for chunk, group in groupby(batches, key=itemgetter(0)):
                parts = []
                for _, images, tensors in group:
                    parts.append(tensors)
                    bar.update(images)
                joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                self.artifact.write_tensors(self.file(chunk), joined)


def part_name(name: str, size: Size, sizes: Sequence[Size]) -> str:
    """Return the name of a tensor's part for one of the sizes of a run."""
    return f"{name}/{size}" if len(sizes) > 1 else name


def select_rows(tensors: Mapping[str, Tensor], sizes: Sequence[Size], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return some rows of a chunk's tensors by name; `sizes` has the size of every row, and all `rows` have one size.

    Tensors that do not depend on the size have a row for every image of the chunk.
    """
    size, chosen = sizes[rows[0]], torch.tensor(rows)
    if any("/" in key for key in tensors):
        # A row's number among those of its size is the number of such rows before it.
        within = (torch.tensor([other == size for other in sizes]).cumsum(0) - 1)[chosen]
    found = {}
    for key, tensor in tensors.items():
        name, _, of_size = key.partition("/")
        if not of_size:
            found[name] = tensor[chosen]
        elif of_size == str(size):
            found[name] = tensor[within]
    return found


def row_counts(table: Path) -> tuple[int, ...]:
    """Return the number of rows of every chunk in a parquet file that has one row group per chunk."""
    footer = _metadata(table, table.stat().st_mtime_ns)
    return tuple(footer.row_group(chunk).num_rows for chunk in range(footer.num_row_groups))


def read_rows(table: Path, chunk: int, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of one chunk from a parquet file that has one row group per chunk."""
    with pq.ParquetFile(table, metadata=_metadata(table, table.stat().st_mtime_ns)) as file:
        # Threads cost more than they save on some thousand rows.
        return file.read_row_group(chunk, columns=columns, use_threads=False)


# The footer lists all row groups, so it grows with their number. Reading it for each of n chunks would take O(n²).
# Two entries would do for the index and the assignments of a run; four is a choice with some room.
@lru_cache(maxsize=4)
def _metadata(table: Path, mtime_ns: int) -> pq.FileMetaData:  # noqa: ARG001 - a new file is a new cache key
    """Return the parquet footer, which locates the row groups."""
    return pq.read_metadata(table)


def prefetch(items: Iterable[T], work: Callable[[T], R], workers: int, *, ahead: int = 0) -> Iterator[R]:
    """Apply `work` to every item in threads, some items ahead of the consumer, and yield the results in order.

    At least `ahead` results may wait: as many as the consumer takes at once, so that they are made while it works.
    """
    # A generator that is not exhausted may be finalized when the interpreter exits. Module globals are None by then,
    # and `ThreadPoolExecutor.shutdown` would fail on them, so this frame keeps its own reference.
    is_finalizing = sys.is_finalizing
    pending: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            # Two items per thread: one in work and one waiting, so that no thread is idle while the consumer works.
            if len(pending) > max(2 * workers, ahead):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # At exit, concurrent.futures has already joined the threads: it does so before the interpreter finalizes.
        if not is_finalizing():
            pool.shutdown(cancel_futures=True)
