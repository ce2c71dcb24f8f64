"""Resolve a training job: from a run and its configuration to plain values.

    spec = resolve_job(run, config, "expert", expert=3)    # reads manifests and config.json files, no tensors
    train_job(spec)                                        # `atoll.train.job`

A dry run is the first call without the second. It works before the data is prepared: the shapes of the data are then
predicted from the configuration.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, differences
from atoll.core.config import Config
from atoll.core.config_sections import NetworkChoice, StudentSection, TrainSection
from atoll.core.device import compute_dtype, device, dtype_name
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, ObjectiveSpec, StartSpec, training_costs
from atoll.core.networks import (
    CLASS,
    CLASS_NAME,
    DEFAULT_NAME,
    NAMES,
    BaseConfig,
    DiffusersConfig,
    DiTConfig,
    NetworkConfig,
    OwnConfig,
    adapted,
    check_fits_data,
    lora_of,
    read_network,
)
from atoll.data.shapes import DataShapes, PreparedData
from atoll.encoders.autoencoder import Statistics
from atoll.encoders.base_pipeline import register_base
from atoll.experts.cost import image_cost
from atoll.flow import objective
from atoll.nets import build
from atoll.nets.own import allow
from atoll.train.align import AlignmentSpec

_NO_EFFECT = {
    *("total_images", "save_every", "keep_last", "log_every", "validate_every", "sample_every", "sample_count"),
    *("sample_guidance_scale", "workers", "trackers", "parallel", "compile", "activation_checkpointing"),
    *("grad_accum_steps", "init_from"),
}
"""Training settings that do not change the result beyond rounding, so that a job can resume with other values.
`init_from` is recorded separately, as the path for this job."""


@dataclass(frozen=True)
class TrainSpec:
    """Everything that defines one training job, as plain values."""

    run: Path
    kind: layout.JobKind
    job: str
    """The job's folder in the run."""
    clusters: tuple[int, ...]
    """The clusters whose data the job reads."""
    shapes: DataShapes
    """Shapes of the data, predicted before it is prepared."""
    data: PreparedData | None
    """None before the data is prepared."""
    conditioning: frozenset[str]
    """What the network is conditioned on: any of text, pooled, label and arguments."""
    network: NetworkConfig
    init_from: str | None
    """Folder of the network with the initial weights; None for random initialization."""
    from_start: bool
    """Whether the initial weights are those of the shared start."""
    from_expert: int | None
    """Number of the expert with the initial weights of a student."""
    objective: ObjectiveSpec | None
    """None for a router, and for a student that predicts velocities."""
    settings: TrainSection
    """The `train` section, overridden by the job's section: with total_images rounded up to full steps, and
    precision resolved, never auto."""
    align: AlignmentSpec | None
    """The alignment with patch features; None without, and for a router and a student."""
    student: StudentSection | None
    """How a student is distilled; None for other jobs."""

    @property
    def few_steps(self) -> int:
        """Number of steps of a few-step student; 0 for all other jobs."""
        return self.student.steps if self.student else 0

    @property
    def told_clusters(self) -> int:
        """Number of clusters that a student is told; 0 if it is told none."""
        return len(self.clusters) if self.student and self.student.cluster and len(self.clusters) > 1 else 0

    @property
    def result(self) -> Artifact:
        """The artifact of the result."""
        return Artifact(self.run, layout.final(self.job))

    @property
    def result_ema(self) -> str:
        """Name of the EMA that becomes the result, and that training validates and previews."""
        return self.settings.result_ema or next(iter(self.settings.ema))


