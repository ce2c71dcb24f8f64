"""Exact solutions, written independently of the package, as references for the mathematics."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from atoll.flow import GaussianMixture
from atoll.flow.schedules import Coefficients

FLOAT = torch.float64


def random_mixture(seed: int = 0, components: int = 6, dimension: int = 3, spread: float = 2.0) -> GaussianMixture:
    """Return a mixture with unequal weights and full covariances, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(components, generator=generator, dtype=FLOAT) + 0.2
    means = spread * torch.randn(components, dimension, generator=generator, dtype=FLOAT)
    roots = 0.4 * torch.randn(components, dimension, dimension, generator=generator, dtype=FLOAT)
    return GaussianMixture(weights, means, roots @ roots.mT + 0.05 * torch.eye(dimension, dtype=FLOAT))


def separated_mixture() -> GaussianMixture:
    """Return five well-separated clusters in the plane, so that the cluster of every sample is unambiguous."""
    angles = 2 * torch.pi * torch.arange(5, dtype=FLOAT) / 5
    means = 2.5 * torch.stack([angles.cos(), angles.sin()], 1)
    roots = torch.stack([torch.tensor([[0.30, 0.0], [0.1 * k - 0.2, 0.2 + 0.05 * k]], dtype=FLOAT) for k in range(5)])
    return GaussianMixture(torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1], dtype=FLOAT), means, roots @ roots.mT)


def noisy_distribution(mixture: GaussianMixture, alpha: float, sigma: float) -> MixtureSameFamily:
    """Return the distribution of alpha x0 + sigma eps, with the distributions of torch."""
    identity = torch.eye(mixture.means.shape[1], dtype=FLOAT)
    covariances = alpha**2 * mixture.covariances + sigma**2 * identity
    return MixtureSameFamily(Categorical(mixture.weights), MultivariateNormal(alpha * mixture.means, covariances))


def score_by_autograd(mixture: GaussianMixture, z: Tensor, alpha: float, sigma: float) -> Tensor:
    """Return the gradient of the log-density at z (batch, D)."""
    z = z.clone().requires_grad_(True)
    log_density = noisy_distribution(mixture, alpha, sigma).log_prob(z).sum()
    return torch.autograd.grad(log_density, z)[0]


def dataset_flow(x: Tensor, data: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Return the marginal velocity and the weight of every data point for a finite dataset on the linear path (DDM)."""
    weights = torch.softmax(-((x[:, None] - (1 - t) * data) ** 2).sum(-1) / (2 * t**2), dim=1)
    return (x - weights @ data) / t, weights


@dataclass(frozen=True)
class ScaledGaussian:
    """Data (batch, channels, …) distributed as N(mean, std²) in each channel, with a closed form for ideal networks.

    With z = alpha x0 + sigma eps, E[x0|z] = m + alpha s² (z - alpha m) / (alpha² s² + sigma²).
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def wide(values: tuple[float, ...]) -> Tensor:
        """Return one number per channel, shaped to multiply (batch, channels, height, width)."""
        return torch.tensor(values, dtype=FLOAT)[:, None, None]

    def clean(self, z: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return E[x0|z]."""
        mean, variance = self.wide(self.mean), self.wide(self.std) ** 2
        return mean + alpha * variance * (z - alpha * mean) / (alpha**2 * variance + sigma**2)

    def predict(self, z: Tensor, c: Coefficients, prediction: str) -> Tensor:
        """Return the output of an ideal network: the expectation of its target given z."""
        mean, variance = self.wide(self.mean), self.wide(self.std) ** 2
        x0 = self.clean(z, c.alpha, c.sigma)
        eps = c.sigma * (z - c.alpha * mean) / (c.alpha**2 * variance + c.sigma**2)
        return {
            "epsilon": eps,
            "x0": x0,
            "v_prediction": c.alpha * eps - c.sigma * x0,
            "velocity": c.d_alpha * x0 + c.d_sigma * eps,
            "score": -(z - c.alpha * mean) / (c.alpha**2 * variance + c.sigma**2),
        }[prediction]

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Return E[eps - x0 | x] on the linear path."""
        t = t[:, None, None, None]
        return (x - self.clean(x, 1 - t, t)) / t
