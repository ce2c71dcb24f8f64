"""Autoencoders: from images to latents and back, and the normalization of the latents that networks are trained with.

`emoji` is the built-in one, emoji (3, 64, 64) to latents (12, 8, 8); `recipes/emoji-autoencoder` trained it. With
`pixels`, the latents are the pixels. Others are diffusers autoencoders, by their name on the hub or as a folder.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from atoll.core.device import compute_dtype, constant, dtype_name, upload
from atoll.core.device import device as default_device
from atoll.core.errors import AtollError, unknown
from atoll.core.manifests import ChannelStatistics
from atoll.core.networks import BASE, LatentScale
from atoll.core.sizes import Size
from atoll.encoders.base_pipeline import BaseName, BasePipeline, open_base
from atoll.encoders.pretrained import Pixels, deterministic_inference, encode_images, fingerprint, model_folder
from atoll.verify.untrusted import Foreign

EMOJI = Path(__file__).parent / "emoji"
"""Folder of the built-in autoencoder: config.json and weights as diffusers writes them."""
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
        return (latents - _channel(self.mean, latents)) / _channel(self.std, latents)

    def denormalize(self, latents: Tensor) -> Tensor:
        """Return the autoencoder's latents from x0: the inverse of `normalize`."""
        return latents * _channel(self.std, latents) + _channel(self.mean, latents)

    @classmethod
    def of(cls, declared: ChannelStatistics) -> "Statistics":
        """Return the statistics in a manifest; moments that it omits are 0 and 1."""
        mean, std = declared.data_mean or 0.0, declared.data_std or 1.0
        return cls(declared.mean, declared.std, mean, std)

    def declared(self) -> ChannelStatistics:
        """Return the statistics for a manifest; moments of 0 and 1 are omitted."""
        given = {name: value for name, value in self.bridge_options.items() if isinstance(value, tuple)}
        return ChannelStatistics(mean=self.mean, std=self.std, **given)


def _channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return constant(values, like).view(-1, 1, 1)


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
        # With a hook, accelerate moves the network when it runs. `to` of diffusers warns about every dtype.
        if not hasattr(network, "_hf_hook"):
            nn.Module.to(network, self.device, self.dtype)
        self.network = network.eval()

    @property
    def factor(self) -> int:
        """Side of an image over the side of its latents: each level but the first halves it."""
        config = self.network.config
        levels = getattr(config, "block_out_channels", None) or config.encoder_block_out_channels
        return int(2 ** (len(levels) - 1))

    def encode(self, pixels: Pixels) -> dict[str, Tensor]:
        """Return `mean` and, if there is a posterior, `std` (N, C, H, W) of images (N, height, width, 3).

        They are on the device of the autoencoder, which may still be at work.
        """
        x = upload(torch.from_numpy(pixels), self.device).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        parts = encode_images(lambda part: _posterior(self.network.encode(part)), x.to(self.dtype))
        return {name: torch.cat([part[name] for part in parts]).float() for name in parts[0]}

    def decode(self, latents: Tensor) -> Tensor:
        """Return 8-bit images (N, height, width, 3) on the device, of latents that are not normalized."""
        with deterministic_inference():
            x = self.network.decode(latents.to(self.device, self.dtype, non_blocking=True)).sample
        return _eight_bits(x)


class PixelCodec:
    """Diffusion in pixel space: the latents are the pixels, from -1 to 1."""

    factor = 1

    def encode(self, pixels: Pixels) -> dict[str, Tensor]:
        """Return `mean` (N, 3, height, width) of images (N, height, width, 3)."""
        return {"mean": torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)}

    def decode(self, latents: Tensor) -> Tensor:
        """Return 8-bit images (N, height, width, 3) on the device of the latents."""
        return _eight_bits(latents)


def _posterior(output: Any) -> dict[str, Tensor]:
    """Return mean and std of the Gaussian posterior of an AutoencoderKL; only latents of an AutoencoderTiny."""
    if hasattr(output, "latent_dist"):
        return {"mean": output.latent_dist.mean, "std": output.latent_dist.std}
    return {"mean": output.latents}


