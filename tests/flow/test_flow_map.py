"""Targets of few-step students against the closed-form flow of a Gaussian."""

import numpy
import pytest
import torch
from torch import Tensor, nn

from atoll import flow
from atoll.flow.flow_map import correction, step_targets

MEAN, STD = torch.tensor([1.5, -1.0], dtype=torch.float64), 0.5
GAUSSIAN = flow.GaussianMixture(
    torch.ones(1, dtype=torch.float64), MEAN[None], STD**2 * torch.eye(2, dtype=torch.float64)[None]
)


def moved(x: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """The flow of N(m, s² I) keeps the number of standard deviations from the mean, which are (1-t) m and sigma_t."""
    t, s = t[:, None], s[:, None]
    sigma_t, sigma_s = (((1 - time) * STD).square().add(time.square()).sqrt() for time in (t, s))
    return (1 - s) * MEAN + sigma_s / sigma_t * (x - (1 - t) * MEAN)


def exact(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
    d = d.clamp(min=1e-6)
    return (x - moved(x, t, t - d)) / d[:, None]


def states(steps: int, count: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    """States on trajectories at the times of the steps, and lengths up to 1/steps."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    t = 1 - (torch.arange(count, dtype=torch.float64) % steps) / steps
    d = torch.rand(count, generator=generator, dtype=torch.float64) / steps
    return moved(noise, torch.ones_like(t), t), t, d


def test_the_closed_form_is_the_flow_of_the_velocity() -> None:
    x, _, _ = states(1)
    end = flow.solve(GAUSSIAN.velocity, x, steps=600, solver="heun")
    torch.testing.assert_close(end, moved(x, torch.ones(len(x)), torch.zeros(len(x))), atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_exact_average_velocity_has_no_loss(steps: int) -> None:
    x, t, d = states(steps)
    target = step_targets(GAUSSIAN.velocity, exact, x, t, d, longest=1 / steps)
    average = exact(x, t, d)
    # The error of the difference: second order inside, first order within 0.005 of the ends.
    assert (target - average).abs().max() < 1e-3 < average.abs().max()
    inside = (d > 0.005) & (d < 1 / steps - 0.005)
    torch.testing.assert_close(target[inside], average[inside], atol=1e-4, rtol=0)


def test_another_average_velocity_has_a_loss() -> None:
    """The velocity at the start, which is one Euler step; and the exact one of the wrong length."""
    x, t, d = states(1)

    def euler(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
        return GAUSSIAN.velocity(x, t)

    for wrong in (euler, lambda x, t, d: exact(x, t, 1 - d)):
        target = step_targets(GAUSSIAN.velocity, wrong, x, t, d, longest=1.0)
        assert (target - wrong(x, t, d)).square().mean() > 0.05


def test_the_derivative_is_that_of_autograd() -> None:
    """With a curved network and a curved velocity: v(f, t - d) - d dF/dd with a forward-mode derivative."""
    x, t, d = states(2)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).double()

    def average(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
        output: Tensor = network(torch.cat([x, t[:, None], d[:, None]], 1))
        return output

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return torch.sin(3 * x) + t[:, None]

    with torch.no_grad():
        found = step_targets(velocity, average, x, t, d, longest=1.0)
    value, derivative = torch.func.jvp(lambda d: average(x, t, d), (d,), (torch.ones_like(d),))
    expected = velocity(x - d[:, None] * value, t - d) - d[:, None] * derivative
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_student_of_a_gaussian_cluster_is_near_the_exact_map(steps: int) -> None:
    """A small network that learns from noise alone; one Euler step of its teacher is 0.5 away, the student 0.05.

    Distances are root mean squares over the coordinates; the data has a standard deviation of 0.5.
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    def average(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
        output: Tensor = network(torch.cat([x, t[:, None], d[:, None]], 1))
        return output

    def sample(x: Tensor, until: int) -> Tensor:
        for step in range(until):
            t, d = torch.full((2, len(x)), 1.0).double()
            x = x - average(x, t - step / steps, d / steps) / steps
        return x

    generator = torch.Generator().manual_seed(0)
    for iteration in range(1000):
        noise = torch.randn(128, 2, generator=generator).double()
        d = (1 - torch.rand(128, generator=generator).double()) / steps
        t = torch.full((128,), 1 - iteration % steps / steps).double()
        with torch.no_grad():
            x = sample(noise, iteration % steps)
            target = step_targets(GAUSSIAN.velocity, average, x, t, d, longest=1 / steps)
        optimizer.zero_grad()
        (average(x, t, d) - target).square().mean().backward()
        optimizer.step()
        schedule.step()
    noise = torch.randn(2000, 2, generator=generator).double()
    end = moved(noise, torch.ones(2000), torch.zeros(2000))
    with torch.no_grad():
        distance = (sample(noise, steps) - end).square().mean().sqrt()
    euler = flow.solve(GAUSSIAN.velocity, noise, steps=1)
    assert (euler - end).square().mean().sqrt() > 0.4
    assert distance < 0.05


def velocity_of(mean: Tensor, std: Tensor) -> flow.solvers.VelocityField:
    """The marginal velocity of samples N(mean, std² I), whose noised states are N((1-r) mean, sigma_r²)."""

    def velocity(x: Tensor, r: Tensor) -> Tensor:
        r = r[:, None]
        variance = ((1 - r) * std).square() + r.square()
        return -mean + (r - (1 - r) * std.square()) / variance * (x - (1 - r) * mean)

    return velocity


def divergence(mean: Tensor, std: Tensor, r: float) -> Tensor:
    """The Kullback-Leibler divergence of noised samples N(mean, std² I) from noised data."""
    own, other = (((1 - r) ** 2 * one**2 + r**2) for one in (std, torch.tensor(STD)))
    distance = ((1 - r) * (mean - MEAN)).square().sum()
    return 0.5 * (2 * own / other + distance / other - 2 - 2 * (own / other).log())


def quadrature() -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of noise (z, n) in two dimensions, with weights that integrate polynomials of degree 5 exactly."""
    points, weights = (torch.tensor(part) for part in numpy.polynomial.hermite_e.hermegauss(3))
    grid = torch.cartesian_prod(points, points, points, points)
    every = torch.cartesian_prod(*[weights / weights.sum()] * 4).prod(1)
    return grid[:, :2], grid[:, 2:], every


@pytest.mark.parametrize("r", [0.2, 0.5, 0.8])
def test_the_correction_is_the_gradient_of_the_divergence(r: float) -> None:
    """A student x0 = z - F = mean + std z: E[F · difference] (1-r)²/r against central differences of the divergence."""
    z, noise, weights = quadrature()
    mean, std = torch.tensor([1.1, -0.4]).double().requires_grad_(), torch.tensor(0.7).double().requires_grad_()
    average = z - (mean + std * z)
    sample, times = (z - average).detach(), torch.full((len(z),), r).double()
    difference, _ = correction(GAUSSIAN.velocity, velocity_of(mean.detach(), std.detach()), sample, times, noise)
    (weights * (average * difference).sum(1)).sum().mul((1 - r) ** 2 / r).backward()
    assert mean.grad is not None
    assert std.grad is not None
    with torch.no_grad():
        for number, step in enumerate(1e-4 * torch.eye(2).double()):
            slope = (divergence(mean + step, std, r) - divergence(mean - step, std, r)) / 2e-4
            torch.testing.assert_close(mean.grad[number], slope, atol=1e-9, rtol=1e-5)
        slope = (divergence(mean, std + 1e-4, r) - divergence(mean, std - 1e-4, r)) / 2e-4
        torch.testing.assert_close(std.grad, slope, atol=1e-9, rtol=1e-5)
        assert slope.abs() > 1e-3


def test_an_exact_student_is_not_corrected() -> None:
    z, noise, weights = quadrature()
    sample, r = moved(z, torch.ones(len(z)).double(), torch.zeros(len(z)).double()), torch.full((len(z),), 0.7).double()
    exact = velocity_of(MEAN, torch.tensor(STD).double())
    difference, loss = correction(GAUSSIAN.velocity, exact, sample, r, noise)
    torch.testing.assert_close(difference, torch.zeros_like(difference), atol=1e-9, rtol=0)
    # The marginal velocity has the smallest loss, which is not 0: noise and sample are not known from their mixture.
    worse = correction(GAUSSIAN.velocity, lambda x, r: exact(x, r) + 0.1, sample, r, noise)[1]
    torch.testing.assert_close((weights * (worse - loss)).sum(), torch.tensor(0.01).double(), atol=1e-9, rtol=0)
    assert (weights * loss).sum() > 0.1
