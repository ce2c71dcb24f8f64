"""Grouped evaluation against the naive one, which runs every expert on every image and then weights them."""

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import atoll
from atoll.core.errors import AtollError
from atoll.core.names import GuidanceWeights
from atoll.ensemble import Ensemble
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import OpenRouter
from atoll.nets import Condition
from ensemble.runs import SPACE, write_run

STRATEGIES = [
    *("full", "top-1", "top-2", "threshold-0.3", "nucleus-0.8", "drawn", "sample-1", "oracle"),
    *("nearest", "nearest:full", "top-2@0.5,top-1"),
]
B = 9


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(B, 3, 8, 8, generator=generator),
        "t": torch.rand(B, generator=generator),
        "cluster": torch.arange(B) % 3,
        "draw": torch.rand(B, generator=generator),
    }


def condition(seed: int = 0) -> Condition:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(B, 12, 384, generator=generator)
    mask = torch.arange(12) < torch.randint(2, 12, (B, 1), generator=generator)
    return Condition(text, mask, torch.randn(B, 384, generator=generator), torch.arange(B) % 3)


# Images are grouped into batches of other sizes, which kernels sum in other orders. One rounding of a timestep near
# 1000 is 6e-5 and shifts the phases of its features by as much; with an error of one rounding added to every kernel the
# velocities differed by up to 5e-5. An image in a wrong group has an error as large as its velocity.
ROUNDING = 2e-4


def assert_alike(got: Tensor, expected: Tensor) -> None:
    """Check that every image is within float32 rounding, relative to the size of its velocity."""
    size = expected.flatten(1).square().mean(1).sqrt()
    error = (got - expected).flatten(1).square().mean(1).sqrt()
    assert float((error / size).max()) < ROUNDING


def naive(
    ensemble: Ensemble,
    given: dict[str, Tensor],
    conditions: Condition,
    routing: str,
    guidance_scale: Tensor,
    *,
    weights: GuidanceWeights = "separate",
) -> Tensor:
    """Compute one image at a time: all experts, two forward passes for guidance, a loop for the sum."""
    velocities = []
    for i in range(B):
        x, t = given["x"][i : i + 1], given["t"][i : i + 1]
        draw, cluster = given["draw"][i : i + 1], given["cluster"][i : i + 1]
        halves = []
        for this in (conditions[i : i + 1], conditions[i : i + 1].unconditional()):
            routed = conditions[i : i + 1] if weights == "conditional" else this
            w = ensemble.route(x, t, routed, routing=routing, cluster=cluster, draw=draw)[0]
            parts = [
                ensemble.cache.get(k).expert.velocity(x, t, Condition(this.text, this.text_mask, dropped=this.dropped))
                for k in range(len(ensemble.references))
            ]
            halves.append(sum(weight * part for weight, part in zip(w, parts, strict=True)))
        velocities.append(halves[1] + guidance_scale[i] * (halves[0] - halves[1]))
    return torch.cat(velocities)


@pytest.mark.parametrize("routing", STRATEGIES)
def test_the_grouped_velocity_equals_the_naive_one(run: Path, routing: str) -> None:
    """Mixed objectives, mixed sizes, times and guidance scales that differ between images."""
    ensemble, given, conditions = atoll.load(run).ensemble, batch(), condition()
    for guidance in (torch.ones(B), torch.full((B,), 4.0), torch.tensor([1.0, 2.5, 7.0] * 3)):
        expected = naive(ensemble, given, conditions, routing, guidance)
        how = {"routing": routing, "cluster": given["cluster"], "draw": given["draw"]}
        got = ensemble.velocity(given["x"], given["t"], conditions, guidance_scale=guidance, **how)
        assert_alike(got, expected)


def test_prepared_conditions_and_one_time_give_the_same_velocity(run: Path) -> None:
    """As in sampling: distinct prompts are prepared once, and the batch has one time."""
    ensemble, given, conditions = atoll.load(run).ensemble, batch(), condition()
    rows = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 4])
    reused = BatchConditions.of(conditions[:5], rows, reused=True)
    for t, routing in product((0.9, 0.2), ("top-1", "top-2", "full")):
        expected = ensemble.velocity(
            given["x"], torch.full((B,), t), conditions[rows], routing=routing, guidance_scale=3.0
        )
        for _ in range(2):
            got = ensemble.velocity(given["x"], t, reused, routing=routing, guidance_scale=3.0)
            assert_alike(got, expected)


