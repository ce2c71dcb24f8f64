"""`atoll train --dry-run`: memory, FLOPs and time before anything is spent, of one job or of a whole run.

It works on the configuration alone: where the data is not prepared yet, its shapes are those to be expected.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from atoll.core.config import Config
from atoll.core.device import device
from atoll.core.presets import PUBLISHED
from atoll.train.cost import measured_rate, training_bytes
from atoll.train.job import Job

UTILISATION = 0.5
"""Share of the matrix-product rate that training is assumed to reach."""
GPUS = {"A40": 149.7e12, "A100": 312e12, "H100": 989e12}
"""Dense bfloat16 FLOPs a second, from the makers' data sheets."""


def costs(job: Job, gpus: int | None = None) -> dict[str, Any]:
    """What the job would cost on any machine."""
    settings, cost, world = job.settings, job.cost, _processes(gpus)
    micro = max(1, settings.batch // settings.accumulate // world)
    parts = world if settings.parallel == "fsdp2" else 1
    half, again = settings.precision != "float32", settings.checkpointing
    return {
        "job": job.name,
        "parameters": cost.parameters,
        "samples": settings.samples,
        "steps": settings.samples // settings.batch,
        "forward_flops_per_sample": cost.forward_flops,
        "flops_per_sample": cost.training_flops(settings.checkpointing),
        "flops": cost.training_flops(settings.checkpointing) * settings.samples,
        "bytes": training_bytes(cost, micro, len(settings.ema), half=half, checkpointing=again, parts=parts),
    }


def _processes(gpus: int | None) -> int:
    return gpus or int(os.environ.get("WORLD_SIZE", "1"))


def estimate(job: Job, gpus: int | None = None) -> dict[str, Any]:
    """What the job would cost on this machine."""
    figures = costs(job, gpus)
    rate = measured_rate(device(), getattr(torch, job.settings.precision))
    return {
        **figures,
        "epochs": figures["samples"] / len(job.shards) if job.data is not None else None,
        "matmul_flops_per_second": rate,
        "seconds": figures["flops"] / (rate * UTILISATION * _processes(gpus)),
    }


def survey(run: Path, config: Config, gpus: int | None = None) -> dict[str, Any]:
    """What all experts and the router of a run would cost, beside what is published of its preset."""
    experts = [costs(Job(run, config, "expert", number), gpus) for number in range(config.clusters.count)]
    jobs = [*experts, costs(Job(run, config, "router"), gpus)]
    flops = sum(job["flops"] for job in jobs)
    published = PUBLISHED.get(config.preset or "")
    return {
        "jobs": jobs,
        "parameters": sum(job["parameters"] for job in jobs),
        "flops": flops,
        "gpu_days": {name: flops / (rate * UTILISATION * 86_400) for name, rate in GPUS.items()},
        "published": asdict(published) if published else None,
    }


def show_estimate(job: Job, gpus: int | None, as_json: bool) -> None:
    """Print the estimate of one job for a person or a program."""
    figures = estimate(job, gpus)
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("", "", title=f"{job.name}: what training would cost", show_header=False)
    epochs = "" if figures["epochs"] is None else f", {figures['epochs']:.1f} epochs"
    table.add_row("parameters", f"{figures['parameters']:,}")
    table.add_row("samples", f"{figures['samples']:,} in {figures['steps']:,} steps{epochs}")
    table.add_row("FLOPs", f"{figures['flops']:.3g} ({figures['flops_per_sample']:.3g} a sample)")
    table.add_row("memory", f"about {figures['bytes'] / 2**30:.2f} GiB a process")
    pace = f"at {UTILISATION:.0%} of this machine's {figures['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s"
    table.add_row("time", f"about {figures['seconds'] / 3600:.2f} hours {pace}")
    Console(width=100).print(table)


def show_survey(run: Path, config: Config, gpus: int | None, *, as_json: bool) -> None:
    """Print the estimate of a whole run for a person or a program."""
    figures = survey(run, config, gpus)
    if as_json:
        print(json.dumps(figures))
        return
    console = Console(width=120)
    table = Table("job", "parameters", "GFLOPs forward", "samples", "steps", "FLOPs", "memory of a GPU")
    for job in figures["jobs"]:
        forward, memory = job["forward_flops_per_sample"] / 1e9, job["bytes"] / 2**30
        numbers = (f"{job['parameters'] / 1e6:,.1f} M", f"{forward:,.1f}", f"{job['samples']:,}", f"{job['steps']:,}")
        table.add_row(job["job"], *numbers, f"{job['flops']:.3g}", f"{memory:.1f} GiB")
    console.print(table)
    days = ", ".join(f"{count:,.1f} {name}" for name, count in figures["gpu_days"].items())
    console.print(
        f"in all {figures['parameters'] / 1e9:.2f} B parameters, {figures['flops']:.3g} FLOPs: GPU-days at "
        f"{UTILISATION:.0%} of the bfloat16 rate: {days}; {_processes(gpus)} GPUs for each job"
    )
    if figures["published"]:
        table = Table(title=f"published: {figures['published']['source']}", show_header=False)
        for key, value in figures["published"].items():
            if key != "source":
                table.add_row(key.replace("_", " "), value or "not published")
        console.print(table)
