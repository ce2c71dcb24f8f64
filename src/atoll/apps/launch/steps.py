"""The jobs of a run and their dependencies.

    encode -> clusters, text -> shards ──┬-> (start) -> experts -> student, students
                                         ├-> router
                                         └-> monolith

`encode` is the pass over the images: the stages ingest, features, latents and patches of `atoll prepare`.

A step is one command of `atoll`. Steps of the same kind that do not depend on each other form a group, and groups
depend on groups. A step is finished if its artifact in the run has a manifest; no other state is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.errors import AtollError

GroupKind = Literal["prepare", "start", "experts", "router", "monolith", "student", "students"]
_JOB_KINDS: dict[GroupKind, layout.JobKind] = {
    "start": "start",
    "experts": "expert",
    "router": "router",
    "monolith": "monolith",
    "student": "student",
    "students": "student",
}
"""Kinds of the training jobs of each group, in order of dependency."""
_ONE_EACH = ("experts", layout.STUDENTS)
"""Groups with a job for each expert, which reads the shards of one cluster."""


@dataclass(frozen=True)
class JobStep:
    """One command. Its name is also that of its lease and log; for training jobs it is the job's folder in the run."""

    name: str
    index: int
    arguments: tuple[str, ...]
    images: int = 0
    """Number of images that a training job trains on."""
    flops: int = 0
    """FLOPs of a training job; 0 until `with_flops` has counted them."""


@dataclass(frozen=True)
class Group:
    """Steps of the same kind that can run in parallel."""

    name: str
    steps: tuple[JobStep, ...]
    needs: tuple[str, ...] = ()
    device: Literal["cpu", "gpu", "island"] = "island"
    """What a step can use: CPU cores only, one GPU, or all processes of an island."""


