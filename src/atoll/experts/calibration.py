"""The temperature of `nearest` routing, which makes its probabilities as confident as they are right.

The densities of the clusters are Gaussians, and the clusters are not. So the evidence e_k = log p_t(x | k) +
log p(c | k) is too confident, and nearest routing divides it by a temperature T(t):

    p_t(k | x, c) = softmax over k of (e_k / T(t) + log n_k)

The number of images n_k is known, so it is not divided. The best T minimizes the cross-entropy on validation images of
all clusters, which no island has. But it is a sum over clusters, and the densities are small and public:

    island k     curve_k(T), the mean of -log p_t(k | x, c) over its own validation images, for every T of `GRID`, in
                 ten bins of t; stored in the manifest of its expert
    sampling     T(t) = argmin over T of sum_k n_k curve_k(T), over the experts that are present

Exact densities have T = 1, the minimum of a proper score. Experts without a curve do not vote, and without any T is 1.
An expert that joins compares with the densities that it finds. The curves of the others were measured without it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from atoll.core.manifests import Curve
from atoll.core.sizes import Size
from atoll.data.density import Density
from atoll.experts.validation import TIME_BINS
from atoll.nets import Condition

GRID = 2.0 ** (torch.arange(-4, 17, dtype=torch.float64) / 2)
"""Temperatures from 1/4 to 256. A parabola through the minimum finds values between those of the grid. Evidence is a
sum over the values of a latent; if groups of 256 values were copies, the right temperature would be 256."""
LARGEST = 10.0
"""Largest value of a curve that counts, the cross-entropy of a probability of 0.00005: it bounds the vote of an expert.
"""


def log_posterior(evidence: Tensor, images: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Return log p(k) of the clusters (rows, K) from the evidence (rows, K) and their numbers of images (K,)."""
    return (evidence / temperature + images.double().log()).log_softmax(-1)


@torch.no_grad()
def measure(densities: Sequence[Density], own: int, rows: Iterable[tuple[Tensor, Tensor, Condition]]) -> Curve | None:
    """Return the curve of a cluster from states of its validation images, with their times and conditions."""
    sums, count = torch.zeros(TIME_BINS, len(GRID), dtype=torch.float64), torch.zeros(TIME_BINS, dtype=torch.float64)
    images = torch.stack([density.count for density in densities])
    for x, t, condition in rows:
        size = Size(*x.shape[2:])
        sized = [density.sizes.get(size, density) for density in densities]
        evidence = torch.stack([one.log_density(x, t) - one.count.double().log() for one in sized], 1)
        known = [term for term in (density.log_condition(condition) for density in densities) if term is not None]
        if len(known) == len(densities):
            evidence = evidence + torch.stack(known, 1)
        columns = [-log_posterior(evidence, images, float(one))[:, own] for one in GRID]
        bins = (t * TIME_BINS).long().clamp(max=TIME_BINS - 1)
        sums.index_add_(0, bins, torch.stack(columns, 1))
        count += torch.bincount(bins, minlength=TIME_BINS)
    if not bool(count.all()):
        return None
    return tuple(tuple(round(value, 6) for value in row) for row in (sums / count[:, None]).tolist())


def temperatures(curves: Sequence[Curve | None], images: Sequence[float]) -> Tensor | None:
    """Return the temperature of each bin (TIME_BINS,) from the curves of the present experts; None without any."""
    votes = [
        weight * torch.tensor(curve, dtype=torch.float64).clamp(0, LARGEST)
        for curve, weight in zip(curves, images, strict=True)
        if curve is not None
    ]
    if not votes:
        return None
    total = torch.stack(votes).sum(0)
    best = total.argmin(1).clamp(1, len(GRID) - 2)
    # The vertex of the parabola through the minimum and its neighbors, at equal distances in log T.
    left, middle, right = (total.gather(1, (best + step)[:, None])[:, 0] for step in (-1, 0, 1))
    bend = (left - 2 * middle + right).clamp(min=1e-12)
    offset = (0.5 * (left - right) / bend).clamp(-1, 1)
    ratio = GRID[1] / GRID[0]
    return GRID[best] * ratio**offset


def temperature_at(found: Tensor, t: Tensor) -> Tensor:
    """Return the temperatures (batch,) at times t (batch,): log T is linear between the centers of the bins."""
    position = (t.double() * TIME_BINS - 0.5).clamp(0, TIME_BINS - 1)
    low = position.long().clamp(max=TIME_BINS - 2)
    return torch.lerp(found.log()[low], found.log()[low + 1], position - low).exp()
