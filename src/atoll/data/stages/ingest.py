"""The first stage: read every picture of the source once, list the good ones and the bad ones.

`samples.parquet` is the index that all later stages share: id, caption, label, split and attributes of every good
sample, in the order of the source, in row groups of one chunk. `rejected.parquet` has id and reason of every bad one.
"""

import json
from collections import Counter
from collections.abc import Iterator
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
from atoll.data.chunks import Chunks, Share, ahead, read_rows
from atoll.data.sources.base import BadImage, Options, Sample, Source, decode, describe
from atoll.data.sources.open import open_source
from atoll.data.stages.base import Job, Stage

NAME = layout.INGEST
SAMPLES, REJECTED = "samples.parquet", "rejected.parquet"
_PARTS, _TOTAL = ".parts/{:06d}.parquet", ".total.json"
"""Scratch: a table of each chunk of the source, and the number of images, which takes a pass over the source."""

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
    """The source that a run's configuration names."""
    options = Options(data.kind, data.image, data.caption, data.label, data.id, data.split, data.val_fraction)
    return open_source(data.source, options)


def _made_from(job: Job) -> Inputs:
    reading = {"kind", "image", "caption", "label", "id", "split", "val_fraction", "resolution", "chunk"}
    settings = job.config.data.model_dump(include=reading)
    return {"source": job.source.kind, **settings, "fingerprint": job.source.fingerprint}


def _chunks(job: Job) -> Chunks | None:
    """Return the chunks of the source, good and bad images alike; None if no worker has counted the images yet."""
    artifact = Artifact(job.run, NAME)
    try:
        total = artifact.read_json(_TOTAL)
    except FileNotFoundError:
        return None
    return Chunks(artifact, total, job.config.data.chunk, _PARTS)


def _run(job: Job, artifact: Artifact, share: Share) -> IngestContent | None:
    """Read this worker's share of the chunks; join all of them if this was the last.

    Every worker lists the source from its start, since only the list says which ids are taken, but decodes no image
    outside its share. So ids, splits and rejects do not depend on the number of workers.
    """
    chunks, data = _chunks(job), job.config.data
    if chunks is None:
        total = describe(job.source)
        if not total:
            raise AtollError(f"{data.source}: there is no image in it")
        artifact.write(_TOTAL, to_json(total))
        chunks = Chunks(artifact, total, data.chunk, _PARTS)
    with suppress(_PartsRemovedError):
        if missing := chunks.missing(share):
            _read(chunks, job, missing)
        if not chunks.missing():
            _check_rejects(chunks, data)
            content = _join(chunks)
            return None if chunks.missing() else content
    return None


class _PartsRemovedError(Exception):
    """Another worker, which found the last part too, has joined or refused all parts and removed them.

    Not a `FileNotFoundError`: `Artifact.writing` excuses that one, and would put half an index in place of the whole.
    """


def _read_part(chunks: Chunks, number: int) -> pa.Table:
    try:
        return pq.read_table(chunks.artifact.path(chunks.file(number)))
    except FileNotFoundError as error:
        raise _PartsRemovedError from error


def _read(chunks: Chunks, job: Job, missing: list[int]) -> None:
    """Decode every image of the missing chunks once, and write a table of each chunk."""
    data, wanted = job.config.data, set(missing)
    stream = job.source.samples()
    listed = ((number, list(islice(stream, chunks.size))) for number in range(missing[-1] + 1))
    samples = (sample for number, chunk in listed if number in wanted for sample in chunk)
    checked = ahead(samples, lambda sample: _check(sample, data.resolution), data.workers)
    rejected = 0
    with progress("ingest", chunks.rows, chunks.rows - sum(map(chunks.length, missing))) as bar:
        for number in missing:
            rows = []
            for row in islice(checked, chunks.length(number)):
                rows.append(row)
                bar.update()
            with chunks.artifact.writing(chunks.file(number)) as path:
                pq.write_table(pa.Table.from_pylist(rows, schema=_PART), path)
            rejected += sum(row["reason"] is not None for row in rows)
            if rejected > data.max_rejects * chunks.rows:
                _check_rejects(chunks, data)


def _check(sample: Sample, resolution: int) -> dict[str, str | None]:
    try:
        decode(sample.read(), resolution)
        reason = None
    except BadImage as bad:
        reason = bad.reason
    attributes = json.dumps(dict(sample.attributes), sort_keys=True, ensure_ascii=False)
    row = {"id": sample.id, "caption": sample.caption, "label": sample.label, "split": sample.split}
    return {**row, "attributes": attributes, "reason": reason}


