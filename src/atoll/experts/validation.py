"""Validation on held-out images: the only definition of the held-out velocity error.

Each cluster is validated separately: at most `IMAGES` of its held-out images, evenly spread over its shards, each
noised once in each of ten time bins. x0 is a sample of the autoencoder's posterior. Posterior sample, time and noise
are functions of (seed, position in the cluster), so the error on a cluster depends neither on the batch size, nor on
the number of processes, nor on the other clusters.

    error = validate(velocity, held_out, seed=config.train.seed, conditioning=frozenset({"text"}))
    error.mean, error.by_time

The error is that of the velocity, with less weight at the end of the path. An x0 network with error e has the velocity
error e/t, and the mean of (e/t)² over all times is infinite, although no solver sees the smallest ones: the last of N
equal steps starts at t = 1/N and moves the image by e. Below t = `LAST_TIME` the squared error is therefore multiplied
by (t/`LAST_TIME`)²: for an x0 network it then has the value e²/`LAST_TIME`² of that last step.

The error over several clusters is the mean over all of their images. An expert is validated on its cluster; monolith,
student, router and mixtures of experts are validated on the union of these images. Training, admission and
`atoll evaluate` all use this module, so their numbers are comparable.

A row is one image in one time bin. Rows have a fixed order (cluster, bin, image) and are split into batches of one size
of images, which the processes share. The results are gathered into that order before they are summed, so all processes
get the same bits, whatever their number.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from atoll import flow
from atoll.core.device import full_float32
from atoll.core.manifests import ByTime
from atoll.data.dataset import Batch, Shards
from atoll.flow import rng
from atoll.nets import Condition

TIME_BINS = 10
"""Bins of width 0.1: enough to separate noisy from clean times, few enough for a table."""
IMAGES = 1024
"""Maximal number of held-out images of each cluster. The errors of single rows have a standard deviation about as large
as their mean, so the mean has a standard error between 1 % (if the ten rows of an image were independent) and 3 % (if
they were equal). The 10,240 forward passes cost as much as training on about 3,400 images, which is little."""
BATCH = 64
"""Rows of one forward pass: small enough to split 10,240 rows evenly between tens of processes, and for diagnostics to
hold the velocities of all experts."""
LAST_TIME = 0.05
"""Time below which errors lose weight: where the last of 20 Euler steps starts, and where training limits the weights
of x0 networks (`flow.objectives.MAX_WEIGHT` is 1/0.05²). On exact mixtures with disturbed experts, limits from 0.02 to
0.1 order x0 experts by the quality of their samples about equally well, and far better than no limit."""
HELD_OUT_STREAM = 14
"""Stream of the times. A stream number is arbitrary but must never change or be used twice."""
NOISE_SEED_OFFSET = 1
"""Training noise comes from the seed; held-out images must not repeat the noise of training images."""


class Processes(Protocol):
    """The processes that share a validation."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over all processes."""


class _Alone(NamedTuple):
    rank: int = 0
    size: int = 1

    def sum(self, rows: Tensor) -> Tensor:
        return rows


ALONE: Processes = _Alone()


class _BatchSlice(NamedTuple):
    """The images of a batch, and its position among the rows."""

    images: "np.ndarray[Any, Any]"
    """Indices of the images in the shards."""
    time_bin: int
    position: int
    """Position of the first row in its cluster, which determines its random numbers."""
    first: int
    """Position of the first row among the rows of all clusters."""


class ValidationBatch(NamedTuple):
    """Held-out images (batch, C, H, W), noised on the linear path; `noised.target` is eps - x0."""

    batch: Batch
    noised: flow.Noised
    first: int
    """Position of its first row among all rows."""


