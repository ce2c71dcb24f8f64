"""The first stage: decode every image of the source once, and list the readable and the rejected ones.

`images.parquet` is the index for all later stages: id, caption, label, split and attributes of every readable image, in
the order of the source, with one row group per chunk. `rejected.parquet` has id and reason of every rejected image.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, Manifest, to_json
from atoll.core.config_sections import Data
from atoll.core.errors import AtollError
from atoll.core.manifests import INGEST, IngestContent
from atoll.core.progress import progress
from atoll.data.chunks import Chunks, Worker, prefetch, read_rows
from atoll.data.sources.base import BadImage, Options, Source, SourceImage, decode, describe
from atoll.data.sources.open import open_source
from atoll.data.stages.base import Job, Stage

NAME = layout.INGEST
IMAGES, REJECTED = "images.parquet", "rejected.parquet"
_PARTS, _TOTAL = ".parts/{:06d}.parquet", ".total.json"
"""Scratch files: one table per chunk of the source, and the number of images, which takes a listing of the source."""

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("caption", pa.string()),
        ("label", pa.string()),
        ("split", pa.string()),
        ("attributes", pa.string()),
    ]
)
_REJECTED = pa.schema([("id", pa.string()), ("reason", pa.string())])
_PART = pa.schema([*SCHEMA, ("reason", pa.string())])


def open_configured(data: Data) -> Source:
    """Open the source that a run's configuration names."""
    options = Options(data.kind, data.image, data.caption, data.label, data.id, data.split, data.val_fraction)
    return open_source(data.source, options)


def _made_from(job: Job) -> Inputs:
    reading = {"kind", "image", "caption", "label", "id", "split", "val_fraction", "resolution", "chunk"}
    settings = job.config.data.model_dump(include=reading)
    return {"source": job.source.kind, **settings, "fingerprint": job.source.fingerprint}


def _chunks(job: Job) -> Chunks | None:
    """Return the chunks of the source, with readable and rejected images; None if the images are not counted yet."""
    artifact = Artifact(job.run, NAME)
    try:
        total = artifact.read_json(_TOTAL)
    except FileNotFoundError:
        return None
    return Chunks(artifact, total, job.config.data.chunk, _PARTS)


def _run(job: Job, artifact: Artifact, worker: Worker) -> IngestContent | None:
    """Read this worker's chunks, and join all chunks if none is missing then.

    Every worker lists the whole source, because a repeated key gets an id that depends on the images before it. But it
    decodes only the images of its chunks. So ids, splits and rejects do not depend on the number of workers.
    """
    chunks, data = _chunks(job), job.config.data
    if chunks is None:
        total = describe(job.source)
        if not total:
            raise AtollError(f"{data.source} has no images; change data.source")
        artifact.write(_TOTAL, to_json(total))
        chunks = Chunks(artifact, total, data.chunk, _PARTS)
    with suppress(_PartsRemovedError):
        if missing := chunks.missing(worker):
            _read(chunks, job, missing)
        if not chunks.missing():
            _check_rejects(chunks, data)
            content = _join(chunks)
            return None if chunks.missing() else content
    return None


class _PartsRemovedError(Exception):
    """Another worker also found all parts, has joined or rejected them, and removed them.

    It must not be a `FileNotFoundError`: `Artifact.writing` ignores that one in a committed artifact.
    """


def _read_part(chunks: Chunks, number: int) -> pa.Table:
    try:
        return pq.read_table(chunks.artifact.path(chunks.file(number)))
    except FileNotFoundError as error:
        raise _PartsRemovedError from error


