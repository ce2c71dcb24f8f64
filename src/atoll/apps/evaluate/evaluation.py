"""`atoll evaluate RUN`: generate images with every trained model, compute their metrics, and diagnose the ensemble.

Every slow step is an artifact below `RUN/evaluation`. You can interrupt the command; running it again resumes. Other
settings add new artifacts beside the old ones. `RUN/evaluation/latest.json` is the last result.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

from atoll.apps.evaluate import diagnostics, metrics, trajectories
from atoll.apps.evaluate.cache import cached
from atoll.apps.evaluate.extractors import open_alignment
from atoll.apps.evaluate.feature_sets import Reference, opened, reference_features
from atoll.apps.evaluate.generated import GeneratedSet, Prompts, generate, prompts_of
from atoll.apps.evaluate.models import EvaluatedModel, evaluated_models
from atoll.apps.evaluate.options import EvaluationOptions
from atoll.apps.evaluate.results import Diagnostics, EvaluationResult, ExpertDiagnostics, ModelResult, Trajectory, plain
from atoll.core import layout
from atoll.core.artifacts import Artifact, to_json
from atoll.core.config import Config
from atoll.core.device import device
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS
from atoll.data.dataset import Shards
from atoll.encoders.lpips import open_perceptual
from atoll.ensemble import SampleSettings
from atoll.ensemble.memory_plan import plan_memory
from atoll.experts.validation import Summary, ValidationSet


def evaluate(
    run: Path, config: Config, options: EvaluationOptions, *, processes: DistContext | None = None
) -> EvaluationResult | None:
    """Evaluate the models of a run. Results that exist already are not computed again.

    Several processes generate the images together; then the main process computes the metrics, and the others return
    None.
    """
    processes = processes or DistContext(0, 1, device())
    evaluation = Evaluation(run, config, options, processes)
    models = evaluated_models(run, options.models, options.routings if config.clusters.count > 1 else ("top-1",))
    processes.on_main(lambda: evaluation.check(models))
    if processes.size > 1:
        for model in models:
            for settings in evaluation.settings(model):
                evaluation.generate(model, settings)
        if not processes.is_main:
            return None
        evaluation = Evaluation(run, config, options, DistContext(0, 1, processes.device))
    references = {
        name: reference_features(run, config, options.reference, num_real=options.num_real, vision=name)
        for name in (options.extractors if options.does("metrics") else ())
    }
    result = EvaluationResult(
        run=str(run),
        prompts=options.prompts,
        models=tuple(
            evaluation.model(model, settings, references) for model in models for settings in evaluation.settings(model)
        ),
        diagnostics=evaluation.diagnose(models) if options.does("diagnostics") else None,
    )
    Artifact(run, layout.EVALUATION).write(Path(layout.LATEST_EVALUATION).name, to_json(plain(result)))
    return result


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one run with some options."""

    run: Path
    config: Config
    options: EvaluationOptions
    processes: DistContext
    """The processes that generate images together."""

    def prompts(self) -> dict[str, Prompts]:
        """Return the prompts of each set of generated images that the options need."""
        options, (count, seeds), found = self.options, self.options.diversity, {}
        if options.does("metrics"):
            found["metrics"] = self._prompts(options.num_images)
        if options.does("diversity"):
            found["diversity"] = self._prompts(count).repeated(seeds)
        return found

    def _prompts(self, count: int) -> Prompts:
        return prompts_of(self.run, self.config.clusters.count, count, split=self.options.prompts)

    def validation(self) -> Shards:
        """Open the validation images of all clusters."""
        shards = Shards.open(self.run, list(range(self.config.clusters.count)), "validation")
        if not len(shards):
            raise AtollError(
                f"{self.run} has no validation images; raise data.val_fraction, or use --without diagnostics"
            )
        return shards

    def check(self, models: Sequence[EvaluatedModel]) -> None:
        """Raise every error that needs no computation: of networks, feature networks and numbers of images."""
        options = self.options
        for model in models:
            model.check()
        prompts = self.prompts()
        for name in options.extractors if options.does("metrics") else ():
            real = Reference.of(self.run, self.config, options.reference, num_real=options.num_real, vision=name)
            if not options.allow_small:
                metrics.check_enough(
                    options.num_images, real.about.num_images or None, extractor=name, dimensions=real.dimensions()
                )
        if options.does("diversity"):
            open_perceptual(opened(options.extractors[0]), options.lpips)
        if options.does("metrics") and options.clip is not None:
            if prompts["metrics"].captions is None:
                raise AtollError("text alignment needs text prompts, and this run has no captions; leave --clip out")
            _opened_alignment(options.clip)
        if options.does("diagnostics"):
            self.validation()

    def settings(self, model: EvaluatedModel) -> list[SampleSettings]:
        """Return the sampling settings of a model: one for each of its rows."""
        own, routing = model.steps(), model.routing or "top-1"
        # Few-step students have settings of their own, so they have one row.
        return list(dict.fromkeys(replace(one, routing=routing).for_steps(own) for one in self.options.sampling()))

    def generate(self, model: EvaluatedModel, settings: SampleSettings) -> dict[str, GeneratedSet]:
        """Generate all sets of images of a model, or open those that exist."""
        return {
            purpose: generate(
                model,
                prompts,
                settings,
                purpose=purpose,
                batch_size=self.options.batch_size,
                load=self.options.load,
                processes=self.processes,
            )
            for purpose, prompts in self.prompts().items()
        }

    def model(self, model: EvaluatedModel, settings: SampleSettings, references: dict[str, Reference]) -> ModelResult:
        """Evaluate one model with one number of steps and one solver."""
        options, sets = self.options, self.generate(model, settings)
        compared, aligned, spread, use, cost = {}, None, None, None, None
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
        # The use of the experts, and the cost of one image
        if generated := images or repeated:
            use = generated.use()
            sizes = {size: len(rows) for size, rows in generated.prompts.by_size().items() if size is not None}
            counted = model.sampling(settings, 1.0 if use is None else use.mean_active, sizes or None)
            cost = counted.model_copy(
                update={
                    "memory_bytes": self._memory(model, len(generated)),
                    "seconds": generated.seconds() / len(generated),
                }
            )
        variant = None
        if len(all_settings := self.settings(model)) > 1:
            solver = f"{settings.solver} " if len({one.solver for one in all_settings}) > 1 else ""
            variant = f"{settings.steps} {solver}step{'' if settings.steps == 1 else 's'}"
        return ModelResult(
            model=model.model,
            routing=model.routing,
            variant=variant,
            label=f"{model.label}, {variant}" if variant else model.label,
            training=model.training(self.config),
            metrics=compared,
            alignment=aligned,
            diversity=spread,
            expert_use=use,
            sampling=cost,
            trajectory=self._trajectory(model, settings) if options.does("trajectories") else None,
        )

    def _memory(self, model: EvaluatedModel, num_images: int) -> int:
        """Return the planned memory of sampling, in bytes."""
        batch_size, guided = min(self.options.batch_size, num_images), self.options.guidance_scale != 1
        weak = guided and self.options.guidance == "autoguidance"
        made_from = {
            "networks": model.digests(),
            "batch_size": batch_size,
            "guided": guided,
            "max_loaded_experts": self.options.load.max_loaded_experts,
            "dtype": self.options.load.precision,
            **({"weak": True} if weak else {}),
        }

        def compute() -> int:
            return plan_memory(model.open(self.options.load), batch_size, guided=guided, weak=weak).total

        return cached(self.run, "plans", model.model, made_from=made_from, result=int, compute=compute)

    def _trajectory(self, model: EvaluatedModel, settings: SampleSettings) -> Trajectory:
        prompts = self._prompts(self.options.num_trajectories)
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
        """Measure errors on the same validation images: of every expert, of their mixtures, and of the dense models."""
        options, experts, shards = self.options, None, self.validation()
        data = [artifact.open(SHARDS).digest for artifact in shards.artifacts]
        # The seed of training, not of sampling: training and admission validate with it too, so their numbers agree.
        seed = self.config.train.seed
        # A limit above the largest cluster changes nothing. Clamping it lets such options share one cached result.
        limit = min(options.num_val, max(map(len, shards.cluster_ranges().values())))
        made_from = {"data": data, "images": limit, "seed": seed, "definition": diagnostics.DEFINITION_VERSION}
        routings = [model.routing for model in models if model.model == "experts" and model.routing is not None]
        if routings:
            ensemble = EvaluatedModel(self.run, "experts", routings[0])
            digests = sorted({digest for model in models if model.model == "experts" for digest in model.digests()})
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

        # Single experts are columns of the matrix of the experts; here are the models of one network for all clusters.
        # Few-step students have no velocity at the other times.
        dense_models = [model for model in models if model.routing is None and not model.model.startswith("expert:")]
        dense_models = [model for model in dense_models if model.steps() is None]
        return Diagnostics(
            num_images=ValidationSet(shards, seed, limit).images,
            seed=seed,
            experts=experts,
            dense={model.model: dense(model) for model in dense_models},
        )


# Opened once for all models.
_opened_alignment = cache(open_alignment)
