"""Bases whose networks predict noise: their schedule is traced, and the bridge gives the samples of diffusers."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

import atoll
from atoll import cli, flow
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT
from atoll.core.networks import BaseConfig, LoraSpec, TraceSpec
from atoll.data.shapes import DataShapes
from atoll.encoders.base_pipeline import BasePipeline, register_base
from atoll.encoders.trace import trace
from atoll.ensemble.ensemble import Ensemble
from atoll.experts.cost import image_cost
from atoll.nets import Condition
from atoll.nets.arguments import ArgumentTable
from atoll.nets.base import BaseExpert
from atoll.train import resolve_job
from base.conftest import ROUTER
from base.test_attach import PROMPTS, Case, latents, opened
from base.test_run import sample
from base.test_trace import SMALL, WIDE, recorder
from base.tiny import OPTIONS, pipeline, save, stable_diffusion, unet

XL = "stable_diffusion_xl"


def difference(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the RMS difference relative to the RMS: the latents of untrained networks are in the tens."""
    return float((one - two).norm() / two.norm())


@pytest.mark.parametrize(
    ("predicts", "ours"), [("epsilon", "epsilon"), ("v_prediction", "v_prediction"), ("sample", "x0")]
)
def test_the_prediction_and_the_schedule_are_traced(predicts: str, ours: str) -> None:
    pipe = stable_diffusion()
    betas = {"beta_schedule": "linear", "beta_start": 0.0003, "beta_end": 0.03, "num_train_timesteps": 500}
    pipe.scheduler = diffusers.DDPMScheduler(prediction_type=predicts, **betas)
    found, _, notes = trace(recorder(pipe), SMALL, WIDE)
    assert found.prediction == ours
    assert found.schedule == {"name": "ddpm-linear", "steps": 500, "beta_start": 0.0003, "beta_end": 0.03}
    assert (found.time, found.scale, found.offset, found.sign) == ("timestep", 1000, 0, 1)
    assert "traced with DDIMScheduler instead of DDPMScheduler" in notes


def test_a_multistep_scheduler_of_flow_matching_is_replaced_by_euler() -> None:
    pipe = pipeline("sana")
    wanted, *_ = trace(recorder(pipe, **OPTIONS["sana"]), SMALL, WIDE)
    settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler(**settings)
    found, plain, notes = trace(recorder(pipe, **OPTIONS["sana"]), SMALL, WIDE)
    assert found == wanted
    assert plain.scheduler.config.shift == 3.0
    assert "traced with FlowMatchEulerDiscreteScheduler instead of DPMSolverMultistepScheduler" in notes
    assert type(pipe.scheduler) is diffusers.DPMSolverMultistepScheduler


@pytest.mark.parametrize("family", ["pixart_sigma", XL, "sana"])
def test_a_base_is_traced_in_half_precision(family: str, tmp_path: Path) -> None:
    name = f"base:{save(family, tmp_path)}#{json.dumps(OPTIONS.get(family, {}))}"
    base = BasePipeline(name, torch.device("cpu"), torch.bfloat16)
    assert base.latent_shape(SMALL) == (4, 32, 32)
    assert base.pipe.vae.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["DDIMScheduler", "EulerDiscreteScheduler"])
@pytest.mark.parametrize("family", ["pixart_sigma", XL])
def test_euler_over_the_bridge_is_ddim_and_euler_of_diffusers(family: str, kind: str, tmp_path: Path) -> None:
    """Both move x0 and noise as predicted to the next signal-to-noise ratio, so equal ratios give equal states."""
    name = f"base:{save(family, tmp_path)}#{json.dumps(OPTIONS.get(family, {}))}"
    register_base(name)
    base = BasePipeline(name)
    expert = BaseExpert(replace(base.config(), lora=LoraSpec(rank=2))).eval()  # a new adapter is zero
    table = ArgumentTable([base.arguments(prompt, SMALL) for prompt in PROMPTS], expert.config.trace.batching)
    condition = Condition(arguments=torch.arange(2), table=table)

    pipe, options = opened(tmp_path), {"timestep_spacing": "leading", "steps_offset": 1}
    last = {"clip_sample": False, "set_alpha_to_one": True} if kind == "DDIMScheduler" else {}
    pipe.scheduler = getattr(diffusers, kind).from_config(pipe.scheduler.config, **options, **last)
    noise = torch.randn(2, *base.latent_shape(SMALL), generator=torch.Generator().manual_seed(0))
    plain = {"clean_caption": False, "use_resolution_binning": False} if family == "pixart_sigma" else {}
    given = {"latents": noise.clone(), "guidance_scale": 1.0, "height": 64, "width": 64, **OPTIONS.get(family, {})}
    wanted = pipe(PROMPTS, num_inference_steps=10, output_type="latent", **given, **plain).images

    schedule = flow.schedule(**expert.config.trace.schedule)
    # An untrained network predicts no noise, so its x0 is far beyond the bound of real data.
    bridge = flow.Bridge(schedule, expert.config.trace.prediction, x0_bound=None)
    steps = torch.arange(901, 0, -100, dtype=torch.float64) / 999
    times = [*flow.LINEAR.time_of_log_snr(schedule.log_snr(steps)).tolist(), 0.0]
    x, _ = bridge.linear_state(noise, 999 * steps[:1].float().expand(2))
    field = bridge.wrap(lambda state, timestep: expert(state, timestep, condition))
    with torch.no_grad():
        for t, following in pairwise(times):
            x = flow.step(field, x, [t], to=[following]).x
    assert difference(x, wanted) < 1e-5


