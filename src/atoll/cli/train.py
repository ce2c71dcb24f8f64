"""Verbs of training: train, merge."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from atoll.api import TrainArguments
from atoll.cli.verb import RunFolder
from atoll.core import config as configuration
from atoll.core.options import Overrides


@dataclass(frozen=True)
class Train(TrainArguments):
    __doc__ = TrainArguments.__doc__

    dry_run: bool = False
    """Print the estimated memory, FLOPs and GPU time of the job, or of all jobs, and exit; needs no data."""
    gpus: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: as under torchrun, or 1)")] = None
    """With --dry-run, number of GPUs that train one job."""
    json: bool = False
    """With --dry-run, print JSON."""

    def run(self) -> None:
        """Train, or print the estimate."""
        if self.dry_run:
            self.estimate()
            return
        from atoll.train.loop import REQUEUE, Requeue

        try:
            self.call()
        # A stop signal is not a failure: with this exit code, launchers run the job again.
        except Requeue as stop:
            print(f"atoll: {stop}", file=sys.stderr)
            sys.exit(REQUEUE)

    def estimate(self) -> None:
        """Print the estimate of the job, or of all jobs."""
        config = self.config()
        from atoll.train.estimate import planned_for_gpus, show_estimate, show_run_estimate

        if not self.jobs:
            show_run_estimate(Path(self.folder), config, self.gpus, as_json=self.json)
            return
        show_estimate(self.spec(planned_for_gpus(config) if self.gpus else config), self.gpus, self.json)


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
