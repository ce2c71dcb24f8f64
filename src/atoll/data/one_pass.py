"""One pass over the source: every image is read and decoded once, for all stages that need its pixels.

    source ──> threads: read, check, decode, crop and resize ──> batches ──> encoders ──> chunk files

The unit is a chunk of the source. Its images are decoded ahead in threads, in a bounded queue. Each encoder (the
features network, the autoencoder, …) gets batches that are formed inside the chunk, per size if its output depends on
the size. So the bytes depend neither on the number of workers nor on interruptions. An accelerator computes one batch
while the host prepares the next one, and another thread writes the files of the chunk before.

The files of the encoders are written first, then the part of the index, and then the key of the chunk is noted. A chunk
without a noted key is read again, because another set of its images may be readable now. If the source has changed, its
chunks are hashed first, and files that exist for their keys are not made again.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.artifacts import Artifact
from atoll.core.config_sections import DataSection
from atoll.core.device import Download
from atoll.core.errors import AtollError, listed
from atoll.core.progress import progress, say
from atoll.core.sizes import Size, nearest_size, upscaling
from atoll.data.chunks import Chunks, WorkerShare, part_name, prefetch
from atoll.data.images import BadImage, fit, image_size, open_image
from atoll.data.index import PARTS, Before
from atoll.data.sources.source import SourceImage
from atoll.data.stages import ingest
from atoll.data.stages.stage import EncoderStage, PassEncoder, Preparation, Stage
from atoll.encoders.pretrained import Pixels


@dataclass(frozen=True)
class Decoded:
    """An image of the source after its only decoding."""

    row: dict[str, Any]
    """Its row of the index (`ingest.row_of`)."""
    size: Size | None = None
    """Its bucket; None if it is rejected."""
    pixels: dict[tuple[Size, Size], Pixels] = field(default_factory=dict)
    """The image (height, width, 3) in every `PassEncoder.view`."""


def _decode(
    image: SourceImage,
    encoders: Sequence[PassEncoder],
    known: Size | None,
    *,
    data: DataSection,
    sizes: tuple[Size, ...],
) -> Decoded:
    """Decode an image to its bucket, and to the sizes that encoders take.

    With `known`, it was readable before, with this size: then it must still be.
    """
    encoded = None
    try:
        encoded = image.read()
        original = image_size(encoded)
        size = known or nearest_size(sizes, *original)
        if not known and data.buckets != "off" and upscaling(size, *original) > data.max_upscale:
            raise BadImage(
                f"{original[0]}x{original[1]} pixels are too few for {size}: they would be enlarged by more than "
                f"data.max_upscale = {data.max_upscale:g}"
            )
        views = {encoder.view(size) for encoder in encoders} or {(size, size)}
        opened = open_image(encoded, [target for target, _ in views])
        pixels = {view: np.asarray(fit(opened, *view)) for view in views}
        digest = ingest.image_digest(image, encoded)
        return Decoded(ingest.row_of(image, size=size, original=original, digest=digest), size, pixels)
    except BadImage as bad:
        if known:
            raise AtollError(f"the source changed: {image.id!r} was readable before; now: {bad.reason}") from bad
        return Decoded(ingest.row_of(image, reason=bad.reason, digest=ingest.image_digest(image, encoded)))


class _Batches:
    """The encoded batches of one chunk. The last one may still be in work on the accelerator.

    Its result is copied behind it, and ahead of the next batch. So waiting for the copy does not wait for that batch.
    """

    def __init__(self, encoders: dict[str, PassEncoder]) -> None:
        self.encoders = encoders
        self.waiting: dict[tuple[str, Size | None], list[Decoded]] = defaultdict(list)
        self.done: dict[tuple[str, Size | None], list[dict[str, Tensor]]] = defaultdict(list)
        self.in_work: list[tuple[tuple[str, Size | None], list[str], Download]] = []

    def add(self, decoded: Decoded) -> None:
        """Add a readable image; encode the batches that it fills."""
        for name, encoder in self.encoders.items():
            key = (name, decoded.size if encoder.by_size else None)
            self.waiting[key].append(decoded)
            if len(self.waiting[key]) == encoder.batch_size:
                self._encode(key)

    def _encode(self, key: tuple[str, Size | None]) -> None:
        images, encoder = self.waiting.pop(key), self.encoders[key[0]]
        size = images[0].size
        assert size is not None
        pixels = np.stack([image.pixels[encoder.view(size)] for image in images])
        tensors = encoder.encode(pixels, size)
        self.in_work.append((key, list(tensors), Download(*tensors.values())))
        # The results of a batch are collected when the next one is queued, so that the accelerator does not wait.
        self._collect(leave=1)

    def _collect(self, leave: int) -> None:
        while len(self.in_work) > leave:
            key, names, copies = self.in_work.pop(0)
            self.done[key].append(dict(zip(names, copies.wait(), strict=True)))

    def finish(self) -> None:
        """Encode the batches that are not full, after all images are added."""
        for key in list(self.waiting):
            self._encode(key)

    def tensors(self, images: list[Decoded], sizes: tuple[Size, ...]) -> dict[str, dict[str, Tensor]]:
        """Wait for the last batch; return the tensors of the chunk, by encoder and name, from its readable `images`."""
        self._collect(leave=0)
        found: dict[str, dict[str, Tensor]] = {}
        for name, encoder in self.encoders.items():
            tensors: dict[str, Tensor] = {}
            # In the order of the run's sizes, since sums over a chunk depend on it.
            for size in sizes if encoder.by_size else (None,):
                batches = self.done.get((name, size), [])
                members = [image.row["split"] == "train" for image in images if size in (None, image.size)]
                joined = {part: torch.cat([batch[part] for batch in batches]) for part in batches[0]} if batches else {}
                if joined and encoder.summarize:
                    summary = encoder.summarize(joined, torch.tensor(members))
                    for part, value in summary.items():
                        tensors[part] = tensors[part] + value if part in tensors else value
                tensors |= {part_name(part, size, sizes) if size else part: value for part, value in joined.items()}
            found[name] = tensors
        return found


def run_pass(preparation: Preparation, stages: Sequence[Stage], worker: WorkerShare) -> None:
    """Make this worker's missing chunks of some stages of the pass."""
    # The index comes first, because the inputs of all other stages contain its identity. The listing has the number of
    # classes, which decides whether the clusters need features. To begin the index again below changes nothing.
    for stage in stages:
        if stage.name == "ingest":
            stage.begin()
    listing, data = preparation.list_source(), preparation.config.data
    stages = [stage for stage in stages if not stage.unneeded()]
    for stage in stages:
        stage.begin()

    # Which chunks need which stages
    parts = Chunks(Artifact(preparation.run, ingest.NAME), listing.images, data.chunk, lengths=listing.lengths)
    keys = _known_keys(preparation, stages, parts, worker)
    chunks: dict[str, Chunks] = {}
    for stage in stages:
        if own := stage.chunks():  # always, because the source is listed
            chunks[stage.name] = replace(own, keys=keys)
    noted = preparation.chunk_keys()
    todo: dict[int, list[str]] = {}
    for chunk in worker.share(parts.count):
        missing = [name for name, own in chunks.items() if own.length(chunk) and not own.has(chunk)]
        if noted[chunk] is None and "ingest" not in missing:  # an unchanged chunk
            ingest.note_key(preparation, chunk, str(keys[chunk]))
        if missing:
            todo[chunk] = missing
    if not todo:
        return
    encoders = {
        stage.name: stage.open_encoder()
        for stage in stages
        if isinstance(stage, EncoderStage) and any(stage.name in names for names in todo.values())
    }
    sizes = listing.buckets

    def work(item: tuple[int, SourceImage, Size | None]) -> tuple[int, Decoded]:
        chunk, image, known = item
        used = [encoders[name] for name in todo[chunk] if name in encoders]
        return chunk, _decode(image, used, known, data=data, sizes=sizes)

    def write(chunk: int, batches: _Batches, images: list[Decoded]) -> None:
        tensors, rows = batches.tensors([image for image in images if image.size], sizes), [i.row for i in images]
        checked = "ingest" not in todo[chunk]
        key = keys[chunk] if checked else ingest.chunk_key(preparation, [row["digest"] for row in rows])
        if keys[chunk] not in (None, key):
            raise AtollError("the source changed while it was read; run the same command again")
        for name, named in tensors.items():
            if named:  # a chunk without readable images has no file
                chunks[name].artifact.write_tensors(chunks[name].files.format(key), named)
        if not checked:
            ingest.write_part(preparation, chunk, str(key), rows)

    batch_size = max((encoder.batch_size for encoder in encoders.values()), default=0)
    images = prefetch(_listed(preparation, parts, todo, keys), work, data.workers, ahead=batch_size)
    rejected, done, label = 0, parts.rows - sum(map(parts.length, todo)), ", ".join(stage.name for stage in stages)
    with progress(label, parts.rows, done) as bar, ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for chunk, members in groupby(images, key=itemgetter(0)):
            batches = _Batches({name: encoders[name] for name in todo[chunk] if name in encoders})
            decoded_images: list[Decoded] = []
            for _, decoded in members:
                if decoded.size is not None:
                    batches.add(decoded)
                # The pixels are in the batch now; keeping them would keep the whole chunk in memory.
                decoded_images.append(replace(decoded, pixels={}))
                bar.update()
            bar.update(parts.length(chunk) - len(decoded_images))  # rejected before
            batches.finish()
            if written:
                written.result()
            # The thread waits for the last batch, so that the accelerator gets the next chunk meanwhile.
            written = writer.submit(write, chunk, batches, decoded_images)
            # Stop early: a wrong source should not take hours to be noticed.
            rejected += sum(image.size is None for image in decoded_images)
            if rejected > data.max_rejects * parts.rows:
                written.result()
                ingest.check_rejects(replace(parts, files=PARTS, keys=preparation.chunk_keys()), data)
        if written:
            written.result()


