"""Estimate the memory, FLOPs and time of training before it starts: `atoll train --dry-run`.

    job_bytes      memory of one process, from the network and the settings
    step_seconds   time of a step on GPUs, from FLOPs, bytes and kernel launches
    JobCosts       one job; its time on this machine is measured against the machine's matrix products
    estimate_run   all jobs of a run and its GPU-days, also with a few changed settings; the faster ones are printed

Only the configuration is needed: before the data is prepared, its shapes are predicted.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from atoll import flow
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.config_sections import TrainSection
from atoll.core.device import compute_dtype, device
from atoll.core.manifests import EXPERT, ExpertContent, ObjectiveSpec, training_costs
from atoll.core.networks import NetworkConfig, RouterConfig
from atoll.core.presets import PUBLISHED, Published
from atoll.core.progress import duration
from atoll.data.shapes import DataShapes
from atoll.ensemble.memory_plan import HEAP, activation_bytes, stream_size
from atoll.experts.cost import BACKWARD, Cost, image_cost, measured_rate, parameter_count
from atoll.experts.validation import BATCH
from atoll.nets import build
from atoll.nets.base import BaseExpert
from atoll.nets.blocks import transformer_blocks
from atoll.train.align import AlignmentSpec
from atoll.train.muon import shares_of
from atoll.train.spec import TrainSpec, distillation_flops, resolve_job
from atoll.train.tasks import PREVIEW_CALIBRATION_IMAGES

FLOAT, HALF = 4, 2
DAY = 86_400
WIDTH = 80
"""Columns of the tables, for any terminal."""
FASTER = 0.9
"""A change is printed if it needs at most this share of the GPU-days: the estimate is no more precise than that."""

# Memory of a process

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
    settings: TrainSection,
    *,
    device: torch.device,
    objective: ObjectiveSpec | None = None,
    processes: int = 1,
    align: AlignmentSpec | None = None,
) -> int:
    """Estimate the peak memory of one process of a training job; `objective` is None for routers and students.

        base          frozen weights of a base network with an adapter, in bfloat16 on a GPU, or in int8
        state         weights, moments of the optimizer and EMAs, in float32
        gradients     in float32; released after every step, or kept between micro-batches and by DDP
        activations   what the backward pass needs: outputs of all linear and convolutional layers, times a constant

    A step has its peak after the forward pass, with all activations, or after the backward pass, with all gradients. A
    preview runs beside the optimizer's state, so a job needs the larger of a step and a preview. On a CPU there are
    also the holes in the heap, and the copy of the state from which checkpoints are written.

    The estimate is within 25 % of the peak that torch's allocator measures. Not counted: the context of the device, the
    fragmentation of its memory, and the autoencoder that decodes previews. Compiled networks need less memory. The
    device need not be in this machine, if the settings name a precision.
    """
    with torch.device("meta"):
        outline = build(network)
    cost = image_cost(network, replace(shapes, latents=shapes.largest, images=()))
    dtype = compute_dtype(device, settings.precision)
    half = dtype != torch.float32
    sharded, replicated = (processes > 1 and settings.parallel == parallel for parallel in ("fsdp2", "ddp"))
    weights = gradients = FLOAT * cost.parameters // (processes if sharded else 1)
    state = weights * (3 + settings.averages)
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

    # A preview: half of the images at a time, with two rows for each under guidance, or the images that calibrate the
    # bridge. The network has the EMA weights, and a copy the trained ones.
    if not isinstance(network, RouterConfig) and settings.sample_every and settings.sample_count:
        rows = -(-settings.sample_count // 2) * (1 if settings.sample_guidance_scale == 1 else 2)
        if objective is not None and not flow.Objective.of(objective).bridge().identity:
            rows = max(rows, min(BATCH, PREVIEW_CALIBRATION_IMAGES))
        itemsize = AUTOCAST_ITEMSIZE if half else FLOAT
        passing = activation_bytes(outline, shapes.largest, rows=rows, itemsize=itemsize)
        most = max(most, weights + casts + passing + (gradients if replicated else 0))
    itemsize = FLOAT if device.type == "cpu" else HALF
    frozen = outline.frozen_bytes(itemsize) if isinstance(outline, BaseExpert) else 0
    return frozen + (2 * state + int(HEAP * most) if device.type == "cpu" else WORKSPACE + state + most)


# Time of a step

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
CLIPPED, ADAMW, AVERAGED = 3 * FLOAT, 7 * FLOAT, 3 * FLOAT
"""Bytes of memory traffic per weight. Clipping reads a gradient for the norm, then reads and writes it. AdamW reads
gradient, weight and two moments, and writes all but the gradient; Muon is similar. Each EMA reads weight and mean, and
writes the mean."""


CARDS = (12, 16, 24)
"""Gigabytes of usual graphics cards, on which adapters are trained."""
FILLED = 0.9
"""Share of a card's memory that a job may need: the context of the device and fragmentation are not estimated."""