@dataclass(frozen=True)
class ValidationSet:
    """The held-out images of some clusters, each noised once in every time bin."""

    shards: Shards
    seed: int
    limit: int = IMAGES
    """Maximal number of images of each cluster."""

    @property
    def images(self) -> int:
        """The number of images that are used."""
        return sum(min(len(cluster), self.limit) for cluster in self.shards.cluster_ranges().values())

    def __len__(self) -> int:
        """Return the number of rows."""
        return TIME_BINS * self.images

    @cached_property
    def _slices(self) -> list[_BatchSlice]:
        slices: list[_BatchSlice] = []
        rows = 0
        for cluster in self.shards.cluster_ranges().values():
            count = min(len(cluster), self.limit)
            chosen = cluster.start + np.linspace(0, len(cluster) - 1, count).round().astype(np.int64)
            starts = self._starts(chosen)
            for time_bin in range(TIME_BINS):
                for start, end in zip(starts, [*starts[1:], count], strict=True):
                    part = chosen[start:end]
                    slices.append(_BatchSlice(part, time_bin, time_bin * count + start, rows))
                    rows += len(part)
        return slices

    def _starts(self, images: "np.ndarray[Any, Any]") -> list[int]:
        """Return the starts of batches of at most `BATCH` consecutive images, all of one size."""
        owner = np.empty(len(images), np.int64)
        for number, own in enumerate(self.shards.by_size(images).values()):
            owner[own] = number
        edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(images)]
        return [start for first, end in pairwise(edges) for start in range(first, end, BATCH)]

    def batches(self, device: torch.device, processes: Processes = ALONE) -> Iterator[ValidationBatch]:
        """Yield this process's share of the batches."""
        # Every bin ends with a smaller batch. Dealing out the batches by size gives each process its share of those.
        by_size = sorted(self._slices, key=lambda part: -len(part.images))
        for part in by_size[processes.rank :: processes.size]:
            batch = self.shards.read(part.images).to(device)
            draws = rng.uniform(len(part.images), seed=self.seed, stream=HELD_OUT_STREAM, first=part.position)
            t = ((part.time_bin + draws) / TIME_BINS).to(device)
            x0 = self.shards.latents(batch, seed=self.seed, position=part.position)
            seed = self.seed + NOISE_SEED_OFFSET
            noised = flow.Objective().corrupt(x0, seed=seed, position=part.position, t=t)
            yield ValidationBatch(batch, noised, part.first)

    def gather(
        self,
        parts: Iterable[tuple[ValidationBatch, Tensor]],
        processes: Processes = ALONE,
        *,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Return the results (rows, *shape) of all processes in the order of the rows, in float64 on the CPU.

        `parts` are the batches of this process, each with its result (batch, *shape). A row is computed by one process
        and zero in the others, so the sum over the processes is exact.
        """
        rows = torch.zeros(len(self), *shape, dtype=torch.float64)
        for part, values in parts:
            rows[part.first : part.first + len(values)] = values.cpu().double()
        return processes.sum(rows)


@dataclass(frozen=True)
class Summary:
    """The mean of a metric over all rows and in each time bin; None if there are no held-out images."""

    mean: float | None
    by_time: ByTime | None = None

    @classmethod
    def of(cls, values: Tensor, t: Tensor) -> Self:
        """Summarize the values (rows,) at the times (rows,)."""
        return cls(values.cpu().double().mean().item(), by_time(values, t))


@torch.no_grad()
@full_float32()
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
    """Return the error of a velocity field against eps - x0 on held-out images (see above), overall and by time.

    `velocity(x, t, condition=...)` is evaluated on `device`; `conditioning` is any of text, pooled and label.
    """
    held_out = ValidationSet(shards, seed, limit)
    if not len(held_out):
        return Summary(None)
    errors, times = [], []
    for part in held_out.batches(device or torch.device("cpu"), processes):
        x, t = part.noised.input, part.noised.t
        output = velocity(x, t, condition=condition_of(part.batch, conditioning))
        errors.append((part, velocity_errors(output, part.noised.target, t)))
        times.append((part, t))
    error, t = held_out.gather(errors, processes), held_out.gather(times, processes)
    return Summary.of(error, t)


def velocity_errors(velocity: Tensor, target: Tensor, t: Tensor) -> Tensor:
    """Return the weighted mean squared error (…) of velocities (…, C, H, W) against targets, at times t (…)."""
    return time_weight(t) * (velocity - target).square().flatten(-3).mean(-1)


def time_weight(t: Tensor) -> Tensor:
    """Return the weight min(1, (t/LAST_TIME)²) of a squared velocity error at times t."""
    return (t / LAST_TIME).square().clamp(max=1)


def by_time(values: Tensor, t: Tensor) -> ByTime:
    """Return the mean of the values (rows,) in each of the ten time bins; None for an empty bin."""
    values, t = values.cpu(), t.cpu()
    bins = (t * TIME_BINS).long().clamp(max=TIME_BINS - 1)
    sums = torch.zeros(TIME_BINS, dtype=torch.float64).index_add_(0, bins, values.double())
    counts = torch.bincount(bins, minlength=TIME_BINS)
    return tuple(s / n if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True))


def condition_of(batch: Batch, use: frozenset[str]) -> Condition:
    """Return the parts of a batch that a network is conditioned on: any of text, pooled and label."""
    return Condition(
        text=batch.text.float() if "text" in use and batch.text is not None else None,
        text_mask=batch.mask if "text" in use else None,
        pooled=batch.pooled.float() if "pooled" in use and batch.pooled is not None else None,
        label=batch.label if "label" in use else None,
    )
