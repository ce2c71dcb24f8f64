"""Work in chunks: the unit that is committed, resumed and shared between jobs.

Chunk c is the samples c·size up to (c+1)·size of the index (in the ingest stage: of the source), cut into batches in
the same way whoever works on it and however often they were interrupted; so on one machine the same chunk always holds
the same bytes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
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

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Share:
    """One worker's part of a stage: a run of neighboring chunks.

    Neighbors lie in the same tar or row group of the source, which then one worker reads instead of all. `index` counts
    the workers from 0.
    """

    index: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Read `i/n`, with i from 0 to n-1."""
        index, slash, of = text.partition("/")
        if not (slash and index.isdecimal() and of.isdecimal() and int(index) < int(of)):
            raise AtollError(f"share {text!r} is not i/n with i from 0 to n-1; for example 0/4, 1/4, 2/4 and 3/4")
        return cls(int(index), int(of))


@dataclass(frozen=True)
class Chunks:
    """The chunk files of one artifact."""

    artifact: Artifact
    rows: int
    size: int
    files: str = "{:06d}.safetensors"

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.rows // self.size)

    def file(self, chunk: int) -> str:
        """Name of a chunk's file."""
        return self.files.format(chunk)

    def length(self, chunk: int) -> int:
        """Number of samples in a chunk."""
        return min(self.size, self.rows - chunk * self.size)

    def missing(self, share: Share = Share()) -> list[int]:  # noqa: B008 - it is frozen
        """The chunks of this share that are not there yet."""
        mine = range(self.count * share.index // share.of, self.count * (share.index + 1) // share.of)
        return [chunk for chunk in mine if not self.artifact.path(self.file(chunk)).is_file()]

    def fill(self, what: str, missing: list[int], batches: Iterable[tuple[int, int, dict[str, Tensor]]]) -> None:
        """Write the missing chunks from their batches: (chunk, samples, tensors by name) in order of chunks."""
        done = self.rows - sum(map(self.length, missing))
        with progress(what, self.rows, done) as bar:
            for chunk, group in groupby(batches, key=itemgetter(0)):
                parts = []
                for _, samples, tensors in group:
                    parts.append(tensors)
                    bar.update(samples)
                joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                self.artifact.write_tensors(self.file(chunk), joined)


def read_rows(table: Path, chunk: int, columns: list[str] | None = None) -> pa.Table:
    """The rows of one chunk of a parquet file that has a row group for each chunk."""
    with pq.ParquetFile(table, metadata=_metadata(table, table.stat().st_mtime_ns)) as file:
        return file.read_row_group(chunk, columns=columns)


@lru_cache(maxsize=4)
def _metadata(table: Path, mtime_ns: int) -> pq.FileMetaData:  # noqa: ARG001 - a file made anew is read anew
    """What tells where the row groups are; it grows with their number, so it is not read again for each of them."""
    return pq.read_metadata(table)


def ahead(items: Iterable[T], work: Callable[[T], R], workers: int) -> Iterator[R]:
    """Do `work` on every item in threads, a few items ahead of whoever consumes the results; the order is kept."""
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