@dataclass(frozen=True)
class Gpu:
    """Numbers from a vendor's data sheet: dense bfloat16 FLOPs, bytes of memory, and bytes per second of both."""

    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    """Bytes per second that a GPU sends to the others of its machine: NVLink, or PCIe 4 for GPUs without."""


# GeForce: NVIDIA's white papers on GA102 and Ada; tensor cores with float32 accumulation have half the advertised rate.
# The others: data sheets, without sparsity; A100 and H100 are the SXM modules with 80 GB.
GPUS = {
    "RTX 3090": Gpu(71e12, 24e9, 936e9, 32e9),
    "RTX 4090": Gpu(165.2e12, 24e9, 1.008e12, 32e9),
    "A40": Gpu(149.7e12, 48e9, 696e9, 32e9),
    "A100": Gpu(312e12, 80e9, 2.039e12, 300e9),
    "H100": Gpu(989e12, 80e9, 3.35e12, 450e9),
}


def step_seconds(cost: Cost, flops: float, settings: TrainSection, *, gpu: Gpu, gpus: int) -> float:
    """Return the time of a step of so many FLOPs, on some number of GPUs.

    For W weights on n GPUs, in seconds of one GPU:

        step      = passes + max(0, exchange - overlap) + optimizer
        passes    = max(FLOPs / (n · rate), launches)           forward and backward passes of all micro-batches
        exchange  = (n - 1) / n · W · bytes / link              DDP: 8 bytes, an all-reduce of float32 gradients
                                                                FSDP2: two gathered weights a micro-batch, one gradient
        optimizer = W · bytes / memory, by FSDP2 divided by n   clipping, AdamW and the EMAs

    Smaller micro-batches have fewer FLOPs, but as many launches and bytes. So a small batch on many GPUs is slow.

    DDP exchanges gradients during the last backward pass, and FSDP2 during all passes (`overlap`). Not counted: reading
    the data, validation, previews, checkpoints, links between machines, and Muon's exchange.
    """
    micro_batches, sharded = settings.grad_accum_steps, settings.parallel == "fsdp2" and gpus > 1
    launches = micro_batches * cost.blocks * KERNELS * LAUNCH_SECONDS
    passes = max(flops / (gpus * gpu.flops * UTILIZATION), launches)
    gathered = 2 * micro_batches * (FLOAT if settings.precision == "float32" else HALF)
    # An all-reduce sends every gradient twice: to its sum, and back.
    exchanged = gathered + FLOAT if sharded else 2 * FLOAT
    exchange = (gpus - 1) / gpus * cost.parameters * exchanged / (BANDWIDTH * gpu.link)
    overlap = passes if sharded else passes * BACKWARD / (1 + BACKWARD) / micro_batches
    updated = cost.parameters * (CLIPPED + ADAMW + AVERAGED * settings.averages) / (gpus if sharded else 1)
    return passes + max(0.0, exchange - overlap) + updated / (BANDWIDTH * gpu.memory_bandwidth)


# Jobs and runs


