"""Gaussian mixtures with known flows: the exact answers that bridge, ensemble and solvers are measured against.

If x0 is a mixture of Gaussians, so is z = alpha x0 + sigma eps, and the posterior of its component, E[x0|z] and every
prediction follow in closed form. An ideal expert of a cluster is the mixture of that cluster's components alone; an
ideal router is the posterior of the cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.core.names import Prediction
from atoll.flow.predictions import Pair, from_pair
from atoll.flow.schedules import LINEAR, Schedule


@dataclass(frozen=True, eq=False)
class GaussianMixture:
    """Weights (K,), means (K, D) and covariances (K, D, D) of a mixture of data, in the dtype of the means."""

    weights: Tensor
    means: Tensor
    covariances: Tensor
    _values: Tensor = field(init=False, repr=False)
    _vectors: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check shapes and diagonalise the covariances, which makes every noise level a scaling."""
        count, dimension = self.means.shape
        if self.weights.shape != (count,) or self.covariances.shape != (count, dimension, dimension):
            raise ValueError(
                f"expected weights ({count},) and covariances ({count}, {dimension}, {dimension}) for means "
                f"({count}, {dimension}), got {tuple(self.weights.shape)} and {tuple(self.covariances.shape)}"
            )
        if not bool((self.weights > 0).all()):
            raise ValueError(f"weights must be positive, got {self.weights.tolist()}")
        values, vectors = torch.linalg.eigh(self.covariances)
        if not bool((values > 0).all()):
            raise ValueError("covariances must be positive definite")
        object.__setattr__(self, "weights", self.weights / self.weights.sum())
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_vectors", vectors)

    def part(self, components: Sequence[int]) -> "GaussianMixture":
        """The mixture of some components alone: the data of one cluster."""
        chosen = list(components)
        return GaussianMixture(self.weights[chosen], self.means[chosen], self.covariances[chosen])

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw data."""
        which = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        noise = torch.randn(count, self.means.shape[1], generator=generator, dtype=self.means.dtype)
        scaled = self._values[which].sqrt() * noise
        return self.means[which] + torch.einsum("bij,bj->bi", self._vectors[which], scaled)

    def log_density(self, z: Tensor, t: Tensor, schedule: Schedule = LINEAR) -> Tensor:
        """Log-density of each component at noisy z, weights included: shape (batch, K); its logsumexp is log p_t(z)."""
        c = schedule.at(t, z)
        offsets, variances = self._in_eigenbasis(z, c.alpha, c.sigma)
        constant = self.means.shape[1] * torch.log(torch.tensor(2 * torch.pi, dtype=z.dtype))
        return self.weights.log() - 0.5 * ((offsets**2 / variances + variances.log()).sum(-1) + constant)

    def posterior(self, z: Tensor, t: Tensor, schedule: Schedule = LINEAR) -> Tensor:
        """Probability of each component given noisy z: shape (batch, K)."""
        return self.log_density(z, t, schedule).softmax(-1)

    def x0(self, z: Tensor, t: Tensor, schedule: Schedule = LINEAR) -> Tensor:
        """E[x0 | z]."""
        c = schedule.at(t, z)
        offsets, variances = self._in_eigenbasis(z, c.alpha, c.sigma)
        gain = c.alpha.unsqueeze(-1) * self._values / variances
        means = self.means + torch.einsum("kij,bkj->bki", self._vectors, gain * offsets)
        return torch.einsum("bk,bki->bi", self.posterior(z, t, schedule), means)

    def predict(self, z: Tensor, t: Tensor, prediction: Prediction, *, schedule: Schedule = LINEAR) -> Tensor:
        """What an ideal network of that prediction answers at noisy z."""
        c = schedule.at(t, z)
        x0 = self.x0(z, t, schedule)
        eps = (z - c.alpha * x0) / c.sigma
        return from_pair(Pair(x0, eps), t, prediction, schedule=schedule)

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """The flow on the linear path."""
        return self.predict(x, t, "velocity", schedule=LINEAR)

    def _in_eigenbasis(self, z: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """z minus each component's mean, along its axes, and the variances there: both (batch, K, D)."""
        difference = z.unsqueeze(1) - alpha.unsqueeze(-1) * self.means
        offsets = torch.einsum("kij,bki->bkj", self._vectors, difference)
        return offsets, alpha.unsqueeze(-1) ** 2 * self._values + sigma.unsqueeze(-1) ** 2
