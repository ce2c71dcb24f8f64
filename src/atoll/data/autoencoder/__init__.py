"""The autoencoder that comes with Atoll: emoji of 64x64 pixels to latents of 8x8 with 12 channels, and back.

The folder holds config.json and weights as diffusers writes them, so whatever reads a Stable Diffusion VAE reads this.
`recipes/emoji-autoencoder` trained it.
"""

from pathlib import Path


def path() -> Path:
    """The folder to give to `AutoencoderKL.from_pretrained`."""
    return Path(__file__).parent