def test_a_conditioned_router_has_other_weights_for_the_null_condition(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", router_conditioning=("pooled",))
    ensemble, given, conditions = atoll.load(run).ensemble, batch(), condition()
    with_text = ensemble.route(given["x"], given["t"], conditions, routing="full")
    without = ensemble.route(given["x"], given["t"], None, routing="full")
    assert (with_text - without).abs().max() > 0.01
    guidance = torch.full((B,), 4.0)
    for routing, weights in product(("full", "top-1", "sample-1", "nearest"), get_args(GuidanceWeights)):
        expected = naive(ensemble, given, conditions, routing, guidance, weights=weights)
        how = {"routing": routing, "draw": given["draw"], "guidance_weights": weights}
        got = ensemble.velocity(given["x"], given["t"], conditions, guidance_scale=4.0, **how)
        assert_alike(got, expected)


def test_a_drawn_expert_computes_all_steps_and_the_router_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the null condition, for which a conditioned router has other probabilities."""
    sampler, prompts = atoll.load(write_run(tmp_path / "run", router_conditioning=("pooled",))), ["a red circle"]
    assert sampler.ensemble.router is not None
    batches, original = list[int](), OpenRouter.logits

    def logits(self: OpenRouter, x: Tensor, *rest: Any) -> Tensor:
        batches.append(len(x))
        return original(self, x, *rest)

    monkeypatch.setattr(OpenRouter, "logits", logits)
    how: dict[str, Any] = {"num_images": B, "num_inference_steps": 4, "guidance_scale": 3.0}
    made = sampler.generate(prompts, routing="drawn", trace=True, **how)
    assert batches == [2 * B]
    assert made.trace is not None
    chosen = made.trace.weights.argmax(-1)
    assert bool((chosen == chosen[0]).all())
    assert len(set(chosen[0].tolist())) > 1
    alone = sampler.generate(prompts, routing="oracle", cluster=chosen[0].tolist(), **how)
    torch.testing.assert_close(made.latents, alone.latents)


def test_labels_and_text_can_be_combined(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", conditioning=("text", "label"))
    ensemble, given, conditions = atoll.load(run).ensemble, batch(), condition()
    for parts in (conditions, Condition(conditions.text, conditions.text_mask), Condition(label=conditions.label)):
        rows = torch.arange(B)
        plain = ensemble.velocity(given["x"], 0.5, parts, routing="top-2", guidance_scale=3.0)
        prepared = ensemble.velocity(
            given["x"], 0.5, BatchConditions.of(parts, rows, reused=True), routing="top-2", guidance_scale=3.0
        )
        assert_alike(prepared, plain)
    with_label = ensemble.velocity(given["x"], 0.5, conditions, routing="top-2")
    assert (with_label - ensemble.velocity(given["x"], 0.5, None, routing="top-2")).abs().max() > 1e-3


def test_rescaled_guidance_has_the_standard_deviation_of_the_unguided_velocity(run: Path) -> None:
    ensemble, given, conditions = atoll.load(run).ensemble, batch(), condition()
    plain = ensemble.velocity(given["x"], 0.5, conditions)
    guided = ensemble.velocity(given["x"], 0.5, conditions, guidance_scale=7.0)
    rescaled = ensemble.velocity(given["x"], 0.5, conditions, guidance_scale=7.0, rescale=1.0)
    assert (guided.flatten(1).std(1) > 1.2 * plain.flatten(1).std(1)).all()
    torch.testing.assert_close(rescaled.flatten(1).std(1), plain.flatten(1).std(1))


def test_an_expert_with_another_scale_gets_rescaled_states(tmp_path: Path) -> None:
    """Two runs with the same weights; in one, the second expert declares latents that are half as large."""
    twice = {"mean": [0.0, 0.0, 0.0], "std": [2 * std for std in SPACE["std"]]}
    same, other = write_run(tmp_path / "same"), write_run(tmp_path / "other", spaces={1: twice})
    given = batch()
    first, second = (
        atoll.load(run).ensemble.velocity(given["x"], given["t"], routing="oracle", cluster=given["cluster"])
        for run in (same, other)
    )
    mine = given["cluster"] == 1
    assert torch.equal(first[~mine], second[~mine])
    assert (first[mine] - second[mine]).abs().max() > 0.01


def test_a_dense_model_is_an_ensemble_of_one_expert(run: Path) -> None:
    given, conditions = batch(), condition()
    whole = atoll.load(run).ensemble
    for model, number in (("expert:1", 1), ("monolith", None), ("student", None)):
        dense = atoll.load(run, model).ensemble
        assert len(dense.declarations) == 1
        assert dense.router is None
        got = dense.velocity(given["x"], given["t"], conditions)
        if number is not None:
            cluster = torch.full((B,), number)
            expected = whole.velocity(given["x"], given["t"], conditions, routing="oracle", cluster=cluster)
            assert_alike(got, expected)


def test_velocity_carries_gradients_to_the_state(run: Path) -> None:
    ensemble = atoll.load(run).ensemble
    x = batch()["x"].requires_grad_(True)
    ensemble.velocity(x, 0.5, condition(), routing="top-2", guidance_scale=2.0).square().sum().backward()
    assert x.grad is not None
    assert bool((x.grad.flatten(1).abs().sum(1) > 0).all())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"routing": "oracle"}, "needs the cluster of every image"),
        ({"routing": "oracle", "cluster": torch.full((B,), 7)}, "no expert of cluster 7"),
        ({"routing": "top2"}, "did you mean 'top-2'?"),
    ],
)
def test_an_impossible_routing_is_an_error(run: Path, how: dict, says: str) -> None:
    with pytest.raises(AtollError) as error:
        atoll.load(run).ensemble.velocity(batch()["x"], 0.5, **how)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(B, 4, 8, 8)}, r"states of shape \(9, 4, 8, 8\), expected \(batch, 3, height, width\)"),
        ({"x": torch.zeros(3, 8, 8)}, r"states of shape \(3, 8, 8\)"),
        ({"t": torch.zeros(4)}, "4"),
        ({"cluster": torch.zeros(4, dtype=torch.int64)}, r"cluster has shape \(4,\), expected \(9,\)"),
        ({"draw": torch.zeros(4)}, r"draw has shape \(4,\), expected \(9,\)"),
        ({"guidance_scale": torch.zeros(4)}, r"guidance_scale has shape \(4,\), expected \(9,\)"),
    ],
)
def test_tensors_of_another_batch_size_are_an_error(changes: dict[str, Tensor], words: str, run: Path) -> None:
    ensemble = atoll.load(run).ensemble
    with pytest.raises((AtollError, ValueError), match=words):
        ensemble.velocity(**{**batch(), **changes})
    if "guidance_scale" not in changes:
        with pytest.raises((AtollError, ValueError), match=words):
            ensemble.route(**{**batch(), **changes})
