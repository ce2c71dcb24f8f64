"""LoRA files of others as experts of a run: the names of several trainers, density and routing, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor

import atoll
from atoll import cli
from atoll.apps.models.lora_files import read_lora
from atoll.core.errors import AtollError
from atoll.encoders.base_pipeline import BasePipeline, open_base
from atoll.nets.base import BaseExpert, opened_base
from base.conftest import FAMILY, draw, write_settings
from base.test_run import sample
from base.test_trace import SMALL
from base.tiny import OPTIONS, pipeline

Tensors = dict[str, Tensor]
ALPHAS = {"to_q": 3.0, "add_k_proj": 5.0}
RANKS = {"to_q": 2, "add_k_proj": 3, "proj_out": 1}


@pytest.fixture(scope="module")
def opened(base: Path) -> BasePipeline:
    return open_base(f"base:{base}#{json.dumps(OPTIONS[FAMILY])}")


def adapted() -> tuple[Any, Tensors]:
    """Return the network of the base with an adapter of several ranks and alphas, and the adapter in peft's names."""
    network = pipeline(FAMILY).transformer
    settings = LoraConfig(
        r=2, lora_alpha=4, target_modules=list(RANKS), rank_pattern=RANKS, alpha_pattern=ALPHAS, init_lora_weights=False
    )
    torch.manual_seed(3)
    inject_adapter_in_model(settings, network, "default")
    return network, get_peft_model_state_dict(network)


def alpha_of(layer: str) -> float:
    return ALPHAS.get(layer.rpartition(".")[2], 4.0)


def write_diffusers(state: Tensors, folder: Path) -> Path:
    metadata = {"transformer.r": 2, "transformer.lora_alpha": 4, "transformer.alpha_pattern": ALPHAS}
    tensors = {f"transformer.{name}": part.contiguous() for name, part in state.items()}
    save_file(tensors, folder / "lora.safetensors", {"lora_adapter_metadata": json.dumps(metadata)})
    return folder / "lora.safetensors"


def write_peft(state: Tensors, folder: Path) -> Path:
    settings = {"r": 2, "lora_alpha": 4, "alpha_pattern": ALPHAS, "init_lora_weights": False}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({f"base_model.model.{name}": part for name, part in state.items()}, folder / "adapter_model.safetensors")
    return folder / "adapter_model.safetensors"


