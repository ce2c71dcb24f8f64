"""Bounds of a parquet row group, from the headers of its pages, before anything is decoded.

A page may decompress to gigabytes, or repeat one value a billion times, in a file of some hundred bytes. The footer of
the file states sizes too, but the reader allocates by the headers of the pages, so those are read here. Parquet encodes
them in the compact protocol of Thrift; the field numbers are those of `parquet.thrift`.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from atoll.data.images import BadImage

# A row group may take this many bytes when decoded, and in addition a multiple of its bytes in the file. Encoded images
# hardly compress; even uncompressed BMP images of flat colors seldom do so by more than 16.
_FREE_BYTES, _EXPANSION = 2**26, 16
# Values of all columns likewise; pyarrow writes up to 2^20 rows into a row group, here with up to four other columns.
_FREE_VALUES = 2**22
# Rows likewise: every image takes some bytes. The free ones are for tests and for tables without images.
_FREE_ROWS = 1024
# Most rows that are decoded at once.
_BATCH_ROWS = 1024
# Largest header of a page: some tens of bytes, and statistics.
_MAX_HEADER = 2**20
_MAX_DEPTH = 8

_UNCOMPRESSED, _COMPRESSED, _DATA, _DICTIONARY, _DATA_V2 = 2, 3, 5, 7, 8
_NUM_VALUES = 1
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, 12

Fields = dict[int, Any]
"""Integers and nested structs by the number of their field; fields of other types are skipped."""


@dataclass(frozen=True)
class GroupBounds:
    """How much of a row group may be decoded."""

    batch_rows: int
    """Rows that may be decoded at once: a value is at most as large as its page."""
    max_bytes: int
    """Bytes that the whole row group may have when decoded."""


def check_group(file: str | Path, metadata: Any, group: int, *, columns: Sequence[str]) -> GroupBounds:
    """Return the bounds for reading some columns of a row group.

    Raise `BadImage` if their pages exceed them, and `OSError` if a page header is damaged.
    """
    stored = metadata.row_group(group)
    parts = [stored.column(number) for number in range(stored.num_columns)]
    # The names of the schema, by which the reader finds columns, and not the names that a row group repeats.
    paths = [metadata.schema.column(number).path for number in range(stored.num_columns)]
    with open(file, "rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as content:
        needed = [any(f"{path}.".startswith(f"{name}.") for name in columns) for path in paths]
        wanted = list(compress(parts, needed))
        pages = [page for part in wanted for page in _pages(content, part)]
        # The footer may claim that columns overlap, so that their sum exceeds the file.
        in_file = min(len(content), sum(max(0, part.total_compressed_size) for part in parts))
    limits = {
        "bytes": (sum(size for size, _ in pages), _FREE_BYTES + _EXPANSION * in_file),
        "values": (
            max(sum(count for _, count in pages), *(part.num_values for part in wanted), 0),
            _FREE_VALUES + _EXPANSION * in_file,
        ),
        "rows": (stored.num_rows, _FREE_ROWS + in_file),
    }
    for what, (count, limit) in limits.items():
        if not 0 <= count <= limit:
            raise BadImage(
                f"row group {group} of {Path(file).name} has {in_file:,} bytes and would take {count:,} {what}, more "
                f"than the limit of {limit:,}; it is probably a decompression bomb"
            )
    largest = max([1, *(size for size, _ in pages)])
    return GroupBounds(min(_BATCH_ROWS, max(1, _FREE_BYTES // largest)), limits["bytes"][1])


def _pages(content: mmap.mmap, column: Any) -> list[tuple[int, int]]:
    """Return uncompressed size and number of values of every page of a column."""
    start, dictionary = column.data_page_offset, column.dictionary_page_offset
    if column.has_dictionary_page and dictionary is not None and 0 < dictionary < start:
        start = dictionary
    end = start + column.total_compressed_size
    if start < 0 or end > len(content):
        raise OSError("a column begins or ends outside the file")
    pages, position = [], start
    while position < end:
        header = _Header(content, position, min(end, position + _MAX_HEADER))
        fields = header.struct()
        kinds = [fields.get(kind) for kind in (_DATA, _DICTIONARY, _DATA_V2)]
        counts = [_size(kind.get(_NUM_VALUES)) for kind in kinds if isinstance(kind, dict)]
        size, stored = _size(fields.get(_UNCOMPRESSED)), _size(fields.get(_COMPRESSED))
        pages.append((size, max(counts, default=0)))
        position = header.position + stored
    return pages


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise OSError("a page header lacks a size, or has a negative one")
    return value


@dataclass
class _Header:
    """Reads the header of a page."""

    data: mmap.mmap
    position: int
    end: int

    def struct(self, depth: int = 0) -> Fields:
        """Read a struct."""
        if depth > _MAX_DEPTH:
            raise OSError("a page header is nested too deeply")
        fields: Fields = {}
        number = 0
        while (byte := self._byte()) != 0:
            kind, delta = byte & 15, byte >> 4
            number = number + delta if delta else self._integer()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        """Read or skip a field; return its value if it is an integer or a struct."""
        if kind in _INTEGERS:
            return self._integer()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (*_BOOLEANS, _BYTE, _DOUBLE, _BINARY):  # the value of a boolean is part of its type
            length = self._unsigned() if kind == _BINARY else {_BYTE: 1, _DOUBLE: 8}.get(kind, 0)
            self.position += length
            return None
        # Page headers have no lists and maps.
        raise OSError(f"a page header has a field of type {kind}")

    def _integer(self) -> int:
        number = self._unsigned()
        return (number >> 1) ^ -(number & 1)

    def _unsigned(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise OSError("a page header has a number of more than 64 bits")

    def _byte(self) -> int:
        if self.position >= self.end:
            raise OSError("a page header ends early")
        self.position += 1
        return self.data[self.position - 1]
