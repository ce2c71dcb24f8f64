"""Gaussian mixtures with exact flows: the reference that tests compare bridge, ensemble and solvers with.

If x0 is a mixture of K Gaussians in D dimensions, so is z = alpha x0 + sigma eps:

    p(z | k) = N(z; alpha mu_k, alpha² C_k + sigma² I)                                            (1)
    p(k | z) = w_k p(z | k) / sum_j w_j p(z | j)                                                  (2)
    E[x0 | z, k] = mu_k + alpha C_k (alpha² C_k + sigma² I)^-1 (z - alpha mu_k)                   (3)
    E[x0 | z] = sum_k p(k | z) E[x0 | z, k]                                                       (4)

and every prediction follows from (4). The ideal expert of a cluster is the mixture of the components of that cluster;
the ideal router is the posterior (2), summed over the components of each cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.core.names import Prediction
from atoll.flow.predictions import CleanAndNoise, from_pair
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
        """Check shapes and diagonalize the covariances."""
        count, dimension = self.means.shape
        if self.weights.shape != (count,) or self.covariances.shape != (count, dimension, dimension):
            raise ValueError(
                f"expected weights ({count},) and covariances ({count}, {dimension}, {dimension}) for means "
                f"({count}, {dimension}), got {tuple(self.weights.shape)} and {tuple(self.covariances.shape)}"
            )
        if not bool((self.weights > 0).all()):
            raise ValueError(f"weights must be positive, got {self.weights.tolist()}")
        # In the eigenbasis of C_k, the covariance of (1) is diagonal at every noise level, so the inverse in (3) is a
        # division.
        values, vectors = torch.linalg.eigh(self.covariances)
        if not bool((values > 0).all()):
            raise ValueError("covariances must be positive definite")
        object.__setattr__(self, "weights", self.weights / self.weights.sum())
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_vectors", vectors)

    def part(self, components: Sequence[int]) -> "GaussianMixture":
        """Return the mixture of some components, such as those of one cluster."""
        chosen = list(components)
        return GaussianMixture(self.weights[chosen], self.means[chosen], self.covariances[chosen])

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw data of shape (count, D)."""
        which = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        noise = torch.randn(count, self.means.shape[1], generator=generator, dtype=self.means.dtype)
        scaled = self._values[which].sqrt() * noise
        return self.means[which] + torch.einsum("bij,bj->bi", self._vectors[which], scaled)

    def log_density(self, z: Tensor, t: Tensor, schedule: Schedule = LINEAR) -> Tensor:
        """Return log w_k p(z | k) of equation (1), of shape (batch, K); its logsumexp over K is log p_t(z)."""
        c = schedule.at(t, z)
        offsets, variances = self._in_eigenbasis(z, c.alpha, c.sigma)
        constant = self.means.shape[1] * torch.log(torch.tensor(2 * torch.pi, dtype=z.dtype))
        return self.weights.log() - 0.5 * ((offsets**2 / variances + variances.log()).sum(-1) + constant)

    def posterior(self, z: Tensor, t: Tensor, schedule: Schedule = LINEAR) -> Tensor:
        """Return p(k | z) of equation (2), of shape (batch, K)."""
        return self.log_density(z, t, schedule).softmax(-1)

    def x0(self, z: Tensor, t: Tensor, schedule: Schedule = LINEAR) -> Tensor:
        """Return E[x0 | z] of equation (4), of shape (batch, D)."""
        c = schedule.at(t, z)
        offsets, variances = self._in_eigenbasis(z, c.alpha, c.sigma)
        gain = c.alpha.unsqueeze(-1) * self._values / variances
        means = self.means + torch.einsum("kij,bkj->bki", self._vectors, gain * offsets)
        return torch.einsum("bk,bki->bi", self.posterior(z, t, schedule), means)

    def predict(self, z: Tensor, t: Tensor, prediction: Prediction, *, schedule: Schedule = LINEAR) -> Tensor:
        """Return the output of an ideal network with this prediction at noisy z (batch, D)."""
        c = schedule.at(t, z)
        x0 = self.x0(z, t, schedule)
        eps = (z - c.alpha * x0) / c.sigma
        return from_pair(CleanAndNoise(x0, eps), t, prediction, schedule=schedule)

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity of the linear path at x (batch, D)."""
        return self.predict(x, t, "velocity", schedule=LINEAR)

    def _in_eigenbasis(self, z: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Return z - alpha mu_k in the eigenbasis of C_k, and the variances of (1) there: both (batch, K, D)."""
        difference = z.unsqueeze(1) - alpha.unsqueeze(-1) * self.means
        offsets = torch.einsum("kij,bki->bkj", self._vectors, difference)
        return offsets, alpha.unsqueeze(-1) ** 2 * self._values + sigma.unsqueeze(-1) ** 2
