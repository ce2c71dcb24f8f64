"""A small autoencoder with random weights, as a diffusers folder."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL


def write_autoencoder(folder: Path, **settings: Any) -> Path:
    """Write an AutoencoderKL of four channels at half the resolution, by default with Stable Diffusion's factors.

    Its latents are about as large as those of Stable Diffusion, and off center: times 0.18215 they have a std below 1.
    """
    torch.manual_seed(0)
    network = AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, **settings,
    )  # fmt: skip
    assert network.quant_conv is not None
    with torch.no_grad():
        for parameter in network.quant_conv.parameters():
            parameter[:4] *= 20  # the posterior mean; the other half is the logarithm of its variance
    network.save_pretrained(folder)
    return folder
