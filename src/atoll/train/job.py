"""Train a resolved job and commit its result.

    RUN/experts/003/            (also RUN/router, RUN/start, RUN/monolith, RUN/student, RUN/students/003)
        metrics.jsonl, grids/   metrics and previews
        checkpoints/            for resuming; removed after the result was committed
        final/                  the result: config.json, weights, manifest.json with its declaration

The job of an expert reads the shards of its cluster only, and the shared start if there is one. At its end it compares
the density of its cluster with those of other clusters, as far as they are on this machine. It writes its folder only.
"""

import copy
import json
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Inputs, Manifest
from atoll.core.device import device as pick_device
from atoll.core.distributed import DistContext, full_tensor, init_distributed
from atoll.core.manifests import EXPERT, ROUTER, SHARDS, ComputeSpec
from atoll.core.progress import say
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.density import DENSITY_FILE
from atoll.experts.cost import image_cost
from atoll.experts.run import CLUSTERS_FILE
from atoll.nets import DiT, build, save_network
from atoll.nets.blocks import set_checkpointing
from atoll.nets.io import load_initial
from atoll.nets.student import CLUSTERS, StudentNetwork, plain_weights
from atoll.train.align import Projector
from atoll.train.checkpoints import Checkpoints
from atoll.train.distill import StudentTask
from atoll.train.ema import EMA
from atoll.train.few_steps import FewStepTask
from atoll.train.loop import TrainCallback, train
from atoll.train.spec import TrainSpec, distillation_flops, made_from
from atoll.train.tasks import ExpertTask, RouterTask, Task


def build_task(spec: TrainSpec) -> Task:
    """Open the data and build the network, initialized at random, from `init_from` or from the shared start."""
    torch.manual_seed(spec.settings.seed)
    plain, initial = build(spec.network), spec.init_from
    if spec.from_start or spec.from_expert is not None:
        job = layout.START if spec.from_expert is None else layout.expert_job(spec.from_expert)
        artifact = Artifact(spec.run, layout.final(job))
        artifact.open(EXPERT, verify=True)
        initial = str(artifact.folder)
    if initial is not None:
        plain.load_state_dict(load_initial(initial).state_dict())
    set_checkpointing(plain, spec.settings.activation_checkpointing)
    network: nn.Module = as_trained(spec, plain)
    shards, validation = (Shards.open(spec.run, list(spec.clusters), split) for split in ("train", "validation"))
    # Built after the network, whose random weights it must not change.
    auxiliary: nn.Module | None = None if spec.align is None else Projector(spec.align)
    if spec.student is not None and spec.student.corrector:
        auxiliary = copy.deepcopy(plain)
        if spec.told_clusters:
            assert isinstance(auxiliary, DiT)
            auxiliary = StudentNetwork(auxiliary, length=False, clusters=spec.told_clusters)
    student = FewStepTask if spec.few_steps else StudentTask
    kinds: dict[str, type[Task]] = {"router": RouterTask, "student": student}
    return kinds.get(spec.kind, ExpertTask)(spec, network, shards, validation, auxiliary)


def as_trained(spec: TrainSpec, network: nn.Module) -> nn.Module:
    """Return the network as it is trained: that of a student may have parts that its result does not have."""
    if not (spec.few_steps or spec.told_clusters):
        return network
    assert isinstance(network, DiT)
    return StudentNetwork(network, length=spec.few_steps > 0, clusters=spec.told_clusters)


def train_job(spec: TrainSpec, callback: TrainCallback | None = None) -> Manifest:
    """Train a job to its end; do nothing if its result exists."""
    kind: ArtifactKind[Any] = ROUTER if spec.kind == "router" else EXPERT
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
        say(f"{spec.result.folder} exists already")
        return spec.result.open(kind).to_json().decode()

    with init_distributed(pick_device()) as processes:
        # The main process decides for all. If each process looked for the result, another job could commit it in
        # between, or a shared file system show it late; some processes would return and the others wait for them.
        made = processes.on_main(find_result)
        if made is None:
            task = build_task(spec)
            checkpoints = Checkpoints(spec.run, spec.job, inputs, processes, spec.settings.keep_last)
            ema, seconds = train(task, checkpoints, callback)
            made = commit(task, ema, seconds, processes=processes, kind=kind, goal=goal)
        return Manifest.from_values(json.loads(made))


