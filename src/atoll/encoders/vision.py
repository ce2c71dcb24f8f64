"""Vision networks: features for clusters and patches (`Extractor`), and for metrics (`Vision`).

`efficientnet-lite0` comes from a pip package. For photographs use DINOv2 (`features.model: facebook/dinov2-base`) or
any other vision model of transformers, by its name on the hub or as a folder.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.device import device, upload
from atoll.core.errors import AtollError
from atoll.encoders import efficientnet
from atoll.encoders.pretrained import Pixels, deterministic_inference, encode_images, load_pretrained, model_folder

_STRIDE = 32
"""Stride of the last feature map of usual convolutional networks."""
# A choice: 32 images of 299 pixels fit into the memory of small GPUs.
BATCH = 32


class Extractor:
    """A vision network with its preprocessing, from 8-bit images to unit vectors.

    Images have `side` pixels a side; the network gets (pixel - mean) / std, for pixels from 0 to 255.
    """

    def __init__(self, network: nn.Module, side: int, mean: Sequence[float], std: Sequence[float]) -> None:
        self.device = device()
        self.network = network.to(self.device)
        self.side = side
        self._mean = torch.tensor(mean, device=self.device).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(std, device=self.device).view(1, 3, 1, 1)

    @property
    def multiple(self) -> int:
        """What the sides of images that are not square are multiples of: the patch size, or the stride."""
        config = getattr(getattr(self.network, "network", None), "config", None)
        config = getattr(config, "vision_config", config)  # CLIP has a text model beside it
        size = getattr(config, "patch_size", None)
        return size if isinstance(size, int) else getattr(self.network, "stride", _STRIDE)

    def __call__(self, pixels: Pixels) -> Tensor:
        """Return unit vectors (N, D) on the device, of images (N, side, side, 3)."""
        return nn.functional.normalize(self.raw(self._upload(pixels)), dim=1)

    def _upload(self, pixels: Pixels) -> Tensor:
        # The permuted view has the channels-last memory format, which is the fastest for convolutions, without a copy.
        return upload(torch.from_numpy(pixels), self.device).permute(0, 3, 1, 2).float()

    def raw(self, x: Tensor) -> Tensor:
        """Return features (N, D), not of length 1, of pixels (N, 3, side, side) from 0 to 255. Overwrite `x`."""
        x = x.sub_(self._mean).mul_(self._scale)
        return torch.cat(encode_images(self.network, x)).float()

    def patches(self, pixels: Pixels, grid: tuple[int, int]) -> Tensor:
        """Return a grid of features (N, rows, columns, C) on the device, of images (N, height, width, 3)."""
        x = self._upload(pixels).sub_(self._mean).mul_(self._scale)
        with deterministic_inference():
            found: Tensor = self.network.patches(x).float()  # type: ignore[operator]
            found = nn.functional.interpolate(found, grid, mode="bilinear", antialias=True)
        return found.permute(0, 2, 3, 1)

    def symmetric_patches(self, pixels: Pixels, grid: tuple[int, int]) -> Tensor:
        """Return a grid of features (N, rows, columns, C) that is mirrored if the image is mirrored.

        It is the mean of the features of the image and the mirrored features of its mirror image.
        """
        mirrored = self.patches(np.ascontiguousarray(pixels[:, :, ::-1]), grid)
        return (self.patches(pixels, grid) + mirrored.flip(2)) / 2


def open_extractor(model: str, resolution: int | None = None) -> Extractor:
    """Open the extractor that the configuration names."""
    if model == "efficientnet-lite0":
        return Extractor(efficientnet.load(), resolution or efficientnet.SIDE, mean=(127.0,) * 3, std=(128.0,) * 3)
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = model_folder(model)
    network = load_pretrained(AutoModel, folder, use_safetensors=True).eval()

    # Only side, mean and std are used. Atoll crops and resizes in one step (`data/images.py`), for all models alike.
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        raise AtollError(
            f"{folder} has no preprocessor_config.json, so mean and std of its images are unknown; copy that file too"
        )
    settings = json.loads(file.read_text(encoding="utf-8"))
    size = settings.get("crop_size") or settings.get("size") or {}
    own = size if isinstance(size, int) else size.get("height") or size.get("shortest_edge")
    side = resolution or own or getattr(network.config, "image_size", None)
    if not isinstance(side, int):
        raise AtollError(f"{file} has no image size; set features.resolution")
    # Mean and std apply to rescaled pixels, usually from 0 to 1; `Extractor` has them for pixels from 0 to 255.
    half, scale = [0.5, 0.5, 0.5], 1 / settings.get("rescale_factor", 1 / 255)
    mean, std = ([value * scale for value in settings.get(f"image_{name}") or half] for name in ("mean", "std"))
    return Extractor(_Pooled(network), side, mean, std)


class _Pooled(nn.Module):
    """One vector per image from a transformers vision model: its image features or pooled output, else token 0."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output = self.network.get_image_features(x) if hasattr(self.network, "get_image_features") else self.network(x)
        if isinstance(output, Tensor):
            return output
        pooled: Tensor | None = output.pooler_output
        first: Tensor = output.last_hidden_state[:, 0]
        # Convolutional models pool to (N, D, 1, 1).
        return first if pooled is None else pooled.flatten(1)

    def patches(self, x: Tensor) -> Tensor:
        """Return the last feature map (N, C, rows, columns): patch tokens without class and register tokens."""
        vision = getattr(self.network, "vision_model", self.network)  # CLIP has a text model beside it
        states: Tensor = vision(x).last_hidden_state
        if states.ndim == 4:  # a convolutional model
            return states
        # Class and register tokens come first. Some models merge patches, so that fewer are left than their size gives.
        rows = columns = math.isqrt(states.shape[1])
        if isinstance(size := getattr(vision.config, "patch_size", None), int):
            whole = x.shape[-2] // size, x.shape[-1] // size
            if math.prod(whole) <= states.shape[1]:
                rows, columns = whole
            elif whole[0] != whole[1]:
                raise ValueError("a network that merges patches takes only square images")
        return states[:, -(rows * columns) :].transpose(1, 2).reshape(len(states), -1, rows, columns)


@dataclass(frozen=True)
class Vision:
    """A network with its preprocessing, its name and the SHA-256 of its weights."""

    name: str
    weights: str
    resize: str
    features: Callable[[Tensor], Tensor]
    """Function from pixels (N, 3, H, W) from 0 to 255, on `device`, to features (N, D)."""
    maps: Callable[[Tensor], list[Tensor]] | None = None
    """Function from the same pixels to feature maps, for a perceptual distance; None if the network has none."""

    def __call__(self, pixels: Pixels) -> Tensor:
        """Return features (N, D) on the CPU, of images (N, H, W, 3) of any size."""
        parts = [self.features(to_pixels(pixels[start : start + BATCH])) for start in range(0, len(pixels), BATCH)]
        return torch.cat(parts).float().cpu()

    @property
    def protocol(self) -> dict[str, str]:
        """What must be stated with a metric that was computed with this network."""
        return {"extractor": self.name, "weights_sha256": self.weights, "resize": self.resize}


def to_pixels(pixels: Pixels) -> Tensor:
    """Return images (N, H, W, 3) as floats (N, 3, H, W) from 0 to 255, on the device of the networks."""
    return torch.from_numpy(pixels).to(device()).permute(0, 3, 1, 2).float()
