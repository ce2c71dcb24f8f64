"""Estimate the memory that sampling needs, before it starts. `atoll.train.memory` does so for training.

Weights are counted from the networks' configurations. The activations of one evaluation follow from a formula of rows,
tokens and width, times a measured constant for the memory allocator on the CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from atoll.core.sizes import Size
from atoll.encoders.encoders import Encoders
from atoll.ensemble.ensemble import Ensemble
from atoll.experts.expert import Declaration, DeviceOptions, ExpertReference
from atoll.experts.expert_cache import weight_bytes
from atoll.nets import DiT, build

MEGABYTE = 1e6
HEAP = 1.8
"""Peak memory of a process, relative to its live activations: freed tensors leave holes in the heap of the C library.

Measured as the highest VmHWM of a process in three forward passes, minus its VmRSS before them, over the result of
`activation_bytes`, on Linux with glibc: DiTs of width 256 to 1152, 16 to 256 tokens, 8 to 128 rows. The median of ten
sizes is 1.8 in float32 (1.5 to 2.4) and in bfloat16 (1.3 to 3.4, the largest for a peak of 10 MB), that of twelve
diffusers networks 1.9 (1.3 to 2.4). It is not applied to accelerators, whose allocators were not measured.
"""
DIFFUSERS = 13
"""Number of live tensors of the size of the residual stream at the peak of a diffusers network.

Counted once by following every tensor through a forward pass, with the default MLP ratio of 4: 12.0 to 12.4 for PixArt
and DiT, 13.2 to 13.7 for SD3, 13 to 14 for UNets of two to four levels, relative to their first level.
"""
LATENT_COPIES = 6
"""Float32 tensors of the size of the states that a step holds besides the network: state, velocities of the experts and
their weighted sum, guidance, next state. An estimate; it is small beside the activations."""


@dataclass(frozen=True)
class Plan:
    """Bytes of every part at the peak, beyond those of the process before anything is loaded."""

    experts: int
    max_loaded_experts: int
    batch_size: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, int | dict[str, int]]:
        """Return plain values for JSON."""
        return {**asdict(self), "total": self.total}

    def lines(self) -> list[str]:
        """Return the lines of a printed table."""
        head = (
            f"memory plan: {self.max_loaded_experts} of {self.experts} experts in memory, batch size {self.batch_size}"
        )
        rows = [f"  {name:<44} {size / MEGABYTE:10.1f} MB" for name, size in self.parts.items()]
        return [head, *rows, f"  {'total':<44} {self.total / MEGABYTE:10.1f} MB"]


def plan(
    ensemble: Ensemble, encoders: Encoders, *, batch_size: int, distinct: int, guided: bool, size: Size | None = None
) -> Plan:
    """Estimate the memory of batches with `distinct` conditions, with or without guidance.

    `size` is that of the latents; None is the largest size of the experts.
    """
    size = size or max(ensemble.sizes, key=lambda size: size.area)
    shape = (ensemble.shape[0], size.height, size.width)
    device_options, references = ensemble.device_options, ensemble.references
    sizes = [expert_bytes(reference, device_options) for reference in references]
    limit = min(ensemble.cache.limit, len(references))
    # Every guided image has a second row with the null condition.
    rows = batch_size * (2 if guided and ensemble.conditioning else 1)
    largest = max(references, key=lambda reference: reference.size)
    network, itemsize = _outline(largest), device_options.dtype.itemsize
    # The distinct conditions with the null condition, and a copy gathered for the rows of a batch.
    conditions = condition_bytes(network, largest.declaration, rows=distinct + 1 + rows, itemsize=itemsize)
    working = activation_bytes(network, shape, rows=rows, itemsize=itemsize)
    parts = {
        **_experts_by_device(ensemble, sizes, limit),
        "prepared conditions": limit * conditions,
        "one evaluation of an expert": HEAP * working if device_options.device.type == "cpu" else working,
        "latents": LATENT_COPIES * rows * 4 * math.prod(shape),
    }
    if ensemble.router is not None:
        parts["router"] = weight_bytes(ensemble.router.network)
    if device_options.dtype != torch.float32 or device_options.quantize:
        parts["weights file during conversion"] = max(reference.size for reference in references)
    if ensemble.conditioning & {"text", "pooled"}:
        parts["text encoder"] = weight_bytes(encoders.text_encoder().network)
    codec = encoders.autoencoder()
    if hasattr(codec, "network"):
        parts["autoencoder"] = weight_bytes(codec.network)
    return Plan(len(references), limit, batch_size, {name: int(size) for name, size in parts.items() if size})


def _experts_by_device(ensemble: Ensemble, sizes: Sequence[int], limit: int) -> dict[str, int]:
    """Return the bytes of the largest `limit` experts of each device."""
    placed: dict[torch.device, list[int]] = {}
    for device, size in zip(ensemble.cache.devices, sizes, strict=True):
        placed.setdefault(device, []).append(size)
    held = {device: sum(sorted(here, reverse=True)[:limit]) for device, here in placed.items()}
    return (
        {f"experts on {device}": size for device, size in held.items()}
        if len(held) > 1
        else {"experts": sum(held.values())}
    )


def expert_bytes(reference: ExpertReference, device_options: DeviceOptions) -> int:
    """Return the bytes of an expert's weights in memory, in the chosen precision and quantization."""
    network, width = _outline(reference), device_options.dtype.itemsize
    # Networks are built in float32 (4 bytes); quantized linear weights have 1 byte each.
    linear = sum(part.weight.numel() for part in network.modules() if isinstance(part, nn.Linear))
    saved = linear * (width - 1) if device_options.quantize else 0
    return weight_bytes(network) * width // 4 - saved


def _outline(reference: ExpertReference) -> nn.Module:
    """Build the network of an expert on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return build(reference.declaration.network)


def activation_bytes(network: nn.Module, shape: Sequence[int], *, rows: int, itemsize: int) -> int:
    """Return the bytes of live activations at the peak of one forward pass without gradients.

    The unit is the residual stream, a tensor of rows x tokens x width. A DiT has its peak in the MLP of a block, after
    the GELU: input of the block, residual stream, its norm, hidden layer before and after the GELU. With an MLP ratio
    below 2 the peak is in the attention: input of the block, its norm, queries, keys, values, output, and its copy.
    """
    tensors = max(7.0, 3 + 2 * network.config.mlp_ratio) if isinstance(network, DiT) else DIFFUSERS
    return int(rows * stream_size(network, shape) * tensors * itemsize)


def stream_size(network: nn.Module, shape: Sequence[int]) -> int:
    """Return the elements of the residual stream of one image: tokens x width; of the first level for a UNet."""
    if isinstance(network, DiT):
        patch, width = network.config.patch, network.config.width
    else:
        model: Any = network.model
        own = model.config
        convolutional = "block_out_channels" in own
        patch = 1 if convolutional else own.patch_size
        width = own.block_out_channels[0] if convolutional else own.num_attention_heads * own.attention_head_dim
    return int((shape[-2] // patch) * (shape[-1] // patch) * width)


def condition_bytes(network: nn.Module, declaration: Declaration, *, rows: int, itemsize: int) -> int:
    """Return the bytes of the prepared keys and values of `rows` texts, which a DiT keeps between steps."""
    if not isinstance(network, DiT) or declaration.text is None or "text" not in declaration.conditioning:
        return 0
    config = network.config
    return 2 * config.depth * config.width * rows * declaration.text.max_tokens * itemsize
