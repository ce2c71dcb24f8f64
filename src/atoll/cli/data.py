"""Verb of the data: prepare."""

import json
import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from atoll.cli.verb import Overrides, RunFolder
from atoll.core import config as configuration
from atoll.core import layout

Stage = Literal["ingest", "features", "latents", "patches", "clusters", "text", "shards"]


@dataclass
class Prepare:
    """Cluster and encode images into shards, one set per expert."""

    folder: RunFolder
    """Folder of the run."""
    stage: Annotated[tuple[Stage, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Stages to run; finished stages are skipped."""
    worker: Annotated[str | None, arg(metavar="I/N", help_behavior_hint="(default: one for each visible GPU)")] = None
    """Index of this worker, and number of workers that divide the images. The last one to end does the rest."""
    dry_run: bool = False
    """Print the detected source and the stages to run, and exit."""
    json: bool = False
    """With --dry-run, print JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Run the stages, or print the plan."""
        # The configuration is read before torch is imported: mistakes in it are reported at once.
        config = configuration.load(self.folder, self.overrides)
        from atoll.data.chunks import Worker
        from atoll.data.prepare import prepare

        worker = Worker.parse(self.worker or "0/1")
        if self.dry_run:
            self.show(config)
            return
        if self.worker is None and not self.stage:
            self.start_workers(config)
        prepare(self.folder, config, self.stage, worker=worker)

    def start_workers(self, config: configuration.Config) -> None:
        """Divide the work among one process for each GPU, if there are several."""
        from atoll.apps.launch.base import SUBMISSION_VARIABLE, LaunchSettings
        from atoll.apps.launch.launch import submit
        from atoll.apps.launch.local import Local, visible_gpus
        from atoll.apps.launch.plan import LaunchRequest

        # A job of a launcher has the GPUs that the launcher chose.
        gpus = len(visible_gpus().names)
        if gpus < 2 or SUBMISSION_VARIABLE in os.environ:
            return
        run = self.folder.resolve()
        one_each = config.island.model_copy(update={"gpus": 1, "nodes": 1, "processes": None})
        request = LaunchRequest(("prepare",), prepare_workers=gpus, overrides=self.overrides)
        print(f"{gpus} GPUs: one worker on each; logs are in {run / layout.LAUNCH_LOGS}", flush=True)
        submit(Local(LaunchSettings(run, one_each, max_parallel=gpus)), run, config, request=request)

    def show(self, config: configuration.Config) -> None:
        """Print the plan."""
        from atoll.data.prepare import open_job, plan, stages_of
        from atoll.data.sources.base import describe

        job = open_job(self.folder, config)
        steps = [step for step in plan(job) if not self.stage or step["stage"] in self.stage]
        if self.json:
            print(json.dumps(steps))
            return
        describe(job.source)
        for step in steps:
            print(f"{step['stage']:<9} {step['state']:<22} {step['uses']:<28} {self.folder / step['folder']}")
        for note in filter(None, (stage.note() for stage in stages_of(job))):
            print(f"note: {note}")
