"""Sampling: from prompts to image files."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

import atoll
from atoll import cli
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.ensemble.sampler import Sampler, Trace
from atoll.ensemble.saving import COLORS, draw_trace
from atoll.flow import SOLVERS
from atoll.nets import Condition, DiT, PreparedCondition, load_network
from atoll.nets.quantization import Int8Linear, quantize
from ensemble.runs import read_settings, write_run

PROMPTS = ["a red circle", "a green square"]
QUICK = {"num_inference_steps": 4, "guidance_scale": 3.0}
# Kernels sum batches of different sizes in different orders. With an error of one rounding added to every kernel, the
# latents of these four guided steps differed by up to 2e-4. Those of another seed differ by more than 0.05 on average.
ROUNDING = {"atol": 1e-3, "rtol": 1e-3}


def test_a_sampler_takes_one_prompt_and_describes_itself(run: Path) -> None:
    sampler = atoll.load(run)
    one, several = sampler.generate(PROMPTS[0], **QUICK), sampler.generate(PROMPTS[:1], **QUICK)
    assert torch.equal(one.latents, several.latents)
    assert one.prompts == PROMPTS[:1]
    assert [image.tobytes() for image in sampler.sample(PROMPTS[0], **QUICK)] == [one.images[0].tobytes()]
    repeated = sampler.generate(PROMPTS, num_images_per_prompt=2, **QUICK)
    assert repeated.prompts == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    told = "Sampler(3 experts with a router, conditioned on pooled, text; latents 3x8x8; on cpu in float32)"
    assert repr(sampler) == told
    assert repr(atoll.load(run, "student")).startswith("Sampler(student, conditioned on ")


@pytest.mark.parametrize("routing", ["top-1", "top-2", "drawn", "sample-1", "nearest"])
def test_a_seed_gives_the_same_image_at_any_batch_size(run: Path, routing: str) -> None:
    ensemble = atoll.load(run)
    whole = ensemble.generate(PROMPTS, num_images=7, routing=routing, **QUICK)
    parts = ensemble.generate(PROMPTS, num_images=7, routing=routing, batch_size=3, **QUICK)
    torch.testing.assert_close(parts.latents, whole.latents, **ROUNDING)
    fewer = ensemble.generate(PROMPTS, num_images=4, routing=routing, **QUICK)
    torch.testing.assert_close(fewer.latents, whole.latents[:4], **ROUNDING)
    other = ensemble.generate(PROMPTS, num_images=7, routing=routing, seed=1, **QUICK)
    assert (other.latents - whole.latents).flatten(1).abs().mean(1).min() > 0.05


class ThreadContext(DistContext):
    """One of several threads that take the places of processes; `results` and `barrier` are common to all."""

    def __init__(self, rank: int, results: list[Any], barrier: Barrier) -> None:
        super().__init__(rank, len(results), torch.device("cpu"))
        self.__dict__ |= {"results": results, "barrier": barrier}

    def on_all(self, work: Callable[[], Any]) -> list[Any]:
        self.results[self.rank] = work()
        self.barrier.wait()
        found = list(self.results)
        self.barrier.wait()
        return found

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.on_all(lambda: rows)).sum(0, dtype=rows.dtype)


@pytest.mark.parametrize(("processes", "kept"), [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3, 6])])
def test_an_interrupt_leaves_out_the_batches_that_were_not_begun(run: Path, processes: int, kept: list[int]) -> None:
    """The main process is interrupted in the second of its batches if it is alone, and else in its first one."""
    settings = {"num_images": 7, "batch_size": 2, "trace": True, "routing": "top-2", **QUICK}
    whole, stop = atoll.load(run).generate(PROMPTS, **settings), 2 - processes
    results, barrier = [None] * processes, Barrier(processes)

    def work(rank: int) -> Any:
        begun = []

        def on_step_end(sampler: Sampler, step: int, *_: Any) -> None:
            begun.extend([step] if step == 0 else [])
            sampler.interrupt = rank == 0 and len(begun) == stop + 1 and step == 1

        context = ThreadContext(rank, results, barrier)
        try:
            return atoll.load(run).generate(PROMPTS, callback_on_step_end=on_step_end, processes=context, **settings)
        except BaseException:
            barrier.abort()  # ends the other thread too
            raise

    with ThreadPoolExecutor(processes) as pool:
        for made in pool.map(work, range(processes)):
            partly = slice(2 * stop, 2 * stop + 2)  # the images of the interrupted batch
            finished = [row for row in range(len(kept)) if row not in range(7)[partly]]
            assert torch.equal(made.latents[finished], whole.latents[kept][finished])
            assert not torch.isclose(made.latents[partly], whole.latents[kept][partly]).all(-1).any()
            assert len(made.images) == len(kept)
            assert made.prompts == [whole.prompts[number] for number in kept]
            assert torch.equal(made.trace.t, whole.trace.t[:2])
            assert torch.equal(made.trace.weights, whole.trace.weights[:2, kept])


def test_drawing_an_expert_by_an_unconditioned_router_gives_a_warning(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conditioned = write_run(tmp_path / "run", router_conditioning=("pooled",))
    warned = {}
    for folder, routing in ((run, "drawn"), (run, "top-2@0.5,drawn"), (conditioned, "drawn")):
        atoll.load(folder).generate(PROMPTS, routing=routing, num_inference_steps=2)
        warned[folder, routing] = "the router is not conditioned on the prompt" in capsys.readouterr().err
    assert list(warned.values()) == [True, False, False]


def test_conditions_are_prepared_for_one_batch_at_a_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many prompts, an expert keeps the prepared conditions of one batch and the null condition."""
    rows, prepare = list[int](), DiT.prepare

    def counted(self: DiT, condition: Condition) -> PreparedCondition:
        assert condition.text is not None
        rows.append(len(condition.text))
        return prepare(self, condition)

    many = [f"a red circle and {number} squares" for number in range(7)]
    expected = atoll.load(run).generate(many, batch_size=7, **QUICK).latents
    monkeypatch.setattr(DiT, "prepare", counted)
    made = atoll.load(run).generate(many, batch_size=3, **QUICK).latents
    assert set(rows) <= {2, 4}
    torch.testing.assert_close(made, expected, **ROUNDING)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_samples(run: Path, solver: str) -> None:
    """Two prompts give different images from the same noise."""
    ensemble = atoll.load(run)
    first, second = (ensemble.sample([prompt], solver=solver, num_inference_steps=5)[0] for prompt in PROMPTS)
    assert first.size == (8, 8)
    assert np.abs(np.asarray(first, float) - np.asarray(second, float)).max() > 0


