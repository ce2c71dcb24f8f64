"""The ensemble against exact velocities: ideal experts of a Gaussian mixture."""

import pytest
import torch
from ideal_ensemble import ideal_ensemble, normalize_mixture
from oracles import FLOAT, random_mixture

from atoll import flow
from atoll.core.errors import AtollError
from atoll.core.networks import LatentScale
from atoll.encoders.autoencoder import Statistics
from atoll.ensemble import RoutingState
from atoll.experts.expert import DeviceOptions

OBJECTIVES = ["flow-matching", "ddpm", "x0", "v-prediction", "ddpm-linear", "ve-x0"]
CLUSTERS = [[0, 3], [1], [2, 4], [5]]


def states(mixture: flow.GaussianMixture, count: int, low: float = 0.05, high: float = 0.95) -> tuple:
    """Return noisy data and its times."""
    generator = torch.Generator().manual_seed(1)
    x0 = mixture.sample(count, generator)
    t = low + (high - low) * torch.rand(count, generator=generator, dtype=FLOAT)
    x = (1 - t[:, None]) * x0 + t[:, None] * torch.randn(x0.shape, generator=generator, dtype=FLOAT)
    return x, t


def velocity(ensemble, x: torch.Tensor, t: torch.Tensor, **how: object) -> torch.Tensor:
    return ensemble.velocity(x.float().view(*x.shape, 1, 1), t.float(), **how).flatten(1).double()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_full_routing_is_the_exact_velocity_for_every_objective(objective: str) -> None:
    mixture = random_mixture()
    x, t = states(mixture, 300)
    got = velocity(ideal_ensemble(mixture, CLUSTERS, [objective]), x, t, routing="full")
    torch.testing.assert_close(got, mixture.velocity(x, t), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("routing", ["full", "drawn", "nearest:drawn", "full@0.6,drawn"])
def test_exact_routings_of_mixed_objectives_sample_the_right_distribution(routing: str) -> None:
    """Means, covariances and shares of 8,000 samples, within their standard errors and the solver's."""
    mixture = random_mixture(spread=1.0)
    ensemble = ideal_ensemble(mixture, CLUSTERS, OBJECTIVES)
    noise = torch.randn(8000, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    state = RoutingState(seed=4)
    field = lambda x, t: ensemble.velocity(x, t[:1], routing=routing, state=state)  # noqa: E731
    x = flow.solve(field, noise, steps=30, solver="heun").flatten(1).double()
    data = mixture.sample(100_000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(x.mean(0), data.mean(0), atol=0.05, rtol=0)
    torch.testing.assert_close(torch.cov(x.T), torch.cov(data.T), atol=0.08, rtol=0.02)
    shares = [mixture.posterior(y, torch.full((len(y),), 1e-3, dtype=FLOAT)).mean(0) for y in (x, data)]
    torch.testing.assert_close(shares[0], shares[1], atol=0.015, rtol=0)


def test_nearest_routing_is_the_posterior_of_gaussian_clusters() -> None:
    mixture = random_mixture()
    ensemble = ideal_ensemble(mixture, [[k] for k in range(6)])
    x, t = states(mixture, 500)
    got = ensemble.route(x.float().view(*x.shape, 1, 1), t.float(), routing="nearest:full").double()
    right = mixture.posterior(x, t)
    assert (got - right).abs().mean() < 0.01  # each density is measured from 2048 samples
    assert (got.argmax(1) == right.argmax(1)).double().mean() > 0.97


def test_removing_an_expert_removes_only_its_data() -> None:
    """Without the expert of one cluster, full routing is the exact velocity of the remaining data."""
    mixture = random_mixture()
    whole = ideal_ensemble(mixture, CLUSTERS)
    rest = type(whole)([whole.references[k] for k in (0, 1, 3)], whole.router)
    x, t = states(mixture, 300)
    remaining = mixture.part([0, 1, 3, 5])
    got = velocity(rest, x, t, routing="full")
    torch.testing.assert_close(got, remaining.velocity(x, t), atol=2e-3, rtol=2e-3)
    near = rest.route(x.float().view(*x.shape, 1, 1), t.float(), routing="nearest:full")
    torch.testing.assert_close(near.sum(1), torch.ones(300))


def test_an_uncalibrated_bfloat16_expert_is_bounded_near_noise() -> None:
    """The expert's bridge needs the output in the network's precision, not after a cast to float32."""
    mixture = random_mixture()
    half, whole = ideal_ensemble(mixture, [list(range(6))], ["ddpm"]), ideal_ensemble(mixture, [list(range(6))])
    half = type(half)(half.references, device_options=DeviceOptions(torch.device("cpu"), torch.bfloat16))
    x, t = states(mixture, 2000, 0.999, 0.9999)
    truth = velocity(whole, x, t)
    error = (velocity(half, x, t) - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert error < 1


NORMALIZATIONS = [
    Statistics((0.5, -1.0, 0.2), (2.0, 2.0, 2.0)),
    Statistics((0.0, 0.0, 0.0), (0.3, 0.3, 0.3)),
    Statistics((-0.7, 0.1, 0.0), (1.0, 1.0, 1.0)),
    Statistics((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
]


SCALES = [Statistics.of_scale(LatentScale(*factors), 3) for factors in ((0.18215,), (0.36, 0.12))]


@pytest.mark.parametrize("objectives", [["flow-matching"], ["ddpm", "x0"]])
def test_experts_with_other_scales_and_shifts_of_latents_form_one_model(objectives: list[str]) -> None:
    """The latents are those of the router; one expert has the scale of Stable Diffusion, one that of FLUX."""
    mixture = random_mixture()
    x, t = states(mixture, 300)
    ensemble = ideal_ensemble(mixture, [[0, 1, 2], [3, 4, 5]], objectives, normalizations=SCALES)
    torch.testing.assert_close(velocity(ensemble, x, t, routing="full"), mixture.velocity(x, t), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("objectives", [["flow-matching"], OBJECTIVES])
def test_experts_with_different_statistics_give_the_common_velocity(objectives: list[str]) -> None:
    """Each was trained on data scaled and shifted differently; together they are the exact velocity."""
    mixture = random_mixture()
    x, t = states(mixture, 300)
    ensemble = ideal_ensemble(mixture, CLUSTERS, objectives, normalizations=NORMALIZATIONS)
    torch.testing.assert_close(velocity(ensemble, x, t, routing="full"), mixture.velocity(x, t), atol=3e-3, rtol=3e-3)
    common = ideal_ensemble(mixture, [[k] for k in range(6)])
    apart = ideal_ensemble(mixture, [[k] for k in range(6)], normalizations=[*NORMALIZATIONS, *NORMALIZATIONS[:2]])
    states_of = (x.float().view(*x.shape, 1, 1), t.float())
    near = [ensemble.route(*states_of, routing="nearest:full") for ensemble in (common, apart)]
    assert (near[0] - near[1]).abs().mean() < 0.01


def test_the_rescaling_is_exact_near_both_ends_of_time() -> None:
    mixture = random_mixture()
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    ensemble = ideal_ensemble(mixture, [list(range(6))], normalizations=NORMALIZATIONS[:1])
    for time in (1.0, 0.999, 0.02):
        t = torch.full((50,), time, dtype=FLOAT)
        torch.testing.assert_close(velocity(ensemble, x, t), mixture.velocity(x, t), atol=3e-3, rtol=3e-3)


def test_different_scales_for_the_channels_are_an_error() -> None:
    plain, uneven = NORMALIZATIONS[3], Statistics((0.0, 0.0, 0.0), (1.0, 2.0, 1.0))
    with pytest.raises(AtollError, match=r"0.5 to 1 times.*strength in each channel"):
        ideal_ensemble(random_mixture(), CLUSTERS, normalizations=[plain, uneven, plain, plain])


def test_a_normalized_mixture_is_the_same_data() -> None:
    mixture, normalization = random_mixture(), NORMALIZATIONS[0]
    x = mixture.sample(1000, torch.Generator().manual_seed(0))
    y = normalize_mixture(mixture, normalization).sample(1000, torch.Generator().manual_seed(0))
    back = normalization.denormalize(y.view(-1, 3, 1, 1)).flatten(1)
    torch.testing.assert_close(back.mean(0), x.mean(0), atol=1e-9, rtol=0)
