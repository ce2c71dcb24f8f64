"""The decomposition of DDM: the posterior-weighted sum of per-cluster flows is the global flow."""

import torch
from oracles import FLOAT, dataset_flow, random_mixture

from atoll import flow

CLUSTERS = [[0, 3], [1], [2, 4, 5]]


def test_weighted_cluster_flows_equal_the_global_flow() -> None:
    mixture = random_mixture(seed=3)
    generator = torch.Generator().manual_seed(4)
    t = torch.linspace(1e-3, 1 - 1e-3, 5000, dtype=FLOAT)
    x0 = mixture.sample(len(t), generator)
    x = flow.LINEAR.add_noise(x0, torch.randn(x0.shape, generator=generator, dtype=FLOAT), t)

    posterior = mixture.posterior(x, t)
    combined = torch.zeros_like(x)
    for cluster in CLUSTERS:
        combined += posterior[:, cluster].sum(1, keepdim=True) * mixture.part(cluster).velocity(x, t)

    assert (combined - mixture.velocity(x, t)).abs().max() <= 1e-8


def test_the_decomposition_holds_for_a_finite_dataset() -> None:
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(40, 4, generator=generator, dtype=FLOAT)
    for t in (1e-3, 0.1, 0.5, 0.9, 1 - 1e-3):
        x = (1 - t) * data + t * torch.randn(data.shape, generator=generator, dtype=FLOAT)
        velocity, weights = dataset_flow(x, data, t)
        parts = [slice(0, 7), slice(7, 30), slice(30, 40)]
        combined = sum(weights[:, part].sum(1, keepdim=True) * dataset_flow(x, data[part], t)[0] for part in parts)
        assert (combined - velocity).abs().max() <= 1e-8


def test_points_as_narrow_gaussians_give_the_dataset_flow() -> None:
    """Compare the mixture oracle with DDM's sum over data points."""
    generator = torch.Generator().manual_seed(6)
    data = torch.randn(20, 3, generator=generator, dtype=FLOAT)
    points = flow.GaussianMixture(torch.ones(20, dtype=FLOAT), data, 1e-12 * torch.eye(3, dtype=FLOAT).expand(20, 3, 3))
    x = torch.randn(50, 3, generator=generator, dtype=FLOAT)
    velocity, weights = dataset_flow(x, data, 0.4)
    t = torch.full((50,), 0.4, dtype=FLOAT)
    torch.testing.assert_close(points.velocity(x, t), velocity, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(points.posterior(x, t), weights, rtol=1e-7, atol=1e-9)
