"""A class-conditional DiT as a DiTPipeline: diffusers opens it without Atoll and without code, with the same images."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from safetensors.torch import load_file

import atoll
from atoll import cli, flow
from atoll.apps.models.export import export
from atoll.core.errors import AtollError
from atoll.encoders.autoencoder import EMOJI, Codec, Statistics, open_codec, scale_of
from atoll.encoders.pretrained import fingerprint
from ensemble.runs import CLASSES, SMALL, declared_by, write_network

DIT = {**SMALL, "modulation": "zero", "frequency_shift": 1, "mlp_norm_eps": 1e-5, "num_classes": 3}
WRAPPED = {
    "_class_name": "DiTExpert", "sample_size": 8, "num_embeds_ada_norm": 3,
    "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
}  # fmt: skip
SPACE = {"mean": [0.3 - 0.05 * k for k in range(12)], "std": [0.8 + 0.1 * k for k in range(12)]}
OWN_SCALE = Statistics.of_scale(scale_of("emoji"), 12).declared().model_dump(exclude_none=True)
HOW = [{"num_inference_steps": 4, "guidance_scale": scale} for scale in (1.0, 3.0)]
WITHOUT_ATOLL = """
import json, sys
sys.modules["atoll"] = None  # importing it is an error
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
torch.set_num_threads(1)
folders, how, output = json.loads(sys.argv[1])
found = {}
for number, folder in enumerate(folders):
    pipe = DiffusionPipeline.from_pretrained(folder)
    assert type(pipe).__module__ == "diffusers.pipelines.dit.pipeline_dit"
    labels = pipe.get_label_ids(["square", "circle"])
    for each in how:
        images = pipe(labels, generator=torch.Generator().manual_seed(3), output_type="np", **each).images
        found[f"{number}/{each['guidance_scale']}"] = torch.tensor(images).contiguous()
save_file(found, output)
"""


def write(run: Path, job: str = "monolith", network: dict[str, Any] = DIT, **changes: Any) -> Path:
    """Write a run with one network on the latents of the built-in autoencoder."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "atoll.yaml").write_text("{}")
    channels = {"in_channels": 12} if "in_channels" in network or network is WRAPPED else {}
    own = {**network, **(channels or {"channels": 12, "out_channels": 12})}
    declared = declared_by(job, [0], own, ["label"], SPACE) | {"text": None}
    declared["latents"] = {
        "autoencoder": "emoji", "weights": fingerprint(EMOJI), "resolution": 64, "shape": [12, 8, 8],
    }  # fmt: skip
    objective = {"objective": flow.objective("flow-matching").spec, "bridge": {"prediction_error": 0.05}}
    write_network(run, job, {**declared, **objective, **changes}, seed=7)
    return run


def test_diffusers_gives_the_images_of_atoll(tmp_path: Path) -> None:
    """With guidance and without, a DiT of Atoll and one of diffusers, both normalizations: within 1 of 255."""
    cases = [({"network": DIT}, "expert:0"), ({"network": WRAPPED, "statistics": OWN_SCALE}, "monolith")]
    runs, folders = ([tmp_path / f"{name}{number}" for number in range(2)] for name in ("run", "out"))
    for run, folder, (changes, model) in zip(runs, folders, cases, strict=True):
        write(run, "experts/000" if model == "expert:0" else model, **changes)
        assert cli.main(["export", str(run), str(folder), "--model", model, "--dit-pipeline"]) == 0
        files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        weights = {f"{part}/diffusion_pytorch_model.safetensors" for part in ("transformer", "vae")}
        settings = {"transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"}
        assert files == weights | settings | {"model_index.json", "manifest.json", "README.md"}
    output = tmp_path / "found.safetensors"
    command = [sys.executable, "-c", WITHOUT_ATOLL, json.dumps([list(map(str, folders)), HOW, str(output)])]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = load_file(output)
    noise = torch.randn(2, 12, 8, 8, generator=torch.Generator().manual_seed(3))
    for number, (run, (_, model)) in enumerate(zip(runs, cases, strict=True)):
        seen = []
        for how in HOW:
            expected = atoll.load(run, model).generate(label=["square", "circle"], latents=noise, **how)
            pixels = np.stack([np.asarray(image) for image in expected.images])
            assert np.abs(255 * found[f"{number}/{how['guidance_scale']}"].numpy() - pixels).max() <= 1
            seen.append(pixels.astype(int))
        assert np.abs(seen[0] - seen[1]).max() > 20  # guidance is visible in the images
        assert seen[0].std() > 20


