"""Few Euler steps through the exact velocity of a ring of eight Gaussians: the mixture, and one expert for each image.

A step from t = 1 ends at the mean of what the velocity knows: that of all data through the mixture, that of a cluster
through its expert. So the flow of a cluster needs fewer steps.
"""

import pytest
import torch
from ideal_ensemble import ideal_ensemble
from torch import Tensor

from atoll import flow
from atoll.ensemble import RoutingState

RADIUS, STD, COUNT = 1.93, 0.25, 2000
ANGLES = 2 * torch.pi * torch.arange(8, dtype=torch.float64) / 8
MEANS = RADIUS * torch.stack([ANGLES.cos(), ANGLES.sin()], 1)
RING = flow.GaussianMixture(torch.ones(8).double(), MEANS, STD**2 * torch.eye(2).double().expand(8, 2, 2))


def noise() -> Tensor:
    return torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(0))


def sample(routing: str, steps: int) -> tuple[Tensor, Tensor]:
    """Return samples (COUNT, 2), and the expert with the largest weight at the last step."""
    ensemble, state = ideal_ensemble(RING, [[k] for k in range(8)]), RoutingState(trace=[])
    x = flow.solve(
        lambda x, t: ensemble.velocity(x, t[:1], routing=routing, state=state), noise()[..., None, None], steps=steps
    )
    assert state.trace is not None
    return x.flatten(1).double(), state.trace[-1].weights.argmax(1)


def sliced_wasserstein(x: Tensor, y: Tensor) -> float:
    """Return the root of the mean over 64 directions of the squared Wasserstein-2 distance of the projections."""
    angles = torch.pi * torch.arange(64, dtype=torch.float64) / 64
    directions = torch.stack([angles.cos(), angles.sin()])
    return ((x @ directions).sort(0).values - (y @ directions).sort(0).values).square().mean().sqrt().item()


@pytest.mark.parametrize("steps", [1, 2, 4, 25])
def test_a_drawn_expert_is_an_affine_map_of_its_noise(steps: int) -> None:
    x, expert = sample("drawn", steps)
    # The deviation y of N((1 - t) mu, sigma²) with sigma² = (1 - t)² s² + t² has the velocity (sigma²)'/2 y / sigma².
    scale = 1.0
    for step in range(steps):
        t = 1 - step / steps
        scale *= 1 - (t - (1 - t) * STD**2) / ((1 - t) ** 2 * STD**2 + t**2) / steps
    torch.testing.assert_close(x, MEANS[expert] + scale * noise(), atol=1e-4, rtol=0)
    assert (torch.bincount(expert, minlength=8) / COUNT - 1 / 8).abs().max() < 4 * (7 / 64 / COUNT) ** 0.5
    if steps == 1:
        assert scale == 0


def test_one_step_through_the_mixture_ends_at_the_mean_of_the_data() -> None:
    x, _ = sample("full", 1)
    torch.testing.assert_close(x, torch.zeros_like(x), atol=1e-4, rtol=0)
    data = RING.sample(COUNT, torch.Generator().manual_seed(1))
    # The projections of data with covariance C have the mean square tr C / 2, here r²/2 + s².
    assert sliced_wasserstein(x, data) == pytest.approx((RADIUS**2 / 2 + STD**2) ** 0.5, rel=0.02)


def test_few_steps_through_one_expert_are_nearer_to_the_data_than_through_the_mixture() -> None:
    real, other = (RING.sample(COUNT, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    error = sliced_wasserstein(real, other)
    # Steps: distances to the data through the mixture and through a drawn expert, computed independently for eight
    # clusters. Radius and width of the ring are chosen to match its first row, so the others are the test.
    independent = {1: (1.389, 0.219), 2: (0.480, 0.152), 4: (0.184, 0.100), 25: (0.055, 0.049)}
    for steps, expected in independent.items():
        found = [sliced_wasserstein(sample(routing, steps)[0], real) for routing in ("full", "drawn")]
        assert found == pytest.approx(expected, abs=error)
        assert steps == 25 or found[1] < found[0] - error
