"""A source that has grown: only the new images are decoded and encoded, and the clusters are kept.

If images were added to the source of a prepared run, and all indexed ones are still there in the same order,
`atoll prepare` moves the data aside (`layout.PREVIOUS`) in one rename, and prepares the run again. On the way it
takes over what did not change:

- chunks whose images and metadata have the same hash, which takes reading them, but no decoding and no network;
- the buckets and the components of the patch features, because both are fitted to a sample;
- the fine centers of the clusters and the table that merges them. New images go to the nearest center.

New images that are listed after all others leave full chunks as they are. Images in between shift all chunks after
them, and these are made again. At the end the previous data is removed. Every step can be interrupted, like any other.
"""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, to_json
from atoll.core.differences import differences
from atoll.core.manifests import INGEST
from atoll.data.chunks import Chunks, prefetch
from atoll.data.index import Index
from atoll.data.stages import ingest
from atoll.data.stages.base import EncoderStage, Job, Stage, previous
from atoll.data.stages.ingest import image_digest


def move_aside(job: Job) -> None:
    """Move the data of a finished run aside if its source has grown, and nothing else has changed."""
    if not has_grown(job):
        return
    try:
        os.rename(job.run / layout.DATA, job.run / layout.PREVIOUS)
    except OSError:  # another worker has done so, and has begun
        return
    finally:
        job.listing = job.index = None
    print(
        "the source has grown since it was prepared: unchanged chunks and the clusters are taken from "
        f"{job.run / layout.PREVIOUS}",
        flush=True,
    )


def has_grown(job: Job) -> bool:
    """Return whether the source has all indexed images in their order, and others; and the settings are the same."""
    index, listed = job.index, job.listing
    if index is None or (job.run / layout.PREVIOUS).exists():
        return False
    # With other settings, the stale stage is an error that names the change; growth must not hide it.
    changed = differences(dict(index.manifest.made_from), json.loads(to_json(ingest.made_from(job))))
    if [change.partition(" was ")[0] for change in changed] != ["fingerprint"]:
        return False
    stream, count = job.source.images(), 0
    for chunk in range(len(index.lengths)):
        for id in index.read(chunk, ["id"])["id"]:
            for image in stream:
                count += 1
                if image.id == id:
                    break
            else:
                return False
    # Rejected images are not in the index, so the whole listing is compared with that of then.
    count += sum(1 for _ in stream)
    return listed is not None and count > listed.images


def reuse_pass(job: Job, stages: Sequence[Stage], parts: Chunks, chunks: Iterable[int]) -> None:
    """Take over those of some chunks of the pass whose images are the same as in the previous data."""
    old = previous(Artifact(job.run, layout.INGEST))
    if old.manifest() is None:
        return
    before = Index(old, old.open(INGEST))
    keys = before.keys()
    encoders = [stage for stage in stages if isinstance(stage, EncoderStage) and _is_same(stage)]
    wanted = {chunk for chunk in chunks if chunk < len(keys)}
    stream = job.source.images()
    kept = 0
    for chunk in range(max(wanted, default=-1) + 1):
        images = list(islice(stream, parts.length(chunk)))
        if chunk not in wanted:
            continue
        digests = list(prefetch(images, image_digest, job.config.data.workers))
        if ingest.chunk_key(digests) != keys[chunk]:
            continue
        for stage in encoders:
            _link(previous(stage.artifact), stage.artifact, Chunks(old, 0, 1).file(chunk))
        # A stage with other settings is made from the index, after the part is written.
        ingest.write_part(parts, chunk, before.part_rows(chunk, digests))
        kept += 1
    print(f"{kept} of {len(wanted)} chunks are unchanged", flush=True)


def reuse_chunks(job: Job, stage: Stage) -> None:
    """Take over the unchanged chunks of a stage that is made from the index."""
    chunks, index = stage.chunks(), job.open_index()
    old = previous(Artifact(job.run, layout.INGEST))
    if chunks is None or old.manifest() is None or not _is_same(stage):
        return
    stage.begin()
    pairs = zip(index.keys(), Index(old, old.open(INGEST)).keys(), strict=False)
    for chunk, (now, then) in enumerate(pairs):
        if now == then:
            _link(previous(stage.artifact), stage.artifact, chunks.file(chunk))


def _is_same(stage: Stage) -> bool:
    """Return whether a stage has a previous artifact with the same settings, whatever its images."""
    made = previous(stage.artifact).manifest()
    if made is None:
        return False
    # As it would be read back from a manifest: tuples are lists, for example.
    now = json.loads(to_json(stage.made_from()))
    return _settings(made.made_from) == _settings(now)


def _settings(inputs: Inputs) -> dict[str, object]:
    return {name: value for name, value in inputs.items() if name != "ingest"}


def _link(old: Artifact, new: Artifact, file: str) -> None:
    """Make a file of the previous artifact a file of the new one, unless there is none, or it is there already."""
    # On a file system without hard links the chunk is made again, as if it had changed.
    with suppress(OSError):
        os.link(old.path(file), new.path(file))


def remove_previous(run: Path) -> None:
    """Remove the previous data of a run whose data is complete."""
    shutil.rmtree(run / layout.PREVIOUS, ignore_errors=True)
