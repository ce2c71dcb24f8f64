"""The autoencoder and the text encoder of a model, each opened once, when it is first needed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self

from atoll.core.errors import AtollError
from atoll.core.manifests import LatentSpec, TextSpec
from atoll.data.stages.latents import Codec, Pixel, open_codec
from atoll.data.stages.text import TextEncoder, open_text_encoder


class Encoders:
    """From prompts to conditions and from latents to images."""

    def __init__(self, autoencoder: Callable[[], Codec | Pixel], text_encoder: Callable[[], TextEncoder]) -> None:
        self.autoencoder = cache(autoencoder)
        self.text_encoder = cache(text_encoder)

    @classmethod
    def of(cls, latents: LatentSpec, text: TextSpec | None, folder: Path | None = None) -> Self:
        """Find them by the names in a manifest, or in the folder of an export or release that contains them."""

        def autoencoder() -> Codec | Pixel:
            name = latents.autoencoder
            return open_codec(name if folder is None or name == "pixels" else str(folder / "vae"))

        def text_encoder() -> TextEncoder:
            if text is None:
                raise AtollError("these experts were trained without text: they take no prompts")
            if folder is None:
                return open_text_encoder(text.encoder, text.max_tokens)
            return open_text_encoder(str(folder / "text_encoder"), text.max_tokens, folder / "tokenizer")

        return cls(autoencoder, text_encoder)