def _known_keys(
    preparation: Preparation, stages: Sequence[Stage], parts: Chunks, worker: WorkerShare
) -> list[str | None]:
    """Return the keys of all chunks, None for those that are unknown.

    If the source has changed, or the index was deleted, the unchecked chunks of this worker are hashed: this takes
    reading their images, but no decoding and no network.
    """
    keys, before = preparation.chunk_keys(), Before.find(parts.artifact)
    unchecked = {chunk for chunk in worker.share(parts.count) if keys[chunk] is None}
    if not unchecked or (before is None and not any(stage.artifact.manifest() for stage in stages)):
        return keys
    different: dict[str, str] = {}
    for chunk, images in _chunk_images(preparation, parts, unchecked):
        digests = list(prefetch(images, ingest.image_digest, preparation.config.data.workers))
        keys[chunk] = ingest.chunk_key(preparation, digests)
        if not parts.artifact.path(PARTS.format(keys[chunk])).is_file():
            different |= zip((image.id for image in images), digests, strict=True)
    rows = before.rows(parts.artifact, ["id", "digest"]) if before and different else ()
    if changed := [row["id"] for _, row in rows if different.get(row["id"], row["digest"]) != row["digest"]]:
        say(f"{len(changed):,} changed: {listed(changed)}")
    unchanged = sum(parts.artifact.path(PARTS.format(keys[chunk])).is_file() for chunk in unchecked)
    say(f"{unchanged} of {len(unchecked)} chunks are unchanged")
    return keys


