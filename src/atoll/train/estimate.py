"""`atoll train --dry-run`: estimated memory, FLOPs and time of one job or of a run.

It needs only the configuration: before the data is prepared, its shapes are predicted. The time of a job is measured
against the matrix products of this machine. The GPU-days of a run are computed (`step_time`), and so are those of a few
changes of its settings, of which the faster ones are printed.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch
from rich.console import Console
from rich.table import Table

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.device import compute_dtype, device
from atoll.core.manifests import EXPERT
from atoll.core.presets import PUBLISHED, Published
from atoll.train.cost import image_cost, measured_rate, parameter_count
from atoll.train.memory import job_bytes
from atoll.train.spec import TrainSpec, resolve_job
from atoll.train.step_time import GPUS, UTILIZATION, step_seconds

FASTER = 0.9
"""A change is printed if it needs at most this share of the GPU-days: the estimate is no more precise than that."""
DAY = 86_400


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
    bytes: int
    """Memory of one process."""

    @classmethod
    def of(cls, spec: TrainSpec, gpus: int | None = None) -> Self:
        """Count the costs of a job on some number of GPUs; None is this machine."""
        settings, cost, processes = spec.settings, image_cost(spec.network, spec.shapes), _processes(gpus)
        return cls(
            job=spec.job,
            parameters=cost.parameters,
            images=settings.total_images,
            steps=settings.total_images // settings.batch_size,
            forward_flops_per_image=cost.forward_flops,
            flops_per_image=cost.training_flops(settings),
            flops=_flops(spec),
            bytes=_teacher_bytes(spec, torch.bfloat16 if gpus else compute_dtype(device()))
            + job_bytes(
                spec.network,
                spec.shapes,
                settings,
                device=torch.device("cuda") if gpus else device(),
                objective=spec.objective,
                processes=processes,
                align=spec.align,
            ),
        )


@dataclass(frozen=True)
class JobEstimate(JobCosts):
    """The costs of a job with its time on this machine."""

    epochs: float | None
    matmul_flops_per_second: float
    seconds: float


@dataclass(frozen=True)
class RunCosts:
    """The costs of the shared start, all experts and the router of a run, with the published numbers of its preset."""

    jobs: list[JobCosts]
    parameters: int
    flops: int
    gpu_days: dict[str, float]
    faster: "list[Change]"
    published: Published | None


@dataclass(frozen=True)
class Change:
    """A change of the settings that needs fewer GPU-days, so that the same GPUs train a run faster."""

    change: str
    gpu_days: dict[str, float]
    """Of the GPUs with enough memory."""
    bytes: int
    """Memory of one process of the largest job."""


def _processes(gpus: int | None) -> int:
    # torchrun sets WORLD_SIZE, the number of processes, one for each GPU.
    return gpus or int(os.environ.get("WORLD_SIZE", "1"))


def planned_for_gpus(config: Config) -> Config:
    """Return the configuration with the precision that `auto` has on GPUs, which may not be in this machine."""
    if config.train.precision != "auto":
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": "bfloat16"})})


def _teacher_bytes(spec: TrainSpec, dtype: torch.dtype) -> int:
    """Return the bytes of the largest teacher of a student, of which one is in memory; 0 for other jobs."""
    if spec.kind != "student":
        return 0
    results = [Artifact(spec.run, layout.final(layout.expert_job(number))) for number in spec.clusters]
    found = [result.read(EXPERT).network for result in results if result.manifest() is not None]
    # Before the experts are trained, the student's own network is the best guess.
    return dtype.itemsize * max(parameter_count(network) for network in found or [spec.network])


def estimate(spec: TrainSpec, gpus: int | None = None) -> JobEstimate:
    """Estimate the costs of a job on this machine."""
    settings, product = spec.settings, image_cost(spec.network, spec.shapes).largest_product
    images = max(1, settings.batch_size // settings.grad_accum_steps // _processes(gpus))
    rate = measured_rate(
        device(), compute_dtype(device(), settings.precision), replace(product, rows=product.rows * images)
    )
    costs = JobCosts.of(spec, gpus)
    return JobEstimate(
        **vars(costs),
        epochs=None if spec.data is None else costs.images / spec.data.images,
        matmul_flops_per_second=rate,
        seconds=costs.flops / (rate * UTILIZATION * _processes(gpus)),
    )


def estimate_run(run: Path, config: Config, gpus: int | None = None) -> RunCosts:
    """Count the costs of the shared start, all experts and the router of a run on GPUs."""
    config, processes = planned_for_gpus(config), _processes(gpus)
    specs = _all_jobs(run, config)
    costs, days, faster = [JobCosts.of(spec, processes) for spec in specs], _gpu_days(specs, processes), []
    for change, other, count in _changes(config, processes):
        jobs = _all_jobs(run, other)
        needed = {name: found for name, found in _gpu_days(jobs, count).items() if found < FASTER * days[name]}
        most = max(JobCosts.of(spec, count).bytes for spec in jobs) if needed else 0
        if fitting := {name: found for name, found in needed.items() if most < GPUS[name].memory}:
            faster.append(Change(change, fitting, most))
    return RunCosts(
        jobs=costs,
        parameters=sum(job.parameters for job in costs if job.job != layout.START),
        flops=sum(job.flops for job in costs),
        gpu_days=days,
        faster=faster,
        published=PUBLISHED.get(config.preset or ""),
    )


def _all_jobs(run: Path, config: Config) -> list[TrainSpec]:
    experts = [resolve_job(run, config, "expert", expert=number) for number in range(config.clusters.count)]
    first = [resolve_job(run, config, "start")] if config.shared_start.flops_share else []
    return [*first, *experts, resolve_job(run, config, "router")]


def _gpu_days(specs: list[TrainSpec], gpus: int) -> dict[str, float]:
    """Return the days of all jobs on each kind of GPU."""
    days = dict.fromkeys(GPUS, 0.0)
    for spec in specs:
        settings, cost = spec.settings, image_cost(spec.network, spec.shapes)
        steps = max(1, settings.total_images // settings.batch_size)
        for name, gpu in GPUS.items():
            step = step_seconds(cost, _flops(spec) / steps, settings, gpu=gpu, gpus=gpus)
            days[name] += gpus * steps * step / DAY
    return days


def _flops(spec: TrainSpec) -> int:
    """Return the FLOPs of a job."""
    per_image = image_cost(spec.network, spec.shapes).training_flops(spec.settings)
    return per_image * spec.settings.total_images + (spec.align.flops * spec.align.images if spec.align else 0)


def _changes(config: Config, gpus: int) -> Iterator[tuple[str, Config, int]]:
    """Yield what often needs fewer GPU-days: the text for the user, the configuration, and the GPUs per job."""

    def with_train(**values: object) -> Config:
        return config.model_copy(update={"train": config.train.model_copy(update=values)})

    train = config.train
    if gpus > 1:
        yield "--gpus 1 and the jobs side by side", config, 1
        if train.parallel == "ddp" and train.optimizer == "adamw":
            yield "--train.parallel fsdp2", with_train(parallel="fsdp2"), gpus
    larger = 2 * train.batch_size
    yield f"--train.batch_size {larger} (half as many steps)", with_train(batch_size=larger), gpus


def show_estimate(spec: TrainSpec, gpus: int | None, as_json: bool) -> None:
    """Print the estimate of one job as a table or as JSON."""
    found = estimate(spec, gpus)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    table = Table("", "", title=f"{spec.job}: estimated cost of training", show_header=False)
    epochs = "" if found.epochs is None else f", {found.epochs:.1f} epochs"
    table.add_row("parameters", f"{found.parameters:,}")
    table.add_row("images", f"{found.images:,} in {found.steps:,} steps{epochs}")
    table.add_row("FLOPs", f"{found.flops:.3g} ({found.flops_per_image:.3g} per image)")
    table.add_row("memory", f"about {found.bytes / 2**30:.2f} GiB per process")
    pace = f"at {UTILIZATION:.0%} of this machine's {found.matmul_flops_per_second / 1e9:.0f} GFLOP/s"
    table.add_row("time", f"about {found.seconds / 3600:.2f} hours {pace}")
    Console(width=100).print(table)


def show_run_estimate(run: Path, config: Config, gpus: int | None, *, as_json: bool) -> None:
    """Print the estimate of a run as a table or as JSON."""
    found = estimate_run(run, config, gpus)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    console = Console(width=120)
    table = Table("job", "parameters", "GFLOPs forward", "images", "steps", "FLOPs", "memory per GPU")
    for job in found.jobs:
        forward, memory = job.forward_flops_per_image / 1e9, job.bytes / 2**30
        numbers = (f"{job.parameters / 1e6:,.1f} M", f"{forward:,.1f}", f"{job.images:,}", f"{job.steps:,}")
        table.add_row(job.job, *numbers, f"{job.flops:.3g}", f"{memory:.1f} GiB")
    console.print(table)
    shares = {name: found.flops / (days * DAY * GPUS[name].flops) for name, days in found.gpu_days.items()}
    days = ", ".join(f"{count:,.1f} {name} ({shares[name]:.0%})" for name, count in found.gpu_days.items())
    console.print(
        f"total: {found.parameters / 1e9:.2f} B parameters, {found.flops:.3g} FLOPs; GPU-days (share of the bfloat16 "
        f"rate): {days}; {_processes(gpus)} GPUs per job"
    )
    for other in found.faster:
        days = ", ".join(f"{count:,.1f} {name}" for name, count in other.gpu_days.items())
        console.print(f"faster with {other.change}: {days} GPU-days, {other.bytes / 2**30:.1f} GiB per GPU")
    if found.published:
        table = Table(title=f"published: {found.published.source}", show_header=False)
        for key, value in asdict(found.published).items():
            if key != "source":
                table.add_row(key.replace("_", " "), value or "not published")
        console.print(table)
