"""Exports of experts of a base: opened again by Atoll, alone or with others, with the base by reference."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import atoll
from atoll import cli
from atoll.core.errors import AtollError
from atoll.core.networks import BaseConfig, LoraSpec
from atoll.nets.base import BaseExpert
from base.conftest import FAMILY
from base.test_families import with_effect
from base.tiny import pipeline

PROMPTS = ["a red cube", "a blue ball, far away on a hill", "a green cross"]


def latents(source: Path, *, batch_size: int = 8, routing: str = "top-1", **options: object) -> Tensor:
    """Return the latents of some images."""
    sampler = atoll.load(source, **options)
    clusters = [0, 1, 0] if routing == "oracle" else None
    made = sampler.generate(
        PROMPTS, num_inference_steps=3, seed=1, routing=routing, cluster=clusters, batch_size=batch_size
    )
    return made.latents


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, prepared_base: Path, base: Path) -> Path:
    """A run whose first expert is an adapter of some layers, and whose second one is a whole network."""
    run = tmp_path_factory.mktemp("mixed") / "run"
    shutil.copytree(prepared_base, run)
    whole = json.dumps({"base": str(base), "lora": None})
    for expert, changes in (("0", ["--networks.default.lora.targets", "[to_q, to_k]"]), ("1", ["--networks.1", whole])):
        assert cli.main(["train", str(run), "--expert", expert, "--train.total_images", "16", *changes]) == 0
    return run


@torch.no_grad()
def test_an_adapter_of_few_layers_is_alone_in_the_base(trained_base: Path) -> None:
    """The adapters of other experts are not active in the layers that it does not have."""
    sampler = atoll.load(trained_base)
    config = sampler.ensemble.declarations[0].network
    assert isinstance(config, BaseConfig)
    x, t, condition = sampler.noise(1, 0), torch.tensor([500.0]), sampler.encode(PROMPTS[:1])
    few = with_effect(BaseExpert(replace(config, lora=LoraSpec(rank=2, targets=("to_q",)))))
    alone = few(x, t, condition)
    every = with_effect(BaseExpert(replace(config, lora=LoraSpec(rank=2))))
    assert not torch.allclose(every(x, t, condition), alone)
    assert torch.equal(few(x, t, condition), alone)


@pytest.mark.parametrize("routing", ["nearest", "nearest:full", "nearest:drawn", "oracle"])
def test_adapters_and_whole_networks_of_a_base_are_one_model(mixed: Path, routing: str) -> None:
    together = latents(mixed, routing=routing)
    close(together, latents(mixed, routing=routing, batch_size=1))
    close(together, latents(mixed, routing=routing, max_loaded_experts=1))
    if routing == "oracle":
        alone = [latents(mixed, model=f"expert:{number}") for number in (0, 1)]
        close(together, torch.stack([alone[number][place] for place, number in enumerate((0, 1, 0))]))


def test_a_mixed_export_is_its_run(mixed: Path, base: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    assert cli.main(["export", str(mixed), str(exported)]) == 0
    close(latents(exported, base=base, routing="nearest"), latents(mixed, routing="nearest"))
    import diffusers

    whole = diffusers.FluxTransformer2DModel.from_pretrained(exported / "expert_1")
    assert not any(name.startswith("network.") for name in whole.state_dict())
    assert not [file for file in exported.rglob("*.json") if str(base.parent) in file.read_text()]


def test_an_adapter_and_a_network_without_a_base_are_one_model(trained_base: Path, base: Path, tmp_path: Path) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    shutil.copytree(trained_base, run, ignore=shutil.ignore_patterns("001"))
    own = json.dumps({"name": "DiT-XS/2", "width": 32, "depth": 1, "heads": 2})
    options = ("--train.conditioning", "none", "--train.total_images", "16")
    assert cli.main(["train", str(run), "--expert", "1", "--networks.1", own, *options]) == 0
    together = latents(run, routing="full")
    close(together, latents(run, routing="full", batch_size=1))
    assert cli.main(["export", str(run), str(exported)]) == 0
    close(latents(exported, base=base, routing="full"), together)


def test_exported_adapters_are_their_run(
    trained_base: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, images = tmp_path / "exported", [tmp_path / name for name in ("from run", "from export")]
    assert cli.main(["export", str(trained_base), str(exported)]) == 0
    close(latents(exported, base=base), latents(trained_base))
    close(latents(exported, base=base, routing="nearest"), latents(trained_base, routing="nearest"))
    for out, source in zip(images, ((trained_base,), (exported, "--base", base)), strict=True):
        command = ["sample", *map(str, source), PROMPTS[0], "--steps", "2", "--model", "expert:1", "--out", str(out)]
        assert cli.main(command) == 0
    found = [np.asarray(Image.open(out / "grid.png")) for out in images]
    assert np.array_equal(*found)

    # The base by reference: missing, and another one.
    with pytest.raises(AtollError, match=r"has no public name.*ask for a copy of it, and give its folder: --base"):
        atoll.load(exported)
    other = Path(shutil.copytree(base, tmp_path / "other"))
    pipeline(FAMILY, seed=1).transformer.save_pretrained(other / "transformer")
    with pytest.raises(AtollError, match=r"other has the fingerprint .*, but the base is local with the fingerprint"):
        atoll.load(exported, base=other)
    with pytest.raises(AtollError, match=r"is a run: set networks.default.base"):
        atoll.load(trained_base, base=other)
    # Every file is verified.
    with (exported / "expert_0/adapter_model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    with pytest.raises(AtollError, match=r"adapter_model"):
        atoll.load(exported, base=base)