def commit(
    task: Task, ema: EMA, seconds: float, *, processes: DistContext, kind: ArtifactKind[Any], goal: Inputs
) -> str:
    """Write the result: the weights of an EMA in safetensors, and a manifest, which is returned as JSON.

    All processes gather the EMA weights, build the full network and share its validation. Then the main process hashes
    and writes while the others wait in the control group.
    """
    spec = task.spec
    # The full network, with the weights of the EMA that is the result. Gathering is a collective under FSDP2, so all
    # processes gather all EMAs, but only the main process keeps the others.
    name = spec.result_ema
    gathered: dict[str, dict[str, Tensor]] = {}
    for other, weights in ema.weights.items():
        full = ((key, full_tensor(weight)) for key, weight in weights.items())
        gathered[other] = {key: weight.cpu() for key, weight in full if other == name or processes.is_main}
    network = as_trained(spec, build(spec.network))
    known = network.state_dict()  # without non-persistent buffers, such as computed positions
    buffers = {key: value for key, value in task.network.named_buffers() if key in known}
    own = {**buffers, **gathered.pop(name)}
    network.load_state_dict(own)

    # Its declaration, with calibration and validation
    compute = ComputeSpec(
        images=spec.settings.total_images,
        parameters=image_cost(spec.network, spec.shapes).parameters,
        flops=training_flops(task),
        seconds=seconds,
    )
    finished = replace(task, network=network.to(processes.device).eval())
    content = finished.finish(compute, processes).model_copy(update={"ema": name})

    def write() -> str:
        made = spec.result.begin(kind, goal)
        if made is None:
            length = 1 / spec.few_steps if spec.few_steps else None
            result: Any = network
            if isinstance(network, StudentNetwork):
                plain, result = plain_weights(own, length), build(spec.network)
                if CLUSTERS in plain:
                    spec.result.write_tensors(CLUSTERS_FILE, {CLUSTERS: plain.pop(CLUSTERS)})
                result.load_state_dict(plain)
            save_network(result, spec.result.folder)
            for other, weights in gathered.items():
                spec.result.write_tensors(f"ema-{other}.safetensors", plain_weights(weights, length))
            density = task.shards.artifacts[0].path(DENSITY_FILE)
            if spec.kind in ("expert", "student") and len(spec.clusters) == 1 and density.is_file():
                spec.result.write(DENSITY_FILE, density.read_bytes())
            made = spec.result.commit(content)
        else:
            # Files of two jobs must not be mixed: they round differently on different machines.
            say(f"{spec.job}: another job has finished it meanwhile; its result is kept")
        shutil.rmtree(spec.run / layout.checkpoints(spec.job), ignore_errors=True)
        say(f"{spec.job}: done, {spec.result.folder}")
        return made.to_json().decode()

    return processes.on_main(write)


def training_flops(task: Task) -> int:
    """Count the FLOPs of a finished job by image size: attention costs the square of the number of tokens."""
    spec, shards, images = task.spec, task.shards, task.spec.settings.total_images

    def seen(first: int) -> dict[Size, int]:
        return shards.size_counts(first, task.seed, batch_size=spec.settings.batch_size)

    flops = sum(
        count * image_cost(spec.network, spec.shapes.of_size(size)).training_flops(spec.settings)
        for size, count in seen(images).items()
    )
    if spec.align is not None:
        for size, count in seen(spec.align.images).items():
            patches = shards.read(shards.numbers(size, np.zeros(1)), patches=True).patches
            assert patches is not None
            stored = patches.shape[1], patches.shape[2]
            flops += count * spec.align.flops_of(spec.align.token_grid(size.height, size.width), stored)
    if spec.student is not None:
        # Forward passes of the teachers, averaged over the images of all clusters
        teachers = 0
        for expert, numbers in shards.cluster_ranges().items():
            network = Artifact(spec.run, layout.final(layout.expert_job(expert))).read(EXPERT).network
            for size, own in shards.by_size(np.arange(numbers.start, numbers.stop)).items():
                teachers += len(own) * image_cost(network, spec.shapes.of_size(size)).forward_flops
        flops += distillation_flops(spec, teachers // len(shards))
    return flops
