"""Resolve a training job: from a run and its configuration to plain values.

    spec = resolve_job(run, config, "expert", expert=3)    # reads manifests and config.json files, no tensors
    train_job(spec)                                        # `atoll.train.job`

A dry run is the first call without the second. It works before the data is prepared: the shapes of the data are then
those that the configuration leads one to expect.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.config import Config
from atoll.core.config_sections import NetworkChoice, Train
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, SHARDS, ObjectiveSpec, ShardsContent
from atoll.core.networks import (
    CLASS_NAME,
    DEFAULT_NAME,
    NAMES,
    DiffusersConfig,
    NetworkConfig,
    RouterConfig,
    check_fits_data,
    read_network,
)
from atoll.data.stages.latents import Statistics
from atoll.flow import objective
from atoll.nets import build
from atoll.train.cost import image_cost
from atoll.train.data_shapes import DataShapes

_NO_EFFECT = {"total_images", "save_every", "keep_last", "log_every", "sample_every", "sample_count"}
_NO_EFFECT |= {"sample_guidance_scale"}
_NO_EFFECT |= {
    "workers",
    "trackers",
    "parallel",
    "compile",
    "activation_checkpointing",
    "grad_accum_steps",
    "init_from",
}
"""Settings of training that do not change its result beyond rounding: a job may resume with others. `init_from` is
recorded as the one path that this job starts from."""


@dataclass(frozen=True)
class PreparedData:
    """The data of a job, as its shards declare it."""

    content: ShardsContent
    images: int
    """Images to train on."""
    digests: tuple[str, ...]
    """Those of the shards' manifests."""


@dataclass(frozen=True)
class TrainSpec:
    """Everything that one training job needs."""

    run: Path
    kind: layout.JobKind
    job: str
    """The job's folder in the run."""
    clusters: tuple[int, ...]
    """The clusters whose data the job needs."""
    shapes: DataShapes
    """Those of the data or, before it is prepared, those to be expected."""
    data: PreparedData | None
    """None before the shards are made."""
    conditioning: frozenset[str]
    """What the network is conditioned on: any of text, pooled and label."""
    network: NetworkConfig
    init_from: str | None
    """The folder of a network to start from."""
    objective: ObjectiveSpec | None
    """None for a router and a student."""
    settings: Train
    """`train` with the job's own section on top, in whole steps."""
    teacher_block: int
    """Images whose teacher velocities a student computes at a time."""

    @property
    def result(self) -> Artifact:
        """Where the result goes."""
        return Artifact(self.run, layout.final(self.job))


