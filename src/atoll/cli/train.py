"""Verbs of training: train, merge."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

from tyro.conf import arg

from atoll.cli.verb import Overrides, RunFolder
from atoll.core import config as configuration
from atoll.core import prepared
from atoll.core.errors import AtollError
from atoll.core.layout import JobKind


@dataclass
class Train:
    """Train or resume one expert, the router or a dense network."""

    folder: RunFolder
    """Folder of the run."""
    expert: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Train the expert of this cluster on the shards of this cluster; with --student, its few-step student."""
    router: bool = False
    """Train the router on the data of all clusters."""
    start: bool = False
    """Train the shared start of the experts on the data of all clusters (shared_start.flops_share)."""
    monolith: bool = False
    """Train the monolith: one dense model on the data of all clusters, as a baseline."""
    student: bool = False
    """Train the student: one dense model distilled from the trained experts (student.steps: in few steps)."""
    match_flops: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """Train for as many FLOPs as all experts of this run and their shared start, instead of train.total_images."""
    dry_run: bool = False
    """Print the estimated memory, FLOPs and GPU time of the job, or of all jobs, and exit; needs no data."""
    gpus: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: as under torchrun, or 1)")] = None
    """With --dry-run, number of GPUs that train one job."""
    json: bool = False
    """With --dry-run, print JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Train, or print the estimate."""
        jobs = [name for name in ("router", "start", "monolith", "student") if getattr(self, name)]
        jobs += ["expert"] if self.expert is not None and jobs != ["student"] else []
        if len(jobs) > 1 or not (jobs or self.dry_run):
            raise AtollError("choose what to train: one of --expert K, --router, --start, --monolith, --student")
        config = configuration.load(self.folder, self.overrides)
        prepared.check_overrides(self.folder, config, self.overrides)
        from atoll.apps.launch.train_lease import train_lease
        from atoll.train.estimate import planned_for_gpus, show_estimate, show_run_estimate
        from atoll.train.job import train_job
        from atoll.train.loop import REQUEUE, Requeue
        from atoll.train.spec import resolve_job

        if not jobs:
            show_run_estimate(self.folder, config, self.gpus, as_json=self.json)
            return
        kind = cast(JobKind, jobs[0])
        if self.dry_run and self.gpus:
            config = planned_for_gpus(config)
        spec = resolve_job(self.folder, config, kind, expert=self.expert, match_flops=self.match_flops)
        if self.dry_run:
            show_estimate(spec, self.gpus, self.json)
            return
        try:
            with train_lease(spec) as callback:
                train_job(spec, callback)
        # A stop signal is not a failure: with this exit code, launchers run the job again.
        except Requeue as stop:
            print(f"atoll: {stop}", file=sys.stderr)
            sys.exit(REQUEUE)


@dataclass
class Merge:
    """Average experts of a shared start into one dense model."""

    folder: RunFolder
    """Folder of the run. The result is its model `merged`."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Average and validate."""
        config = configuration.load(self.folder, self.overrides)
        from atoll.train.merge import merge

        merge(self.folder, config)
