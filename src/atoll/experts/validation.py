"""Validation: the only definition of the velocity error on validation images.

Each cluster is validated separately: at most `IMAGES` of its validation images, evenly spread over its shards, each
noised once in each of ten time bins. x0 is a sample of the autoencoder's posterior. Posterior sample, time and noise
are functions of (seed, position in the cluster), so the error on a cluster depends neither on the batch size, nor on
the number of processes, nor on the other clusters.

    error = validate(velocity, validation, seed=config.train.seed, conditioning=frozenset({"text"}))
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
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from atoll import flow
from atoll.core.device import full_float32
from atoll.core.distributed import ALONE, DistContext
from atoll.core.manifests import ByTime
from atoll.data.dataset import Batch, Shards
from atoll.experts.expert import condition_of
from atoll.flow import rng

TIME_BINS = 10
"""Bins of width 0.1: enough to separate noisy from clean times, few enough for a table."""
IMAGES = 1024
"""Maximum of validation images of each cluster. The errors of single rows have a standard deviation about as large as
their mean, so the mean has a standard error between 1 % (if the ten rows of an image were independent) and 3 % (if
they were equal). The 10,240 forward passes cost as much as training on about 3,400 images, which is little."""
BATCH = 64
"""Rows of one forward pass: small enough to split 10,240 rows evenly between tens of processes, and for diagnostics to
hold the velocities of all experts."""
LAST_TIME = 0.05
"""Time below which errors lose weight: where the last of 20 Euler steps starts, and where training limits the weights
of x0 networks (`flow.objectives.MAX_WEIGHT` is 1/0.05²). On exact mixtures with disturbed experts, limits from 0.02 to
0.1 order x0 experts by the quality of their samples about equally well, and far better than no limit."""
NOISE_SEED_OFFSET = 1
"""Training draws eps from the seed, and validation must not repeat it. (The noise of posterior samples has the seed and
the stream of training: it disturbs other images.)"""


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
    """Validation images (batch, C, H, W), noised on the linear path; `noised.target` is eps - x0."""

    batch: Batch
    noised: flow.Noised
    first: int
    """Position of its first row among all rows."""


@dataclass(frozen=True)
class ValidationSet:
    """The validation images of some clusters, each noised once in every time bin."""

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

    def batches(self, device: torch.device, processes: DistContext = ALONE) -> Iterator[ValidationBatch]:
        """Yield the batches of this process."""
        slices: list[_BatchSlice] = []
        rows = 0
        for cluster in self.shards.cluster_ranges().values():
            count = min(len(cluster), self.limit)
            chosen = cluster.start + np.linspace(0, len(cluster) - 1, count).round().astype(np.int64)
            # Batches of at most `BATCH` consecutive images, all of one size.
            owner = np.empty(count, np.int64)
            for number, own in enumerate(self.shards.by_size(chosen).values()):
                owner[own] = number
            edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), count]
            starts = [start for first, end in pairwise(edges) for start in range(first, end, BATCH)]
            for time_bin in range(TIME_BINS):
                for start, end in zip(starts, [*starts[1:], count], strict=True):
                    slices.append(_BatchSlice(chosen[start:end], time_bin, time_bin * count + start, rows))
                    rows += end - start
        # Every bin ends with a smaller batch. Dealing out the batches by size gives each process its share of those.
        by_size = sorted(slices, key=lambda part: -len(part.images))
        for part in by_size[processes.rank :: processes.size]:
            batch = self.shards.read(part.images).to(device)
            draws = rng.uniform(len(part.images), seed=self.seed, stream=rng.Stream.VALIDATION, first=part.position)
            t = ((part.time_bin + draws) / TIME_BINS).to(device)
            x0 = self.shards.latents(batch, seed=self.seed, position=part.position)
            seed = self.seed + NOISE_SEED_OFFSET
            noised = flow.Objective().corrupt(x0, seed=seed, position=part.position, t=t)
            yield ValidationBatch(batch, noised, part.first)

    def gather(
        self,
        parts: Iterable[tuple[ValidationBatch, Tensor]],
        processes: DistContext = ALONE,
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
    """The mean of a metric over all rows and in each time bin; None if there are no validation images."""

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
    processes: DistContext = ALONE,
    told: bool = False,
) -> Summary:
    """Return the error of a velocity field against eps - x0 on validation images (see above), overall and by time.

    `velocity(x, t, condition=...)` is evaluated on `device`; `conditioning` is any of text, pooled, label and
    arguments. With `told`, it also gets `cluster=...`, the cluster of each image.
    """
    validation = ValidationSet(shards, seed, limit)
    if not len(validation):
        return Summary(None)
    errors, times = [], []
    for part in validation.batches(device or torch.device("cpu"), processes):
        x, t = part.noised.input, part.noised.t
        cluster = {"cluster": part.batch.cluster} if told else {}
        output = velocity(x, t, condition=condition_of(part.batch, conditioning), **cluster)
        errors.append((part, velocity_errors(output, part.noised.target, t)))
        times.append((part, t))
    error, t = validation.gather(errors, processes), validation.gather(times, processes)
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