@dataclass(frozen=True)
class LaunchRequest:
    """The jobs that a user requests."""

    kinds: tuple[GroupKind, ...] = ("prepare", "experts", "router")
    experts: tuple[int, ...] = ()
    prepare_workers: int = 1
    overrides: Mapping[str, str] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The configuration overrides for every job, as options; those of `island` concern only the launcher."""
        given = (self.overrides or {}).items()
        return tuple(word for key, value in given if not key.startswith("island.") for word in (f"--{key}", value))


def missing_groups(run: Path, config: Config, request: LaunchRequest) -> list[Group]:
    """Return all groups with unfinished steps, in order of dependency; dependencies that are not listed are done."""
    numbers = request.experts or tuple(range(config.clusters.count))
    for number in numbers:
        config.objective(number)  # raises an error for a number that does not exist
    # Teachers
    requested = numbers if "experts" in request.kinds else ()
    for student, taught in (("student", range(config.clusters.count)), (layout.STUDENTS, numbers)):
        absent = [n for n in taught if n not in requested and _unfinished(run, layout.expert_job(n))]
        if student in request.kinds and absent:
            raise AtollError(
                f"{student}: distilled from experts, of which {', '.join(map(str, absent))} are neither finished nor "
                f"requested. Add them with --jobs experts {student}"
            )
    if layout.STUDENTS in request.kinds and not config.student.steps:
        raise AtollError("students have few steps; set student.steps, such as 4")
    training = [group for group in _training(run, config, request, numbers=numbers) if group.steps]
    # Shards: of all clusters, unless only some experts are trained
    wants_all = ("prepare" in request.kinds and not request.experts) or any(
        group.name not in _ONE_EACH for group in training
    )
    clusters = range(config.clusters.count) if wants_all else numbers
    prepared = all(Artifact(run, layout.shards(cluster)).manifest() for cluster in clusters)
    # Only if nothing else is requested: training jobs would go on with other data than they began with.
    if prepared and request.kinds == ("prepare",):
        from atoll.data.prepare import has_changed, open_preparation

        prepared = not has_changed(open_preparation(run, config))
    if prepared or not (training or "prepare" in request.kinds):
        return training
    if "prepare" not in request.kinds:
        raise AtollError(f"{run} has no shards yet; prepare them too with --jobs prepare {' '.join(request.kinds)}")
    return _preparation(run, config, request) + training


def _unfinished(run: Path, job: str) -> bool:
    return Artifact(run, layout.final(job)).manifest() is None


def _training(run: Path, config: Config, request: LaunchRequest, *, numbers: Sequence[int]) -> list[Group]:
    """Return the requested training jobs that are not finished, and the shared start if requested experts need it."""
    experts = [layout.expert_job(number) for number in numbers]
    shared, kinds = config.shared_start.flops_share > 0, set(request.kinds)
    if "start" in kinds and not shared:
        raise AtollError(f"{run} has no shared start; set shared_start.flops_share, such as 0.25")
    if shared and "experts" in kinds and any(_unfinished(run, job) for job in experts):
        kinds.add("start")
    shards = "shards" if request.prepare_workers > 1 else "prepare"
    needs = dict.fromkeys(("student", layout.STUDENTS), (shards, "experts"))
    needs |= {"experts": (shards, "start")} if shared else {}
    groups = []
    for name, kind in _JOB_KINDS.items():
        steps, job = [], {"experts": layout.expert_job, layout.STUDENTS: layout.student_job}.get(name)
        for number in numbers if job else (0,):
            option = [] if kind == "expert" else [f"--{kind}"]
            option += ["--expert", str(number)] if job else []
            step = JobStep(
                job(number) if job else kind,
                number,
                ("train", str(run), *option, *request.options),
                config.total_images(kind),
            )
            if name in kinds and _unfinished(run, step.name):
                steps.append(step)
        groups.append(Group(name, tuple(steps), needs.get(name, (shards,))))
    return groups


def with_flops(run: Path, config: Config, groups: Sequence[Group]) -> list[Group]:
    """Return the same groups with the FLOPs of their training jobs, so that the longest can start first.

    A job that cannot be resolved gets 0. The shape of its latents may be unknown before the preparation; any other
    error is reported by the job itself. Counting imports torch, which takes seconds, so a single job is not counted.
    """
    if sum(step.images > 0 for group in groups for step in group.steps) < 2:
        return list(groups)
    from atoll.experts.cost import image_cost
    from atoll.train.spec import resolve_job

    def flops(group: Group, step: JobStep) -> int:
        if not step.images:
            return 0
        number = step.index if group.name in _ONE_EACH else None
        try:
            spec = resolve_job(run, config, _JOB_KINDS[cast(GroupKind, group.name)], expert=number)
            cost = image_cost(spec.network, spec.shapes)
        except AtollError:
            return 0
        return spec.settings.total_images * cost.training_flops(spec.settings)

    return [
        replace(group, steps=tuple(replace(step, flops=flops(group, step)) for step in group.steps)) for group in groups
    ]


def _preparation(run: Path, config: Config, request: LaunchRequest) -> list[Group]:
    """Return the unfinished stages of preparation; with several workers, divide the divisible stages among them."""
    if request.prepare_workers == 1:
        return [Group("prepare", (JobStep("prepare", 0, ("prepare", str(run), *request.options)),), (), "gpu")]
    from atoll.data.prepare import open_preparation, stages_of
    from atoll.data.stages.stage import Stage

    # Stages of the pass are one group: each of its workers decodes its images once.
    left = [stage for stage in stages_of(open_preparation(run, config)) if not (stage.unneeded() or stage.done())]
    members: dict[str, list[Stage]] = {}
    for stage in left:
        members.setdefault("encode" if stage.in_pass else stage.name, []).append(stage)
    group_of = {stage.name: name for name, stages in members.items() for stage in stages}

    def needs_of(stage: Stage) -> Iterator[str]:
        """Yield the groups to wait for; a stage that is left out is replaced by its own dependencies."""
        for earlier in stage.earlier:
            yield from (group_of[earlier.name],) if earlier.name in group_of else needs_of(earlier)

    groups = []
    for name, stages in members.items():
        count = request.prepare_workers if all(stage.divisible for stage in stages) else 1
        count = min(count, config.clusters.count) if name == "shards" else count
        chosen = ("--stage", *(stage.name for stage in stages))
        steps = []
        for worker in range(count):
            option = ("--worker", f"{worker}/{count}") if count > 1 else ()
            label = f"prepare/{name}" + (f"-{worker}-of-{count}" if count > 1 else "")
            steps.append(JobStep(label, worker, ("prepare", str(run), *chosen, *option, *request.options)))
        needs = tuple(dict.fromkeys(need for stage in stages for need in needs_of(stage) if need != name))
        device: Literal["cpu", "gpu"] = "gpu" if any(stage.needs_gpu for stage in stages) else "cpu"
        groups.append(Group(name, tuple(steps), needs, device))
    return groups
