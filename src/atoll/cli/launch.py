"""The verb of several machines of one owner: launch."""

import json
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from atoll.cli.verb import Overrides, RunFolder
from atoll.core import config as configuration


@dataclass
class Launch:
    """Run all remaining jobs of a run on this machine, Slurm or Ray."""

    folder: RunFolder
    """Folder of the run."""
    on: Literal["local", "slurm", "ray"] = "local"
    """Where to run the jobs."""
    jobs: tuple[Literal["prepare", "start", "experts", "router", "monolith", "student"], ...] = (
        *("prepare", "experts", "router"),
    )
    """Kinds of jobs to run. Experts include the shared start, if the run has one."""
    experts: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Experts to train, by number."""
    prepare_workers: int = 1
    """Number of jobs that divide the pass over the images, and of those that divide the stages text and shards."""
    max_parallel: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: local: by GPUs, or 1; slurm: no limit)")
    ] = None
    """Maximum number of jobs that run at the same time."""
    retries: int = 3
    """Retry a job at most this many times in a row without progress."""
    wait: bool = False
    """Slurm and Ray: wait until all jobs have ended. Local jobs are always waited for."""
    print: bool = False
    """Print the commands or scripts of all jobs and exit."""
    json: bool = False
    """Print the submitted jobs as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Submit the jobs, or print them."""
        run = self.folder.resolve()
        config = configuration.load(run, self.overrides)
        from contextlib import redirect_stdout

        from atoll.apps.launch.base import LaunchSettings, scheduler_gpus
        from atoll.apps.launch.launch import as_dict, open_launcher, show, submit
        from atoll.apps.launch.plan import LaunchRequest

        gpus = scheduler_gpus(config)
        if self.on != "local" and config.island.gpus == "auto":
            requested = "one GPU" if gpus else "no GPU; set island.gpus to train on GPUs"
            print(f"island.gpus is auto: jobs request {requested}", file=sys.stderr, flush=True)
        launcher = open_launcher(self.on, LaunchSettings(run, config.island, self.retries, self.max_parallel, gpus))
        request = LaunchRequest(self.jobs, self.experts, self.prepare_workers, self.overrides)
        if self.print:
            print(show(launcher, run, config, request=request))
            return
        with redirect_stdout(sys.stderr):  # Ray prints about its nodes there
            found = submit(launcher, run, config, request=request, wait=self.wait)
        if self.json:
            print(json.dumps(as_dict(found)))
