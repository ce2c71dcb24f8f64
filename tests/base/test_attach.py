"""Experts in an open pipeline, and exported adapters: equal to diffusers and peft, in any batch, and removable."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import atoll
from atoll import flow
from atoll.apps.models.attach import Attached, _grid
from atoll.apps.models.export import export
from atoll.core import manifests
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.networks import LoraSpec, RouterConfig
from atoll.core.sizes import Size
from atoll.data.density import DENSITY_FILE, Density
from atoll.encoders.base_pipeline import BasePipeline, register_base
from atoll.encoders.trace import trace
from atoll.nets import build, save_network
from base.test_trace import SMALL, WIDE, recorder
from base.tiny import FAMILIES, OPTIONS, pipeline
from ensemble.runs import randomized

PROMPTS = ["a small red cube", "a lighthouse at night, far away"]
GUIDED: dict[str, dict[str, Any]] = {
    "flux": {"true_cfg_scale": 2.0, "negative_prompt": ""},  # a second call
    "sd3": {"guidance_scale": 3.0},  # a doubled batch
    "zimage": {"guidance_scale": 3.0},
}
PLAIN: dict[str, dict[str, Any]] = {"flux": {}, "sd3": {"guidance_scale": 1.0}, "zimage": {"guidance_scale": 0.0}}


class Case:
    """A tiny pipeline in a folder, a run with two adapters and a router, and its export."""

    def __init__(self, family: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.family, self.base, self.run, self.exported = family, folder / "base", folder / "run", folder / "exported"
        FAMILIES[family]().save_pretrained(self.base)
        options = OPTIONS.get(family, {})
        name = f"base:{self.base}#{json.dumps(options)}"
        base = BasePipeline(name)
        register_base(name)
        self.run.mkdir()
        default = {"base": str(self.base), "options": options, "lora": {"rank": 2, "alpha": 6}}
        settings = {"clusters": {"count": 2}, "networks": {"default": default}}
        (self.run / "atoll.yaml").write_text(yaml.safe_dump(settings))
        shape = base.latent_shape(SMALL)
        config = replace(base.config(), lora=LoraSpec(rank=2, alpha=6.0))
        declared: dict[str, Any] = {
            "source": "made up", "fingerprint": "0" * 64, "labels": [], "text": None,
            "statistics": {"mean": [0.0] * shape[0], "std": [1.0] * shape[0]},
            "latents": {"autoencoder": "base:local", "weights": None, "resolution": 64, "shape": shape},
        }  # fmt: skip
        texts = [base.pooled(base.arguments(prompt, SMALL)) for prompt in PROMPTS]
        for number, text in enumerate(texts):
            artifact = Artifact(self.run, f"experts/{number:03d}/final")
            artifact.begin(manifests.EXPERT, {"number": number})
            expert = build(config)
            with torch.no_grad():
                for parameter in expert.parameters():
                    parameter.normal_(std=0.1)
            save_network(expert, artifact.folder)
            # The densities of both clusters differ in the captions alone.
            generator = torch.Generator().manual_seed(0)
            captions = text + 0.01 * torch.randn(50, len(text), generator=generator)
            density = Density.fit(torch.randn(20, *shape, generator=generator))
            density = replace(density, caption=Density.fit(captions, count=1, rank=4))
            artifact.write_tensors(DENSITY_FILE, density.tensors())
            content = declared | {"job": f"experts/{number:03d}", "clusters": [number], "network": config}
            predicted = {"schedule": config.trace.schedule, "prediction": config.trace.prediction}
            content |= {"conditioning": ["arguments"], "objective": flow.objective(**predicted).spec}
            artifact.commit(manifests.EXPERT.content(**content))
        router = RouterConfig(
            width=32, depth=2, heads=2, patch=2, channels=shape[0], size=shape[1], experts=2, pooled_width=len(texts[0])
        )
        artifact = Artifact(self.run, "router/final")
        artifact.begin(manifests.ROUTER, {})
        network = randomized(build(router), 5)
        save_network(network, artifact.folder)  # type: ignore[arg-type]
        content = declared | {"job": "router", "clusters": [0, 1], "network": router, "conditioning": ["pooled"]}
        content |= {"cluster_sizes": [1, 1], "prior_entropy": 0.0, "temperature": 1.0}
        artifact.commit(manifests.ROUTER.content(**content))
        export(self.run, self.exported)

    def open(self) -> Any:
        return opened(self.base)


def opened(folder: Path) -> Any:
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: Any, prompts: list[str], seeds: list[int], **options: Any) -> Tensor:
    """Return the latents after two steps."""
    if "negative_prompt" in options:
        options["negative_prompt"] = [options["negative_prompt"]] * len(prompts)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    size = {"height": SMALL.height, "width": SMALL.width, "num_inference_steps": 2, "max_sequence_length": 48}
    # A copy, because some pipelines change the list.
    made: Tensor = pipe(prompt=list(prompts), generator=generators, output_type="latent", **size, **options).images
    return made


def close(one: Tensor, two: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module", params=list(GUIDED))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield Case(request.param, folder)


def test_one_expert_is_the_pipeline_with_its_adapter(case: Case) -> None:
    for options in (GUIDED[case.family], PLAIN[case.family]):
        results = []
        for number in (0, 1):
            pipe = case.open()
            base = latents(pipe, PROMPTS, [0, 1], **options)
            pipe.load_lora_weights(str(case.exported / f"expert_{number}"))
            wanted = latents(pipe, PROMPTS, [0, 1], **options)
            pipe = case.open()
            atoll.attach(pipe, case.run, routing="oracle", cluster=number)
            results.append(latents(pipe, PROMPTS, [0, 1], **options))
            close(results[-1], wanted)
            assert (wanted - base).abs().max() > 1e-2
            atoll.detach(pipe)
            atoll.attach(pipe, case.exported, f"expert:{number}")
            close(latents(pipe, PROMPTS, [0, 1], **options), wanted)
        assert (results[0] - results[1]).abs().max() > 1e-2
        # Images of different clusters in one batch
        atoll.detach(pipe)
        atoll.attach(pipe, case.run, routing="oracle", cluster=[1, 0])
        close(latents(pipe, PROMPTS, [0, 1], **options), torch.stack([results[1][0], results[0][1]]))


@pytest.mark.parametrize("routing", ["nearest", "top-1", "full", "top-2@0.5,top-1"])
def test_a_mixed_batch_is_each_image_alone(case: Case, routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    original = Attached.route
    monkeypatch.setattr(Attached, "route", lambda self, own: found.append(original(self, own)) or found[-1])
    pipe = case.open()
    atoll.attach(pipe, case.run, routing=routing)
    for options in (GUIDED[case.family], PLAIN[case.family]):
        prompts, seeds = [*PROMPTS, PROMPTS[0]], [3, 4, 5]
        found.clear()
        together = latents(pipe, prompts, seeds, **options)
        chosen = found[-1].argmax(1).tolist()
        alone = [latents(pipe, [prompt], [seed], **options) for prompt, seed in zip(prompts, seeds, strict=True)]
        close(together, torch.cat(alone))
    if routing == "nearest":
        assert chosen == [0, 1, 0]  # the captions decide


def test_the_empty_prompt_is_the_null_condition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.ensemble.ensemble import Ensemble

    found: list[list[bool]] = []
    original = Ensemble.route

    def route(self: Ensemble, x: Tensor, t: Tensor, conditions: Any, **options: Any) -> Tensor:
        found.append(conditions.distinct.dropped[: len(x)].tolist())
        return original(self, x, t, conditions, **options)

    monkeypatch.setattr(Ensemble, "route", route)
    pipe = case.open()
    atoll.attach(pipe, case.run)
    latents(pipe, PROMPTS, [0, 1], **GUIDED[case.family])
    flags = [flag for call in found for flag in call]
    assert sorted(flags) == [False] * 4 + [True] * 4  # two steps, two images


def test_detach_restores_the_network_and_keeps_adapters_of_the_user(case: Case) -> None:
    pipe = case.open()
    network, plain = pipe.transformer, latents(pipe, PROMPTS, [0, 1])
    names = {name: id(part) for name, part in network.named_parameters()}
    atoll.attach(pipe, case.run)
    assert pipe.transformer.config is network.config
    assert (pipe.transformer.dtype, pipe.transformer.device) == (network.dtype, network.device)
    assert {id(part) for part in network.parameters()} >= set(names.values())  # no second copy
    with pytest.raises(AtollError, match="has experts already"):
        atoll.attach(pipe, case.run)
    pipe.to(torch.float32)
    assert not torch.equal(latents(pipe, PROMPTS, [0, 1]), plain)
    atoll.detach(pipe)
    assert pipe.transformer is network
    assert {name: id(part) for name, part in network.named_parameters()} == names
    assert not hasattr(network, "peft_config")
    assert torch.equal(latents(pipe, PROMPTS, [0, 1]), plain)
    with pytest.raises(AtollError, match="no experts"):
        atoll.detach(pipe)

    # An adapter of the user stays active: expert 0 and the user's adapter are their sum.
    pipe.load_lora_weights(str(case.exported / "expert_1"), adapter_name="style")
    styled = latents(pipe, PROMPTS, [0, 1])
    atoll.attach(pipe, case.run, routing="oracle", cluster=0)
    both = latents(pipe, PROMPTS, [0, 1])
    atoll.detach(pipe)
    assert torch.equal(latents(pipe, PROMPTS, [0, 1]), styled)
    pipe.load_lora_weights(str(case.exported / "expert_0"), adapter_name="expert")
    pipe.set_adapters(["style", "expert"])
    close(both, latents(pipe, PROMPTS, [0, 1]))


def test_another_base_is_refused_with_the_reason(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = FAMILIES["chroma"]()
    with pytest.raises(AtollError, match=f"{type(other.transformer).__name__}.*adapters of local"):
        atoll.attach(other, case.run)
    pipe = case.open()
    field = next(name for name in ("num_layers", "n_layers") if name in pipe.transformer.config)
    pipe.transformer = type(pipe.transformer).from_config({**pipe.transformer.config, field: 3})
    with pytest.raises(AtollError, match=f"has {field} 3"):
        atoll.attach(pipe, case.run)
    # Equal configurations with other weights
    FAMILIES[case.family]().save_pretrained(tmp_path)
    with pytest.raises(AtollError, match="has the fingerprint"):
        atoll.attach(opened(tmp_path), case.run, verify=True)
    pipe = case.open()
    atoll.attach(pipe, case.run, verify=True)
    atoll.detach(pipe)
    pipe.load_lora_weights(str(case.exported / "expert_1"))
    pipe.fuse_lora()
    with pytest.raises(AtollError, match="unfuse_lora"):
        atoll.attach(pipe, case.run)
    with pytest.raises(AtollError, match="draws an expert"):
        atoll.attach(case.open(), case.run, routing="drawn")


FRESH = """
import json, sys
import torch, diffusers
from peft import PeftModel
from safetensors.torch import save_file

