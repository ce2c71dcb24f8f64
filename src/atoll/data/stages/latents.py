"""The latents: mean and std of the autoencoder's posterior for every image, and their statistics.

Latents are stored without normalization. Mean and std of each channel are measured over all training images. From
them, or from the autoencoder's scaling factor (`latents.normalization`), every shard gets the statistics that training
and sampling normalize with. They are the same for all clusters, so that all experts work in one latent space.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.manifests import LATENTS, ChannelStatistics, LatentsContent
from atoll.core.sizes import Size
from atoll.data.chunks import MIRRORED, Chunks, select_rows
from atoll.data.sources.open import find_kind
from atoll.data.stages import ingest
from atoll.data.stages.stage import EncoderStage, PassEncoder
from atoll.encoders.autoencoder import Statistics, latent_shapes, open_codec, precision_of, scale_of, weights_of
from atoll.encoders.pretrained import Pixels

NAME = layout.LATENTS
_SUMS, _COUNT = "sums", "count"
"""Names of the sums over a chunk's latents, which the statistics are made of."""


def normalization(config: Config, measured: Statistics) -> Statistics:
    """Return the configured normalization, from the measured mean and std of each channel."""
    by_scale = config.latents.normalization == "scale"
    return measured.under(scale_of(config.latents.autoencoder)) if by_scale else measured


def _stores_mirrored(config: Config) -> bool:
    """Return whether the latents of the mirror images are stored.

    An autoencoder does not map mirror images to mirrored latents. Pixels do, exactly, so they are mirrored on reading.
    """
    return config.data.flip and config.latents.autoencoder != "pixels"


class LatentsStage(EncoderStage):
    """Mean and std of the posterior of every image, and their statistics over the training split."""

    name, kind, folder = "latents", LATENTS, NAME

    def uses(self) -> str:
        return self.preparation.config.latents.autoencoder

    def note(self) -> str | None:
        return note(self.preparation.config)

    def made_from(self) -> Inputs:
        config, data = self.preparation.config.latents, self.preparation.config.data
        # Latents are stored without normalization, so the setting is an input of the shards, not of this artifact. But
        # an autoencoder without a scaling factor must be an error here, before the work.
        if config.normalization == "scale":
            scale_of(config.autoencoder)
        settings = {"resolution": data.resolution, **config.model_dump(exclude={"normalization"})}
        settings |= {"flip": _stores_mirrored(self.preparation.config), "weights": weights_of(config.autoencoder)}
        return {"ingest": ingest.identity(self.preparation), **settings}

    def open_encoder(self) -> PassEncoder:
        config, mirrors = self.preparation.config.latents, _stores_mirrored(self.preparation.config)
        codec, dtype = open_codec(config.autoencoder), getattr(torch, config.dtype)

        def encode(pixels: Pixels, _: Size) -> dict[str, Tensor]:
            parts = codec.encode(pixels)
            if mirrors:
                mirrored = codec.encode(np.ascontiguousarray(pixels[:, :, ::-1]))
                parts |= {f"{name}{MIRRORED}": part for name, part in mirrored.items()}
            return {name: part.to(dtype) for name, part in parts.items()}

        return PassEncoder(encode, config.batch_size, input_size=lambda size: size, by_size=True, summarize=moments)

    def make(self, artifact: Artifact) -> LatentsContent:
        index, config = self.preparation.open_index(), self.preparation.config.latents
        chunks = index.chunks(artifact)
        chunks.remove_others()

        # Mean and std of each channel over the training split, mirror images included, from the sums of chunks
        count, sums = 0, np.zeros((2, 1))
        for chunk in filter(chunks.length, range(chunks.count)):
            with safe_open(artifact.path(chunks.file(chunk)), "pt") as stored:
                for suffix in ("", MIRRORED) if f"{_SUMS}{MIRRORED}" in stored.keys() else ("",):  # noqa: SIM118 - not a dict
                    sums = sums + stored.get_tensor(f"{_SUMS}{suffix}").numpy()
                    count += int(stored.get_tensor(f"{_COUNT}{suffix}"))
        mean = sums[0] / count
        std = np.sqrt(np.maximum(sums[1] / count - mean**2, 0))
        if not np.isfinite(std).all() or (std == 0).any():
            raise AtollError(
                f"{artifact.folder}: a latent channel is constant or not finite (std {std.tolist()}); "
                "check the images, or use another latents.autoencoder"
            )

        shapes = {size: latent_shapes(config.autoencoder, size)["mean"] for size in index.train_sizes()}
        return LatentsContent(
            rows=index.rows,
            shape=next(iter(shapes.values())),
            shapes={str(size): shape for size, shape in shapes.items()} if len(shapes) > 1 else None,
            statistics=ChannelStatistics(mean=tuple(mean.tolist()), std=tuple(std.tolist())),
            precision=precision_of(config.autoencoder),
            ingest=index.manifest.digest,
        )


def moments(tensors: Mapping[str, Tensor], train: Tensor) -> dict[str, Tensor]:
    """Return the number of values per channel, and the sums of values and squares (2, C), over training images.

    Training samples z = mean + std·noise of the posterior, so each channel has the second moment E[mean² + std²], over
    images and pixels. Sums are in float64: float32 would lose digits over millions of images. Plain and mirrored
    images have sums of their own, so that the order of additions over the chunks is fixed.
    """
    found = {}
    for suffix in ("", MIRRORED) if f"mean{MIRRORED}" in tensors else ("",):
        mean, spread = tensors[f"mean{suffix}"][train].double(), tensors.get(f"std{suffix}")
        square = mean**2 if spread is None else mean**2 + spread[train].double() ** 2
        found[f"{_SUMS}{suffix}"] = torch.stack([mean.sum((0, 2, 3)), square.sum((0, 2, 3))])
        found[f"{_COUNT}{suffix}"] = torch.tensor([mean.numel() // mean.shape[1]])
    return found


def read_latents(chunks: Chunks, chunk: int, *, sizes: Sequence[Size], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the latents of some rows of a chunk, by name; `sizes` and `rows` as in `select_rows`."""
    stored = load_file(chunks.artifact.path(chunks.file(chunk)))
    own = {name: tensor for name, tensor in stored.items() if not name.startswith((_SUMS, _COUNT))}
    return select_rows(own, sizes, rows)


def note(config: Config) -> str | None:
    """Return a warning if the emoji autoencoder is used for other images; None otherwise."""
    data = config.data
    if config.latents.autoencoder != "emoji" or (data.kind or find_kind(data.source)) == "emoji":
        return None
    return (
        "latents.autoencoder is emoji, which was trained on emoji of 64 pixels and reconstructs other images badly; "
        "for these use a diffusers autoencoder, such as stabilityai/sd-vae-ft-mse, or begin with: "
        "atoll init --preset images"
    )
