"""What `atoll evaluate` measures, as frozen values: `RUN/evaluation/latest.json` and the cached metrics beside it.

Fields have the names of the keys in the files. A field whose default is None is left out of the file where it was not
measured.

    latest = EvaluationResult.read(run)
    latest.models[0].metrics["inception"].kid.value
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_serializer
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from atoll.core import layout
from atoll.core.artifacts import Content
from atoll.core.errors import AtollError
from atoll.core.manifests import ComputeSpec
from atoll.experts.validation import Summary

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["train", "held-out"]
Series = tuple[float, ...]
"""One value at each evaluation of the velocity, from noise to data."""
Matrix = tuple[tuple[float | None, ...], ...]


def plain(result: object) -> object:
    """Return a result as values of JSON, without the fields that were not measured."""
    return TypeAdapter(type(result)).dump_python(result, mode="json", exclude_defaults=True)


# How metrics were taken


class SampleProtocol(Content):
    """How a set of images was generated."""

    model: str
    samples: int
    set: str
    """The artifact that holds the images."""
    routing: str | None = None
    steps: int
    guidance_scale: float
    guidance_interval: tuple[float, float]
    rescale: float
    solver: str
    shift: float
    scheduler_times: bool
    seed: int


class VisionProtocol(Content):
    """The network whose features are compared."""

    extractor: str
    weights_sha256: str
    resize: str


class ReferenceSpec(Content):
    """The real images that generated ones are compared with."""

    split: Split
    pictures: int
    resolution: int


class MetricsProtocol(SampleProtocol, VisionProtocol):
    """How generated images were compared with real ones."""

    reference: ReferenceSpec
    reference_fingerprint: str


class DiversityProtocol(SampleProtocol):
    """How images of one prompt were compared with each other."""

    distance: str
    weights_sha256: str
    seeds_per_prompt: int


class AlignmentProtocol(SampleProtocol):
    """How images were compared with their prompts."""

    image_text_model: str
    weights_sha256: str


class DiagnosticsProtocol(Content):
    """The held-out images that all models are validated on."""

    held_out_samples: int
    seed: int
    time_bins: int


# Quality of generated images


class Frechet(Content):
    """The Frechet distance."""

    value: float
    note: str


class KernelDistance(Content):
    """KID: the squared maximum mean discrepancy, its standard error, and the same over subsets as it is published."""

    value: float
    standard_error: float
    subsets: int
    subset_size: int
    subset_mean: float
    subset_std: float


class Kid(KernelDistance):
    """KID in a file."""

    note: str


class Coverage(Content):
    """Precision and recall of Kynkäänniemi et al. (2019); density and coverage of Naeem et al. (2020)."""

    precision: float
    recall: float
    density: float
    coverage: float
    neighbours: int


class PrecisionRecall(Coverage):
    """Precision and recall, with the number of real and of generated images."""

    pictures_of_each: int


class Baseline(Content):
    """The real-vs-real baseline: the distances between two sets of real images."""

    frechet: float
    kid: float
    kid_standard_error: float
    real_pictures: int
    against_real_pictures: int


class Distances(Content):
    """The distances of generated images to real ones."""

    frechet: Frechet
    kid: Kid
    precision_recall: PrecisionRecall
    floor: Baseline


class Metrics(Distances):
    """The distances of generated images to real ones through one network."""

    protocol: MetricsProtocol


class Spread(Content):
    """A mean over independent items (such as prompts), their standard deviation, and the error of the mean."""

    mean: float
    std: float
    standard_error: float
    items: int

    @classmethod
    def of(cls, values: "Tensor") -> Self:
        """Summarize one number for each item."""
        values = values.double()
        std = values.std().item() if len(values) > 1 else 0.0
        return cls(mean=values.mean().item(), std=std, standard_error=std / len(values) ** 0.5, items=len(values))


class Diversity(Spread):
    """The distance between images of one prompt, over prompts."""

    protocol: DiversityProtocol


class Alignment(Spread):
    """The cosine between images and their prompts, over images."""

    protocol: AlignmentProtocol


# What sampling does and costs


class ExpertUse(Content):
    """Which experts ran, at each evaluation and on average."""

    t: Series
    weight: tuple[Series, ...]
    """The mean weight of each expert."""
    lead_share: tuple[Series, ...]
    """The share of images in which each expert has the largest weight."""
    active: Series
    """The mean number of experts that run."""
    mean_lead_share: Series
    mean_active: float


class Trajectory(Content):
    """The way from noise to data."""

    refinement: float
    """The relative change of the final latent when the number of steps doubles."""
    refinement_std: float
    samples: int
    steps: tuple[int, int]
    t: Series | None = None
    """This and the next three are of several experts only."""
    distance_to_chosen_cluster: Series | None = None
    distance_to_other_clusters: Series | None = None
    chosen_is_closest_share: Series | None = None


class TrainingCost(ComputeSpec):
    """What all networks of a model cost in training."""

    longest_job_seconds: float
    estimated_bytes: int
    """The memory of the largest job, on one process."""


class ForwardCost(Content):
    """What one image costs, by count."""

    network_evaluations: float
    flops: float
    weights_bytes: int


class MemoryPlan(Content):
    """The memory that sampling plans with."""

    bytes: int


class SamplingCost(ForwardCost, MemoryPlan):
    """What one image costs, by count and by clock."""

    seconds: float


# Held-out errors


class ErrorMatrix(Content):
    """The error of each expert (column) on each cluster (row); None where nothing is held out."""

    experts: tuple[int, ...]
    mean: Matrix
    by_time: tuple[Matrix, ...]


class RouterMetrics(Content):
    """The quality of cluster probabilities."""

    accuracy: Summary
    cross_entropy: Summary
    confidence: Summary
    calibration_error: Summary


class RouterChoice(Content):
    """The router's first choice among the experts, and their errors."""

    is_best_share: Summary
    chosen_error: Summary
    others_error: Summary


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
    router_choice: RouterChoice | None = None
    nearest: RouterMetrics | None = None
    """Of the clusters' own densities."""


