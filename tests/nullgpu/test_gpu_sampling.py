"""Budgets of sampling and serving on an accelerator: how often the host waits, and what it copies."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import torch

import atoll
import nullgpu
from atoll.apps.studio.engine import Engine, GenerationRequest
from atoll.apps.studio.registry import ModelRegistry
from atoll.core.host_memory import pinned_budget, pinned_size
from atoll.core.options import QuantizedLoadOptions
from atoll.ensemble import Ensemble, RoutingState, SamplerState, SampleSettings
from atoll.ensemble.sampler import Sampler
from atoll.experts.batch_conditions import BatchConditions

pytestmark = pytest.mark.slow
EVALUATIONS, WARM_UP = 6, 3
"""The first evaluations allocate memory and copy constants; the budgets are of the evaluations after them."""
ROUTINGS = (
    *("top-1", "top-2", "full", "threshold-0.2", "nucleus-0.9", "drawn", "sample-1", "oracle"),
    *("nearest", "nearest:full", "top-2@0.6,top-1", "nearest@0.5,top-1", "nearest:drawn@0.5,top-2"),
)


@torch.no_grad()
def evaluations(sampler: Sampler, routing: str, guidance_scale: float = 4.0) -> list[nullgpu.Seen]:
    """Return what each evaluation of the velocity did, after the first ones."""
    settings = SampleSettings(steps=EVALUATIONS, routing=routing, guidance_scale=guidance_scale)
    conditions = BatchConditions.of(sampler.encode(["a red circle", "a blue square"]), torch.arange(8) % 2, reused=True)
    state = SamplerState(sampler.noise(8, 0), conditions, RoutingState(), cluster=torch.arange(8) % 2)
    seen = []
    for step in range(EVALUATIONS):
        with nullgpu.watch() as watched:
            t = torch.full((1,), 1 - step / EVALUATIONS)
            sampler.velocity(state, state.x, t, settings=settings, guidance_scale=guidance_scale)
        seen.append(watched)
    return seen[WARM_UP:]


@pytest.fixture(scope="module")
def sampler(trained_run: Path) -> Sampler:
    return atoll.load(trained_run)


def check(seen: nullgpu.Seen, waits: int = 1) -> None:
    assert sum(seen.synchronizations.values()) <= waits, seen.synchronizations
    assert seen.pageable_copies == {}
    assert seen.counts["launch"] > 50, "the experts ran on the device"


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_an_evaluation_waits_at_most_once(sampler: Sampler, routing: str, guidance_scale: float) -> None:
    assert sampler.ensemble.device.type == "cuda"
    assert sampler.dtype == torch.bfloat16
    for seen in evaluations(sampler, routing, guidance_scale):
        check(seen)


@pytest.mark.parametrize("routing", ["nearest:top-1", "nearest:full", "oracle"])
def test_the_number_of_waits_does_not_depend_on_that_of_the_experts(sampler: Sampler, routing: str) -> None:
    references = [
        replace(reference, declaration=replace(reference.declaration, clusters=(number,)))
        for number, reference in enumerate(list(sampler.ensemble.references) * 4)
    ]
    many = Ensemble(references, device_options=sampler.ensemble.device_options)
    for seen in evaluations(Sampler(many, sampler.encoders), routing):
        check(seen)


@pytest.mark.parametrize("limit", [1, 2])
def test_experts_are_copied_from_pinned_memory_on_a_side_stream(trained_run: Path, limit: int) -> None:
    """With room for one or two of eight experts, evaluations load experts, and wait no more often for that.

    Values are not computed here, so an evaluation may happen to need only experts that are loaded already.
    """
    sampler = atoll.load(trained_run)
    references = list(sampler.ensemble.references) * 4
    some = Ensemble(references, device_options=sampler.ensemble.device_options, max_loaded_experts=limit)
    weights = len(list(references[0].open().parameters()))
    copied = 0
    for seen in evaluations(Sampler(some, sampler.encoders), "nearest:full"):
        check(seen)
        copied += seen.counts["side_copy"]
        assert seen.counts["h2d_pinned"] >= seen.counts["side_copy"]
    assert copied >= weights * EVALUATIONS, "at least one expert for each evaluation"
    assert some.cache.loads > 2 * EVALUATIONS


def test_host_copies_of_experts_stay_within_their_share_of_memory(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two of eight experts. The allocator of torch, which is real, counts what is pinned."""
    sampler = atoll.load(trained_run)
    options, references = sampler.ensemble.device_options, list(sampler.ensemble.references[:1]) * 8
    some = Ensemble(references, device_options=options, max_loaded_experts=1)
    weights = options.prepare(references[0].open()).state_dict().values()
    expert = sum(pinned_size(weight.nbytes) for weight in weights)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(round(pinned_budget() / (2.5 * expert))))
    before = pinned_bytes()
    for number in range(8):
        some.cache.get(number)
        assert pinned_bytes() - before == min(2, number + 1) * expert


def pinned_bytes() -> int:
    gc.collect()
    torch.empty(1, pin_memory=True)  # when it allocates, the allocator frees what finished copies used
    return int(torch.cuda.host_memory_stats()["active_bytes.current"])


def test_decoding_waits_once(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    finite_results(monkeypatch)
    for _ in range(3):
        with nullgpu.watch() as seen:
            assert len(sampler.decode(torch.zeros(40, *sampler.ensemble.shape, device=sampler.ensemble.device))) == 40
    assert sum(seen.synchronizations.values()) == 1, seen.synchronizations
    assert seen.pageable_copies == {}


def test_a_server_turn_waits_at_most_three_times(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with their own times, guidance and previews join and end; one routing, so one group of images."""
    finite_results(monkeypatch)
    models = ModelRegistry(str(trained_run), QuantizedLoadOptions(), batch_size=8)
    models.scan()
    assert models.load_errors == {}
    engine, turns, posted = Engine(8, 8), [], []

    def submit(prompt: str | None, **values: Any) -> None:
        settings = SampleSettings(
            routing="top-2", steps=values.pop("steps", 6), guidance_scale=values.pop("scale", 4.0)
        )
        generation = GenerationRequest(settings, prompt, stream=True, **values)
        engine.submit(generation, models.get("experts"), posted.append)

    submit("a red circle", num_images=2, preview_every=2)
    with torch.no_grad():
        for turn in range(14):
            if turn == 3:
                submit("a blue square", steps=4, scale=1.0)
            if turn == 5:
                submit(None, num_images=3, steps=5)
            if engine.idle:
                break
            with nullgpu.watch() as seen:
                engine.run_step()
            turns.append(seen)
    assert engine.idle, "all requests ended"
    assert [event.status for event in posted if hasattr(event, "status")] == [200] * 3
    for seen in turns[1:]:
        check(seen, waits=3)
    assert sum(sum(seen.synchronizations.values()) <= 1 for seen in turns) >= 3, "turns without a decoded image"


def finite_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the check of decoded latents succeed: the null GPU does not compute its result."""
    real = atoll.ensemble.sampler.download

    def download(first: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copied = real(first, *others)
        return (torch.ones(()), *copied[1:])

    monkeypatch.setattr("atoll.ensemble.sampler.download", download)