def resolve_job(
    run: Path,
    config: Config,
    kind: layout.JobKind,
    *,
    expert: int | None = None,
    match_flops: Path | None = None,
) -> TrainSpec:
    """Resolve one job of a run. `match_flops` sets its total images to match the FLOPs of all experts of that run."""
    allow(run, config)
    # What the kind of job chooses
    job, clusters = kind if expert is None else layout.expert_job(expert), tuple(range(config.clusters.count))
    choice, origin = config.networks["default"], "networks.default"
    objective_choice, student = None, config.student if kind == "student" else None  # routers and students have none
    if kind == "expert":
        assert expert is not None
        objective_choice, clusters = config.objective(expert), (expert,)  # raises an error for a missing expert
        choice, origin = config.network(expert), f"networks.{expert}" if expert in config.networks else origin
    elif student is not None and expert is not None:
        config.objective(expert)  # raises an error for a missing expert
        job, clusters = layout.student_job(expert), (expert,)
        choice, origin = config.network(expert), f"networks.{expert}" if expert in config.networks else origin
        if not student.steps:
            raise AtollError("a student of one expert has few steps; set student.steps, such as 4")
    elif student is not None and student.network:
        choice, origin = student.network, "student.network"
    elif kind == "router":
        choice, origin = config.router.network, "router.network"
    if kind in ("start", "monolith", "merged"):
        objective_choice = config.experts["default"]
    if kind == "start" and not config.shared_start.flops_share:
        raise AtollError("this run has no shared start; set shared_start.flops_share, such as 0.25")
    init_from = None if kind == "router" else config.init_from(expert)
    from_start, from_expert = kind == "expert" and config.shared_start.flops_share > 0, None
    if student is not None:
        given = student.init_from or (None if expert is None else f"expert:{expert}")
        from_start = given == layout.START
        if given is not None and given.startswith("expert:"):
            from_expert = layout.expert_number(layout.model_job(given))
        if given is not None:
            init_from = None if from_start or from_expert is not None else given
        # A student predicts velocities, or what the network predicts whose weights it begins with. The noise that an
        # epsilon or a score stands for says nothing about the velocity at t = 1, where a student's first step begins.
        if from_start or from_expert is not None:
            objective_choice = config.experts["default"] if from_expert is None else config.objective(from_expert)
            objective_choice = None if objective_choice.prediction in ("epsilon", "score") else objective_choice
    origin = init_from or origin

    # Data and network
    data = PreparedData.read(run, clusters)
    shapes = DataShapes.expected(config) if data is None else DataShapes.of(data.content, data.by_size)
    conditioning = _conditioning(config, kind, shapes, choice)
    network = _network(
        config, kind, choice, origin=origin, init_from=init_from, shapes=shapes, data=data, use=conditioning
    )
    if from_start or from_expert is not None:
        name = layout.START if from_expert is None else layout.expert_job(from_expert)
        initial = Artifact(run, layout.final(name))
        if initial.manifest() is not None and (found := initial.read(EXPERT).network) != network:
            changes = "; ".join(differences(found.to_dict(), network.to_dict()))
            what = "the shared start" if from_expert is None else name
            raise AtollError(f"{job} has another network than {what} it begins with: {changes}")
    if student is not None and (student.steps or student.cluster) and not isinstance(network, DiTConfig):
        raise AtollError(
            f"a student that is told its step or its cluster is a DiT, and {origin} is a {network.class_name}; set "
            "student.network"
        )

    if student is not None and student.corrector and not (student.steps and (student.cluster or len(clusters) == 1)):
        raise AtollError(
            "student.corrector needs a few-step student of one expert, or one that is told the cluster: samples of all "
            "clusters are not distributed as those of one teacher"
        )

    # Objective
    parts = objective_choice.model_dump() if objective_choice else {}
    if isinstance(network, BaseConfig) and kind == "student" and network.trace.prediction != "velocity":
        raise AtollError(f"a student predicts velocities, and its base {network.trace.prediction}; set student.network")
    if isinstance(network, BaseConfig) and parts:
        if "experts" in config.model_fields_set:
            network.trace.check_objective(parts["schedule"], parts["prediction"])
        parts |= {"schedule": network.trace.schedule, "prediction": network.trace.prediction}

    # Settings
    settings = job_settings(config, kind)
    if settings.optimizer == "muon" and not image_cost(network, shapes).muon_flops:
        raise AtollError(
            f"{origin}: muon trains the matrices of transformer blocks, and a {network.class_name} has none; set "
            "train.optimizer: adamw"
        )
    until, align = 0.0, None
    if settings.align is not None and not from_start:  # experts with a shared start had their burn-in there
        until = settings.align.until
        align = AlignmentSpec.of(
            settings.align,
            network,
            None if data is None else data.content,
            side=shapes.side,
            dimensions=config.features.patch_dimensions,
        )
    images = settings.total_images
    if match_flops is not None:
        per_image = image_cost(network, shapes).training_flops(settings) + (until * align.flops if align else 0)
        images = int(expert_flops(match_flops) // per_image)
    # Rounded up, so that every step has a full batch.
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
        init_from=None if from_start else init_from,
        from_start=from_start,
        from_expert=from_expert,
        objective=objective(**parts).spec if parts else None,
        settings=TrainSection.model_validate({**settings.model_dump(), "total_images": steps * settings.batch_size}),
        align=align and replace(align, images=math.ceil(steps * until) * settings.batch_size),
        student=student,
    )


