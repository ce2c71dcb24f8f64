"""The first stage: read every picture of the source once, list the good ones and the bad ones.

`samples.parquet` is the index that all later stages share: id, caption, label, split and attributes of every good
sample, in the order of the source, in row groups of one chunk. `rejected.parquet` has id and reason of every bad one.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, Manifest
from atoll.core.config import Config, Data
from atoll.core.errors import AtollError
from atoll.core.manifests import INGEST, IngestContent
from atoll.core.progress import progress
from atoll.data.chunks import Chunks, ahead, read_rows
from atoll.data.sources.base import BadPicture, Options, Sample, Source, decode, describe
from atoll.data.sources.open import open_source

NAME = layout.INGEST
SAMPLES, REJECTED = "samples.parquet", "rejected.parquet"
_PARTS = ".parts"

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
    options = Options(data.kind, data.image, data.caption, data.label, data.id, data.split, data.held_out)
    return open_source(data.source, options)


def made_from(config: Config, source: Source) -> Inputs:
    """What the index is made from."""
    reading = {"kind", "image", "caption", "label", "id", "split", "held_out", "resolution", "chunk"}
    return {"source": source.kind, **config.data.model_dump(include=reading), "fingerprint": source.fingerprint}


def ingest(run: Path, config: Config, source: Source) -> Manifest:
    """Make `data/ingest`."""
    artifact = Artifact(run, NAME)
    if done := artifact.begin(INGEST, made_from(config, source)):
        return done
    total = describe(source)
    if not total:
        raise AtollError(f"{config.data.source}: there is no picture in it")
    _read_all(artifact, config.data, source, total=total)
    content = _combine(artifact, config.data.chunk)
    _check_share(artifact, config.data, rejected=content.rejected, total=total)
    return artifact.commit(content)


def _read_all(artifact: Artifact, data: Data, source: Source, *, total: int) -> None:
    """Decode everything once, part by part; parts that are there from an earlier attempt are skipped."""
    parts = [f"{_PARTS}/{part:06d}.parquet" for part in range(-(-total // data.chunk))]
    todo = {number for number, part in enumerate(parts) if not artifact.path(part).is_file()}
    rejected = 0
    done = total - sum(min(data.chunk, total - number * data.chunk) for number in todo)
    with progress("ingest", total, done) as bar:
        stream = source.samples()
        wanted = (
            chunk for number in range(len(parts)) for chunk in [list(islice(stream, data.chunk))] if number in todo
        )
        checked = ahead(
            (sample for chunk in wanted for sample in chunk),
            lambda sample: _check(sample, data.resolution),
            data.workers,
        )
        for number in sorted(todo):
            rows = []
            for row in islice(checked, data.chunk):
                rows.append(row)
                bar.update()
            with artifact.writing(parts[number]) as path:
                pq.write_table(pa.Table.from_pylist(rows, schema=_PART), path)
            rejected += sum(row["reason"] is not None for row in rows)
            if rejected > data.max_rejects * total:
                _combine(artifact, data.chunk)
                _check_share(artifact, data, rejected, total=total)


def _check(sample: Sample, resolution: int) -> dict[str, str | None]:
    try:
        decode(sample.read(), resolution)
        reason = None
    except BadPicture as bad:
        reason = bad.reason
    attributes = json.dumps(dict(sample.attributes), sort_keys=True, ensure_ascii=False)
    row = {"id": sample.id, "caption": sample.caption, "label": sample.label, "split": sample.split}
    return {**row, "attributes": attributes, "reason": reason}


def _combine(artifact: Artifact, chunk: int) -> IngestContent:
    """Join the parts into the index and the table of rejects; return what the manifest declares."""
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
        for path in _parts(artifact):
            part = pq.read_table(path)
            is_bad = part["reason"].is_valid()
            bad.write_table(part.filter(is_bad).select(_REJECTED.names))
            rejected += sum(is_bad.to_pylist())
            fine = part.filter(part["reason"].is_null()).select(SCHEMA.names)
            splits.update(fine["split"].to_pylist())
            labels.update(label for label in fine["label"].to_pylist() if label is not None)
            captions += len(fine) - fine["caption"].null_count
            waiting = pa.concat_tables([waiting, fine]).combine_chunks()
            while len(waiting) >= chunk:
                good.write_table(waiting.slice(0, chunk), row_group_size=chunk)
                waiting = waiting.slice(chunk)
        if len(waiting):
            good.write_table(waiting, row_group_size=chunk)
    rows = sum(splits.values())
    return IngestContent(
        rows=rows,
        rejected=rejected,
        captions=captions,
        splits=dict(splits),
        labels=dict(sorted(labels.items())),
    )


def _check_share(artifact: Artifact, data: Data, rejected: int, *, total: int) -> None:
    if rejected <= data.max_rejects * total:
        return
    reasons = Counter(pq.read_table(artifact.path(REJECTED))["reason"].to_pylist())
    common = "; ".join(f"{count}x {reason}" for reason, count in reasons.most_common(3))
    _forget_bad(artifact)
    raise AtollError(
        f"{rejected} of {total} pictures are bad, more than data.max_rejects = {data.max_rejects:g} allows: {common}. "
        f"The list is {artifact.path(REJECTED)}; mend them, delete {artifact.folder} and start again, or allow "
        "more with --data.max_rejects"
    )


def _forget_bad(artifact: Artifact) -> None:
    """Remove the parts that have bad pictures, so that these are read again once they are mended."""
    for path in _parts(artifact):
        reasons = pq.read_table(path, columns=["reason"])["reason"]
        if reasons.null_count < len(reasons):
            path.unlink()


def _parts(artifact: Artifact) -> list[Path]:
    return sorted(artifact.path(_PARTS).glob("[0-9]*.parquet"))


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


def picture_batches(
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
    except BadPicture as bad:
        raise AtollError(f"the source changed: {sample.id!r} was a good picture, and now: {bad.reason}") from bad
