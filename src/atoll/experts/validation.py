"""Validation on held-out images: the one definition of the held-out velocity error.

Every cluster is validated by itself: at most `IMAGES` of its held-out images, evenly spread over its shards, each
noised once in every one of ten bins of time. x0 is a sample of the autoencoder's posterior. Posterior sample, time and
noise are functions of (seed, position of the image in its cluster), so the error on a cluster depends neither on the
batch size nor on the number of processes nor on the other clusters.

    error = validate(velocity, held_out, seed=config.train.seed, conditioning=frozenset({"text"}))
    error.mean, error.by_time

The error over several clusters is the mean over all of their images. An expert is validated on its own cluster, and
monolith, student, router and mixtures of experts on the union of what the experts are validated on. Training, admission
and `atoll evaluate` all take the images from here, so one name is one number.

A row is one image in one bin of time. Rows have a fixed order (clusters, bins, images) and are split into batches that
the processes share. Their results are gathered into that order before anything is summed, so all processes get the same
bits, whatever their number.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from atoll import flow
from atoll.core.manifests import ByTime
from atoll.data.dataset import Batch, Shards
from atoll.flow import rng
from atoll.nets import Condition

TIME_BINS = 10
IMAGES = 1024
"""At most so many held-out images of each cluster. Errors of single rows spread about as widely as they are large, so
the mean has a standard error of 1 % (if the ten rows of an image were independent) to 3 % (if they were alike). The
10,240 forward passes cost what training on some 3,400 images costs, which is little beside any training."""
BATCH = 64
"""Rows of one forward pass: small enough to split 10,240 rows evenly between tens of processes, and for diagnostics to
hold the velocities of all experts."""
HELD_OUT_STREAM = 14
NOISE_SEED_OFFSET = 1
"""Training draws its noise from the seed itself; held-out images must not repeat the noise of training images."""


class Processes(Protocol):
    """The processes that share a validation."""

    @property
    def rank(self) -> int:
        """Return the number of this process."""

    @property
    def size(self) -> int:
        """Return how many there are."""

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over all processes."""


class _Alone(NamedTuple):
    rank: int = 0
    size: int = 1

    def sum(self, rows: Tensor) -> Tensor:
        return rows


ALONE: Processes = _Alone()


class _BatchSlice(NamedTuple):
    """Where a batch is in the validation."""

    images: "np.ndarray[Any, Any]"
    """The numbers of its images in the shards."""
    time_bin: int
    position: int
    """Of its first row in its cluster: what its random numbers are a function of."""
    first: int
    """Its first row among those of all clusters."""


class ValidationBatch(NamedTuple):
    """Some held-out images (batch, C, H, W) on the linear path to noise; `noised.target` is eps - x0."""

    batch: Batch
    noised: flow.Noised
    first: int
    """Its first row among those of the whole validation."""


