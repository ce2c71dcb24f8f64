"""What every kind of artifact declares in its manifest, as plain frozen values. No torch here.

A manifest that Atoll wrote and one that a stranger offers are read by the same code: `Kind.parse` checks every field
and names the one that is wrong. Later packages turn these values into objects (`Statistics`, `Bridge`, networks).
"""

from typing import Annotated, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from atoll.core.artifacts import Content, Kind
from atoll.core.names import BridgeMode, Prediction, ScheduleName, TimesName, WeightingName
from atoll.core.networks import StoredNetwork

Conditioning = Literal["text", "pooled", "label"]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
ByTime = tuple[float | None, ...]
"""A metric in each of ten bins of time; None where there was no image."""


# The data


class IngestContent(Content):
    """The index of all images."""

    rows: Count
    rejected: Count
    captions: Count
    splits: dict[str, int]
    labels: dict[str, int]
    """Images of each class, in the order of the classes' numbers."""


class FeaturesContent(Content):
    """Features of all images."""

    rows: Count
    dimensions: Positive


class ClustersContent(Content):
    """The partition."""

    method: str
    sizes: dict[str, tuple[int, ...]]
    """Images of each cluster, by split."""
    imbalance: float
    fine: int | None


class ChannelStatistics(Content):
    """The normalization x0 = (z - mean) / std of each latent channel z, and the moments of the data that it gives."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_mean: tuple[float, ...] | None = None
    data_std: tuple[float, ...] | None = None


class LatentsContent(Content):
    """The latents of all images, with mean and std of each channel over the training split."""

    rows: Count
    shape: tuple[int, ...]
    statistics: ChannelStatistics


class TextContent(Content):
    """The token states and pooled vectors of all captions."""

    rows: Count
    max_tokens: Positive
    dimensions: Positive
    pooled: Positive


class LatentSpec(Content):
    """The autoencoder that made the latents, and their shape (channels, height, width)."""

    autoencoder: str
    weights: str | None = None
    """SHA-256 of the autoencoder's files; None for pixels."""
    resolution: Positive | None = None
    shape: tuple[int, ...]


class TextSpec(Content):
    """The text encoder, and the shapes of what it gives."""

    encoder: str
    weights: str | None = None
    max_tokens: Positive
    dimensions: Positive
    pooled: Positive | None = None


class DataSpec(Content):
    """What a network must know of the data it is trained on."""

    labels: tuple[str, ...]
    source: str
    fingerprint: str
    latents: LatentSpec
    statistics: ChannelStatistics
    text: TextSpec | None


class ShardsContent(DataSpec):
    """The shards of one cluster."""

    cluster: Count
    clusters: Positive
    rows: dict[str, int]


# The networks


class ScheduleSpec(Content):
    """A noise schedule: its name, and those options of its constructor that were given."""

    name: ScheduleName | Literal["ddpm"]
    alphas_cumprod: tuple[float, ...] | None = None
    steps: int | None = None
    beta_start: float | None = None
    beta_end: float | None = None
    offset: float | None = None
    max_beta: float | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None
    rho: float | None = None

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class ObjectiveSpec(Content):
    """A training objective: `atoll.flow.objective(**spec.model_dump())` builds it."""

    schedule: ScheduleSpec
    prediction: Prediction
    times: TimesName
    time_low: float
    time_high: float
    time_mean: float
    time_std: float
    time_shift: float
    weighting: WeightingName
    min_snr_gamma: float


class BridgeSpec(Content):
    """Options of the bridge from an expert's prediction to velocity."""

    mode: BridgeMode = "exact"
    x0_bound: float | None = 10.0
    prediction_error: float = 0.0


class ComputeSpec(Content):
    """What a training job cost."""

    images: Count
    parameters: Count
    flops: Count
    seconds: float


class NetworkContent(DataSpec):
    """What a trained network declares: all that whoever uses it needs to know."""

    job: str
    clusters: tuple[int, ...]
    network: StoredNetwork
    conditioning: tuple[Conditioning, ...]
    compute: ComputeSpec | None = None
    held_out_loss: float | None = None
    loss_by_time: ByTime | None = None
    manifest: str | None = None
    """In an export: the digest of the manifest in the run that it comes from."""


class ExpertContent(NetworkContent):
    """An expert, the monolith or the student."""

    objective: ObjectiveSpec
    bridge: BridgeSpec = BridgeSpec()
    teachers: tuple[str, ...] | None = None
    """Digests of the experts that a student was distilled from."""


class RouterContent(NetworkContent):
    """A router."""

    cluster_sizes: tuple[int, ...]
    prior_entropy: float
    temperature: float
    held_out_accuracy: float | None = None
    accuracy_by_time: ByTime | None = None
    chance_accuracy: float | None = None
    at_chance: bool | None = None


class CheckpointContent(Content):
    """The state of a job after some images."""

    images: Positive
    seconds: float


class PipelineContent(Content):
    """An exported model."""

    experts: Positive
    model: str = "experts"


INGEST = Kind("ingest", IngestContent)
FEATURES = Kind("features", FeaturesContent)
CLUSTERS = Kind("clusters", ClustersContent)
LATENTS = Kind("latents", LatentsContent)
TEXT = Kind("text", TextContent)
SHARDS = Kind("shards", ShardsContent)
EXPERT = Kind("expert", ExpertContent)
ROUTER = Kind("router", RouterContent)
CHECKPOINT = Kind("checkpoint", CheckpointContent)
PIPELINE = Kind("pipeline", PipelineContent)
