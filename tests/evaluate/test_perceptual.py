"""Perceptual distances against their definition, pair by pair."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.encoders.lpips import Lpips, open_perceptual
from atoll.encoders.pretrained import Pixels
from atoll.encoders.vision import Vision


def images(count: int, side: int = 64) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random weights in the layout of the lpips package."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"slice1.0": (64, 3, 11), "slice2.3": (192, 64, 5), "slice3.6": (384, 192, 3), "slice4.8": (256, 384, 3)}
    shapes["slice5.10"] = (256, 256, 3)
    state: dict[str, Tensor] = {"scaling_layer.shift": torch.zeros(1, 3, 1, 1)}
    for number, (name, (outputs, inputs, kernel)) in enumerate(shapes.items()):
        state[f"net.{name}.weight"] = torch.randn(outputs, inputs, kernel, kernel, generator=generator) * 0.05
        state[f"net.{name}.bias"] = torch.randn(outputs, generator=generator) * 0.05
        state[f"lin{number}.model.1.weight"] = torch.rand(1, outputs, 1, 1, generator=generator)
    file = tmp_path_factory.mktemp("lpips") / "lpips.safetensors"
    save_file(state, file)
    return file


def test_lpips_equals_its_definition(weights: Path) -> None:
    network, two = Lpips.load(weights), images(2)
    x = torch.from_numpy(two).permute(0, 3, 1, 2).float() / 127.5 - 1
    expected = torch.zeros(())
    with torch.no_grad():
        for maps, head in zip(network.maps(x), network.heads, strict=True):
            length = maps.norm(dim=1, keepdim=True)
            a, b = maps / (length + 1e-10)
            expected = expected + (head[0] * (a - b).square()).sum(0).mean()
    vision = Vision("unused", "", "", lambda x: x)
    distances = open_perceptual(vision, weights)(two)
    assert distances[0, 1].item() == pytest.approx(expected.item(), rel=1e-4)
    assert distances[0, 1] == distances[1, 0]
    assert distances.diagonal().tolist() == [0, 0]


def test_unknown_lpips_weights_are_an_error(tmp_path: Path) -> None:
    save_file({"net.slice1.0.weight": torch.zeros(1)}, tmp_path / "wrong.safetensors")
    with pytest.raises(AtollError, match="do not fit LPIPS"):
        Lpips.load(tmp_path / "wrong.safetensors")


def test_without_lpips_weights_maps_or_features_are_compared_and_the_name_says_so() -> None:
    def maps(x: Tensor) -> list[Tensor]:
        return [x, x[:, :, ::2, ::2] + 1]

    three = images(3, 8)
    x = torch.from_numpy(three).permute(0, 3, 1, 2).double()
    by_maps = open_perceptual(Vision("net", "hash", "", lambda x: x.mean((2, 3)), maps))
    parts = [part / part.norm(dim=1, keepdim=True) for part in maps(x)]
    expected = sum((part[0] - part[1]).square().sum(0).mean() for part in parts) / 2
    assert by_maps(three)[0, 1].item() == pytest.approx(float(expected), rel=1e-6)
    assert by_maps.name == "equally weighted maps of net (LPIPS-style, not LPIPS)"
    by_features = open_perceptual(Vision("net", "hash", "", lambda x: x.mean((2, 3))))
    cosine = torch.nn.functional.cosine_similarity(x[:1].mean((2, 3)), x[1:2].mean((2, 3))).item()
    assert by_features(three)[0, 1].item() == pytest.approx(1 - cosine, rel=1e-4)
