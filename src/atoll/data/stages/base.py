"""A stage of `atoll prepare`: a step from the source, or from the artifacts of earlier stages, to its artifacts.

A divisible stage is computed in chunks (`data/chunks.py`), which several workers divide. The worker that finds all
chunks present finishes the stage. The shards have an artifact for each cluster, and workers divide the artifacts. The
bytes do not depend on which worker made what.

The stages that need pixels are computed together, in one pass over the source (`data/one_pass.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Content, Inputs, Kind
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.data.chunks import Chunks, Worker
from atoll.data.index import Index, Listing
from atoll.data.sources.base import Source
from atoll.encoders.pretrained import Pixels

StageName = Literal["ingest", "features", "latents", "patches", "clusters", "text", "shards"]


@dataclass
class Job:
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

    def open_index(self) -> Index:
        """Return the index, which must be finished."""
        self.index = self.index or Index.open(self.run)
        return self.index


def previous(artifact: Artifact) -> Artifact:
    """Return the same artifact of the data before the source grew (`data/growth.py`); it may not exist."""
    return Artifact(artifact.run, artifact.name.replace(layout.DATA, layout.PREVIOUS, 1))


@dataclass(frozen=True)
class Encoder:
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
        """Return the size of its images, and one with the ratio of the part that they show, by their bucket.

        Both are the same unless a network cannot take the ratio of the bucket exactly: then its images are stretched.
        """
        target = self.input_size(size)
        exact = not self.by_size or target.width * size.height == target.height * size.width
        return target, target if exact else size


class Stage(ABC):
    """One stage of a job. `inputs` are the stages whose artifacts it reads."""

    name: ClassVar[StageName]
    kind: ClassVar[Kind[Any]]
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

    def __init__(self, job: Job, earlier: Mapping[StageName, "Stage"]) -> None:
        self.job = job
        self.artifact = Artifact(job.run, self.folder)
        self.inputs = tuple(earlier[name] for name in self.needs)
        self._done = False

    # What a stage defines

    @abstractmethod
    def uses(self) -> str:
        """Return the main setting, for `--dry-run`."""

    @abstractmethod
    def made_from(self) -> Inputs:
        """Return the inputs of its artifact; the stages before must be done."""

    @abstractmethod
    def make(self, artifact: Artifact) -> Content | None:
        """Make an artifact from its chunks. Return the content to commit; None if another worker has committed."""

    def outputs(self) -> list[tuple[Artifact, Inputs]]:
        """Return its artifacts, each with all of its inputs."""
        return [(self.artifact, self.made_from())]

    def chunks(self) -> Chunks | None:
        """Return the chunks that workers divide; None as long as their number is unknown."""
        return None

    def fill(self, worker: Worker) -> None:  # noqa: B027 - most stages have nothing to fill
        """Make this worker's missing chunks, if the pass does not make them."""

    def unneeded(self) -> str | None:
        """Return why the run does not need this stage; None if it does, or if that is not known yet."""
        return None

    def note(self) -> str | None:
        """Return a warning about settings that are valid but probably a mistake."""
        return None

    def summary(self, content: Any) -> str:
        """Return a phrase about the first artifact, from its content."""
        return f"{content.rows:,} images in {self.artifact.folder}"

    # What all stages have in common

    def done(self) -> bool:
        """Return whether it is finished or not needed. Raise `AtollError` if it was made from other inputs."""
        if not self._done and all(stage.done() for stage in self.inputs):
            # All artifacts are checked, also after one that is missing.
            made = [] if self.unneeded() else [self._is_made(*output) for output in self.outputs()]
            self._done = all(made)
        return self._done

    def _is_made(self, artifact: Artifact, inputs: Inputs) -> bool:
        if artifact.orphaned():
            raise AtollError(f"{artifact.folder} has files without a plan or manifest; delete the folder")
        return artifact.check(self.kind, inputs)

    def first_missing(self) -> "Stage | None":
        """Return the earliest unfinished stage that this one depends on; None if this one can run."""
        missing = next((stage for stage in self.inputs if not stage.done()), None)
        return missing and (missing.first_missing() or missing)

    def begin(self) -> None:
        """Write the plans of its artifacts, before their chunks are made."""
        for artifact, inputs in self.outputs():
            artifact.begin(self.kind, inputs)

    def finish(self, worker: Worker) -> bool:
        """Make its artifacts, or this worker's part of them. Return whether the stage is finished."""
        share = self._share(worker)
        for artifact, inputs in share:
            artifact.begin(self.kind, inputs)
        self.fill(worker)
        chunks = self.chunks()
        if chunks is not None and chunks.missing() and not self.done():
            return False
        for artifact, _ in share:
            if artifact.manifest():
                continue
            try:
                content = self.make(artifact)
            except FileNotFoundError:
                # Two workers may end the pass at the same moment, and both do the rest. The first one to commit
                # removes the scratch files that the other one still reads.
                if artifact.manifest() is None:
                    raise
                continue
            if content is not None:
                artifact.commit(content)
            # Also clean up when another worker committed first: it could not see our scratch files.
            artifact.sweep()
        return self.done()

    def _share(self, worker: Worker) -> Sequence[tuple[Artifact, Inputs]]:
        """Return the artifacts that this worker makes: all of them, since workers divide the chunks."""
        del worker
        return self.outputs()

    def state(self) -> str:
        """Return the progress of the stage, for `--dry-run`."""
        if reason := self.unneeded():
            return f"not needed: {reason}"
        if self.done():
            return "done"
        chunks = self.chunks() if self.in_pass or self.first_missing() is None else None
        if chunks is None or not chunks.artifact.folder.is_dir():
            return "to do"
        return f"{chunks.count - len(chunks.missing())} of {chunks.count} chunks"


class EncoderStage(Stage):
    """A stage whose chunks a network makes in the pass."""

    in_pass = needs_gpu = True

    @abstractmethod
    def open_encoder(self) -> Encoder:
        """Open the network."""

    def chunks(self) -> Chunks | None:
        """Return its chunks; until the index is finished, as if all images were readable."""
        job = self.job
        if job.index:
            return job.index.chunks(self.artifact)
        return Chunks(self.artifact, job.listing.images, job.config.data.chunk) if job.listing else None

    def _is_made(self, artifact: Artifact, inputs: Inputs) -> bool:
        if not super()._is_made(artifact, inputs):
            return False
        # Its plan cannot have the digest of the index, which the same pass makes. So its content has it. It differs if
        # somebody deleted the index, and images that were unreadable then are readable now.
        recorded = artifact.read(self.kind).ingest
        if recorded and recorded != self.job.open_index().manifest.digest:
            raise AtollError(f"{artifact.folder} is stale: {layout.INGEST} has changed since. Delete {artifact.folder}")
        return True
