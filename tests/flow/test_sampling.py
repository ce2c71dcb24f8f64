"""Sample a mixture with experts of different objectives, and show that the check can fail."""

import pytest
import torch
from oracles import FLOAT, separated_mixture
from torch import Tensor

from atoll import flow

OBJECTIVES = ["ddpm", "ddpm-linear", "x0", "v-prediction", "flow-matching"]
SAMPLES, STEPS = 20_000, 100


def ensemble(mixture: flow.GaussianMixture, mode: str) -> flow.solvers.VelocityField:
    """Return the velocity of the ideal experts, one objective per cluster, weighted by the ideal router."""
    experts, bridges = [], []
    for k, name in enumerate(OBJECTIVES):
        objective = flow.objective(name)
        experts.append(mixture.part([k]))
        bridges.append(objective.bridge(**({"mode": mode} if objective.prediction == "epsilon" else {})))

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        total, posterior = torch.zeros_like(x), mixture.posterior(x, t)
        for k, (expert, bridge) in enumerate(zip(experts, bridges, strict=True)):
            query = bridge.query(x, t)
            output = expert.predict(query.state, query.time.clamp(1e-6, 1), bridge.prediction, schedule=bridge.schedule)
            total += posterior[:, k : k + 1] * bridge.velocity(output, x, t)
        return total

    return velocity


def check_reproduces(mixture: flow.GaussianMixture, x: Tensor) -> None:
    """Check weights, means and covariances of every cluster within 4.5 standard errors."""
    nearest = torch.cdist(x, mixture.means).argmin(1)
    for k, weight in enumerate(mixture.weights):
        mine = x[nearest == k]
        share_error = (len(mine) / len(x) - weight) / (weight * (1 - weight) / len(x)).sqrt()
        assert abs(share_error) < 4.5, f"weight of cluster {k} is off by {share_error:.1f} standard errors"
        covariance = mixture.covariances[k]
        whitened = torch.linalg.solve_triangular(
            torch.linalg.cholesky(covariance), (mine - mixture.means[k]).T, upper=False
        )
        mean_error = whitened.mean(1) * len(mine) ** 0.5
        assert mean_error.abs().max() < 4.5, f"mean of cluster {k} is off by {mean_error.tolist()} standard errors"
        # Whitened second moments are the identity, with variance 2/n on the diagonal and 1/n off it.
        moments = (torch.cov(whitened) - torch.eye(2, dtype=FLOAT)) * len(mine) ** 0.5
        moment_error = moments / (1 + torch.eye(2, dtype=FLOAT)).sqrt()
        assert moment_error.abs().max() < 4.5, f"covariance of cluster {k} is off by {moment_error.tolist()}"


def sample(mode: str) -> tuple[flow.GaussianMixture, Tensor]:
    mixture = separated_mixture()
    noise = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(8), dtype=FLOAT)
    return mixture, flow.solve(ensemble(mixture, mode), noise, steps=STEPS, solver="heun")


def test_the_check_accepts_true_samples() -> None:
    mixture = separated_mixture()
    check_reproduces(mixture, mixture.sample(SAMPLES, torch.Generator().manual_seed(9)))


def test_mixed_objectives_reproduce_the_mixture_through_the_exact_bridge() -> None:
    check_reproduces(*sample("exact"))


@pytest.mark.parametrize("mode", ["published-linear", "published-schedule"])
def test_neither_reading_of_the_published_conversion_reproduces_it(mode: str) -> None:
    mixture, x = sample(mode)
    with pytest.raises(AssertionError, match="is off by"):
        check_reproduces(mixture, x)
