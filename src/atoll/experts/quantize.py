"""Weights in eight bits: one scale for each output row of a linear layer.

A weight (out, in) is stored as int8 numbers in -127 … 127 with a scale (out, 1), weight = scale · number. The weight is
expanded to the network's precision when it is used, so quantization saves memory, not arithmetic.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.errors import AtollError, unknown

QUANTIZATIONS = ("int8",)
LEVELS = 127
"""Largest number: int8 has 127 levels on each side of 0, and -128 is not used, so that the grid is symmetric."""


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight, expanded when it is used."""

    numbers: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        # A row of zeros would have scale 0 and divide by it.
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / LEVELS
        self.register_buffer("numbers", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The expanded weight. Networks read the dtype of a layer's weight to cast their inputs."""
        return self.numbers.to(self.scale.dtype) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer as nn.Linear does."""
        return functional.linear(x, self.weight, self.bias)


def quantize(network: nn.Module, kind: str) -> nn.Module:
    """Replace every linear layer of a network in place."""
    if kind not in QUANTIZATIONS:
        raise AtollError(unknown("quantization", kind, QUANTIZATIONS))
    for name, child in list(network.named_children()):
        if isinstance(child, nn.Linear):
            setattr(network, name, Int8Linear(child))
        else:
            quantize(child, kind)
    return network
