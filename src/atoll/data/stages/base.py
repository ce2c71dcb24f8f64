"""What a stage of `atoll prepare` is: a step from the artifacts of earlier stages, or from the source, to its own.

A divisible stage is worked on in chunks (`data/chunks.py`). Several workers each make a share of the chunks, and the
worker that finds all of them there finishes the stage; its bytes do not depend on who made which chunk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from atoll.core.artifacts import Artifact, Content, Inputs, Kind
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.data.chunks import Chunks, Share
from atoll.data.sources.base import Source

StageName = Literal["ingest", "features", "clusters", "latents", "text", "shards"]


@dataclass(frozen=True)
class Job:
    """What all stages of one run work with."""

    run: Path
    config: Config
    source: Source


def _no_reason(_: object) -> None:
    return None


def _count_rows(artifact: Artifact, content: Any) -> str:
    return f"{content.rows:,} samples in {artifact.folder}"


@dataclass(frozen=True)
class Stage:
    """The description of one stage."""

    name: StageName
    kind: Kind[Any]
    inputs: tuple["Stage", ...]
    """Stages whose artifacts it reads."""
    outputs: Callable[[Config], Mapping[str, Inputs]]
    """The artifacts by name, each with what it alone is made from."""
    made_from: Callable[[Job], Inputs]
    """What all of the artifacts are made from; the stages before it must be done."""
    run: Callable[[Job, Artifact, Share], Content | None]
    """Make this worker's share of an artifact. Return what it declares, or None while chunks of others are missing."""
    uses: Callable[[Config], str]
    """The setting that matters most, for `--dry-run`."""
    chunks: Callable[[Job], Chunks | None] | None = None
    """The chunks of a divisible stage, None as long as their number is unknown."""
    needs_gpu: bool = False
    unneeded: Callable[[Job], str | None] = _no_reason
    """Why a run can do without this stage, if that is known and so."""
    note: Callable[[Config], str | None] = _no_reason
    """What of these settings works but is likely a mistake."""
    summary: Callable[[Artifact, Any], str] = _count_rows
    """A phrase about the first artifact, from it and what it declares."""

    @property
    def divisible(self) -> bool:
        """Whether several workers can share it."""
        return self.chunks is not None

    def artifacts(self, job: Job) -> list[Artifact]:
        """Return its artifacts."""
        return [Artifact(job.run, name) for name in self.outputs(job.config)]

    def _resolve(self, job: Job) -> list[tuple[Artifact, Inputs]]:
        """Return its artifacts, each with all that it is made from."""
        common, own = self.made_from(job), self.outputs(job.config)
        return [(artifact, {**common, **own[artifact.name]}) for artifact in self.artifacts(job)]

    def first_missing(self, job: Job) -> "Stage | None":
        """Return the earliest stage that must be done before this one, None if this one can begin."""
        later = next((stage for stage in self.inputs if not stage.is_done(job)), None)
        return later and (later.first_missing(job) or later)

    def is_done(self, job: Job) -> bool:
        """Return whether it is finished. Raises `AtollError` if what is there was made from something else."""
        if not all(stage.is_done(job) for stage in self.inputs):
            return False
        if self.unneeded(job):
            return True
        found = []
        for artifact, inputs in self._resolve(job):
            if artifact.orphaned():
                raise AtollError(f"{artifact.folder} has files but nothing says what they are made from; delete it")
            found.append(artifact.check(self.kind, inputs))
        return all(found)

    def make(self, job: Job, share: Share) -> bool:
        """Do the stage, or this worker's share of it. Return whether it is finished now."""
        for artifact, inputs in self._resolve(job):
            if artifact.begin(self.kind, inputs):
                continue
            content = self.run(job, artifact, share)
            if content is not None:
                artifact.commit(content)
            elif artifact.manifest() is None:
                return False
            artifact.sweep()  # if another worker committed in the meantime, its sweep missed what this one wrote since
        return True

    def state(self, job: Job) -> str:
        """Return how far it is, for `--dry-run`."""
        if reason := self.unneeded(job):
            return f"not needed: {reason}"
        if self.is_done(job):
            return "done"
        chunks = self.chunks(job) if self.chunks and all(stage.is_done(job) for stage in self.inputs) else None
        if chunks is None or not chunks.artifact.folder.is_dir():
            return "to do"
        return f"{chunks.count - len(chunks.missing())} of {chunks.count} chunks"
