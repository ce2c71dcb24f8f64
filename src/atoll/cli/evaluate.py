"""Verbs of evaluation: evaluate, report."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import arg

from atoll.api import EvaluateArguments
from atoll.cli.verb import RunFolder
from atoll.core import config as configuration
from atoll.core.options import Overrides


@dataclass(frozen=True)
class Evaluate(EvaluateArguments):
    __doc__ = EvaluateArguments.__doc__

    json: bool = False
    """Print JSON instead of tables."""
    epilog: ClassVar = """
examples:
  atoll evaluate runs/mine --models experts monolith --routings top-1 nearest
  atoll evaluate runs/mine --num-images 10000 --steps 4 50 --guidance-scale 1.5
"""

    def run(self) -> None:
        """Evaluate, and print the metrics."""
        # Standard output is only for the result, so that --json can be piped; progress goes to standard error.
        with redirect_stdout(sys.stderr):
            result = self.call()
        from atoll.apps.evaluate.results import plain
        from atoll.apps.evaluate.table import show

        if result is None:
            return  # the main process prints the metrics
        if self.json:
            print(json.dumps(plain(result)))
        else:
            show(result)


@dataclass
class Report:
    """Write an HTML page with images, metrics and training curves."""

    folder: RunFolder
    """Folder of the run."""
    prompts: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: some captions of each cluster)")] = ()
    """Text prompts of the images."""
    routings: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: those of the last evaluation)")] = ()
    """Routings to show."""
    steps: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: as in the last evaluation)")] = None
    """Number of solver steps."""
    guidance_scale: Annotated[
        float | None, arg(metavar="X", help_behavior_hint="(default: as in the last evaluation)")
    ] = None
    """Classifier-free guidance scale; 1 disables guidance."""
    seed: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: as in the last evaluation)")] = None
    """Random seed of the initial noise."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: RUN/report.html)")] = None
    """File to write."""
    json: bool = False
    """Print the path of the page as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Write the page, and print its path."""
        config = configuration.load(self.folder, self.overrides)
        from atoll.apps.report import report

        options = ("prompts", "routings", "steps", "guidance_scale", "seed", "out")
        # As above: standard output is only for the path of the page.
        with redirect_stdout(sys.stderr):
            page = report(self.folder, config, **{name: getattr(self, name) for name in options})
        print(json.dumps({"report": str(page)}) if self.json else f"report: {page}")
