"""Verbs of evaluation: evaluate, report."""

import json
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from atoll.cli.verb import Overrides, RunFolder
from atoll.core import config as configuration
from atoll.core.options import LoadOptions, SamplingOptions

Part = Literal["metrics", "diversity", "diagnostics", "trajectories"]


@dataclass
class Evaluate:
    """Compute FID, KID, diversity and diagnostics of a run.

    All models and routings start from the same noise; diagnostics are in float32.
    """

    folder: RunFolder
    """Folder of the run."""
    num_images: int = 2500
    """Number of images to generate with each model."""
    models: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: those of the first three that exist)")] = ()
    """Models to evaluate: experts, monolith, student, merged, expert:K, or singles (every expert alone)."""
    routings: tuple[str, ...] = ("top-1", "top-2", "full")
    """Routings to evaluate the experts with."""
    settings: Annotated[SamplingOptions, OmitArgPrefixes] = field(default_factory=SamplingOptions)
    extractors: tuple[str, ...] = ("inception",)
    """Feature networks: inception (FID and KID as published), inception:FILE, efficientnet-lite0, or a hub name."""
    reference: Literal["train", "held-out"] = "train"
    """Split of the real images to compare with."""
    num_real: int = 10_000
    """Maximum number of real images."""
    prompts: Literal["held-out", "train"] = "held-out"
    """Split of the captions or labels to generate images for."""
    diversity: tuple[int, int] = (32, 4)
    """Number of prompts and number of images per prompt, for the diversity within prompts."""
    lpips: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: first extractor)")] = None
    """LPIPS weights (AlexNet, .safetensors or .pt) for the diversity."""
    clip: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="(default: none)")] = None
    """Image-text model by hub name or folder, for the alignment of images and prompts."""
    num_val: int = 1024
    """Maximum number of held-out images of each cluster, for the diagnostics; the default is that of training."""
    num_trajectories: int = 32
    """Number of sampling trajectories to compare, each with N and with 2 N steps."""
    without: Annotated[tuple[Part, ...], arg(help_behavior_hint="(default: none)")] = ()
    """Parts of the evaluation to leave out."""
    batch_size: int = 64
    """Images per batch."""
    load: Annotated[LoadOptions, OmitArgPrefixes] = field(default_factory=LoadOptions)
    allow_small: bool = False
    """Compute biased metrics from too few images; the real-vs-real baseline shows the bias."""
    json: bool = False
    """Print JSON instead of tables."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Evaluate, and print the metrics."""
        from contextlib import redirect_stdout

        config = configuration.load(self.folder, self.overrides)
        from atoll.apps.evaluate import Options, evaluate
        from atoll.apps.evaluate.results import plain
        from atoll.apps.evaluate.table import show
        from atoll.core.device import device
        from atoll.train.distributed import init_distributed

        options = Options(**{option.name: getattr(self, option.name) for option in fields(Options)})
        # Standard output is only for the result, so that --json can be piped; progress goes to standard error.
        with redirect_stdout(sys.stderr), init_distributed(device()) as context:
            load = replace(options.load, devices=context.only_device(self.load.devices))
            result = evaluate(self.folder, config, replace(options, load=load), context=context)
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
        from contextlib import redirect_stdout

        config = configuration.load(self.folder, self.overrides)
        from atoll.apps.report import Options, report

        options = Options(self.prompts, self.routings or None, self.steps, self.guidance_scale, self.seed)
        # As above: standard output is only for the path of the page.
        with redirect_stdout(sys.stderr):
            page = report(self.folder, config, options, out=self.out)
        print(json.dumps({"report": str(page)}) if self.json else f"report: {page}")
