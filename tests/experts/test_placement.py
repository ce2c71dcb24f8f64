"""Placement of experts on several devices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.core.networks import DiTConfig
from atoll.experts.expert_cache import spread_experts

DEVICES = [torch.device("cuda", number) for number in range(8)]


def expert(size: int, images: int) -> Any:
    declaration = SimpleNamespace(network=DiTConfig())
    return SimpleNamespace(size=size, density=SimpleNamespace(images=float(images)), declaration=declaration)


@pytest.mark.parametrize("sizes", [[100] * 8, [100] * 32, [400, 200, 100, 50] * 8, list(range(50, 114))])
def test_bytes_of_the_devices_are_within_a_third_of_their_mean(sizes: list[int]) -> None:
    placed = spread_experts([expert(size, 1) for size in sizes], DEVICES)
    held = [sum(size for size, where in zip(sizes, placed, strict=True) if where == device) for device in DEVICES]
    assert sum(held) == sum(sizes)
    assert max(held) <= 1.3 * sum(held) / len(DEVICES)


def test_often_used_experts_of_one_size_do_not_share_a_device() -> None:
    images = [1000, 900, 800, 700, 600, 500, 400, 300, 8, 7, 6, 5, 4, 3, 2, 1]
    placed = spread_experts([expert(100, count) for count in images], DEVICES)
    assert len(set(placed[:8])) == 8
    used = [sum(count for count, where in zip(images, placed, strict=True) if where == device) for device in DEVICES]
    assert max(used) <= 1000 + 8


def test_one_device_holds_everything() -> None:
    assert set(spread_experts([expert(size, 1) for size in (1, 2, 3)], DEVICES[:1])) == {DEVICES[0]}
