"""The time of a training step on GPUs, computed from FLOPs, bytes and kernel launches.

For W weights on n GPUs, in seconds of one GPU:

    step      = passes + max(0, exchange - overlap) + optimizer
    passes    = max(FLOPs / (n · rate), launches)           forward and backward passes of all micro-batches
    exchange  = (n - 1) / n · W · bytes / link              DDP: 8 bytes, an all-reduce of float32 gradients
                                                            FSDP2: two gathered weights a micro-batch, one gradient
    optimizer = W · bytes / memory, by FSDP2 divided by n   clipping, AdamW and the EMAs

Smaller micro-batches have fewer FLOPs, but as many launches and bytes. So a small batch on many GPUs is slow.

DDP exchanges gradients during the last backward pass, and FSDP2 during all passes (`overlap`). Not counted: reading the
data, validation, previews, checkpoints, links between machines, and Muon's exchange.
"""

from dataclasses import dataclass

from atoll.core.config_sections import Train
from atoll.train.cost import BACKWARD, Cost

UTILIZATION = 0.5
"""Share of the matrix-product rate that passes are assumed to reach: an order of magnitude for transformers."""
BANDWIDTH = 0.8
"""Share of the bandwidths of memory and link that is assumed: typical of elementwise kernels and of NCCL with hundreds
of megabytes. We have measured neither."""
KERNELS = 36
"""Kernels of a compiled block: about 12 forward, for matrix products, casts of their weights, attention and what is
between them, and twice as many backward."""
LAUNCH_SECONDS = 6e-6
"""Time in which the host queues a kernel: commonly 5 to 8 microseconds from PyTorch."""
FLOAT, HALF = 4, 2
CLIPPED, ADAMW, AVERAGED = 3 * FLOAT, 7 * FLOAT, 3 * FLOAT
"""Bytes of memory traffic per weight. Clipping reads a gradient for the norm, then reads and writes it. AdamW reads
gradient, weight and two moments, and writes all but the gradient; Muon is similar. Each EMA reads weight and mean, and
writes the mean."""


@dataclass(frozen=True)
class Gpu:
    """Numbers from a vendor's data sheet: dense bfloat16 FLOPs, bytes of memory, and bytes per second of both."""

    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    """Bytes per second that a GPU sends to the others of its machine: NVLink, or PCIe 4 for the A40."""


GPUS = {
    "A40": Gpu(149.7e12, 48e9, 696e9, 32e9),
    "A100": Gpu(312e12, 80e9, 2.039e12, 300e9),
    "H100": Gpu(989e12, 80e9, 3.35e12, 450e9),
}


def step_seconds(cost: Cost, flops: float, settings: Train, *, gpu: Gpu, gpus: int) -> float:
    """Return the time of a step of so many FLOPs, on some number of GPUs."""
    micro_batches, sharded = settings.grad_accum_steps, settings.parallel == "fsdp2" and gpus > 1
    launches = micro_batches * cost.blocks * KERNELS * LAUNCH_SECONDS
    passes = max(flops / (gpus * gpu.flops * UTILIZATION), launches)
    gathered = 2 * micro_batches * (FLOAT if settings.precision == "float32" else HALF)
    # An all-reduce sends every gradient twice: to its sum, and back.
    exchanged = gathered + FLOAT if sharded else 2 * FLOAT
    exchange = (gpus - 1) / gpus * cost.parameters * exchanged / (BANDWIDTH * gpu.link)
    overlap = passes if sharded else passes * BACKWARD / (1 + BACKWARD) / micro_batches
    updated = cost.parameters * (CLIPPED + ADAMW + AVERAGED * len(settings.ema)) / (gpus if sharded else 1)
    return passes + max(0.0, exchange - overlap) + updated / (BANDWIDTH * gpu.memory_bandwidth)
