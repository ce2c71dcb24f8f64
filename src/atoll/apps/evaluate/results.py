"""The results of `atoll evaluate` as frozen values: `RUN/evaluation/latest.json` and the cached metrics beside it.

Fields have the names of the keys in the files. A field with the default None is left out of the file if it was not
measured.

    latest = EvaluationResult.read(run)
    latest.models[0].metrics["inception"].kid.value
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import Field, TypeAdapter, ValidationError

from atoll.core import layout
from atoll.core.artifacts import Content
from atoll.core.errors import AtollError
from atoll.core.manifests import ComputeSpec
from atoll.core.names import GuidanceName, GuidanceWeights, Split
from atoll.experts.validation import Summary

if TYPE_CHECKING:
    from torch import Tensor

# One value at each evaluation of the velocity, from noise to data.
Series = tuple[float, ...]
Matrix = tuple[tuple[float | None, ...], ...]


def plain(result: object) -> object:
    """Return a result as JSON values, without the fields that were not measured."""
    return TypeAdapter(type(result)).dump_python(result, mode="json", exclude_defaults=True)


# Quality of generated images


class ReferenceSpec(Content):
    """The real images that generated ones are compared with."""

    source: str
    """A split of the run (train or validation), or an .npz file."""
    num_images: int
    """0 if the file has only their mean and covariance."""
    resolution: int


class Protocol(Content):
    """How a metric was measured: the generated images, the network that compares them, and the real images."""

    model: str
    num_images: int
    set: str
    """The artifact with the images, relative to the run."""
    routing: str | None = None
    steps: int
    guidance_scale: float
    guidance_interval: tuple[float, float]
    guidance: GuidanceName = "classifier-free"
    guidance_weights: GuidanceWeights = "separate"
    """Expert weights of the unconditional velocity."""
    rescale: float
    solver: str
    shift: float
    scheduler_times: bool
    seed: int
    dtype: str = "float32"
    """Precision of the networks."""
    extractor: str
    """Network that compares the images: a feature network, a perceptual distance or an image-text model."""
    weights_sha256: str
    resize: str | None = None
    """How the feature network resizes images; this field and the next two exist only for distances to real images."""
    reference: ReferenceSpec | None = None
    reference_fingerprint: str | None = None


class KernelDistance(Content):
    """KID: the squared maximum mean discrepancy with its standard error, and its mean over random subsets."""

    value: float
    """The unbiased estimate from all pairs of images."""
    standard_error: float
    """The error of `value`."""
    subsets: int
    subset_size: int
    subset_mean: float
    subset_std: float


class Coverage(Content):
    """Precision and recall of Kynkäänniemi et al. (2019); density and coverage of Naeem et al. (2020)."""

    precision: float
    recall: float
    density: float
    coverage: float
    neighbors: int
    num_images: int
    """Generated images; in an evaluation, the number of real ones is the same."""


class Baseline(Content):
    """The real-vs-real baseline: the distances between two sets of real images."""

    frechet: float
    kid: KernelDistance
    num_images: int
    """Real images that stand for the generated ones."""
    num_real: int
    """The other real images, which they are compared with."""


class Metrics(Content):
    """Distances between generated and real images in the features of one network."""

    frechet: float
    """Biased upward for finite sets: compare it with `real_baseline.frechet`."""
    kid: KernelDistance | None = None
    """None, like the next two, if the reference is a file of statistics without images."""
    precision_recall: Coverage | None = None
    real_baseline: Baseline | None = None
    protocol: Protocol


class Spread(Content):
    """The mean over independent items (prompts or images), their standard deviation, and the error of the mean."""

    mean: float
    std: float
    standard_error: float
    items: int
    protocol: Protocol

    @classmethod
    def of(cls, values: "Tensor", protocol: Protocol) -> Self:
        """Summarize one number for each item."""
        values = values.double()
        std = values.std().item() if len(values) > 1 else 0.0
        error = std / len(values) ** 0.5
        return cls(mean=values.mean().item(), std=std, standard_error=error, items=len(values), protocol=protocol)


# Sampling: routing, trajectories, cost


class ExpertUse(Content):
    """The use of the experts during sampling, at each evaluation of the velocity and on average."""

    t: Series
    weight: tuple[Series, ...]
    """The mean weight of each expert, (evaluations, experts)."""
    lead_share: tuple[Series, ...]
    """The share of images in which each expert has the largest weight, (evaluations, experts)."""
    active: Series
    """The mean number of experts that run, (evaluations,)."""
    mean_lead_share: Series
    mean_active: float


class Trajectory(Content):
    """Sampling trajectories from noise to data."""

    refinement: float
    """The relative change of the final latent when the number of steps doubles."""
    refinement_std: float
    num_trajectories: int
    steps: tuple[int, int]
    """N and 2 N."""
    t: Series | None = None
    """This field and the next three exist only for several experts."""
    distance_to_chosen_cluster: Series | None = None
    distance_to_other_clusters: Series | None = None
    chosen_is_closest_share: Series | None = None


class TrainingCost(ComputeSpec):
    """The training cost of all networks of a model."""

    longest_job_seconds: float
    memory_bytes: int
    """Estimated memory of the largest job, in one process."""
    teachers_flops: int | None = None
    """FLOPs of the training of the experts that a student was distilled from, which `flops` does not include."""


class SamplingCost(Content):
    """The cost of sampling one image: counted, planned and timed."""

    network_evaluations: float
    flops: float
    weights_bytes: int
    memory_bytes: int | None = None
    """Planned memory of one batch."""
    seconds: float | None = None


# Validation errors


class ErrorMatrix(Content):
    """The error of each expert (column) on each cluster (row); None for a cluster without validation images."""

    experts: tuple[int, ...]
    mean: Matrix
    by_time: tuple[Matrix, ...]


class RouterMetrics(Content):
    """The quality of cluster probabilities."""

    accuracy: Summary
    cross_entropy: Summary
    confidence: Summary
    calibration_error: Summary


class ExpertDiagnostics(Content):
    """The errors of the experts and of their mixtures."""

    velocity_error: dict[str, Summary]
    """By routing."""
    expert_on_cluster: ErrorMatrix
    disagreement_degrees: Summary
    own_cluster_error: Summary | None = None
    other_clusters_error: Summary | None = None
    disagreement_of_top_2_degrees: Summary | None = None
    router: RouterMetrics | None = None
    router_choice_is_best: Summary | None = None
    """How often the most probable expert has the smallest error."""
    router_choice_error: Summary | None = None
    """Error of the most probable expert."""
    router_others_error: Summary | None = None
    """Mean error of the other experts."""
    nearest: RouterMetrics | None = None
    """The same metrics for the routing `nearest`, whose probabilities come from the densities of the clusters."""


class Diagnostics(Content):
    """The errors of all models on the same validation images."""

    num_images: int
    """Over all clusters. Each image is noised once in every time bin."""
    seed: int
    experts: ExpertDiagnostics | None = None
    dense: dict[str, Summary]


# The whole result


class ModelResult(Content):
    """The metrics of one model."""

    model: str
    routing: str | None
    variant: str | None = None
    """Steps and solver, such as "4 heun steps", if the evaluation compares several."""
    label: str
    training: TrainingCost
    metrics: dict[str, Metrics] = Field(default_factory=dict)
    """By feature network."""
    alignment: Spread | None = None
    """Cosine between images and their prompts, over images."""
    diversity: Spread | None = None
    """Distance between images of one prompt, over prompts."""
    expert_use: ExpertUse | None = None
    """Only for several experts."""
    sampling: SamplingCost | None = None
    trajectory: Trajectory | None = None


class EvaluationResult(Content):
    """The result of evaluating a run."""

    run: str
    prompts: Split
    models: tuple[ModelResult, ...]
    diagnostics: Diagnostics | None = None

    @property
    def protocols(self) -> list[Protocol]:
        """Return how the images of each metric were generated."""
        sets = (one for model in self.models for one in (*model.metrics.values(), model.diversity) if one)
        return [one.protocol for one in sets]

    @property
    def protocol(self) -> Protocol | None:
        """Return how the images with the most steps were generated; None if no images were generated."""
        return max(self.protocols, key=lambda protocol: protocol.steps, default=None)

    def longest(self, model: ModelResult) -> ModelResult:
        """Return the row of the same model and routing with the most network evaluations."""
        rows = [row for row in self.models if (row.model, row.routing) == (model.model, model.routing)]
        return max(rows, key=lambda row: row.sampling.network_evaluations if row.sampling else 0)

    def metrics_in(self, extractor: str) -> Metrics:
        """Return the metrics of the first model in the features of one network."""
        return next(model.metrics[extractor] for model in self.models if extractor in model.metrics)

    @property
    def diversity(self) -> Spread | None:
        """Return the diversity of the first model, if it was measured."""
        return next((model.diversity for model in self.models if model.diversity), None)

    @property
    def extractors(self) -> list[str]:
        """Return the names of the feature networks."""
        return list(dict.fromkeys(name for model in self.models for name in model.metrics))

    def validation_error(self, model: ModelResult) -> Summary | None:
        """Return the error of a model on validation images; None if it was not measured."""
        found = self.diagnostics
        if model.routing and found and found.experts:
            return found.experts.velocity_error.get(model.routing)
        return found.dense.get(model.model) if found else None

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """Return the last evaluation of a run; None if there is none."""
        file = run / layout.LATEST_EVALUATION
        if not file.is_file():
            return None
        try:
            return cls.model_validate(json.loads(file.read_text(encoding="utf-8")))
        except ValidationError as error:
            raise AtollError(
                f"{file} was written by another version of Atoll; evaluate again with: atoll evaluate {run}"
            ) from error
