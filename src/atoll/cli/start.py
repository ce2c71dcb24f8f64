"""Verbs that start a run: demo, init, config, prepare."""

import json
from dataclasses import dataclass, field
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

import yaml
from tyro.conf import arg

from atoll.api import PrepareArguments
from atoll.cli.verb import RunFolder
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.errors import AtollError, unknown
from atoll.core.options import Overrides
from atoll.core.presets import NOTES, PRESETS, SUMMARIES


@dataclass
class Demo:
    """Train and evaluate five experts on emoji; write a report."""

    minutes: float = 15.0
    """Approximate duration in minutes on two CPU cores; more minutes train longer."""
    run_folder: Annotated[Path, arg(name="run", metavar="DIR")] = Path("runs/demo")
    """Folder of the run."""

    def run(self) -> None:
        """Run the remaining steps of the demo."""
        from atoll.apps.launch.demo import demo

        demo(self.run_folder, self.minutes)


@dataclass
class Init:
    """Write RUN/atoll.yaml from a preset, or for a base model."""

    folder: RunFolder
    """Folder of the new run."""
    preset: Annotated[
        str | None,
        arg(metavar=f"{{{','.join(PRESETS)}}}", help_behavior_hint="(default: emoji, or base with --base)"),
    ] = None
    """Preset to copy the settings from."""
    base: Annotated[str | None, arg(metavar="FOLDER|NAME", help_behavior_hint="(default: none)")] = None
    """Diffusers pipeline whose network all experts adapt: a folder, or a name on the hub. It is checked first."""
    force: bool = False
    """Overwrite an existing atoll.yaml."""
    overrides: Overrides = field(default_factory=dict)
    epilog: ClassVar = "\n".join(
        [
            "presets:",
            *(f"  {name:<11}  {about}" for name, about in SUMMARIES.items()),
            "examples:",
            '  atoll init runs/mine --preset images --data.source "my photos"',
            "  atoll init runs/mine --base OWNER/NAME --data.source photos --clusters.count 4",
        ]
    )

    def run(self) -> None:
        """Write the file with all keys and a comment on each."""
        if self.base is not None and self.preset is not None:
            raise AtollError("--base has a preset of its own; omit --preset or --base")
        file = self.folder / layout.CONFIG_FILE
        if file.exists() and not self.force:
            raise AtollError(f"{file} exists; edit it, or overwrite it with --force")
        # Resolve first: nothing is written if an override is invalid, or if the base does not pass its check.
        preset = self.preset or ("emoji" if self.base is None else "base")
        if preset not in PRESETS:
            raise AtollError(unknown("preset", preset, PRESETS))
        config = configuration.resolve(PRESETS[preset], self.overrides, source="command line")
        if self.base is not None:
            config = self.check_base(self.base)
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(configuration.to_yaml(config, NOTES.get(preset)), encoding="utf-8")
        print(f"wrote {file} from preset {preset!r}; check it with: atoll config {self.folder}")
        if (source := config.data.source).startswith("/") and not glob(source):
            print(f"note: data.source does not exist: {source}")

    def check_base(self, base: str) -> configuration.Config:
        """Check a base model, print what was found, and return the settings of a run on it."""
        chosen = {"networks.default.base": base, **self.overrides}
        config = configuration.resolve(PRESETS["base"], chosen, source="command line")
        network = config.networks["default"]
        if not isinstance(network, dict) or network.get("base") != base:
            raise AtollError("--base and --networks.default name different networks; omit one of them")
        if network.get("lora", {}) is not None and find_spec("peft") is None:
            raise AtollError("adapters of a base model need the package peft; pip install 'atoll[base]'")
        from atoll.encoders.base_pipeline import open_base

        pipeline = open_base(config.latents.autoencoder)
        trace, _ = pipeline.traced
        objective = {"schedule": str(trace.schedule["name"]), "prediction": trace.prediction}
        found = {f"experts.default.{part}": value for part, value in objective.items()}
        if "data.resolution" not in chosen and (side := pipeline.default_side()):
            found["data.resolution"] = str(side)
        config = configuration.resolve(PRESETS["base"], found | chosen, source="command line")
        for given in config.experts.values():
            trace.check_objective(given.schedule, given.prediction)
        for word, text in pipeline.describe(config.data.resolution):
            print(f"{word:<9} {text}")
        return config


@dataclass
class ShowConfig:
    """Validate RUN/atoll.yaml and print every key with its value."""

    folder: RunFolder
    """Folder of the run."""
    json: bool = False
    """Print JSON instead of YAML."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Print the resolved configuration."""
        resolved = configuration.load(self.folder, self.overrides).model_dump(mode="json")
        print(json.dumps(resolved) if self.json else yaml.safe_dump(resolved, sort_keys=False), end="")


@dataclass(frozen=True)
class Prepare(PrepareArguments):
    __doc__ = PrepareArguments.__doc__

    dry_run: bool = False
    """Print the detected source and the stages to run, and exit."""
    json: bool = False
    """With --dry-run, print JSON."""

    def run(self) -> None:
        """Run the stages, or print the plan."""
        if self.dry_run:
            self.show()
        else:
            self.call()

    def show(self) -> None:
        """Print the plan."""
        config = configuration.load(self.folder, self.texts)
        from atoll.data.prepare import open_preparation, plan, stages_of
        from atoll.data.sources.source import describe, survey
        from atoll.data.stages.ingest import open_configured

        # The source first: the stages may need networks that must be downloaded.
        source = open_configured(config.data)
        if not self.json:
            describe(survey(source))
        preparation = open_preparation(Path(self.folder), config, source)
        steps = [step for step in plan(preparation) if not self.stage or step["stage"] in self.stage]
        if self.json:
            print(json.dumps(steps))
            return
        for step in steps:
            print(f"{step['stage']:<9} {step['state']:<22} {step['uses']}")
        for note in filter(None, (stage.note() for stage in stages_of(preparation))):
            print(f"note: {note}")
