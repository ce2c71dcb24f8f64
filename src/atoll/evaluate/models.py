"""What is evaluated: the experts under a routing, monolith, student, single experts; and what each of them cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from atoll.core import layout
from atoll.core.artifacts import Artifact, Kind
from atoll.core.config import Config
from atoll.core.errors import AtollError, unknown
from atoll.core.manifests import EXPERT, ROUTER, ComputeSpec, NetworkContent
from atoll.ensemble import Sampler, Settings, load, parse
from atoll.evaluate.results import ForwardCost, TrainingCost
from atoll.train.cost import Cost, image_cost, training_bytes
from atoll.train.data_shapes import DataShapes
from atoll.train.spec import job_settings

KINDS = (*layout.MODELS, "singles")


@dataclass(frozen=True)
class Subject:
    """One model of a run, as it is sampled."""

    run: Path
    model: str
    routing: str | None = None

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.model} {self.routing}" if self.routing else self.model

    def parts(self) -> list[Artifact]:
        """The finished networks it is made of: its experts and, if its routing asks one, the router."""
        if self.model == "experts":
            names = [name for name in finished(self.run) if layout.is_expert(name)]
            names += ["router"] if parse(self.routing or "top-1").needs_router and len(names) > 1 else []
        elif self.model.startswith("expert:"):
            names = [layout.model_job(self.model)]
        else:
            names = [self.model]
        return [Artifact(self.run, layout.final(name)) for name in names]

    def digests(self) -> list[str]:
        """Fingerprints of its networks."""
        return [part.open(_kind(part)).digest for part in self.parts()]

    def open(self, max_loaded_experts: int | None = None) -> Sampler:
        """The model itself, with no routing chosen: all routings of the experts share one."""
        router = Artifact(self.run, layout.final(layout.ROUTER)).manifest()
        return _opened(
            self.run, self.model, max_loaded_experts, _networks=frozenset({*self.digests(), router and router.digest})
        )

    def training(self, config: Config) -> TrainingCost:
        """Return what its networks cost in training, from their manifests, with an estimate of the memory."""
        spent = [content.compute for content in self._contents() if content.compute]
        totals = {key: sum(getattr(one, key) for one in spent) for key in ComputeSpec.model_fields}
        sizes = []
        for name, one in self._costs().items():
            settings = job_settings(config, cast(layout.JobKind, name if name in layout.OTHERS else "expert"))
            micro, half = settings.batch_size // settings.grad_accum_steps, settings.precision != "float32"
            sizes.append(
                training_bytes(
                    one, micro, len(settings.ema), half=half, checkpointing=settings.activation_checkpointing
                )
            )
        longest = max(one.seconds for one in spent)
        return TrainingCost(**totals, longest_job_seconds=longest, estimated_bytes=max(sizes))

    def sampling(self, settings: Settings, active: float) -> ForwardCost:
        """Forward FLOPs for one picture, with `active` experts at an evaluation on average; bytes of all weights."""
        costs = self._costs()
        experts = [one.forward_flops for name, one in costs.items() if name != "router"]
        guided = [self._told and settings.guidance_at(t) != 1 for t in settings.evaluated_at]
        answers = active * (len(guided) + sum(guided))
        asked = self._router_answers(settings, guided) * costs["router"].forward_flops if "router" in costs else 0
        return ForwardCost(
            network_evaluations=answers,
            flops=asked + answers * sum(experts) / len(experts),
            weights_bytes=sum(entry.size for part in self.parts() for entry in part.open(_kind(part)).files.values()),
        )

    @property
    def _told(self) -> bool:
        """Whether its experts are told anything, so that guidance means something."""
        return any(content.conditioning for content in self._contents() if content.job != layout.ROUTER)

    def _router_answers(self, settings: Settings, guided: Sequence[bool]) -> int:
        """How often the router answers for one picture; under guidance also for the null condition, if it is told."""
        router = next(content for content in self._contents() if content.job == layout.ROUTER)
        once = [rule.name for rule in parse(settings.routing).rules] == ["drawn"]
        asked = guided[:1] if once else guided
        return len(asked) + (sum(asked) if router.conditioning else 0)

    def _costs(self) -> dict[str, Cost]:
        costs = {}
        for content in self._contents():
            costs[content.job] = image_cost(content.network, DataShapes.of(content))
        return costs

    def _contents(self) -> list[NetworkContent]:
        return [part.read(_kind(part)) for part in self.parts()]


@lru_cache(maxsize=1)
def _opened(run: Path, model: str, max_loaded_experts: int | None, *, _networks: frozenset[str | None]) -> Sampler:
    """One model is in memory at a time, as long as its networks are the same."""
    return load(run, model, max_loaded_experts=max_loaded_experts)


def _kind(part: Artifact) -> Kind[Any]:
    return ROUTER if part.name == layout.final(layout.ROUTER) else EXPERT


def finished(run: Path) -> list[str]:
    """Names of the finished networks of a run: experts/000, …, monolith, router, student."""
    return [name for name in layout.jobs(run) if Artifact(run, layout.final(name)).manifest() is not None]


def subjects(run: Path, models: Sequence[str], routings: Sequence[str]) -> list[Subject]:
    """What to evaluate; without `models` whatever of experts, monolith and student is there."""
    there = finished(run)
    experts = [name for name in there if layout.is_expert(name)]
    wanted = list(models) or [name for name in ("experts", "monolith", "student") if name in there or name == "experts"]
    if not models and not experts:
        wanted.remove("experts")
    found: list[Subject] = []
    for model in wanted:
        if model == "experts":
            found += [Subject(run, "experts", parse(routing).text) for routing in routings]
        elif model == "singles":
            found += [Subject(run, f"expert:{layout.expert_number(name)}") for name in experts]
        elif model in ("monolith", "student") or model.startswith("expert:"):
            found.append(Subject(run, model))
        else:
            raise AtollError(unknown("model", model, KINDS))
    if not found:
        raise AtollError(f"{run} has no trained network to evaluate; see: atoll train --help")
    return found
