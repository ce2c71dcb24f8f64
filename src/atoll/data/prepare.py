"""Prepare a run's data, stage by stage, from images to shards. Finished stages are skipped.

ingest, features, latents, patches ──> clusters, text ──> shards
(one pass over the images)
"""

import time
from collections.abc import Sequence
from pathlib import Path

from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.data import growth, one_pass
from atoll.data.buckets import side_multiple
from atoll.data.chunks import Worker
from atoll.data.stages import clusters, features, ingest, latents, patches, shards, text
from atoll.data.stages.base import Job, Stage, StageName
from atoll.encoders.autoencoder import downscaling

STAGES: tuple[Stage, ...] = tuple(
    module.STAGE for module in (ingest, features, latents, patches, clusters, text, shards)
)
"""All stages, each after those whose artifacts it reads. The pass makes the first ones together."""


def open_job(run: Path, config: Config) -> Job:
    """Open the source that the configuration names."""
    source = ingest.open_configured(config.data)
    if config.data.buckets == "off":
        return Job(run, config, source)
    return Job(run, config, source, side_multiple(config, downscaling(config.latents.autoencoder)))


def prepare(run: Path, config: Config, stages: Sequence[StageName] = (), *, worker: Worker = Worker()) -> None:  # noqa: B008 - it is frozen
    """Run the given stages, or all of them, in their order.

    Without given stages, one of several workers makes its part of the pass. If no chunk is missing then, it is the last
    one, and does the rest alone.
    """
    chosen = [stage for stage in STAGES if not stages or stage.name in stages]
    if worker.count > 1 and stages and not all(stage.divisible for stage in chosen):
        divisible = ", ".join(stage.name for stage in STAGES if stage.divisible)
        raise AtollError(f"--worker divides the stages {divisible}; name only these with --stage")
    job = open_job(run, config)
    growth.move_aside(job)
    passing = [stage for stage in chosen if stage.in_pass]
    if not _make_pass(job, passing, worker) and not stages:
        return
    finished = False
    for stage in chosen:
        if not stage.in_pass:
            # Without given stages, only the last worker comes here, and nobody shares the rest with it.
            finished = _make(job, stage, worker if stages else Worker())
    if shards.STAGE in chosen and finished:
        growth.remove_previous(run)


def _make_pass(job: Job, stages: Sequence[Stage], worker: Worker) -> bool:
    """Make the chunks of all stages that need pixels in one pass, and finish these stages. Return whether all are."""
    todo: list[Stage] = []
    for stage in stages:
        if stage.is_done(job) or stage.unneeded(job):
            _print_done(job, stage)
            continue
        _check_order(job, stage, made_now=todo)
        _print_note(job, stage)
        todo.append(stage)
    start = time.monotonic()
    if todo:
        one_pass.fill(job, todo, worker)
    finished = [_finish(job, stage, worker, start=start) for stage in todo]
    return all(finished)


def _make(job: Job, stage: Stage, worker: Worker) -> bool:
    """Run a stage that needs no pixels. Return whether it is finished."""
    _check_order(job, stage)
    if not stage.is_done(job):
        _print_note(job, stage)
        growth.reuse_chunks(job, stage)
    return _finish(job, stage, worker, start=time.monotonic())


def _finish(job: Job, stage: Stage, worker: Worker, *, start: float) -> bool:
    """Run a stage and print its summary. Return whether it is finished."""
    ready = stage.first_missing(job) is None
    if ready and stage.is_done(job):  # known only now, because the index is new
        _print_done(job, stage)
        return True
    finished = ready and stage.make(job, worker)
    if finished:
        artifact = stage.artifacts(job)[0]
        summary = stage.summary(artifact, artifact.read(stage.kind))
    else:
        summary = f"this worker is done; all workers together: {stage.state(job)}"
    print(f"{stage.name}: {summary} ({time.monotonic() - start:.1f} s)", flush=True)
    return finished


def _check_order(job: Job, stage: Stage, *, made_now: Sequence[Stage] = ()) -> None:
    """Raise `AtollError` if an earlier stage is missing that is not made in the same pass."""
    if (earlier := stage.first_missing(job)) and earlier not in made_now:
        command = f"atoll prepare {job.run} --stage {earlier.name}"
        raise AtollError(f"the stage {stage.name!r} needs the stage {earlier.name!r} first: {command}")


def _print_done(job: Job, stage: Stage) -> None:
    for artifact in stage.artifacts(job):
        # A job that was killed right after its commit has left scratch files behind.
        artifact.sweep()
    print(f"{stage.name}: {stage.unneeded(job) or 'already done'}", flush=True)


def _print_note(job: Job, stage: Stage) -> None:
    if note := stage.note(job.config):
        print(f"note: {note}", flush=True)


def plan(job: Job) -> list[dict[str, str]]:
    """Return name, state, main setting and folder of every stage."""
    rows, grown = [], growth.has_grown(job)
    for stage in STAGES:
        state = "the source has grown" if grown else stage.state(job)
        first, *others = list(stage.outputs(job.config))
        folder = f"{first} … {others[-1][-3:]}" if others else first
        rows.append({"stage": stage.name, "state": state, "uses": stage.uses(job.config), "folder": folder})
    return rows
