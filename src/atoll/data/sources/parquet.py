"""Images in parquet files, and what `hf.py` shares with them: columns, rows and ids of tables.

Images are a column of encoded bytes, or a struct of bytes and path as the datasets library writes it. A row's id is in
its id column; without one, it is the path in the struct; without that, it is a hash of the row. It is never the row's
number, which changes when rows are added.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from atoll.core.errors import AtollError, first_line
from atoll.data.foreign_files import MAX_IMAGE_BYTES, check_size, read_below
from atoll.data.images import BadImage
from atoll.data.sources.fields import IDS, Ids, MetadataRow, fingerprint_of, key_of, make_image, pick_column
from atoll.data.sources.source import NONE_IGNORED, SourceImage, SourceOptions, digest, unreadable_image

# What pyarrow raises on damaged files, found by mutating them.
_DAMAGE = (OSError, pa.ArrowException, UnicodeDecodeError, IndexError)
# Usual names of image columns, by priority.
IMAGES = ("image", "img", "image_bytes", "jpg", "jpeg", "png", "webp", "bytes")
# Rows that are decoded at once; a choice. Most metadata of so many rows takes less than a megabyte.
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Columns:
    """The roles of the columns of a table."""

    image: str
    id: str | None
    others: list[str]
    """All columns except that of the images."""
    hidden: frozenset[str | None]
    """Columns that do not belong to the metadata: the image, and the id unless it is also the caption or label."""
    classes: Mapping[str, list[str]]
    """The class names of columns that store class indices."""

    @classmethod
    def find(cls, schema: pa.Schema, options: SourceOptions, where: str) -> "Columns":
        """Find the columns by the options or by their usual names."""
        names = list(schema.names)
        # The datasets library stores class names in the metadata of the schema.
        try:
            stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
            kinds = stored.get("info", {}).get("features", {}).items()
            named = {name: kind["names"] for name, kind in kinds if isinstance(kind, dict) and "names" in kind}
        except (ValueError, AttributeError, RecursionError):  # somebody else's metadata
            named = {}
        candidates = []
        for name, kind in zip(names, schema.types, strict=True):
            is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
            candidates += [name] if is_bytes or _has_field(kind, "bytes") else []
        image = pick_column(candidates, options.image, IMAGES, where=where) or next(iter(candidates), None)
        if image is None:
            raise AtollError(
                f"{where}: no column of images (bytes, or a struct with bytes); columns: {', '.join(names)}"
            )
        given = (*options.caption_weights, options.label)
        for wanted in given:
            pick_column(names, wanted, (), where=where)
        id = pick_column(names, options.id, [name for name in IDS if name not in given], where=where)
        return cls(
            image=image,
            id=id,
            hidden=frozenset({image} | ({id} - set(given))),
            others=[name for name in names if name != image],
            classes={name: classes for name, classes in named.items() if isinstance(classes, list)},
        )

    def row(self, values: MetadataRow) -> MetadataRow:
        """Return the metadata of a row, with class indices replaced by names."""
        row = {name: value for name, value in values.items() if name not in self.hidden}
        for name, classes in self.classes.items():
            # The datasets library stores -1 for a missing label.
            if isinstance(number := row.get(name), int):
                row[name] = classes[number] if 0 <= number < len(classes) else None
        return row


def _has_field(kind: pa.DataType, name: str) -> bool:
    return pa.types.is_struct(kind) and any(field.name == name for field in kind)


def table_image(
    values: MetadataRow, columns: Columns, ids: Ids, *, read: Callable[[], bytes], options: SourceOptions
) -> SourceImage:
    """Return the image of a row. In `values`, the image column has at most the image's path."""
    row = columns.row(values)
    name = values[columns.id] if columns.id is not None else values[columns.image]
    if name not in (None, ""):
        key = key_of(str(name))
    else:
        try:
            data = read()
        except BadImage as bad:
            data = bad.reason.encode()
        key = digest(data, repr(row))
    return make_image(ids.unique(key, lambda: digest(repr(row))[:8]), row, read, options=options)


def table_rows(table: pa.Table, columns: Columns) -> Iterator[MetadataRow]:
    """Yield rows with the image's path, if it has one, instead of the image."""
    rows: list[MetadataRow] = [{}] * len(table)
    if columns.others:
        values = [_values(table.column(name)) for name in columns.others]
        rows = [dict(zip(columns.others, row, strict=True)) for row in zip(*values, strict=True)]
    paths: list[Any] = [None] * len(table)
    if columns.image in table.column_names and _has_field(table.schema.field(columns.image).type, "path"):
        paths = _values(pc.struct_field(table.column(columns.image), "path"))
    for row, path in zip(rows, paths, strict=True):
        yield {**row, columns.image: path}


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column; bytes of a text that are not UTF-8 become surrogates, as in file names."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_binary()).to_pylist()  # an error for a list of texts
        values = [None if value is None else value.decode("utf-8", "surrogateescape") for value in raw]
    return values