def test_guidance_applies_only_inside_its_interval(run: Path) -> None:
    ensemble = atoll.load(run)
    plain = ensemble.generate(PROMPTS, num_inference_steps=4, guidance_scale=1.0).latents
    never = ensemble.generate(PROMPTS, num_inference_steps=4, guidance_scale=9.0, guidance_interval=(0.3, 0.4)).latents
    always = ensemble.generate(PROMPTS, num_inference_steps=4, guidance_scale=9.0).latents
    late = ensemble.generate(PROMPTS, num_inference_steps=4, guidance_scale=9.0, guidance_interval=(0.0, 0.5)).latents
    assert torch.equal(never, plain)
    assert not torch.allclose(always, plain, atol=1e-2)
    assert not torch.allclose(late, always, atol=1e-2)


def test_a_trace_records_every_routing_decision(run: Path) -> None:
    trace = atoll.load(run).generate(PROMPTS, num_images=5, trace=True, routing="top-2", batch_size=2, **QUICK).trace
    assert trace is not None
    assert trace.weights.shape == trace.probabilities.shape == (4, 5, 3)
    assert trace.t.tolist() == [1.0, 0.75, 0.5, 0.25]
    torch.testing.assert_close(trace.weights.sum(-1), torch.ones(4, 5))
    assert ((trace.weights > 0).sum(-1) == 2).all()
    assert trace.experts == ("experts/000", "experts/001", "experts/002")


def test_a_dense_model_has_a_trace_with_weight_one(run: Path) -> None:
    trace = atoll.load(run, "student").generate(PROMPTS, trace=True, **QUICK).trace
    assert trace is not None
    assert torch.equal(trace.weights, torch.ones(4, 2, 1))


