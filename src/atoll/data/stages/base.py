"""A stage of `atoll prepare`: a step from the source, or from the artifacts of earlier stages, to its artifacts.

A divisible stage is computed in chunks (`data/chunks.py`), which several workers divide. The worker that finds all
chunks present finishes the stage. The shards have an artifact for each cluster, and workers divide the artifacts. The
bytes do not depend on which worker made what.

The stages that need pixels are computed together, in one pass over the source (`data/one_pass.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Content, Inputs, Kind
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.data.chunks import Chunks, Worker
from atoll.data.sources.base import Source
from atoll.encoders.pretrained import Pixels

StageName = Literal["ingest", "features", "latents", "patches", "clusters", "text", "shards"]


@dataclass(frozen=True)
class Job:
    """A run, its configuration and its source, as all stages need them."""

    run: Path
    config: Config
    source: Source
    multiple: int = 1
    """Sides of buckets are multiples of it, in pixels."""


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


def _no_reason(_: object) -> None:
    return None


def _count_rows(artifact: Artifact, content: Any) -> str:
    return f"{content.rows:,} images in {artifact.folder}"


@dataclass(frozen=True)
class Stage:
    """The description of one stage."""

    name: StageName
    kind: Kind[Any]
    inputs: tuple["Stage", ...]
    """Stages whose artifacts it reads."""
    outputs: Callable[[Config], Mapping[str, Inputs]]
    """The artifacts by name, each with the inputs that the other artifacts of the stage do not have."""
    made_from: Callable[[Job], Inputs]
    """The common inputs of all artifacts; the stages before must be done."""
    run: Callable[[Job, Artifact, Worker], Content | None]
    """Make this worker's part of an artifact. Return the content to commit, or None while chunks are missing.

    A stage of the pass makes nothing here: its chunks come from the pass.
    """
    uses: Callable[[Config], str]
    """The main setting, for `--dry-run`."""
    chunks: Callable[[Job], Chunks | None] | None = None
    """The chunks that workers divide; None as long as their number is unknown."""
    by_artifact: bool = False
    """Whether workers divide its artifacts, which are independent of each other."""
    encoder: Callable[[Job], Encoder] | None = None
    """Open the network that makes its chunks in the pass; None if it is not a part of the pass."""
    needs_gpu: bool = False
    """Whether a GPU makes it much faster, so that `atoll launch` should give it one."""
    unneeded: Callable[[Job], str | None] = _no_reason
    """Why the run does not need this stage; None if it does, or if that is not known yet."""
    note: Callable[[Config], str | None] = _no_reason
    """A warning about settings that are valid but probably a mistake."""
    summary: Callable[[Artifact, Any], str] = _count_rows
    """A phrase about the first artifact, from the artifact and its content."""

    @property
    def divisible(self) -> bool:
        """Whether several workers can divide it."""
        return self.by_artifact or self.chunks is not None

    @property
    def in_pass(self) -> bool:
        """Whether it needs pixels, so that the pass over the source makes its chunks."""
        return self.encoder is not None or self.name == "ingest"

    def artifacts(self, job: Job) -> list[Artifact]:
        """Return the artifacts that it makes."""
        return [Artifact(job.run, name) for name in self.outputs(job.config)]

    def _resolve(self, job: Job) -> list[tuple[Artifact, Inputs]]:
        """Return its artifacts, each with all of its inputs."""
        common, own = self.made_from(job), self.outputs(job.config)
        return [(artifact, {**common, **own[artifact.name]}) for artifact in self.artifacts(job)]

    def first_missing(self, job: Job) -> "Stage | None":
        """Return the earliest unfinished stage that this one depends on; None if this one can run."""
        later = next((stage for stage in self.inputs if not stage.is_done(job)), None)
        return later and (later.first_missing(job) or later)

    def is_done(self, job: Job) -> bool:
        """Return whether it is finished. Raise `AtollError` if an artifact was made from other inputs."""
        if not all(stage.is_done(job) for stage in self.inputs):
            return False
        if self.unneeded(job):
            return True
        found = []
        for artifact, inputs in self._resolve(job):
            if artifact.orphaned():
                raise AtollError(f"{artifact.folder} has files without a plan or manifest; delete the folder")
            found.append(artifact.check(self.kind, inputs))
            if found[-1] and self.encoder:
                self._check_index(artifact)
        return all(found)

    def _check_index(self, artifact: Artifact) -> None:
        """Raise `AtollError` if an artifact of the pass belongs to another index.

        Its plan cannot have the digest of the index, which the same pass makes. So its content has it. It differs if
        somebody deleted the index, and images that were unreadable then are readable now.
        """
        index = Artifact(artifact.run, layout.INGEST).manifest()
        recorded = artifact.read(self.kind).ingest
        if index and recorded and recorded != index.digest:
            raise AtollError(f"{artifact.folder} is stale: {layout.INGEST} has changed since. Delete {artifact.folder}")

    def begin(self, job: Job) -> None:
        """Write the plan of its artifacts, before the pass makes their chunks."""
        for artifact, inputs in self._resolve(job):
            artifact.begin(self.kind, inputs)

    def make(self, job: Job, worker: Worker) -> bool:
        """Run the stage, or this worker's part of it. Return whether the stage is finished now."""
        resolved = self._resolve(job)
        for artifact, inputs in resolved[worker.index :: worker.count] if self.by_artifact else resolved:
            if artifact.begin(self.kind, inputs):
                continue
            try:
                content = self.run(job, artifact, worker)
            except FileNotFoundError:
                # Two workers may end the pass at the same moment, and both do the rest. The first one to commit
                # removes the scratch files that the other one still reads.
                if artifact.manifest() is None:
                    raise
                continue
            if content is not None:
                artifact.commit(content)
            elif artifact.manifest() is None:
                return False
            # If another worker committed meanwhile, it did not remove the scratch files that this one wrote later.
            artifact.sweep()
        return all(artifact.manifest() for artifact, _ in resolved)

    def state(self, job: Job) -> str:
        """Return the progress of the stage, for `--dry-run`."""
        if reason := self.unneeded(job):
            return f"not needed: {reason}"
        if self.is_done(job):
            return "done"
        artifacts = self.artifacts(job)
        if self.by_artifact and (made := sum(artifact.manifest() is not None for artifact in artifacts)):
            return f"{made} of {len(artifacts)} folders"
        ready = self.in_pass or all(stage.is_done(job) for stage in self.inputs)
        chunks = self.chunks(job) if self.chunks and ready else None
        if chunks is None or not chunks.artifact.folder.is_dir():
            return "to do"
        return f"{chunks.count - len(chunks.missing())} of {chunks.count} chunks"
