"""The inputs of training steps: made on the CPU by reading threads, and copied to the device one batch ahead.

Latents, times, noise and dropout of an image are functions of (seed, position), so any thread can draw them. Drawn in
the reading threads, they cost the training thread no time while an accelerator waits for work. All of it is computed
on the CPU, so it does not depend on the accelerator.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll import flow
from atoll.core.device import ASYNCHRONOUS
from atoll.nets import Condition


@dataclass(frozen=True)
class TrainingInputs:
    """One micro-batch, ready for the network."""

    index: Tensor
    """Numbers of the images (B,), for error messages. They stay on the CPU."""
    position: int
    """Position of the first image in the training stream."""
    noised: flow.Noised
    condition: Condition
    cluster: Tensor
    """Cluster of each image (B,), the target of a router."""
    patches: Tensor | None = None
    """Patch features (B, grid, grid, D) to align with; None without alignment."""

    def pin(self) -> "TrainingInputs":
        """Return a copy in pinned host memory, from which the device reads by itself."""
        return self._map(lambda part: part.pin_memory())

    def to(self, device: torch.device) -> "TrainingInputs":
        """Return the inputs on a device. From pinned memory the copy is asynchronous."""
        return self._map(lambda part: part.to(device, non_blocking=True))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` has used it."""
        self._map(lambda part: part.record_stream(stream) or part)  # type: ignore[func-returns-value]

    def _map(self, function: Callable[[Tensor], Tensor]) -> "TrainingInputs":
        noised = flow.Noised(*(function(part) for part in self.noised))
        patches = None if self.patches is None else function(self.patches)
        condition, cluster = self.condition.map(function), function(self.cluster)
        return TrainingInputs(self.index, self.position, noised, condition, cluster, patches)


def copy_ahead(stream: Iterator[TrainingInputs], device: torch.device) -> Iterator[TrainingInputs]:
    """Yield inputs on the device. While a step runs, the inputs of the next one are copied on a side stream."""
    if device.type not in ASYNCHRONOUS:
        yield from (inputs.to(device) for inputs in stream)
        return
    side, main = torch.Stream(device=device), torch.accelerator.current_stream(device)

    def start_copy() -> TrainingInputs:
        inputs = next(stream)
        with side:
            return inputs.to(device)

    ahead = start_copy()
    while True:
        ready = ahead
        main.wait_stream(side)  # on the device: the host does not wait
        ready.record_stream(main)
        ahead = start_copy()
        yield ready
