"""Wrong tensors at public functions raise errors that name the tensor and the expected shape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll.core.networks import DiffusersConfig
from atoll.data.density import Density
from atoll.nets import Condition, DiT, DiTConfig, Router, RouterConfig
from atoll.nets.io import build

SMALL = {"width": 32, "depth": 1, "heads": 2, "size": 8, "channels": 3}


def expert() -> DiT:
    return DiT(DiTConfig(**SMALL, out_channels=3, text_width=12, num_classes=5, pooled_width=6)).eval()


def router() -> Router:
    return Router(RouterConfig(**SMALL, experts=4, num_classes=5, pooled_width=6)).eval()


def unet() -> torch.nn.Module:
    return build(
        DiffusersConfig("UNetExpert", {
            "sample_size": 8, "in_channels": 3, "out_channels": 3,
            "block_out_channels": [8], "layers_per_block": 1, "norm_num_groups": 2, "num_class_embeds": 6,
            "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"],
        })
    ).eval()  # fmt: skip


@pytest.mark.parametrize("make", [expert, router])
@pytest.mark.parametrize(
    ("shape", "times", "message"),
    [
        ((2, 4, 8, 8), (2,), r"shape \(2, 4, 8, 8\), expected \(batch, 3, height, width\)"),
        ((3, 8, 8), (1,), r"shape \(3, 8, 8\), expected \(batch, 3, height, width\)"),
        ((2, 3, 7, 8), (2,), "multiples of the patch, 2"),
        ((2, 3, 8, 8), (3,), r"timesteps of shape \(3,\), expected \(2,\) or one timestep"),
    ],
)
def test_images_and_timesteps_of_a_wrong_shape_are_errors(
    make: Callable[[], torch.nn.Module], shape: tuple[int, ...], times: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()(torch.zeros(shape), torch.zeros(times))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"text": torch.zeros(2, 12)}, r"text must be floating point of shape \(batch, length, width\)"),
        ({"text": torch.zeros(2, 3, 12, dtype=torch.int64)}, "text must be floating point .*got torch.int64"),
        (
            {"text": torch.zeros(2, 3, 12), "text_mask": torch.ones(2, 3, dtype=torch.int64)},
            r"text_mask must be bool .*got torch.int64 of shape \(2, 3\); convert it with .bool\(\)",
        ),
        (
            {"text": torch.zeros(2, 3, 12), "text_mask": torch.ones(2, 4, dtype=torch.bool)},
            r"text_mask has shape \(2, 4\), expected \(2, 3\)",
        ),
        ({"label": torch.zeros(2)}, r"label must be integers of shape \(batch,\), got torch.float32"),
        ({"label": torch.zeros(2, 1, dtype=torch.int64)}, "label must be integers"),
        ({"pooled": torch.zeros(6)}, "pooled must be floating point"),
        ({"pooled": torch.zeros(2, 6), "label": torch.zeros(3, dtype=torch.int64)}, "the same batch size, got .*3"),
        ({"dropped": torch.zeros(2)}, "dropped must be bool"),
    ],
)
def test_conditioning_of_a_wrong_shape_or_dtype_is_an_error(parts: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Condition(**parts)


@pytest.mark.parametrize("make", [expert, router, unet])
@pytest.mark.parametrize("dropped", [None, torch.tensor([False, True])])
def test_labels_out_of_range_are_errors(make: Callable[[], torch.nn.Module], dropped: torch.Tensor | None) -> None:
    network, x, timestep = make(), torch.zeros(2, 3, 8, 8), torch.zeros(2)

    def predict(*label: int) -> torch.Tensor:
        output: torch.Tensor = network(x, timestep, Condition(label=torch.tensor(label), dropped=dropped))
        return output

    assert predict(-1, 0).shape == predict(5, 4).shape
    with pytest.raises(
        ValueError, match="label 6 is out of range: there are 5 classes, 0 to 4, and 5 or -1 for the null"
    ):
        predict(6, 0)


@pytest.mark.parametrize("make", [expert, router])
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"pooled": torch.zeros(2, 7)}, "pooled has width 7, expected 6"),
        ({"label": torch.zeros(3, dtype=torch.int64)}, "the condition has 3 rows for a batch of 2 images"),
    ],
)
def test_conditioning_of_another_batch_size_or_encoder_is_an_error(
    make: Callable[[], torch.nn.Module], parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()(torch.zeros(2, 3, 8, 8), torch.zeros(2), Condition(**parts))


def test_text_of_another_width_is_an_error() -> None:
    with pytest.raises(ValueError, match="text has width 11, expected 12"):
        expert()(torch.zeros(2, 3, 8, 8), torch.zeros(2), Condition(text=torch.zeros(2, 3, 11)))


def density() -> Density:
    x = torch.randn(20, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    return Density.fit(x)


@pytest.mark.parametrize(("shape", "times"), [((2, 4, 2, 2), (2,)), ((2, 3, 2, 2), (3,)), ((12,), (1,))])
def test_states_of_another_shape_than_the_density_are_errors(shape: tuple[int, ...], times: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the density is of 12 values"):
        density().log_density(torch.zeros(shape), torch.full(times, 0.5))
