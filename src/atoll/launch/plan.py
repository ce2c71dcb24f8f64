"""The jobs of a run and what they wait for.

    ingest -> features -> clusters ─┐                ┌-> experts -> student
       └────> latents, text ────────┴─> shards ──────┼-> router
                                                     └-> monolith

A step is one command of `atoll`. Steps that are alike and do not wait for one another form a group; groups wait for
groups. What is finished is told by the run's artifacts alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.errors import AtollError

Kind = Literal["prepare", "experts", "router", "monolith", "student"]


@dataclass(frozen=True)
class Step:
    """One command. Its name is that of its lease and its log; a training job's is its folder in the run."""

    name: str
    index: int
    arguments: tuple[str, ...]
    images: int = 0
    """Images that a training job sees."""
    flops: int = 0
    """FLOPs of a training job; 0 until `with_flops` has counted them."""


@dataclass(frozen=True)
class Group:
    """Steps that are alike and can run side by side."""

    name: str
    steps: tuple[Step, ...]
    needs: tuple[str, ...] = ()
    device: Literal["cpu", "gpu", "island"] = "island"
    """What a step can use: cores only, one GPU, or all processes of an island."""

    def only(self, names: set[str]) -> "Group":
        """The same group with these of its steps."""
        return replace(self, steps=tuple(step for step in self.steps if step.name in names))


@dataclass(frozen=True)
class Wish:
    """What someone wants done."""

    kinds: tuple[Kind, ...] = ("prepare", "experts", "router")
    experts: tuple[int, ...] = ()
    shares: int = 1
    overrides: Mapping[str, str] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The dotted options that every job is given; those of the island are the launcher's own affair."""
        given = (self.overrides or {}).items()
        return tuple(word for key, value in given if not key.startswith("island.") for word in (f"--{key}", value))


def missing_groups(run: Path, config: Config, wish: Wish) -> list[Group]:
    """Every group with something left to do, each after those it needs; a need that is not among them is met."""
    numbers = wish.experts or tuple(range(config.clusters.count))
    for number in numbers:
        config.objective(number)
    _check_teachers(run, config, wish, numbers=numbers)
    training = [group for group in _training(run, config, wish, numbers=numbers) if group.steps]
    wants_all = ("prepare" in wish.kinds and not wish.experts) or any(group.name != "experts" for group in training)
    clusters = range(config.clusters.count) if wants_all else numbers
    if (training or "prepare" in wish.kinds) and not _has_shards(run, clusters):
        if "prepare" not in wish.kinds:
            raise AtollError(f"{run} has no shards yet; let them be made too: --jobs prepare {' '.join(wish.kinds)}")
        return _preparation(run, config, wish) + training
    return training


def _check_teachers(run: Path, config: Config, wish: Wish, *, numbers: Sequence[int]) -> None:
    """A student waits for the experts that are trained with it; all others must be there."""
    along = set(numbers) if "experts" in wish.kinds else set()
    others = [number for number in range(config.clusters.count) if number not in along]
    absent = [number for number in others if Artifact(run, layout.final(layout.expert_job(number))).manifest() is None]
    if "student" in wish.kinds and absent:
        raise AtollError(
            f"the student learns from all experts; {', '.join(map(str, absent))} are neither finished nor asked for. "
            "Add them: --jobs experts student"
        )


def _has_shards(run: Path, clusters: Sequence[int]) -> bool:
    return all(Artifact(run, layout.shards(cluster)).manifest() for cluster in clusters)


def _training(run: Path, config: Config, wish: Wish, *, numbers: Sequence[int]) -> list[Group]:
    """The training jobs that are wanted and not finished; the router waits for no expert."""
    last = "shards" if wish.shares > 1 else "prepare"
    commands: dict[Kind, list[tuple[str, int, tuple[str, ...]]]] = {
        "experts": [(layout.expert_job(number), number, ("--expert", str(number))) for number in numbers],
        "router": [("router", 0, ("--router",))],
        "monolith": [("monolith", 0, ("--monolith",))],
        "student": [("student", 0, ("--student",))],
    }
    groups = []
    for kind, jobs in commands.items():
        own: int | None = getattr(config, kind).total_images if kind in layout.OTHERS else None
        steps = tuple(
            Step(name, index, ("train", str(run), *arguments, *wish.options), own or config.train.total_images)
            for name, index, arguments in jobs
            if kind in wish.kinds and Artifact(run, layout.final(name)).manifest() is None
        )
        groups.append(Group(kind, steps, (last, "experts") if kind == "student" else (last,)))
    return groups


def with_flops(run: Path, config: Config, groups: Sequence[Group]) -> list[Group]:
    """Return the same groups with the FLOPs of their training jobs, so that the longest can start first.

    A job that cannot be resolved has 0: its latents may have an unknown shape before the preparation, and of anything
    else the job itself gives the reason. Counting needs torch, whose import takes seconds: a lone job is not counted.
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
        return spec.settings.total_images * cost.training_flops(spec.settings.activation_checkpointing)

    return [
        replace(group, steps=tuple(replace(step, flops=flops(group, step)) for step in group.steps)) for group in groups
    ]


def _preparation(run: Path, config: Config, wish: Wish) -> list[Group]:
    """The stages of preparation that are not finished; with shares, those that can be divided are."""
    if wish.shares == 1:
        return [Group("prepare", (Step("prepare", 0, ("prepare", str(run), *wish.options)),), (), "gpu")]
    from atoll.data.prepare import STAGES, open_job
    from atoll.data.stages.base import Stage

    job = open_job(run, config)
    groups: list[Group] = []

    def needs_of(stage: Stage) -> tuple[str, ...]:
        """Return the groups to wait for; in place of a stage that is left out, those that it would wait for."""
        planned = {group.name for group in groups}
        found = ((earlier.name,) if earlier.name in planned else needs_of(earlier) for earlier in stage.inputs)
        return tuple(dict.fromkeys(name for names in found for name in names))

    for stage in STAGES:
        if stage.unneeded(job) or stage.is_done(job):
            continue
        count = wish.shares if stage.divisible else 1
        steps = []
        for share in range(count):
            divided = ("--worker", f"{share}/{count}") if count > 1 else ()
            name = f"prepare/{stage.name}" + (f"-{share}-of-{count}" if count > 1 else "")
            steps.append(Step(name, share, ("prepare", str(run), "--stage", stage.name, *divided, *wish.options)))
        groups.append(Group(stage.name, tuple(steps), needs_of(stage), "gpu" if stage.needs_gpu else "cpu"))
    return groups