class Diagnostics(Content):
    """The errors of all models on the same held-out images."""

    protocol: DiagnosticsProtocol
    experts: ExpertDiagnostics | None = None
    dense: dict[str, Summary]


# All of it


class ModelResult(Content):
    """What was measured of one model."""

    model: str
    routing: str | None
    label: str
    training: TrainingCost
    metrics: dict[str, Metrics] = Field(default_factory=dict)
    """By the network whose features are compared."""
    alignment: Alignment | None = None
    diversity: Diversity | None = None
    expert_use: ExpertUse | None = None
    sampling: SamplingCost | None = None
    trajectory: Trajectory | None = None

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        # A file says whether a model was sampled without experts (null), or not sampled (no key).
        return {**({"expert_use": None} if self.sampling else {}), **write(self)}


class EvaluationResult(Content):
    """What was measured of a run."""

    run: str
    prompts: Split
    models: tuple[ModelResult, ...]
    diagnostics: Diagnostics | None = None

    @property
    def protocol(self) -> SampleProtocol | None:
        """Return how images were generated; None if they were not."""
        sets = (one for model in self.models for one in (*model.metrics.values(), model.diversity) if one)
        return next((one.protocol for one in sets), None)

    @property
    def metrics(self) -> list[Metrics]:
        """Return the metrics of all models."""
        return [metrics for model in self.models for metrics in model.metrics.values()]

    @property
    def diversity(self) -> Diversity | None:
        """Return the diversity of the first model, if it was measured."""
        return next((model.diversity for model in self.models if model.diversity), None)

    @property
    def extractors(self) -> list[str]:
        """Return the networks whose features were compared."""
        return list(dict.fromkeys(name for model in self.models for name in model.metrics))

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
                f"{file} was written by another version of Atoll; write it anew with: atoll evaluate {run}"
            ) from error
