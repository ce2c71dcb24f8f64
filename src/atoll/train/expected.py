"""What a configuration lets expect of data that is not prepared yet, so that costs can be told before any work."""

import json
from pathlib import Path
from typing import Any

from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.data import autoencoder as shipped

LATENTS: dict[str, tuple[int, int]] = {
    "stabilityai/sd-vae-ft-mse": (4, 8),
    "stabilityai/sd-vae-ft-ema": (4, 8),
    "madebyollin/taesd": (4, 8),
    "madebyollin/taesd3": (16, 8),
}
"""Channels, and pixels along the side of one latent, of autoencoders by name."""
TEXT: dict[str, tuple[int, int]] = {
    "minilm": (384, 384),
    "openai/clip-vit-base-patch32": (512, 512),
    "openai/clip-vit-large-patch14": (768, 768),
    "google/t5-v1_1-large": (1024, 1024),
    "google/t5-v1_1-xl": (2048, 2048),
    "google/t5-v1_1-xxl": (4096, 4096),
}
"""Width of the tokens and of the pooled vector of text encoders by name."""


def expected_facts(config: Config) -> dict[str, Any]:
    """The facts of the shards that decide what a network costs: shapes of latents and text, number of classes."""
    return {
        "latents": {"shape": _latents(config.latents.autoencoder, config.data.resolution)},
        "text": _text(config.text.encoder, config.text.max_tokens),
        "labels": _labels(config),
    }


def _latents(autoencoder: str, resolution: int) -> list[int]:
    if autoencoder == "pixels":
        return [3, resolution, resolution]
    if autoencoder in LATENTS:
        channels, stride = LATENTS[autoencoder]
    else:
        settings = _settings(shipped.path() if autoencoder == "emoji" else Path(autoencoder), "the latents' shape")
        blocks = settings.get("block_out_channels") or settings["encoder_block_out_channels"]
        channels, stride = settings["latent_channels"], 2 ** (len(blocks) - 1)
    return [channels, resolution // stride, resolution // stride]


def _text(encoder: str, max_tokens: int) -> dict[str, int] | None:
    if encoder == "none":
        return None
    if encoder in TEXT:
        width, pooled = TEXT[encoder]
    else:
        settings = _settings(Path(encoder), "the text's width")
        settings = settings.get("text_config", settings)
        width = pooled = settings.get("d_model") or settings["hidden_size"]
    return {"max_tokens": max_tokens, "dimensions": width, "pooled": pooled}


def _labels(config: Config) -> list[str]:
    """Classes that the settings of the networks count; their names are not known yet."""
    parts = [choice for choice in config.networks.values() if isinstance(choice, dict)]
    count = max((part.get("num_classes", 0) for part in parts), default=0)
    return [f"class {number}" for number in range(count)]


def _settings(folder: Path, what: str) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise AtollError(f"{what} is not known before the data is prepared: {folder} is no folder with a config.json")
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return settings