@pytest.mark.parametrize("name", ["ddpm-linear", "ddpm-cosine", "cosine", "edm", "linear"])
def test_the_linear_state_is_the_inverse_of_the_query(name: str) -> None:
    bridge = flow.Bridge(flow.schedule(name), "velocity" if name == "linear" else "epsilon")
    x, t = torch.randn(4, 3, 5, 5), torch.tensor([0.03, 0.4, 0.7, 0.98])
    query = bridge.query(x, t)
    state, time = bridge.linear_state(query.state, query.timestep)
    torch.testing.assert_close((state, time), (x, t), rtol=1e-4, atol=1e-4)


def test_a_run_follows_the_objective_of_its_base(
    drawings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run = save(XL, tmp_path / "base"), tmp_path / "run"
    settings: dict[str, Any] = {
        "data.source": drawings, "data.resolution": 64, "data.val_fraction": 0.1, "data.workers": 1,
        "features.model": "efficientnet-lite0", "features.resolution": 64, "clusters.count": 1,
        "networks.default.lora.rank": 2, "train.total_images": 24, "train.batch_size": 8, "train.warmup_images": 8,
        "router.network": json.dumps(ROUTER),
    }  # fmt: skip
    options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command = ["init", str(run), "--base", str(base), *options]
    assert cli.main([*command, "--experts.default", "flow-matching"]) == 2
    assert "the base was trained with ddpm-scaled-linear and epsilon" in capsys.readouterr().err
    assert not run.exists()
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "timestep = 1 · step of ddpm-scaled-linear\n" in shown
    assert "epsilon = output\n" in shown
    assert "traced with DDIMScheduler instead of EulerDiscreteScheduler" in shown
    objective = configuration.load(run).experts["default"]
    assert (objective.schedule, objective.prediction) == ("ddpm-scaled-linear", "epsilon")
    assert cli.main(["prepare", str(run)]) == 0
    train = ["train", str(run), "--expert", "0"]
    assert cli.main([*train, "--experts.default", "ddpm"]) == 2
    assert "experts.default: {schedule: ddpm-scaled-linear, prediction: epsilon}" in capsys.readouterr().err
    assert cli.main(train) == 0
    content = Artifact(run, "experts/000/final").read(EXPERT)
    assert content.objective.prediction == "epsilon"
    assert content.objective.schedule.model_dump() == content.network.trace.schedule
    assert [image.shape for image in sample(run, tmp_path / "out", *PROMPTS)] == [(64, 64, 3)] * 2

    # Without a setting, the objective is that of the base. A student would need another network.
    values = yaml.safe_load((run / "atoll.yaml").read_text())
    unset = configuration.resolve({name: value for name, value in values.items() if name != "experts"})
    assert resolve_job(run, unset, "monolith").objective == content.objective
    with pytest.raises(AtollError, match="a student predicts velocities, and its base epsilon"):
        resolve_job(run, unset, "student")


def test_experts_in_a_pipeline_are_routed_on_the_linear_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case = Case(XL, tmp_path)
    for options in ({"guidance_scale": 3.0}, {"guidance_scale": 1.0}):
        pipe = case.open()
        pipe.load_lora_weights(str(case.exported / "expert_1"))
        wanted = latents(pipe, PROMPTS, [0, 1], **options)
        pipe = case.open()
        atoll.attach(pipe, case.run, routing="oracle", cluster=1)
        assert difference(latents(pipe, PROMPTS, [0, 1], **options), wanted) < 1e-6
        atoll.detach(pipe)
        atoll.attach(pipe, case.run, routing="full")
        together = latents(pipe, PROMPTS, [0, 1], **options)
        alone = [latents(pipe, [prompt], [seed], **options) for seed, prompt in enumerate(PROMPTS)]
        assert difference(together, torch.cat(alone)) < 1e-6
        assert difference(together, wanted) > 1e-4

    # A scheduler that scales the state and stops between the steps of the table
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = Ensemble.route

    def route(self: Ensemble, x: torch.Tensor, t: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        found.append((x, t))
        return original(self, x, t, *args, **options)

    monkeypatch.setattr(Ensemble, "route", route)
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config, use_karras_sigmas=True)
    latents(pipe, PROMPTS[:1], [0], guidance_scale=1.0)
    sigmas = pipe.scheduler.sigmas[:-1]
    torch.testing.assert_close(torch.cat([t for _, t in found]), sigmas / (1 + sigmas), rtol=1e-3, atol=1e-3)
    noise = torch.randn(1, *found[0][0].shape[1:], generator=torch.Generator().manual_seed(0))
    start = noise * pipe.scheduler.init_noise_sigma / (1 + sigmas[0])
    torch.testing.assert_close(found[0][0], start, rtol=1e-3, atol=1e-3)


def test_the_cost_of_a_unet_has_the_sides_of_its_blocks() -> None:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = unet(block_out_channels=(320, 640), norm_num_groups=32, attention_head_dim=64)
        network(torch.zeros(1, 4, 32, 32), torch.zeros(1), encoder_hidden_states=torch.zeros(1, 77, 32))
    fields = json.loads(json.dumps({name: own for name, own in network.config.items() if not name.startswith("_")}))
    spec = TraceSpec("sample", (4, 32, 32), False, "timestep", 1000.0, 0.0, 1, {}, (), {})
    config = BaseConfig("local", "0" * 64, type(network).__name__, fields, 4, spec, LoraSpec())
    flops = image_cost(config, DataShapes((4, 32, 32), None, ())).forward_flops
    assert 0.8 < flops / counter.get_total_flops() < 1.2
    assert config.patch == 2
