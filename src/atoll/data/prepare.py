"""Prepare a run's data, stage by stage, from images to shards. Finished stages are skipped.

ingest, features, latents, patches ──> clusters, text ──> shards
(one pass over the images)
"""

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from atoll.core import layout
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.names import StageName
from atoll.core.progress import say
from atoll.data import one_pass
from atoll.data.buckets import side_multiple
from atoll.data.chunks import WHOLE, WorkerShare
from atoll.data.index import Index, Listing
from atoll.data.sources.source import Source
from atoll.data.stages.clusters import ClustersStage
from atoll.data.stages.features import FeaturesStage
from atoll.data.stages.ingest import IngestStage, open_configured
from atoll.data.stages.latents import LatentsStage
from atoll.data.stages.patches import PatchesStage
from atoll.data.stages.shards import ShardsStage
from atoll.data.stages.stage import Preparation, Stage
from atoll.data.stages.text import TextStage
from atoll.encoders.autoencoder import downscaling

STAGES: tuple[type[Stage], ...] = (
    IngestStage,
    FeaturesStage,
    LatentsStage,
    PatchesStage,
    ClustersStage,
    TextStage,
    ShardsStage,
)
"""All stages, each after those whose artifacts it reads. `run_pass` makes the chunks of the first four together."""


def open_preparation(run: Path, config: Config, source: Source | None = None) -> Preparation:
    """Open the source that the configuration names, and the listing and the index of the run if it has them."""
    source = source or open_configured(config.data)  # first: its errors need no network
    by_size = config.data.buckets != "off"
    multiple = side_multiple(config, downscaling(config.latents.autoencoder)) if by_size else 1
    return Preparation(run, config, source, multiple, Listing.find(run), Index.find(run))


def stages_of(preparation: Preparation) -> list[Stage]:
    """Return all stages."""
    made: dict[StageName, Stage] = {}
    for stage in STAGES:
        made[stage.name] = stage(preparation, made)
    return list(made.values())


def prepare(run: Path, config: Config, stages: Sequence[StageName] = (), *, worker: WorkerShare = WHOLE) -> None:
    """Run the given stages, or all of them, in their order.

    Without given stages, one of several workers makes its part of the pass. If no chunk is missing then, it is the last
    one, and does the rest alone.
    """
    if worker.count > 1 and stages and not all(stage.divisible for stage in STAGES if stage.name in stages):
        divisible = ", ".join(stage.name for stage in STAGES if stage.divisible)
        raise AtollError(f"--worker divides the stages {divisible}; name only these with --stage")
    preparation = open_preparation(run, config)
    chosen = [stage for stage in stages_of(preparation) if not stages or stage.name in stages]

    # The pass makes the chunks of all stages that need pixels.
    start = time.monotonic()
    todo: list[Stage] = []
    for stage in chosen:
        if stage.in_pass and _check_ready(stage, made_now=todo):
            todo.append(stage)
    if todo:
        one_pass.run_pass(preparation, todo, worker)

    # One worker after the other comes here, and the last one finds all chunks present. Without given stages, it does
    # the rest alone.
    rest = [stage for stage in chosen if not stage.in_pass]
    with _alone(run):
        finished = [_finish(stage, worker, start) for stage in todo]
        if not stages:
            for stage in rest if all(finished) else ():
                if _check_ready(stage):
                    _finish(stage, WHOLE, time.monotonic())
            return
    for stage in rest:
        with nullcontext() if stage.divisible else _alone(run):
            if _check_ready(stage):
                _finish(stage, worker, time.monotonic())


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Hold the lock of the worker that finishes stages, which the end of a process releases, too."""
    (run / layout.DATA).mkdir(parents=True, exist_ok=True)
    with (run / layout.DATA / ".lock").open("w") as stream:
        # Some network file systems have no locks. There, one of two workers that finish at the same moment may fail.
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _check_ready(stage: Stage, *, made_now: Sequence[Stage] = ()) -> bool:
    """Return whether a stage is to be made now; print if it is done.

    Raise `AtollError` if an earlier stage is missing that is not made in the same pass.
    """
    if _report_if_done(stage):
        return False
    if (earlier := stage.first_missing()) and earlier not in made_now:
        command = f"atoll prepare {stage.preparation.run} --stage {earlier.name}"
        raise AtollError(f"the stage {stage.name!r} needs the stage {earlier.name!r} first: {command}")
    if note := stage.note():
        say(f"note: {note}")
    return True


def _report_if_done(stage: Stage) -> bool:
    """Return whether a stage is done or not needed; if it is done, print that and remove leftover scratch files."""
    if stage.unneeded():
        return True
    if not stage.done():
        return False
    for artifact, _ in stage.outputs():
        # A job that was killed right after its commit has left scratch files behind.
        artifact.sweep()
    say(f"{stage.name}: already done")
    return True


def _finish(stage: Stage, worker: WorkerShare, start: float) -> bool:
    """Finish a stage and print its summary. Return whether it is finished."""
    ready = stage.first_missing() is None
    if ready and _report_if_done(stage):  # known only now, because the index is new
        return True
    finished = ready and stage.finish(worker)
    if finished:
        summary = stage.summary(stage.artifact.read(stage.kind))
    else:
        summary = f"this worker is done; all workers together: {stage.state()}"
    say(f"{stage.name}: {summary} ({time.monotonic() - start:.1f} s)")
    return finished


def has_changed(preparation: Preparation) -> bool:
    """Return whether the source has changed since its index was begun, with the same settings."""
    ingest = IngestStage(preparation, {})
    return ingest.is_outdated(ingest.artifact, ingest.made_from())


def plan(preparation: Preparation) -> list[dict[str, str]]:
    """Return name, state, main setting and folder of every stage that the run needs."""
    rows, changed, last = [], has_changed(preparation), preparation.config.clusters.count - 1
    for stage in stages_of(preparation):
        if stage.unneeded():
            continue
        state = "the source has changed" if changed else stage.state()
        folder = f"{stage.folder} … {last:03d}" if isinstance(stage, ShardsStage) and last else stage.folder
        rows.append({"stage": stage.name, "state": state, "uses": stage.uses(), "folder": folder})
    return rows
