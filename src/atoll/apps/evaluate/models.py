"""The models that are evaluated (experts with a routing, dense networks, single experts), and their cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from atoll.apps.evaluate.results import SamplingCost, TrainingCost
from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind
from atoll.core.config import Config
from atoll.core.device import device
from atoll.core.errors import AtollError, unknown
from atoll.core.manifests import EXPERT, ROUTER, ExpertContent, NetworkContent, training_costs
from atoll.core.options import LoadOptions
from atoll.core.sizes import Size
from atoll.data.shapes import DataShapes
from atoll.ensemble import Sampler, SampleSettings, load, parse
from atoll.ensemble.sampler import evaluated_at
from atoll.experts.cost import Cost, image_cost
from atoll.experts.run import CLUSTERS_FILE, missing_network, teachers_flops
from atoll.nets.io import WEAK_FILE
from atoll.train.estimate import job_bytes
from atoll.train.spec import job_settings

KINDS = (*layout.MODELS, "singles")


@dataclass(frozen=True)
class EvaluatedModel:
    """One model of a run; experts, and students that are chosen by their cluster, with a routing."""

    run: Path
    model: str
    routing: str | None = None

    @property
    def label(self) -> str:
        """The name of the model in tables and messages."""
        return f"{self.model} {self.routing}" if self.routing else self.model

    def parts(self) -> list[Artifact]:
        """Return the finished networks of the model: its experts and, if its routing needs one, the router."""
        if self.model in ("experts", layout.STUDENTS):
            names = [name for name in finished_jobs(self.run) if layout.is_expert(name)]
            names = finished_students(self.run) if self.model == layout.STUDENTS else names
            names += ["router"] if parse(self.routing or "top-1").needs_router and len(names) > 1 else []
        elif self.routing is not None:
            names = [self.model, *(["router"] if parse(self.routing).needs_router else [])]
        elif self.model.startswith("expert:"):
            names = [layout.model_job(self.model)]
        else:
            names = [self.model]
        return [Artifact(self.run, layout.final(name)) for name in names]

    def check(self) -> None:
        """Raise an error if one of its networks is missing or incomplete; read no weights."""
        parts = self.parts()
        if not parts:
            raise AtollError(missing_network(self.run, layout.expert_job(0)))
        for part in parts:
            if part.manifest() is None:
                raise AtollError(f"{self.label}: {missing_network(self.run, part.name.rpartition('/')[0])}")
            part.open(_kind(part))

    def digests(self) -> list[str]:
        """Return the digests of its networks."""
        return [part.open(_kind(part)).digest for part in self.parts()]

    def open(self, options: LoadOptions) -> Sampler:
        """Open the model. All routings of the experts share one sampler."""
        # The digests are part of the cache key: a network that was trained again is opened again.
        router = Artifact(self.run, layout.final(layout.ROUTER)).manifest()
        return _opened(self.run, self.model, options, _networks=frozenset({*self.digests(), router and router.digest}))

    def steps(self) -> int | None:
        """Return the number of sampling steps of few-step students; None for other models."""
        return self.parts()[0].read(EXPERT).steps

    def training(self, config: Config) -> TrainingCost:
        """Return the training cost of its networks from their manifests, with an estimate of the memory.

        It includes the shared start of experts, once. The start is not part of the model, so its parameters are not.
        """
        contents = self._contents()
        spent = training_costs(contents)
        sizes = []
        for content in contents:
            own, shapes = content.job if content.job in layout.OTHERS else "expert", DataShapes.of(content)
            start = [layout.START] if isinstance(content, ExpertContent) and content.start else []
            objective = content.objective if isinstance(content, ExpertContent) and own != layout.STUDENT else None
            for kind in (own, *start):
                settings = job_settings(config, cast(layout.JobKind, kind))
                sizes.append(job_bytes(content.network, shapes, settings, device=device(), objective=objective))
        # A merged network has the summed cost of the experts, so their jobs show which one was the longest.
        jobs = EvaluatedModel(self.run, "experts", "nearest") if self.model == layout.MERGED else self
        return TrainingCost(
            images=sum(one.images for one in spent),
            parameters=sum(content.compute.parameters for content in contents if content.compute),
            flops=sum(one.flops for one in spent),
            seconds=sum(one.seconds for one in spent),
            longest_job_seconds=max(one.seconds for one in training_costs(jobs._contents()) or spent),
            memory_bytes=max(sizes),
            teachers_flops=teachers_flops(self.run, contents) or None,
        )

    def sampling(self, settings: SampleSettings, active: float, sizes: dict[Size, int] | None = None) -> SamplingCost:
        """Return the FLOPs of sampling one image with `active` experts per evaluation on average, and the weights.

        `sizes` is the number of images of each size of the latents; without it, all have the default size.
        """
        costs = self._costs(sizes)
        experts = [one.forward_flops for name, one in costs.items() if name != layout.ROUTER]
        # Guidance has an effect if any expert is conditioned. Then every evaluation of the velocity runs the experts
        # twice: with the condition and with the null condition. Autoguidance runs them and their weak networks. Experts
        # differ in size and the routing decides which ones run, so their mean FLOPs count.
        contents = {content.job: content for content in self._contents()}
        conditioned = any(content.conditioning for job, content in contents.items() if job != layout.ROUTER)
        auto = settings.guidance == "autoguidance"
        guided = [(auto or conditioned) and settings.guidance_at(t) != 1 for t in evaluated_at(settings)]
        calls = active * (len(guided) + sum(guided))
        flops = calls * sum(experts) / len(experts)
        if layout.ROUTER in costs:
            # `drawn` and `once` choose an expert at the first evaluation and keep it. Under guidance with separate
            # weights the router runs twice.
            rules = parse(settings.routing).rules
            routed = guided[:1] if rules[0].keeps and len(rules) == 1 else guided
            separate = settings.guidance_weights == "separate" and not auto
            twice = contents[layout.ROUTER].conditioning and separate
            flops = (len(routed) + (sum(routed) if twice else 0)) * costs[layout.ROUTER].forward_flops + flops
        return SamplingCost(
            network_evaluations=calls,
            flops=flops,
            # Other EMAs than the result are stored too, but only autoguidance reads one of them.
            weights_bytes=sum(
                entry.size
                for part in self.parts()
                for name, entry in part.open(_kind(part)).files.items()
                if not name.startswith("ema-") or (auto and name == WEAK_FILE)
            ),
        )

    def _costs(self, sizes: dict[Size, int] | None = None) -> dict[str, Cost]:
        return {one.job: image_cost(one.network, DataShapes.of(one, sizes)) for one in self._contents()}

    def _contents(self) -> list[NetworkContent]:
        return [part.read(_kind(part)) for part in self.parts()]


# One model at a time: the next one may need the memory.
@lru_cache(maxsize=1)
def _opened(run: Path, model: str, options: LoadOptions, *, _networks: frozenset[str | None]) -> Sampler:
    return load(run, model, **vars(options))


def _kind(part: Artifact) -> ArtifactKind[Any]:
    return ROUTER if part.name == layout.final(layout.ROUTER) else EXPERT


def finished_jobs(run: Path) -> list[str]:
    """Return the jobs of a run that have a finished network: experts/000, …, then the others by name."""
    return [name for name in layout.jobs(run) if Artifact(run, layout.final(name)).manifest() is not None]


def finished_students(run: Path) -> list[str]:
    """Return the finished few-step students of single experts by number."""
    return [name for name in layout.student_jobs(run) if Artifact(run, layout.final(name)).manifest() is not None]


def evaluated_models(run: Path, models: Sequence[str], routings: Sequence[str]) -> list[EvaluatedModel]:
    """Return the models to evaluate; without `models`, the experts and the dense networks that exist."""
    jobs = finished_jobs(run)
    experts = [name for name in jobs if layout.is_expert(name)]
    students = [layout.STUDENTS] if finished_students(run) else []
    trained = [*(["experts"] if experts else []), *students, *(name for name in layout.DENSE if name in jobs)]
    found: list[EvaluatedModel] = []
    for model in models or trained:
        told = model == layout.STUDENT and (run / layout.final(layout.STUDENT) / CLUSTERS_FILE).is_file()
        if model in ("experts", layout.STUDENTS) or told:
            found += [EvaluatedModel(run, model, parse(routing).text) for routing in routings]
        elif model == "singles":
            found += [EvaluatedModel(run, f"expert:{layout.expert_number(name)}") for name in experts]
        elif model in layout.DENSE or model.startswith("expert:"):
            found.append(EvaluatedModel(run, model))
        else:
            raise AtollError(unknown("model", model, KINDS))
    if not found:
        raise AtollError(f"{run} has no trained network to evaluate; see: atoll train --help")
    return found
