"""The latents: mean and std of the autoencoder's posterior for every image, and their statistics.

Latents are stored without normalization. Mean and std of each channel are measured over all training images. From
them, or from the autoencoder's scaling factor (`latents.normalization`), every shard gets the statistics that training
and sampling normalize with. They are the same for all clusters, so that all experts work in one latent space.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.config import Config
from atoll.core.device import compute_dtype, constant, download, dtype_name, upload
from atoll.core.device import device as default_device
from atoll.core.errors import AtollError, unknown
from atoll.core.manifests import LATENTS, ChannelStatistics, LatentsContent
from atoll.core.networks import LatentScale
from atoll.core.untrusted import Foreign
from atoll.data import autoencoder as shipped
from atoll.data.chunks import Chunks, Worker
from atoll.data.pretrained import deterministic_inference, fingerprint, model_folder
from atoll.data.sources.open import find_kind
from atoll.data.stages import ingest
from atoll.data.stages.base import Job, Stage
from atoll.data.stages.ingest import Index, Pixels, image_batches

NAME = layout.LATENTS
MIRRORED = "_mirrored"
"""Suffix of the names of tensors of the mirror images."""
_CLASSES = ("AutoencoderKL", "AutoencoderTiny")


@dataclass(frozen=True)
class Statistics:
    """The normalization x0 = (z - mean) / std of each latent channel z, and mean and std of the normalized data.

    With `per-channel`, mean and std are those of the training data, so the normalized data has mean 0 and std 1. With
    `scale`, they are the autoencoder's shift and 1 / scaling factor, and the normalized data has any mean and std. Two
    statistics are equal if they normalize equally; the moments of the data are not compared.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_mean: float | tuple[float, ...] = field(default=0.0, compare=False)
    """Mean of the normalized training data: one number, or one per channel."""
    data_std: float | tuple[float, ...] = field(default=1.0, compare=False)
    """Standard deviation of the normalized training data, likewise."""

    @classmethod
    def of_scale(cls, scale: LatentScale, channels: int) -> "Statistics":
        """Return the normalization by one scaling and shift factor, with the moments of the data unknown."""
        return cls((scale.shift_factor,) * channels, (1 / scale.scaling_factor,) * channels)

    def under(self, scale: LatentScale) -> "Statistics":
        """Return the normalization by `scale`, for data with the mean and std of these statistics."""
        return replace(
            Statistics.of_scale(scale, len(self.mean)),
            data_mean=tuple((mean - scale.shift_factor) * scale.scaling_factor for mean in self.mean),
            data_std=tuple(std * scale.scaling_factor for std in self.std),
        )

    @property
    def bridge_options(self) -> dict[str, float | tuple[float, ...]]:
        """The options of `flow.Bridge` that depend on the data."""
        return {"data_mean": self.data_mean, "data_std": self.data_std}

    def normalize(self, latents: Tensor) -> Tensor:
        """Return the network's input x0 from latents z (N, C, H, W) of the autoencoder."""
        return (latents - self._channel(self.mean, latents)) / self._channel(self.std, latents)

    def denormalize(self, latents: Tensor) -> Tensor:
        """Return the autoencoder's latents from x0: the inverse of `normalize`."""
        return latents * self._channel(self.std, latents) + self._channel(self.mean, latents)

    @staticmethod
    def _channel(values: tuple[float, ...], like: Tensor) -> Tensor:
        return constant(values, like).view(-1, 1, 1)

    @classmethod
    def of(cls, declared: ChannelStatistics) -> "Statistics":
        """Return the statistics in a manifest; moments that it omits are 0 and 1."""
        mean, std = declared.data_mean or 0.0, declared.data_std or 1.0
        return cls(declared.mean, declared.std, mean, std)

    def declared(self) -> ChannelStatistics:
        """Return the statistics for a manifest; moments of 0 and 1 are omitted."""
        given = {name: value for name, value in self.bridge_options.items() if isinstance(value, tuple)}
        return ChannelStatistics(mean=self.mean, std=self.std, **given)


class AutoencoderConfig(Foreign):
    """The config.json of a diffusers autoencoder."""

    class_name: str | None = Field(None, alias="_class_name")
    scaling_factor: float | None = None
    shift_factor: float | None = None

    def scale(self, source: Path) -> LatentScale:
        """Return its scaling and shift factor; `source` names the file in errors."""
        # A missing factor has the default of its class. A factor of null has no default.
        return LatentScale.of_autoencoder(self.model_dump(by_alias=True, exclude_unset=True), source)


