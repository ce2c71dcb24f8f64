"""Linear layers with int8 weights: experts in sampling, and the frozen base of adapters also in training."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.errors import AtollError, unknown

QUANTIZATIONS = ("int8",)
LEVELS = 127
"""Largest number: int8 has 127 levels on each side of 0, and -128 is not used, so that the grid is symmetric."""


class Int8Linear(nn.Linear):
    """A linear layer with an int8 weight: numbers (out, in) in -127 … 127 and one scale for each row (out, 1).

    The weight, scale · number, is expanded to the precision of the network when it is used, so quantization saves
    memory, not arithmetic. Only the input gets a gradient.
    """

    numbers: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # a linear layer would make a weight of its own
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        # A row of zeros would have scale 0 and divide by it.
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / LEVELS
        self.register_buffer("numbers", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The expanded weight. Networks read the dtype of a layer's weight to cast their inputs."""
        return self.numbers.to(self.scale.dtype) * self.scale

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer as nn.Linear does."""
        if torch.is_grad_enabled() and input.requires_grad:
            output: Tensor = _Product.apply(input, self.numbers, self.scale, self.bias)  # type: ignore[no-untyped-call]
            return output
        return functional.linear(input, self.weight, self.bias)


class _Product(torch.autograd.Function):
    """The product with an int8 weight, expanded again in the backward pass: autograd would keep the expanded one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(numbers, scale)
        ctx.dtype = x.dtype
        return functional.linear(x, numbers.to(scale.dtype) * scale, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        numbers, scale = ctx.saved_tensors
        weight = (numbers.to(scale.dtype) * scale).to(gradient.dtype)
        return (gradient @ weight).to(ctx.dtype), None, None, None


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