def _read(chunks: Chunks, job: Job, missing: list[int]) -> None:
    """Decode every image of the missing chunks, and write one table per chunk."""
    data, wanted = job.config.data, set(missing)
    stream = job.source.images()
    listed = ((number, list(islice(stream, chunks.size))) for number in range(missing[-1] + 1))
    images = (image for number, chunk in listed if number in wanted for image in chunk)
    checked = prefetch(images, lambda image: _check(image, data.resolution), data.workers)
    rejected = 0
    with progress("ingest", chunks.rows, chunks.rows - sum(map(chunks.length, missing))) as bar:
        for number in missing:
            rows = []
            for row in islice(checked, chunks.length(number)):
                rows.append(row)
                bar.update()
            with chunks.artifact.writing(chunks.file(number)) as path:
                pq.write_table(pa.Table.from_pylist(rows, schema=_PART), path)
            # Stop early: a wrong source should not take hours to be noticed.
            rejected += sum(row["reason"] is not None for row in rows)
            if rejected > data.max_rejects * chunks.rows:
                _check_rejects(chunks, data)


def _check(image: SourceImage, resolution: int) -> dict[str, str | None]:
    """Return the row of an image in its part, with the reason if it cannot be decoded."""
    try:
        decode(image.read(), resolution)
        reason = None
    except BadImage as bad:
        reason = bad.reason
    attributes = json.dumps(dict(image.attributes), sort_keys=True, ensure_ascii=False)
    row = {"id": image.id, "caption": image.caption, "label": image.label, "split": image.split}
    return {**row, "attributes": attributes, "reason": reason}


def _check_rejects(chunks: Chunks, data: Data) -> None:
    """Raise `AtollError` if too many images are rejected."""
    # Chunks with a rejected image are removed, so that the next attempt reads them again, with the images fixed.
    artifact, bad = chunks.artifact, {}
    for number in sorted(set(range(chunks.count)) - set(chunks.missing())):
        part = _read_part(chunks, number).select(_REJECTED.names)
        if part["reason"].null_count < len(part):
            bad[chunks.file(number)] = part.filter(part["reason"].is_valid())
    rejected = sum(map(len, bad.values()))
    if rejected <= data.max_rejects * chunks.rows:
        return
    table = pa.concat_tables(bad.values())
    with artifact.writing(REJECTED) as path:
        pq.write_table(table, path)
    for file in (_TOTAL, *bad):
        artifact.path(file).unlink(missing_ok=True)
    reasons = Counter(table["reason"].to_pylist()).most_common(3)
    raise AtollError(
        f"{rejected} of {chunks.rows} images are unusable, more than data.max_rejects = {data.max_rejects:g} allows: "
        f"{'; '.join(f'{count}x {reason}' for reason, count in reasons)}. The list is {artifact.path(REJECTED)}; "
        f"fix them, delete {artifact.folder} and start again, or allow more with --data.max_rejects"
    )


def _join(chunks: Chunks) -> IngestContent:
    """Join the parts into the index and the table of rejects, and return the content to commit."""
    artifact = chunks.artifact
    splits: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    captions = rejected = 0
    with (
        artifact.writing(IMAGES) as good_path,
        artifact.writing(REJECTED) as bad_path,
        pq.ParquetWriter(good_path, SCHEMA) as good,
        pq.ParquetWriter(bad_path, _REJECTED) as bad,
    ):
        # Parts have gaps where images were rejected. The index has none: its row groups all have `chunks.size` rows,
        # so readable images wait here until a row group is full.
        waiting = SCHEMA.empty_table()
        for number in range(chunks.count):
            part = _read_part(chunks, number)
            is_bad = part["reason"].is_valid()
            bad.write_table(part.filter(is_bad).select(_REJECTED.names))
            rejected += sum(is_bad.to_pylist())
            fine = part.filter(part["reason"].is_null()).select(SCHEMA.names)
            splits.update(fine["split"].to_pylist())
            labels.update(label for label in fine["label"].to_pylist() if label is not None)
            captions += len(fine) - fine["caption"].null_count
            waiting = pa.concat_tables([waiting, fine]).combine_chunks()
            while len(waiting) >= chunks.size:
                good.write_table(waiting.slice(0, chunks.size), row_group_size=chunks.size)
                waiting = waiting.slice(chunks.size)
        if len(waiting):
            good.write_table(waiting, row_group_size=chunks.size)
    return IngestContent(
        rows=splits.total(),
        rejected=rejected,
        captions=captions,
        splits=dict(splits),
        labels=dict(sorted(labels.items())),
    )


