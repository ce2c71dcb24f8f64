"""`atoll evaluate RUN`: generate images with every trained model, compute their metrics, and diagnose the ensemble.

Every slow step is an artifact below `RUN/evaluation`. You can interrupt the command; running it again resumes. Other
settings add new artifacts beside the old ones. `RUN/evaluation/latest.json` is the last result.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from atoll.apps.evaluate import diagnostics, metrics, trajectories
from atoll.apps.evaluate.cache import cached
from atoll.apps.evaluate.extractors import open_alignment
from atoll.apps.evaluate.features import Reference, ReferencePlan, opened, reference_features
from atoll.apps.evaluate.generated import GeneratedSet, Prompts, generate, prompts_of
from atoll.apps.evaluate.models import EvaluatedModel, evaluated_models
from atoll.apps.evaluate.results import (
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
from atoll.core import layout
from atoll.core.artifacts import Artifact, to_json
from atoll.core.config import Config
from atoll.core.device import device
from atoll.core.errors import AtollError, unknown
from atoll.core.manifests import SHARDS
from atoll.core.options import LoadOptions, SamplingOptions
from atoll.data.dataset import Shards
from atoll.encoders.lpips import open_perceptual
from atoll.ensemble import Settings
from atoll.experts.validation import IMAGES, TIME_BINS, Summary, ValidationSet
from atoll.train.distributed import DistContext

PARTS = ("metrics", "diversity", "diagnostics", "trajectories")


@dataclass(frozen=True)
class Options:
    """The options of an evaluation."""

    # 2500 is a little more than the 2049 images that an Inception covariance of 2048 dimensions needs. Published FID
    # uses 10,000 to 50,000.
    num_images: int = 2500
    models: tuple[str, ...] = ()
    routings: tuple[str, ...] = ("top-1", "top-2", "full")
    settings: SamplingOptions = SamplingOptions()  # noqa: RUF009 - it is frozen
    extractors: tuple[str, ...] = ("inception",)
    reference: Split = "train"
    num_real: int = 10_000
    diversity: tuple[int, int] = (32, 4)
    """Number of prompts, and images per prompt."""
    lpips: Path | None = None
    clip: str | None = None
    num_val: int = IMAGES
    """Maximum number of held-out images of each cluster for the diagnostics; each is noised once in every time bin.

    With the default, the error of an expert on its cluster is the number in its manifest.
    """
    num_trajectories: int = 32
    """Number of images that are sampled with N and with 2 N steps."""
    without: tuple[str, ...] = ()
    batch_size: int = 64
    load: LoadOptions = LoadOptions()  # noqa: RUF009 - it is frozen
    """Devices and precision of sampling. Diagnostics are in float32 in any case."""
    allow_small: bool = False
    prompts: Split = "held-out"
    """The split whose captions or classes are the prompts."""

    def __post_init__(self) -> None:
        """Check the values."""
        for part in self.without:
            if part not in PARTS:
                raise AtollError(unknown("part of the evaluation", part, PARTS))
        # A covariance needs two images; the real-vs-real baseline needs two such sets; a distance needs two images.
        if self.num_images < 2 or self.num_real < 4 or min(self.diversity) < 1 or self.diversity[1] < 2:
            raise AtollError(
                "expected --num-images of at least 2, --num-real of at least 4, and --diversity of at least 1 prompt "
                f"and 2 images per prompt, got {self.num_images}, {self.num_real}, {self.diversity[0]} and "
                f"{self.diversity[1]}"
            )

    def does(self, part: str) -> bool:
        """Return whether a part is included."""
        return part not in self.without


def evaluate(
    run: Path, config: Config, options: Options, *, context: DistContext | None = None
) -> EvaluationResult | None:
    """Evaluate the models of a run. Results that exist already are not computed again.

    Several processes generate the images together; then the main process computes the metrics, and the others return
    None.
    """
    context = context or DistContext(0, 1, device())
    evaluation = Evaluation(run, config, options, context)
    models = evaluated_models(run, options.models, options.routings if config.clusters.count > 1 else ("top-1",))
    context.on_main(lambda: evaluation.check(models))
    if context.size > 1:
        evaluation.generate_all(models)
        if not context.is_main:
            return None
        evaluation = Evaluation(run, config, options, DistContext(0, 1, context.device))
    references = evaluation.references() if options.does("metrics") else {}
    result = EvaluationResult(
        run=str(run),
        prompts=options.prompts,
        models=tuple(evaluation.model(model, references) for model in models),
        diagnostics=evaluation.diagnose(models) if options.does("diagnostics") else None,
    )
    Artifact(run, layout.EVALUATION).write(Path(layout.LATEST_EVALUATION).name, to_json(plain(result)))
    return result


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one run with some options."""

    run: Path
    config: Config
    options: Options
    context: DistContext
    """The processes that generate images together."""

    def check(self, models: Sequence[EvaluatedModel]) -> None:
        """Raise every error that needs no computation: of networks, feature networks and numbers of images."""
        options = self.options
        for model in models:
            model.check()
        purposes = self._purposes()
        for name in options.extractors if options.does("metrics") else ():
            plan = ReferencePlan.of(self.run, self.config, options.reference, num_real=options.num_real, vision=name)
            if not options.allow_small:
                metrics.check_enough(
                    options.num_images, plan.about.num_images, extractor=name, dimensions=plan.dimensions()
                )
        if options.does("diversity"):
            open_perceptual(opened(options.extractors[0]), options.lpips)
        if options.does("metrics") and options.clip is not None:
            if purposes["metrics"].captions is None:
                raise AtollError("text alignment needs text prompts, and this run has no captions; leave --clip out")
            _opened_alignment(options.clip)
        if options.does("diagnostics"):
            self._held_out()

    def _held_out(self) -> Shards:
        shards = diagnostics.held_out_shards(self.run, self.config.clusters.count)
        if not len(shards):
            raise AtollError(
                f"{self.run} has no held-out images; raise data.val_fraction, or use --without diagnostics"
            )
        return shards

    def generate_all(self, models: Sequence[EvaluatedModel]) -> None:
        """Generate the images of all models."""
        for model in models:
            for purpose, prompts in self._purposes().items():
                self._generate(model, prompts, purpose)

    def _purposes(self) -> dict[str, Prompts]:
        """Return the prompts of each set of generated images that the options need."""
        options, (prompts, seeds) = self.options, self.options.diversity
        found = {}
        if options.does("metrics"):
            found["metrics"] = self.prompts(options.num_images)
        if options.does("diversity"):
            found["diversity"] = self.prompts(prompts).repeated(prompts, seeds)
        return found

    def references(self) -> dict[str, Reference]:
        """Return the features of the real images, by feature network."""
        options = self.options
        return {
            name: reference_features(self.run, self.config, options.reference, num_real=options.num_real, vision=name)
            for name in options.extractors
        }

    def prompts(self, count: int) -> Prompts:
        """Return `count` prompts."""
        return prompts_of(self.run, self.config.clusters.count, count, split=self.options.prompts)

    def settings(self, model: EvaluatedModel) -> Settings:
        """Return the sampling settings of a model."""
        return Settings(**{**asdict(self.options.settings), "routing": model.routing or "top-1"})

    def model(self, model: EvaluatedModel, references: dict[str, Reference]) -> ModelResult:
        """Evaluate one model."""
        options = self.options
        compared, aligned, spread = {}, None, None
        sets = {purpose: self._generate(model, prompts, purpose) for purpose, prompts in self._purposes().items()}
        if images := sets.get("metrics"):
            compared = {
                name: metrics.against_reference(self.run, images, reference, vision=name)
                for name, reference in references.items()
            }
            if options.clip is not None:
                aligned = metrics.alignment(self.run, images, _opened_alignment(options.clip))
        if repeated := sets.get("diversity"):
            seeds = options.diversity[1]
            spread = metrics.diversity(self.run, repeated, seeds, vision=options.extractors[0], lpips=options.lpips)
        generated = images or repeated
        use, cost = self._use(model, generated) if generated else (None, None)
        return ModelResult(
            model=model.model,
            routing=model.routing,
            label=model.label,
            training=model.training(self.config),
            metrics=compared,
            alignment=aligned,
            diversity=spread,
            expert_use=use,
            sampling=cost,
            trajectory=self._trajectory(model) if options.does("trajectories") else None,
        )

    def _generate(self, model: EvaluatedModel, prompts: Prompts, purpose: str) -> GeneratedSet:
        return generate(
            model,
            prompts,
            self.settings(model),
            purpose=purpose,
            batch_size=self.options.batch_size,
            load=self.options.load,
            context=self.context,
        )

    def _use(self, model: EvaluatedModel, images: GeneratedSet) -> tuple[ExpertUse | None, SamplingCost]:
        """Return the use of the experts, and the cost of one image."""
        use = trajectories.expert_use(images)
        sizes = {size: len(rows) for size, rows in images.prompts.by_size().items() if size is not None}
        cost = model.sampling(self.settings(model), 1.0 if use is None else use.mean_active, sizes or None)
        memory, seconds = self._memory(model, len(images)), images.seconds() / len(images)
        return use, SamplingCost(**dict(cost), **dict(memory), seconds=seconds)

    def _memory(self, model: EvaluatedModel, num_images: int) -> MemoryPlan:
        batch_size, guided = min(self.options.batch_size, num_images), self.options.settings.guidance_scale != 1
        made_from = {
            "networks": model.digests(),
            "batch_size": batch_size,
            "guided": guided,
            "max_loaded_experts": self.options.load.max_loaded_experts,
            "dtype": self.options.load.precision,
        }

        def compute() -> MemoryPlan:
            plan = model.open(self.options.load).plan(batch_size, guided=guided)
            return MemoryPlan(memory_bytes=plan.total)

        return cached(self.run, "plans", model.model, made_from=made_from, result=MemoryPlan, compute=compute)

    def _trajectory(self, model: EvaluatedModel) -> Trajectory:
        settings, prompts = self.settings(model), self.prompts(self.options.num_trajectories)
        made_from = {
            "settings": {**asdict(settings), "dtype": self.options.load.precision},
            "prompts": prompts.plain(),
            "networks": model.digests(),
            "data": Artifact(self.run, layout.shards(0)).read(SHARDS).fingerprint,
        }

        def compute() -> Trajectory:
            clusters = partial(trajectories.cluster_latents, self.run, self.config.clusters.count)
            sampler = model.open(self.options.load)
            return trajectories.follow(sampler, prompts, settings, clusters=clusters, label=model.label)

        return cached(self.run, "trajectories", model.label, made_from=made_from, result=Trajectory, compute=compute)

    def diagnose(self, models: Sequence[EvaluatedModel]) -> Diagnostics:
        """Measure errors on the same held-out images: of every expert, of their mixtures, and of the dense models."""
        options, experts, shards = self.options, None, self._held_out()
        data = [artifact.open(SHARDS).digest for artifact in shards.artifacts]
        # The seed of training, not of sampling: training and admission validate with it too, so their numbers agree.
        seed = self.config.train.seed
        # A limit above the largest cluster changes nothing. Clamping it lets such options share one cached result.
        limit = min(options.num_val, max(map(len, shards.cluster_ranges().values())))
        made_from = {"data": data, "images": limit, "seed": seed, "definition": diagnostics.DEFINITION_VERSION}
        routings = [model.routing for model in models if model.routing is not None]
        if routings:
            ensemble = EvaluatedModel(self.run, "experts", routings[0])
            digests = sorted({digest for model in models if model.routing for digest in model.digests()})
            # The router is measured even if no routing uses it.
            router = Artifact(self.run, layout.final(layout.ROUTER)).manifest()
            digests += [router.digest] if router and router.digest not in digests else []

            def compute_experts() -> ExpertDiagnostics:
                opened = ensemble.open(options.load.in_float32()).ensemble
                return diagnostics.summarize(diagnostics.measure(opened, shards, routings, limit=limit, seed=seed))

            experts = cached(
                self.run,
                "diagnostics",
                "experts",
                made_from={**made_from, "networks": digests, "routings": routings},
                result=ExpertDiagnostics,
                compute=compute_experts,
            )

        def dense(model: EvaluatedModel) -> Summary:
            def compute() -> Summary:
                opened = model.open(options.load.in_float32()).ensemble
                return diagnostics.dense_error(opened, shards, limit, seed=seed, name=model.model)

            key = {**made_from, "networks": model.digests()}
            return cached(self.run, "diagnostics", model.model, made_from=key, result=Summary, compute=compute)

        num_images = ValidationSet(shards, seed, limit).images
        # Single experts are columns of the matrix of the experts; here are the models of one network for all clusters.
        dense_models = [model for model in models if model.routing is None and not model.model.startswith("expert:")]
        return Diagnostics(
            protocol=DiagnosticsProtocol(num_images=num_images, seed=seed, time_bins=TIME_BINS),
            experts=experts,
            dense={model.model: dense(model) for model in dense_models},
        )


# Opened once for all models.
_opened_alignment = cache(open_alignment)