def image_bytes(value: object, roots: Sequence[Path]) -> bytes:
    """Return the bytes of an image's cell; the datasets library may store the path of a file instead.

    The file is read only if it is below one of the roots: whoever wrote the table could name any file of this machine.
    """
    stored = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(stored, bytes):
        check_size(len(stored), MAX_IMAGE_BYTES, "it")
        return stored
    path = str(value["path"]) if isinstance(value, dict) and stored is None and value.get("path") else None
    if path is None:
        raise BadImage("the table has no image in this row")
    for root in map(os.path.realpath, roots if "\0" not in path else ()):
        file = os.path.realpath(os.path.join(root, path))
        if os.path.commonpath([root, file]) == root:
            return read_below(root, file, what=f"its file {path}")
    raise BadImage(f"the table names the file {path!r:.200}, which is outside its folder, so it is not read")


class ParquetSource:
    """Parquet files with a column of images."""

    ignored = NONE_IGNORED

    def __init__(self, root: Path, files: list[Path], options: SourceOptions) -> None:
        self.root = root
        self.files = files
        self.options = options
        self.columns = Columns.find(_open(files[0]).schema_arrow, options, str(files[0]))
        self.kind = f"{len(files)} parquet files"
        self.fingerprint = fingerprint_of("parquet", root, files, options=options)

    def images(self) -> Iterator[SourceImage]:
        """Yield the image of every row, file by file. Its bytes are read only if its id must be a hash."""
        ids = Ids()
        for file in self.files:
            table = _open(file)
            missing = {*self.columns.others, self.columns.image} - set(table.schema_arrow.names)
            if missing:
                raise AtollError(f"{file}: no column {', '.join(sorted(missing))}, which {self.files[0].name} has")
            # All columns except the images' bytes, with the images' paths only if they are the ids.
            wanted = self.columns.others
            if self.columns.id is None and _has_field(table.schema_arrow.field(self.columns.image).type, "path"):
                wanted = [*wanted, f"{self.columns.image}.path"]
            for group in range(table.num_row_groups):
                number = 0
                try:
                    for batch in _batches(file, table, group, columns=wanted):
                        for values in table_rows(batch, self.columns):
                            read = partial(_read_cell, str(file), self.columns.image, group, row=number)
                            yield table_image(values, self.columns, ids, read=read, options=self.options)
                            number += 1
                except pa.ArrowException as error:
                    shown = f"{file.relative_to(self.root).as_posix()}:{group}"
                    id = ids.unique(shown, lambda: "parquet")
                    yield unreadable_image(id, f"it is damaged: {first_line(error)}")


def _open(file: Path) -> pq.ParquetFile:
    try:
        # The footer lists all row groups. Parsing it for each of n groups would take O(n²).
        table = pq.ParquetFile(file, memory_map=True, metadata=_metadata(file, file.stat().st_mtime_ns))
        table.schema_arrow.to_string(show_schema_metadata=False)  # fails here, and not later, if a name is not UTF-8
        return table
    except _DAMAGE as error:
        raise AtollError(f"{file}: not a parquet file, or damaged: {first_line(error)}") from error


@lru_cache(maxsize=4)  # as many as there are cached row groups
def _metadata(file: Path, mtime_ns: int) -> pq.FileMetaData:  # noqa: ARG001 - a new file is a new cache key
    return pq.read_metadata(file, memory_map=True)


def _batches(file: Path, table: pq.ParquetFile, group: int, *, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the rows of a row group in tables of at most `_BATCH_ROWS` rows."""
    try:
        for batch in table.iter_batches(_BATCH_ROWS, [group], columns, use_threads=False):
            yield pa.Table.from_batches([batch])
    except _DAMAGE as error:
        raise AtollError(f"{file}: row group {group} is damaged: {first_line(error)}; restore the file") from error


# Parquet can only be read by row group. The last groups are cached for their next rows, and the lock keeps several
# threads from decoding the same group at once. Four groups serve two threads that cross a boundary; a choice.
_lock = threading.Lock()


def _read_cell(file: str, column: str, group: int, *, row: int) -> bytes:
    """Return the bytes of one image."""
    with _lock:
        cells = _row_group(file, column, group)
    if isinstance(cells, str):
        raise BadImage(cells)
    if row >= len(cells):
        raise BadImage("the table has no image in this row")
    return image_bytes(cells[row].as_py(), [Path(file).parent])


@lru_cache(maxsize=4)
def _row_group(file: str, column: str, group: int) -> pa.ChunkedArray | str:
    """Return the images of a row group, or the reason why it cannot be read."""
    try:
        return pa.concat_tables(_batches(Path(file), _open(Path(file)), group, columns=[column])).column(column)
    except AtollError as error:
        return f"row group {group} of {Path(file).name} is damaged: {first_line(error.__cause__ or error)}"
