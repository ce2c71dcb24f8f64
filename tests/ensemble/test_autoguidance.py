"""Autoguidance: away from networks that were trained less."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ideal_ensemble import IdealNetwork, ideal_ensemble
from oracles import random_mixture

import atoll
from atoll import flow
from atoll.core.errors import AtollError
from atoll.ensemble import Ensemble
from atoll.ensemble.memory_plan import plan_memory
from atoll.ensemble.sampler import Sampler
from atoll.nets import Condition
from ensemble.runs import randomized
from ensemble.test_field import assert_alike, batch, condition

AUTO = {"guidance": "autoguidance"}


def with_weak(sampler: Sampler, **how: object) -> Ensemble:
    """Return the experts, each with a weak network of other random weights."""
    references = [
        replace(one, weak=replace(one, open=lambda one=one, k=k: randomized(one.open(), 100 + k)))
        for k, one in enumerate(sampler.ensemble.references)
    ]
    return Ensemble(references, sampler.ensemble.router, **how)


@pytest.mark.parametrize("routing", ["full", "top-1", "top-2", "nearest", "oracle"])
def test_the_velocity_is_extrapolated_from_the_weak_one_of_the_same_experts(run: Path, routing: str) -> None:
    ensemble, given, conditions = with_weak(atoll.load(run)), batch(), condition()
    scales = torch.linspace(0, 4, len(given["x"]))
    scales[2] = 1.0
    x, t, cluster = given["x"], given["t"], given["cluster"]
    w = ensemble.route(x, t, conditions, routing=routing, cluster=cluster)
    expected = []
    for i, scale in enumerate(scales.tolist()):
        own = Condition(conditions.text[i : i + 1], conditions.text_mask[i : i + 1])
        parts = [ensemble.cache.get(k).expert.velocity(x[i : i + 1], t[i : i + 1], own) for k in range(6)]
        strong, weak = (sum(w[i, k] * parts[first + k] for k in range(3)) for first in (0, 3))
        expected.append(weak + scale * (strong - weak))
    got = ensemble.velocity(x, t, conditions, routing=routing, cluster=cluster, guidance_scale=scales, **AUTO)
    assert_alike(got, torch.cat(expected))
    plain = ensemble.velocity(x, t, conditions, routing=routing, cluster=cluster, guidance_scale=1.0)
    assert (got - plain).flatten(1).abs().mean(1).gt(1e-3).tolist() == [scale != 1 for scale in scales.tolist()]


def test_ideal_networks_give_the_exact_extrapolation() -> None:
    """The weak network of a cluster is ideal for data of three times the covariance."""
    mixture, t = random_mixture(), 0.4
    wide = flow.GaussianMixture(mixture.weights, mixture.means, 3 * mixture.covariances)
    plain, objective = ideal_ensemble(mixture, [[k] for k in range(6)]), flow.objective("flow-matching")
    weak = [IdealNetwork(wide.part([k]), objective) for k in range(6)]
    described = [replace(r, weak=replace(r, open=lambda n=n: n)) for r, n in zip(plain.references, weak, strict=True)]
    ensemble = Ensemble(described, plain.router)
    x = mixture.sample(200, torch.Generator().manual_seed(0))
    times = torch.full((200,), t, dtype=x.dtype)
    p = mixture.posterior(x, times)
    v_weak = sum(p[:, k, None] * wide.part([k]).velocity(x, times) for k in range(6))
    expected = v_weak + 2.5 * (mixture.velocity(x, times) - v_weak)
    got = ensemble.velocity(x.float().view(-1, 3, 1, 1), t, routing="full", guidance_scale=2.5, **AUTO)
    torch.testing.assert_close(got.flatten(1).double(), expected, atol=1e-4, rtol=1e-4)


def test_scale_one_is_no_guidance_bit_for_bit(run: Path) -> None:
    """It runs no weak network, so none has to exist."""
    sampler = atoll.load(run)
    how = {"prompt": ["a red circle", "a green square"], "num_inference_steps": 3, "guidance_scale": 1.0}
    assert torch.equal(sampler.generate(**how, **AUTO).latents, sampler.generate(**how).latents)


def test_one_network_in_memory_gives_the_same_bits(run: Path) -> None:
    sampler, found = atoll.load(run), []
    for limit in (None, 1):
        ensemble = with_weak(sampler, max_loaded_experts=limit)
        made = Sampler(ensemble, sampler.encoders).generate(
            "a red circle", num_images=4, num_inference_steps=3, guidance_scale=2.0, **AUTO
        )
        found.append(made.latents)
        assert len(ensemble.cache._loaded) <= (limit or 6)
    assert torch.equal(*found)


def test_unconditional_images_are_guided_too(run: Path) -> None:
    sampler = atoll.load(run)
    guided = Sampler(with_weak(sampler), sampler.encoders)
    how = {"num_images": 2, "num_inference_steps": 2}
    plain = guided.generate(**how, guidance_scale=1.0)
    assert not torch.allclose(guided.generate(**how, guidance_scale=3.0, **AUTO).latents, plain.latents, atol=1e-2)
    assert torch.equal(guided.generate(**how, guidance_scale=3.0).latents, plain.latents)


def test_weak_networks_count_in_the_memory_plan(run: Path) -> None:
    sampler = atoll.load(run)
    guided = Sampler(with_weak(sampler), sampler.encoders)
    plans = [plan_memory(guided, 2, weak=weak).parts["experts"] for weak in (False, True)]
    assert plans[1] == 2 * plans[0] == 2 * plan_memory(sampler, 2).parts["experts"]


def test_missing_weak_networks_and_negative_prompts_are_errors(run: Path) -> None:
    sampler = atoll.load(run)
    with pytest.raises(AtollError, match=r"experts/000, experts/001, .* train\.weak_share, such as 0\.2"):
        sampler.generate("a red circle", guidance_scale=2.0, **AUTO)
    guided = Sampler(with_weak(sampler), sampler.encoders)
    with pytest.raises(AtollError, match="negative_prompt needs a prompt, and classifier-free guidance"):
        guided.generate("a red circle", negative_prompt="a square", guidance_scale=2.0, **AUTO)
    with pytest.raises(AtollError, match="unknown guidance 'auto'"):
        sampler.generate("a red circle", guidance="auto")
