"""Feature networks of the metrics: 8-bit images in, features and the SHA-256 of the weights out.

`inception` is the network of FID (`inception:PATH` for another file of its weights). Any other name is a feature model
as in the configuration key `features.model`: efficientnet-lite0, or a vision model of transformers such as DINOv2 or
CLIP, by hub name or folder. The features are the raw outputs, not normalized to length 1.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.device import device
from atoll.core.errors import AtollError
from atoll.encoders import efficientnet, inception
from atoll.encoders.pretrained import (
    Pixels,
    deterministic_inference,
    encode_images,
    fingerprint,
    load_pretrained,
    model_folder,
)
from atoll.encoders.vision import BATCH, Extractor, Vision, open_extractor, to_pixels


def open_vision(name: str) -> Vision:
    """Open the feature network with this name."""
    kind, _, path = name.partition(":")
    if kind == "inception":
        return _open_inception(Path(path) if path else None)
    extractor = open_extractor(name)
    resize = f"bicubic to {extractor.side}, antialiased"
    return Vision(name, weights_of(name), resize, lambda x: extractor.raw(resized(x, extractor.side, "bicubic")))


def weights_of(name: str) -> str:
    """Return the SHA-256 of the weights of a feature network, without opening it."""
    kind, _, path = name.partition(":")
    if kind == "inception":
        return fingerprint(Path(path) if path else inception.weights_file())
    return fingerprint(efficientnet.weights_file() if name == "efficientnet-lite0" else model_folder(name))


def _open_inception(file: Path | None) -> Vision:
    network = inception.load(file).to(device())

    def prepared(x: Tensor) -> Tensor:
        # Up to 299 pixels a side this is the bilinear resize of the common FID tools. Larger images are antialiased
        # too, as clean-fid recommends (Parmar et al. 2022). The constants are those of the TensorFlow original.
        return resized(x, inception.SIDE, "bilinear").sub_(128).div_(128)

    def features(x: Tensor) -> Tensor:
        return torch.cat(encode_images(network, prepared(x)))

    def maps(x: Tensor) -> list[Tensor]:
        with deterministic_inference():
            return network.maps(prepared(x))

    weights = fingerprint(file or inception.weights_file())
    return Vision("inception", weights, f"bilinear to {inception.SIDE}, antialiased", features, maps)


def resized(x: Tensor, side: int, mode: str) -> Tensor:
    """Resize pixels (N, 3, H, W) to `side`; they stay in 0 to 255."""
    if x.shape[-1] == side:
        return x.clone()
    return nn.functional.interpolate(x, (side, side), mode=mode, align_corners=False, antialias=True).clamp_(0, 255)


@dataclass(frozen=True)
class CaptionScorer:
    """An image-text model that scores how well images match their captions."""

    name: str
    weights: str
    extractor: Extractor
    tokenizer: Any

    def __call__(self, pixels: Pixels, captions: list[str]) -> Tensor:
        """Return the cosine (N,) between each image (N, H, W, 3) and its caption."""
        model: Any = self.extractor.network.network
        # Pad all captions to the full length: SigLIP was trained that way, and CLIP ignores the padding.
        length, parts = model.config.text_config.max_position_embeddings, []
        how = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
        for start in range(0, len(pixels), BATCH):
            tokens = self.tokenizer(captions[start : start + BATCH], **how)
            inputs = {key: tokens[key].to(device()) for key in ("input_ids", "attention_mask") if key in tokens}
            x = resized(to_pixels(pixels[start : start + BATCH]), self.extractor.side, "bicubic")
            with deterministic_inference():
                output = model.get_text_features(**inputs)
            # Some versions of transformers return the tensor itself, others an object that holds it.
            text: Tensor = output if isinstance(output, Tensor) else output.pooler_output
            parts.append(nn.functional.cosine_similarity(self.extractor.raw(x), text.float()))
        return torch.cat(parts).cpu()


def open_alignment(name: str) -> CaptionScorer:
    """Open an image-text model of transformers (CLIP, SigLIP) by hub name or folder."""
    from transformers import AutoTokenizer

    extractor = open_extractor(name)
    if not hasattr(getattr(extractor.network, "network", None), "get_text_features"):
        raise AtollError(f"{name} is no image-text model: it has no text features; use a CLIP or SigLIP model")
    return CaptionScorer(
        name, fingerprint(model_folder(name)), extractor, load_pretrained(AutoTokenizer, model_folder(name))
    )
