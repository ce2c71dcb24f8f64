"""Counters of the null GPU, with the line of src/atoll that caused each copy and each synchronization.

with watch() as seen:
    step()
seen.synchronizations  # {"train/loop.py:83": 1}

Import this before anything uses CUDA; it needs the environment that scripts/test_gpu.sh sets.
"""

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

COUNTERS = (
    "launch", "gemm", "h2d_pageable", "h2d_pinned", "d2h", "d2d", "stream_sync", "event_sync", "device_sync", "malloc",
    "malloc_bytes", "h2d_bytes", "memset", "side_copy", "side_launch", "event_record",
)  # fmt: skip
"""In the order of the enumeration in nullcuda.c."""
SYNCHRONIZATIONS = ("stream_sync", "event_sync", "device_sync")
ELSEWHERE = "elsewhere"
"""The place of what no line of src/atoll is on the stack of: threads of torch, or the test itself."""
COMMUNICATION = "communication"
"""The place of what DDP, FSDP2 and process groups do by themselves."""
_COMMUNICATION_FILES = ("/torch/distributed/", "/torch/nn/parallel/")

_library = ctypes.CDLL(str(Path(os.environ["NULLGPU"]) / "libnullcuda.so"))
_library.null_clock.restype = ctypes.c_ulonglong
_Hook = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_ulonglong)

# cuDNN is not replaced; without it torch takes its own kernels.
torch.backends.cuda.enable_cudnn_sdp(False)
torch.backends.cudnn.enabled = False


def counts() -> Counter[str]:
    """Return all counters since the process began."""
    values = (ctypes.c_ulonglong * 32)()
    _library.null_counts(values)
    return Counter(dict(zip(COUNTERS, values, strict=False)))


@dataclass
class Seen:
    """What happened while it was watched."""

    lines: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of copies and synchronizations by place and counter."""
    counts: Counter[str] = field(default_factory=Counter)
    time: int = 0
    """Simulated time until all devices were done. A kernel or a matrix product takes one unit on its stream."""

    def of(self, *kinds: str) -> dict[str, int]:
        """Return the number by line of src/atoll."""
        found: Counter[str] = Counter()
        for (place, kind), number in self.lines.items():
            if kind in kinds and place not in (ELSEWHERE, COMMUNICATION):
                found[place] += number
        return dict(found)

    @property
    def synchronizations(self) -> dict[str, int]:
        """Waits for the device, by line of src/atoll."""
        return self.of(*SYNCHRONIZATIONS)

    @property
    def pageable_copies(self) -> dict[str, int]:
        """Copies to the device out of memory that is not pinned, which block, by line of src/atoll."""
        return self.of("h2d_pageable")


_watching: list[Seen] = []


def _note(kind: int, _bytes: int) -> None:
    if _watching:
        place = _place(sys._getframe(1)) if sys._getframe(0).f_back else ELSEWHERE
        for seen in _watching:
            seen.lines[place, COUNTERS[kind]] += 1


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        _, found, file = name.partition("/src/atoll/")
        if found:
            return f"{file}:{frame.f_lineno}"
        if any(part in name for part in _COMMUNICATION_FILES):
            return COMMUNICATION
        frame = frame.f_back
    return ELSEWHERE


_hook = _Hook(_note)  # a reference must stay, or the library calls freed memory
_library.null_hook(_hook)


@contextmanager
def watch() -> Iterator[Seen]:
    """Count what happens inside, in all threads. The clock starts when all devices are done with what came before."""
    seen, before, start = Seen(), counts(), _library.null_clock()
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)
        seen.counts = counts() - before
        seen.time = _library.null_clock() - start


class HostComputed(TorchDispatchMode):
    """Computes the results of all operations on device tensors on the host, and copies them to the device.

    Device memory is host memory, and copies are real. So inside this mode values are real, if those of the inputs are.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and all(tensor.is_cuda for tensor in tensors) and not func._schema.is_mutable:
            host = func(*tree_map_only(Tensor, Tensor.cpu, args), **tree_map_only(Tensor, Tensor.cpu, kwargs or {}))
            for on_device, value in zip(tree_leaves(result), tree_leaves(host), strict=True):
                if isinstance(on_device, Tensor):
                    on_device.copy_(value)
        return result
