"""The index: every image of the source is decoded once, and is listed as readable or rejected.

`images.parquet` is the index for all later stages: id, captions, label, split, attributes and size of every readable
image, in the order of the source, with one row group per chunk. `rejected.txt` has file or id, a tab, and the reason of
every rejected image. `listing.json` has what is decided before the first image is decoded: the number of images, and
their sizes. `chunks.json` has the key of every chunk.

The pass over the source (`data/one_pass.py`) writes one table per chunk, a part, after the tensors of the same chunk.
Then it notes the key of the chunk in the scratch folder `KEYS`. Here the parts are joined.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, to_json
from atoll.core.config_sections import DataSection
from atoll.core.errors import AtollError, shown
from atoll.core.manifests import INGEST, BucketContent, IngestContent
from atoll.core.prepared import READING
from atoll.core.progress import say
from atoll.core.sizes import Size, cropped_share
from atoll.data.chunks import Chunks
from atoll.data.images import BadImage
from atoll.data.index import BEFORE, CHUNKS, IMAGES, PARTS, REJECTED, SCHEMA, Before
from atoll.data.sources.open import open_source
from atoll.data.sources.source import Source, SourceImage, SourceOptions, digest
from atoll.data.stages.stage import AGAIN, KEYS, Preparation, Stage

NAME = layout.INGEST
TAB = "\t"
_FOLDER = PARTS.partition("/")[0]
_REJECTION = [("file", pa.string()), ("reason", pa.string())]
_PART = pa.schema([*SCHEMA, *_REJECTION, ("digest", pa.string())])
_NAMED = 10
"""Rejected images that an error names: a screen of 24 lines has room for as many reasons of two lines."""


def open_configured(data: DataSection) -> Source:
    """Open the source that a run's configuration names."""
    options = SourceOptions(**data.model_dump(include=set(READING)), caption_lines=data.caption_lines)
    return open_source(data.source, options)


def made_from(preparation: Preparation) -> Inputs:
    """Return the source and the settings that the index is made from."""
    data = preparation.config.data
    settings = data.model_dump(include={*READING, "resolution", "chunk", "buckets"})
    if data.caption_lines:
        settings["caption_lines"] = True
    # Without buckets, the options of buckets have no effect.
    if data.buckets != "off":
        settings |= {"max_upscale": data.max_upscale, "multiple": preparation.multiple}
    return {"source": preparation.source.kind, **settings, "fingerprint": preparation.source.fingerprint}


def identity(preparation: Preparation) -> str:
    """Return a hash of the inputs of the index. It is an input of everything else that the pass makes."""
    return hashlib.sha256(to_json(made_from(preparation))).hexdigest()


def image_digest(image: SourceImage, data: bytes | None = None) -> str:
    """Return a hash of an image and its metadata; `data` are its bytes, if they are read already."""
    try:
        data = image.read() if data is None else data
    except BadImage as bad:
        # An unreadable image has a digest as well, so that a chunk with one can be taken over.
        data = bad.reason.encode()
    metadata = repr((image.captions, image.weights, image.label, sorted(image.attributes.items()), image.split))
    return digest(image.id, metadata, data)


def chunk_key(preparation: Preparation, digests: Sequence[str]) -> str:
    """Return the key of a chunk, from the digests of its images."""
    settings = {name: value for name, value in made_from(preparation).items() if name != "fingerprint"}
    return digest(*digests, to_json([settings, preparation.list_source().sizes]))


def row_of(
    image: SourceImage,
    *,
    size: Size | None = None,
    original: tuple[int, int] = (0, 0),
    reason: str | None = None,
    digest: str,
) -> dict[str, Any]:
    """Return the row of an image in its part: with its size, or with the reason if it cannot be used.

    `original` is its width and height in the file, upright.
    """
    attributes = json.dumps(dict(image.attributes), sort_keys=True, ensure_ascii=False)
    row = {"id": image.id, "captions": image.captions, "weights": image.weights, "label": image.label}
    shape = {"width": size.width, "height": size.height, "cropped": cropped_share(size, *original)} if size else {}
    rejection = {"file": image.file or image.id, "reason": reason} if reason else {}
    return {**row, "split": image.split, "attributes": attributes, **shape, **rejection, "digest": digest}


def write_part(preparation: Preparation, chunk: int, key: str, rows: list[dict[str, Any]]) -> None:
    """Write the table of a chunk, and note its key. Its other files must be complete."""
    with Artifact(preparation.run, NAME).writing(PARTS.format(key)) as path:
        pq.write_table(pa.Table.from_pylist(rows, schema=_PART), path)
    note_key(preparation, chunk, key)


def note_key(preparation: Preparation, chunk: int, key: str) -> None:
    """Note the key of a chunk of the source, all files of which are complete."""
    folder = preparation.run / NAME / KEYS
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{chunk:06d}.*{AGAIN}"):
        path.unlink(missing_ok=True)
    (folder / f"{chunk:06d}.{key}").touch()


def sizes_by_id(preparation: Preparation, chunk: int, key: str | None) -> dict[str, Size] | None:
    """Return the sizes of the readable images of a chunk by id; None if the chunk is not checked yet."""
    if index := preparation.find_index():
        return dict(zip(index.read(chunk, ["id"])["id"], index.sizes(chunk), strict=True))
    if key is None:
        return None
    part = pq.read_table(preparation.run / NAME / PARTS.format(key))
    fine = part.filter(part["reason"].is_null()).to_pydict()
    return {id: Size(h, w) for id, h, w in zip(fine["id"], fine["height"], fine["width"], strict=True)}


