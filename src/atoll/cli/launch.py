"""The verb of several machines of one owner: launch."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from tyro.conf import arg

from atoll.cli.verb import Overrides, RunFolder
from atoll.core import config as configuration
from atoll.core import layout


@dataclass
class Launch:
    """Run all remaining jobs of a run on this machine, Slurm, Ray or another scheduler."""

    folder: RunFolder
    """Folder of the run."""
    on: Literal["local", "slurm", "ray"] | tuple[Literal["command"], str] = "local"
    """Where to run the jobs; `command TEMPLATE` submits each with a command, in which {command} is its script."""
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
    """All but local: wait until all jobs have ended. Local jobs are always waited for."""
    print: bool = False
    """Print the commands or scripts of all jobs and exit."""
    json: bool = False
    """Print the submitted jobs as JSON."""
    overrides: Overrides = field(default_factory=dict)
    epilog: ClassVar = """
examples:
  atoll launch runs/mine
  atoll launch runs/mine --on slurm --island.gpus 8 --jobs experts router
  atoll launch runs/mine --on command "qsub -N {name} {command}" --wait
"""

    def run(self) -> None:
        """Submit the jobs, or print them."""
        run = self.folder.resolve()
        config = configuration.load(run, self.overrides)
        if not self.print and config != configuration.load(run):
            given = ", ".join(f"{key} {value}" for key, value in self.overrides.items())
            # Before the first job, overrides become the settings of the run, so that later commands need not repeat
            # them. Afterwards, finished and unfinished jobs may differ.
            if layout.jobs(run):
                print(f"for the jobs of this launch only: {given}", file=sys.stderr, flush=True)
            else:
                configuration.store(run, self.overrides)
                self.overrides = {}
                print(f"written into {self.folder / layout.CONFIG_FILE}: {given}", file=sys.stderr, flush=True)
        from atoll.apps.launch.launch import LAUNCHERS, names_of, show, submit
        from atoll.apps.launch.launcher import LaunchSettings
        from atoll.apps.launch.steps import LaunchRequest

        # The machine that submits may have no GPU. So the run decides: nobody chooses bfloat16 to train on CPUs.
        gpus = int(config.train.precision == "bfloat16")
        if self.on != "local" and config.island.gpus == "auto":
            requested = "one GPU" if gpus else "no GPU; set island.gpus to train on GPUs"
            print(f"island.gpus is auto: jobs request {requested}", file=sys.stderr, flush=True)
        name, *template = (self.on,) if isinstance(self.on, str) else self.on
        settings = LaunchSettings(run, config.island, self.retries, self.max_parallel, gpus)
        launcher = LAUNCHERS[name](settings, *template)
        request = LaunchRequest(self.jobs, self.experts, self.prepare_workers, self.overrides)
        if self.print:
            print(show(launcher, config, request))
            return
        with redirect_stdout(sys.stderr):  # Ray prints about its nodes there
            found = submit(launcher, config, request, wait=self.wait)
        if self.json:
            submitted = names_of(found.to_submit)
            print(json.dumps({"submitted": submitted, "running": found.running, "blocked": found.blocked}))
