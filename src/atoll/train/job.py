"""Train a resolved job and commit its result.

    RUN/experts/003/            (also RUN/router, RUN/start, RUN/monolith, RUN/student)
        metrics.jsonl, grids/   metrics and previews
        checkpoints/            for resuming; removed after the result was committed
        final/                  the result: config.json, weights, manifest.json with its declaration

The job of an expert reads the shards of its cluster only, and the shared start if there is one. It writes its folder
only.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll import flow
from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, Kind, Manifest
from atoll.core.device import device as pick_device
from atoll.core.manifests import EXPERT, ROUTER, SHARDS, ComputeSpec, DataSpec, NetworkContent
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.experts import density
from atoll.nets import build, load_network, save_network
from atoll.nets.blocks import set_checkpointing
from atoll.train.align import Projector
from atoll.train.checkpoints import Checkpoints
from atoll.train.cost import image_cost
from atoll.train.distill import StudentTask
from atoll.train.distributed import DistContext, full_tensor, init_distributed
from atoll.train.loop import Outcome, TrainCallback, train
from atoll.train.spec import TrainSpec, made_from, shared_start
from atoll.train.tasks import ExpertTask, RouterTask, Task


def build_task(spec: TrainSpec) -> Task:
    """Open the data and build the network, initialized at random, from `init_from` or from the shared start."""
    torch.manual_seed(spec.settings.seed)
    network: nn.Module = build(spec.network)
    if spec.init_from is not None:
        network.load_state_dict(load_network(spec.init_from).state_dict())
    if spec.from_start:
        start = Artifact(spec.run, layout.final(layout.START))
        start.open(EXPERT, verify=True)
        network.load_state_dict(load_network(start.folder).state_dict())
    set_checkpointing(network, spec.settings.activation_checkpointing)
    shards, held_out = (Shards.open(spec.run, list(spec.clusters), split) for split in ("train", "held-out"))
    objective = flow.Objective() if spec.objective is None else flow.Objective.of(spec.objective)
    common: dict[str, Any] = {
        "name": spec.job,
        "network": network,
        "shards": shards,
        "held_out": held_out,
        "seed": spec.settings.seed,
        "objective": objective,
        "conditioning": spec.conditioning,
        "dropout": spec.settings.cfg_dropout,
    }
    if spec.kind == "router":
        return RouterTask(**common)
    if spec.kind == "student":
        batch_size = spec.settings.batch_size
        micro = batch_size // spec.settings.grad_accum_steps
        return StudentTask(**common, run=spec.run, block=spec.teacher_block, batch_size=batch_size, micro=micro)
    # Built after the network, so that its random weights do not change those of the network.
    return ExpertTask(**common, alignment=None if spec.align is None else Projector(spec.align))


def train_job(spec: TrainSpec, callback: TrainCallback | None = None) -> Manifest:
    """Train a job to its end; do nothing if its result exists."""
    kind: Kind[Any] = ROUTER if spec.kind == "router" else EXPERT
    for cluster in spec.clusters if spec.data is None else ():
        Artifact(spec.run, layout.shards(cluster)).open(SHARDS)  # raises an error that names missing shards
    image_cost(spec.network, spec.shapes)  # raises an error if the network does not fit the data
    # The total number of images belongs to the result, not to its checkpoints, so that a job can be prolonged. (With a
    # cosine schedule it changes the learning rate, and `made_from` includes it.)
    inputs = made_from(spec)
    goal = {**inputs, "images": spec.settings.total_images}

    def find_result() -> str | None:
        if not spec.result.check(kind, goal):
            return None
        # Left over if a job was killed between its commit and its end.
        shutil.rmtree(spec.run / layout.checkpoints(spec.job), ignore_errors=True)
        print(f"{spec.result.folder} exists already", flush=True)
        return spec.result.open(kind).to_json().decode()

    with init_distributed(pick_device()) as context:
        # The main process decides for all. If each process looked for the result, another job could commit it in
        # between, or a shared file system show it late; some processes would return and the others wait for them.
        if found := context.on_main(find_result):
            return Manifest.from_values(json.loads(found))
        task = build_task(spec)
        checkpoints = Checkpoints(spec.run, spec.job, inputs, context, spec.settings.keep_last)
        outcome = train(task, spec.settings, checkpoints, context=context, callback=callback)
        return _commit(spec, task, outcome, context=context, kind=kind, goal=goal)


def _commit(
    spec: TrainSpec, task: Task, outcome: Outcome, *, context: DistContext, kind: Kind[Any], goal: Inputs
) -> Manifest:
    """Write the result: the weights of an EMA in safetensors, and a manifest with the declaration.

    All processes gather the EMA weights, build the full network and share its validation. Then the main process hashes
    and writes while the others wait in the control group.
    """
    # The full network, with the weights of the EMA that is the result
    emas = outcome.ema.weights
    name = spec.settings.result_ema or next(iter(emas))
    network = build(spec.network)
    known = network.state_dict()  # without non-persistent buffers, such as computed positions
    buffers = {key: value for key, value in task.network.named_buffers() if key in known}
    network.load_state_dict({**buffers, **_gathered(emas[name])})
    others = {other: _gathered(emas[other], keep=context.is_main) for other in emas if other != name}

    # Its declaration, with calibration and validation
    finished = replace(task, network=network.to(context.device).eval())
    content = finished.finish(_declaration(spec, task, outcome), context).model_copy(update={"ema": name})
    if spec.from_start:
        content = content.model_copy(update={"start": shared_start(spec.run)})

    def write() -> str:
        made = spec.result.begin(kind, goal)
        if made is None:
            save_network(network, spec.result.folder)
            for other, weights in others.items():
                spec.result.write_tensors(f"ema-{other}.safetensors", weights)
            if spec.kind == "expert" and (fitted := density.fit_density(task.shards)):
                spec.result.write_tensors(density.DENSITY_FILE, fitted.tensors())
            made = spec.result.commit(content)
        else:
            # Files of two jobs must not be mixed: they round differently on different machines.
            print(f"{spec.job}: another job has finished it meanwhile; its result is kept", flush=True)
        Checkpoints(spec.run, spec.job, {}, context).clear()
        print(f"{spec.job}: done, {spec.result.folder}", flush=True)
        return made.to_json().decode()

    return Manifest.from_values(json.loads(context.on_main(write)))


def _gathered(weights: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Gather full weights on the CPU; with `keep` false, take part in the gathering but return nothing."""
    gathered: dict[str, Tensor] = {}
    for key, value in weights.items():
        # A collective under FSDP2, so it also runs on processes that drop the tensor.
        tensor = full_tensor(value)
        if keep:
            gathered[key] = tensor.cpu()
    return gathered


