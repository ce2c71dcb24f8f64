"""The built-in autoencoder reconstructs images of the validation split."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from atoll.data.images import decode
from atoll.data.sources.open import open_source
from atoll.encoders.autoencoder import EMOJI


@pytest.fixture(scope="module")
def network() -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(EMOJI).eval()


@pytest.fixture(scope="module")
def validation() -> Tensor:
    """Every third validation emoji, from -1 to 1."""
    found = [image for image in open_source("emoji").images() if image.split == "validation"]
    pixels = [np.asarray(decode(image.read(), 64)) for image in found[::3]]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1


def batches(images: Tensor) -> Iterator[Tensor]:
    return iter(images.split(34))


def test_its_files_are_small_and_in_the_layout_of_diffusers() -> None:
    files = {file.name: file.stat().st_size for file in EMOJI.iterdir() if file.is_file()}
    assert {"config.json", "diffusion_pytorch_model.safetensors"} <= files.keys()
    assert sum(files.values()) < 4_000_000


@torch.inference_mode()
def test_reconstruction_of_validation_captions(network: AutoencoderKL, validation: Tensor) -> None:
    """At least 26 dB, as the mean of each image's PSNR, from the posterior's mean."""
    psnr = []
    for x in batches(validation):
        restored = network.decode(network.encode(x).latent_dist.mean).sample.clamp(-1, 1)
        error = ((restored - x) / 2).square().mean(dim=(1, 2, 3))
        psnr.append(-10 * error.log10())
    assert len(torch.cat(psnr)) == 170
    assert torch.cat(psnr).mean() >= 26


@torch.inference_mode()
def test_latents_suit_a_diffusion_model(network: AutoencoderKL, validation: Tensor) -> None:
    """Shape (12, 8, 8), std about 1 with the scaling of the config, no unused channel, noise well below the signal."""
    posteriors = [network.encode(x).latent_dist for x in batches(validation)]
    latents = torch.cat([posterior.mean for posterior in posteriors])
    assert latents.dtype == torch.float32
    assert latents.shape[1:] == (12, 8, 8)
    scaled = (latents - network.config.shift_factor) * network.config.scaling_factor
    spread = scaled.std(dim=(0, 2, 3))
    assert 0.9 < scaled.std() < 1.1
    assert spread.min() > 0.25
    assert spread.max() < 2
    noise = torch.cat([posterior.std for posterior in posteriors]).mean()
    assert noise < 0.1 * latents.std()
