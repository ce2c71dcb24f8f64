"""A run with experts on a base, through the command line: prepare, train, sample."""

import json
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from PIL import Image
from safetensors import safe_open

import atoll
from atoll import cli
from atoll.nets.base import BaseExpert
from atoll.nets.quantization import Int8Linear
from base.conftest import Copy, draw, write_settings

PROMPTS = ("a red cube", "a blue ball", "a green cross, far away on a hill")
WEIGHTS = "diffusion_pytorch_model.safetensors"


def sample(run: Path, out: Path, *arguments: str) -> list[np.ndarray]:
    """Sample with few steps and return the images."""
    assert cli.main(["sample", str(run), *arguments, "--steps", "3", "--out", str(out)]) == 0
    files = sorted(file for file in out.glob("*.png") if file.stem.isdecimal())
    return [np.asarray(Image.open(file)).astype(int) for file in files]


ROUTES = {
    "top-1": (), "top-2": (), "drawn": (), "nearest": (), "oracle": ("--clusters", "0", "1", "0"),
    "full": ("--guidance-scale", "1"),
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_a_batch_of_different_prompts_is_each_image_alone(route: str, trained_base: Path, tmp_path: Path) -> None:
    options = (*PROMPTS, "--routing", route, *ROUTES[route])
    together = sample(trained_base, tmp_path / "together", *options)
    alone = sample(trained_base, tmp_path / "alone", *options, "--batch-size", "1")
    assert [image.shape for image in together] == [(64, 64, 3)] * 3
    for one, other in zip(together, alone, strict=True):
        assert abs(one - other).max() <= 1  # rounding


def test_prompt_guidance_and_expert_change_an_image(trained_base: Path, tmp_path: Path) -> None:
    choices = {
        "prompt": (PROMPTS[0],),
        "other prompt": (PROMPTS[1],),
        "no prompt": ("--num-images", "1"),
        "no guidance": (PROMPTS[0], "--guidance-scale", "1"),
        "one expert": (PROMPTS[0], "--model", "expert:0"),
        "the other expert": (PROMPTS[0], "--model", "expert:1"),
    }
    images = {name: sample(trained_base, tmp_path / name, *options)[0] for name, options in choices.items()}
    # Top-1 routing has chosen one of the two experts for all steps, or changed between them.
    for name in ("other prompt", "no prompt", "no guidance"):
        assert abs(images["prompt"] - images[name]).max() > 0, name
    assert abs(images["one expert"] - images["the other expert"]).max() > 0


def test_an_expert_is_its_adapter_alone(trained_base: Path, base: Path) -> None:
    folder = trained_base / "experts/000/final"
    with safe_open(folder / WEIGHTS, "pt") as tensors:
        assert all(".lora_A." in name or ".lora_B." in name for name in tensors.keys())  # noqa: SIM118
        assert any(tensors.get_tensor(name).any() for name in tensors.keys() if ".lora_B." in name)  # noqa: SIM118
    whole = sum(file.stat().st_size for file in (base / "transformer").glob("*.safetensors"))
    assert (folder / WEIGHTS).stat().st_size < whole / 4  # rank 4 is much in layers of 32
    assert json.loads((folder / "config.json").read_text())["_class_name"] == "BaseExpert"
    # No path of this machine is published.
    assert not [file for file in folder.glob("*.json") if str(base.parent) in file.read_text()]


def test_without_an_adapter_the_whole_base_is_trained(new_run: Copy, base: Path, tmp_path: Path) -> None:
    run = new_run(networks={"default": {"lora": None}}, train={"total_images": 16})
    for expert in ("0", "1"):
        assert cli.main(["train", str(run), "--expert", expert]) == 0
    own, other = (safe_open(run / f"experts/00{number}/final" / WEIGHTS, "pt") for number in range(2))
    with safe_open(next((base / "transformer").glob("*.safetensors")), "pt") as whole:
        assert {name.removeprefix("network.") for name in own.keys()} == set(whole.keys())  # noqa: SIM118
        name = next(name for name in whole.keys() if name.endswith("weight"))  # noqa: SIM118
        tensors = [file.get_tensor(f"network.{name}") for file in (own, other)] + [whole.get_tensor(name)]
    assert not any(tensors[a].equal(tensors[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert len(sample(run, tmp_path / "out", PROMPTS[0], "--routing", "nearest")) == 1


def test_an_int8_base_is_that_of_training_and_sampling(
    new_run: Copy, trained_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(networks={"default": {"lora": {"quantize": "int8"}}}, train={"total_images": 16})
    assert cli.main(["train", str(run), "--expert", "0"]) == 0
    options = ("a red cube", "--model", "expert:0")
    assert len(sample(run, tmp_path / "out", *options, "--quantize", "int8")) == 1
    expert = atoll.load(run, "expert:0").ensemble.cache.get(0).expert.network
    assert isinstance(expert, BaseExpert)
    assert any(isinstance(layer, Int8Linear) for layer in expert.base.modules())
    # Merged with the weights that it was trained with
    assert cli.main(["export", str(run), str(tmp_path / "whole"), "--model", "expert:0", "--merge"]) == 0
    whole = diffusers.AutoModel.from_pretrained(str(tmp_path / "whole"))
    adapted = {path: layer for path, layer in expert.base.named_modules() if isinstance(layer, LoraLayer)}
    assert adapted
    for path, layer in adapted.items():
        merged = layer.base_layer.weight + layer.get_delta_weight(expert._adapter)
        torch.testing.assert_close(whole.get_submodule(path).weight, merged, rtol=1e-6, atol=1e-6)
    assert cli.main(["sample", str(trained_base), *options, "--quantize", "int8"]) == 2
    assert "trained on a base that is not quantized; omit --quantize" in capsys.readouterr().err


def test_images_of_several_sizes(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    images = draw(tmp_path / "drawings", ((64, 64), (64, 64), (96, 48)), 36)
    changes = {"data": {"buckets": ["64x64", "96x48"]}, "clusters": {"count": 1}, "train": {"total_images": 24}}
    write_settings(run, base, images, **changes)
    assert cli.main(["prepare", str(run)]) == 0
    assert cli.main(["train", str(run), "--expert", "0"]) == 0
    for size in ("64x64", "96x48"):
        width, height = map(int, size.split("x"))
        found = sample(run, tmp_path / size, *PROMPTS[:2], "--size", size)
        assert [image.shape for image in found] == [(height, width, 3)] * 2


def test_a_base_is_trained_with_its_own_objective_only(new_run: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(new_run()), "--expert", "0", "--experts.default", "ddpm"]) == 2
    assert "the base was trained with linear and velocity" in capsys.readouterr().err
