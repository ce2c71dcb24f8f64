"""Distances between two sets of features, in float64: Frechet distance, KID, precision and recall, diversity.

These are formulas on tensors of features (N, D). `atoll.apps.evaluate.feature_sets` computes the features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.apps.evaluate.results import Coverage, KernelDistance

# Rows of a distance or kernel matrix in memory at once: against 50,000 images, 2048 rows in float64 are 0.8 GB.
_BLOCK = 2048


@dataclass(frozen=True)
class Gaussian:
    """Mean (D,) and a root (R, D) of the covariance of some features: rootᵀ root = covariance."""

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Gaussian":
        """Fit a Gaussian to features (N, D); the root has at most D rows."""
        features = features.double()
        if len(features) < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {len(features)}")
        mean = features.mean(0)
        # The centered features over sqrt(N - 1) are a root of the covariance already. If there are more images than
        # dimensions, the R of their QR decomposition is a smaller one: (QR)ᵀ QR = RᵀR.
        centered = (features - mean) / (len(features) - 1) ** 0.5
        root = torch.linalg.qr(centered, mode="r").R if len(centered) > centered.shape[1] else centered
        return cls(mean, root)

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor) -> "Gaussian":
        """Return the Gaussian of a mean (D,) and a covariance (D, D)."""
        # Rounding can make the smallest eigenvalues of a stored covariance negative.
        values, vectors = torch.linalg.eigh(covariance.double())
        return cls(mean.double(), values.clamp(min=0).sqrt()[:, None] * vectors.T)


def frechet(a: Gaussian, b: Gaussian) -> float:
    """Return |mean_a - mean_b|² + tr(A) + tr(B) - 2 tr (A B)^½.

    With A = RᵀR and B = SᵀS the eigenvalues of AB are the squared singular values of RSᵀ, so the last trace is the
    sum of those: no root of a matrix is taken, nothing turns complex, and rank-deficient covariances lose no digits.
    """
    overlap = torch.linalg.svdvals(a.root @ b.root.T).sum()
    distance = (a.mean - b.mean).square().sum() + a.root.square().sum() + b.root.square().sum() - 2 * overlap
    return max(0.0, float(distance))


def kernel_distance(x: Tensor, y: Tensor, *, subsets: int = 100, size: int = 1000, seed: int = 0) -> KernelDistance:
    """Return the KID of two sets of features. It is unbiased, so it can be negative for similar sets.

    `value` uses every pair; its standard error is the first-order one of a U-statistic. The mean and spread over random
    subsets are the customary way to report KID (100 subsets of 1000 images in most tools). Subsets overlap, so their
    spread is not the error of their mean.
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
    """Return the row sums (len(a),) of the cubic kernel (a·b/D + 1)³, without the whole matrix in memory."""
    return torch.cat([((rows @ b.T) / a.shape[1] + 1).pow(3).sum(1) for rows in torch.split(a, _BLOCK)])


def _mmd(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the unbiased MMD² over all pairs, and its standard error."""
    m, n = len(x), len(y)
    if m < 2 or n < 2:
        raise ValueError(f"KID needs at least 2 images on both sides, got {m} and {n}")
    # MMD² = E k(x, x') + E k(y, y') - 2 E k(x, y). Pairs of an image with itself are left out of the first two, which
    # makes the estimate unbiased. xx, yy, xy and yx hold, for each image, the mean of the kernel over its partners.
    diagonals = [(z.square().sum(1) / z.shape[1] + 1).pow(3) for z in (x, y)]
    xx, yy = (_kernel_sums(x, x) - diagonals[0]) / (m - 1), (_kernel_sums(y, y) - diagonals[1]) / (n - 1)
    xy, yx = _kernel_sums(x, y) / n, _kernel_sums(y, x) / m
    value = xx.mean() + yy.mean() - xy.mean() - yx.mean()
    # The first-order (Hoeffding) term of a U-statistic of degree 2: 4 Var(projection) / N on each side.
    variance = 4 * (xx - xy).var() / m + 4 * (yy - yx).var() / n
    return value.item(), variance.sqrt().item()


def precision_recall(real: Tensor, generated: Tensor, *, neighbors: int = 3) -> Coverage:
    """Return precision, recall, density and coverage of generated against real images.

    The neighborhood of an image is the ball up to its k-th nearest neighbor in its set. Precision is the share of
    generated images inside a real neighborhood, recall the share of real images inside a generated one. All four depend
    on the number of images: compare only values with equal numbers on both sides. k = 3 as in Kynkäänniemi et al.
    """
    real, generated = real.double(), generated.double()
    if min(len(real), len(generated)) <= neighbors:
        counts = f"{len(real)} real and {len(generated)} generated"
        raise ValueError(f"{neighbors} neighbors need more than {neighbors} images on both sides, got {counts}")
    radius_real, radius_generated = _radii(real, neighbors), _radii(generated, neighbors)
    precise, inside, reached = [], 0, torch.zeros(len(real), dtype=torch.bool, device=real.device)
    recalled = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for start in range(0, len(generated), _BLOCK):
        distance = torch.cdist(generated[start : start + _BLOCK], real)  # (block, real)
        in_real = distance <= radius_real
        precise.append(in_real.any(1))
        inside += int(in_real.sum())
        reached |= in_real.any(0)
        recalled |= (distance <= radius_generated[start : start + _BLOCK, None]).any(0)
    return Coverage(
        precision=torch.cat(precise).double().mean().item(),
        recall=recalled.double().mean().item(),
        density=inside / (neighbors * len(generated)),
        coverage=reached.double().mean().item(),
        neighbors=neighbors,
        num_images=len(generated),
    )


def _radii(features: Tensor, neighbors: int) -> Tensor:
    """Return the distance of every image to its k-th nearest neighbor (N,)."""
    # + 1: the nearest of all is the image itself, at distance 0.
    nearest = [torch.cdist(rows, features).kthvalue(neighbors + 1).values for rows in torch.split(features, _BLOCK)]
    return torch.cat(nearest)


def pairwise_mean(distances: Tensor) -> Tensor:
    """Return the mean over the pairs of each distance matrix: (prompts, S, S) to (prompts,)."""
    seeds = distances.shape[-1]
    if seeds < 2:
        raise ValueError("a distance between images of one prompt needs at least 2 seeds")
    return distances.sum((1, 2)) / (seeds * (seeds - 1))
