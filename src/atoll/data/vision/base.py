"""The interface of vision networks for metrics."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.device import device
from atoll.data.stages.ingest import Pixels

# A choice: 32 images of 299 pixels fit into the memory of small GPUs.
BATCH = 32


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
