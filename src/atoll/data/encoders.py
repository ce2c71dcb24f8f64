"""The autoencoder and the text encoder of a model, each loaded once, on first use."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self

from atoll.core.errors import AtollError
from atoll.core.manifests import LatentSpec, TextSpec
from atoll.data.pretrained import check_weights
from atoll.data.stages.latents import Codec, PixelCodec, open_codec
from atoll.data.stages.latents import weights_of as autoencoder_weights
from atoll.data.stages.text import TextEncoder, open_text_encoder
from atoll.data.stages.text import weights_of as text_encoder_weights


class Encoders:
    """The autoencoder (latents to images) and the text encoder (prompts to conditions) of a model."""

    def __init__(self, autoencoder: Callable[[], Codec | PixelCodec], text_encoder: Callable[[], TextEncoder]) -> None:
        self.autoencoder = cache(autoencoder)
        self.text_encoder = cache(text_encoder)

    @classmethod
    def of(cls, latents: LatentSpec, text: TextSpec | None, folder: Path | None = None) -> Self:
        """Return the encoders that a manifest names; with `folder`, those in the folder of an export or release."""

        def autoencoder() -> Codec | PixelCodec:
            name = latents.autoencoder
            if folder is None:  # the manifest of an export lists the hashes of its encoders' files
                found = autoencoder_weights(name)
                check_weights("autoencoder", name, recorded=latents.weights, found=found)
            return open_codec(name if folder is None or name == "pixels" else str(folder / "vae"))

        def text_encoder() -> TextEncoder:
            if text is None:
                raise AtollError("these experts were trained without text, so they take no prompts; omit the prompts")
            if folder is None:
                found = text_encoder_weights(text.encoder)
                check_weights("text encoder", text.encoder, recorded=text.weights, found=found)
                return open_text_encoder(text.encoder, text.max_tokens)
            return open_text_encoder(str(folder / "text_encoder"), text.max_tokens, folder / "tokenizer")

        return cls(autoencoder, text_encoder)
