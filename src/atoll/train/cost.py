"""The cost of training: FLOPs and memory of a network, counted by a forward pass on the meta device.

Tensors on the meta device have shapes but no values, so the pass costs neither memory nor arithmetic. A FLOP counter
sums the matrix products, and a saved-tensors hook sees every activation that autograd keeps for the backward pass.
"""

import json
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from atoll.core.errors import AtollError, first_line
from atoll.core.networks import DiffusersConfig, NetworkConfig, RouterConfig, read_network
from atoll.nets import Condition, build
from atoll.nets.blocks import transformer_blocks
from atoll.train.data_shapes import DataShapes

BACKWARD = 2
"""The backward pass costs twice the forward pass: one matrix product for the inputs, one for the weights."""


@dataclass(frozen=True)
class Cost:
    """The cost of one network for one image."""

    parameters: int
    forward_flops: int
    activation_bytes: int
    checkpointed_bytes: int
    """Activations with checkpointing: the inputs of all blocks, and the activations of one block."""

    def training_flops(self, checkpointing: bool = False) -> int:
        """Return the FLOPs of training on one image: forward, backward and, with checkpointing, another forward."""
        return self.forward_flops * (1 + BACKWARD + checkpointing)


def image_cost(config: NetworkConfig, shapes: DataShapes) -> Cost:
    """Count the cost of a network for one image of these shapes."""
    text = shapes.text and shapes.text[:2]
    return _count(json.dumps(config.to_dict(), sort_keys=True), shapes.latents, text)


def parameter_count(config: NetworkConfig) -> int:
    """Count the parameters of a network without building it in memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


@cache
def _count(described: str, shape: tuple[int, ...], text: tuple[int, int] | None) -> Cost:
    config = read_network(json.loads(described))
    with torch.device("meta"):
        network = build(config)
        x, at = torch.zeros(1, *shape), torch.zeros(1)
        condition = _condition(config, text)
    saved: dict[int, int] = {}
    entering: dict[int, int] = {}
    blocks = transformer_blocks(network)
    for block in blocks:
        block.register_forward_pre_hook(
            lambda _, inputs, named: _note(entering, (*inputs, *named.values())), with_kwargs=True
        )
    # Saved weights are no activations. Views share a storage, which is counted once.
    weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            _note(saved, (tensor,))
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        try:
            network(x, at, condition)
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            raise AtollError(f"a {config.class_name} does not take latents of shape {shape}: {reason}") from error
    parameters = sum(parameter.numel() for parameter in network.parameters())
    activations = sum(saved.values())
    checkpointed = sum(entering.values()) + activations // len(blocks) if blocks else activations
    return Cost(parameters, counter.get_total_flops(), activations, checkpointed)


def _note(sizes: dict[int, int], values: tuple[Any, ...]) -> None:
    """Record the bytes of the tensors among some values, by storage."""
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()


def _condition(config: NetworkConfig, text: tuple[int, int] | None) -> Condition:
    """Return a condition of the right shapes for a network."""
    takes_text = not isinstance(config, RouterConfig) and config.text_width
    classes = 0 if isinstance(config, DiffusersConfig) else config.num_classes
    return Condition(
        text=torch.zeros(1, *text) if text and takes_text else None,
        pooled=torch.zeros(1, config.pooled_width) if config.pooled_width else None,
        label=torch.zeros(1, dtype=torch.long) if classes else None,
    )


def training_bytes(
    cost: Cost, batch_size: int, emas: int, *, half: bool, checkpointing: bool = False, parts: int = 1
) -> int:
    """Estimate the memory of one process with micro-batches of `batch_size`; FSDP2 divides the weights into `parts`.

    Weights, gradients, two Adam moments and the EMAs are in float32; `half` halves the activations.
    """
    activations = cost.checkpointed_bytes if checkpointing else cost.activation_bytes
    return 4 * cost.parameters * (4 + emas) // parts + activations * batch_size // (2 if half else 1)


def measured_rate(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Measure the FLOPs per second of a matrix product on this device, an upper bound for networks."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # The best of five: other processes can only slow a measurement down. Reading one value waits for the device.
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        float((a @ b)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
