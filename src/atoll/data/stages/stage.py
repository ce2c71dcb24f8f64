"""A stage of `atoll prepare`: a step from the source, or from the artifacts of earlier stages, to its artifacts.

A divisible stage is computed in chunks (`data/chunks.py`), which several workers divide. One worker that finds all
chunks present finishes the stage. The shards have an artifact for each cluster, and workers divide the artifacts. The
bytes do not depend on which worker made what.

The stages that need pixels are computed together, in one pass over the source (`data/one_pass.py`).

A changed setting is an error, which names the change. If the source or an artifact of an earlier stage changed, the
stage begins again. The index and the stages with chunks of tensors keep those that did not change.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Content, Inputs
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.names import StageName
from atoll.core.sizes import Size
from atoll.data.chunks import WHOLE, Chunks, WorkerShare
from atoll.data.index import Index, Listing
from atoll.data.sources.source import Source
from atoll.encoders.pretrained import Pixels

KEYS = ".keys"
"""Scratch folder of the index: an empty file NUMBER.KEY for each chunk of the source that is complete."""
AGAIN = "-again"
"""End of the name of such a file if the chunk is to be read again, because of rejected images."""


@dataclass
class Preparation:
    """A run, its configuration and its source; its listing and its index as soon as they exist."""

    run: Path
    config: Config
    source: Source
    multiple: int = 1
    """Sides of buckets are multiples of it, in pixels."""
    listing: Listing | None = None
    index: Index | None = None

    def list_source(self) -> Listing:
        """Return the listing; list the source if no worker has."""
        self.listing = self.listing or Listing.find(self.run)
        self.listing = self.listing or Listing.make(self.run, self.config.data, self.source, multiple=self.multiple)
        return self.listing

    def chunk_keys(self, *, again: bool = False) -> list[str | None]:
        """Return the keys of all chunks of the source; None for a chunk that is not checked yet.

        With `again`, also return the keys of chunks that are to be read again.
        """
        folder = self.run / layout.INGEST / KEYS
        noted = os.listdir(folder) if folder.is_dir() else []
        # After the scratch folder was listed: a worker that finishes the index removes the folder after that.
        if index := self.find_index():
            return list(index.keys)
        listing = self.list_source()
        keys: list[str | None] = [None] * (len(listing.lengths or ()) or -(-listing.images // self.config.data.chunk))
        for name in noted:
            chunk, key = name.removesuffix(AGAIN).split(".")
            if again or not name.endswith(AGAIN):
                keys[int(chunk)] = key
        return keys

    def find_index(self) -> Index | None:
        """Return the index if it is finished, which another worker may have done meanwhile."""
        self.index = self.index or Index.find(self.run)
        return self.index

    def open_index(self) -> Index:
        """Return the index, which must be finished."""
        self.index = self.index or Index.open(self.run)
        return self.index


@dataclass(frozen=True)
class PassEncoder:
    """A network of the pass: it turns decoded images into named tensors."""

    encode: Callable[[Pixels, Size], dict[str, Tensor]]
    """From images (N, height, width, 3) and the size of their bucket to tensors (N, …), still on the device."""
    batch_size: int
    input_size: Callable[[Size], Size]
    """Size of its images, by the size of their bucket."""
    by_size: bool
    """Whether its images or its tensors depend on the size of the bucket; then a batch has one size."""
    summarize: Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]] | None = None
    """From the tensors of a chunk by name, and which of their rows are training images, to tensors of the chunk."""

    def view(self, size: Size) -> tuple[Size, Size]:
        """Return (size fed to the network, size whose aspect ratio is cropped), from the size of the bucket.

        Both are the same unless a network cannot take the ratio of the bucket exactly: then its images are stretched.
        """
        target = self.input_size(size)
        exact = not self.by_size or target.width * size.height == target.height * size.width
        return target, target if exact else size


class Stage(ABC):
    """One stage. `earlier` are the stages whose artifacts it reads.

    Its methods in the order of their calls:

    done      True if it is finished or not needed; then nothing follows
    begin     write the plans of its artifacts; `restart` those that are outdated
    (pass)    `one_pass.run_pass` writes the chunks of the stages that need pixels
    finish    begin again, which changes nothing after the pass
      fill      write the chunks that the pass does not write
      chunks    end here as long as chunks of other workers are missing
      make      join the chunks of each artifact; its commit follows
      done      check the result
    """

    name: ClassVar[StageName]
    kind: ClassVar[ArtifactKind[Any]]
    folder: ClassVar[str]
    """Its artifact; the first one if it has several."""
    needs: ClassVar[tuple[StageName, ...]] = ("ingest",)
    """Stages whose artifacts it reads."""
    divisible: ClassVar[bool] = True
    """Whether several workers can divide it."""
    in_pass: ClassVar[bool] = False
    """Whether it needs pixels, so that the pass over the source makes its chunks."""
    needs_gpu: ClassVar[bool] = False
    """Whether a GPU makes it much faster, so that `atoll launch` should give it one."""

    follows: ClassVar[frozenset[str]] = frozenset({"ingest"})
    """Inputs that are no settings, but the source or artifacts of earlier stages."""

    def __init__(self, preparation: Preparation, earlier: Mapping[StageName, "Stage"]) -> None:
        self.preparation = preparation
        self.artifact = Artifact(preparation.run, self.folder)
        self.earlier = tuple(earlier[name] for name in self.needs)
        self._done = False

    # What a stage defines

    @abstractmethod
    def made_from(self) -> Inputs:
        """Return the inputs of its artifact; the stages before must be done."""

    def outputs(self) -> list[tuple[Artifact, Inputs]]:
        """Return its artifacts, each with all of its inputs."""
        return [(self.artifact, self.made_from())]

    def unneeded(self) -> bool:
        """Return whether the run does not need this stage; False as long as that is not known."""
        return False

    def fill(self, worker: WorkerShare) -> None:  # noqa: B027 - most stages have nothing to fill
        """Make this worker's missing chunks, if the pass does not make them."""

    def chunks(self) -> Chunks | None:
        """Return the chunks that workers divide; None as long as their number is unknown."""
        return None

    @abstractmethod
    def make(self, artifact: Artifact) -> Content:
        """Make an artifact from its chunks. Return the content to commit."""

    # What it prints

    @abstractmethod
    def uses(self) -> str:
        """Return the main setting, for `--dry-run`."""

    def note(self) -> str | None:
        """Return a warning about settings that are valid but probably a mistake."""
        return None

    def summary(self, content: Any) -> str:
        """Return a phrase about the first artifact, from its content."""
        return f"{content.rows:,} images in {self.artifact.folder}"

    # What all stages have in common

    def done(self) -> bool:
        """Return whether it is finished or not needed. Raise `AtollError` if it was made from other inputs."""
        if not self._done and all(stage.done() for stage in self.earlier):
            # All artifacts are checked, also after one that is missing.
            made = [] if self.unneeded() else [self._is_made(*output) for output in self.outputs()]
            self._done = all(made)
        return self._done

    def _is_made(self, artifact: Artifact, inputs: Inputs) -> bool:
        if artifact.orphaned():
            raise AtollError(f"{artifact.folder} has files that Atoll did not write; move them to another place")
        return not self.is_outdated(artifact, inputs) and artifact.check(self.kind, inputs)

    def is_outdated(self, artifact: Artifact, inputs: Inputs) -> bool:
        """Return whether an artifact was made from another source, or from other artifacts of earlier stages."""
        return artifact.outdated(self.kind, inputs, self.follows)

    def first_missing(self) -> "Stage | None":
        """Return the earliest unfinished stage that this one depends on; None if this one can run."""
        missing = next((stage for stage in self.earlier if not stage.done()), None)
        return missing and (missing.first_missing() or missing)

    def begin(self, worker: WorkerShare = WHOLE) -> None:
        """Write the plans of its artifacts, before their chunks are made."""
        for artifact, inputs in self._share(worker):
            if self.is_outdated(artifact, inputs):
                self.restart(artifact, inputs)
            else:
                artifact.begin(self.kind, inputs)

    def restart(self, artifact: Artifact, inputs: Inputs) -> None:
        """Begin an outdated artifact again."""
        artifact.restart(self.kind, inputs, keep=lambda _: False)

    def finish(self, worker: WorkerShare) -> bool:
        """Make its artifacts, or this worker's part of them. Return whether the stage is finished."""
        self.begin(worker)
        self.fill(worker)
        chunks = self.chunks()
        if chunks is not None and chunks.missing():
            return False
        for artifact, _ in self._share(worker):
            if not artifact.manifest():
                artifact.commit(self.make(artifact))
        return self.done()

    def _share(self, worker: WorkerShare) -> Sequence[tuple[Artifact, Inputs]]:
        """Return the artifacts that this worker makes: all of them, since workers divide the chunks."""
        del worker
        return self.outputs()

    def state(self) -> str:
        """Return the progress of the stage, for `--dry-run`."""
        if self.done():
            return "done"
        chunks = self.chunks() if self.in_pass or self.first_missing() is None else None
        if chunks is None or not chunks.artifact.folder.is_dir():
            return "to do"
        return f"{chunks.count - len(chunks.missing())} of {chunks.count} chunks"


