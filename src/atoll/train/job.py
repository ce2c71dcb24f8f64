"""From a run and its settings to a finished job: build the task, train it, commit the result.

    RUN/experts/003/            (also RUN/router, RUN/monolith, RUN/student)
        metrics.jsonl, grids/   what a person looks at
        checkpoints/            what resuming needs; removed once the result is committed
        final/                  the result: config.json, weights, manifest.json with everything it declares

An expert's job reads `atoll.yaml` and its own cluster's shards, and writes only its own folder.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll import flow
from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, Kind, Manifest
from atoll.core.config import Config, NetworkChoice, Train
from atoll.core.device import device as pick_device
from atoll.core.errors import AtollError
from atoll.core.manifests import (
    EXPERT,
    ROUTER,
    SHARDS,
    ComputeSpec,
    DataSpec,
    NetworkContent,
    ShardsContent,
)
from atoll.core.networks import (
    DiffusersConfig,
    DiTConfig,
    NetworkConfig,
    RouterConfig,
)
from atoll.data.dataset import Shards
from atoll.data.stages.latents import Statistics
from atoll.experts import density
from atoll.nets import DiT, build, load_network, save_network
from atoll.nets.adapters import DiffusersExpert
from atoll.train.checkpoints import Checkpoints
from atoll.train.cost import Cost, cost
from atoll.train.distill import StudentTask, teachers
from atoll.train.distributed import World, join, whole
from atoll.train.expected import DataShapes
from atoll.train.loop import Outcome, Watch, train
from atoll.train.network_choice import (
    NeededFields,
    check_classes,
    fitted_network,
    read_initial_network,
    takes_pooled,
)
from atoll.train.tasks import ExpertTask, RouterTask, Task

_NO_EFFECT = {"samples", "save_every", "keep_last", "log_every", "grid_every", "grid_size", "grid_guidance"}
_NO_EFFECT |= {"workers", "trackers", "parallel", "compile", "checkpointing", "accumulate"}
"""Settings of training that do not change its result beyond rounding: a job may resume with others."""


@dataclass(frozen=True)
class Job:
    """One thing to train in a run."""

    run: Path
    config: Config
    kind: layout.JobKind
    expert: int | None = None
    match_flops: Path | None = None

    def __post_init__(self) -> None:
        """Check that the expert exists."""
        if self.kind == "expert":
            assert self.expert is not None
            self.config.objective(self.expert)

    @property
    def name(self) -> str:
        """The job's folder in the run."""
        return self.kind if self.expert is None else layout.expert_job(self.expert)

    @property
    def result(self) -> Artifact:
        """Where the result goes."""
        return Artifact(self.run, layout.final(self.name))

    @cached_property
    def clusters(self) -> list[int]:
        """The clusters whose data the job needs."""
        return [self.expert] if self.expert is not None else list(range(self.config.clusters.count))

    @cached_property
    def shards(self) -> Shards:
        """The training data."""
        return Shards.open(self.run, self.clusters)

    @cached_property
    def data(self) -> ShardsContent | None:
        """Return what the shards declare of the data; None before they are made."""
        made = Artifact(self.run, layout.shards(self.clusters[0])).manifest() is not None
        return self.shards.content if made else None

    @cached_property
    def shapes(self) -> DataShapes:
        """Return the shapes of the data; before it is prepared, those that the configuration lets expect."""
        return DataShapes.expected(self.config) if self.data is None else DataShapes.of(self.data)

    @cached_property
    def settings(self) -> Train:
        """How this job trains: `train`, with the job's own section on top, in whole steps."""
        own = {"router": self.config.router, "student": self.config.student}.get(self.kind)
        changes = {
            key: getattr(own, key) for key in ("samples", "batch", "lr", "decay") if getattr(own, key, None) is not None
        }
        if self.kind == "router":
            changes["checkpointing"] = False  # the router is small
        settings = self.config.train.model_copy(update=changes)
        samples = settings.samples
        if self.match_flops is not None:
            samples = expert_flops(self.match_flops) // self.cost.training_flops(settings.checkpointing)
        steps = max(1, -(-samples // settings.batch))
        return Train.model_validate({**settings.model_dump(), "samples": steps * settings.batch})

    @cached_property
    def told(self) -> frozenset[str]:
        """What the network is told: any of text, pooled and label."""
        shapes, router = self.shapes, self.kind == "router"
        choice: str = self.config.router.told if router else self.config.train.condition
        if choice == "auto":
            text = "pooled" if router else "text"
            choice = text if shapes.text else "label" if shapes.labels else "none"
        wish = {"both": {"text", "label"}, "none": set(), "nothing": set()}.get(choice, {choice})
        if wish & {"text", "pooled"} and not shapes.text:
            raise AtollError(f"{self.name} is to be told text, but {self.run} was prepared without; set text.encoder")
        if "label" in wish and not shapes.labels:
            raise AtollError(f"{self.name} is to be told labels, but the data of {self.run} has none")
        if not router and "text" in wish and takes_pooled(self._choice):
            wish = {*wish, "pooled"}
        return frozenset(wish)

    @cached_property
    def network(self) -> NetworkConfig:
        """The network to train, fitted to the data."""
        shapes = self.shapes
        channels, size = shapes.latents[0], shapes.latents[-1]
        needed: NeededFields = {"channels": channels, "size": size}
        if "label" in self.told:
            needed["num_classes"] = len(shapes.labels)
        if self.kind == "router":
            needed["experts"] = self.config.clusters.count
            if "pooled" in self.told and shapes.text:
                needed["pooled_width"] = shapes.text.pooled
            return fitted_network("Router", self.config.router.network, needed, key="router.network")
        needed["out_channels"] = channels
        if "text" in self.told and shapes.text:
            needed["text_width"] = shapes.text.dimensions
        init = self.config.train.init
        if init is not None:
            network = read_initial_network(init, needed)
        else:
            network = fitted_network("DiT", self._choice, needed, key=self._choice_key)
        if isinstance(network, DiffusersConfig):
            check_classes(network, needed.get("num_classes", 0))
        else:
            self._check_normalization(network)
        return network

    def _check_normalization(self, network: DiTConfig | RouterConfig) -> None:
        """Refuse a network that declares another normalization of its latents than the run has."""
        scale = network.normalization
        if scale is None:
            return
        where = self.config.train.init or self._choice_key
        same = self.config.latents.normalization == "scale"
        if self.data is not None:  # else the data is not prepared yet, and only the setting is known
            same = Statistics.of(self.data.statistics) == Statistics.of_scale(scale, self.shapes.latents[0])
        if not same:
            raise AtollError(
                f"{where}: this network was trained on latents normalized as {scale}, and this run normalizes them "
                "otherwise; set latents.normalization: scale, with the autoencoder that the network was trained with, "
                "and prepare the shards again. To start from it all the same, remove normalization from its config.json"
            )

    @property
    def _choice_key(self) -> str:
        """The key of the configuration that `_choice` comes from."""
        if self.kind == "expert" and self.expert in self.config.networks:
            return f"networks.{self.expert}"
        return "student.network" if self.kind == "student" and self.config.student.network else "networks.default"

    @property
    def _choice(self) -> NetworkChoice:
        if self.kind == "expert":
            assert self.expert is not None
            return self.config.network(self.expert)
        student = self.config.student.network if self.kind == "student" else None
        return student or self.config.networks["default"]

    @cached_property
    def objective(self) -> flow.Objective:
        """How the expert or the monolith is trained."""
        chosen = self.config.experts["default"] if self.expert is None else self.config.objective(self.expert)
        return flow.objective(**chosen.model_dump())

    @cached_property
    def cost(self) -> Cost:
        """FLOPs and memory of one sample."""
        return cost(self.network, self.shapes.latents, self.shapes.text and self.shapes.text[:2])

    @property
    def made_from(self) -> Inputs:
        """What the result is made from; a job that resumes must agree with its checkpoints on all of it."""
        settings = self.settings.model_dump()
        if settings["decay"] == "constant":
            settings.pop("decay")
        else:
            settings["cosine_samples"] = settings["samples"]
        return {
            "job": self.name,
            "data": [artifact.open(SHARDS).digest for artifact in self.shards.artifacts],
            "network": self.network.to_dict(),
            "objective": self.objective.spec.model_dump() if self.kind in ("expert", "monolith") else self.kind,
            "train": {key: value for key, value in settings.items() if key not in _NO_EFFECT},
            **({"teachers": teachers(self.run, self.clusters)} if self.kind == "student" else {}),
        }

    def task(self) -> Task:
        """The task, with its network freshly made or adopted."""
        torch.manual_seed(self.settings.seed)
        network: nn.Module = build(self.network)
        if self.config.train.init is not None and self.kind != "router":
            network.load_state_dict(load_network(self.config.train.init).state_dict())
        if isinstance(network, DiT):
            network.checkpointing = self.settings.checkpointing
        elif isinstance(network, DiffusersExpert) and self.settings.checkpointing:
            network.model.enable_gradient_checkpointing()
        held_out = Shards.open(self.run, self.clusters, "held-out")
        base = (self.name, network, self.shards, held_out, self.settings.seed)
        dropout = self.settings.condition_dropout
        if self.kind == "router":
            return RouterTask(*base, self.told, dropout)
        if self.kind == "student":
            micro = self.settings.batch // self.settings.accumulate
            return StudentTask(*base, self.told, dropout, self.run, self.config.student.block, micro)
        return ExpertTask(*base, self.objective, self.told, dropout)


def run_job(job: Job, watch: Watch | None = None) -> Manifest:
    """Train a job to its end, or do nothing if its result is there."""
    kind: Kind[Any] = ROUTER if job.kind == "router" else EXPERT
    goal = {**job.made_from, "samples": job.settings.samples}

    def find_result() -> str | None:
        if not job.result.check(kind, goal):
            return None
        shutil.rmtree(job.run / layout.checkpoints(job.name), ignore_errors=True)  # of one killed at its end
        print(f"{job.result.folder} is there already", flush=True)
        return job.result.open(kind).to_json().decode()

    with join(pick_device()) as world:
        # The main process decides for all: another job may commit, or a shared file system show, the result between
        # the looks of two processes, and one that leaves would let the others wait.
        if found := world.on_main(find_result):
            return Manifest.from_values(json.loads(found))
        task = job.task()
        checkpoints = Checkpoints(job.run, job.name, job.made_from, world, job.settings.keep_last)
        outcome = train(task, job.settings, checkpoints, world=world, watch=watch)
        return commit(job, task, outcome, world=world, kind=kind, goal=goal)


def commit(job: Job, task: Task, outcome: Outcome, *, world: World, kind: Kind[Any], goal: Inputs) -> Manifest:
    """Write the result: averaged weights in plain safetensors, and a manifest that declares everything.

    All processes gather the averaged weights, hold a whole network each and share its validation. Then the main one
    hashes and writes, for which the others wait outside of NCCL.
    """
    name, *others = outcome.averages.weights
    network = build(job.network)
    known = network.state_dict()  # without buffers that a network makes by itself
    buffers = {key: value for key, value in task.network.named_buffers() if key in known}
    network.load_state_dict({**buffers, **_gathered(outcome.averages.weights[name])})
    content = replace(task, network=network.to(world.device).eval()).finish(declaration(job, outcome), world)
    averages = {other: _gathered(outcome.averages.weights[other], keep=world.first) for other in others}

    def write() -> str:
        job.result.begin(kind, goal)
        save_network(network, job.result.folder)
        for other in others:
            job.result.write_tensors(f"average-{other}.safetensors", averages[other])
        if job.kind == "expert":
            job.result.write_tensors(density.FILE, density.of_shards(job.shards).tensors())
        made = job.result.commit(content)
        Checkpoints(job.run, job.name, {}, world).clear()
        print(f"{task.name}: done, {job.result.folder}", flush=True)
        return made.to_json().decode()

    return Manifest.from_values(json.loads(world.on_main(write)))


def _gathered(weights: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Return whole weights on the CPU, or nothing on a process that does not keep them; all processes take part."""
    gathered: dict[str, Tensor] = {}
    for key, value in weights.items():
        tensor = whole(value)
        if keep:
            gathered[key] = tensor.cpu()
    return gathered


def declaration(job: Job, outcome: Outcome) -> NetworkContent:
    """Return what a network of any kind declares, so that the ensemble needs no other knowledge."""
    return NetworkContent(
        **{name: getattr(job.shards.content, name) for name in DataSpec.model_fields},
        job=job.name,
        clusters=tuple(job.clusters),
        network=job.network,
        conditioning=tuple(sorted(job.told)),
        compute=compute(job, outcome),
    )


def compute(job: Job, outcome: Outcome) -> ComputeSpec:
    """Return what the job cost."""
    per_sample = job.cost.training_flops(job.settings.checkpointing)
    teacher = teacher_flops(job) if job.kind == "student" else 0
    return ComputeSpec(
        samples=job.settings.samples,
        parameters=job.cost.parameters,
        flops=(per_sample + teacher) * job.settings.samples,
        seconds=outcome.seconds,
    )


def teacher_flops(job: Job) -> int:
    """Forward FLOPs of the teachers for one sample, on average over the clusters."""
    sizes = job.shards.cluster_sizes()
    shapes = job.shapes
    total = 0
    for expert, size in enumerate(sizes):
        network = Artifact(job.run, layout.final(layout.expert_job(expert))).read(EXPERT).network
        total += size * cost(network, shapes.latents, shapes.text and shapes.text[:2]).forward_flops
    return total // sum(sizes)


def expert_flops(run: Path) -> int:
    """Training FLOPs of all finished experts of a run."""
    finals = [Artifact(run, layout.final(job)) for job in layout.jobs(run) if layout.is_expert(job)]
    found = [final.read(EXPERT).compute for final in finals if final.manifest() is not None]
    spent = [compute.flops for compute in found if compute is not None]
    if not spent:
        raise AtollError(f"{run} has no finished expert whose FLOPs could be matched; train them first")
    return sum(spent)
