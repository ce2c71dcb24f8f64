"""A vision network that metrics look through."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.device import device
from atoll.data.stages.ingest import Pixels

BATCH = 32


@dataclass(frozen=True)
class Vision:
    """A network with its preprocessing, its name and the SHA-256 of its weights."""

    name: str
    weights: str
    resize: str
    features: Callable[[Tensor], Tensor]
    """Features (N, D) of pixels from 0 to 255, (N, 3, H, W) on `device`."""
    maps: Callable[[Tensor], list[Tensor]] | None = None
    """Feature maps of the same, for a perceptual distance; None if the network has none to offer."""

    def __call__(self, pixels: Pixels) -> Tensor:
        """Features (N, D) on the processor, of pictures (N, H, W, 3) of any size."""
        parts = [self.features(to_pixels(pixels[start : start + BATCH])) for start in range(0, len(pixels), BATCH)]
        return torch.cat(parts).float().cpu()

    @property
    def protocol(self) -> dict[str, str]:
        """What to write beside a number that was taken through this network."""
        return {"extractor": self.name, "weights_sha256": self.weights, "resize": self.resize}


def to_pixels(pixels: Pixels) -> Tensor:
    """Pictures (N, H, W, 3) as floats from 0 to 255, (N, 3, H, W), where the networks are."""
    return torch.from_numpy(pixels).to(device()).permute(0, 3, 1, 2).float()
