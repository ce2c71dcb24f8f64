"""Verbs that start a run: demo, init, config."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import yaml
from tyro.conf import arg

from atoll.cli.verb import Overrides, RunFolder
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.config_yaml import to_yaml
from atoll.core.errors import AtollError
from atoll.core.presets import NOTES, PRESETS


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
    """Write RUN/atoll.yaml from a preset."""

    folder: RunFolder
    """Folder of the new run."""
    preset: Literal[tuple(PRESETS)] = "emoji"  # type: ignore[valid-type]
    """Preset to copy the settings from."""
    force: bool = False
    """Overwrite an existing atoll.yaml."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Write the file with all keys and a comment on each."""
        # Resolve first: nothing is written if an override is invalid.
        config = configuration.resolve(PRESETS[self.preset], self.overrides, source="command line")
        file = self.folder / layout.CONFIG_FILE
        if file.exists() and not self.force:
            raise AtollError(f"{file} exists; edit it, or overwrite it with --force")
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(to_yaml(config, NOTES.get(self.preset)), encoding="utf-8")
        print(f"wrote {file} from preset {self.preset!r}; check it with: atoll config {self.folder}")


@dataclass
class Config:
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