class Codec:
    """An autoencoder, from 8-bit images to the posterior of their latents, and from latents to images."""

    def __init__(self, network: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        self.device = device or default_device()
        self.dtype = compute_dtype(self.device, dtype)
        # With a hook, accelerate moves the network when it runs.
        moved = network if hasattr(network, "_hf_hook") else network.to(self.device, self.dtype)
        self.network = moved.eval()

    def encode(self, pixels: Pixels) -> dict[str, Tensor]:
        """Return `mean` and, if there is a posterior, `std` (N, C, H, W) of images (N, side, side, 3)."""
        x = upload(torch.from_numpy(pixels), self.device).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        with deterministic_inference():
            output = self.network.encode(x.to(self.dtype))
        # AutoencoderKL returns a Gaussian posterior, AutoencoderTiny only latents.
        if hasattr(output, "latent_dist"):
            mean, std = download(output.latent_dist.mean.float(), output.latent_dist.std.float())
            return {"mean": mean, "std": std}
        return {"mean": output.latents.float().cpu()}

    def decode(self, latents: Tensor) -> Pixels:
        """Return images (N, side, side, 3) of latents that are not normalized, as from `encode`."""
        return self.decode_tensor(latents).cpu().numpy()

    def decode_tensor(self, latents: Tensor) -> Tensor:
        """Return the images of `decode` as an 8-bit tensor on the device of the autoencoder."""
        with deterministic_inference():
            x = self.network.decode(latents.to(self.device, self.dtype, non_blocking=True)).sample
        return _eight_bits(x)


class PixelCodec:
    """Diffusion in pixel space: the latents are the pixels, from -1 to 1."""

    def encode(self, pixels: Pixels) -> dict[str, Tensor]:
        """Return `mean` (N, 3, side, side) of images (N, side, side, 3)."""
        return {"mean": torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)}

    def decode(self, latents: Tensor) -> Pixels:
        """Return images (N, side, side, 3)."""
        return self.decode_tensor(latents).cpu().numpy()

    def decode_tensor(self, latents: Tensor) -> Tensor:
        """Return the images of `decode` as an 8-bit tensor on the device of the latents."""
        return _eight_bits(latents)


def _eight_bits(x: Tensor) -> Tensor:
    scaled = x.float().add(1).mul(127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 1)


