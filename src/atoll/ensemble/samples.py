"""Sampling settings, routing traces and sampled images."""

from dataclasses import asdict, dataclass

import torch
from PIL import Image
from torch import Tensor

from atoll import flow
from atoll.core.errors import AtollError, unknown
from atoll.ensemble.routing import Decision, parse


@dataclass(frozen=True)
class Settings:
    """Sampling settings. Every image file contains them as metadata."""

    # Defaults: top-1 is the best strategy of DDM; 50 Euler steps are those of Paris and HDDM; a guidance scale of 4 is
    # that of DiT's sampling script.
    routing: str = "top-1"
    steps: int = 50
    guidance_scale: float = 4.0
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    rescale: float = 0.0
    solver: str = "euler"
    shift: float = 1.0
    scheduler_times: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        parse(self.routing)
        low, high = self.guidance_interval
        if self.solver not in flow.SOLVERS:
            raise AtollError(unknown("solver", self.solver, flow.SOLVERS))
        if self.steps < 1 or self.shift <= 0 or not 0 <= self.rescale <= 1 or not 0 <= low <= high <= 1:
            raise AtollError(
                "expected steps >= 1, shift > 0, rescale in [0, 1] and a guidance interval in [0, 1], got "
                f"{self.steps}, {self.shift}, {self.rescale} and {self.guidance_interval}"
            )
        if self.scheduler_times and self.solver in flow.solvers.OWN_SOLVERS:
            raise AtollError(
                f"scheduler_times needs a diffusers solver such as flow-euler, got {self.solver}: euler and heun have "
                "no diffusers scheduler"
            )

    @property
    def evaluated_at(self) -> list[float]:
        """The times at which the velocity is evaluated."""
        times = flow.solver_times(self.steps, self.shift)[:-1]
        # Heun's method evaluates twice per step, except in the last one, which is an Euler step.
        return times + times[1:] if "heun" in self.solver else times

    def guidance_at(self, t: float) -> float:
        """Return the guidance scale at a time: 1 outside the guidance interval."""
        low, high = self.guidance_interval
        return self.guidance_scale if low <= t <= high else 1.0


@dataclass(frozen=True, eq=False)
class Trace:
    """All routing decisions: times (evaluations,), probabilities and weights (evaluations, images, experts)."""

    t: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: tuple[str, ...]

    @classmethod
    def of(cls, batches: list[list[Decision]], experts: tuple[str, ...]) -> "Trace":
        """Concatenate the decisions of all batches along the images."""
        steps = range(len(batches[0]))
        return cls(
            torch.tensor([float(decision.t[0]) for decision in batches[0]]),
            torch.stack([torch.cat([decisions[step].probabilities for decisions in batches]) for step in steps]),
            torch.stack([torch.cat([decisions[step].weights for decisions in batches]) for step in steps]),
            experts,
        )


@dataclass(frozen=True, eq=False)
class Samples:
    """Sampled images with their latents, prompts and settings."""

    latents: Tensor
    """Normalized latents (images, C, H, W)."""
    images: list[Image.Image]
    prompts: list[str | None]
    """Prompt or class of each image."""
    settings: Settings
    trace: Trace | None = None

    def to_dict(self) -> dict[str, object]:
        """Return prompts and settings as plain values."""
        return {"prompts": self.prompts, "settings": asdict(self.settings)}

    def metadata(self, number: int) -> dict[str, object]:
        """Return everything that is needed to reproduce one of the images."""
        return {"prompt": self.prompts[number], "number": number, **asdict(self.settings)}
