"""A converted network declares in its config.json how the latents of its training were scaled."""

import json

import pytest
import torch

from atoll.apps.models.convert import convert, read_source
from atoll.core.errors import AtollError
from atoll.core.networks import STABLE_DIFFUSION, LatentScale, read_network
from atoll.nets import DiT, DiTConfig, build, load_network, save_network
from atoll.nets.io import write_weights
from models import dit_release, pixart_release
from models.paris_release import Paris

WIDTH, HEADS, CLASSES, TEXT = 48, 2, 10, 12
RELEASED = {"scaling_factor": 0.18215, "shift_factor": 0.0}
HINTS = {"heads": HEADS, "num_classes": CLASSES}


def dit_state():
    return dit_release.release_state(width=WIDTH, depth=2, patch=2, grid=4, classes=CLASSES, seed=0)


def declared(folder):
    return json.loads((folder / "config.json").read_text()).get("normalization", "none")


def test_every_release_declares_the_scale_it_was_trained_with(tmp_path):
    for name in ("DiT.pt", "SiT.pt"):
        torch.save(dit_state(), tmp_path / name)
    pixart = pixart_release.release_state(width=WIDTH, depth=2, patch=2, grid=4, text_width=TEXT, seed=0)
    torch.save(pixart, tmp_path / "PixArt.pth")
    write_weights(Paris(WIDTH, HEADS, 2, 4, text_width=TEXT).state_dict(), tmp_path / "paris.safetensors")
    write_weights(Paris(WIDTH, HEADS, 2, 4, experts=3).state_dict(), tmp_path / "router.safetensors")
    for name in ("DiT.pt", "SiT.pt", "PixArt.pth", "paris.safetensors", "router.safetensors"):
        hints = HINTS if "iT.pt" in name else {"heads": HEADS}
        convert(tmp_path / name, tmp_path / "out", **hints, force=True)
        assert declared(tmp_path / "out") == RELEASED, name
        assert load_network(tmp_path / "out").config.normalization == STABLE_DIFFUSION
    convert(tmp_path / "DiT.pt", tmp_path / "flow", "flow-matching", **HINTS)
    assert declared(tmp_path / "flow") == RELEASED
    convert(tmp_path / "DiT.pt", tmp_path / "diffusers", "diffusers-dit", **HINTS)
    assert declared(tmp_path / "diffusers") == "none"  # the scale of the layout need not be written
    assert read_source(tmp_path / "diffusers").config.normalization == STABLE_DIFFUSION


@pytest.mark.parametrize("scale", [None, LatentScale(0.36, 0.12)])
def test_another_scale_survives_the_round_trip_through_a_foreign_layout(scale, tmp_path):
    """A network with statistics per channel must not get the scale of the release."""
    config = DiTConfig(WIDTH, 1, HEADS, size=8, modulation="zero", num_classes=5, normalization=scale)
    save_network(DiT(config), tmp_path / "native")
    conversion = convert(tmp_path / "native", tmp_path / "there", "dit")
    assert not [change for change in conversion.changes if change.action == "changed"]
    convert(tmp_path / "there", tmp_path / "back")
    assert load_network(tmp_path / "back").config == config


def test_the_autoencoder_of_the_pipeline_decides(tmp_path):
    """PixArt-Sigma has the diffusers class of PixArt-alpha and the autoencoder of SDXL."""
    config = DiTConfig(WIDTH, 1, HEADS, size=8, text_width=TEXT, text_projection="mlp", normalization=STABLE_DIFFUSION)
    save_network(DiT(config), tmp_path / "native")
    pipeline = tmp_path / "pipeline"
    convert(tmp_path / "native", pipeline / "transformer", "diffusers-pixart")
    (pipeline / "vae").mkdir()
    (pipeline / "vae/config.json").write_text('{"_class_name": "AutoencoderKL", "scaling_factor": 0.13025}')
    # A folder named vae alone is not a pipeline.
    assert read_source(pipeline / "transformer").config.normalization == STABLE_DIFFUSION
    (pipeline / "model_index.json").write_text('{"_class_name": "PixArtSigmaPipeline"}')
    assert read_source(pipeline / "transformer").config.normalization == LatentScale(0.13025)
    (pipeline / "transformer/declaration.json").write_text("{}")  # in an export of Atoll, the declaration decides
    assert read_source(pipeline / "transformer").config.normalization is None


def test_a_trained_diffusers_expert_has_not_the_scale_of_the_release(tmp_path):
    fields = {
        "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 1, "sample_size": 8, "in_channels": 4,
        "out_channels": 4, "cross_attention_dim": WIDTH, "caption_channels": TEXT,
    }  # fmt: skip
    save_network(build(read_network({"_class_name": "PixArtExpert", **fields})), tmp_path / "expert")
    convert(tmp_path / "expert", tmp_path / "native")
    assert declared(tmp_path / "native") is None


@pytest.mark.parametrize("values", [{"scaling_factor": -1.0}, {"scale": 1.0}, {}, 0.18215])
def test_an_invalid_declaration_is_an_error(values, tmp_path):
    torch.save(dit_state(), tmp_path / "DiT.pt")
    (tmp_path / "config.json").write_text(json.dumps({"normalization": values}))
    with pytest.raises(AtollError, match=r"config.json: "):
        read_source(tmp_path / "DiT.pt", **HINTS)
    described = {**DiTConfig(WIDTH, 1, HEADS, size=8).to_dict(), "normalization": values}
    with pytest.raises(AtollError, match="normalization"):
        read_network(described)