def _declaration(spec: TrainSpec, task: Task, outcome: Outcome) -> NetworkContent:
    """Return the part of the declaration that experts and routers have in common."""
    images = spec.settings.total_images

    def seen(first: int) -> dict[Size, int]:
        return task.shards.size_counts(first, task.seed, batch_size=spec.settings.batch_size)

    # By size: attention costs the square of the number of tokens, so a mean size would give another sum.
    flops = sum(
        count * image_cost(spec.network, spec.shapes.of_size(size)).training_flops(spec.settings)
        for size, count in seen(images).items()
    )
    if spec.kind == "student":
        flops += images * _teacher_flops(spec, task.shards)
    if spec.align is not None:
        flops += spec.align.burn_in_flops(task.shards, seen(min(images, spec.align.images)))
    parameters = image_cost(spec.network, spec.shapes).parameters
    return NetworkContent(
        **{name: getattr(task.shards.content, name) for name in DataSpec.model_fields},
        job=spec.job,
        clusters=spec.clusters,
        network=spec.network,
        conditioning=tuple(sorted(spec.conditioning)),
        compute=ComputeSpec(images=images, parameters=parameters, flops=flops, seconds=outcome.seconds),
    )


def _teacher_flops(spec: TrainSpec, shards: Shards) -> int:
    """Return the forward FLOPs of the teachers for one image, averaged over the images of all clusters."""
    total = 0
    for expert, numbers in shards.cluster_ranges().items():
        network = Artifact(spec.run, layout.final(layout.expert_job(expert))).read(EXPERT).network
        for size, own in shards.by_size(np.arange(numbers.start, numbers.stop)).items():
            total += len(own) * image_cost(network, spec.shapes.of_size(size)).forward_flops
    return total // len(shards)
