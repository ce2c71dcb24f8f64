"""The memory of training, estimated before anything is trained.

    state         weights, moments of the optimizer and EMAs, in float32
    gradients     in float32; released after every step, or kept between micro-batches and by DDP
    activations   what the backward pass needs: outputs of all linear and convolutional layers, times a measured number

A step has its peak after the forward pass, with all activations, or after the backward pass, with all gradients. A
preview runs beside the optimizer's state, so a job needs the larger of a step and a preview. On a CPU there are also
the holes in the heap, and the copy of the state from which checkpoints are written.

The estimate is within 25 % of the peak that torch's allocator measures. Not counted: the context of the device, the
fragmentation of its memory, and the autoencoder that decodes previews. Compiled networks need less memory.
"""

from dataclasses import replace

import torch

from atoll import flow
from atoll.core.config_sections import Train
from atoll.core.device import compute_dtype
from atoll.core.manifests import ObjectiveSpec
from atoll.core.networks import NetworkConfig, RouterConfig
from atoll.ensemble.plan import HEAP, activation_bytes, stream_size
from atoll.experts.validation import BATCH
from atoll.nets import build
from atoll.nets.blocks import transformer_blocks
from atoll.train.align import AlignmentSpec
from atoll.train.cost import image_cost
from atoll.train.data_shapes import DataShapes
from atoll.train.muon import shares_of
from atoll.train.tasks import PREVIEW_CALIBRATION_IMAGES

FLOAT = torch.float32.itemsize
WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace in torch: 32 MiB on an H100, 8 MiB on older GPUs."""
SAVED_BYTES, SAVED_BYTES_HALF = 9.2, 6.2
"""Bytes of activations for every element that a linear or convolutional layer returns, in float32 and under autocast.

Besides these outputs, a step keeps norms, residual streams and activation functions. Counted by following every tensor
through a step: 8.3 to 10.1 and 5.3 to 7.5 for transformers of Atoll and diffusers, 10.6 and 8.3 for a UNet.
"""
RECOMPUTED = 1.15
"""Activations of the block that is computed again under checkpointing, with its gradients; counted likewise."""
UNET_CHECKPOINTED = 0.6
"""Share of a UNet's activations that is left under checkpointing; counted likewise."""
AUTOCAST_ITEMSIZE = 3
"""Mean bytes of an element in a forward pass under autocast: residual stream and norms are in float32."""
MUON_COPIES = 2.5
"""Float32 copies of a stack in an update by Muon: gradients, their cast, and the products of Newton-Schulz."""
GATHERED = 3
"""Blocks of full weights that FSDP2 holds: the current one, the next one, and the buffer that it is gathered in."""


def job_bytes(
    network: NetworkConfig,
    shapes: DataShapes,
    settings: Train,
    *,
    device: torch.device,
    objective: ObjectiveSpec | None = None,
    processes: int = 1,
    align: AlignmentSpec | None = None,
) -> int:
    """Estimate the peak memory of one process of a training job; `objective` is None for routers and students.

    The device need not be in this machine, if the settings name a precision.
    """
    with torch.device("meta"):
        outline = build(network)
    cost = image_cost(network, replace(shapes, latents=shapes.largest, images=()))
    dtype = compute_dtype(device, settings.precision)
    half = dtype != torch.float32
    sharded, replicated = (processes > 1 and settings.parallel == parallel for parallel in ("fsdp2", "ddp"))
    weights = gradients = FLOAT * cost.parameters // (processes if sharded else 1)
    state = weights * (3 + len(settings.ema))
    # Autocast casts all weights and keeps the casts for the backward pass. FSDP2 gathers the weights outside of the
    # blocks and of a few blocks instead, and reduces the gradients of one: a cast, input and result.
    casts = dtype.itemsize * cost.parameters if half else 0
    if sharded:
        blocks = [sum(weight.numel() for weight in block.parameters()) for block in transformer_blocks(outline)]
        largest = max(blocks, default=cost.parameters)
        casts = (cost.parameters - sum(blocks) + (GATHERED + 1) * largest) * dtype.itemsize + 2 * FLOAT * largest

    # A step
    rows = max(1, settings.batch_size // settings.grad_accum_steps // processes)
    saved = int(rows * cost.layer_outputs * (SAVED_BYTES_HALF if half else SAVED_BYTES))
    one_block = int(RECOMPUTED * saved / max(1, cost.blocks))
    if settings.activation_checkpointing and cost.blocks:
        saved = rows * cost.blocks * stream_size(outline, shapes.largest) * FLOAT + one_block
    elif settings.activation_checkpointing:
        saved = one_block = int(UNET_CHECKPOINTED * saved)
    kept = settings.grad_accum_steps > 1 or replicated  # DDP keeps the gradients in its buckets
    most = max(casts + saved + (gradients if kept else 0), gradients + one_block)
    if settings.optimizer == "muon":
        momenta = [stack.momentum.nbytes for share in shares_of(outline, processes) for stack in share]
        state -= sum(momenta)  # one moment instead of two
        most = max(most, gradients + int(MUON_COPIES * max(momenta)))
    if align is not None:
        state += 3 * FLOAT * align.parameters
        most += FLOAT * align.parameters

    # A preview: the network has the EMA weights, and a copy the trained ones.
    if rows := preview_rows(network, settings, objective):
        itemsize = AUTOCAST_ITEMSIZE if half else FLOAT
        passing = activation_bytes(outline, shapes.largest, rows=rows, itemsize=itemsize)
        most = max(most, weights + casts + passing + (gradients if replicated else 0))
    return 2 * state + int(HEAP * most) if device.type == "cpu" else WORKSPACE + state + most


def preview_rows(network: NetworkConfig, settings: Train, objective: ObjectiveSpec | None) -> int:
    """Return the number of images of the largest forward pass of a preview; 0 without previews."""
    if isinstance(network, RouterConfig) or not (settings.sample_every and settings.sample_count):
        return 0
    # Half of the images at a time; guidance needs two rows for each.
    rows = -(-settings.sample_count // 2) * (1 if settings.sample_guidance_scale == 1 else 2)
    calibrates = objective is not None and not flow.Objective.of(objective).bridge().identity
    return max(rows, min(BATCH, PREVIEW_CALIBRATION_IMAGES)) if calibrates else rows