@dataclass(frozen=True)
class ValidationSet:
    """The held-out images of some clusters, each noised in every bin of time."""

    shards: Shards
    seed: int
    limit: int = IMAGES
    """Images of each cluster."""

    @property
    def images(self) -> int:
        """How many images are used."""
        return sum(min(len(own), self.limit) for own in self.shards.cluster_ranges().values())

    def __len__(self) -> int:
        """Return the number of rows."""
        return TIME_BINS * self.images

    @cached_property
    def _slices(self) -> list[_BatchSlice]:
        slices: list[_BatchSlice] = []
        rows = 0
        for own in self.shards.cluster_ranges().values():
            count = min(len(own), self.limit)
            chosen = own.start + np.linspace(0, len(own) - 1, count).round().astype(np.int64)
            for time_bin in range(TIME_BINS):
                for start in range(0, count, BATCH):
                    part = chosen[start : start + BATCH]
                    slices.append(_BatchSlice(part, time_bin, time_bin * count + start, rows))
                    rows += len(part)
        return slices

    def batches(self, device: torch.device, processes: Processes = ALONE) -> Iterator[ValidationBatch]:
        """Yield this process's share of the batches."""
        # Largest first: every bin ends with a smaller batch, and one process must not get all of those.
        in_turn = sorted(self._slices, key=lambda part: -len(part.images))
        for part in in_turn[processes.rank :: processes.size]:
            batch = self.shards.read(part.images).to(device)
            draws = rng.uniform(len(part.images), seed=self.seed, stream=HELD_OUT_STREAM, first=part.position)
            t = ((part.time_bin + draws) / TIME_BINS).to(device)
            x0 = self.shards.latents(batch, seed=self.seed, position=part.position)
            seed = self.seed + NOISE_SEED_OFFSET
            yield ValidationBatch(
                batch, flow.Objective().corrupt(x0, seed=seed, position=part.position, t=t), part.first
            )

    def gather(
        self,
        parts: Iterable[tuple[ValidationBatch, Tensor]],
        processes: Processes = ALONE,
        *,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Return the results (rows, *shape) of all processes in the order of the rows, in float64 on the CPU.

        `parts` are this process's batches, each with its result (batch, *shape). A row is computed by one process and
        is zero in the others, so the sum over the processes is exact.
        """
        rows = torch.zeros(len(self), *shape, dtype=torch.float64)
        for part, values in parts:
            rows[part.first : part.first + len(values)] = values.cpu().double()
        return processes.sum(rows)


@dataclass(frozen=True)
class Summary:
    """The mean of a metric over all rows, and in each bin of time; None where nothing is held out."""

    mean: float | None
    by_time: ByTime | None = None

    @classmethod
    def of(cls, values: Tensor, t: Tensor) -> Self:
        """Summarize the values (rows,) at the times (rows,)."""
        return cls(values.double().mean().item(), by_time(values, t))


@torch.no_grad()
def validate(
    velocity: Callable[..., Tensor],
    shards: Shards,
    *,
    seed: int,
    conditioning: frozenset[str],
    limit: int = IMAGES,
    device: torch.device | None = None,
    processes: Processes = ALONE,
) -> Summary:
    """Return the mean squared error of a velocity field against eps - x0 on held-out images, in all and by time.

    `velocity(x, t, condition=...)` is evaluated on `device`; `conditioning` is any of text, pooled and label.
    """
    held_out = ValidationSet(shards, seed, limit)
    if not len(held_out):
        return Summary(None)
    errors, times = [], []
    for part in held_out.batches(device or torch.device("cpu"), processes):
        x, t = part.noised.input, part.noised.t
        output = velocity(x, t, condition=condition_of(part.batch, conditioning))
        errors.append((part, velocity_errors(output, part.noised.target)))
        times.append((part, t))
    error, t = held_out.gather(errors, processes), held_out.gather(times, processes)
    return Summary.of(error, t)


def velocity_errors(velocity: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each velocity: (..., C, H, W) against (..., C, H, W) to (...)."""
    return (velocity - target).square().flatten(-3).mean(-1)


def by_time(values: Tensor, t: Tensor) -> ByTime:
    """Return the mean of the values in each of ten bins of time; None where there is none."""
    bins = (t * TIME_BINS).long().clamp(max=TIME_BINS - 1)
    sums = torch.zeros(TIME_BINS, dtype=torch.float64, device=t.device).index_add_(0, bins, values.double())
    counts = torch.bincount(bins, minlength=TIME_BINS)
    return tuple(s / n if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True))


def condition_of(batch: Batch, use: frozenset[str]) -> Condition:
    """Return the condition of a network: any of text, pooled and label of a batch."""
    return Condition(
        text=batch.text.float() if "text" in use and batch.text is not None else None,
        text_mask=batch.mask if "text" in use else None,
        pooled=batch.pooled.float() if "pooled" in use and batch.pooled is not None else None,
        label=batch.label if "label" in use else None,
    )
