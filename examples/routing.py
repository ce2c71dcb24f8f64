"""What each routing strategy does to the distribution of samples, where the right answer is known.

    python examples/routing.py [--count 4000] [--steps 100]

The data is a Gaussian mixture of five overlapping clusters in the plane; experts and router are ideal, so whatever is
wrong is the strategy's doing. Experts have five different objectives. The table gives the energy distance between
samples and data (0 if they are alike; "data" against other data is the floor of the measurement), the largest error of
a cluster's share, the variance of the samples over that of the data, the mean squared error of the velocity at noisy
data, and how many experts run for a sample at each step.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from atoll import flow
from atoll.ensemble import RoutingState
from atoll.ensemble.analytic import ideal_ensemble
from atoll.flow import rng

OBJECTIVES = ["ddpm", "ddpm-linear", "x0", "v-prediction", "flow-matching"]
STRATEGIES = [
    *("full", "top-1", "top-2", "top-3", "threshold-0.2", "nucleus-0.9", "drawn", "sample-1"),
    *("oracle", "nearest", "nearest:full", "nearest:drawn", "full@0.5,top-1", "top-2@0.6,top-1"),
]


def data() -> flow.GaussianMixture:
    """Five clusters around a circle, close enough to overlap."""
    angles = 2 * torch.pi * torch.arange(5, dtype=torch.float64) / 5
    means = 1.2 * torch.stack([angles.cos(), angles.sin()], 1)
    roots = torch.stack([torch.tensor([[0.45, 0.0], [0.2 * k - 0.4, 0.3 + 0.05 * k]]).double() for k in range(5)])
    return flow.GaussianMixture(torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).double(), means, roots @ roots.mT)


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|x-y| - E|x-x'| - E|y-y'|, its root."""
    half = min(len(x), len(y)) // 2

    def mean(a: Tensor, b: Tensor) -> float:
        return sum(torch.cdist(part, b).sum().item() for part in a.split(1000)) / (len(a) * len(b))

    square = 2 * mean(x, y) - mean(x[:half], x[half:]) - mean(y[:half], y[half:])
    return max(square, 0.0) ** 0.5


def shares(mixture: flow.GaussianMixture, x: Tensor) -> Tensor:
    """Posterior share of every cluster among clean samples."""
    return mixture.posterior(x, torch.full((len(x),), 1e-3, dtype=x.dtype)).mean(0)


def sample(mixture: flow.GaussianMixture, routing: str, count: int, steps: int) -> tuple[Tensor, float]:
    """Samples, and the mean number of experts that ran for one at each step."""
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
    """Mean squared error of the velocity at noisy data of all times."""
    ensemble = ideal_ensemble(mixture, [[k] for k in range(5)], OBJECTIVES)
    generator = torch.Generator().manual_seed(5)
    which = torch.multinomial(mixture.weights, count, replacement=True, generator=generator)
    x0 = torch.cat([mixture.part([int(k)]).sample(1, generator) for k in which])
    t = torch.rand(count, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    x = (1 - t[:, None]) * x0 + t[:, None] * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    draw = torch.rand(count, generator=generator)
    answer = ensemble.velocity(x.float().view(-1, 2, 1, 1), t.float(), routing=routing, cluster=which, draw=draw)
    return (answer.flatten(1).double() - mixture.velocity(x, t)).square().sum(1).mean().item()


def main() -> None:
    """Sample with every strategy and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=4000, help="samples of each strategy")
    parser.add_argument("--steps", type=int, default=100, help="Euler steps")
    options = parser.parse_args()
    mixture = data()
    reference = mixture.sample(options.count, torch.Generator().manual_seed(1))
    right = shares(mixture, reference)
    spread = reference.var(0).sum()
    title = f"{options.count} samples, {options.steps} Euler steps"
    table = Table("routing", "energy distance", "share off by", "variance", "velocity error", "experts", title=title)
    other = mixture.sample(options.count, torch.Generator().manual_seed(2))
    rows = {"data": (other, 0.0, 0.0)}
    for routing in STRATEGIES:
        rows[routing] = (*sample(mixture, routing, options.count, options.steps), velocity_error(mixture, routing))
    for name, (x, experts, error) in rows.items():
        off = (shares(mixture, x) - right).abs().max().item()
        figures = (energy_distance(x, reference), off, (x.var(0).sum() / spread).item(), error)
        table.add_row(name, *(f"{figure:.3f}" for figure in figures), f"{experts:.2f}" if experts else "")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
