"""Verb of the data: prepare."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from atoll.cli.verb import Overrides, RunFolder
from atoll.core import config as configuration

Stage = Literal["ingest", "features", "clusters", "latents", "text", "shards"]


@dataclass
class Prepare:
    """Cluster and encode images into shards, one set per expert."""

    folder: RunFolder
    """Folder of the run."""
    stage: Annotated[tuple[Stage, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Stages to run; finished stages are skipped."""
    worker: Annotated[str, arg(metavar="I/N")] = "0/1"
    """Index of this worker and number of workers that divide ingest, features, latents, text and patches."""
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

        worker = Worker.parse(self.worker)
        if self.dry_run:
            self.show(config)
        else:
            prepare(self.folder, config, self.stage, worker=worker)

    def show(self, config: configuration.Config) -> None:
        """Print the plan."""
        from atoll.data.prepare import STAGES, open_job, plan
        from atoll.data.sources.base import describe

        job = open_job(self.folder, config)
        steps = [step for step in plan(job) if not self.stage or step["stage"] in self.stage]
        if self.json:
            print(json.dumps(steps))
            return
        describe(job.source)
        for step in steps:
            print(f"{step['stage']:<9} {step['state']:<22} {step['uses']:<28} {self.folder / step['folder']}")
        for note in filter(None, (stage.note(config) for stage in STAGES)):
            print(f"note: {note}")
