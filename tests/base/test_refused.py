"""Pipelines of real families that cannot be a base, each with its reason, and the table of the guide."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from atoll.encoders.trace import Recorder, Refused, trace
from base.test_trace import SMALL, WIDE
from base.tiny import FAMILIES, clip, scheduler, t5, tokenizer, vae

GUIDE = Path(__file__).parents[2] / "docs/how-to/train-on-a-base-model.md"


def epsilon_unet() -> Any:
    network = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8), layers_per_block=1, sample_size=32, cross_attention_dim=32, norm_num_groups=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True,
    )  # fmt: skip
    parts = vae(), clip(), tokenizer(), network, diffusers.EulerDiscreteScheduler()
    return diffusers.StableDiffusionPipeline(*parts, None, None, requires_safety_checker=False)


def epsilon_transformer() -> Any:
    network = diffusers.PixArtTransformer2DModel(
        num_layers=1, attention_head_dim=8, num_attention_heads=3, caption_channels=32, cross_attention_dim=24,
        sample_size=32,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(tokenizer(48), t5(), vae(), network, diffusers.DDIMScheduler())


def video() -> Any:
    network = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=32
    )
    autoencoder = diffusers.AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return diffusers.WanPipeline(tokenizer(48), t5(), autoencoder, scheduler(shift=7.0), network)


def multistep() -> Any:
    pipe = FAMILIES["sana"]()
    settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler(**settings)
    return pipe


REFUSED = {
    epsilon_unet: ("StableDiffusionPipeline", "EulerDiscreteScheduler has the prediction type epsilon"),
    epsilon_transformer: ("PixArtSigmaPipeline", "DDIMScheduler has the prediction type epsilon"),
    video: ("WanPipeline", "neither tokens nor a grid"),
    multistep: ("SanaPipeline", "differs from the pipeline with its DPMSolverMultistepScheduler"),
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_pipeline_that_is_no_base_is_refused_with_its_reason(make: Any) -> None:
    torch.manual_seed(0)
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    slot = "unet" if hasattr(pipe, "unet") else "transformer"
    with torch.device("meta"):
        network = type(getattr(pipe, slot)).from_config(getattr(pipe, slot).config)
    with pytest.raises(Refused, match=REFUSED[make][1]):
        trace(Recorder(pipe, slot, network, {} if slot == "unet" else {"max_sequence_length": 48}), SMALL, WIDE)


def test_the_table_of_the_guide_has_the_tested_pipelines() -> None:
    rows = [line.split("|") for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = {row[1].strip().strip("`"): row[2].strip() for row in rows}
    traced = {name for name, verdict in listed.items() if verdict == "traced"}
    assert traced == {type(make()).__name__ for make in FAMILIES.values()}
    refused = {name for name, verdict in listed.items() if verdict == "refused"}
    assert refused == {name for name, _ in REFUSED.values()} - traced
