"""The transformer blocks of a network: the units of compilation, of FSDP2 and of activation checkpointing."""

from importlib.util import find_spec

import torch
from torch import nn

from atoll.core.device import ASYNCHRONOUS
from atoll.nets.adapters import DiffusersExpert
from atoll.nets.dit import DiT


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
    elif isinstance(network, DiffusersExpert) and enabled:
        network.model.enable_gradient_checkpointing()


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
