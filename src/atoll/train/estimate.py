"""`atoll train --dry-run`: memory, FLOPs and time before anything is spent."""

import json
import os
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from atoll.data.models import device
from atoll.train.compute import measured_rate, training_bytes
from atoll.train.jobs import Job

UTILISATION = 0.5
"""Share of the matrix-product rate that training is assumed to reach."""


def estimate(job: Job) -> dict[str, Any]:
    """What the job would cost on this machine."""
    settings, cost = job.settings, job.cost
    world = int(os.environ.get("WORLD_SIZE", "1"))
    micro = settings.batch // settings.accumulate // world
    flops = cost.training_flops(settings.checkpointing) * settings.samples
    rate = measured_rate(device(), getattr(torch, settings.precision))
    return {
        "job": job.name,
        "parameters": cost.parameters,
        "samples": settings.samples,
        "steps": settings.samples // settings.batch,
        "epochs": settings.samples / len(job.shards),
        "flops_per_sample": cost.training_flops(settings.checkpointing),
        "flops": flops,
        "bytes": training_bytes(cost, micro, len(settings.ema), settings.precision != "float32"),
        "matmul_flops_per_second": rate,
        "seconds": flops / (rate * UTILISATION * world),
    }


def show_estimate(job: Job, as_json: bool) -> None:
    """Print the estimate for a person or a program."""
    figures = estimate(job)
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("", "", title=f"{job.name}: what training would cost", show_header=False)
    table.add_row("parameters", f"{figures['parameters']:,}")
    table.add_row("samples", f"{figures['samples']:,} in {figures['steps']:,} steps, {figures['epochs']:.1f} epochs")
    table.add_row("FLOPs", f"{figures['flops']:.3g} ({figures['flops_per_sample']:.3g} a sample)")
    table.add_row("memory", f"about {figures['bytes'] / 2**30:.2f} GiB a process")
    pace = f"at {UTILISATION:.0%} of this machine's {figures['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s"
    table.add_row("time", f"about {figures['seconds'] / 3600:.2f} hours {pace}")
    Console(width=100).print(table)
