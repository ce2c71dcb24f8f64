"""The index of a run: which images its source has, which of them are readable, and in which chunk each one is.

`Listing` is decided before the first image is decoded. `Index` is what the ingest stage makes and later stages read:
id, captions, label, split, attributes and size of every readable image, with one row group per chunk.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from atoll.core import layout
from atoll.core.artifacts import Artifact, Content, Manifest, to_json
from atoll.core.config_sections import DataSection
from atoll.core.errors import AtollError, listed
from atoll.core.manifests import INGEST, IngestContent
from atoll.core.progress import say
from atoll.core.sizes import Size
from atoll.data.buckets import choose_sizes
from atoll.data.chunks import Chunks, read_rows, row_counts
from atoll.data.sources.source import Source, SourceImage, describe, survey

IMAGES, REJECTED, CHUNKS, LISTING = "images.parquet", "rejected.txt", "chunks.json", "listing.json"
PARTS = "parts/{}.parquet"
"""One table per chunk, with readable and rejected images, by the key of the chunk."""
BEFORE = ".before.json"
"""Scratch file: sizes and chunks of the source before it changed."""

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


class Listing(Content):
    """What is decided before the pass, from a listing of the source without decoding."""

    images: int
    """Number of images, readable or not."""
    train: int
    """Number of images of the training split."""
    labels: int
    """Number of classes."""
    sizes: tuple[str, ...]
    """The buckets: sizes that images are cropped and resized to."""
    lengths: tuple[int, ...] | None = None
    """Number of images in each chunk of the source; None if all but the last are full."""

    @property
    def buckets(self) -> tuple[Size, ...]:
        """The buckets as sizes."""
        return tuple(map(Size.parse, self.sizes))

    @classmethod
    def find(cls, run: Path) -> "Listing | None":
        """Return the listing of a run; None if no worker has written it yet."""
        try:
            return cls.model_validate(Artifact(run, layout.INGEST).read_json(LISTING))
        except FileNotFoundError:
            return None

    @classmethod
    def make(cls, run: Path, data: DataSection, source: Source, *, multiple: int) -> "Listing":
        """List the source. Sides of buckets are multiples of `multiple`."""
        artifact, found, lengths = Artifact(run, layout.INGEST), survey(source), None
        describe(found)
        if not found.images:
            raise AtollError(f"{data.source} has no images; change data.source")
        if (before := Before.find(artifact)) is None:
            sizes = tuple(map(str, choose_sizes(data, source, images=found.images, multiple=multiple)))
        else:
            # The sizes of a source that has changed stay the same, because unchanged chunks have them.
            sizes, (lengths, new, gone) = before.sizes, before.cut(artifact, source, data.chunk)
            if new and before.complete:
                say(f"{len(new):,} new: {listed(new)}")
            if gone:
                say(f"{len(gone):,} gone: {listed(gone)}")
        made = cls(images=found.images, train=found.train, labels=found.labels, sizes=sizes, lengths=lengths)
        # Several workers may list the source at the same time. The first file counts for all of them.
        artifact.create(LISTING, to_json(made.model_dump(exclude_none=True)))
        return cls.find(run) or made


class Before(Content):
    """The source before it changed."""

    sizes: tuple[str, ...]
    keys: tuple[str, ...]
    """Keys of its chunks, in their order."""
    complete: bool
    """Whether all of its chunks were read."""

    @classmethod
    def find(cls, artifact: Artifact) -> "Before | None":
        """Return the source before it changed; None if it did not."""
        try:
            return cls.model_validate(artifact.read_json(BEFORE))
        except FileNotFoundError:
            return None

    def cut(self, artifact: Artifact, source: Source, size: int) -> tuple[tuple[int, ...], list[str], list[str]]:
        """Return the lengths of the chunks of the source, at most `size`, which begin where they began before.

        So images that were added or removed change the chunk that they are in, and not the ones after it. Their ids
        are returned, too.
        """
        chunk_of = {row["id"]: number for number, row in self.rows(artifact, ["id"])}
        lengths, furthest, new = [0], -1, []
        for image in source.images():
            old = chunk_of.pop(image.id, -1)
            new += [image.id] if old < 0 else []
            if lengths[-1] == size or (lengths[-1] and old > furthest):
                lengths.append(0)
            furthest = max(furthest, old)
            lengths[-1] += 1
        return tuple(lengths), new, list(chunk_of)

    def rows(self, artifact: Artifact, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the images of the source before, readable or not, each with the number of its chunk."""
        for number, key in enumerate(self.keys):
            file = artifact.path(PARTS.format(key))
            for row in pq.read_table(file, columns=columns).to_pylist() if file.is_file() else ():
                yield number, row


@dataclass(frozen=True)
class Index:
    """The readable images of a run, by chunk."""

    artifact: Artifact
    manifest: Manifest
    keys: tuple[str, ...]
    """The keys of the chunks."""

    @classmethod
    def open(cls, run: Path) -> "Index":
        """Open the index of a run whose ingest stage is done."""
        artifact = Artifact(run, layout.INGEST)
        return cls(artifact, artifact.open(INGEST), tuple(artifact.read_json(CHUNKS)))

    @classmethod
    def find(cls, run: Path) -> "Index | None":
        """Return the index of a run, or None if its ingest stage is not done."""
        return cls.open(run) if Artifact(run, layout.INGEST).manifest() else None

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
        size = int(self.manifest.made_from["chunk"])
        return Chunks(artifact, self.rows, size, lengths=self.lengths, keys=self.keys)

    def by_chunk(self, rows: "np.ndarray[Any, Any]") -> dict[int, "np.ndarray[Any, Any]"]:
        """Return ascending rows of the index by their chunks, each counted from the start of its chunk."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        chunks = np.searchsorted(starts, rows, side="right") - 1
        return {int(chunk): rows[chunks == chunk] - starts[chunk] for chunk in np.unique(chunks)}

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
