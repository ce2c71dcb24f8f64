"""The FID Inception against the standard TorchScript network, which its weights come from."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from atoll.apps.evaluate.extractors import open_vision
from atoll.core.errors import AtollError
from atoll.encoders import inception


@pytest.fixture(scope="module")
def script() -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(inception.weights_file())).eval()


def test_features_equal_the_standard_network(script: torch.jit.ScriptModule) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    pixels[1, 16:48, 16:48] = 255
    vision = open_vision("inception")
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    # The common FID tools resize small images bilinearly, without aligned corners.
    large = torch.nn.functional.interpolate(x, (299, 299), mode="bilinear", align_corners=False)
    with torch.inference_mode():
        expected = script((large - 128) / 128)
    assert vision(pixels).allclose(expected, rtol=1e-4, atol=1e-4)
    assert vision.weights.startswith("7ff4a85c3a6378f0")
    assert vision.maps is not None
    assert [part.shape[1] for part in vision.maps(x)] == [64, 192, 288, 768, 2048]


def test_weights_in_the_torchvision_layout_load_by_name(tmp_path: Path) -> None:
    network = inception.FidInception()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    assert "Mixed_7c.branch3x3dbl_3b.bn.running_var" in state
    assert sum(name.endswith("conv.weight") for name in state) == len(inception.graph_names()) == 94
    save_file({**state, "fc.weight": torch.zeros(8, 2048)}, tmp_path / "inception.safetensors")
    loaded = inception.load(tmp_path / "inception.safetensors")
    x = torch.randn(1, 3, 299, 299)
    with torch.inference_mode():
        assert loaded(x).allclose(network.eval()(x), rtol=1e-4, atol=1e-5)


def test_unknown_or_missing_weights_are_an_error(tmp_path: Path) -> None:
    save_file({"conv.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(AtollError, match="do not fit the FID Inception"):
        inception.load(tmp_path / "other.safetensors")
    with pytest.raises(AtollError, match="no such file"):
        inception.load(tmp_path / "missing.pt")
