"""Devices and precision. What needs a GPU is tested on the null GPU (tests/nullgpu)."""

import pytest
import torch

from atoll.core.device import (
    compute_dtype,
    constant,
    download,
    dtype_name,
    full_float32,
    parse_devices,
    upload,
)
from atoll.core.errors import AtollError

CPU = torch.device("cpu")


def test_names_of_devices() -> None:
    assert parse_devices("cpu") == parse_devices(["cpu", "cpu"]) == (CPU,)
    with pytest.raises(AtollError, match=r"'gpu1' is not a device; expected a name such as cpu, cuda:0 or xpu:1"):
        parse_devices("cpu,gpu1")
    with pytest.raises(AtollError, match=r"there is no device cuda:99: this machine has \d+ accelerators"):
        parse_devices("cuda:99")


def test_the_default_precision_depends_on_the_device_and_can_be_overridden() -> None:
    assert compute_dtype(CPU) == compute_dtype(CPU, "auto") == torch.float32
    assert compute_dtype(torch.device("xpu")) == compute_dtype(torch.device("mps")) == torch.bfloat16
    assert compute_dtype(torch.device("xpu"), "float32") == torch.float32
    assert compute_dtype(CPU, "bfloat16") == compute_dtype(CPU, torch.bfloat16) == torch.bfloat16
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(AtollError, match=r"unknown dtype 'float61'.*did you mean 'float16'"):
        compute_dtype(CPU, "float61")


def test_full_float32_disables_tf32_and_autocast_and_restores_them() -> None:
    settings = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [one.allow_tf32 for one in settings]
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    try:
        for one in settings:
            one.allow_tf32 = True
        with torch.autocast("cpu", torch.bfloat16):
            assert (a @ b).dtype == torch.bfloat16
            with full_float32():
                assert [one.allow_tf32 for one in settings] == [False, False]
                assert (a @ b).dtype == torch.float32
            assert (a @ b).dtype == torch.bfloat16
        with pytest.raises(KeyError), full_float32():
            raise KeyError
        assert [one.allow_tf32 for one in settings] == [True, True]
    finally:
        for one, value in zip(settings, before, strict=True):
            one.allow_tf32 = value


def test_constants_are_made_once_and_can_be_used_in_training() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with torch.inference_mode():
        first = constant((1.0, 2.0, 3.0), torch.zeros(1))
    assert constant((1.0, 2.0, 3.0), torch.ones(5)) is first
    assert constant((1.0, 2.0, 3.0), torch.ones(5, dtype=torch.float64)).dtype == torch.float64
    (x * first).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 2.0, 3.0]] * 2


def test_copies_on_the_cpu_copy_nothing() -> None:
    tensor = torch.randn(3)
    assert upload(tensor, CPU) is tensor
    assert all(copy is tensor for copy in download(tensor, tensor))
