"""Nearest routing: by the densities of latents, captions and classes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ideal_ensemble import ideal_ensemble
from oracles import random_mixture
from scipy.stats import multivariate_normal

import atoll
from atoll.data.density import CAPTION_WEIGHT, Density
from atoll.ensemble import Ensemble
from atoll.nets import Condition
from ensemble.runs import cluster_density


def captions(shift: float, count: int = 300, width: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(round(10 * shift))
    return torch.randn(count, width, generator=generator) * torch.linspace(0.5, 2, width) + shift


def with_captions(ensemble: Ensemble, known: int | None = None) -> Ensemble:
    """Return the same experts, of which the first `known` have a density of their captions."""
    described = [
        replace(reference, density=replace(reference.density, caption=Density.fit(captions(number), count=1, rank=2)))
        if known is None or number < known
        else reference
        for number, reference in enumerate(ensemble.references)
    ]
    return Ensemble(described, ensemble.router)


def states(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 3, 1, 1, generator=generator), torch.rand(count, generator=generator)


def test_the_caption_term_is_the_log_density_of_a_gaussian() -> None:
    """Against scipy, with the covariance of the low-rank model."""
    caption = Density.fit(captions(0.4), count=1, rank=2)
    density = replace(cluster_density(1), caption=caption)
    condition = captions(0.0, 20)
    covariance = caption.directions.T @ torch.diag(caption.variances) @ caption.directions
    covariance += caption.rest * torch.eye(len(covariance))
    expected = multivariate_normal(caption.mean.numpy(), covariance.double().numpy()).logpdf(condition.numpy())
    got = density.log_condition(Condition(pooled=condition))
    assert got is not None
    torch.testing.assert_close(got, CAPTION_WEIGHT * torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_the_class_term_is_the_smoothed_frequency() -> None:
    density = replace(cluster_density(1), caption=None, classes=torch.tensor([7.0, 0.0, 1.0]))
    got = density.log_condition(Condition(label=torch.tensor([0, 1, 2])))
    assert got is not None
    torch.testing.assert_close(got, torch.tensor([8 / 11, 1 / 11, 2 / 11], dtype=torch.float64).log())


def test_the_null_condition_adds_zero() -> None:
    dropped = torch.tensor([False, True, False])
    for condition in (Condition(pooled=torch.randn(3, 384)), Condition(label=torch.arange(3))):
        log_p = cluster_density(2).log_condition(condition.drop(dropped))
        assert log_p is not None
        assert log_p.eq(0).tolist() == dropped.tolist()
    assert cluster_density(2).log_condition(Condition()) is None


@pytest.mark.parametrize("without", [(), ("caption",), ("caption", "classes")])
def test_a_density_survives_writing_and_reading(without: tuple[str, ...]) -> None:
    density = replace(cluster_density(3), **dict.fromkeys(without))
    again = Density.from_tensors(density.tensors())
    assert [name for name in ("caption", "classes") if getattr(again, name) is None] == list(without)
    for name, tensor in density.tensors().items():
        torch.testing.assert_close(again.tensors()[name], tensor, rtol=0, atol=0)


def test_the_posterior_combines_latent_and_caption() -> None:
    """The posterior with captions is that without, times the probability of the caption in each cluster."""
    plain = ideal_ensemble(random_mixture(), [[0, 3], [1], [2, 4], [5]])
    described = with_captions(plain)
    x, t = states()
    condition = Condition(pooled=captions(1.5, len(x)))
    before = plain.route(x, t, routing="nearest:full").double()
    caption_terms = torch.stack([reference.density.log_condition(condition) for reference in described.references], 1)
    joint = before * caption_terms.exp()
    expected = joint / joint.sum(1, keepdim=True)
    got = described.route(x, t, condition, routing="nearest:full").double()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert (got - before).abs().max() > 0.1
    torch.testing.assert_close(described.route(x, t, routing="nearest:full").double(), before)


@pytest.mark.parametrize(("cluster", "beyond"), [(0, -6.0), (3, 6.0)])
def test_near_noise_the_caption_decides(cluster: int, beyond: float) -> None:
    described = with_captions(ideal_ensemble(random_mixture(), [[0, 3], [1], [2, 4], [5]]))
    x = torch.randn(80, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    condition = Condition(pooled=captions(float(cluster), 80) + beyond)
    assert (described.route(x, 1.0, condition, routing="nearest").argmax(1) == cluster).double().mean() > 0.9


def test_captions_are_ignored_if_one_expert_has_no_density_of_them() -> None:
    plain = ideal_ensemble(random_mixture(), [[0, 3], [1], [2, 4], [5]])
    some = with_captions(plain, known=3)
    x, t = states()
    condition = Condition(pooled=captions(1.5, len(x)))
    expected = plain.route(x, t, routing="nearest:full")
    torch.testing.assert_close(some.route(x, t, condition, routing="nearest:full"), expected)


def test_nearest_routing_uses_the_prompt(run: Path) -> None:
    """The experts are conditioned on tokens only; the pooled caption is for the routing."""
    ensemble = atoll.load(run)
    assert ensemble.ensemble.conditioning == {"text", "pooled"}
    condition = ensemble.encode(["a red circle", "a blue square"])
    assert condition.pooled is not None
    x = torch.zeros(2, 3, 8, 8)
    with_prompt = ensemble.ensemble.route(x, 1.0, condition, routing="nearest:full")
    without = ensemble.ensemble.route(x, 1.0, None, routing="nearest:full")
    assert (with_prompt - without).abs().max() > 0.01
