"""The verb of the data."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from atoll.cli.verb import Overrides
from atoll.core import config as configuration


@dataclass
class Prepare:
    """Turn the source's pictures into each island's shards; what is done is not done again."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    stage: tuple[Literal["ingest", "features", "clusters", "latents", "text", "shards"], ...] = ()
    """Only these stages, instead of all."""
    shard: Annotated[str, arg(metavar="i/n")] = "0/1"
    """This job's share of the stages ingest, features, latents and text: 0/4, 1/4, 2/4 and 3/4 make up the whole."""
    dry_run: bool = False
    """Show the source and what would be done, and do nothing."""
    json: bool = False
    """With --dry-run: print the plan as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Do the stages, or show the plan."""
        config = configuration.load(self.folder, self.overrides)
        from atoll.data.chunks import Share
        from atoll.data.prepare import prepare

        share = Share.parse(self.shard)
        if self.dry_run:
            self.show(config)
        else:
            prepare(self.folder, config, self.stage, share=share)

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
