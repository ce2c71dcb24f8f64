"""The verb of training."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

from tyro.conf import Positional, arg

from atoll.cli.verb import Overrides
from atoll.core import config as configuration
from atoll.core.errors import AtollError
from atoll.core.layout import JobKind


@dataclass
class Train:
    """Train one expert, the router, the dense monolith or a distilled student; again, it resumes."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    expert: int | None = None
    """The expert of this cluster, from its own shards alone."""
    router: bool = False
    """The router, from the data of all clusters."""
    monolith: bool = False
    """The dense model that an ensemble is measured against: all data, one network."""
    student: bool = False
    """A dense model that learns from the finished experts."""
    match_flops: Annotated[Path | None, arg(metavar="RUN")] = None
    """Train for as many FLOPs as all experts of this run together."""
    dry_run: bool = False
    """Print what it would cost in memory, FLOPs and time, and do nothing; alone, for all jobs. Needs no data."""
    gpus: int | None = None
    """With --dry-run: processes that share one job."""
    json: bool = False
    """With --dry-run: print JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Train, or tell the cost."""
        jobs = [name for name in ("router", "monolith", "student") if getattr(self, name)]
        jobs += ["expert"] if self.expert is not None else []
        if len(jobs) > 1 or not (jobs or self.dry_run):
            raise AtollError("say what to train: one of --expert K, --router, --monolith, --student")
        config = configuration.load(self.folder, self.overrides)
        from atoll.train.estimate import show_estimate, show_survey
        from atoll.train.job import train_job
        from atoll.train.loop import REQUEUE, Requeue
        from atoll.train.spec import resolve_job

        if not jobs:
            show_survey(self.folder, config, self.gpus, as_json=self.json)
            return
        kind = cast(JobKind, jobs[0])
        spec = resolve_job(self.folder, config, kind, expert=self.expert, match_flops=self.match_flops)
        if self.dry_run:
            show_estimate(spec, self.gpus, self.json)
            return
        try:
            train_job(spec)
        except Requeue as stop:
            print(f"atoll: {stop}", file=sys.stderr)
            sys.exit(REQUEUE)