def made_from(spec: TrainSpec) -> Inputs:
    """Return the inputs of the result; a job can resume only from checkpoints with the same inputs."""
    settings = spec.settings.model_dump()
    # A constant rate does not depend on total_images, so the job may be prolonged. A cosine ends at total_images.
    if settings["lr_schedule"] == "constant":
        settings.pop("lr_schedule")
    else:
        settings["cosine_images"] = settings["total_images"]
    settings["result_ema"] = spec.result_ema
    # Images instead of a share of total_images: a job may be prolonged if its burn-in and weak network stay the same.
    settings.pop("align")
    if settings.pop("weak_share"):
        settings["weak_images"] = spec.settings.weak_images
    if spec.align is not None:
        settings["align"] = {key: getattr(spec.align, key) for key in ("weight", "block", "images")}
    return {
        "job": spec.job,
        "data": list(spec.data.digests) if spec.data else [],
        "network": spec.network.to_dict(),
        "objective": spec.kind if spec.objective is None else spec.objective.model_dump(),
        "train": {key: value for key, value in settings.items() if key not in _NO_EFFECT},
        "init_from": spec.init_from,
        **({"teachers": teachers(spec.run, spec.clusters), "student": _of_student(spec)} if spec.student else {}),
        **({"start": shared_start(spec.run).manifest} if spec.from_start else {}),
    }


def _of_student(spec: TrainSpec) -> Inputs:
    """Return how a student is distilled, as far as it changes the result."""
    assert spec.student is not None
    chosen = spec.student.model_dump(include={"cluster", "steps", "guidance_scale", "corrector"})
    return {**chosen, "from_expert": spec.from_expert}


def shared_start(run: Path) -> StartSpec:
    """Return the finished shared start of a run."""
    artifact = Artifact(run, layout.final(layout.START))
    if artifact.manifest() is None:
        raise AtollError(f"{run} has no finished shared start, which experts begin with: atoll train {run} --start")
    compute = artifact.read(EXPERT).compute
    assert compute is not None
    return StartSpec(manifest=artifact.open(EXPERT).digest, compute=compute)


def teachers(run: Path, clusters: tuple[int, ...]) -> list[str]:
    """Return the digests of a student's teachers, the experts of these clusters."""
    return [Artifact(run, layout.final(layout.expert_job(expert))).open(EXPERT).digest for expert in clusters]


