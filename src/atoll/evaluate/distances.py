"""Distances between two sets of features, in float64: Frechet distance, KID, precision and recall, diversity.

Everything here is a formula on tensors of features (samples, dimensions); where the features come from is told
elsewhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.evaluate.results import Coverage, KernelDistance

_BLOCK = 2048


@dataclass(frozen=True)
class Gaussian:
    """Mean (D,) and a root (R, D) of the covariance of some features: rootᵀ root = covariance."""

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Gaussian":
        """Fit to features (N, D); the root has at most D rows."""
        features = features.double()
        if len(features) < 2:
            raise ValueError(f"a covariance needs at least 2 samples, got {len(features)}")
        mean = features.mean(0)
        centred = (features - mean) / (len(features) - 1) ** 0.5
        root = torch.linalg.qr(centred, mode="r").R if len(centred) > centred.shape[1] else centred
        return cls(mean, root)


def frechet(a: Gaussian, b: Gaussian) -> float:
    """|mean_a - mean_b|² + tr(A) + tr(B) - 2 tr (A B)^½.

    With A = RᵀR and B = SᵀS the eigenvalues of AB are the squared singular values of RSᵀ, so the last trace is the
    sum of those: no root of a matrix is taken, nothing turns complex, and rank-deficient covariances lose no digits.
    """
    overlap = torch.linalg.svdvals(a.root @ b.root.T).sum()
    distance = (a.mean - b.mean).square().sum() + a.root.square().sum() + b.root.square().sum() - 2 * overlap
    return max(0.0, float(distance))


def kernel_distance(x: Tensor, y: Tensor, *, subsets: int = 100, size: int = 1000, seed: int = 0) -> KernelDistance:
    """KID of two sets of features: unbiased, so it may be below 0 for sets that are alike.

    `value` uses every pair; its standard error is the first-order one of a U-statistic. The mean and spread over random
    subsets are the customary way to report KID; subsets overlap, so their spread is no error of their mean.
    """
    x, y = x.double(), y.double()
    value, error = _mmd(x, y)
    size = min(size, len(x), len(y))
    generator = torch.Generator().manual_seed(seed)
    if size == min(len(x), len(y)):
        subsets = 1
    draws = []
    for _ in range(subsets):
        rows = torch.randperm(len(x), generator=generator)[:size], torch.randperm(len(y), generator=generator)[:size]
        draws.append(_mmd(x[rows[0]], y[rows[1]])[0])
    spread = torch.tensor(draws, dtype=torch.float64)
    return KernelDistance(
        value=value,
        standard_error=error,
        subsets=subsets,
        subset_size=size,
        subset_mean=spread.mean().item(),
        subset_std=spread.std(correction=0).item(),
    )


def _kernel_sums(a: Tensor, b: Tensor) -> Tensor:
    """Row sums of the cubic kernel (a·b/D + 1)³, without ever holding the whole matrix."""
    return torch.cat([((rows @ b.T) / a.shape[1] + 1).pow(3).sum(1) for rows in torch.split(a, _BLOCK)])


def _mmd(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Unbiased MMD² over all pairs, and its standard error from the means over partners of each sample."""
    m, n = len(x), len(y)
    if m < 2 or n < 2:
        raise ValueError(f"KID needs at least 2 samples on both sides, got {m} and {n}")
    own = [(z.square().sum(1) / z.shape[1] + 1).pow(3) for z in (x, y)]
    xx, yy = (_kernel_sums(x, x) - own[0]) / (m - 1), (_kernel_sums(y, y) - own[1]) / (n - 1)
    xy, yx = _kernel_sums(x, y) / n, _kernel_sums(y, x) / m
    value = xx.mean() + yy.mean() - xy.mean() - yx.mean()
    variance = 4 * (xx - xy).var() / m + 4 * (yy - yx).var() / n
    return value.item(), variance.sqrt().item()


def precision_recall(real: Tensor, made: Tensor, *, neighbours: int = 3) -> Coverage:
    """How much of the made set lies in the real one's neighbourhoods, and the other way.

    A sample's neighbourhood is the ball to its k-th nearest neighbour in its own set. All four depend on the number of
    samples: compare only figures of equal numbers on both sides.
    """
    real, made = real.double(), made.double()
    if min(len(real), len(made)) <= neighbours:
        raise ValueError(f"{neighbours} neighbours need more than that many samples, got {len(real)} and {len(made)}")
    radius_real, radius_made = _radii(real, neighbours), _radii(made, neighbours)
    precise, inside, reached = [], 0, torch.zeros(len(real), dtype=torch.bool, device=real.device)
    recalled = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for start in range(0, len(made), _BLOCK):
        distance = torch.cdist(made[start : start + _BLOCK], real)
        in_real = distance <= radius_real
        precise.append(in_real.any(1))
        inside += int(in_real.sum())
        reached |= in_real.any(0)
        recalled |= (distance <= radius_made[start : start + _BLOCK, None]).any(0)
    return Coverage(
        precision=torch.cat(precise).double().mean().item(),
        recall=recalled.double().mean().item(),
        density=inside / (neighbours * len(made)),
        coverage=reached.double().mean().item(),
        neighbours=neighbours,
    )


def _radii(features: Tensor, neighbours: int) -> Tensor:
    """Distance of every sample to its k-th nearest neighbour; its distance to itself is the nearest and not counted."""
    nearest = [torch.cdist(rows, features).kthvalue(neighbours + 1).values for rows in torch.split(features, _BLOCK)]
    return torch.cat(nearest)


def pairwise_mean(distances: Tensor) -> Tensor:
    """Mean over the pairs of each item's distance matrix: (items, S, S) to (items,)."""
    seeds = distances.shape[-1]
    if seeds < 2:
        raise ValueError("a distance between samples of one prompt needs at least 2 seeds")
    return distances.sum((1, 2)) / (seeds * (seeds - 1))