def test_missing_experts_give_a_warning_and_the_others_are_sampled(run: Path, tmp_path: Path, capsys) -> None:
    partial = tmp_path / "partial"
    shutil.copytree(run, partial)
    shutil.rmtree(partial / "experts/001")
    ensemble = atoll.load(partial)
    assert ensemble.missing == ("experts/001",)
    weights = ensemble.ensemble.route(torch.randn(4, 3, 8, 8), 0.5, routing="full")
    whole = atoll.load(run)
    assert weights.shape == (4, 2)
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    ensemble.sample(PROMPTS, **QUICK)
    assert "experts/001 is missing; sampling without it" in capsys.readouterr().err
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    full = whole.ensemble.route(x, 0.5, routing="full")[:, [0, 2]]
    torch.testing.assert_close(ensemble.ensemble.route(x, 0.5, routing="full"), full / full.sum(1, keepdim=True))
    with pytest.raises(AtollError, match="has no finished experts/001"):
        atoll.load(partial, strict=True)


def test_classes_are_given_by_name_or_number(tmp_path: Path, capsys) -> None:
    ensemble = atoll.load(write_run(tmp_path / "run", conditioning=("label",)))
    by_name = ensemble.generate(label=["square"], **QUICK)
    assert torch.equal(by_name.latents, ensemble.generate(label=[1], **QUICK).latents)
    assert not torch.equal(by_name.latents, ensemble.generate(label=[2], **QUICK).latents)
    with pytest.raises(AtollError, match=r"unknown class 'sqare' \(did you mean 'square'\?\)"):
        ensemble.sample(label=["sqare"])
    capsys.readouterr()
    ensemble.sample(PROMPTS, **QUICK)
    warnings = capsys.readouterr().err
    assert "these experts are not conditioned on prompts" in warnings
    assert "the guidance scale has no effect" in warnings


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"solver": "eulr"}, "did you mean 'euler'?"),
        ({"num_inference_steps": 0}, "steps >= 1"),
        ({"num_images": 0}, "at least one image"),
        ({"guidance_interval": (0.9, 0.1)}, "guidance interval"),
        ({"prompt": []}, "prompt must not be empty"),
        ({"prompt": "a", "generator": [torch.Generator(), torch.Generator()]}, "2 generators for 1 images"),
        ({"prompt": "a", "latents": torch.zeros(1, 3, 8, 9)}, "no size 9x8"),
        ({"prompt": "a", "width": 8, "height": 8, "latents": torch.zeros(1, 3, 4, 4)}, "expected (1, 3, 8, 8)"),
        ({"negative_prompt": "a"}, "negative_prompt needs a prompt"),
        ({"prompt_embeds": torch.zeros(1, 4, 8), "prompt": "a"}, "replaces a prompt"),
        ({"callback_on_step_end_tensor_inputs": ["latent"]}, "did you mean 'latents'?"),
        ({"label": ["circle"], "prompt": ["a", "b"]}, None),
    ],
)
def test_invalid_settings_are_an_error(run: Path, how: dict, says: str | None) -> None:
    ensemble = atoll.load(run)
    if says is None:
        assert len(ensemble.sample(**{"num_inference_steps": 2, **how})) == 2
        return
    with pytest.raises(AtollError) as error:
        ensemble.sample(**how)
    assert says in str(error.value)


def test_a_missing_or_damaged_model_is_an_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="is not a run"):
        atoll.load(tmp_path)
    with pytest.raises(AtollError, match=r"unknown model 'monolit' \(did you mean 'monolith'\?\)"):
        atoll.load(run, "monolit")
    with pytest.raises(AtollError, match=r"no expert:7 in \S+; it has 3 experts"):
        atoll.load(run, "expert:7")
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    shutil.rmtree(damaged / "experts/002")
    with pytest.raises(AtollError, match=r"experts/002.*atoll train .* --expert 2"):
        atoll.load(damaged, "expert:2")
    (damaged / "experts/000/final/diffusion_pytorch_model.safetensors").write_bytes(b"short")
    with pytest.raises(AtollError, match="has 5 bytes"):
        atoll.load(damaged)


