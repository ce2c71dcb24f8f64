"""`atoll evaluate RUN`: draw samples of every model that is there, take their figures, and diagnose the ensemble.

Everything that takes time is an artifact below `RUN/evaluation`, so the same command continues, and other settings
add to what is there. `RUN/evaluation/latest.json` keeps the last result.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from atoll.core import layout
from atoll.core.artifacts import Artifact, to_json
from atoll.core.config import Config
from atoll.core.errors import AtollError, unknown
from atoll.core.manifests import SHARDS
from atoll.ensemble import Settings
from atoll.evaluate import diagnostics, metrics, trajectories
from atoll.evaluate.cache import ROOM, cached
from atoll.evaluate.extractors import open_alignment
from atoll.evaluate.features import Reference, of_reference
from atoll.evaluate.generated import Prompts, Samples, draw, prompts_of
from atoll.evaluate.models import Subject, subjects
from atoll.evaluate.results import (
    Diagnostics,
    DiagnosticsProtocol,
    EvaluationResult,
    ExpertDiagnostics,
    ExpertUse,
    MemoryPlan,
    ModelResult,
    SamplingCost,
    Split,
    Trajectory,
    plain,
)
from atoll.experts.validation import IMAGES, TIME_BINS, Summary, ValidationSet

PARTS = ("metrics", "diversity", "diagnostics", "trajectories")
LATEST = "latest.json"


@dataclass(frozen=True)
class Options:
    """What to evaluate and how."""

    num_images: int = 2500
    models: tuple[str, ...] = ()
    routings: tuple[str, ...] = ("top-1", "top-2", "full")
    settings: Settings = Settings()  # noqa: RUF009 - it is frozen
    """Steps, guidance, solver and seed; its routing is not looked at."""
    extractors: tuple[str, ...] = ("inception",)
    reference: Split = "train"
    num_real: int = 10_000
    diversity: tuple[int, int] = (32, 4)
    """Prompts, and samples of each."""
    lpips: Path | None = None
    clip: str | None = None
    num_val: int = IMAGES
    """Held-out images of each cluster, at most, that diagnostics noise once in every bin of time.

    With the default the error of an expert on its own cluster is the one in its manifest.
    """
    num_trajectories: int = 32
    """Samples that are followed from noise to data, with N and 2 N steps."""
    without: tuple[str, ...] = ()
    batch_size: int = 64
    max_loaded_experts: int | None = None
    allow_small: bool = False
    prompts: Split = "held-out"
    """Whose captions or classes the pictures are drawn for."""

    def __post_init__(self) -> None:
        """Check the values."""
        for part in self.without:
            if part not in PARTS:
                raise AtollError(unknown("part of the evaluation", part, PARTS))
        if self.num_images < 2 or self.num_real < 4 or min(self.diversity) < 1 or self.diversity[1] < 2:
            raise AtollError(
                "expected at least 2 samples, 4 reference pictures, 1 prompt and 2 samples of each for diversity, got "
                f"{self.num_images}, {self.num_real}, {self.diversity[0]} and {self.diversity[1]}"
            )

    def does(self, part: str) -> bool:
        """Whether a part is wanted."""
        return part not in self.without


def evaluate(run: Path, config: Config, options: Options) -> EvaluationResult:
    """Measure the models of a run under some options; what is there is not computed again."""
    work = Evaluation(run, config, options)
    found = subjects(run, options.models, options.routings if config.clusters.count > 1 else ("top-1",))
    references = work.references() if options.does("metrics") else {}
    if options.does("metrics") and not options.allow_small:
        for reference in references.values():
            metrics.check_enough(options.num_images, reference)
    result = EvaluationResult(
        run=str(run),
        prompts=options.prompts,
        models=tuple(work.model(subject, references) for subject in found),
        diagnostics=work.diagnose(found) if options.does("diagnostics") else None,
    )
    Artifact(run, ROOM).write(LATEST, to_json(plain(result)))
    return result


@dataclass(frozen=True)
class Evaluation:
    """The work on one run under some options."""

    run: Path
    config: Config
    options: Options

    def references(self) -> dict[str, Reference]:
        """Features of real pictures, through each network."""
        how = self.options
        return {
            name: of_reference(self.run, self.config, how.reference, count=how.num_real, vision=name)
            for name in how.extractors
        }

    def prompts(self, count: int) -> Prompts:
        """Prompts for so many samples."""
        return prompts_of(self.run, self.config.clusters.count, count, split=self.options.prompts)

    def settings(self, subject: Subject) -> Settings:
        """How a subject is sampled."""
        return Settings(**{**asdict(self.options.settings), "routing": subject.routing or "top-1"})

    def model(self, subject: Subject, references: dict[str, Reference]) -> ModelResult:
        """Measure one model."""
        how, samples, repeated = self.options, None, None
        compared, aligned, spread = {}, None, None
        if how.does("metrics"):
            samples = self._draw(subject, self.prompts(how.num_images), "samples")
            compared = {
                name: metrics.against_reference(self.run, samples, reference, vision=name)
                for name, reference in references.items()
            }
            if how.clip is not None:
                aligned = metrics.alignment(self.run, samples, _opened_alignment(how.clip))
        if how.does("diversity"):
            prompts, seeds = how.diversity
            repeated = self._draw(subject, self.prompts(prompts).repeated(prompts, seeds), "diversity")
            spread = metrics.diversity(self.run, repeated, seeds, vision=how.extractors[0], lpips=how.lpips)
        drawn = samples or repeated
        use, cost = self._use(subject, drawn) if drawn else (None, None)
        return ModelResult(
            model=subject.model,
            routing=subject.routing,
            label=subject.label,
            training=subject.training(self.config),
            metrics=compared,
            alignment=aligned,
            diversity=spread,
            expert_use=use,
            sampling=cost,
            trajectory=self._trajectory(subject) if how.does("trajectories") else None,
        )

    def _draw(self, subject: Subject, prompts: Prompts, what: str) -> Samples:
        return draw(
            subject,
            prompts,
            self.settings(subject),
            what=what,
            batch_size=self.options.batch_size,
            max_loaded_experts=self.options.max_loaded_experts,
        )

    def _use(self, subject: Subject, samples: Samples) -> tuple[ExpertUse | None, SamplingCost]:
        """Return which experts ran, and what an image cost."""
        use = trajectories.expert_use(samples)
        cost = subject.sampling(self.settings(subject), 1.0 if use is None else use.mean_active)
        memory, seconds = self._memory(subject, len(samples)), samples.seconds() / len(samples)
        return use, SamplingCost(**dict(cost), **dict(memory), seconds=seconds)

    def _memory(self, subject: Subject, samples: int) -> MemoryPlan:
        batch, guided = min(self.options.batch_size, samples), self.options.settings.guidance_scale != 1
        made_from = {
            "networks": subject.digests(),
            "batch_size": batch,
            "guided": guided,
            "max_loaded_experts": self.options.max_loaded_experts,
        }

        def compute() -> MemoryPlan:
            return MemoryPlan(bytes=subject.open(self.options.max_loaded_experts).plan(batch, guided=guided).total)

        return cached(self.run, "plans", subject.model, made_from=made_from, result=MemoryPlan, compute=compute)

    def _trajectory(self, subject: Subject) -> Trajectory:
        settings, prompts = self.settings(subject), self.prompts(self.options.num_trajectories)
        made_from = {
            "settings": asdict(settings),
            "prompts": asdict(prompts),
            "networks": subject.digests(),
            "data": Artifact(self.run, layout.shards(0)).read(SHARDS).fingerprint,
        }

        def compute() -> Trajectory:
            clusters = trajectories.bank(self.run, self.config.clusters.count)
            return trajectories.follow(
                subject.open(self.options.max_loaded_experts), prompts, settings, clusters=clusters, what=subject.label
            )

        return cached(self.run, "trajectories", subject.label, made_from=made_from, result=Trajectory, compute=compute)

    def diagnose(self, found: Sequence[Subject]) -> Diagnostics:
        """Measure errors on the same held-out images: of every expert, of their mixtures, and of the dense models."""
        how, experts = self.options, None
        shards = diagnostics.held_out(self.run, self.config.clusters.count)
        if not len(shards):
            raise AtollError(f"{self.run} has no held-out sample; raise data.val_fraction, or --without diagnostics")
        data = [artifact.open(SHARDS).digest for artifact in shards.artifacts]
        # The seed of training, not of sampling: it is the one that training and admission validate with.
        seed = self.config.train.seed
        limit = min(how.num_val, max(map(len, shards.cluster_ranges().values())))
        made_from = {"data": data, "samples": limit, "seed": seed, "form": diagnostics.FORM}
        routings = [subject.routing for subject in found if subject.routing is not None]
        if routings:
            group = Subject(self.run, "experts", routings[0])
            digests = sorted({digest for subject in found if subject.routing for digest in subject.digests()})
            router = Artifact(
                self.run, layout.final(layout.ROUTER)
            ).manifest()  # it is measured whether or not a routing asks it
            digests += [router.digest] if router and router.digest not in digests else []

            def ask() -> ExpertDiagnostics:
                model = group.open(how.max_loaded_experts).ensemble
                return diagnostics.report(diagnostics.ask(model, shards, routings, limit=limit, seed=seed))

            experts = cached(
                self.run,
                "diagnostics",
                "experts",
                made_from={**made_from, "networks": digests, "routings": routings},
                result=ExpertDiagnostics,
                compute=ask,
            )

        def dense(subject: Subject) -> Summary:
            def compute() -> Summary:
                model = subject.open().ensemble
                return diagnostics.dense_error(model, shards, limit, seed=seed, name=subject.model)

            own = {**made_from, "networks": subject.digests()}
            return cached(self.run, "diagnostics", subject.model, made_from=own, result=Summary, compute=compute)

        images = ValidationSet(shards, seed, limit).images
        alone = [one for one in found if one.routing is None and not one.model.startswith("expert:")]
        return Diagnostics(
            protocol=DiagnosticsProtocol(held_out_samples=images, seed=seed, time_bins=TIME_BINS),
            experts=experts,
            dense={subject.model: dense(subject) for subject in alone},
        )


_opened_alignment = cache(open_alignment)