class ChunkStage(Stage):
    """A stage whose artifact is a file of tensors for each chunk."""

    def restart(self, artifact: Artifact, inputs: Inputs) -> None:
        """Keep the chunks: those that did not change are used again, and the others are removed at the end."""
        artifact.restart(self.kind, inputs, keep=lambda path: path.suffix == ".safetensors")


class EncoderStage(ChunkStage):
    """A stage whose chunks a network makes in the pass."""

    in_pass = needs_gpu = True

    @abstractmethod
    def open_encoder(self) -> PassEncoder:
        """Open the network."""

    def chunks(self) -> Chunks | None:
        """Return its chunks; until the index is finished, as if all images were readable."""
        preparation = self.preparation
        if preparation.listing is None:
            return None
        keys = preparation.chunk_keys()
        if index := preparation.find_index():
            return index.chunks(self.artifact)
        size, lengths = preparation.config.data.chunk, preparation.listing.lengths
        return Chunks(self.artifact, preparation.listing.images, size, lengths=lengths, keys=keys)

    def is_outdated(self, artifact: Artifact, inputs: Inputs) -> bool:
        # Its plan cannot have the digest of the index, which the same pass makes. So its content has it. It differs if
        # somebody deleted the index, and images that were unreadable then are readable now.
        index, made = self.preparation.index, artifact.manifest()
        other = index and made and self.kind.parse(made, artifact.folder).ingest != index.manifest.digest
        return bool(other) or super().is_outdated(artifact, inputs)
