"""A small autoencoder with random weights, as a diffusers folder."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL


def write_autoencoder(folder: Path, **settings: Any) -> Path:
    """Write an AutoencoderKL of four channels at half the resolution, with the scale of Stable Diffusion by default."""
    torch.manual_seed(0)
    network = AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, **settings,
    )  # fmt: skip
    network.save_pretrained(folder)
    return folder
