"""The index: every image of the source is decoded once, and is listed as readable or rejected.

`images.parquet` is the index for all later stages: id, captions, label, split, attributes and size of every readable
image, in the order of the source, with one row group per chunk. `rejected.parquet` has id and reason of every rejected
image. `listing.json` has what is decided before the first image is decoded: the number of images, and their sizes.
`chunks.json` has a hash of the images of every chunk, by which a grown source reuses unchanged ones.

The pass over the source (`data/one_pass.py`) writes one table per chunk, a part. The part is written after the tensors
of the same chunk, so a chunk with a part is complete. Here the parts are joined.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, Manifest, to_json
from atoll.core.config_sections import Data
from atoll.core.errors import AtollError
from atoll.core.manifests import INGEST, BucketContent, IngestContent
from atoll.core.sizes import Size, cropped_share
from atoll.data.chunks import Chunks, Worker, read_rows, row_counts
from atoll.data.sources.base import BadImage, Options, Source, SourceImage, digest
from atoll.data.sources.open import open_source
from atoll.data.stages.base import Job, Stage
from atoll.data.stages.listing import Listing

NAME = layout.INGEST
IMAGES, REJECTED, CHUNKS = "images.parquet", "rejected.parquet", "chunks.json"
_PARTS = ".parts/{:06d}.parquet"
"""Scratch files: one table per chunk of the source."""

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("captions", pa.list_(pa.string())),
        ("weights", pa.list_(pa.float32())),
        ("label", pa.string()),
        ("split", pa.string()),
        ("attributes", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("cropped", pa.float32()),
    ]
)
_REJECTED = pa.schema([("id", pa.string()), ("reason", pa.string())])
_PART = pa.schema([*SCHEMA, ("reason", pa.string()), ("digest", pa.string())])


def open_configured(data: Data) -> Source:
    """Open the source that a run's configuration names."""
    columns = data.model_dump(include={"kind", "image", "caption", "label", "id", "split", "val_fraction"})
    options = Options(**columns, caption_lines=data.caption_lines)
    return open_source(data.source, options)


def made_from(job: Job) -> Inputs:
    """Return the source and the settings that the index is made from."""
    reading = {"kind", "image", "caption", "label", "id", "split", "val_fraction", "resolution", "chunk", "buckets"}
    data = job.config.data
    settings = data.model_dump(include=reading)
    # Without buckets, the options of buckets have no effect.
    buckets = {**data.model_dump(include={"max_upscale"}), "multiple": job.multiple}
    return {
        "source": job.source.kind,
        **settings,
        **(buckets if data.buckets != "off" else {}),
        "fingerprint": job.source.fingerprint,
    }


def identity(job: Job) -> str:
    """Return a hash of the inputs of the index. It is an input of everything else that the pass makes."""
    return hashlib.sha256(to_json(made_from(job))).hexdigest()


def source_chunks(job: Job) -> Chunks | None:
    """Return the chunks of the source, with readable and rejected images; None if the images are not counted yet."""
    listing = Listing.find(job.run)
    return Chunks(Artifact(job.run, NAME), listing.images, job.config.data.chunk, _PARTS) if listing else None


def pass_chunks(job: Job, artifact: Artifact) -> Chunks | None:
    """Return the chunks of another artifact of the pass; until the index is done, as if all images were readable."""
    if index := Index.find(job.run):
        return index.chunks(artifact)
    found = source_chunks(job)
    return Chunks(artifact, found.rows, found.size) if found else None


def image_digest(image: SourceImage, data: bytes | None = None) -> str:
    """Return a hash of an image and its metadata; `data` are its bytes, if they are read already."""
    try:
        data = image.read() if data is None else data
    except BadImage as bad:
        # An unreadable image has a digest as well, so that a chunk with one can be taken over.
        data = bad.reason.encode()
    metadata = repr((image.captions, image.weights, image.label, sorted(image.attributes.items()), image.split))
    return digest(image.id, metadata, data)


def chunk_key(digests: Sequence[str]) -> str:
    """Return a hash of all images of a chunk, from their digests."""
    return digest(*digests)


