"""The transformer blocks of a network: units of compilation, FSDP2 and activation checkpointing, and Muon's weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.device import ASYNCHRONOUS
from atoll.core.errors import AtollError, first_line
from atoll.core.networks import OwnConfig
from atoll.nets.adapters import DiffusersExpert
from atoll.nets.base import BaseExpert
from atoll.nets.dit import DiT
from atoll.nets.layers import CrossAttention, SelfAttention, SwiGlu

NEWTON_SCHULZ_STEPS = 5
"""Steps of the iteration that orthogonalizes a matrix, as published."""
FUSED = {(SelfAttention, "qkv"): 3, (CrossAttention, "key_value"): 2, (SwiGlu, "inner"): 2}
"""Number of matrices in the weights of these layers. All others hold one."""


def transformer_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer of Atoll or diffusers; none for a UNet."""
    inner = getattr(network, "model", network)
    for name in ("blocks", "transformer_blocks"):
        if isinstance(found := getattr(inner, name, None), nn.ModuleList):
            return list(found)
    return []


def set_checkpointing(network: nn.Module, enabled: bool) -> None:
    """Choose whether a network computes its activations again in the backward pass. A router cannot."""
    if isinstance(network, DiT):
        network.checkpointing = enabled
    elif isinstance(getattr(network, "config", None), OwnConfig) and enabled:
        raise AtollError("train.activation_checkpointing: not for a network of your own; checkpoint in its forward")
    elif isinstance(network, DiffusersExpert | BaseExpert) and enabled:
        inner: Any = network.base if isinstance(network, BaseExpert) else network.model
        try:
            inner.enable_gradient_checkpointing()
        except ValueError as error:
            raise AtollError(f"train.activation_checkpointing: {first_line(error)}") from error


def compile_blocks(network: nn.Module, *, dynamic: bool | None = None) -> None:
    """Compile a network in place, block by block; a network without blocks as a whole.

    All blocks of all experts of one size share one compiled graph, so a start takes seconds instead of minutes, and
    loading another expert compiles nothing. With `dynamic`, one graph serves all batch sizes.
    """
    for part in transformer_blocks(network) or [network]:
        part.compile(dynamic=dynamic)


def compiles_by_default(device: torch.device) -> bool:
    """Return whether `compile: auto` compiles networks on this device: on GPUs, for which torch needs Triton."""
    return device.type in ASYNCHRONOUS and find_spec("triton") is not None


@dataclass(frozen=True)
class HiddenMatrix:
    """A weight (count · rows, columns) that holds `count` matrices, one below the other."""

    weight: Tensor
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        return self.weight.shape[0] // self.count, self.weight.shape[1]

    @property
    def flops(self) -> int:
        """FLOPs of its Newton-Schulz steps: three products each, of the smaller side m and the larger side n."""
        m, n = sorted(self.shape)
        return self.count * NEWTON_SCHULZ_STEPS * (2 * m * m * n + 2 * m * m * m + 2 * m * m * n)


def hidden_matrices(network: nn.Module) -> Iterator[HiddenMatrix]:
    """Yield the weights that Muon trains; none for a network without transformer blocks (a UNet)."""
    for block in transformer_blocks(network):
        for name, layer in block.named_modules():
            owner, _, own_name = name.rpartition(".")
            # In blocks of diffusers, the modulation and its embedders are parts of the norms.
            excluded = any(part.startswith(("modulation", "norm")) for part in name.split("."))
            if isinstance(layer, nn.Linear) and not excluded:
                yield HiddenMatrix(layer.weight, FUSED.get((type(block.get_submodule(owner)), own_name), 1))
