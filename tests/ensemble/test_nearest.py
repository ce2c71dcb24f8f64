"""Routing without a router: by the latents, and by what is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles import random_mixture
from scipy.stats import multivariate_normal

import atoll
from atoll.ensemble import Ensemble
from atoll.ensemble.analytic import ideal_ensemble
from atoll.experts.density import CAPTION_WEIGHT, Density
from atoll.nets import Condition
from ensemble.runs import cluster_density


def captions(shift: float, count: int = 300, width: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(round(10 * shift))
    return torch.randn(count, width, generator=generator) * torch.linspace(0.5, 2, width) + shift


def with_captions(ensemble: Ensemble, known: int | None = None) -> Ensemble:
    """The same experts, of which the first `known` also describe their captions."""
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


def test_a_caption_counts_by_its_gaussian() -> None:
    """Against scipy, with the covariance that the directions stand for."""
    caption = Density.fit(captions(0.4), count=1, rank=2)
    density = replace(cluster_density(1), caption=caption)
    asked = captions(0.0, 20)
    covariance = caption.directions.T @ torch.diag(caption.variances) @ caption.directions
    covariance += caption.rest * torch.eye(len(covariance))
    expected = multivariate_normal(caption.mean.numpy(), covariance.double().numpy()).logpdf(asked.numpy())
    got = density.log_condition(Condition(pooled=asked))
    assert got is not None
    torch.testing.assert_close(got, CAPTION_WEIGHT * torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_a_class_counts_by_how_often_it_was_seen() -> None:
    density = replace(cluster_density(1), caption=None, classes=torch.tensor([7.0, 0.0, 1.0]))
    got = density.log_condition(Condition(label=torch.tensor([0, 1, 2])))
    assert got is not None
    torch.testing.assert_close(got, torch.tensor([8 / 11, 1 / 11, 2 / 11], dtype=torch.float64).log())


def test_dropped_conditions_say_nothing() -> None:
    dropped = torch.tensor([False, True, False])
    for condition in (Condition(pooled=torch.randn(3, 384)), Condition(label=torch.arange(3))):
        said = cluster_density(2).log_condition(condition.drop(dropped))
        assert said is not None
        assert said.eq(0).tolist() == dropped.tolist()
    assert cluster_density(2).log_condition(Condition()) is None


@pytest.mark.parametrize("without", [(), ("caption",), ("caption", "classes")])
def test_a_density_is_read_as_it_was_written(without: tuple[str, ...]) -> None:
    density = replace(cluster_density(3), **dict.fromkeys(without))
    again = Density.from_tensors(density.tensors())
    assert [name for name in ("caption", "classes") if getattr(again, name) is None] == list(without)
    for name, tensor in density.tensors().items():
        torch.testing.assert_close(again.tensors()[name], tensor, rtol=0, atol=0)


def test_the_caption_and_the_latent_are_weighed_together() -> None:
    """The posterior with captions is the one without, times the probability of the caption in each cluster."""
    plain = ideal_ensemble(random_mixture(), [[0, 3], [1], [2, 4], [5]])
    told = with_captions(plain)
    x, t = states()
    asked = Condition(pooled=captions(1.5, len(x)))
    before = plain.route(x, t, routing="nearest:full").double()
    words = torch.stack([reference.density.log_condition(asked) for reference in told.references], 1)
    expected = before * words.exp() / (before * words.exp()).sum(1, keepdim=True)
    got = told.route(x, t, asked, routing="nearest:full").double()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert (got - before).abs().max() > 0.1
    torch.testing.assert_close(told.route(x, t, routing="nearest:full").double(), before)


@pytest.mark.parametrize(("cluster", "beyond"), [(0, -6.0), (3, 6.0)])
def test_near_noise_the_caption_decides(cluster: int, beyond: float) -> None:
    told = with_captions(ideal_ensemble(random_mixture(), [[0, 3], [1], [2, 4], [5]]))
    x = torch.randn(80, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    asked = Condition(pooled=captions(float(cluster), 80) + beyond)
    assert (told.route(x, 1.0, asked, routing="nearest").argmax(1) == cluster).double().mean() > 0.9


def test_one_expert_that_knows_no_captions_silences_all() -> None:
    plain = ideal_ensemble(random_mixture(), [[0, 3], [1], [2, 4], [5]])
    some = with_captions(plain, known=3)
    x, t = states()
    asked = Condition(pooled=captions(1.5, len(x)))
    expected = plain.route(x, t, routing="nearest:full")
    torch.testing.assert_close(some.route(x, t, asked, routing="nearest:full"), expected)


def test_prompts_reach_nearest_routing(run: Path) -> None:
    """Experts that are told tokens only: the pooled caption is for the routing."""
    ensemble = atoll.load(run)
    assert ensemble.ensemble.conditioning == {"text", "pooled"}
    condition = ensemble.encode(["a red circle", "a blue square"])
    assert condition.pooled is not None
    x = torch.zeros(2, 3, 8, 8)
    told = ensemble.ensemble.route(x, 1.0, condition, routing="nearest:full")
    untold = ensemble.ensemble.route(x, 1.0, None, routing="nearest:full")
    assert (told - untold).abs().max() > 0.01