def write_kohya(state: Tensors, folder: Path) -> Path:
    tensors = {}
    for name, part in state.items():
        layer, _, kind = name.removesuffix(".weight").rpartition(".lora_")
        prefix = f"lora_unet_{layer.replace('.', '_')}"
        tensors[f"{prefix}.lora_{'down' if kind == 'A' else 'up'}.weight"] = part
        tensors[f"{prefix}.alpha"] = torch.tensor(alpha_of(layer))
    save_file(tensors, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


STYLES: dict[str, Callable[[Tensors, Path], Path]] = {
    "diffusers": write_diffusers, "peft": write_peft, "kohya": write_kohya
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_an_expert_computes_what_the_file_says(style: str, opened: BasePipeline, tmp_path: Path) -> None:
    network, state = adapted()
    config, found = read_lora(STYLES[style](state, tmp_path), opened)
    assert config.lora is not None
    assert (config.lora.rank, config.lora.alpha) == (3, 3.0)
    plain = pipeline(FAMILY).transformer
    with opened_base(config, plain):
        expert = BaseExpert(config)
    expert.load_state_dict(found)
    expert.activate()
    arguments = opened.recorder.arguments(["a red cube"], SMALL)
    with torch.no_grad():
        wanted, own = (net(**arguments)[0] for net in (network, plain))
    torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
    expert.remove()
    with torch.no_grad():
        assert (plain(**arguments)[0] - wanted).abs().max() > 1e-2


def test_names_of_the_original_release_are_translated_by_diffusers(opened: BasePipeline, tmp_path: Path) -> None:
    torch.manual_seed(4)
    width, prefix = 32, "lora_unet_double_blocks_0_img"
    tensors = {
        f"{prefix}_attn_qkv.lora_down.weight": torch.randn(2, width),
        f"{prefix}_attn_qkv.lora_up.weight": torch.randn(3 * width, 2),
        f"{prefix}_attn_qkv.alpha": torch.tensor(1.0),
        f"{prefix}_attn_proj.lora_down.weight": torch.randn(4, width),
        f"{prefix}_attn_proj.lora_up.weight": torch.randn(width, 4),
        f"{prefix}_attn_proj.alpha": torch.tensor(4.0),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    config, state = read_lora(tmp_path / "lora.safetensors", opened)
    assert config.lora is not None
    assert len(config.lora.targets) == 4
    pipe = pipeline(FAMILY)
    pipe.load_lora_weights(tensors)
    for path in config.lora.targets:
        layer = pipe.transformer.get_submodule(path)
        own = state[f"{path}.lora_B.weight"] @ state[f"{path}.lora_A.weight"]
        torch.testing.assert_close(own, layer.get_delta_weight("default_0"), rtol=1e-5, atol=1e-5)
    # What diffusers leaves out is refused.
    more = {
        "lora_unet_unknown.lora_down.weight": torch.ones(2, 32),
        "lora_unet_unknown.lora_up.weight": torch.ones(32, 2),
    }
    save_file({**tensors, **more}, tmp_path / "lora.safetensors")
    with pytest.raises(AtollError, match="the base has no layer for lora_unet_"):
        read_lora(tmp_path / "lora.safetensors", opened)


PATH = "transformer_blocks.0.attn.to_q"


def change(name: str, part: Tensor | None, state: Tensors) -> Tensors:
    return {**{key: own for key, own in state.items() if key != name}, **({} if part is None else {name: part})}


REFUSED: dict[str, tuple[str, Tensor | None, str]] = {
    "another layer": ("blocks.7.to_q.lora_A.weight", torch.ones(2, 32), r"no layer for transformer\.blocks\.7"),
    "a text encoder": ("text_model.to_q.lora_A.weight", torch.ones(2, 32), "no layer for transformer.text_model"),
    "another width": (f"{PATH}.lora_A.weight", torch.ones(2, 31), r"to_q\.lora_A\.weight has shape \(2, 31\)"),
    "two ranks": (f"{PATH}.lora_A.weight", torch.ones(3, 32), "to_q has no lora_A and lora_B of one rank"),
    "half an adapter": (f"{PATH}.lora_B.weight", None, "to_q has no lora_A and lora_B of one rank"),
    "a rank bomb": (f"{PATH}.lora_A.weight", torch.ones(4096, 32), "to_q has no lora_A and lora_B of one rank"),
    "not finite": (f"{PATH}.lora_A.weight", torch.full((2, 32), torch.nan), "to_q.lora_A.weight has values that"),
    "another method": (f"{PATH}.dora_scale", torch.ones(32), "to_q.dora_scale is not a part"),
    "a bias": (f"{PATH}.lora_B.bias", torch.ones(32), r"to_q\.lora_B\.bias is not a part"),
    "twice": (f"{PATH}.lora.down.weight", torch.ones(2, 32), "weight is the second lora_A of its layer"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_does_not_fit_is_refused_with_the_name(what: str, opened: BasePipeline, tmp_path: Path) -> None:
    name, part, reason = REFUSED[what]
    _, state = adapted()
    with pytest.raises(AtollError, match=reason):
        read_lora(write_diffusers(change(name, part, state), tmp_path), opened)


def test_hostile_files_and_settings_are_refused(opened: BasePipeline, tmp_path: Path) -> None:
    _, state = adapted()
    large = {f"{PATH}.lora_A.weight": torch.ones(1025, 32), f"{PATH}.lora_B.weight": torch.ones(32, 1025)}
    with pytest.raises(AtollError, match=r"rank: .*1024, got 1025"):
        read_lora(write_diffusers({**state, **large}, tmp_path), opened)
    file = write_peft(state, tmp_path)
    for settings, reason in (
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": 4, "init_lora_weights": "pissa"}, "'pissa' changed the weights of its base"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        with pytest.raises(AtollError, match=reason):
            read_lora(file, opened)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(AtollError, match=r"adapter_config\.json is missing"):
        read_lora(file, opened)
    torch.save(state, tmp_path / "lora.pt")
    with pytest.raises(AtollError, match=r"expected a \.safetensors file"):
        read_lora(tmp_path / "lora.pt", opened)
    q = [f"{PATH}.lora_{part}.weight" for part in "AB"]
    for changed, reason in (
        ({}, "has no tensors"),
        ({q[0]: torch.ones(2, 32), q[1]: torch.ones(32)}, r"lora_B\.weight has shape \(32,\)"),
        ({q[0]: torch.ones(0, 32), q[1]: torch.ones(32, 0)}, "no lora_A and lora_B of one rank"),
        (
            {q[0]: torch.ones(1, 32), q[1]: torch.ones(32, 1), f"{PATH}.alpha": torch.tensor(4e37)},
            "an alpha is too large",
        ),
    ):
        with pytest.raises(AtollError, match=reason):
            read_lora(write_diffusers({name: 8 * part for name, part in changed.items()}, tmp_path), opened)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(AtollError, match="not a safetensors file"):
        read_lora(file, opened)


def test_a_file_joins_a_run_and_leaves_again(
    trained_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained_base, tmp_path / "run"))
    file, before = write_kohya(adapted()[1], tmp_path), sample(run, tmp_path / "before", "a red cube")
    black = draw(tmp_path / "black", count=24, kinds=(("black", "ball"),))
    command = ["convert", str(file), str(run), "--expert"]
    assert cli.main([*command, "1", "--images", str(black)]) == 2
    assert "experts/001 exists" in capsys.readouterr().err
    assert cli.main([*command, "7"]) == 2
    assert "needs images with captions (--images), or prompts" in capsys.readouterr().err
    assert cli.main([*command, "7", "--images", str(black)]) == 0

    # The router does not know it. Its density does, and given clusters reach it.
    assert cli.main(["sample", str(run), "a red cube", "--steps", "2", "--out", str(tmp_path / "none")]) == 2
    assert "trained without experts/007; train it again, or use --routing nearest" in capsys.readouterr().err
    # In the first step the prompt decides; later ones also depend on the generated image, which here is noise.
    prompts = ["a black ball", "a red cube"]
    routed = atoll.load(run).generate(prompts, num_inference_steps=1, routing="nearest", trace=True)
    assert routed.trace is not None
    assert routed.trace.weights[0, :, 2].tolist() == [1, 0]
    given = (*prompts, "--guidance-scale", "1")
    joined = sample(run, tmp_path / "oracle", *given, "--routing", "oracle", "--clusters", "7", "7")
    alone = sample(run, tmp_path / "alone", *given, "--model", "expert:7")
    # Rounding depends on the batch.
    assert all(abs(one - other).max() <= 1 for one, other in zip(joined, alone, strict=True))

    shutil.rmtree(run / "experts" / "007")
    assert np.array_equal(sample(run, tmp_path / "after", "a red cube"), before)


def test_prompts_alone_give_the_images_of_the_density(base: Path, tmp_path: Path) -> None:
    """A run with two files and nothing trained."""
    run, file = tmp_path / "run", write_kohya(adapted()[1], tmp_path)
    options = ["--networks.default.options", json.dumps(OPTIONS[FAMILY]), "--data.resolution", "64"]
    assert cli.main(["init", str(run), "--base", str(base), "--clusters.count", "2", *options]) == 0
    for number, color in enumerate(("red", "blue")):
        prompts = tmp_path / f"{color}.txt"
        prompts.write_text("".join(f"a {color} {kind}\n" for kind in ("cube", "ball", "cross", "bar")))
        assert cli.main(["convert", str(file), str(run), "--expert", str(number), "--prompts", str(prompts)]) == 0
    images = sample(run, tmp_path / "out", "a red cube", "a blue ball", "--routing", "nearest")
    assert [image.shape for image in images] == [(64, 64, 3)] * 2


def test_files_join_a_run_of_several_sizes(base: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", write_kohya(adapted()[1], tmp_path)
    square, wide = (64, 64), (96, 48)
    write_settings(run, base, tmp_path, data={"buckets": ["64x64", "96x48"]})
    for number, sizes in enumerate(((square, square, wide), (wide, wide, square))):
        images = draw(tmp_path / f"images{number}", sizes, 24)
        assert cli.main(["convert", str(file), str(run), "--expert", str(number), "--images", str(images)]) == 0
    for width, height in (square, wide):
        options = ("a red cube", "--routing", "nearest", "--size", f"{width}x{height}")
        assert sample(run, tmp_path / str(width), *options)[0].shape == (height, width, 3)
