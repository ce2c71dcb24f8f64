"""Devices, and the precision of computations on them. Only this module and `distributed` of core import torch.

The precision policy:

    training, sampling, encoders, teachers    bfloat16 on accelerators that compute in it, else float32
    validation, calibration, admission        float32 without TF32 everywhere (`full_float32`), so that a metric does
                                              not depend on the device by more than rounding
    remaining float32 matrix products         TF32 on NVIDIA GPUs
    float64                                   on the CPU only; Apple's MPS has none

`--dtype` and `train.precision` override the first line. What was used is recorded in manifests and protocols.

Host and accelerator work asynchronously: the host queues kernels, and waits only when it reads a result. So everything
that the host decides must be read in one go (`download`), and everything that it sends must come from pinned memory
(`upload`), because a copy from ordinary memory waits until the device has taken it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from atoll.core.errors import AtollError, unknown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ASYNCHRONOUS = ("cuda", "xpu")
"""Kinds of devices with streams and pinned host memory. Copies to others (MPS) are made when they are needed. ROCm's
devices are called cuda too."""
_BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA GPUs multiply in bfloat16 (Ampere); older ones emulate it slowly."""


def device() -> torch.device:
    """Return the accelerator if this machine has a usable one, else the processor."""
    # Without the check, a CUDA build of torch returns CUDA even on machines without a GPU or its driver.
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    _enable_tf32()
    # With its index: the current device is per thread, so "cuda" alone could mean another GPU in another thread.
    return torch.device(kind.type, torch.accelerator.current_device_index())


def parse_devices(names: str | Sequence[str] | None) -> tuple[torch.device, ...]:
    """Return the devices of `--devices cuda:0,cuda:1`; None means all visible ones of the accelerator, or the CPU."""
    if names is None:
        kind = device().type
        count = 1 if kind in ("cpu", "mps") else torch.accelerator.device_count()
        return (torch.device(kind),) if kind == "cpu" else tuple(torch.device(kind, index) for index in range(count))
    parts = names.split(",") if isinstance(names, str) else list(names)
    return tuple(dict.fromkeys(_parse_device(part.strip()) for part in parts))


def _parse_device(name: str) -> torch.device:
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise AtollError(f"{name!r} is not a device; expected a name such as cpu, cuda:0 or xpu:1") from error
    if found.type in ("cpu", "meta"):
        return found
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type != found.type or (found.index or 0) >= torch.accelerator.device_count():
        count = 0 if kind is None else torch.accelerator.device_count()
        raise AtollError(
            f"there is no device {name}: this machine has {count} accelerators{f' ({kind})' if kind else ''}"
        )
    _enable_tf32()
    return torch.device(found.type, found.index or 0)


def _enable_tf32() -> None:
    # The older one of two interfaces: libraries read it, and torch raises an error if both are used in one process.
    torch.backends.cuda.matmul.allow_tf32 = True


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute matrix products and convolutions in float32, without autocast and TF32; also usable as a decorator."""
    accelerator = torch.accelerator.current_accelerator()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast(getattr(accelerator, "type", "cpu"), enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def compute_dtype(device: torch.device, requested: str | torch.dtype | None = None) -> torch.dtype:
    """Return the requested precision; `auto` or None is bfloat16 on accelerators that compute in it, else float32."""
    if isinstance(requested, torch.dtype):
        return requested
    if requested not in (None, "auto"):
        if requested not in DTYPES:
            raise AtollError(unknown("dtype", str(requested), ("auto", *DTYPES)))
        return DTYPES[requested]
    if device.type == "cpu":
        return torch.float32
    old = device.type == "cuda" and not torch.version.hip and _capability(device) < _BFLOAT16_CAPABILITY
    return torch.float32 if old else torch.bfloat16


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a precision, as options and manifests have it."""
    return str(dtype).removeprefix("torch.")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device without waiting for the device; one on a device is only moved."""
    if device.type in ASYNCHRONOUS and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def constant(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return a vector of fixed values, such as channel means, in the dtype and on the device of a tensor."""
    return _constant(values, like.dtype, like.device)


# Copied to a device once, because every copy from the host would make it wait. Each expert has a few such vectors.
@lru_cache(maxsize=1024)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # otherwise a vector that sampling made could not be used in training
        return torch.tensor(values, dtype=dtype).to(device)


class Download:
    """Tensors of one or more devices on their way to the CPU.

    The copies are queued at once, so they come before work that is queued later. CPU tensors are returned as is.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._events: dict[torch.device, torch.Event] = {}
        self._copies: list[Tensor] = []
        for tensor in tensors:
            if tensor.device.type in ASYNCHRONOUS:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._copies.append(host.copy_(tensor, non_blocking=True))
                self._events[tensor.device] = torch.Event(tensor.device)
            else:
                self._copies.append(tensor.cpu())
        for device, event in self._events.items():
            event.record(torch.accelerator.current_stream(device))

    def wait(self) -> tuple[Tensor, ...]:
        """Wait once for all copies, in any thread, and return them."""
        for event in self._events.values():
            event.synchronize()
        return tuple(self._copies)


def download(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy tensors of one or more devices to the CPU, and wait once for all of them; CPU tensors are returned as is."""
    return Download(*tensors).wait()
