"""Compare the routing strategies on data with a known density.

    python examples/routing.py [--num-samples 4000] [--steps 100]

The data is a Gaussian mixture of five overlapping clusters in the plane. Experts and router are exact, so every error
comes from the strategy. The experts have five different objectives. The table gives the energy distance between samples
and data (0 if they are equal; the row "data" is the data-vs-data baseline), the largest error of a cluster's share, the
variance of the samples over that of the data, the mean squared error of the velocity at noisy data, and the mean number
of experts that run per sample and step.
"""

import argparse

import torch
from ideal_ensemble import ideal_ensemble
from rich.console import Console
from rich.table import Table
from torch import Tensor

from atoll import flow
from atoll.ensemble import RoutingState
from atoll.flow import rng

OBJECTIVES = ["ddpm", "ddpm-linear", "x0", "v-prediction", "flow-matching"]
STRATEGIES = [
    *("full", "top-1", "top-2", "top-3", "threshold-0.2", "nucleus-0.9", "drawn", "once", "sample-1"),
    *("oracle", "nearest", "nearest:full", "nearest:drawn", "full@0.5,top-1", "top-2@0.6,top-1"),
]


def data() -> flow.GaussianMixture:
    """Return a mixture of five clusters around a circle, close enough to overlap."""
    angles = 2 * torch.pi * torch.arange(5, dtype=torch.float64) / 5
    means = 1.2 * torch.stack([angles.cos(), angles.sin()], 1)
    roots = torch.stack([torch.tensor([[0.45, 0.0], [0.2 * k - 0.4, 0.3 + 0.05 * k]]).double() for k in range(5)])
    return flow.GaussianMixture(torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).double(), means, roots @ roots.mT)


def energy_distance(x: Tensor, y: Tensor) -> float:
    """Return the root of 2 E|x-y| - E|x-x'| - E|y-y'|."""
    half = min(len(x), len(y)) // 2

    def mean(a: Tensor, b: Tensor) -> float:
        return sum(torch.cdist(part, b).sum().item() for part in a.split(1000)) / (len(a) * len(b))

    square = 2 * mean(x, y) - mean(x[:half], x[half:]) - mean(y[:half], y[half:])
    return max(square, 0.0) ** 0.5


def shares(mixture: flow.GaussianMixture, x: Tensor) -> Tensor:
    """Return the posterior share of every cluster among clean samples."""
    return mixture.posterior(x, torch.full((len(x),), 1e-3, dtype=x.dtype)).mean(0)


def sample(mixture: flow.GaussianMixture, routing: str, count: int, steps: int) -> tuple[Tensor, float]:
    """Return samples, and the mean number of experts that ran per sample and step."""
    ensemble = ideal_ensemble(mixture, [[k] for k in range(5)], OBJECTIVES)
    clusters = torch.multinomial(mixture.weights, count, replacement=True, generator=torch.Generator().manual_seed(3))
    noise = rng.normal((count, 2), seed=0, stream=0, first=0)
    state = RoutingState(trace=[])
    x = flow.solve(
        lambda x, t: ensemble.velocity(x, t[:1], routing=routing, cluster=clusters, state=state),
        noise.view(count, 2, 1, 1),
        steps=steps,
    )
    experts = [decision.weights.gt(0).sum(1).double().mean().item() for decision in state.trace or []]
    return x.flatten(1).double(), sum(experts) / len(experts)


def velocity_error(mixture: flow.GaussianMixture, routing: str, count: int = 4000) -> float:
    """Return the mean squared error of the velocity at noisy data of all times."""
    ensemble = ideal_ensemble(mixture, [[k] for k in range(5)], OBJECTIVES)
    generator = torch.Generator().manual_seed(5)
    which = torch.multinomial(mixture.weights, count, replacement=True, generator=generator)
    x0 = torch.cat([mixture.part([int(k)]).sample(1, generator) for k in which])
    t = torch.rand(count, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    x = (1 - t[:, None]) * x0 + t[:, None] * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    draw = torch.rand(count, generator=generator)
    velocity = ensemble.velocity(x.float().view(-1, 2, 1, 1), t.float(), routing=routing, cluster=which, draw=draw)
    return (velocity.flatten(1).double() - mixture.velocity(x, t)).square().sum(1).mean().item()


def main() -> None:
    """Sample with every strategy and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=4000, help="samples per strategy")
    parser.add_argument("--steps", type=int, default=100, help="number of Euler steps")
    options = parser.parse_args()
    mixture = data()
    reference = mixture.sample(options.num_samples, torch.Generator().manual_seed(1))
    expected = shares(mixture, reference)
    spread = reference.var(0).sum()
    title = f"{options.num_samples} samples, {options.steps} Euler steps"
    table = Table("routing", "energy distance", "share error", "variance", "velocity error", "experts", title=title)
    other = mixture.sample(options.num_samples, torch.Generator().manual_seed(2))
    rows = {"data": (other, 0.0, 0.0)}
    for routing in STRATEGIES:
        rows[routing] = (
            *sample(mixture, routing, options.num_samples, options.steps),
            velocity_error(mixture, routing),
        )
    for name, (x, experts, error) in rows.items():
        share_error = (shares(mixture, x) - expected).abs().max().item()
        metrics = (energy_distance(x, reference), share_error, (x.var(0).sum() / spread).item(), error)
        table.add_row(name, *(f"{value:.3f}" for value in metrics), f"{experts:.2f}" if experts else "")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
