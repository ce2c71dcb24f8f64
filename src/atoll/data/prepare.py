"""Prepare a run's data, stage by stage, from images to shards. Finished stages are skipped.

ingest -> features -> clusters ────────┐
   └────> latents -> patches, and text ┴─> shards
"""

import time
from collections.abc import Sequence
from pathlib import Path

from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.data.chunks import Worker
from atoll.data.stages import clusters, features, ingest, latents, patches, shards, text
from atoll.data.stages.base import Job, Stage, StageName

STAGES: tuple[Stage, ...] = tuple(
    module.STAGE for module in (ingest, features, clusters, latents, text, patches, shards)
)
"""All stages, each after those whose artifacts it reads."""


def open_job(run: Path, config: Config) -> Job:
    """Open the source that the configuration names."""
    return Job(run, config, ingest.open_configured(config.data))


def prepare(run: Path, config: Config, stages: Sequence[StageName] = (), *, worker: Worker = Worker()) -> None:  # noqa: B008 - it is frozen
    """Run the given stages, or all of them, in their order."""
    chosen = [stage for stage in STAGES if not stages or stage.name in stages]
    if worker.count > 1 and not all(stage.divisible for stage in chosen):
        divisible = ", ".join(stage.name for stage in STAGES if stage.divisible)
        raise AtollError(f"--worker divides the stages {divisible}; name one of them with --stage")
    job = open_job(run, config)
    for stage in chosen:
        name = stage.name
        if earlier := stage.first_missing(job):
            command = f"atoll prepare {run} --stage {earlier.name}"
            raise AtollError(f"the stage {name!r} needs the stage {earlier.name!r} first: {command}")
        if stage.is_done(job):
            for artifact in stage.artifacts(job):
                # A job that was killed right after its commit has left scratch files behind.
                artifact.sweep()
            print(f"{name}: {stage.unneeded(job) or 'already done'}", flush=True)
            continue
        if note := stage.note(config):
            print(f"note: {note}", flush=True)
        start = time.monotonic()
        if stage.make(job, worker):
            artifact = stage.artifacts(job)[0]
            summary = stage.summary(artifact, artifact.read(stage.kind))
        else:
            summary = f"this worker is done; all workers together: {stage.state(job)}"
        print(f"{name}: {summary} ({time.monotonic() - start:.1f} s)", flush=True)


def plan(job: Job) -> list[dict[str, str]]:
    """Return name, state, main setting and folder of every stage."""
    rows = []
    for stage in STAGES:
        first, *others = list(stage.outputs(job.config))
        folder = f"{first} … {others[-1][-3:]}" if others else first
        rows.append({"stage": stage.name, "state": stage.state(job), "uses": stage.uses(job.config), "folder": folder})
    return rows