class IngestStage(Stage):
    """The index of the readable images, joined from the parts that the pass writes."""

    name, kind, folder = "ingest", INGEST, NAME
    needs = ()
    in_pass = True
    follows = frozenset({"fingerprint"})

    def uses(self) -> str:
        data = self.preparation.config.data
        return f"{data.source} at {data.resolution} px"

    def made_from(self) -> Inputs:
        return made_from(self.preparation)

    def chunks(self) -> Chunks | None:
        """Return the chunks of the source, with readable and rejected images."""
        listing, size = self.preparation.listing, self.preparation.config.data.chunk
        if listing is None:
            return None
        return Chunks(self.artifact, listing.images, size, PARTS, listing.lengths, self.preparation.chunk_keys())

    def _is_made(self, artifact: Artifact, inputs: Inputs) -> bool:
        made = super()._is_made(artifact, inputs)
        if made:
            self.preparation.open_index()  # for the stages after this one, which read it from the preparation
        return made

    def restart(self, artifact: Artifact, inputs: Inputs) -> None:
        """Keep the parts of the chunks, and note where the chunks began."""
        say(f"the source has changed since {artifact.folder} was begun; unchanged chunks are used again")
        committed = artifact.manifest() is not None
        if self.preparation.listing and (committed or not artifact.path(BEFORE).is_file()):
            known = self.preparation.chunk_keys(again=True)
            keys = tuple(key for key in known if key)
            before = Before(sizes=self.preparation.listing.sizes, keys=keys, complete=None not in known)
            artifact.write(BEFORE, to_json(before.model_dump()))
        artifact.restart(self.kind, inputs, keep=lambda path: path.name == BEFORE or path.parent.name == _FOLDER)
        self.preparation.listing = self.preparation.index = None

    def make(self, artifact: Artifact) -> IngestContent:
        """Join all parts."""
        chunks = self.chunks()
        assert chunks is not None
        check_rejects(chunks, self.preparation.config.data)
        content = _join(artifact, chunks)
        chunks.remove_others()
        return content

    def summary(self, content: IngestContent) -> str:
        """Return the numbers of images, and the share of their pixels that is cropped, by size."""
        total = sum(size.images * size.cropped for size in content.sizes.values()) / content.rows
        by_size = [f"{name} {size.images:,} ({size.cropped:.1%})" for name, size in content.sizes.items()]
        return (
            f"{content.rows:,} images, {content.rejected:,} rejected{f' ({REJECTED})' if content.rejected else ''}, "
            f"{total:.1%} of the pixels cropped"
            f"{': ' + ', '.join(by_size) if len(by_size) > 1 else ''}"
        )


def _read_part(chunks: Chunks, number: int, columns: list[str] | None = None) -> pa.Table:
    with pq.ParquetFile(chunks.artifact.path(chunks.file(number))) as file:
        return file.read(columns, use_threads=False)


def check_rejects(chunks: Chunks, data: DataSection) -> None:
    """Raise `AtollError` if too many images are rejected."""
    artifact, bad = chunks.artifact, {}
    for number in sorted(set(range(chunks.count)) - set(chunks.missing())):
        if lines := _rejections(_read_part(chunks, number, [name for name, _ in _REJECTION])):
            bad[number] = lines
    rejected = [line for lines in bad.values() for line in lines]
    if len(rejected) <= data.max_rejects * chunks.rows:
        return
    artifact.write(REJECTED, "".join(rejected).encode())
    # The next attempt reads chunks with a rejected image again, with the images fixed.
    for number in bad:
        for path in artifact.folder.glob(f"{KEYS}/{number:06d}.*"):
            path.rename(path.with_suffix(f"{path.suffix}{AGAIN}"))
    named = "".join(f"\n  {line.rstrip().replace(TAB, ': ')}" for line in rejected[:_NAMED])
    more = f"\n  and {len(rejected) - _NAMED:,} more" if len(rejected) > _NAMED else ""
    raise AtollError(
        f"{len(rejected)} of {chunks.rows} images are unusable, more than data.max_rejects = {data.max_rejects:g} "
        f"allows:{named}{more}\nAll are listed in {artifact.path(REJECTED)}. Fix or remove them and run the same "
        "command again, or allow more with --data.max_rejects"
    )


def _rejections(part: pa.Table) -> list[str]:
    """Return a line for each rejected image of a part: its file or id, a tab and the reason."""
    found = part.filter(part["reason"].is_valid())
    pairs = zip(found["file"].to_pylist(), found["reason"].to_pylist(), strict=True)
    return [TAB.join(map(shown, pair)) + "\n" for pair in pairs]


def _join(artifact: Artifact, chunks: Chunks) -> IngestContent:
    """Join the parts into the index and the table of rejects, and return the content to commit."""
    splits: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    sizes: Counter[Size] = Counter()
    cropped: Counter[Size] = Counter()
    captions = rejected = 0
    with (
        artifact.writing(IMAGES) as good_path,
        artifact.writing(REJECTED) as bad_path,
        pq.ParquetWriter(good_path, SCHEMA) as good,
        bad_path.open("w", encoding="utf-8") as bad,
    ):
        for number in range(chunks.count):
            part = _read_part(chunks, number)
            lines = _rejections(part)
            bad.writelines(lines)
            rejected += len(lines)
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
    artifact.write(CHUNKS, to_json(chunks.keys))
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
