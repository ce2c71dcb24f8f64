"""What the experts see: the autoencoder's posterior mean and std of every picture, and the statistics of all of them.

Latents are stored as the autoencoder gives them, and mean and std of each channel are measured over all training
samples. From them, or from the autoencoder's own factors (`latents.normalization`), every shard gets the statistics
that training and sampling normalise with, so that all experts share one space.
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
from atoll.core.device import device
from atoll.core.errors import AtollError, unknown
from atoll.core.manifests import LATENTS, ChannelStatistics, LatentsContent
from atoll.core.networks import LatentScale
from atoll.core.untrusted import Foreign
from atoll.data import autoencoder as shipped
from atoll.data.chunks import Chunks, Share
from atoll.data.pretrained import fingerprint, folder_of, repeatable
from atoll.data.sources.open import find_kind
from atoll.data.stages import ingest
from atoll.data.stages.base import Job, Stage
from atoll.data.stages.ingest import Index, Pixels, image_batches

NAME = layout.LATENTS
_CLASSES = ("AutoencoderKL", "AutoencoderTiny")


@dataclass(frozen=True)
class Statistics:
    """The normalization x0 = (z - mean) / std of each latent channel z, and the moments of the data that it gives.

    Per channel, mean and std are those of the training data, so the normalized data has mean 0 and std 1. By scale,
    they are the autoencoder's shift and 1/scale, and the normalized data has any mean and std. Statistics are equal if
    they normalize alike, whatever the data.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_mean: float | tuple[float, ...] = field(default=0.0, compare=False)
    """Mean of the normalized training data, in each channel if they differ."""
    data_std: float | tuple[float, ...] = field(default=1.0, compare=False)

    @classmethod
    def of_scale(cls, scale: LatentScale, channels: int) -> "Statistics":
        """Return the normalization by one scale and shift, of data that is not known."""
        return cls((scale.shift_factor,) * channels, (1 / scale.scaling_factor,) * channels)

    def under(self, scale: LatentScale) -> "Statistics":
        """Return the normalization by `scale` of the data whose mean and std these are."""
        return replace(
            Statistics.of_scale(scale, len(self.mean)),
            data_mean=tuple((mean - scale.shift_factor) * scale.scaling_factor for mean in self.mean),
            data_std=tuple(std * scale.scaling_factor for std in self.std),
        )

    @property
    def bridge_options(self) -> dict[str, float | tuple[float, ...]]:
        """Return what a bridge must be given of the data (`flow.Bridge`)."""
        return {"data_mean": self.data_mean, "data_std": self.data_std}

    def normalise(self, latents: Tensor) -> Tensor:
        """Latents (N, C, H, W) of the autoencoder as the networks see them."""
        return (latents - self._channel(self.mean, latents)) / self._channel(self.std, latents)

    def restore(self, latents: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        return latents * self._channel(self.std, latents) + self._channel(self.mean, latents)

    @staticmethod
    def _channel(values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)

    @classmethod
    def of(cls, declared: ChannelStatistics) -> "Statistics":
        """Return the statistics that a manifest declares; moments that it leaves out are 0 and 1."""
        mean, std = declared.data_mean or 0.0, declared.data_std or 1.0
        return cls(declared.mean, declared.std, mean, std)

    def declared(self) -> ChannelStatistics:
        """Return the statistics for a manifest; moments of 0 and 1 are left out."""
        given = {name: value for name, value in self.bridge_options.items() if isinstance(value, tuple)}
        return ChannelStatistics(mean=self.mean, std=self.std, **given)


class AutoencoderConfig(Foreign):
    """The config.json of a diffusers autoencoder."""

    class_name: str | None = Field(None, alias="_class_name")
    scaling_factor: float | None = None
    shift_factor: float | None = None

    def scale(self, source: Path) -> LatentScale:
        """Return its scaling and shift factor; `source` names the file in errors."""
        # A factor that is missing has the default of its class. A factor of null has none.
        return LatentScale.of_autoencoder(self.model_dump(by_alias=True, exclude_unset=True), source)


class Codec:
    """An autoencoder: pictures of eight bits to the posterior of their latents, and latents to pictures."""

    def __init__(self, network: Any, place: torch.device | None = None) -> None:
        self.device = place or device()
        self.network = network.to(self.device).eval()

    def encode(self, pixels: Pixels) -> dict[str, Tensor]:
        """`mean` and, if the autoencoder has one, `std` (N, C, H, W) of pictures (N, side, side, 3)."""
        x = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        with repeatable():
            answer = self.network.encode(x)
        if hasattr(answer, "latent_dist"):
            return {"mean": answer.latent_dist.mean.cpu(), "std": answer.latent_dist.std.cpu()}
        return {"mean": answer.latents.cpu()}

    def decode(self, latents: Tensor) -> Pixels:
        """Pictures (N, side, side, 3) of latents as `encode` gives them."""
        with repeatable():
            x = self.network.decode(latents.to(self.device, self.network.dtype)).sample
        return _eight_bits(x)


class Pixel:
    """No autoencoder: the latents are the pixels, from -1 to 1."""

    def encode(self, pixels: Pixels) -> dict[str, Tensor]:
        """`mean` (N, 3, side, side)."""
        return {"mean": torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)}

    def decode(self, latents: Tensor) -> Pixels:
        """Pictures (N, side, side, 3)."""
        return _eight_bits(latents)