def distillation_flops(spec: TrainSpec, teacher: int) -> int:
    """Return the FLOPs of a student's job beyond its forward and backward passes.

    `teacher` is the number of FLOPs of a teacher's forward pass for the mean image; guidance needs two of them.
    """
    assert spec.student is not None
    guided = spec.few_steps and spec.student.guidance_scale != 1 and spec.conditioning
    images, steps = spec.settings.total_images, spec.few_steps
    corrected = int(images * spec.student.corrector)
    # Passes of a few-step student without gradients: two for a derivative, and for an image of step i the i before it.
    # A corrected image has made all steps but the last, and the online velocity has a forward and a backward pass.
    passes = (images - corrected) * (steps + 3) // 2 + corrected * (steps + 2) if steps else 0
    forward = image_cost(spec.network, spec.shapes).forward_flops
    return images * teacher * (2 if guided else 1) + passes * forward


def expert_flops(run: Path) -> int:
    """Return the training FLOPs of all finished experts of a run, and of their shared start."""
    finals = [Artifact(run, layout.final(job)) for job in layout.jobs(run) if layout.is_expert(job)]
    spent = training_costs(final.read(EXPERT) for final in finals if final.manifest() is not None)
    if not spent:
        raise AtollError(f"{run} has no finished expert to match the FLOPs of; train the experts first")
    return sum(one.flops for one in spent)


def job_settings(config: Config, kind: layout.JobKind) -> TrainSection:
    """Return the `train` section, overridden by the section of the job, with the precision of this machine for auto."""
    sections = {"router": config.router, "monolith": config.monolith, "student": config.student}
    own = {**sections, "start": config.shared_start}.get(kind)
    shared = set(TrainSection.model_fields) - {"conditioning"}
    changes = own.model_dump(include=shared, exclude_none=True) if own else {}
    changes["total_images"] = config.total_images(kind)
    if kind == "router":
        changes["activation_checkpointing"] = False  # the router is small
    if kind in ("router", "student"):
        changes["align"] = None
    if kind not in ("expert", "monolith"):
        changes["weak_share"] = 0.0
    changes["precision"] = dtype_name(compute_dtype(device(), config.train.precision))
    return config.train.model_copy(update=changes)


def _conditioning(config: Config, kind: layout.JobKind, shapes: DataShapes, network: NetworkChoice) -> frozenset[str]:
    """Return what a network is conditioned on: any of text, pooled, label and arguments."""
    router = kind == "router"
    choice: str = config.router.conditioning if router else config.train.conditioning
    if choice == "auto":
        # A router classifies the image as a whole, for which one vector of the caption suffices.
        text = "pooled" if router else "text"
        choice = text if shapes.text else "label" if shapes.labels else "none"
    parts = {"both": {"text", "label"}, "none": set()}.get(choice, {choice})
    if parts & {"text", "pooled"} and not shapes.text:
        raise AtollError(f"the {kind} is conditioned on text, but the data has none; set text.encoder")
    if "label" in parts and not shapes.labels:
        raise AtollError(f"the {kind} is conditioned on labels, but the data has none")
    if isinstance(network, dict) and "base" in network and not router:
        return frozenset({"arguments"})
    # The MMDiT of SD3 takes the pooled caption besides the tokens.
    fields = network if isinstance(network, dict) else {}
    takes_pooled = fields.get("pooled_width") or fields.get("pooled_projection_dim")
    return frozenset({*parts, "pooled"} if takes_pooled and not router and "text" in parts else parts)