def open_codec(
    autoencoder: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Codec | PixelCodec:
    """Open the autoencoder that the configuration names; by default, on the accelerator in its default precision."""
    if autoencoder == "pixels":
        return PixelCodec()
    folder = _folder(autoencoder)
    name = _settings(folder).class_name
    import diffusers

    options = {"use_safetensors": True, "low_cpu_mem_usage": False}
    network = getattr(diffusers, str(name)).from_pretrained(folder, **options, trust_remote_code=False)
    return Codec(network, device, dtype)


def scale_of(autoencoder: str) -> LatentScale:
    """Return the scaling and shift factor of an autoencoder; 1 and 0 for pixels."""
    if autoencoder == "pixels":
        return LatentScale(1.0)
    folder = _folder(autoencoder)
    return _settings(folder).scale(folder / "config.json")


def normalization(config: Config, measured: Statistics) -> Statistics:
    """Return the configured normalization, from the measured mean and std of each channel."""
    by_scale = config.latents.normalization == "scale"
    return measured.under(scale_of(config.latents.autoencoder)) if by_scale else measured


def _settings(folder: Path) -> AutoencoderConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise AtollError(f"{folder} has no config.json; expected a diffusers autoencoder: {' or '.join(_CLASSES)}")
    settings = AutoencoderConfig.read(file)
    if settings.class_name not in _CLASSES:
        raise AtollError(f"{file}: {unknown('autoencoder class', settings.class_name, _CLASSES)}")
    return settings


def _folder(autoencoder: str) -> Path:
    return shipped.path() if autoencoder == "emoji" else model_folder(autoencoder)


def weights_of(autoencoder: str) -> str | None:
    """Return the fingerprint of an autoencoder; None for pixels."""
    return None if autoencoder == "pixels" else fingerprint(_folder(autoencoder))


def _made_from(job: Job) -> Inputs:
    config, ingested = job.config.latents, Index.open(job.run).manifest.digest
    # Latents are stored without normalization, so the setting is an input of the shards, not of this artifact. But an
    # autoencoder without a scaling factor must be an error here, before the work.
    if config.normalization == "scale":
        scale_of(config.autoencoder)
    settings = {"resolution": job.config.data.resolution, **config.model_dump(exclude={"normalization"})}
    # Omitted at its default, so that latents from before the setting existed are not stale.
    flip = {"flip": True} if _stores_mirrored(job.config) else {}
    return {"ingest": ingested, **settings, **flip, "weights": weights_of(config.autoencoder)}


def _stores_mirrored(config: Config) -> bool:
    """Return whether the latents of the mirror images are stored.

    An autoencoder does not map mirror images to mirrored latents. Pixels do, exactly, so they are mirrored on reading.
    """
    return config.data.flip and config.latents.autoencoder != "pixels"


def _run(job: Job, artifact: Artifact, worker: Worker) -> LatentsContent | None:
    index, config, data = Index.open(job.run), job.config.latents, job.config.data
    chunks = index.chunks(artifact)
    if missing := chunks.missing(worker):
        codec, dtype = open_codec(config.autoencoder), getattr(torch, config.dtype)
        images = image_batches(
            index, job.source, missing, resolution=data.resolution, batch_size=config.batch_size, workers=data.workers
        )

        def encode(pixels: Pixels) -> dict[str, Tensor]:
            parts = codec.encode(pixels)
            if _stores_mirrored(job.config):
                mirrored = codec.encode(np.ascontiguousarray(pixels[:, :, ::-1]))
                parts |= {f"{name}{MIRRORED}": part for name, part in mirrored.items()}
            return {name: part.to(dtype) for name, part in parts.items()}

        chunks.fill("latents", missing, ((chunk, len(pixels), encode(pixels)) for chunk, pixels in images))
    return None if chunks.missing() else _measure(chunks, index, precision_of(config.autoencoder))


def precision_of(autoencoder: str) -> str:
    """Return the precision in which an autoencoder computes on this machine."""
    return "float32" if autoencoder == "pixels" else dtype_name(compute_dtype(default_device()))


def _measure(chunks: Chunks, index: Index, precision: str) -> LatentsContent:
    """Return shape and statistics of the latents over the training split, mirror images included."""
    # Training samples z = mean + std·noise of the posterior, so each channel has the second moment E[mean² + std²],
    # over images and pixels. Sums are in float64: float32 would lose digits over millions of images.
    count, total, squares = 0, np.zeros(0), np.zeros(0)
    shape: list[int] = []
    for chunk in range(chunks.count):
        tensors = load_file(chunks.artifact.path(chunks.file(chunk)))
        train = torch.tensor([split == "train" for split in index.read(chunk, ["split"])["split"]])
        for suffix in ("", MIRRORED) if f"mean{MIRRORED}" in tensors else ("",):
            mean, spread = tensors[f"mean{suffix}"][train].double(), tensors.get(f"std{suffix}")
            if not shape:
                shape = list(mean.shape[1:])
                total, squares = np.zeros(shape[0]), np.zeros(shape[0])
            square = mean**2 if spread is None else mean**2 + spread[train].double() ** 2
            count += mean.numel() // shape[0]
            total += mean.sum((0, 2, 3)).numpy()
            squares += square.sum((0, 2, 3)).numpy()
    channel_mean = total / count
    std = np.sqrt(np.maximum(squares / count - channel_mean**2, 0))
    if not np.isfinite(std).all() or (std == 0).any():
        raise AtollError(
            f"{chunks.artifact.folder}: a latent channel is constant or not finite (std {std.tolist()}); "
            "check the images, or use another latents.autoencoder"
        )
    statistics = ChannelStatistics(mean=tuple(channel_mean.tolist()), std=tuple(std.tolist()))
    return LatentsContent(rows=index.rows, shape=tuple(shape), statistics=statistics, precision=precision)


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


STAGE = Stage(
    name="latents",
    kind=LATENTS,
    inputs=(ingest.STAGE,),
    outputs=lambda _: {NAME: {}},
    made_from=_made_from,
    run=_run,
    uses=lambda config: config.latents.autoencoder,
    chunks=lambda job: Index.open(job.run).chunks(Artifact(job.run, NAME)),
    needs_gpu=True,
    note=note,
)