@dataclass(frozen=True)
class JobCosts:
    """The costs of a job, independent of the machine."""

    job: str
    parameters: int
    images: int
    steps: int
    forward_flops_per_image: int
    flops_per_image: int
    flops: int
    teachers_flops: int
    """FLOPs of the training of a student's teachers, as far as they are finished; 0 for other jobs."""
    bytes: int
    """Memory of one process."""

    @classmethod
    def of(cls, spec: TrainSpec, gpus: int | None = None) -> Self:
        """Count the costs of a job on some number of GPUs; None is this machine."""
        settings, cost = spec.settings, image_cost(spec.network, spec.shapes)
        place = torch.device("cuda") if gpus else device()
        memory = job_bytes(
            spec.network,
            spec.shapes,
            settings,
            device=place,
            objective=spec.objective,
            processes=_processes(gpus),
            align=spec.align,
        )
        found, distillation = list[ExpertContent](), 0
        if spec.kind == "student":
            # One teacher at a time, or all of them for a few-step student. Before the experts are trained, the
            # student's own network is the best guess.
            results = [Artifact(spec.run, layout.final(layout.expert_job(number))) for number in spec.clusters]
            found = [result.read(EXPERT) for result in results if result.manifest() is not None]
            networks = [content.network for content in found] or [spec.network] * len(spec.clusters)
            dtype = torch.bfloat16 if gpus else compute_dtype(place)
            sizes = [parameter_count(network) for network in networks]
            memory += dtype.itemsize * (sum(sizes) if spec.few_steps else max(sizes))
            if spec.student is not None and spec.student.corrector:
                memory += 4 * FLOAT * cost.parameters  # the online velocity: weights, moments and gradients
            forward = sum(image_cost(network, spec.shapes).forward_flops for network in networks)
            distillation = distillation_flops(spec, forward // len(networks))
        flops = cost.training_flops(settings) * settings.total_images + distillation
        flops += spec.align.flops * spec.align.images if spec.align else 0
        return cls(
            job=spec.job,
            parameters=cost.parameters,
            images=settings.total_images,
            steps=settings.total_images // settings.batch_size,
            forward_flops_per_image=cost.forward_flops,
            flops_per_image=flops // settings.total_images,
            flops=flops,
            teachers_flops=sum(spent.flops for spent in training_costs(found)),
            bytes=memory,
        )


@dataclass(frozen=True)
class FasterSetting:
    """A change of the settings that needs fewer GPU-days, so that the same GPUs train a run faster."""

    change: str
    gpu_days: dict[str, float]
    """Of the GPUs with enough memory."""
    bytes: int
    """Memory of one process of the largest job."""


@dataclass(frozen=True)
class RunCosts:
    """The costs of the shared start, all experts and the router of a run, with the published numbers of its preset."""

    jobs: list[JobCosts]
    parameters: int
    flops: int
    gpu_days: dict[str, float]
    fits: dict[int, str | None]
    """`fitting_settings` of all jobs, for the memories of the GPUs."""
    faster: list[FasterSetting]
    published: Published | None


def _processes(gpus: int | None) -> int:
    # torchrun sets WORLD_SIZE, the number of processes, one for each GPU.
    return gpus or int(os.environ.get("WORLD_SIZE", "1"))


def planned_for_gpus(config: Config) -> Config:
    """Return the configuration with the precision that `auto` has on GPUs, which may not be in this machine."""
    return with_train(config, precision="bfloat16") if config.train.precision == "auto" else config


def with_train(config: Config, **values: object) -> Config:
    """Return the configuration with other training settings."""
    return config.model_copy(update={"train": config.train.model_copy(update=values)})


def estimate_run(run: Path, config: Config, gpus: int | None = None) -> RunCosts:
    """Count the costs of the shared start, all experts and the router of a run on GPUs."""

    def count(config: Config, gpus: int) -> tuple[list[TrainSpec], list[JobCosts], dict[str, float]]:
        """Return all jobs, their costs, and their days on each kind of GPU."""
        specs = [resolve_job(run, config, "start")] if config.shared_start.flops_share else []
        specs += [resolve_job(run, config, "expert", expert=number) for number in range(config.clusters.count)]
        specs.append(resolve_job(run, config, "router"))
        costs, days = [JobCosts.of(spec, gpus) for spec in specs], dict.fromkeys(GPUS, 0.0)
        for spec, job in zip(specs, costs, strict=True):
            cost = image_cost(spec.network, spec.shapes)
            for name, gpu in GPUS.items():
                step = step_seconds(cost, job.flops / job.steps, spec.settings, gpu=gpu, gpus=gpus)
                days[name] += gpus * job.steps * step / DAY
        return specs, costs, days

    config, processes = planned_for_gpus(config), _processes(gpus)
    (specs, jobs, days), faster = count(config, processes), []
    different = {replace(job, job=""): spec for job, spec in zip(jobs, specs, strict=True)}
    memories = sorted({round(gpu.memory / 1e9) for gpu in GPUS.values()})
    # What often needs fewer GPU-days
    larger = 2 * config.train.batch_size
    doubled = f"--train.batch_size {larger} (half as many steps)"
    changes = [(doubled, with_train(config, batch_size=larger), processes)]
    if processes > 1:
        if config.train.parallel == "ddp" and config.train.optimizer == "adamw":
            changes.insert(0, ("--train.parallel fsdp2", with_train(config, parallel="fsdp2"), processes))
        changes.insert(0, ("--gpus 1 and the jobs side by side", config, 1))
    for change, other, other_gpus in changes:
        _, changed, needed = count(other, other_gpus)
        most = max(job.bytes for job in changed)
        fitting = {
            name: found for name, found in needed.items() if found < FASTER * days[name] and most < GPUS[name].memory
        }
        if fitting:
            faster.append(FasterSetting(change, fitting, most))
    return RunCosts(
        jobs=jobs,
        parameters=sum(job.parameters for job in jobs if job.job != layout.START),
        flops=sum(job.flops for job in jobs),
        gpu_days=days,
        fits=fitting_settings(list(different.values()), processes, memories),
        faster=faster,
        published=PUBLISHED.get(config.preset or ""),
    )


def fitting_settings(
    specs: Sequence[TrainSpec], processes: int = 1, cards: Sequence[int] = CARDS
) -> dict[int, str | None]:
    """Return the settings with which all of some jobs fit GPUs by their gigabytes: "" for their own, None for none.

    Settings that do not change the result are tried: checkpointing, then smaller and smaller micro-batches.
    """
    gpu, sizes = torch.device("cuda"), [spec.settings.batch_size for spec in specs]
    own = specs[0].settings.grad_accum_steps
    steps = [count for count in range(own, min(sizes) + 1) if not any(size % count for size in sizes)]
    # A router cannot recompute its activations.
    routers = [isinstance(spec.network, RouterConfig) for spec in specs]
    recomputed: dict[str, bool | int] = {} if all(routers) else {"activation_checkpointing": True}
    changes = [{}, recomputed, *({**recomputed, "grad_accum_steps": count} for count in steps[1:])]
    needed: dict[str, int] = {}
    for change in changes:
        named = " ".join(f"--train.{name} {str(value).lower()}" for name, value in change.items())
        for spec, router in zip(specs, routers, strict=True):
            given: dict[str, object] = {"precision": "bfloat16", **change}
            settings = spec.settings.model_copy(update=given | ({"activation_checkpointing": False} if router else {}))
            found = job_bytes(
                spec.network, spec.shapes, settings, device=gpu, objective=spec.objective, processes=processes
            )
            needed[named] = max(found, needed.get(named, 0))
        if needed[named] < FILLED * cards[0] * 1e9:
            break
    return {card: next((name for name, own in needed.items() if own < FILLED * card * 1e9), None) for card in cards}


def show_estimate(spec: TrainSpec, gpus: int | None, as_json: bool) -> None:
    """Print the costs of one job and its time on this machine, as a table or as JSON."""
    settings, product = spec.settings, image_cost(spec.network, spec.shapes).largest_product
    costs, processes = JobCosts.of(spec, gpus), _processes(gpus)
    images = max(1, settings.batch_size // settings.grad_accum_steps // processes)
    product = replace(product, rows=product.rows * images)
    rate = measured_rate(device(), compute_dtype(device(), settings.precision), product)
    seconds = costs.flops / (rate * UTILIZATION * processes)
    epochs = None if spec.data is None else costs.images / spec.data.images
    cards = fitting_settings([spec], processes)
    if as_json:
        time = {"epochs": epochs, "matmul_flops_per_second": rate, "seconds": seconds}
        print(json.dumps(asdict(costs) | time | {"gpus": cards}))
        return
    table = Table("", "", title=f"{spec.job}: estimated cost of training", show_header=False)
    repeated = "" if epochs is None else f", {epochs:.1f} epochs"
    table.add_row("parameters", f"{costs.parameters:,}")
    table.add_row("images", f"{costs.images:,} in {costs.steps:,} steps{repeated}")
    table.add_row("FLOPs", f"{costs.flops:.3g} ({costs.flops_per_image:.3g} per image)")
    if costs.teachers_flops:
        table.add_row("with its teachers", f"{costs.flops + costs.teachers_flops:.3g} FLOPs")
    table.add_row("memory", f"about {costs.bytes / 2**30:.2f} GiB per process")
    for card, change in cards.items():
        table.add_row(f"fits {card} GB", _fits(change))
    pace = f"at {UTILIZATION:.0%} of this machine's {rate / 1e9:.0f} GFLOP/s"
    table.add_row("time", f"about {duration(seconds)} {pace}")
    Console(width=WIDTH).print(table)


def _fits(change: str | None) -> str:
    """Return an entry of `fitting_settings` for people."""
    return "no" if change is None else f"yes, with {change}" if change else "yes"


def show_run_estimate(run: Path, config: Config, gpus: int | None, *, as_json: bool) -> None:
    """Print the estimate of a run as a table or as JSON."""
    found = estimate_run(run, config, gpus)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    console = Console(width=WIDTH)
    style: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    # Jobs that follow each other and have the same costs are one row: experts/000-007.
    table = Table("job", "parameters", "GFLOPs", "images", "steps", "FLOPs", "memory", **style)
    for _, group in groupby(found.jobs, key=lambda job: replace(job, job="")):
        first, *others = group
        name = f"{first.job}-{others[-1].job.rpartition('/')[2]}" if others else first.job
        forward, memory = first.forward_flops_per_image / 1e9, first.bytes / 2**30
        numbers = (f"{first.parameters / 1e6:,.1f} M", f"{forward:,.1f}", f"{first.images:,}", f"{first.steps:,}")
        table.add_row(name, *numbers, f"{first.flops:.3g}", f"{memory:.1f} GiB")
    console.print(table)
    console.print(
        f"total: {found.parameters / 1e9:.2f} B parameters, {found.flops:.3g} FLOPs; GPUs per job: {_processes(gpus)}"
    )
    for gigabytes, change in found.fits.items():
        console.print(f"fits {gigabytes} GB: {_fits(change)}")
    table = Table("GPU", "GPU time of all jobs", "share of the bfloat16 rate", **style)
    for name, days in found.gpu_days.items():
        table.add_row(name, duration(days * DAY), f"{found.flops / (days * DAY * GPUS[name].flops):.0%}")
    console.print(table)
    for other in found.faster:
        times = ", ".join(f"{name} {duration(days * DAY)}" for name, days in other.gpu_days.items())
        console.print(f"faster with {other.change}: {times}; {other.bytes / 2**30:.1f} GiB per GPU")
    if found.published:
        table = Table(title=f"published: {found.published.source}", show_header=False)
        for key, value in asdict(found.published).items():
            if key != "source":
                table.add_row(key.replace("_", " "), value or "not published")
        console.print(table)