def _chunk_images(
    preparation: Preparation, parts: Chunks, wanted: Collection[int]
) -> Iterator[tuple[int, list[SourceImage]]]:
    """Yield the wanted chunks with all of their images."""
    # Every worker lists the source from its start, because a repeated key gets an id that depends on the images
    # before it. But it reads only the images of its chunks.
    stream = preparation.source.images()
    for chunk in range(max(wanted) + 1):
        images = list(islice(stream, parts.length(chunk)))
        if len(images) < parts.length(chunk):
            raise _changed("it has fewer images")
        if chunk in wanted:
            yield chunk, images
    if max(wanted) == parts.count - 1 and next(stream, None) is not None:
        raise _changed(f"it has more than {parts.rows:,} images")


def _listed(
    preparation: Preparation, parts: Chunks, todo: Mapping[int, list[str]], keys: Sequence[str | None]
) -> Iterator[tuple[int, SourceImage, Size | None]]:
    """Yield (chunk, image, size) of the chunks to do: all images, or the readable ones if they are known."""
    for chunk, images in _chunk_images(preparation, parts, todo):
        known = None if "ingest" in todo[chunk] else ingest.sizes_by_id(preparation, chunk, keys[chunk])
        if known is None:
            yield from ((chunk, image, None) for image in images)
            continue
        by_id = {image.id: image for image in images}
        for id, size in known.items():
            if id not in by_id:
                raise _changed(f"{id!r} is no longer in it")
            yield chunk, by_id[id], size


def _changed(how: str) -> AtollError:
    return AtollError(f"the source changed since it was listed: {how}; run the same command again")
