"""Pictures in tables: parquet files, and data sets of the Hugging Face datasets library.

A picture is a column of encoded bytes, or a struct of bytes and path as datasets writes it. A row's id is its id
column; without one it is the picture's own path; without that a hash of the row. It never is the row's number.
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
from atoll.data.sources.base import Options, Sample, digest
from atoll.data.sources.fields import IDS, Ids, Row, fingerprint_of, key_of, make_sample, pick_column

_DAMAGE = (OSError, pa.ArrowException)  # what pyarrow raises on damaged files
IMAGES = ("image", "img", "picture", "image_bytes", "jpg", "jpeg", "png", "webp", "bytes")


@dataclass(frozen=True)
class Columns:
    """Which column is what."""

    image: str
    id: str | None
    others: list[str]
    """Every column but the pictures'."""
    hidden: frozenset[str | None]
    """Columns that are no part of a row: the picture, and the id unless it is asked for as caption or class."""
    classes: Mapping[str, list[str]]
    """For columns of class numbers, the names."""

    @classmethod
    def find(cls, schema: pa.Schema, options: Options, where: str) -> "Columns":
        """Find the columns by the options or by their usual names."""
        names = list(schema.names)
        pictures = [name for name in names if _holds_pictures(schema.field(name).type)]
        image = pick_column(pictures, options.image, IMAGES, where=where) or next(iter(pictures), None)
        if image is None:
            raise AtollError(
                f"{where}: no column of pictures (bytes, or a struct with bytes); columns: {', '.join(names)}"
            )
        asked = (options.caption, options.label)
        for wanted in asked:
            pick_column(names, wanted, (), where=where)
        id = pick_column(names, options.id, [name for name in IDS if name not in asked], where=where)
        return cls(
            image=image,
            id=id,
            hidden=frozenset({image} | ({id} - set(asked))),
            others=[name for name in names if name != image],
            classes=_class_names(schema),
        )

    def row(self, values: Row) -> Row:
        """A row without the picture and the id, class numbers as names."""
        row = {name: value for name, value in values.items() if name not in self.hidden}
        for name, classes in self.classes.items():
            if isinstance(number := row.get(name), int):  # -1 says that there is none
                row[name] = classes[number] if 0 <= number < len(classes) else None
        return row


def _holds_pictures(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _has_path(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and any(kind.field(i).name == "path" for i in range(kind.num_fields))


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Names of classes as the datasets library notes them in a schema."""
    noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = noted.get("info", {}).get("features", {})
    return {name: kind["names"] for name, kind in features.items() if isinstance(kind, dict) and "names" in kind}


def _table_sample(values: Row, columns: Columns, ids: Ids, *, read: Callable[[], bytes], options: Options) -> Sample:
    """The sample of a row; of the picture, `values` hold the path at most."""
    row = columns.row(values)
    name = values[columns.id] if columns.id is not None else values[columns.image]
    key = key_of(str(name)) if name not in (None, "") else _row_hash(row, read)
    return make_sample(ids.unique(key, digest(repr(row))[:8]), row, read, options=options)


def _rows(table: pa.Table, columns: Columns) -> Iterator[Row]:
    """Rows with the picture's path, if there is one, in place of the picture."""
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
    """The bytes of a picture's cell; datasets may note a file's path instead."""
    if isinstance(value, dict):
        if value.get("bytes") is None and value.get("path"):
            try:
                return Path(value["path"]).read_bytes()
            except OSError as error:
                raise BadImage(f"its file {Path(value['path']).name} cannot be read: {error.strerror}") from error
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise BadImage("the table has no picture in this row")
    return value


class ParquetSource:
    """Parquet files with a column of pictures."""

    def __init__(self, root: Path, files: list[Path], options: Options) -> None:
        self.root = root
        self.files = files
        self.options = options
        self.columns = Columns.find(_open(files[0]).schema_arrow, options, str(files[0]))
        self.kind = f"{len(files)} parquet files"
        self.fingerprint = fingerprint_of("parquet", root, files, options=options)

    def samples(self) -> Iterator[Sample]:
        """Every row, file by file; pictures are left unread where another column gives the id."""
        ids = Ids()
        for file in self.files:
            table = _open(file)
            missing = {*self.columns.others, self.columns.image} - set(table.schema_arrow.names)
            if missing:
                raise AtollError(f"{file}: no column {', '.join(sorted(missing))}, which {self.files[0].name} has")
            wanted = self._light_columns(table.schema_arrow)
            for group in range(table.num_row_groups):
                rows = _rows(_read_group(file, table, group, columns=wanted), self.columns)
                for place, values in enumerate(rows):
                    read = partial(_read_cell, str(file), self.columns.image, group, place=place)
                    yield _table_sample(values, self.columns, ids, read=read, options=self.options)

    def _light_columns(self, schema: pa.Schema) -> list[str]:
        """All columns but the pictures' bytes; of the pictures only their paths, and only if these make the ids."""
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


_lock = threading.Lock()


def _read_cell(file: str, column: str, group: int, *, place: int) -> bytes:
    """One picture. Parquet is read by the row group, so the latest ones are kept for the rows that follow."""
    try:
        with _lock:
            cells = _row_group(file, column, group)
    except _DAMAGE as error:
        raise BadImage(f"row group {group} of {Path(file).name} is damaged: {first_line(error)}") from error
    return image_bytes(cells[place].as_py())


@lru_cache(maxsize=4)
def _row_group(file: str, column: str, group: int) -> pa.ChunkedArray:
    return _open(Path(file)).read_row_group(group, columns=[column]).column(column)


class DatasetsSource:
    """A data set of the Hugging Face datasets library: a name on the hub, or a folder that `save_to_disk` wrote."""

    def __init__(self, spec: str, options: Options) -> None:
        self.spec = spec
        self.options = options
        data = _load(spec, options.split)
        self.columns = Columns.find(data.features.arrow_schema, options, spec)
        self.data = data.with_format("arrow")
        self.kind = f"datasets {Path(spec).name} ({options.split})"
        files = [Path(file["filename"]) for file in self.data.cache_files]
        parts = [fingerprint_of("datasets", file.parent, [file], options=options) for file in files]
        self.fingerprint = digest("datasets", options.split, str(len(self.data)), *parts)

    def samples(self) -> Iterator[Sample]:
        """Every row, in the data set's own order."""
        ids = Ids()
        place = 0
        for batch in self.data.iter(batch_size=256):
            for values in _rows(batch, self.columns):
                read = partial(_read_row, self.data, self.columns.image, place)
                yield _table_sample(values, self.columns, ids, read=read, options=self.options)
                place += 1


def _read_row(data: Any, column: str, place: int) -> bytes:
    return image_bytes(data[place].column(column)[0].as_py())


def _load(spec: str, split: str) -> Any:
    """A data set with one split, from disk or by name."""
    import datasets

    folder = Path(spec).expanduser()
    try:
        data = datasets.load_from_disk(str(folder)) if folder.is_dir() else datasets.load_dataset(spec, split=split)
    except (OSError, ValueError) as error:
        raise AtollError(
            f"{spec}: neither a file or folder here, nor a data set that could be loaded ({first_line(error)}); "
            "give a path, a Hugging Face datasets name, or emoji"
        ) from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise AtollError(f"{spec}: no split {split!r}; splits: {', '.join(data)}")
        data = data[split]
    return data
