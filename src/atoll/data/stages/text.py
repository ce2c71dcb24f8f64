"""Text embeddings of the captions: token states for cross-attention, and one pooled vector.

Only real tokens are stored, as one tensor (tokens, D) for all captions of a chunk, with the length of each caption; the
reader pads them. All captions of an image are encoded, one after the other.
"""

from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.device import compute_dtype, download, dtype_name
from atoll.core.device import device as default_device
from atoll.core.manifests import TEXT, TextContent
from atoll.data.chunks import Chunks, Worker, prefetch
from atoll.data.index import Index
from atoll.data.stages.base import ChunkStage
from atoll.encoders.text import TextEncoder, open_text_encoder, weights_of

NAME = layout.TEXT


class Text(ChunkStage):
    """The embeddings of all captions."""

    name, kind, folder = "text", TEXT, NAME
    needs_gpu = True

    def uses(self) -> str:
        return self.job.config.text.encoder

    def unneeded(self) -> str | None:
        if self.job.config.text.encoder == "none":
            return "text.encoder is none"
        index = self.job.index
        return "no image has a caption" if index and not index.content.captions else None

    def made_from(self) -> Inputs:
        config, ingested = self.job.config.text, self.job.open_index().manifest.digest
        return {"ingest": ingested, **config.model_dump(), "weights": weights_of(config.encoder)}

    def chunks(self) -> Chunks:
        return self.job.open_index().chunks(self.artifact)

    def fill(self, worker: Worker) -> None:
        index, config, chunks = self.job.open_index(), self.job.config.text, self.chunks()
        if not (missing := chunks.missing(worker)):
            return
        encoder, dtype = open_text_encoder(config.encoder, config.max_tokens), getattr(torch, config.dtype)
        captions = _captions(index, missing, config.batch_size)
        tokenized = prefetch(captions, lambda item: (*item[:2], encoder.tokenize(item[2])), workers=1)
        encoded = ((chunk, images, _stored(encoder, tokens, dtype)) for chunk, images, tokens in tokenized)
        chunks.fill("text", missing, encoded)

    def make(self, artifact: Artifact) -> TextContent:
        index, chunks = self.job.open_index(), self.chunks()
        chunks.remove_others()
        with safe_open(artifact.path(chunks.first_file()), "pt") as chunk:
            width, pooled = (chunk.get_slice(name).get_shape()[1] for name in ("tokens", "pooled"))
        return TextContent(
            rows=sum(len(captions) for chunk in range(chunks.count) for captions in image_captions(index, chunk)),
            max_tokens=self.job.config.text.max_tokens,
            dimensions=width,
            pooled=pooled,
            precision=dtype_name(compute_dtype(default_device())),
        )

    def summary(self, content: TextContent) -> str:
        return f"{content.rows:,} captions in {self.artifact.folder}"


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