def row_of(
    image: SourceImage, *, size: Size | None, original: tuple[int, int], reason: str | None, digest: str
) -> dict[str, Any]:
    """Return the row of an image in its part: with its size, or with the reason if it cannot be used."""
    attributes = json.dumps(dict(image.attributes), sort_keys=True, ensure_ascii=False)
    row = {"id": image.id, "captions": image.captions, "weights": image.weights, "label": image.label}
    shape = {"width": size.width, "height": size.height, "cropped": cropped_share(size, *original)} if size else {}
    return {**row, "split": image.split, "attributes": attributes, **shape, "reason": reason, "digest": digest}


def write_part(chunks: Chunks, chunk: int, rows: list[dict[str, Any]]) -> None:
    """Write the table of a chunk. Its other files must be complete."""
    with chunks.artifact.writing(chunks.file(chunk)) as path:
        pq.write_table(pa.Table.from_pylist(rows, schema=_PART), path)


def sizes_by_id(chunks: Chunks, index: "Index | None", chunk: int) -> dict[str, Size] | None:
    """Return the sizes of the readable images of a chunk by id; None if the chunk is not checked yet."""
    if index:
        return dict(zip(index.read(chunk, ["id"])["id"], index.sizes(chunk), strict=True))
    try:
        part = _read_part(chunks, chunk)
    except PartsRemovedError:
        return None
    fine = part.filter(part["reason"].is_null()).to_pydict()
    return {id: Size(h, w) for id, h, w in zip(fine["id"], fine["height"], fine["width"], strict=True)}


def _run(job: Job, _: Artifact, __: Worker) -> IngestContent | None:
    """Join all chunks if none is missing."""
    chunks = source_chunks(job)
    if chunks is None or chunks.missing():
        return None
    with suppress(PartsRemovedError):
        check_rejects(chunks, job.config.data)
        content = _join(chunks)
        return None if chunks.missing() else content
    return None


class PartsRemovedError(Exception):
    """Another worker also found all parts, has joined or rejected them, and removed them.

    It must not be a `FileNotFoundError`: `Artifact.writing` ignores that one in a committed artifact.
    """


def _read_part(chunks: Chunks, number: int, columns: list[str] | None = None) -> pa.Table:
    try:
        with pq.ParquetFile(chunks.artifact.path(chunks.file(number))) as file:
            return file.read(columns, use_threads=False)
    except FileNotFoundError as error:
        raise PartsRemovedError from error


def check_rejects(chunks: Chunks, data: Data) -> None:
    """Raise `AtollError` if too many images are rejected."""
    # Chunks with a rejected image are removed, so that the next attempt reads them again, with the images fixed.
    artifact, bad = chunks.artifact, {}
    for number in sorted(set(range(chunks.count)) - set(chunks.missing())):
        part = _read_part(chunks, number, _REJECTED.names)
        if part["reason"].null_count < len(part):
            bad[chunks.file(number)] = part.filter(part["reason"].is_valid())
    rejected = sum(map(len, bad.values()))
    if rejected <= data.max_rejects * chunks.rows:
        return
    table = pa.concat_tables(bad.values())
    with artifact.writing(REJECTED) as path:
        pq.write_table(table, path)
    for file in bad:
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
    sizes: Counter[Size] = Counter()
    cropped: Counter[Size] = Counter()
    captions = rejected = 0
    keys = []
    with (
        artifact.writing(IMAGES) as good_path,
        artifact.writing(REJECTED) as bad_path,
        pq.ParquetWriter(good_path, SCHEMA) as good,
        pq.ParquetWriter(bad_path, _REJECTED) as bad,
    ):
        for number in range(chunks.count):
            part = _read_part(chunks, number)
            keys.append(chunk_key(part["digest"].to_pylist()))
            is_bad = part["reason"].is_valid()
            bad.write_table(part.filter(is_bad).select(_REJECTED.names))
            rejected += sum(is_bad.to_pylist())
            fine = part.filter(part["reason"].is_null())
            # One row group for each chunk, also for one without readable images, so that both have the same number.
            good.write_table(fine.select(SCHEMA.names), row_group_size=chunks.size)
            splits.update(fine["split"].to_pylist())
            labels.update(label for label in fine["label"].to_pylist() if label is not None)
            captions += sum(map(bool, fine["captions"].to_pylist()))
            columns = fine.select(["height", "width", "cropped"]).to_pydict()
            for height, width, share in zip(*columns.values(), strict=True):
                sizes[Size(height, width)] += 1
                cropped[Size(height, width)] += share
    artifact.write(CHUNKS, to_json(keys))
    if not splits.total():
        raise AtollError(f"no image of {artifact.folder} is readable; the list is {artifact.path(REJECTED)}")
    return IngestContent(
        rows=splits.total(),
        rejected=rejected,
        captions=captions,
        splits=dict(splits),
        labels=dict(sorted(labels.items())),
        sizes={
            str(size): BucketContent(images=count, cropped=round(cropped[size] / count, 6))
            for size, count in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
        },
    )


