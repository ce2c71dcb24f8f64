"""Metrics create no float64 tensor on an accelerator: Apple's MPS has none, and on others it is slow."""

import os
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import numpy as np
import torch
from test_training import resolve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nullgpu  # noqa: F401 - before anything uses CUDA
from atoll.apps.evaluate.diagnostics import mean_angle
from atoll.core.device import device
from atoll.core.distributed import ALONE
from atoll.encoders.lpips import Perceptual, squared, unit
from atoll.experts.validation import Summary, validate
from atoll.nets import Router
from atoll.train.job import build_task
from atoll.train.tasks import ExpertTask, RouterTask

pytestmark = pytest.mark.slow


class NoFloat64(TorchDispatchMode):
    """Fails on an operation with a float64 result that is not on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.on_device = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                self.on_device += 1
                if leaf.dtype == torch.float64:  # an assert would print the tensor, which takes the null GPU minutes
                    raise TypeError(f"{func} makes float64 on {leaf.device}")
        return result


@pytest.fixture
def mode() -> NoFloat64:
    return NoFloat64()


def test_the_mode_finds_float64_on_the_device(mode: NoFloat64) -> None:
    values = torch.zeros(3).to(device())
    with mode, pytest.raises(TypeError, match="makes float64 on cuda"):
        values.double()


def test_means_over_time(mode: NoFloat64) -> None:
    values, t = torch.zeros(8), torch.tensor([0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.95, 0.95])
    with mode:
        found = Summary.of(values.to(device()), t.to(device()))
    assert mode.on_device
    assert found.mean == 0
    assert found.by_time == (0, 0, 0, 0, 0, 0, None, None, None, 0)


def test_calibration_and_validation_of_an_expert(own_run: Path, mode: NoFloat64) -> None:
    task = build_task(resolve(own_run, "expert", experts__default="ddpm"))
    assert isinstance(task, ExpertTask)
    task.network.to(device()).eval()
    with mode:
        expert = task.expert()
        validate(expert.velocity, task.validation, seed=0, conditioning=expert.conditioning, device=device())
    assert mode.on_device > 100


def test_calibration_of_a_router(own_run: Path, mode: NoFloat64) -> None:
    task = build_task(resolve(own_run, "router"))
    assert isinstance(task, RouterTask)
    router = task.network.to(device()).eval()
    assert isinstance(router, Router)
    with mode, torch.no_grad():
        logits, _, _ = task._validation_logits(router, ALONE)
    assert mode.on_device > 100
    assert logits.device.type == "cpu"


def test_angles_and_perceptual_distances(mode: NoFloat64) -> None:
    generator = torch.Generator().manual_seed(0)
    velocities, maps = torch.randn(4, 3, 2, 8, generator=generator), torch.randn(4, 3, 8, 8, generator=generator)
    angles, distances = mean_angle(velocities), squared(maps)
    with mode:
        assert torch.equal(mean_angle(velocities.to(device())), angles)
        assert torch.equal(squared(maps.to(device())), distances)
        pixels = np.zeros((2, 16, 16, 3), dtype=np.uint8)
        found = Perceptual("maps", "", lambda x: squared(unit(x)))(pixels)
    assert mode.on_device
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")
