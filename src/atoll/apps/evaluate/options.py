"""Options of an evaluation. They import no torch: the docstrings of the fields are the help of `atoll evaluate`."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.conf import arg

from atoll.core.errors import AtollError, unknown
from atoll.core.names import SolverName, Split
from atoll.core.options import LoadOptions, SampleSettings, SamplingOptions, part

EvaluationPart = Literal["metrics", "diversity", "diagnostics", "trajectories"]


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(LoadOptions, SamplingOptions):
    """What to measure, and with how many images."""

    # 2500 is a little more than the 2049 images that an Inception covariance of 2048 dimensions needs. Published FID
    # uses 10,000 to 50,000.
    num_images: int = 2500
    """Number of images to generate with each model."""
    models: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: those of the first three that exist)")] = ()
    """Models to evaluate: experts, students, monolith, student, merged, expert:K, or singles (every expert alone)."""
    routings: tuple[str, ...] = ("top-1", "top-2", "full")
    """Routings to evaluate the experts with."""
    steps: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: 50)")] = ()
    """Number of solver steps, or several to compare."""
    solver: Annotated[tuple[SolverName, ...], arg(help_behavior_hint="(default: euler)")] = ()
    """ODE solver, or several to compare."""
    extractors: tuple[str, ...] = ("inception",)
    """Feature networks: inception (FID and KID as published), inception:FILE, efficientnet-lite0, or a hub name."""
    reference: Annotated[str, arg(metavar="{train,validation,FILE.npz}")] = "train"
    """Split of the real images to compare with, or statistics of others: an .npz file with mu and sigma."""
    num_real: int = 10_000
    """Maximum number of real images."""
    prompts: Split = "validation"
    """Split of the captions or labels to generate images for."""
    diversity: tuple[int, int] = (32, 4)
    """Number of prompts and number of images per prompt, for the diversity within prompts."""
    lpips: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: first extractor)")] = None
    """LPIPS weights (AlexNet, .safetensors or .pt) for the diversity."""
    clip: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="(default: none)")] = None
    """Image-text model by hub name or folder, for the alignment of images and prompts."""
    # Training validates with 1024 images too, so the error of an expert on its cluster is the number in its manifest.
    num_val: int = 1024
    """Maximum number of validation images of each cluster, for the diagnostics; the default is that of training."""
    num_trajectories: int = 32
    """Number of sampling trajectories to compare, each with N and with 2 N steps."""
    without: Annotated[tuple[EvaluationPart, ...], arg(help_behavior_hint="(default: none)")] = ()
    """Parts of the evaluation to leave out."""
    batch_size: int = 64
    """Images per batch."""
    allow_small: bool = False
    """Compute biased metrics from too few images; the real-vs-real baseline shows the bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling()  # raises an error for wrong settings
        parts = get_args(EvaluationPart)
        for name in self.without:
            if name not in parts:
                raise AtollError(unknown("part of the evaluation", name, parts))
        if self.reference not in get_args(Split) and not self.reference.endswith(".npz"):
            raise AtollError(unknown("reference", self.reference, (*get_args(Split), "FILE.npz")))
        # A covariance needs two images; the real-vs-real baseline needs two such sets; a distance needs two images.
        if self.num_images < 2 or self.num_real < 4 or min(self.diversity) < 1 or self.diversity[1] < 2:
            raise AtollError(
                "expected --num-images of at least 2, --num-real of at least 4, and --diversity of at least 1 prompt "
                f"and 2 images per prompt, got {self.num_images}, {self.num_real}, {self.diversity[0]} and "
                f"{self.diversity[1]}"
            )

    def sampling(self) -> list[SampleSettings]:
        """Return the settings that each model and routing is sampled with: one for each solver and number of steps."""
        base = SampleSettings(**asdict(part(SamplingOptions, self)))
        solvers, steps = self.solver or (base.solver,), self.steps or (base.steps,)
        return [
            replace(base, solver=one, steps=count) for one in dict.fromkeys(solvers) for count in dict.fromkeys(steps)
        ]

    @property
    def load(self) -> LoadOptions:
        """How networks are loaded."""
        return part(LoadOptions, self)

    def does(self, part: EvaluationPart) -> bool:
        """Return whether a part is included."""
        return part not in self.without
