"""The pipeline class, as users of diffusers call it."""

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import atoll
from atoll.apps.models.pipeline import AtollPipeline, ExpertModel
from atoll.core.errors import AtollError
from atoll.ensemble.sampler import Sampler
from atoll.flow import rng
from ensemble.runs import write_run

LABELS: list[str | int] = ["circle", "square", "triangle", "circle"]
PROMPTS = ["a red circle", "a green triangle"]
FEW: dict[str, Any] = {"num_inference_steps": 3, "output_type": "latent"}
ROUNDING = {"atol": 1e-3, "rtol": 1e-3}  # of batches of different sizes


@pytest.fixture(scope="module")
def pipe(conditioned_export: Path) -> AtollPipeline:
    return AtollPipeline.from_pretrained(conditioned_export)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of text and classes, and a router of text."""
    run = tmp_path_factory.mktemp("text") / "run"
    return write_run(run, conditioning=("text", "label"), router_conditioning=("pooled",))


@pytest.fixture(scope="module")
def text_pipe(text_run: Path) -> AtollPipeline:
    return AtollPipeline.from_pretrained(text_run)


def test_the_defaults_are_those_of_the_sampler(pipe: AtollPipeline, conditioned_run: Path) -> None:
    expected = atoll.load(conditioned_run).generate(label=LABELS, num_inference_steps=3)
    assert torch.equal(pipe(label=LABELS, **FEW).images, expected.latents)
    images = pipe(label=LABELS, num_inference_steps=3).images
    assert [image.tobytes() for image in images] == [image.tobytes() for image in expected.images]
    again = pipe(label=LABELS, num_inference_steps=3, output_type="np", return_dict=False)[0]
    assert again.shape == (4, 8, 8, 3)
    assert np.array_equal(np.round(again * 255).astype(np.uint8), np.stack([np.asarray(image) for image in images]))
    assert pipe(label=LABELS, num_inference_steps=1, output_type="pt").images.shape == (4, 3, 8, 8)
    assert pipe(**FEW, num_images_per_prompt=2).images.shape == (2, 3, 8, 8)


def test_every_setting_reaches_the_sampler(pipe: AtollPipeline, conditioned_run: Path) -> None:
    how = {"guidance_interval": (0.2, 0.9), "guidance_rescale": 0.5, "solver": "heun", "shift": 2.0}
    expected = atoll.load(conditioned_run).generate(
        label=LABELS, num_inference_steps=3, guidance_scale=2.0, routing="full", seed=9, **how
    )
    got = pipe(label=LABELS, guidance_scale=2.0, routing="full", seed=9, **how, **FEW)
    assert torch.equal(got.images, expected.latents)
    oracle = atoll.load(conditioned_run).generate(
        label=["circle"] * 2, cluster=[2] * 2, num_inference_steps=3, routing="oracle"
    )
    got = pipe(label="circle", cluster=2, routing="oracle", num_images_per_prompt=2, **FEW)
    assert torch.equal(got.images, oracle.latents)


def test_a_saved_pipeline_equals_the_export(pipe: AtollPipeline, conditioned_export: Path, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path / "again")
    saved, exported = (
        json.loads((folder / "model_index.json").read_text()) for folder in (tmp_path / "again", conditioned_export)
    )
    assert saved == exported
    for file in conditioned_export.rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.relative_to(conditioned_export)).read_bytes()
    expected = pipe(label=LABELS, routing="nearest", **FEW).images
    assert torch.equal(
        AtollPipeline.from_pretrained(tmp_path / "again")(label=LABELS, routing="nearest", **FEW).images, expected
    )
    assert len(atoll.load(tmp_path / "again").ensemble.declarations) == 3
    pipe.save_pretrained(tmp_path / "again")  # over itself
    atoll.load(tmp_path / "again")


def test_a_pipeline_can_be_built_from_components(pipe: AtollPipeline) -> None:
    assert set(pipe.components) == {f"expert_{k}" for k in range(3)} | {
        "router", "vae", "text_encoder", "tokenizer", "scheduler",
    }  # fmt: skip
    expected = pipe(label=LABELS, **FEW).images
    assert torch.equal(AtollPipeline(**pipe.components)(label=LABELS, **FEW).images, expected)
    one = AtollPipeline(expert_0=pipe.expert_1, scheduler=pipe.scheduler)
    alone = pipe(label=LABELS, routing="oracle", cluster=[1] * 4, **FEW).images
    torch.testing.assert_close(one(label=LABELS, **FEW).images, alone, atol=1e-5, rtol=1e-5)
    with pytest.raises(AtollError, match="at least one expert"):
        AtollPipeline(scheduler=pipe.scheduler)


def test_an_expert_can_be_loaded_alone(conditioned_export: Path, conditioned_run: Path) -> None:
    expert = ExpertModel.from_pretrained(conditioned_export, subfolder="expert_1")
    assert expert.declaration() == atoll.load(conditioned_run).ensemble.declarations[1]
    assert expert.density is not None
    assert expert.dtype == torch.float32


@pytest.mark.parametrize(("solver", "shift"), [("dpm++", 1.0), ("unipc", 2.0), ("flow-heun", 1.0)])
def test_the_scheduler_can_be_replaced(pipe: AtollPipeline, conditioned_run: Path, solver: str, shift: float) -> None:
    from atoll.flow import diffusers_scheduler

    expected = (
        atoll.load(conditioned_run).generate(label=LABELS, num_inference_steps=3, solver=solver, shift=shift).latents
    )
    other = AtollPipeline(**{**pipe.components, "scheduler": diffusers_scheduler(solver, shift)})
    assert torch.equal(other(label=LABELS, **FEW).images, expected)


def test_a_plain_euler_scheduler_uses_the_euler_solver_of_atoll(pipe: AtollPipeline, conditioned_run: Path) -> None:
    shifted = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    other = AtollPipeline(**{**pipe.components, "scheduler": shifted})
    expected = atoll.load(conditioned_run).generate(label=LABELS, num_inference_steps=3, shift=3.0).latents
    assert torch.equal(other(label=LABELS, **FEW).images, expected)
    assert torch.equal(pipe(label=LABELS, shift=3.0, **FEW).images, expected)
    karras = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    other = AtollPipeline(**{**pipe.components, "scheduler": karras})
    assert not torch.equal(other(label=LABELS, **FEW).images, pipe(label=LABELS, **FEW).images)
    with pytest.raises(AtollError, match="scheduler of the pipeline already has a shift"):
        other(label=LABELS, shift=3.0, **FEW)


@pytest.mark.parametrize("scheduler", [diffusers.DDIMScheduler(), diffusers.EulerDiscreteScheduler()])
def test_a_scheduler_without_velocities_is_refused_before_any_network_runs(
    pipe: AtollPipeline, scheduler: diffusers.SchedulerMixin
) -> None:
    other, ran = AtollPipeline(**pipe.components), []
    other.scheduler = scheduler
    networks = [module for module in other.components.values() if isinstance(module, torch.nn.Module)]
    hooks = [part.register_forward_hook(lambda *_: ran.append(1)) for module in networks for part in module.modules()]
    try:
        with pytest.raises(AtollError, match=f"{type(scheduler).__name__} cannot be used .* does not take velocities"):
            other("a red circle", **FEW)
        assert not ran
        other("a red circle", solver="heun", **FEW)  # the scheduler is not used
        assert ran
    finally:
        for hook in hooks:
            hook.remove()


def test_scheduler_times_uses_the_times_of_the_scheduler(pipe: AtollPipeline, conditioned_run: Path) -> None:
    """The usual loop of diffusers over the same velocity gives the same latents."""
    ensemble, scheduler = atoll.load(conditioned_run), diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(FEW["num_inference_steps"])
    x = rng.normal((4, 3, 8, 8), seed=0, stream=rng.Stream.SAMPLE, first=0)
    condition = ensemble.encode(labels=LABELS)
    for timestep in scheduler.timesteps:
        v = ensemble.ensemble.velocity(x, float(timestep) / 1000, condition, guidance_scale=4.0)
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
    got = pipe(label=LABELS, scheduler_times=True, **FEW).images
    torch.testing.assert_close(got, x, atol=1e-4, rtol=1e-4)
    assert (got - pipe(label=LABELS, **FEW).images).abs().max() > 1e-2
    named = {"solver": "flow-euler", "scheduler_times": True}
    expected = ensemble.generate(label=LABELS, num_inference_steps=3, **named)
    torch.testing.assert_close(got, expected.latents, atol=1e-5, rtol=1e-5)
    with pytest.raises(AtollError, match="scheduler_times needs a diffusers solver"):
        ensemble.generate(label=LABELS, num_inference_steps=3, scheduler_times=True)


def test_a_generator_draws_a_new_seed_for_each_call(pipe: AtollPipeline) -> None:
    first, second = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    one, two = (pipe(label=LABELS, generator=first, **FEW).images for _ in range(2))
    assert torch.equal(one, pipe(label=LABELS, generator=second, **FEW).images)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("routing", ["top-1", "drawn", "sample-1"])
def test_an_image_with_its_own_generator_does_not_depend_on_the_others(pipe: AtollPipeline, routing: str) -> None:
    def generators(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    how = {**FEW, "routing": routing}
    many = pipe(PROMPTS, generator=generators(4, 5), **how).images
    swapped = pipe(PROMPTS[::-1], generator=generators(5, 4), **how).images
    torch.testing.assert_close(many, swapped.flip(0), **ROUNDING)
    alone = pipe(PROMPTS[1], generator=generators(5), **how).images
    torch.testing.assert_close(many[1:], alone, **ROUNDING)
    assert torch.equal(alone, pipe(PROMPTS[1], generator=generators(5)[0], **how).images)


def test_latents_are_the_noise(pipe: AtollPipeline) -> None:
    noise = rng.normal((4, 3, 8, 8), seed=6, stream=rng.Stream.SAMPLE, first=0)
    assert torch.equal(pipe(label=LABELS, latents=noise, **FEW).images, pipe(label=LABELS, seed=6, **FEW).images)
    with pytest.raises(AtollError, match="4 latents for 1 images"):
        pipe(label="circle", latents=noise, **FEW)


def test_encoded_prompts_replace_prompts(text_pipe: AtollPipeline) -> None:
    encoded = text_pipe.encode_prompt(PROMPTS)
    without = AtollPipeline(**{**text_pipe.components, "text_encoder": None, "tokenizer": None})
    expected = text_pipe(PROMPTS, num_images_per_prompt=2, **FEW).images
    assert torch.equal(without(**encoded, num_images_per_prompt=2, **FEW).images, expected)
    with pytest.raises(AtollError, match="also need pooled_prompt_embeds"):
        without(prompt_embeds=encoded["prompt_embeds"], **FEW)


def test_guidance_moves_away_from_the_negative_prompt(text_pipe: AtollPipeline, text_run: Path) -> None:
    """v = v(negative) + g (v(prompt) - v(negative)), with the router's weights for each of the two prompts."""
    sampler = atoll.load(text_run)
    x = rng.normal((2, 3, 8, 8), seed=0, stream=rng.Stream.SAMPLE, first=0)
    for routing in ("top-1", "nearest:full"):
        v, away = (
            sampler.ensemble.velocity(x, 1.0, sampler.encode(prompts), routing=routing)
            for prompts in (PROMPTS, ["a blue square"] * 2)
        )
        how: dict[str, Any] = {"num_inference_steps": 1, "output_type": "latent", "routing": routing}
        got = text_pipe(PROMPTS, negative_prompt="a blue square", guidance_scale=3.0, **how).images
        torch.testing.assert_close(got, x - (away + 3 * (v - away)), **ROUNDING)
        each = text_pipe(PROMPTS, negative_prompt=["a blue square"] * 2, guidance_scale=3.0, **how).images
        assert torch.equal(each, got)
        same = text_pipe(PROMPTS, negative_prompt=PROMPTS, guidance_scale=3.0, **how).images
        torch.testing.assert_close(same, text_pipe(PROMPTS, guidance_scale=1.0, **how).images, **ROUNDING)
    # With classes, the negative prompt has the null class.
    both = text_pipe(PROMPTS, label=["circle", "square"], negative_prompt="a blue square", **FEW).images
    assert not torch.equal(both, text_pipe(PROMPTS, label=["circle", "square"], **FEW).images)