def _eight_bits(x: Tensor) -> Pixels:
    scaled = x.float().add(1).mul(127.5).round().clamp(0, 255)
    pixels: Pixels = scaled.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return pixels


def open_codec(autoencoder: str) -> Codec | Pixel:
    """The autoencoder by its name in the configuration."""
    if autoencoder == "pixels":
        return Pixel()
    folder = _folder(autoencoder)
    name = _settings(folder).class_name
    import diffusers

    options = {"use_safetensors": True, "low_cpu_mem_usage": False}
    return Codec(getattr(diffusers, str(name)).from_pretrained(folder, **options, trust_remote_code=False))


def scale_of(autoencoder: str) -> LatentScale:
    """Return an autoencoder's own scaling and shift factor. Pixels, from -1 to 1, are scaled already."""
    if autoencoder == "pixels":
        return LatentScale(1.0)
    folder = _folder(autoencoder)
    return _settings(folder).scale(folder / "config.json")


def normalization(config: Config, measured: Statistics) -> Statistics:
    """Return how the latents are normalized, from the mean and std of each channel over the training data."""
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
    return shipped.path() if autoencoder == "emoji" else folder_of(autoencoder)


def _made_from(job: Job) -> Inputs:
    config, ingested = job.config.latents, Index.open(job.run).manifest.digest
    # Latents are stored as the autoencoder gives them; the normalization is that of the shards. But an autoencoder
    # without a scale is refused before the work.
    if config.normalization == "scale":
        scale_of(config.autoencoder)
    weights = None if config.autoencoder == "pixels" else fingerprint(_folder(config.autoencoder))
    settings = {"resolution": job.config.data.resolution, **config.model_dump(exclude={"normalization"})}
    return {"ingest": ingested, **settings, "weights": weights}


def _run(job: Job, artifact: Artifact, share: Share) -> LatentsContent | None:
    index, config, data = Index.open(job.run), job.config.latents, job.config.data
    chunks = index.chunks(artifact)
    if missing := chunks.missing(share):
        codec, dtype = open_codec(config.autoencoder), getattr(torch, config.dtype)
        images = image_batches(
            index, job.source, missing, resolution=data.resolution, batch=config.batch_size, workers=data.workers
        )
        encoded = (
            (chunk, len(pixels), {name: part.to(dtype) for name, part in codec.encode(pixels).items()})
            for chunk, pixels in images
        )
        chunks.fill("latents", missing, encoded)
    return None if chunks.missing() else _measured(chunks, index)


def _measured(chunks: Chunks, index: Index) -> LatentsContent:
    """Shape and statistics: those of mean + std·noise, so the variance is Var(mean) + E(std²)."""
    count, total, squares = 0, np.zeros(0), np.zeros(0)
    shape: list[int] = []
    for chunk in range(chunks.count):
        tensors = load_file(chunks.artifact.path(chunks.file(chunk)))
        train = torch.tensor([split == "train" for split in index.read(chunk, ["split"])["split"]])
        mean = tensors["mean"][train].double()
        if not shape:
            shape = list(mean.shape[1:])
            total, squares = np.zeros(shape[0]), np.zeros(shape[0])
        square = mean**2 if "std" not in tensors else mean**2 + tensors["std"][train].double() ** 2
        count += mean.numel() // shape[0]
        total += mean.sum((0, 2, 3)).numpy()
        squares += square.sum((0, 2, 3)).numpy()
    centre = total / count
    std = np.sqrt(np.maximum(squares / count - centre**2, 0))
    if not np.isfinite(std).all() or (std == 0).any():
        raise AtollError(f"{chunks.artifact.folder}: a latent channel is constant or not finite (std {std.tolist()})")
    statistics = ChannelStatistics(mean=tuple(centre.tolist()), std=tuple(std.tolist()))
    return LatentsContent(rows=index.rows, shape=tuple(shape), statistics=statistics)


def note(config: Config) -> str | None:
    """Return a warning about the autoencoder of emoji, if other images shall be encoded with it."""
    data = config.data
    if config.latents.autoencoder != "emoji" or (data.kind or find_kind(data.source)) == "emoji":
        return None
    return (
        "latents.autoencoder is emoji, which was made for emoji of 64 pixels and spoils other images; "
        "for these take one of diffusers, such as stabilityai/sd-vae-ft-mse, or begin with: "
        "atoll init --preset pictures"
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