def resolve_job(
    run: Path,
    config: Config,
    kind: layout.JobKind,
    *,
    expert: int | None = None,
    match_flops: Path | None = None,
) -> TrainSpec:
    """Resolve one job of a run. With `match_flops` it trains for as many FLOPs as all experts of that run together."""
    job, clusters = kind if expert is None else layout.expert_job(expert), tuple(range(config.clusters.count))
    choice, key = config.networks["default"], "networks.default"
    if kind == "expert":
        assert expert is not None
        objective_choice, clusters = config.objective(expert), (expert,)  # refuses an expert that is not there
        choice, key = config.network(expert), f"networks.{expert}" if expert in config.networks else key
    elif kind == "student" and config.student.network:
        choice, key = config.student.network, "student.network"
    elif kind == "router":
        choice, key = config.router.network, "router.network"
    if kind == "monolith":
        objective_choice = config.experts["default"]
    init_from = None if kind == "router" else config.init_from(expert)

    data = _read_data(run, clusters)
    shapes = DataShapes.expected(config) if data is None else DataShapes.of(data.content)
    conditioning = _conditioning(config, kind, shapes, takes_pooled=_takes_pooled(choice))
    needed = _needed_fields(config, kind, shapes, conditioning=conditioning)
    if kind == "router":
        network = _fitted_network("Router", choice, needed, key=key)
    elif init_from is not None:
        network, key = _initial_network(init_from, needed), init_from
    else:
        network = _fitted_network("DiT", choice, needed, key=key)
    _check_network(network, config, data, classes=needed.get("num_classes", 0), key=key)

    settings = job_settings(config, kind)
    images = settings.total_images
    if match_flops is not None:
        images = expert_flops(match_flops) // image_cost(network, shapes).training_flops(
            settings.activation_checkpointing
        )
    steps = max(1, -(-images // settings.batch_size))
    return TrainSpec(
        run=run,
        kind=kind,
        job=job,
        clusters=clusters,
        shapes=shapes,
        data=data,
        conditioning=conditioning,
        network=network,
        init_from=init_from,
        objective=objective(**objective_choice.model_dump()).spec if kind in ("expert", "monolith") else None,
        settings=Train.model_validate({**settings.model_dump(), "total_images": steps * settings.batch_size}),
        teacher_block=config.student.block,
    )


def made_from(spec: TrainSpec) -> Inputs:
    """Return what the result is made from; a job that resumes must agree with its checkpoints on all of it."""
    settings = spec.settings.model_dump()
    if settings["lr_schedule"] == "constant":
        settings.pop("lr_schedule")
    else:
        settings["cosine_images"] = settings["total_images"]
    return {
        "job": spec.job,
        "data": list(spec.data.digests) if spec.data else [],
        "network": spec.network.to_dict(),
        "objective": spec.kind if spec.objective is None else spec.objective.model_dump(),
        "train": {key: value for key, value in settings.items() if key not in _NO_EFFECT},
        "init_from": spec.init_from,
        **({"teachers": teachers(spec.run, spec.clusters)} if spec.kind == "student" else {}),
    }


def teachers(run: Path, clusters: tuple[int, ...]) -> list[str]:
    """Return the digests of the experts that a student learns from."""
    return [Artifact(run, layout.final(layout.expert_job(expert))).open(EXPERT).digest for expert in clusters]


def expert_flops(run: Path) -> int:
    """Return the training FLOPs of all finished experts of a run."""
    finals = [Artifact(run, layout.final(job)) for job in layout.jobs(run) if layout.is_expert(job)]
    found = [final.read(EXPERT).compute for final in finals if final.manifest() is not None]
    spent = [compute.flops for compute in found if compute is not None]
    if not spent:
        raise AtollError(f"{run} has no finished expert whose FLOPs could be matched; train them first")
    return sum(spent)


def _read_data(run: Path, clusters: tuple[int, ...]) -> PreparedData | None:
    """Read the manifests of the shards; None before they are made."""
    artifacts = [Artifact(run, layout.shards(cluster)) for cluster in clusters]
    if artifacts[0].manifest() is None:
        return None
    manifests = [artifact.open(SHARDS) for artifact in artifacts]
    contents = [SHARDS.parse(made, own.folder) for own, made in zip(artifacts, manifests, strict=True)]
    images = sum(content.rows["train"] for content in contents)
    return PreparedData(contents[0], images, tuple(manifest.digest for manifest in manifests))


def job_settings(config: Config, kind: layout.JobKind) -> Train:
    """Return the `train` section, overridden by the section of the job."""
    own = {"router": config.router, "monolith": config.monolith, "student": config.student}.get(kind)
    changes = own.model_dump(include=set(Train.model_fields) - {"conditioning"}, exclude_none=True) if own else {}
    if kind == "router":
        changes["activation_checkpointing"] = False  # the router is small
    return config.train.model_copy(update=changes)


def _conditioning(config: Config, kind: layout.JobKind, shapes: DataShapes, *, takes_pooled: bool) -> frozenset[str]:
    """Return what a network is conditioned on: any of text, pooled and label."""
    router = kind == "router"
    choice: str = config.router.conditioning if router else config.train.conditioning
    if choice == "auto":
        text = "pooled" if router else "text"
        choice = text if shapes.text else "label" if shapes.labels else "none"
    parts = {"both": {"text", "label"}, "none": set()}.get(choice, {choice})
    if parts & {"text", "pooled"} and not shapes.text:
        raise AtollError(f"the {kind} is to be conditioned on text, but the data has none; set text.encoder")
    if "label" in parts and not shapes.labels:
        raise AtollError(f"the {kind} is to be conditioned on labels, but the data has none")
    return frozenset({*parts, "pooled"} if takes_pooled and not router and "text" in parts else parts)


def _takes_pooled(choice: NetworkChoice) -> bool:
    """Whether a network takes one vector of the caption besides its tokens, as the MMDiT of SD3 does."""
    return isinstance(choice, dict) and bool(choice.get("pooled_width") or choice.get("pooled_projection_dim"))


# The network


NeededFields = dict[str, int]
"""The fields of a network that the data decides, by name."""


def _needed_fields(
    config: Config, kind: layout.JobKind, shapes: DataShapes, *, conditioning: frozenset[str]
) -> NeededFields:
    needed: NeededFields = {"channels": shapes.latents[0], "size": shapes.latents[-1]}
    if "label" in conditioning:
        needed["num_classes"] = len(shapes.labels)
    if kind == "router":
        needed["experts"] = config.clusters.count
        if "pooled" in conditioning and shapes.text:
            needed["pooled_width"] = shapes.text.pooled
        return needed
    needed["out_channels"] = shapes.latents[0]
    if "text" in conditioning and shapes.text:
        needed["text_width"] = shapes.text.dimensions
    return needed


def _fitted_network(
    kind: Literal["DiT", "Router"], choice: NetworkChoice, needed: NeededFields, *, key: str
) -> NetworkConfig:
    """Return a network from a named size or its fields, fitted to the data; `key` is its name in the configuration."""
    parts = {"name": choice} if isinstance(choice, str) else dict(choice)
    try:
        if parts.get(CLASS_NAME, kind) != kind:
            # Where a diffusers model names its channels, they must be those of the latents.
            check_fits_data(parts, {"in_channels": needed["channels"], "out_channels": needed["channels"]})
            config = read_network(parts)
            with torch.device("meta"):
                build(config)
            return config
        check_fits_data(parts, needed)
        given = {name: value for name, value in parts.items() if name != "name"}
        return read_network({CLASS_NAME: kind, **NAMES[parts.get("name", DEFAULT_NAME)], **needed, **given})
    except AtollError as error:
        raise AtollError(f"{key}: {error}") from error


def _initial_network(folder: str, needed: NeededFields) -> NetworkConfig:
    """Read the network to start from; at another resolution it resizes its positions by itself."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise AtollError(f"{folder} has no config.json; expected a network as atoll convert or atoll train write it")
    network = read_network(json.loads(file.read_text(encoding="utf-8")))
    given = network.to_dict()
    for key in ("channels", "text_width", "num_classes"):
        if key in given and given[key] != needed.get(key, 0):
            raise AtollError(f"{file}: {key} is {given[key]}, this run's data needs {needed.get(key, 0)}")
    return network


def _check_network(
    network: NetworkConfig, config: Config, data: PreparedData | None, *, classes: int, key: str
) -> None:
    """Refuse a network with too few classes, or for latents that are normalized in another way than the run's."""
    if isinstance(network, DiffusersConfig):
        _check_classes(network, classes)
        return
    scale = network.normalization
    if scale is None or isinstance(network, RouterConfig):
        return
    same = config.latents.normalization == "scale"
    if data is not None:  # else the data is not prepared yet, and only the setting is known
        content = data.content
        same = Statistics.of(content.statistics) == Statistics.of_scale(scale, content.latents.shape[0])
    if not same:
        raise AtollError(
            f"{key}: this network was trained on latents normalized as {scale}, and this run normalizes them "
            "otherwise; set latents.normalization: scale, with the autoencoder that the network was trained with, "
            "and prepare the shards again. To start from it all the same, remove normalization from its config.json"
        )


def _check_classes(network: DiffusersConfig, classes: int) -> None:
    """Refuse a diffusers network whose class table is too small: its null class would be the last class of the data."""
    rows = {"UNetExpert": ("num_class_embeds", classes + 1), "DiTExpert": ("num_embeds_ada_norm", classes)}
    field, needed = rows.get(network.class_name, ("", 0))
    given = network.fields.get(field)
    if classes and isinstance(given, int) and given < needed:
        raise AtollError(
            f"{network.class_name}: {field} is {given}, but {classes} classes and the null class need {needed}"
        )
