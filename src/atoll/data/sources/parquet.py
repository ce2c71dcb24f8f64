"""Images in parquet files, and what `hf.py` shares with them: columns, rows and ids of tables.

Images are a column of encoded bytes, or a struct of bytes and path as the datasets library writes it. A row's id is in
its id column; without one, it is the path in the struct; without that, it is a hash of the row. It is never the row's
number, which changes when rows are added.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from atoll.core.errors import AtollError, first_line
from atoll.data.images import BadImage
from atoll.data.sources.base import Options, SourceImage, digest
from atoll.data.sources.fields import IDS, Ids, Row, fingerprint_of, key_of, make_image, pick_column

# What pyarrow raises on damaged files.
_DAMAGE = (OSError, pa.ArrowException)
# Usual names of image columns, by priority.
IMAGES = ("image", "img", "image_bytes", "jpg", "jpeg", "png", "webp", "bytes")


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
    def find(cls, schema: pa.Schema, options: Options, where: str) -> "Columns":
        """Find the columns by the options or by their usual names."""
        names = list(schema.names)
        candidates = [name for name in names if _holds_images(schema.field(name).type)]
        image = pick_column(candidates, options.image, IMAGES, where=where) or next(iter(candidates), None)
        if image is None:
            raise AtollError(
                f"{where}: no column of images (bytes, or a struct with bytes); columns: {', '.join(names)}"
            )
        given = (options.caption, options.label)
        for wanted in given:
            pick_column(names, wanted, (), where=where)
        id = pick_column(names, options.id, [name for name in IDS if name not in given], where=where)
        return cls(
            image=image,
            id=id,
            hidden=frozenset({image} | ({id} - set(given))),
            others=[name for name in names if name != image],
            classes=_class_names(schema),
        )

    def row(self, values: Row) -> Row:
        """Return the metadata of a row, with class indices replaced by names."""
        row = {name: value for name, value in values.items() if name not in self.hidden}
        for name, classes in self.classes.items():
            # The datasets library stores -1 for a missing label.
            if isinstance(number := row.get(name), int):
                row[name] = classes[number] if 0 <= number < len(classes) else None
        return row


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _has_path(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and any(kind.field(i).name == "path" for i in range(kind.num_fields))


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the class names that the datasets library stores in a schema's metadata, by column."""
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = stored.get("info", {}).get("features", {})
    return {name: kind["names"] for name, kind in features.items() if isinstance(kind, dict) and "names" in kind}


def table_image(values: Row, columns: Columns, ids: Ids, *, read: Callable[[], bytes], options: Options) -> SourceImage:
    """Return the image of a row. In `values`, the image column has at most the image's path."""
    row = columns.row(values)
    name = values[columns.id] if columns.id is not None else values[columns.image]
    key = key_of(str(name)) if name not in (None, "") else _row_hash(row, read)
    return make_image(ids.unique(key, digest(repr(row))[:8]), row, read, options=options)


def table_rows(table: pa.Table, columns: Columns) -> Iterator[Row]:
    """Yield rows with the image's path, if it has one, instead of the image."""
    rows = table.select(columns.others).to_pylist() if columns.others else [{}] * len(table)
    paths: list[Any] = [None] * len(table)
    if columns.image in table.column_names and _has_path(table.schema.field(columns.image).type):
        paths = pc.struct_field(table.column(columns.image), "path").to_pylist()
    for row, path in zip(rows, paths, strict=True):
        yield {**row, columns.image: path}


def _row_hash(row: Row, read: Callable[[], bytes]) -> str:
    try:
        data = read()
    except BadImage as bad:
        data = bad.reason.encode()
    return digest(data, repr(row))


def image_bytes(value: object) -> bytes:
    """Return the bytes of an image's cell; the datasets library may store the path of a file instead."""
    if isinstance(value, dict):
        if value.get("bytes") is None and value.get("path"):
            try:
                return Path(value["path"]).read_bytes()
            except OSError as error:
                raise BadImage(f"its file {Path(value['path']).name} cannot be read: {error.strerror}") from error
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise BadImage("the table has no image in this row")
    return value


class ParquetSource:
    """Parquet files with a column of images."""

    def __init__(self, root: Path, files: list[Path], options: Options) -> None:
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
            wanted = self._light_columns(table.schema_arrow)
            for group in range(table.num_row_groups):
                rows = table_rows(_read_group(file, table, group, columns=wanted), self.columns)
                for number, values in enumerate(rows):
                    read = partial(_read_cell, str(file), self.columns.image, group, row=number)
                    yield table_image(values, self.columns, ids, read=read, options=self.options)

    def _light_columns(self, schema: pa.Schema) -> list[str]:
        """Return all columns except the images' bytes, with the images' paths only if they are the ids."""
        if self.columns.id is None and _has_path(schema.field(self.columns.image).type):
            return [*self.columns.others, f"{self.columns.image}.path"]
        return self.columns.others


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, memory_map=True)
    except _DAMAGE as error:
        raise AtollError(f"{file}: not a parquet file, or damaged: {first_line(error)}") from error


def _read_group(file: Path, table: pq.ParquetFile, group: int, *, columns: list[str]) -> pa.Table:
    try:
        return table.read_row_group(group, columns=columns)
    except _DAMAGE as error:
        raise AtollError(f"{file}: row group {group} is damaged: {first_line(error)}; restore the file") from error


# Parquet can only be read by row group. The last groups are cached for their next rows, and the lock keeps several
# threads from decoding the same group at once. Four groups serve two threads that cross a boundary; a choice.
_lock = threading.Lock()


def _read_cell(file: str, column: str, group: int, *, row: int) -> bytes:
    """Return the bytes of one image."""
    try:
        with _lock:
            cells = _row_group(file, column, group)
    except _DAMAGE as error:
        raise BadImage(f"row group {group} of {Path(file).name} is damaged: {first_line(error)}") from error
    return image_bytes(cells[row].as_py())


@lru_cache(maxsize=4)
def _row_group(file: str, column: str, group: int) -> pa.ChunkedArray:
    return _open(Path(file)).read_row_group(group, columns=[column]).column(column)