def _summary(_: Artifact, content: IngestContent) -> str:
    """Return the numbers of images, and the share of their pixels that is cropped, by size."""
    total = sum(size.images * size.cropped for size in content.sizes.values()) / content.rows
    by_size = [f"{name} {size.images:,} ({size.cropped:.1%})" for name, size in content.sizes.items()]
    return (
        f"{content.rows:,} images, {content.rejected:,} rejected, {total:.1%} of the pixels cropped"
        f"{': ' + ', '.join(by_size) if len(by_size) > 1 else ''}"
    )


STAGE = Stage(
    name="ingest",
    kind=INGEST,
    inputs=(),
    outputs=lambda _: {NAME: {}},
    made_from=made_from,
    run=_run,
    uses=lambda config: f"{config.data.source} at {config.data.resolution} px",
    chunks=source_chunks,
    summary=_summary,
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

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of images in each chunk."""
        return row_counts(self.artifact.path(IMAGES))

    @property
    def labels(self) -> list[str]:
        """The class names, by class index."""
        return list(self.content.labels)

    def chunks(self, artifact: Artifact) -> Chunks:
        """Return the chunk files of another artifact of the same run."""
        return Chunks(artifact, self.rows, int(self.manifest.made_from["chunk"]), lengths=self.lengths)

    def by_chunk(self, rows: "np.ndarray[Any, Any]") -> dict[int, "np.ndarray[Any, Any]"]:
        """Return ascending rows of the index by their chunks, each counted from the start of its chunk."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        chunks = np.searchsorted(starts, rows, side="right") - 1
        return {int(chunk): rows[chunks == chunk] - starts[chunk] for chunk in np.unique(chunks)}

    def keys(self) -> list[str]:
        """Return a hash of the images of every chunk."""
        found: list[str] = self.artifact.read_json(CHUNKS)
        return found

    def part_rows(self, chunk: int, digests: list[str]) -> list[dict[str, Any]]:
        """Return the rows of the part that a chunk of the index was made of, for images with these digests."""
        rows = [
            *read_rows(self.artifact.path(IMAGES), chunk).to_pylist(),
            *read_rows(self.artifact.path(REJECTED), chunk).to_pylist(),
        ]
        # The order of readable and rejected images among each other is lost, and not needed; that of digests is.
        return [{**row, "digest": own} for row, own in zip(rows, digests, strict=True)]

    def train_sizes(self) -> dict[Size, int]:
        """Return the number of training images of every size of the run, the most frequent size first."""
        found = Counter(dict.fromkeys(map(Size.parse, self.content.sizes), 0))
        for chunk in range(len(self.lengths)):
            columns = self.arrays(chunk)
            shapes = np.stack([columns["height"], columns["width"]], axis=1)[columns["train"]]
            for shape, count in zip(*np.unique(shapes, axis=0, return_counts=True), strict=True):
                found[Size(*map(int, shape))] += int(count)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def sizes(self, chunk: int) -> list[Size]:
        """Return the size of every image of a chunk."""
        if len(self.content.sizes) == 1:
            return [Size.parse(next(iter(self.content.sizes)))] * self.lengths[chunk]
        columns = self.read(chunk, ["height", "width"])
        return [Size(*shape) for shape in zip(columns["height"], columns["width"], strict=True)]

    def arrays(self, chunk: int) -> dict[str, "np.ndarray[Any, Any]"]:
        """Return height and width of every image of a chunk, and whether it is a training image (`train`)."""
        table = read_rows(self.artifact.path(IMAGES), chunk, ["height", "width", "split"])
        train = pc.equal(table["split"], "train").to_numpy()
        return {"height": table["height"].to_numpy(), "width": table["width"].to_numpy(), "train": train}

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
