"""Estimate the memory that sampling needs, before it starts. `atoll.train.estimate` does so for training.

Weights are counted from the networks' configurations. The activations of one evaluation follow from a formula of rows,
tokens and width, times a measured constant for the memory allocator on the CPU.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from atoll.core.device import compute_dtype
from atoll.core.networks import OwnConfig
from atoll.core.sizes import Size
from atoll.encoders.autoencoder import Codec
from atoll.encoders.base_pipeline import BasePipeline
from atoll.ensemble.sampler import Sampler
from atoll.experts.expert_cache import weight_bytes
from atoll.nets import DiT, build
from atoll.nets.base import BaseExpert

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
        rows = [f"  {name:<44} {size / 1e6:10.1f} MB" for name, size in self.parts.items()]
        return [head, *rows, f"  {'total':<44} {self.total / 1e6:10.1f} MB"]


def plan_memory(
    sampler: Sampler,
    batch_size: int,
    distinct: int | None = None,
    guided: bool = True,
    *,
    size: Size | None = None,
    weak: bool = False,
) -> Plan:
    """Estimate the memory of sampling batches, with or without guidance.

    A batch has `distinct` prompts, by default one for each image. `size` is the size of the images in pixels, by
    default the largest size of the model. With `weak`, each expert has a weak network for autoguidance.
    """
    ensemble, encoders, distinct = sampler.ensemble, sampler.encoders, distinct or batch_size
    size = sampler.latent_size(size) if size else max(ensemble.sizes, key=lambda size: size.area)
    shape = (ensemble.shape[0], size.height, size.width)
    references, quantize = ensemble.references, ensemble.device_options.quantize
    limit = min(ensemble.cache.limit, len(references) * (1 + weak))
    itemsize = ensemble.device_options.dtype.itemsize
    with torch.device("meta"):  # without memory for the weights
        networks = [build(reference.declaration.network) for reference in references]
    # The experts of each device; weak networks would follow them. Networks are built in float32 (4 bytes); quantized
    # linear weights have 1 byte each.
    placed: dict[torch.device, list[int]] = {}
    for device, expert in zip(ensemble.cache.devices, networks, strict=False):
        linear = sum(part.weight.numel() for part in expert.modules() if isinstance(part, nn.Linear))
        saved = linear * (itemsize - 1) if quantize else 0
        placed.setdefault(device, []).extend([weight_bytes(expert) * itemsize // 4 - saved] * (1 + weak))
    parts: dict[str, float] = {
        f"experts on {device}" if len(placed) > 1 else "experts": sum(sorted(sizes, reverse=True)[:limit])
        for device, sizes in placed.items()
    }
    # Every guided image has a second row, with the null condition or of a weak network.
    rows = batch_size * (2 if guided and (weak or ensemble.conditioning) else 1)
    largest = max(range(len(references)), key=lambda number: references[number].size)
    network, declared = networks[largest], references[largest].declaration
    if isinstance(network, DiT) and declared.text is not None and "text" in declared.conditioning:
        # A DiT keeps keys and values between steps: of the distinct conditions with the null condition, and a copy
        # gathered for the rows of a batch.
        tokens = (distinct + 1 + rows) * declared.text.max_tokens
        parts["prepared conditions"] = limit * 2 * network.config.depth * network.config.width * tokens * itemsize
    heap = HEAP if ensemble.device.type == "cpu" else 1
    parts["one evaluation of an expert"] = heap * activation_bytes(network, shape, rows=rows, itemsize=itemsize)
    parts["latents"] = LATENT_COPIES * rows * 4 * math.prod(shape)
    if ensemble.router is not None:
        parts["router"] = weight_bytes(ensemble.router.network)
    if itemsize != 4 or quantize:
        parts["weights file during conversion"] = max(reference.size for reference in references)
    codec = encoders.autoencoder()
    if isinstance(codec, BasePipeline):
        base_itemsize = compute_dtype(ensemble.device).itemsize
        bases = (own.frozen_bytes(base_itemsize) for own in networks if isinstance(own, BaseExpert))
        parts["base network"] = max(bases, default=0)
        modules = [part for part in codec.pipe.components.values() if isinstance(part, nn.Module)]
        # One of them is on the device at a time.
        parts["largest encoder"] = max(map(weight_bytes, modules))
    else:
        if ensemble.conditioning & {"text", "pooled"}:
            parts["text encoder"] = weight_bytes(encoders.text_encoder().network)
        if isinstance(codec, Codec):
            parts["autoencoder"] = weight_bytes(codec.network)
    sizes = {name: int(size) for name, size in parts.items() if size}
    return Plan(len(references), min(limit, len(references)), batch_size, sizes)


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
    elif isinstance(named := network.config, OwnConfig):
        # The widest layer at every patch: more than most networks have.
        outputs = [part.weight.shape[0] for part in network.modules() if isinstance(part, nn.Linear | nn.Conv2d)]
        patch, width = named.patch, max(outputs, default=1)
    elif isinstance(network, BaseExpert):
        # Most linear layers of a transformer take the residual stream.
        widths = [layer.in_features for layer in network.base.modules() if isinstance(layer, nn.Linear)]
        patch, width = network.config.patch, statistics.mode(widths)
    else:
        model: Any = network.model
        own = model.config
        convolutional = "block_out_channels" in own
        patch = 1 if convolutional else own.patch_size
        width = own.block_out_channels[0] if convolutional else own.num_attention_heads * own.attention_head_dim
    return int((shape[-2] // patch) * (shape[-1] // patch) * width)