def _check_rejects(chunks: Chunks, data: Data) -> None:
    """Stop if too many images are bad. Chunks with a bad one are removed, so that they are read again once fixed."""
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
        f"{rejected} of {chunks.rows} pictures are bad, more than data.max_rejects = {data.max_rejects:g} allows: "
        f"{'; '.join(f'{count}x {reason}' for reason, count in reasons)}. The list is {artifact.path(REJECTED)}; "
        f"fix them, delete {artifact.folder} and start again, or allow more with --data.max_rejects"
    )


def _join(chunks: Chunks) -> IngestContent:
    """Join the parts into the index and the table of rejects; return what the manifest declares."""
    artifact = chunks.artifact
    splits: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    captions = rejected = 0
    with (
        artifact.writing(SAMPLES) as good_path,
        artifact.writing(REJECTED) as bad_path,
        pq.ParquetWriter(good_path, SCHEMA) as good,
        pq.ParquetWriter(bad_path, _REJECTED) as bad,
    ):
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
    summary=lambda _, content: f"{content.rows:,} samples, {content.rejected:,} rejected",
)


@dataclass(frozen=True)
class Index:
    """The good samples of a run, by chunk."""

    artifact: Artifact
    manifest: Manifest

    @classmethod
    def open(cls, run: Path) -> "Index":
        """The index of a run whose ingest stage is done."""
        artifact = Artifact(run, NAME)
        return cls(artifact, artifact.open(INGEST))

    @classmethod
    def find(cls, run: Path) -> "Index | None":
        """Return the index of a run, None if its ingest stage is not done."""
        return cls.open(run) if Artifact(run, NAME).manifest() else None

    @cached_property
    def content(self) -> IngestContent:
        """Return what the index declares."""
        return INGEST.parse(self.manifest, self.artifact.folder)

    @property
    def rows(self) -> int:
        """Number of good samples."""
        return self.content.rows

    @property
    def chunk(self) -> int:
        """Number of samples in a chunk."""
        return int(self.manifest.made_from["chunk"])

    @property
    def labels(self) -> list[str]:
        """The names of the classes; a label's number is its place here."""
        return list(self.content.labels)

    def chunks(self, artifact: Artifact) -> Chunks:
        """The chunk files of another artifact of the same run."""
        return Chunks(artifact, self.rows, self.chunk)

    def read(self, chunk: int, columns: list[str]) -> dict[str, list[Any]]:
        """Some columns of one chunk."""
        table: dict[str, list[Any]] = read_rows(self.artifact.path(SAMPLES), chunk, columns).to_pydict()
        return table

    def walk(self, source: Source, chunks: list[int]) -> Iterator[tuple[int, list[Sample]]]:
        """The samples of the wanted chunks, each chunk as a list, from the source that the index was made from."""
        stream = source.samples()
        wanted = set(chunks)
        for chunk in range(max(chunks, default=-1) + 1):
            ids = self.read(chunk, ["id"])["id"]
            samples = [next((sample for sample in stream if sample.id == id), None) for id in ids]
            if chunk not in wanted:
                continue
            if None in samples:
                raise AtollError(f"the source changed: {ids[samples.index(None)]!r} is in {NAME} but not in the source")
            yield chunk, [sample for sample in samples if sample is not None]


def image_batches(
    index: Index, source: Source, chunks: list[int], *, resolution: int, batch: int, workers: int
) -> Iterator[tuple[int, Pixels]]:
    """Decoded pictures (samples, height, width, 3) of the wanted chunks, batch by batch, read ahead in threads."""

    def groups() -> Iterator[tuple[int, list[Sample]]]:
        for chunk, samples in index.walk(source, chunks):
            for start in range(0, len(samples), batch):
                yield chunk, samples[start : start + batch]

    def load(group: tuple[int, list[Sample]]) -> tuple[int, Pixels]:
        chunk, samples = group
        return chunk, np.stack([_pixels(sample, resolution) for sample in samples])

    return ahead(groups(), load, workers)


def _pixels(sample: Sample, resolution: int) -> Pixels:
    try:
        return np.asarray(decode(sample.read(), resolution))
    except BadImage as bad:
        raise AtollError(f"the source changed: {sample.id!r} was a good picture, and now: {bad.reason}") from bad