def test_without_a_router_nearest_and_oracle_still_work(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(run, alone)
    shutil.rmtree(alone / "router")
    ensemble = atoll.load(alone)
    assert len(ensemble.sample(PROMPTS, routing="nearest", num_inference_steps=2)) == 2
    assert len(ensemble.sample(PROMPTS, routing="oracle", cluster=[2, 0], num_inference_steps=2)) == 2
    with pytest.raises(AtollError, match="no router"):
        ensemble.sample(PROMPTS, routing="top-1", num_inference_steps=2)
    for number in range(3):
        manifest = alone / f"experts/{number:03d}/final/manifest.json"
        value = json.loads(manifest.read_text())
        del value["files"]["cluster.safetensors"]
        manifest.write_text(json.dumps(value))
    with pytest.raises(AtollError, match="experts/000 has no cluster density"):
        atoll.load(alone).sample(PROMPTS, routing="nearest", num_inference_steps=2)


def test_bfloat16_and_int8_are_close_to_float32(run: Path) -> None:
    how = {"num_images": 3, "routing": "oracle", "cluster": [0, 1, 2], "num_inference_steps": 4, "guidance_scale": 1.0}
    exact = atoll.load(run).generate(PROMPTS, **how).latents
    for options, limit in (({"dtype": "bfloat16"}, 0.05), ({"quantize": "int8"}, 0.05)):
        other = atoll.load(run, **options).generate(PROMPTS, **how).latents
        error = ((other - exact).norm() / exact.norm()).item()
        assert 0 < error < limit, options


def test_the_error_of_quantized_experts_is_measured(run: Path) -> None:
    ensemble, exact = atoll.load(run, quantize="int8"), atoll.load(run)
    assert ensemble.ensemble.cache.quantization_error == {}
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    how = {"routing": "oracle", "cluster": torch.ones(6, dtype=torch.long)}
    change = (
        ensemble.ensemble.velocity(x, 0.5, **how) - exact.ensemble.velocity(x, 0.5, **how)
    ).norm() / exact.ensemble.velocity(x, 0.5, **how).norm()
    reported = ensemble.ensemble.cache.quantization_error["experts/001"]
    assert 0.3 * reported < change < 3 * reported
    assert 1e-4 < reported < 0.05


def test_quantized_weights_are_within_half_a_step(run: Path) -> None:
    network = load_network(run / "experts/000/final")
    weight = network.blocks[0].mlp.inner.weight.detach().clone()
    quantized = quantize(network, "int8").blocks[0].mlp.inner
    assert isinstance(quantized, Int8Linear)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((quantized.weight - weight).abs() <= step / 2 + 1e-7).all()


def test_the_command_writes_images_with_their_settings(run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    command = ["sample", str(run), *PROMPTS, "--num-images", "3", "--steps", "3", "--seed", "5", "--out", str(out)]
    assert cli.main([*command, "--save-routing", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [Path(file).name for file in printed["images"]] == ["000.png", "001.png", "002.png"]
    assert printed["settings"]["routing"] == "top-1" == atoll.load(run).ensemble.routing.text  # one default everywhere
    settings = read_settings(out / "002.png")
    assert settings["prompt"] == PROMPTS[0]
    again = atoll.load(run).generate(
        PROMPTS,
        num_images=3,
        num_inference_steps=settings["steps"],
        **{key: settings[key] for key in ("seed", "routing", "guidance_scale")},
    )
    for number in range(3):
        made = np.asarray(Image.open(out / f"{number:03d}.png"), float)
        assert np.abs(made - np.asarray(again.images[number], float)).max() <= 1
    assert read_settings(out / "grid.png")["prompt"] == [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    with Image.open(out / "routing.png") as trace:
        colors = {color for _, color in trace.getcolors(100000) or []}
        assert len(colors) > 3


def test_weights_too_small_for_a_pixel_are_not_drawn() -> None:
    weights = torch.tensor([[[0.998, 0.002, 0.0]], [[0.0, 0.001, 0.999]]])  # (steps, images, experts)
    trace = Trace(torch.tensor([1.0, 0.5]), weights, weights, ("experts/000", "experts/001", "experts/002"))
    page = np.asarray(draw_trace(trace, [Image.new("RGB", (8, 8))]))
    bars = page[45:100, 75:]  # right of the image, below the legend
    shown = [bool((bars == ImageColor.getrgb(color)).all(2).any()) for color in COLORS[:3]]
    assert shown == [True, False, True]


def test_the_command_prints_the_memory_plan_and_errors(run: Path, capsys) -> None:
    assert cli.main(["sample", str(run), "a circle", "--plan", "--json", "--max-loaded-experts", "1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["max_loaded_experts"] == 1
    assert plan["total"] == sum(plan["parts"].values())
    assert cli.main(["sample", str(run), "--routing", "top2", "--steps", "2"]) == 2
    assert "did you mean 'top-2'?" in capsys.readouterr().err
