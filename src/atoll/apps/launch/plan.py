"""The jobs of a run and their dependencies.

    encode -> clusters, text -> shards ──┬-> (start) -> experts -> student
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

Kind = Literal["prepare", "start", "experts", "router", "monolith", "student"]


@dataclass(frozen=True)
class Step:
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
    steps: tuple[Step, ...]
    needs: tuple[str, ...] = ()
    device: Literal["cpu", "gpu", "island"] = "island"
    """What a step can use: CPU cores only, one GPU, or all processes of an island."""

    def only(self, names: set[str]) -> "Group":
        """Return the group with only these steps."""
        return replace(self, steps=tuple(step for step in self.steps if step.name in names))


@dataclass(frozen=True)
class LaunchRequest:
    """The jobs that a user requests."""

    kinds: tuple[Kind, ...] = ("prepare", "experts", "router")
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
        config.objective(number)
    _check_teachers(run, config, request, numbers=numbers)
    training = [group for group in _training(run, config, request, numbers=numbers) if group.steps]
    wants_all = ("prepare" in request.kinds and not request.experts) or any(
        group.name != "experts" for group in training
    )
    clusters = range(config.clusters.count) if wants_all else numbers
    prepared = _has_shards(run, clusters)
    # Only if nothing else is requested: training jobs would go on with other data than they began with.
    if prepared and request.kinds == ("prepare",):
        from atoll.data.prepare import has_changed, open_job

        prepared = not has_changed(open_job(run, config))
    if (training or "prepare" in request.kinds) and not prepared:
        if "prepare" not in request.kinds:
            raise AtollError(f"{run} has no shards yet; prepare them too with --jobs prepare {' '.join(request.kinds)}")
        return _preparation(run, config, request) + training
    return training


def _check_teachers(run: Path, config: Config, request: LaunchRequest, *, numbers: Sequence[int]) -> None:
    """Raise an error if a student is requested and an expert is neither finished nor requested."""
    requested = set(numbers) if "experts" in request.kinds else set()
    others = [number for number in range(config.clusters.count) if number not in requested]
    absent = [number for number in others if Artifact(run, layout.final(layout.expert_job(number))).manifest() is None]
    if "student" in request.kinds and absent:
        raise AtollError(
            f"the student is distilled from all experts; {', '.join(map(str, absent))} are neither finished nor "
            "requested. Add them with --jobs experts student"
        )


def _has_shards(run: Path, clusters: Sequence[int]) -> bool:
    return all(Artifact(run, layout.shards(cluster)).manifest() for cluster in clusters)


def _training(run: Path, config: Config, request: LaunchRequest, *, numbers: Sequence[int]) -> list[Group]:
    """Return the requested training jobs that are not finished, and the shared start if requested experts need it."""
    shared = config.shared_start.flops_share > 0
    if "start" in request.kinds and not shared:
        raise AtollError(f"{run} has no shared start; set shared_start.flops_share, such as 0.25")

    def unfinished(job: str) -> bool:
        return Artifact(run, layout.final(job)).manifest() is None

    needs_start = shared and "experts" in request.kinds and any(unfinished(layout.expert_job(k)) for k in numbers)
    kinds = (*request.kinds, *(("start",) if needs_start else ()))
    needs = {"experts": ("start",) if shared else (), "student": ("experts",)}
    last = "shards" if request.prepare_workers > 1 else "prepare"
    commands: dict[Kind, list[tuple[str, int, tuple[str, ...]]]] = {
        "start": [("start", 0, ("--start",))],
        "experts": [(layout.expert_job(number), number, ("--expert", str(number))) for number in numbers],
        "router": [("router", 0, ("--router",))],
        "monolith": [("monolith", 0, ("--monolith",))],
        "student": [("student", 0, ("--student",))],
    }
    groups = []
    for kind, jobs in commands.items():
        images = config.total_images("expert" if kind == "experts" else cast(layout.JobKind, kind))
        steps = tuple(
            Step(name, index, ("train", str(run), *arguments, *request.options), images)
            for name, index, arguments in jobs
            if kind in kinds and unfinished(name)
        )
        groups.append(Group(kind, steps, (last, *needs.get(kind, ()))))
    return groups


def with_flops(run: Path, config: Config, groups: Sequence[Group]) -> list[Group]:
    """Return the same groups with the FLOPs of their training jobs, so that the longest can start first.

    A job that cannot be resolved gets 0. The shape of its latents may be unknown before the preparation; any other
    error is reported by the job itself. Counting imports torch, which takes seconds, so a single job is not counted.
    """
    if sum(step.images > 0 for group in groups for step in group.steps) < 2:
        return list(groups)
    from atoll.train.cost import image_cost
    from atoll.train.spec import resolve_job

    def flops(group: Group, step: Step) -> int:
        if not step.images:
            return 0
        number = layout.expert_number(step.name)
        kind = "expert" if number is not None else group.name
        try:
            spec = resolve_job(run, config, cast(layout.JobKind, kind), expert=number)
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
        return [Group("prepare", (Step("prepare", 0, ("prepare", str(run), *request.options)),), (), "gpu")]
    from atoll.data.prepare import open_job, stages_of
    from atoll.data.stages.base import Stage

    # Stages of the pass are one group: each of its workers decodes its images once.
    left = [stage for stage in stages_of(open_job(run, config)) if not (stage.unneeded() or stage.done())]
    members: dict[str, list[Stage]] = {}
    for stage in left:
        members.setdefault("encode" if stage.in_pass else stage.name, []).append(stage)
    group_of = {stage.name: name for name, stages in members.items() for stage in stages}

    def needs_of(stage: Stage) -> Iterator[str]:
        """Yield the groups to wait for; a stage that is left out is replaced by its own dependencies."""
        for earlier in stage.inputs:
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
            steps.append(Step(label, worker, ("prepare", str(run), *chosen, *option, *request.options)))
        needs = tuple(dict.fromkeys(need for stage in stages for need in needs_of(stage) if need != name))
        device: Literal["cpu", "gpu"] = "gpu" if any(stage.needs_gpu for stage in stages) else "cpu"
        groups.append(Group(name, tuple(steps), needs, device))
    return groups