def test_the_latents_of_the_exported_autoencoder_are_normalized(tmp_path: Path) -> None:
    """Encoding and decoding, so that image-to-image with this autoencoder works too."""
    export(write(tmp_path / "run"), tmp_path / "out", "monolith", dit_pipeline=True)
    folded = AutoencoderKL.from_pretrained(tmp_path / "out/vae", low_cpu_mem_usage=False)
    original = open_codec("emoji", device=torch.device("cpu"))
    assert isinstance(original, Codec)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    expected, found = original.encode(pixels), Codec(folded, torch.device("cpu")).encode(pixels)
    std = torch.tensor(SPACE["std"]).view(1, -1, 1, 1)
    normalized = (expected["mean"] - torch.tensor(SPACE["mean"]).view(1, -1, 1, 1)) / std
    torch.testing.assert_close(found["mean"], normalized, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["std"], expected["std"] / std, atol=1e-6, rtol=1e-4)
    assert folded.config.scaling_factor == 1
    assert AutoencoderKL.from_pretrained(EMOJI, low_cpu_mem_usage=False).config.shift_factor != 0  # it had a shift


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"network": {**DIT, "modulation": "single"}}, "no DiTTransformer2DModel, which has classes, no text"),
        ({"network": {**SMALL, "text_width": 384}, "conditioning": ["text"]}, "no DiTTransformer2DModel"),
        ({"network": {**DIT, "positions": "rope"}}, "no DiTTransformer2DModel"),
        ({"objective": flow.objective("ddpm").spec}, "predicts epsilon with the schedule cosine"),
        ({"objective": flow.objective("v-prediction").spec}, "predicts v_prediction"),
        ({"network": {**DIT, "num_classes": 1001}}, "has 1001 classes, a DiTPipeline at most 1000"),
        ({"network": {**DIT, "size": 16}}, "square latents of the network's own size"),
    ],
)
def test_what_is_not_exact_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    run = write(tmp_path / "run", **changes)
    with pytest.raises(AtollError, match=rf"monolith.* {reason}.*; without --dit-pipeline .* with --standalone"):
        export(run, tmp_path / "out", "monolith", dit_pipeline=True)


def test_only_one_network_with_an_autoencoder_is_a_pipeline(conditioned_run: Path, tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="has one network; choose it with --model expert:K"):
        export(conditioned_run, tmp_path / "out", dit_pipeline=True)
    with pytest.raises(AtollError, match="choose one option"):
        export(conditioned_run, tmp_path / "out", "monolith", dit_pipeline=True, standalone=True)


def test_an_autoencoder_without_a_layer_for_the_normalization_is_refused(tmp_path: Path) -> None:
    """Except if one factor normalizes all channels."""
    widths = {"encoder_block_out_channels": [8] * 4, "decoder_block_out_channels": [8] * 4}
    blocks = {"num_encoder_blocks": [1] * 4, "num_decoder_blocks": [1] * 4}
    AutoencoderTiny(latent_channels=12, **widths, **blocks).save_pretrained(tmp_path / "tiny")
    latents = {"autoencoder": str(tmp_path / "tiny"), "weights": fingerprint(tmp_path / "tiny"), "shape": [12, 8, 8]}
    run = write(tmp_path / "run", latents=latents)
    with pytest.raises(AtollError, match="AutoencoderTiny has no layer that can hold the normalization"):
        export(run, tmp_path / "out", "monolith", dit_pipeline=True)
    run = write(tmp_path / "scaled", latents=latents, statistics={"mean": [0.0] * 12, "std": [0.5] * 12})
    export(run, tmp_path / "out-scaled", "monolith", dit_pipeline=True)
    assert json.loads((tmp_path / "out-scaled/vae/config.json").read_text())["scaling_factor"] == 2


def test_the_card_of_a_few_step_student_names_its_steps(tmp_path: Path) -> None:
    export(write(tmp_path / "run", "student", steps=2), tmp_path / "out", "student", dit_pipeline=True)
    card = (tmp_path / "out/README.md").read_text()
    assert "class_labels=[0], guidance_scale=1.0, num_inference_steps=2" in card
    assert "trust_remote_code" not in card
    index = json.loads((tmp_path / "out/model_index.json").read_text())
    assert index["id2label"] == {str(number): name for number, name in enumerate(CLASSES)}
