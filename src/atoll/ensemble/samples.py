"""Routing traces and sampled images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from PIL import Image
from torch import Tensor

from atoll import flow
from atoll.core.options import Settings
from atoll.core.sizes import Size
from atoll.ensemble.routing import Decision
from atoll.experts.validation import Processes


def evaluated_at(settings: Settings) -> list[float]:
    """Return the times at which the velocity is evaluated."""
    times = flow.solver_times(settings.steps, settings.shift)[:-1]
    # Heun's method evaluates twice per step, except in the last one, which is an Euler step.
    return times + times[1:] if "heun" in settings.solver else times


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


ROW_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
"""Types of rows that processes exchange."""


@dataclass(frozen=True)
class Gather:
    """Joins the results of batches that several processes share."""

    batches: Sequence[slice]
    """The images of all batches."""
    mine: Sequence[slice]
    """Those of this process."""
    processes: Processes

    def rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows (images, …) of all processes from those of each batch of this one, in the order of images.

        Every image is computed by one process and zero in the others, so the sum over the processes is exact.
        """
        if self.processes.size == 1:
            return torch.cat(list(parts))
        # A process without a batch has no tensor to take shape and dtype from; batches are dealt out from process 0 on.
        form = torch.zeros(8, dtype=torch.int64)
        if self.processes.rank == 0:
            form[0], form[1] = parts[0].ndim - 1, ROW_TYPES.index(parts[0].dtype)
            form[2 : 1 + parts[0].ndim] = torch.tensor(parts[0].shape[1:])
        ndim, dtype, *sizes = self.processes.sum(form).tolist()
        rows = torch.zeros(self.batches[-1].stop, *sizes[:ndim], dtype=ROW_TYPES[dtype])
        for images, part in zip(self.mine, parts, strict=True):
            rows[images] = part.cpu()
        return self.processes.sum(rows)

    def trace(self, trace: Trace | None, names: tuple[str, ...]) -> Trace:
        """Return the trace of all images from that of this process; None if it has no batch."""
        if self.processes.size == 1:
            assert trace is not None
            return trace
        sizes = [part.stop - part.start for part in self.mine]
        columns = [] if trace is None else [trace.probabilities.transpose(0, 1), trace.weights.transpose(0, 1)]
        both = self.rows(torch.split(torch.stack(columns, 1), sizes) if columns else [])  # (images, 2, evaluations, …)
        t = self.processes.sum(trace.t.clone() if trace and self.processes.rank == 0 else torch.zeros(both.shape[2]))
        return Trace(t, both[:, 0].transpose(0, 1), both[:, 1].transpose(0, 1), names)


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
    dtype: str = "float32"
    """Precision of the networks."""
    size: Size | None = None
    """The requested size in pixels; None for the default."""

    def to_dict(self) -> dict[str, object]:
        """Return prompts and settings as plain values."""
        return {"prompts": self.prompts, "settings": asdict(self.settings), "dtype": self.dtype, **self._size()}

    def metadata(self, number: int) -> dict[str, object]:
        """Return everything that is needed to reproduce one of the images."""
        settings = {**asdict(self.settings), "dtype": self.dtype, **self._size()}
        return {"prompt": self.prompts[number], "number": number, **settings}

    def _size(self) -> dict[str, str]:
        return {} if self.size is None else {"size": str(self.size)}
