"""Weights in eight bits: each row of a linear layer has its own scale, arithmetic stays in the network's precision."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.errors import AtollError, unknown

QUANTIZATIONS = ("int8",)
LEVELS = 127


class Int8Linear(nn.Module):
    """A linear layer whose weight is kept as whole numbers, weight = scale[row] · number, and expanded when used."""

    numbers: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / LEVELS
        self.register_buffer("numbers", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The weight, for whoever asks for its dtype or its values."""
        return self.numbers.to(self.scale.dtype) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """As nn.Linear."""
        return functional.linear(x, self.weight, self.bias)


def quantize(network: nn.Module, kind: str) -> nn.Module:
    """Replace every linear layer of a network, in place."""
    if kind not in QUANTIZATIONS:
        raise AtollError(unknown("quantization", kind, QUANTIZATIONS))
    for name, child in list(network.named_children()):
        if isinstance(child, nn.Linear):
            setattr(network, name, Int8Linear(child))
        else:
            quantize(child, kind)
    return network
