"""The built-in autoencoder: emoji (3, 64, 64) to latents (12, 8, 8), and back.

This folder has config.json and weights as diffusers writes them. `recipes/emoji-autoencoder` trained it.
"""

from pathlib import Path


def path() -> Path:
    """Return the folder for `AutoencoderKL.from_pretrained`."""
    return Path(__file__).parent