def _network(
    config: Config,
    kind: layout.JobKind,
    choice: NetworkChoice,
    *,
    origin: str,
    init_from: str | None,
    shapes: DataShapes,
    data: PreparedData | None,
    use: frozenset[str],
) -> NetworkConfig:
    """Return the network of `init_from`, or else of a named size or fields, checked against the data.

    `use` is the conditioning. `origin` is the setting or folder of the network, for errors.
    """
    # The fields that the data determines
    needed = {"channels": shapes.latents[0], "size": shapes.side}
    if "label" in use:
        needed["num_classes"] = len(shapes.labels)
    if kind == "router":
        needed["experts"] = config.clusters.count
        if "pooled" in use and shapes.text:
            needed["pooled_width"] = shapes.text.pooled
    else:
        needed["out_channels"] = shapes.latents[0]
        if "text" in use and shapes.text:
            needed["text_width"] = shapes.text.dimensions
    if kind != "router" and isinstance(choice, dict) and "base" in choice:
        base = data.content.text.base if data is not None and data.content.text else None
        if not isinstance(base, BaseConfig):
            raise AtollError(f"{origin}: the data is not prepared for a base network; run atoll prepare first")
        if register_base(config.text.encoder) != base.weights:
            raise AtollError(f"{origin}: {choice['base']} is not the base that the data was prepared for")
        return replace(base, lora=lora_of(choice))
    if init_from is None:
        network = _fitted_network("Router" if kind == "router" else "DiT", choice, needed, origin=origin)
    else:
        # Its resolution may differ: a DiT resizes its position embedding.
        file = Path(init_from) / "config.json"
        if not file.is_file():
            raise AtollError(
                f"{init_from} has no config.json; expected a network folder of atoll convert, atoll train or diffusers"
            )
        network = read_network(adapted(json.loads(file.read_text(encoding="utf-8"))))
        given = network.to_dict()
        if isinstance(network, DiffusersConfig):
            check_fits_data(given, {"in_channels": needed["channels"], "out_channels": needed["channels"]})
        for name in ("channels", "text_width", "num_classes"):
            if name in given and given[name] != needed.get(name, 0):
                raise AtollError(
                    f"{file}: {name} is {given[name]}, but the data of this run needs {needed.get(name, 0)}"
                )

    # Classes: the table of a diffusers network needs a row for the null class, which else the last class would be taken
    # for. DiT adds it itself.
    if isinstance(network, DiffusersConfig):
        classes = needed.get("num_classes", 0)
        rows = {"UNetExpert": ("num_class_embeds", classes + 1), "DiTExpert": ("num_embeds_ada_norm", classes)}
        field, count = rows.get(network.class_name, ("", 0))
        embedded = network.fields.get(field)
        if classes and isinstance(embedded, int) and embedded < count:
            raise AtollError(
                f"{network.class_name}: {field} is {embedded}, but {classes} classes and the null class need {count}"
            )
        return network

    # Normalization
    scale = network.normalization if isinstance(network, DiTConfig) else None
    if scale is not None:
        same = config.latents.normalization == "scale"
        if data is not None:  # before the data is prepared, only the setting is known
            normalized = Statistics.of_scale(scale, data.content.latents.shape[0])
            same = Statistics.of(data.content.statistics) == normalized
        if not same:
            raise AtollError(
                f"{origin}: this network was trained on latents normalized as {scale}, and this run normalizes them "
                "differently; set latents.normalization: scale, with the autoencoder that the network was trained "
                "with, and prepare another run. To use it nevertheless, remove normalization from its config.json"
            )
    return network


def _fitted_network(
    kind: Literal["DiT", "Router"], choice: NetworkChoice, needed: dict[str, int], *, origin: str
) -> NetworkConfig:
    """Return a network by named size or fields, with the fields that the data needs; errors name its `origin`."""
    parts = {"name": choice} if isinstance(choice, str) else dict(choice)
    try:
        if CLASS in parts and kind == "DiT":
            known = {name: value for name, value in needed.items() if name not in ("size", "out_channels")}
            check_fits_data(parts, known)
            return OwnConfig.from_dict({**known, **parts})
        if parts.get(CLASS_NAME, kind) != kind:
            # The channels of a diffusers model, if given, must be those of the latents.
            channels = {"in_channels": needed["channels"], "out_channels": needed["channels"]}
            check_fits_data(parts, channels)
            config = read_network({**channels, **parts})
            with torch.device("meta"):
                build(config)
            return config
        check_fits_data(parts, needed)
        given = {name: value for name, value in parts.items() if name != "name"}
        return read_network({CLASS_NAME: kind, **NAMES[parts.get("name", DEFAULT_NAME)], **needed, **given})
    except AtollError as error:
        raise AtollError(f"{origin}: {error}") from error
