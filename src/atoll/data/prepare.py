"""From images to shards, stage by stage. Each stage makes its artifacts; what is done is not done again.

ingest -> features -> clusters ─┐
   └────> latents, text ────────┴─> shards
"""

import time
from collections.abc import Sequence
from pathlib import Path

from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.data.chunks import Share
from atoll.data.stages import clusters, features, ingest, latents, shards, text
from atoll.data.stages.base import Job, Stage, StageName

STAGES: tuple[Stage, ...] = tuple(module.STAGE for module in (ingest, features, clusters, latents, text, shards))
"""In an order in which each comes after those it needs."""


def open_job(run: Path, config: Config) -> Job:
    """Open the source that the configuration names."""
    return Job(run, config, ingest.open_configured(config.data))


def prepare(run: Path, config: Config, stages: Sequence[StageName] = (), *, share: Share = Share()) -> None:  # noqa: B008 - it is frozen
    """Do the wanted stages, or all of them, in their order."""
    wanted = [stage for stage in STAGES if not stages or stage.name in stages]
    if share.of > 1 and not all(stage.divisible for stage in wanted):
        divisible = ", ".join(stage.name for stage in STAGES if stage.divisible)
        raise AtollError(f"--worker divides the stages {divisible}; name one of them with --stage")
    job = open_job(run, config)
    for stage in wanted:
        name = stage.name
        if earlier := stage.first_missing(job):
            command = f"atoll prepare {run} --stage {earlier.name}"
            raise AtollError(f"the stage {name!r} needs the stage {earlier.name!r} first: {command}")
        if stage.is_done(job):
            for artifact in stage.artifacts(job):
                artifact.sweep()  # what a job that was killed right after its commit left behind
            print(f"{name}: {stage.unneeded(job) or 'done before'}", flush=True)
            continue
        if note := stage.note(config):
            print(f"note: {note}", flush=True)
        start = time.monotonic()
        if stage.make(job, share):
            artifact = stage.artifacts(job)[0]
            summary = stage.summary(artifact, artifact.read(stage.kind))
        else:
            summary = f"this share is done; of all shares: {stage.state(job)}"
        print(f"{name}: {summary} ({time.monotonic() - start:.1f} s)", flush=True)


def plan(job: Job) -> list[dict[str, str]]:
    """Return every stage with its state, what it would use and its folder."""
    rows = []
    for stage in STAGES:
        first, *others = list(stage.outputs(job.config))
        folder = f"{first} … {others[-1][-3:]}" if others else first
        rows.append({"stage": stage.name, "state": stage.state(job), "uses": stage.uses(job.config), "folder": folder})
    return rows
