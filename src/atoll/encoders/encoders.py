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
from atoll.encoders.autoencoder import Codec, PixelCodec, open_codec
from atoll.encoders.autoencoder import weights_of as autoencoder_weights
from atoll.encoders.hub import LOCAL
from atoll.encoders.pretrained import check_weights
from atoll.encoders.text import TextEncoder, open_text_encoder
from atoll.encoders.text import weights_of as text_encoder_weights

OpenCodec = Callable[[torch.device, torch.dtype], Codec | PixelCodec]
OpenTextEncoder = Callable[[torch.device, torch.dtype], TextEncoder]
"""Functions that load a network to a device, in a precision."""


class Encoders:
    """The autoencoder (latents to images) and the text encoder (prompts to conditions) of a model."""

    def __init__(self, open_codec: OpenCodec, open_text_encoder: OpenTextEncoder) -> None:
        """Use the default device and its default precision, until `place` is called."""
        self.device = default_device()
        self.dtype = compute_dtype(self.device)
        self.autoencoder = cache(lambda: open_codec(self.device, self.dtype))
        self.text_encoder = cache(lambda: open_text_encoder(self.device, self.dtype))

    @classmethod
    def of(
        cls, latents: LatentSpec, text: TextSpec | None, folder: Path | None = None, *, run: Path | None = None
    ) -> Self:
        """Return the encoders that a manifest names; with `folder`, those in the folder of an export or release.

        The settings of `run` have the folder of a model that the manifest calls `local`.
        """

        def autoencoder(device: torch.device, dtype: torch.dtype) -> Codec | PixelCodec:
            name = _resolve(latents.autoencoder, run, "latents.autoencoder") if folder is None else latents.autoencoder
            if folder is None:  # the manifest of an export lists the hashes of its encoders' files
                found = autoencoder_weights(name)
                check_weights("autoencoder", name, recorded=latents.weights, found=found)
            elif name != "pixels":
                name = str(folder / "vae")
            return open_codec(name, device=device, dtype=dtype)

        def text_encoder(device: torch.device, dtype: torch.dtype) -> TextEncoder:
            if text is None:
                raise AtollError("these experts were trained without text, so they take no prompts; omit the prompts")
            tokenizer = None
            if folder is None:
                name = _resolve(text.encoder, run, "text.encoder")
                check_weights("text encoder", name, recorded=text.weights, found=text_encoder_weights(name))
            else:
                name, tokenizer = str(folder / "text_encoder"), folder / "tokenizer"
            return open_text_encoder(name, text.max_tokens, tokenizer, device=device, dtype=dtype)

        return cls(autoencoder, text_encoder)

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Choose device and precision; call it before the first use."""
        self.device, self.dtype = device, dtype


def _resolve(name: str, run: Path | None, key: str) -> str:
    """Return the name of a network, or its folder as the settings of the run give it."""
    if name != LOCAL or run is None:
        return name
    config = configuration.load(run)
    found = config.latents.autoencoder if key == "latents.autoencoder" else config.text.encoder
    if found == LOCAL:
        raise AtollError(
            f"{key} of this run is a folder of its owner's machine; get a copy of it, and set {key} in "
            f"{run / CONFIG_FILE} to its path"
        )
    return found
