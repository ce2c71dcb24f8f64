"""The verbs of evaluation: figures, and a page that tells them."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from atoll.cli.verb import Overrides
from atoll.core import config as configuration
from atoll.core.names import SOLVERS


@dataclass
class Evaluate:
    """Figures of every model of a run, each with its protocol, and diagnostics; again, it continues."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    samples: int = 2500
    """Pictures that are drawn of each model."""
    models: tuple[str, ...] = ()
    """experts, monolith, student, expert:K, singles (every expert alone); default what is there of the first three."""
    routings: tuple[str, ...] = ("top-1", "top-2", "full")
    """Routings under which the experts are evaluated."""
    steps: int = 50
    """Steps of the solver."""
    guidance: float = 4.0
    """Classifier-free guidance; 1 is none."""
    solver: Literal[SOLVERS] = "euler"  # type: ignore[valid-type]
    """How velocity is integrated."""
    seed: int = 0
    """Of noise; every model and routing starts from the same."""
    extractors: tuple[str, ...] = ("inception",)
    """Networks to look through: inception (FID and KID as published), inception:FILE, efficientnet-lite0, or a vision
    model of transformers by name or folder."""
    reference: Literal["train", "held-out"] = "train"
    """The real pictures to compare with."""
    references: int = 10_000
    """Real pictures at most."""
    prompts: Literal["held-out", "train"] = "held-out"
    """Whose captions or classes the pictures are drawn for: unseen ones ask for more than was taught."""
    diversity: tuple[int, int] = (32, 4)
    """Prompts, and pictures of each, for the diversity within prompts."""
    lpips: Path | None = None
    """Weights of LPIPS (AlexNet) as .safetensors or .pt; without, diversity is measured on the first extractor."""
    clip: str | None = None
    """An image-text model by name or folder, for the alignment of pictures with their prompts."""
    held_out: int = 1024
    """Use at most this many held-out images of each cluster for the diagnostics. The default is that of training."""
    followed: int = 32
    """Samples that are followed from noise to data, with N and with 2 N steps."""
    skip: tuple[Literal["metrics", "diversity", "diagnostics", "trajectories"], ...] = ()
    """Parts to leave out."""
    batch: int = 64
    """Pictures that are made at once."""
    resident: int | None = None
    """Experts in memory at once; default all."""
    allow_few: bool = False
    """Give figures of few samples all the same; they are biased, and the floor beside them tells how much."""
    json: bool = False
    """Print all figures as JSON instead of tables."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Evaluate, and print."""
        from contextlib import redirect_stdout

        config = configuration.load(self.folder, self.overrides)
        from atoll.ensemble import Settings
        from atoll.evaluate import Options, evaluate
        from atoll.evaluate.results import plain
        from atoll.evaluate.table import show

        settings = Settings(steps=self.steps, guidance=self.guidance, solver=self.solver, seed=self.seed)
        options = Options(
            self.samples, self.models, self.routings, settings, self.extractors, self.reference, self.references,
            self.diversity, self.lpips, self.clip, self.held_out, self.followed, self.skip, self.batch, self.resident,
            self.allow_few, self.prompts,
        )  # fmt: skip
        with redirect_stdout(sys.stderr):
            result = evaluate(self.folder, config, options)
        if self.json:
            print(json.dumps(plain(result)))
        else:
            show(result)


@dataclass
class Report:
    """Write one page that tells what happened in a run, pictures first; pictures that are missing are drawn."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    prompts: tuple[str, ...] = ()
    """What the pictures show; default a few captions of each cluster, seen and held out."""
    routings: tuple[str, ...] = ()
    """Routings to show; default those of the last evaluation."""
    steps: int | None = None
    """Steps of the solver; default as in the last evaluation, as are the next two."""
    guidance: float | None = None
    """Classifier-free guidance; 1 is none."""
    seed: int | None = None
    """The same seed gives the same pictures."""
    out: Path | None = None
    """File to write; default RUN/report.html."""
    json: bool = False
    """Print where the page is as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Write the page, and say where it is."""
        from contextlib import redirect_stdout

        config = configuration.load(self.folder, self.overrides)
        from atoll.report import Options, report

        options = Options(self.prompts, self.routings or None, self.steps, self.guidance, self.seed)
        with redirect_stdout(sys.stderr):
            page = report(self.folder, config, options, out=self.out)
        print(json.dumps({"report": str(page)}) if self.json else f"report: {page}")