def test_a_callback_sees_and_changes_every_step(text_pipe: AtollPipeline) -> None:
    seen: list[tuple[int, float, torch.Tensor]] = []

    def record(of: Any, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        assert of is text_pipe
        seen.append((step, timestep.item(), tensors["latents"]))
        return tensors

    assert torch.equal(text_pipe(PROMPTS, callback_on_step_end=record, **FEW).images, seen[-1][2])
    assert [(step, round(timestep)) for step, timestep, _ in seen] == [(0, 1000), (1, 667), (2, 333)]

    def other_prompts(_: Any, step: int, __: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        return {**tensors, "prompt_embeds": tensors["prompt_embeds"].flip(0)} if step == 0 else tensors

    inputs = ["latents", "prompt_embeds"]
    how = {"callback_on_step_end_tensor_inputs": inputs, **FEW}
    changed = text_pipe(PROMPTS, callback_on_step_end=other_prompts, **how).images
    assert not torch.allclose(changed, seen[-1][2], atol=1e-3)
    halved = text_pipe(PROMPTS, callback_on_step_end=lambda *given: {"latents": given[3]["latents"] / 2}, **FEW).images
    assert not torch.allclose(halved, seen[-1][2], atol=1e-3)


@pytest.mark.parametrize("solver", ["euler", "flow-euler"])
def test_an_interrupted_call_returns_the_latents_of_its_last_step(pipe: AtollPipeline, solver: str) -> None:
    seen = []

    def stop(of: Any, step: int, _: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["latents"])
        of._interrupt = step == 1
        return tensors

    images = pipe(PROMPTS, callback_on_step_end=stop, solver=solver, num_inference_steps=5, output_type="latent").images
    assert len(seen) == 2
    assert pipe.interrupt
    assert torch.equal(images, seen[-1])
    pipe(PROMPTS, **FEW)
    assert not pipe.interrupt


def test_an_unknown_keyword_names_the_nearest_one(pipe: AtollPipeline, conditioned_run: Path) -> None:
    for call in (pipe, atoll.load(conditioned_run).sample):
        with pytest.raises(TypeError, match=r"unknown keyword 'negativ_prompt' \(did you mean 'negative_prompt'\?\)"):
            call("a red circle", negativ_prompt="a square")  # type: ignore[operator]
    assert {"callback_on_step_end", "latents"} <= set(inspect.signature(pipe.__call__).parameters)
    assert "num_inference_steps" in inspect.signature(Sampler.sample).parameters


def test_a_run_opens_as_a_pipeline(pipe: AtollPipeline, conditioned_run: Path, tmp_path: Path) -> None:
    opened = AtollPipeline.from_pretrained(conditioned_run)
    assert torch.equal(opened(PROMPTS, **FEW).images, pipe(PROMPTS, **FEW).images)
    opened.save_pretrained(tmp_path / "saved")
    again = AtollPipeline.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(PROMPTS, **FEW).images, pipe(PROMPTS, **FEW).images)
    assert AtollPipeline.from_pretrained(conditioned_run, torch_dtype=torch.bfloat16).expert_0.dtype == torch.bfloat16
    with pytest.raises(AtollError, match=r"device_map: a run takes only torch_dtype; .*atoll export"):
        AtollPipeline.from_pretrained(conditioned_run, device_map="balanced")


def test_bfloat16_images_are_close_to_float32(conditioned_export: Path, pipe: AtollPipeline) -> None:
    half = AtollPipeline.from_pretrained(conditioned_export, dtype=torch.bfloat16)
    assert half.dtype == half.expert_2.dtype == half.router.dtype == torch.bfloat16
    expected = pipe(label=LABELS, routing="full", guidance_scale=1.0, **FEW).images
    got = half(label=LABELS, routing="full", guidance_scale=1.0, **FEW).images.float()
    error = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < error < 0.1


def test_unsupported_options_are_errors(pipe: AtollPipeline, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="pickles"):
        pipe.save_pretrained(tmp_path / "out", safe_serialization=False)
    with pytest.raises(AtollError, match="hf upload"):
        pipe.save_pretrained(tmp_path / "out", push_to_hub=True)
    with pytest.raises(AtollError, match=r"unknown output_type 'pill' \(did you mean 'pil'\?\)"):
        pipe(output_type="pill")
    text_expert = ExpertModel.from_pretrained(exported / "expert_0")
    with pytest.raises(AtollError, match="no text_encoder, but its experts need one"):
        AtollPipeline(expert_0=text_expert, scheduler=pipe.scheduler)("a red circle")


def test_offloaded_networks_give_the_same_images(conditioned_export: Path, pipe: AtollPipeline) -> None:
    """accelerate moves the networks when they run, here from the CPU to the CPU.

    They run through their hooks, so conditions are not prepared ahead, which changes the rounding.
    """
    away = AtollPipeline.from_pretrained(conditioned_export)
    away.enable_model_cpu_offload(device="cpu")
    assert all(expert.offloaded for expert in away.experts)
    how = {"num_inference_steps": 3, "routing": "top-2", "seed": 5, "output_type": "latent"}
    expected = pipe(["a red circle", "a square"], **how).images
    for _ in range(2):  # the second call after the hooks were set anew
        torch.testing.assert_close(away(["a red circle", "a square"], **how).images, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(AtollError, match=r"use enable_model_cpu_offload\(\)"):
        away.enable_sequential_cpu_offload()
