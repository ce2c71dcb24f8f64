"""Text embeddings of the captions: token states for cross-attention, and one pooled vector.

Only real tokens are stored, as one tensor (tokens, D) for all captions of a chunk, with the length of each caption; the
reader pads them. All captions of an image are encoded, one after the other.

For a base network, the arguments of its pipeline's network are stored instead, under their own names, and once for each
size those of no prompt.
"""

import json
from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.device import compute_dtype, download, dtype_name
from atoll.core.device import device as default_device
from atoll.core.manifests import TEXT, TextContent
from atoll.core.networks import BASE
from atoll.data.chunks import Chunks, WorkerShare, prefetch
from atoll.data.index import Index
from atoll.data.stages.stage import ChunkStage
from atoll.encoders.base_pipeline import open_base
from atoll.encoders.text import open_text_encoder, weights_of
from atoll.nets.arguments import ARGUMENT, SHAPE, SHARED, STRUCTURE, flatten

NAME = layout.TEXT


class TextStage(ChunkStage):
    """The embeddings of all captions."""

    name, kind, folder = "text", TEXT, NAME
    needs_gpu = True

    def uses(self) -> str:
        return self.preparation.config.text.encoder

    def unneeded(self) -> bool:
        index = self.preparation.index
        return self.preparation.config.text.encoder == "none" or (index is not None and not index.content.captions)

    def made_from(self) -> Inputs:
        config, ingested = self.preparation.config.text, self.preparation.open_index().manifest.digest
        return {"ingest": ingested, **config.model_dump(), "weights": weights_of(config.encoder)}

    def chunks(self) -> Chunks:
        return self.preparation.open_index().chunks(self.artifact)

    def fill(self, worker: WorkerShare) -> None:
        index, config, chunks = self.preparation.open_index(), self.preparation.config.text, self.chunks()
        if not (missing := chunks.missing(worker)):
            return
        if config.encoder.startswith(BASE):
            chunks.write_batches("text", missing, self._arguments(missing))
            return
        encoder, dtype = open_text_encoder(config.encoder, config.max_tokens), getattr(torch, config.dtype)
        captions = _captions(index, missing, config.batch_size)

        def encoded() -> Iterator[tuple[int, int, dict[str, Tensor]]]:
            tokenized = prefetch(captions, lambda item: (*item[:2], encoder.tokenize(item[2])), workers=1)
            for chunk, images, tokens in tokenized:
                states, mask, pooled = download(*encoder.encode(tokens))
                lengths = mask.sum(1).to(torch.int32)
                yield chunk, images, {"tokens": states[mask].to(dtype), "lengths": lengths, "pooled": pooled.to(dtype)}

        chunks.write_batches("text", missing, encoded())

    def _arguments(self, chunks: list[int]) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield the arguments of a base network for every caption, at the size of its image, one by one."""
        index, dtype = self.preparation.open_index(), getattr(torch, self.preparation.config.text.dtype)
        base = open_base(self.preparation.config.text.encoder)
        for chunk in chunks:
            for captions, size in zip(image_captions(index, chunk), index.sizes(chunk), strict=True):
                rows = []
                for caption in captions:
                    found = base.arguments(caption, size)
                    tensors, _ = flatten({name: found[name] for name in base.traced[0].by_prompt})
                    row = {"pooled": base.pooled(found)[None].to(dtype)}
                    for path, part in tensors.items():
                        # Values in sequence, and the shape of each caption's tensor.
                        row[f"{ARGUMENT}{path}"] = part.reshape(-1)
                        row[f"{SHAPE}{path}"] = torch.tensor([part.shape], dtype=torch.int32).reshape(1, -1)
                    rows.append(row)
                yield chunk, 1, {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def make(self, artifact: Artifact) -> TextContent:
        index, chunks = self.preparation.open_index(), self.chunks()
        chunks.remove_others()
        rows = sum(len(captions) for chunk in range(chunks.count) for captions in image_captions(index, chunk))
        precision = dtype_name(compute_dtype(default_device()))
        if self.preparation.config.text.encoder.startswith(BASE):
            base = open_base(self.preparation.config.text.encoder)
            for size in index.train_sizes():
                # The arguments of no prompt: the null condition, and what depends on the size alone
                tensors, structure = flatten(base.arguments("", size))
                described = torch.frombuffer(bytearray(json.dumps(structure).encode()), dtype=torch.uint8)
                artifact.write_tensors(SHARED.format(size), {**tensors, STRUCTURE: described})
            with safe_open(artifact.path(chunks.first_file()), "pt") as chunk:
                pooled = chunk.get_slice("pooled").get_shape()[1]
            return TextContent(
                rows=rows, max_tokens=1, dimensions=1, pooled=pooled, precision=precision, base=base.config()
            )
        with safe_open(artifact.path(chunks.first_file()), "pt") as chunk:
            width, pooled = (chunk.get_slice(name).get_shape()[1] for name in ("tokens", "pooled"))
        return TextContent(
            rows=rows,
            max_tokens=self.preparation.config.text.max_tokens,
            dimensions=width,
            pooled=pooled,
            precision=precision,
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
