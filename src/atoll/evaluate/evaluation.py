"""`atoll evaluate RUN`: draw samples of every model that is there, take their figures, and diagnose the ensemble.

Everything that takes time is an artifact below `RUN/evaluation`, so the same command continues, and other settings
add to what is there. The answer is one tree of plain values; `RUN/evaluation/latest.json` keeps the last one.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atoll.config import Config
from atoll.ensemble import Settings
from atoll.errors import AtollError, unknown
from atoll.evaluate import diagnostics, metrics, trajectories
from atoll.evaluate.extractors import open_alignment
from atoll.evaluate.features import FeatureSet, Split, of_reference, of_samples
from atoll.evaluate.samples import Prompts, Samples, draw, prompts_of
from atoll.evaluate.store import ROOM, figures
from atoll.evaluate.subjects import Subject, subjects
from atoll.run import Artifact, to_json
from atoll.train.validation import IMAGES, TIME_BINS, ValidationSet

PARTS = ("metrics", "diversity", "diagnostics", "trajectories")
LATEST = "latest.json"


@dataclass(frozen=True)
class Options:
    """What to evaluate and how."""

    samples: int = 2500
    models: tuple[str, ...] = ()
    routings: tuple[str, ...] = ("top-1", "top-2", "full")
    settings: Settings = Settings()  # noqa: RUF009 - it is frozen
    """Steps, guidance, solver and seed; its routing is not looked at."""
    extractors: tuple[str, ...] = ("inception",)
    reference: Split = "train"
    references: int = 10_000
    diversity: tuple[int, int] = (32, 4)
    """Prompts, and samples of each."""
    lpips: Path | None = None
    clip: str | None = None
    held_out: int = IMAGES
    """Held-out images of each cluster, at most, that diagnostics noise once in every bin of time.

    With the default the error of an expert on its own cluster is the one in its manifest.
    """
    followed: int = 32
    """Samples that are followed from noise to data, with N and 2 N steps."""
    skip: tuple[str, ...] = ()
    batch: int = 64
    resident: int | None = None
    allow_few: bool = False
    prompts: Split = "held-out"
    """Whose captions or classes the pictures are drawn for."""

    def __post_init__(self) -> None:
        """Check the values."""
        for part in self.skip:
            if part not in PARTS:
                raise AtollError(unknown("part of the evaluation", part, PARTS))
        if self.samples < 2 or self.references < 4 or min(self.diversity) < 1 or self.diversity[1] < 2:
            raise AtollError(
                "expected at least 2 samples, 4 reference pictures, 1 prompt and 2 samples of each for diversity, got "
                f"{self.samples}, {self.references}, {self.diversity[0]} and {self.diversity[1]}"
            )

    def does(self, part: str) -> bool:
        """Whether a part is wanted."""
        return part not in self.skip


def evaluate(run: Path, config: Config, options: Options) -> dict[str, Any]:
    """All figures of a run under some options; what is there is not computed again."""
    work = Evaluation(run, config, options)
    found = subjects(run, options.models, options.routings if config.clusters.count > 1 else ("top-1",))
    references = work.references() if options.does("metrics") else {}
    if options.does("metrics") and not options.allow_few:
        for reference in references.values():
            metrics.check_enough(options.samples, reference)
    answer: dict[str, Any] = {
        "run": str(run),
        "prompts": options.prompts,
        "models": [work.model(subject, references) for subject in found],
    }
    if options.does("diagnostics"):
        answer["diagnostics"] = work.diagnose(found)
    Artifact(run, ROOM).write(LATEST, to_json(answer))
    return answer


@dataclass(frozen=True)
class Evaluation:
    """The work on one run under some options."""

    run: Path
    config: Config
    options: Options

    def references(self) -> dict[str, FeatureSet]:
        """Features of real pictures, through each network."""
        how = self.options
        return {
            name: of_reference(self.run, self.config, how.reference, how.references, name) for name in how.extractors
        }

    def prompts(self, count: int) -> Prompts:
        """Prompts for so many samples."""
        return prompts_of(self.run, self.config.clusters.count, count, split=self.options.prompts)

    def settings(self, subject: Subject) -> Settings:
        """How a subject is sampled."""
        return Settings(**{**asdict(self.options.settings), "routing": subject.routing or "top-1"})

    def model(self, subject: Subject, references: dict[str, FeatureSet]) -> dict[str, Any]:
        """All figures of one model."""
        how = self.options
        answer: dict[str, Any] = {"model": subject.model, "routing": subject.routing, "label": subject.label}
        answer["training"] = {**subject.training(), "estimated_bytes": subject.training_bytes(self.config)}
        if how.does("metrics"):
            samples = self._draw(subject, self.prompts(how.samples), "samples")
            answer["metrics"] = {
                name: metrics.against_reference(
                    self.run, of_samples(self.run, samples, name), reference, f"{subject.label} {Path(name).name}"
                )
                for name, reference in references.items()
            }
            if how.clip is not None:
                answer["alignment"] = metrics.alignment(self.run, samples, _opened_alignment(how.clip))
            answer |= self._use(subject, samples)
        if how.does("diversity"):
            prompts, seeds = how.diversity
            samples = self._draw(subject, self.prompts(prompts).repeated(prompts, seeds), "diversity")
            answer["diversity"] = metrics.diversity(self.run, samples, seeds, how.extractors[0], how.lpips)
            if "sampling" not in answer:
                answer |= self._use(subject, samples)
        if how.does("trajectories"):
            answer["trajectory"] = self._trajectory(subject)
        return answer

    def _draw(self, subject: Subject, prompts: Prompts, what: str) -> Samples:
        return draw(subject, prompts, self.settings(subject), what, self.options.batch, self.options.resident)

    def _use(self, subject: Subject, samples: Samples) -> dict[str, Any]:
        """Which experts worked, and what a picture cost."""
        use = trajectories.expert_use(samples)
        active = 1.0 if use is None else use["mean_active"]
        cost = subject.sampling(self.settings(subject), active)
        measured = {"seconds": samples.facts["seconds"] / len(samples), **self._memory(subject, len(samples))}
        return {"expert_use": use, "sampling": {**cost, **measured}}

    def _memory(self, subject: Subject, samples: int) -> dict[str, Any]:
        """The memory that sampling plans with."""
        batch, guided = min(self.options.batch, samples), self.options.settings.guidance != 1
        told = {"networks": subject.digests, "batch": batch, "guided": guided, "resident": self.options.resident}

        def compute() -> dict[str, Any]:
            return {"bytes": subject.open(self.options.resident).plan(batch, guided=guided).total}

        return figures(self.run, "plans", subject.model, told, compute)

    def _trajectory(self, subject: Subject) -> dict[str, Any]:
        settings, prompts = self.settings(subject), self.prompts(self.options.followed)
        told = {"settings": asdict(settings), "prompts": asdict(prompts), "networks": subject.digests}
        data = Artifact(self.run, "data/shards/cluster_000").open("shards").facts["fingerprint"]

        def compute() -> dict[str, Any]:
            clusters = trajectories.bank(self.run, self.config.clusters.count)
            return trajectories.follow(subject.open(self.options.resident), prompts, settings, clusters, subject.label)

        return figures(self.run, "trajectories", subject.label, {**told, "data": data}, compute)

    def diagnose(self, found: Sequence[Subject]) -> dict[str, Any]:
        """Errors on the same held-out samples: of every expert, of their mixtures, and of the dense models."""
        how = self.options
        shards = diagnostics.held_out(self.run, self.config.clusters.count)
        if not len(shards):
            raise AtollError(f"{self.run} has no held-out sample; raise data.held_out, or --skip diagnostics")
        data = [artifact.open("shards").digest for artifact in shards.artifacts]
        # The seed of training, not of sampling: it is the one that training and admission validate with.
        seed = self.config.train.seed
        each = min(how.held_out, max(map(len, shards.cluster_ranges().values())))
        told: dict[str, Any] = {"data": data, "samples": each, "seed": seed, "form": diagnostics.FORM}
        routings = [subject.routing for subject in found if subject.routing is not None]
        images = ValidationSet(shards, seed, each).images
        answer: dict[str, Any] = {"protocol": {"held_out_samples": images, "seed": seed, "time_bins": TIME_BINS}}
        if routings:
            group = Subject(self.run, "experts", routings[0])
            digests = sorted({digest for subject in found if subject.routing for digest in subject.digests})
            router = Artifact(self.run, "router/final").manifest()  # it is measured whether or not a routing asks it
            digests += [router.digest] if router and router.digest not in digests else []

            def asked() -> dict[str, Any]:
                model = group.open(how.resident)
                return diagnostics.report(diagnostics.ask(model, shards, routings, told["samples"], told["seed"]))

            made_from = {**told, "networks": digests, "routings": routings}
            answer["experts"] = figures(self.run, "diagnostics", "experts", made_from, asked)
        answer["dense"] = {
            subject.model: figures(
                self.run,
                "diagnostics",
                subject.model,
                {**told, "networks": subject.digests},
                self._dense(subject, told),
            )
            for subject in found
            if subject.routing is None and not subject.model.startswith("expert:")
        }
        return answer

    def _dense(self, subject: Subject, told: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        shards = diagnostics.held_out(self.run, self.config.clusters.count)
        return lambda: diagnostics.dense_error(subject.open(), shards, told["samples"], told["seed"], subject.model)


_opened_alignment = cache(open_alignment)
