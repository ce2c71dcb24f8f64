"""The verbs of a run's settings, and the demo."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import yaml
from tyro.conf import Positional, arg

from atoll.cli.verb import Overrides
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.config_yaml import to_yaml
from atoll.core.errors import AtollError
from atoll.core.presets import NOTES, PRESETS


@dataclass
class Demo:
    """The whole journey on some emoji: prepare, experts, router, monolith, figures, report; again, it continues."""

    minutes: float = 15.0
    """Time it may take on two cores; more trains longer."""
    run_folder: Annotated[Path, arg(name="run", metavar="DIR")] = Path("runs/demo")
    """Folder of the run."""

    def run(self) -> None:
        """Do what is left to do."""
        from atoll.launch.demo import demo

        demo(self.run_folder, self.minutes)


@dataclass
class Init:
    """Write RUN/atoll.yaml from a preset."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the new run."""
    preset: Literal[tuple(PRESETS)] = "emoji"  # type: ignore[valid-type]
    """Settings to start from."""
    force: bool = False
    """Replace an atoll.yaml that is already there."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Write the file, complete and commented."""
        config = configuration.resolve(PRESETS[self.preset], self.overrides, source="command line")
        file = self.folder / layout.CONFIG_FILE
        if file.exists() and not self.force:
            raise AtollError(f"{file} exists; edit it, or replace it with --force")
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(to_yaml(config, NOTES.get(self.preset)), encoding="utf-8")
        print(f"wrote {file} from preset {self.preset!r}; check it with: atoll config {self.folder}")


@dataclass
class Config:
    """Check a run's atoll.yaml and print it resolved: every key with the value that counts."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    json: bool = False
    """Print JSON instead of YAML."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Print the resolved configuration."""
        resolved = configuration.load(self.folder, self.overrides).model_dump(mode="json")
        print(json.dumps(resolved) if self.json else yaml.safe_dump(resolved, sort_keys=False), end="")