STAGE = Stage(
    name="ingest",
    kind=INGEST,
    inputs=(),
    outputs=lambda _: {NAME: {}},
    made_from=_made_from,
    run=_run,
    uses=lambda config: f"{config.data.source} at {config.data.resolution} px",
    chunks=_chunks,
    summary=lambda _, content: f"{content.rows:,} images, {content.rejected:,} rejected",
)


@dataclass(frozen=True)
class Index:
    """The readable images of a run, by chunk."""

    artifact: Artifact
    manifest: Manifest

    @classmethod
    def open(cls, run: Path) -> "Index":
        """Open the index of a run whose ingest stage is done."""
        artifact = Artifact(run, NAME)
        return cls(artifact, artifact.open(INGEST))

    @classmethod
    def find(cls, run: Path) -> "Index | None":
        """Return the index of a run, or None if its ingest stage is not done."""
        return cls.open(run) if Artifact(run, NAME).manifest() else None

    @cached_property
    def content(self) -> IngestContent:
        """The declared content of the index."""
        return INGEST.parse(self.manifest, self.artifact.folder)

    @property
    def rows(self) -> int:
        """Number of readable images."""
        return self.content.rows

    @property
    def chunk(self) -> int:
        """Number of images in a chunk."""
        return int(self.manifest.made_from["chunk"])

    @property
    def labels(self) -> list[str]:
        """The class names, by class index."""
        return list(self.content.labels)

    def chunks(self, artifact: Artifact) -> Chunks:
        """Return the chunk files of another artifact of the same run."""
        return Chunks(artifact, self.rows, self.chunk)

    def read(self, chunk: int, columns: list[str]) -> dict[str, list[Any]]:
        """Return some columns of one chunk."""
        table: dict[str, list[Any]] = read_rows(self.artifact.path(IMAGES), chunk, columns).to_pydict()
        return table

    def source_images(self, source: Source, chunks: list[int]) -> Iterator[tuple[int, list[SourceImage]]]:
        """Yield each of the given chunks with its images, from the source that the index was made from."""
        # The index has the order of the source, so one pass finds all images; rejected ones are skipped on the way.
        stream = source.images()
        wanted = set(chunks)
        for chunk in range(max(chunks, default=-1) + 1):
            ids = self.read(chunk, ["id"])["id"]
            found = [next((image for image in stream if image.id == id), None) for id in ids]
            if chunk not in wanted:
                continue
            if None in found:
                missing = ids[found.index(None)]
                raise AtollError(f"the source changed: {missing!r} is in {self.artifact.folder} but not in the source")
            yield chunk, [image for image in found if image is not None]


def image_batches(
    index: Index, source: Source, chunks: list[int], *, resolution: int, batch_size: int, workers: int
) -> Iterator[tuple[int, Pixels]]:
    """Yield (chunk, decoded images (N, resolution, resolution, 3)) in batches, prefetched in threads."""

    def groups() -> Iterator[tuple[int, list[SourceImage]]]:
        for chunk, images in index.source_images(source, chunks):
            for start in range(0, len(images), batch_size):
                yield chunk, images[start : start + batch_size]

    def load(group: tuple[int, list[SourceImage]]) -> tuple[int, Pixels]:
        chunk, images = group
        return chunk, decode_images(images, resolution)

    return prefetch(groups(), load, workers)


def decode_images(images: Iterable[SourceImage], resolution: int) -> Pixels:
    """Return images of the index as an array (N, resolution, resolution, 3)."""
    return np.stack([_pixels(image, resolution) for image in images])


def _pixels(image: SourceImage, resolution: int) -> Pixels:
    try:
        return np.asarray(decode(image.read(), resolution))
    except BadImage as bad:
        raise AtollError(
            f"the source changed: {image.id!r} was readable in the ingest stage; now: {bad.reason}"
        ) from bad
