"""The autoencoder and the text encoder of a model, each loaded once, on first use."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self

import torch

from atoll.core import config as configuration
from atoll.core.device import compute_dtype
from atoll.core.device import device as default_device
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.core.manifests import LatentSpec, TextSpec
from atoll.core.networks import BASE, LOCAL
from atoll.encoders.autoencoder import Codec, PixelCodec, open_codec
from atoll.encoders.autoencoder import folder_of as autoencoder_folder
from atoll.encoders.autoencoder import weights_of as autoencoder_weights
from atoll.encoders.base_pipeline import BasePipeline
from atoll.encoders.pretrained import check_weights
from atoll.encoders.text import TextEncoder, open_text_encoder
from atoll.encoders.text import folder_of as text_encoder_folder
from atoll.encoders.text import weights_of as text_encoder_weights

OpenCodec = Callable[[torch.device, torch.dtype], Codec | PixelCodec | BasePipeline]
OpenTextEncoder = Callable[[torch.device, torch.dtype], TextEncoder]
"""Functions that load a network to a device, in a precision."""


class Encoders:
    """The autoencoder (latents to images) and the text encoder (prompts to conditions) of a model."""

    def __init__(self, open_codec: OpenCodec, open_text_encoder: OpenTextEncoder) -> None:
        self.device = default_device()
        """Device of the networks, and their precision below; change both before the first use."""
        self.dtype = compute_dtype(self.device)
        self.autoencoder = cache(lambda: open_codec(self.device, self.dtype))
        self.text_encoder = cache(lambda: open_text_encoder(self.device, self.dtype))

    @classmethod
    def of(cls, latents: LatentSpec, text: TextSpec | None, *, run: Path | None = None) -> Self:
        """Return the encoders that a manifest names; the settings of `run` have the folders that it calls `local`."""

        def autoencoder(device: torch.device, dtype: torch.dtype) -> Codec | PixelCodec | BasePipeline:
            name = _resolve(latents.autoencoder, run, "latents.autoencoder")
            check_weights("autoencoder", name, recorded=latents.weights, found=autoencoder_weights(name))
            if name.startswith(BASE) and text is not None:  # the pipeline of a base also encodes the prompts
                check_weights("text encoder", name, recorded=text.weights, found=text_encoder_weights(name))
            return open_codec(name, device=device, dtype=dtype)

        def text_encoder(device: torch.device, dtype: torch.dtype) -> TextEncoder:
            known = _needed(text)
            name = _resolve(known.encoder, run, "text.encoder")
            check_weights("text encoder", name, recorded=known.weights, found=text_encoder_weights(name))
            return open_text_encoder(name, known.max_tokens, device=device, dtype=dtype)

        return cls(autoencoder, text_encoder)

    @classmethod
    def of_folder(cls, folder: Path, latents: LatentSpec, text: TextSpec | None) -> Self:
        """Return the encoders in the folder of an export, whose manifest lists the hashes of their files."""
        codec = "pixels" if latents.autoencoder == "pixels" else str(folder / "vae")
        encoder, tokenizer = str(folder / "text_encoder"), folder / "tokenizer"
        return cls(
            lambda device, dtype: open_codec(codec, device=device, dtype=dtype),
            lambda device, dtype: open_text_encoder(
                encoder, _needed(text).max_tokens, tokenizer, device=device, dtype=dtype
            ),
        )


def source_folders(latents: LatentSpec, text: TextSpec | None, *, run: Path) -> dict[str, Path]:
    """Return the folders of the autoencoder and the text encoder of a run, by their names in an export."""
    found = {}
    if latents.autoencoder != "pixels":
        found["vae"] = autoencoder_folder(_resolve(latents.autoencoder, run, "latents.autoencoder"))
    if text is not None:
        found["text_encoder"] = text_encoder_folder(_resolve(text.encoder, run, "text.encoder"))
    return found


def _needed(text: TextSpec | None) -> TextSpec:
    if text is None:
        raise AtollError("these experts were trained without text, so they take no prompts; omit the prompts")
    return text


def _resolve(name: str, run: Path | None, key: str) -> str:
    """Return the name of a network; the folder in the settings of the run if the manifest calls it `local`."""
    if not (name == LOCAL or name.startswith(BASE)) or run is None:
        return name
    config = configuration.load(run)
    found = config.latents.autoencoder if key == "latents.autoencoder" else config.text.encoder
    if found == LOCAL:
        raise AtollError(
            f"{key} of this run is a folder of its owner's machine; get a copy of it, and set {key} in "
            f"{run / CONFIG_FILE} to its path"
        )
    return found