def _eight_bits(x: Tensor) -> Tensor:
    scaled = x.float().add(1).mul(127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 1)


def open_codec(
    autoencoder: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Codec | PixelCodec | BasePipeline:
    """Open the autoencoder that the configuration names; by default, on the accelerator in its default precision."""
    if autoencoder == "pixels":
        return PixelCodec()
    if autoencoder.startswith(BASE):
        return open_base(autoencoder, device, dtype)
    folder = folder_of(autoencoder)
    name = _settings(folder).class_name
    import diffusers

    options = {"use_safetensors": True, "low_cpu_mem_usage": False}
    network = getattr(diffusers, str(name)).from_pretrained(folder, **options, trust_remote_code=False)
    return Codec(network, device, dtype)


def scale_of(autoencoder: str) -> LatentScale:
    """Return the scaling and shift factor of an autoencoder; 1 and 0 for pixels and for the states of a base."""
    if autoencoder == "pixels" or autoencoder.startswith(BASE):
        return LatentScale(1.0)
    folder = folder_of(autoencoder)
    return _settings(folder).scale(folder / "config.json")


def _settings(folder: Path) -> AutoencoderConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise AtollError(f"{folder} has no config.json; expected a diffusers autoencoder: {' or '.join(_CLASSES)}")
    settings = AutoencoderConfig.read(file)
    if settings.class_name not in _CLASSES:
        raise AtollError(f"{file}: {unknown('autoencoder class', settings.class_name, _CLASSES)}")
    return settings


def folder_of(autoencoder: str) -> Path:
    """Return the folder of an autoencoder; download it if it is a name on the hub."""
    return EMOJI if autoencoder == "emoji" else model_folder(autoencoder)


def weights_of(autoencoder: str) -> str | None:
    """Return the fingerprint of an autoencoder; None for pixels."""
    if autoencoder.startswith(BASE):
        return BaseName.parse(autoencoder).weights("vae")
    return None if autoencoder == "pixels" else fingerprint(folder_of(autoencoder))


PUBLISHED_LATENTS: dict[str, tuple[int, int]] = {
    "stabilityai/sd-vae-ft-mse": (4, 8),
    "stabilityai/sd-vae-ft-ema": (4, 8),
    "madebyollin/taesd": (4, 8),
    "madebyollin/taesd3": (16, 8),
}
"""Latent channels and downsampling factor from published configurations: the shapes of these need no download."""


@cache
def latent_shapes(autoencoder: str, size: Size) -> dict[str, tuple[int, ...]]:
    """Return the shapes (C, H, W) of what `Codec.encode` returns for an image of a size, without loading weights."""
    if autoencoder == "pixels":
        return {"mean": (3, size.height, size.width)}
    if autoencoder in PUBLISHED_LATENTS:
        channels, factor = PUBLISHED_LATENTS[autoencoder]
        return {"mean": (channels, size.height // factor, size.width // factor)}
    if autoencoder.startswith(BASE):
        return {"mean": open_base(autoencoder).latent_shape(size)}
    import diffusers

    folder = folder_of(autoencoder)
    kind = getattr(diffusers, str(_settings(folder).class_name))
    with torch.device("meta"), torch.inference_mode():
        network = kind.from_config(kind.load_config(folder))
        output = network.encode(torch.empty(1, 3, size.height, size.width))
    return {name: tuple(part.shape[1:]) for name, part in _posterior(output).items()}


# A side that every known autoencoder divides without a remainder, and small.
_PROBE = Size.square(256)


def downscaling(autoencoder: str) -> int:
    """Return the factor between the sides of an image and of its latents."""
    return _PROBE.height // latent_shapes(autoencoder, _PROBE)["mean"][1]


def precision_of(autoencoder: str) -> str:
    """Return the precision in which an autoencoder computes on this machine."""
    return "float32" if autoencoder == "pixels" else dtype_name(compute_dtype(default_device()))