base, adapter, whole, target, options = sys.argv[1:]

def latents(pipe):
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    return pipe(generator=generators, output_type="latent", **json.loads(options)).images.contiguous()

assert not any(name.split(".")[0] == "atoll" for name in sys.modules)
pipe = diffusers.DiffusionPipeline.from_pretrained(base)
pipe.load_lora_weights(adapter)
found = {"diffusers": latents(pipe)}
pipe.fuse_lora()
pipe.unload_lora_weights()
found["fused"] = latents(pipe)
pipe = diffusers.DiffusionPipeline.from_pretrained(base)
pipe.transformer = PeftModel.from_pretrained(pipe.transformer, adapter)
found["peft"] = latents(pipe)
pipe.transformer = pipe.transformer.merge_and_unload()
found["merged"] = latents(pipe)
network = diffusers.AutoModel.from_pretrained(whole)
pipe = diffusers.DiffusionPipeline.from_pretrained(base, transformer=network)
found["whole"] = latents(pipe)
save_file(found, target)
"""


def test_exported_adapters_open_with_diffusers_and_peft_without_atoll(case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    target, whole = tmp_path / "found.safetensors", tmp_path / "whole"
    export(case.run, whole, "expert:1", merge=True)
    options: dict[str, Any] = {"prompt": PROMPTS, "num_inference_steps": 2}
    options |= {"height": 64, "width": 64, "max_sequence_length": 48, **PLAIN[case.family]}
    command = [sys.executable, "-c", FRESH, case.base, case.exported / "expert_1", whole, target, json.dumps(options)]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, cwd=tmp_path)
    found = load_file(target)
    pipe = case.open()
    atoll.attach(pipe, case.run, routing="oracle", cluster=1)
    wanted = latents(pipe, PROMPTS, [0, 1], **PLAIN[case.family])
    for name, adapter in (("diffusers", "fused"), ("peft", "merged"), ("diffusers", "whole")):
        close(found[name], wanted)
        error = (found[adapter] - found[name]).square().mean() / found[name].square().mean()
        assert error.sqrt() <= 1e-6
    adapters = json.loads((case.exported / "adapters.json").read_text())
    assert adapters["base"]["component"] == "transformer"
    assert (case.exported / "router" / "declaration.json").is_file()
    assert str(case.base) not in (whole / "config.json").read_text()
    with pytest.raises(AtollError, match="choose it with --model expert:K"):
        export(case.run, tmp_path / "all", merge=True)


@pytest.mark.parametrize("family", ["flux", "klein", "qwenimage"])
def test_the_shape_of_tokens_is_found_in_the_arguments(family: str) -> None:
    pipe = pipeline(family)
    found, plain, _ = trace(recorder(pipe, **OPTIONS.get(family, {})), SMALL, WIDE)
    for wanted in (WIDE, Size(96, 64), SMALL):
        arguments = plain.arguments(PROMPTS, wanted)
        size = _grid(arguments, found, arguments[found.state], ())
        factor = wanted.height // size.height
        assert (size.height * factor, size.width * factor) == (wanted.height, wanted.width)
