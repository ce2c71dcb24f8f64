"""Perceptual distances between images: LPIPS (Zhang et al. 2018), or a substitute without its weights.

LPIPS needs a file with its weights: AlexNet and five linear heads, in the layout of the `lpips` package. Without it,
the feature maps of another vision network are compared with equal weights, or its features if it has no maps. The name
of the distance states which one was used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.device import device
from atoll.encoders.pretrained import Pixels, deterministic_inference, fingerprint
from atoll.encoders.vision import Vision, to_pixels
from atoll.nets.io import check_fit, read_weights

# As in the lpips package.
_EPS = 1e-10


@dataclass(frozen=True)
class Perceptual:
    """A distance between images, with its name and the SHA-256 of its weights."""

    name: str
    weights: str
    matrix: Callable[[Tensor], Tensor]

    def __call__(self, pixels: Pixels) -> Tensor:
        """Return distances (N, N) on the CPU, between images (N, H, W, 3)."""
        return self.matrix(to_pixels(pixels)).cpu().double()


def open_perceptual(vision: Vision, lpips: Path | None = None) -> Perceptual:
    """Return LPIPS if its weights are given, else a distance between maps or features of the vision network."""
    if lpips is not None:
        network = Lpips.load(lpips)
        return Perceptual("LPIPS (AlexNet)", fingerprint(lpips), lambda x: network.distances(x / 127.5 - 1))
    maps = vision.maps
    if maps is not None:
        name = f"equally weighted maps of {vision.name} (LPIPS-style, not LPIPS)"
        return Perceptual(
            name, vision.weights, lambda x: torch.stack([squared(unit(part)) for part in maps(x)]).mean(0)
        )
    name = f"1 - cosine of the features of {vision.name} (not LPIPS)"
    return Perceptual(name, vision.weights, lambda x: squared(unit(vision.features(x)[..., None, None])) / 2)


def unit(maps: Tensor) -> Tensor:
    """Scale maps (N, C, H, W) to length 1 over the channels, at every pixel."""
    return maps / (maps.square().sum(1, keepdim=True).sqrt() + _EPS)


def squared(maps: Tensor) -> Tensor:
    """Return |a - b|², summed over channels and averaged over pixels, for every pair of N maps: (N, N)."""
    # |a - b|² = |a|² + |b|² - 2 a·b needs one matrix product, and no tensor of shape (N, N, C, H, W).
    # In float64, on the CPU, since the terms nearly cancel for similar images.
    flat = maps.flatten(1).cpu().double()
    products = flat @ flat.T / (maps.shape[-1] * maps.shape[-2])
    norms = products.diagonal()
    distances = (norms[:, None] + norms[None] - 2 * products).clamp(min=0)
    return distances.fill_diagonal_(0)


# Name in the lpips package: (input channels, output channels, kernel, stride, padding).
_CONVOLUTIONS = {
    "net.slice1.0": (3, 64, 11, 4, 2),
    "net.slice2.3": (64, 192, 5, 1, 2),
    "net.slice3.6": (192, 384, 3, 1, 1),
    "net.slice4.8": (384, 256, 3, 1, 1),
    "net.slice5.10": (256, 256, 3, 1, 1),
}


class Lpips(nn.Module):
    """LPIPS 0.1 with AlexNet, for images from -1 to 1."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        shapes = _CONVOLUTIONS.values()
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, s, p) for a, b, k, s, p in shapes)
        self.heads = nn.ParameterList(torch.empty(1, outputs, 1, 1) for _, outputs, *_ in shapes)
        # Mean and std of ImageNet, which the lpips package has rounded for pixels from -1 to 1.
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1))

    @classmethod
    def load(cls, file: Path) -> "Lpips":
        """Read the state dict of the lpips package's network, as .safetensors or .pt."""
        stored, names = read_weights(file), dict[str, str]()
        for i, old in enumerate(_CONVOLUTIONS):
            names |= {f"{old}.{part}": f"convolutions.{i}.{part}" for part in ("weight", "bias")}
            names[f"lin{i}.model.1.weight"] = f"heads.{i}"
        network = cls()
        buffers = {"shift": network.shift, "scale": network.scale}
        state = {new: stored[old] for old, new in names.items() if old in stored} | buffers
        check_fit(state, network.state_dict(), f"LPIPS with AlexNet of {file}")
        network.load_state_dict(state)
        return network.to(device()).eval()

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the five feature maps of AlexNet."""
        x, kept = (x - self.shift) / self.scale, []
        for number, convolution in enumerate(self.convolutions):
            # AlexNet has max pooling before its second and third convolution.
            if number in (1, 2):
                x = functional.max_pool2d(x, 3, 2)
            x = functional.relu(convolution(x))
            kept.append(x)
        return kept

    def distances(self, x: Tensor) -> Tensor:
        """Return LPIPS of every pair of N images: (N, N)."""
        # LPIPS weights the squared difference of each channel; the root of the weight goes to both maps.
        with deterministic_inference():
            weighted = [unit(part) * head.sqrt() for part, head in zip(self.maps(x), self.heads, strict=True)]
            return torch.stack([squared(part) for part in weighted]).sum(0)
