"""The declared content of every kind of artifact, as plain frozen values. No torch here.

Trusted and untrusted manifests are parsed by the same code: `ArtifactKind.parse` checks every field and
names a wrong one in its error. Other packages turn these values into objects (`Statistics`, `Bridge`, networks).
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, SerializerFunctionWrapHandler, model_serializer

from atoll.core.artifacts import ArtifactKind, Content
from atoll.core.names import BridgeMode, Prediction, ScheduleName, TimesName, WeightingName
from atoll.core.networks import Count, NetworkDeclaration, Positive

ConditionKind = Literal["text", "pooled", "label", "arguments"]
ByTime = tuple[float | None, ...]
"""A metric in each of ten equal bins of the time t from 0 to 1; None in a bin without images."""


# Artifacts of `atoll prepare`


class BucketContent(Content):
    """The images of one size."""

    images: Count
    """Number of images."""
    cropped: float
    """Mean share of an image's pixels that is cropped."""


class IngestContent(Content):
    """The index of all readable images."""

    rows: Count
    """Number of readable images."""
    rejected: Count
    """Number of images that cannot be used."""
    captions: Count
    """Number of images with a caption."""
    splits: dict[str, int]
    """Number of images by split."""
    labels: dict[str, int]
    """Number of images per class name, in the order of the class indices."""
    sizes: dict[str, BucketContent]
    """Readable images by size in pixels (WIDTHxHEIGHT), the most frequent first."""


class FeaturesContent(Content):
    """Feature vectors (rows, dimensions) of all images."""

    rows: Count
    """Number of images."""
    dimensions: Positive
    """Width of a vector."""
    ingest: str | None = None
    """Digest of the index."""


class ClustersContent(Content):
    """The partition of the images into clusters."""

    method: str
    """The setting `clusters.method`."""
    sizes: dict[str, tuple[int, ...]]
    """Number of images of each cluster, by split."""
    imbalance: float
    """Largest cluster size divided by the mean size, over the training split."""
    num_fine: int | None
    """Number of fine clusters that were merged into the clusters."""


class ChannelStatistics(Content):
    """The normalization x0 = (z - mean) / std of each latent channel z, and mean and std of the normalized data."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_mean: tuple[float, ...] | None = None
    data_std: tuple[float, ...] | None = None


class LatentsContent(Content):
    """The latents (rows, channels, height, width) of all images, and their statistics over the training split."""

    rows: Count
    """Number of images."""
    shape: tuple[int, ...]
    """Channels, height and width of a latent; of the most frequent size of the training images."""
    shapes: dict[str, tuple[int, ...]] | None = None
    """The same for every size in pixels (WIDTHxHEIGHT), the most frequent first; None if there is one size."""
    statistics: ChannelStatistics
    """Mean and standard deviation of each channel over the training split."""
    precision: str = "float32"
    """In which the autoencoder computed."""
    ingest: str | None = None
    """Digest of the index."""


class TextContent(Content):
    """The token states (tokens, dimensions) and the pooled vector (pooled,) of every caption."""

    rows: Count
    """Number of captions."""
    max_tokens: Positive
    """Number of tokens to which a caption is truncated."""
    dimensions: Positive
    """Width of the token states."""
    pooled: Positive
    """Width of the pooled vector."""
    precision: str = "float32"
    """In which the text encoder computed."""
    base: NetworkDeclaration | None = None
    """The base network whose arguments are stored instead of token states."""


class PatchSpec(Content):
    """The patch features (rows, columns, dimensions) of an image, as integers of 8 bits."""

    model: str
    """The setting `features.model`."""
    weights: str
    """SHA-256 of the files of the features network."""
    grid: Positive
    """Rows and columns of the patches of a square image; those of other sizes are as large."""
    steps: tuple[float, ...]
    """Value of one integer step in each dimension."""


class PatchesContent(PatchSpec):
    """The patch features of all images."""

    rows: Count
    """Number of images."""
    ingest: str | None = None
    """Digest of the index."""


class LatentSpec(Content):
    """The autoencoder of the latents, and their shape (channels, height, width)."""

    autoencoder: str
    """Name of the autoencoder; `local` for a folder, since manifests are shared."""
    weights: str | None = None
    """SHA-256 of the autoencoder's files; None for pixels."""
    resolution: Positive | None = None
    """Side of the images in pixels."""
    shape: tuple[int, ...]
    """Channels, height and width of a latent; of the most frequent size if there are several."""
    sizes: tuple[tuple[Positive, Positive], ...] | None = None
    """Heights and widths of the latents of all sizes of the run, that of `shape` first; null if there is one."""


class TextSpec(Content):
    """The text encoder, and the shapes of its output."""

    encoder: str
    """Name of the text encoder; `local` for a folder."""
    weights: str | None = None
    """SHA-256 of the text encoder's files."""
    max_tokens: Positive
    """Number of tokens to which a caption is truncated."""
    dimensions: Positive
    """Width of the token states."""
    pooled: Positive | None = None
    """Width of the pooled vector."""
    captions: bool = False
    """Whether some image of the run has several captions."""
    base: NetworkDeclaration | None = None
    """The base network whose arguments the captions are encoded to; null if they are encoded to tokens."""


class DataSpec(Content):
    """The properties of the training data that a network depends on."""

    labels: tuple[str, ...]
    """Names of the classes."""
    source: str
    """Kind of the source, such as `folder`."""
    fingerprint: str
    """Hash of the names, sizes and metadata of the source."""
    latents: LatentSpec
    """Autoencoder and shape of the latents."""
    statistics: ChannelStatistics
    """Normalization of the latents."""
    text: TextSpec | None
    """Text encoder; null without text."""


class ShardsContent(DataSpec):
    """The shards of one cluster."""

    cluster: Count
    """Index of the cluster."""
    clusters: Positive
    """Number of clusters of the run."""
    rows: dict[str, int]
    """Number of images by split."""
    flip: bool = False
    """Whether training draws mirror images."""
    patches: PatchSpec | None = None
    """The patch features for `train.align`; null if there are none."""


# Networks and their training


class ScheduleSpec(Content):
    """A noise schedule: its name, and the options that its constructor was given."""

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
        # Each schedule has few of the options, so only those that were given are stored.
        return {name: value for name, value in serialize(self).items() if value is not None}


class ObjectiveSpec(Content):
    """A training objective. `atoll.flow.objective(**spec.model_dump())` builds it."""

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
    """Options of the bridge, which converts an expert's prediction into the common velocity."""

    mode: BridgeMode = "exact"
    x0_bound: float | None = 10.0
    prediction_error: float = 0.0


class ComputeSpec(Content):
    """The cost of a training job."""

    images: Count
    parameters: Count
    flops: Count
    seconds: float


class StartSpec(Content):
    """The shared start of an expert."""

    manifest: str
    """Digest of its manifest."""
    compute: ComputeSpec
    """Cost of its training, which experts of the same start share."""


class NetworkContent(DataSpec):
    """The declared content of a trained network: everything that is needed to use it."""

    job: str
    """Name of the training job, such as `experts/003`."""
    clusters: tuple[int, ...]
    """Clusters that it was trained on; for a router, those that it chooses from."""
    network: NetworkDeclaration
    """Class and fields of the network, as in its config.json."""
    conditioning: tuple[ConditionKind, ...]
    """What the network receives besides latent and timestep."""
    compute: ComputeSpec | None = None
    """Cost of its training."""
    validation_loss: float | None = None
    """Validation loss; null without validation images."""
    loss_by_time: ByTime | None = None
    """Validation loss in ten bins of t; null in a bin without images."""
    ema: str | None = None
    """Name of the EMA whose weights it has."""
    manifest: str | None = None
    """In an export: the digest of the network's manifest in its run."""


Curve = Annotated[
    tuple[Annotated[tuple[FiniteFloat, ...], Field(min_length=21, max_length=21)], ...],
    Field(min_length=10, max_length=10),
]
"""Cross-entropies in nats, in ten bins of t for every temperature of `atoll.experts.calibration.GRID`."""


class ExpertContent(NetworkContent):
    """An expert, the shared start, the monolith, the student or the merged network."""

    objective: ObjectiveSpec
    """How it was trained."""
    bridge: BridgeSpec = BridgeSpec()
    teachers: tuple[str, ...] | None = None
    """Of a student: the digests of the experts that it was distilled from."""
    teacher_dtype: str | None = None
    """Of a student: the precision in which the teachers computed its targets."""
    start: StartSpec | None = None
    """The shared start whose weights an expert or a student began with."""
    steps: Positive | None = None
    """Of a few-step student: the number of its sampling steps, at equidistant times."""
    calibration: Curve | None = None
    """Of an expert: the cross-entropy of `nearest` routing on its validation images; null if it was the only one with a
    density."""
    sources: tuple[str, ...] | None = None
    """Of a merged network: the digests of the experts whose weights it averages."""


class RouterContent(NetworkContent):
    """A router."""

    cluster_sizes: tuple[int, ...]
    """Number of training images of each cluster."""
    prior_entropy: float
    """Entropy of the cluster sizes in nats: the best possible loss at t = 1 of an unconditioned router."""
    temperature: float
    """Divisor of the logits, fitted to validation images; 1 without them."""
    validation_accuracy: float | None = None
    """Accuracy on validation images, over all times."""
    accuracy_by_time: ByTime | None = None
    """Accuracy on validation images in ten bins of t."""
    chance_accuracy: float | None = None
    """Accuracy of always choosing the largest cluster."""
    at_chance: bool | None = None
    """Whether even almost clean images are hardly classified better than that."""


def training_costs(contents: Iterable[NetworkContent]) -> list[ComputeSpec]:
    """Return the training costs of networks, and that of their shared start once."""
    contents = list(contents)
    starts = [content.start for content in contents if isinstance(content, ExpertContent) and content.start]
    shared = {start.manifest: start.compute for start in starts}
    return [content.compute for content in contents if content.compute] + list(shared.values())


class CheckpointContent(Content):
    """The training state of a job after `images` images."""

    images: Positive
    seconds: float


class PipelineContent(Content):
    """An exported pipeline."""

    experts: Positive
    model: str = "experts"


# The version of a kind is raised when its fields change their meaning, so that old artifacts are refused by version.
INGEST = ArtifactKind("ingest", IngestContent)
FEATURES = ArtifactKind("features", FeaturesContent)
CLUSTERS = ArtifactKind("clusters", ClustersContent)
LATENTS = ArtifactKind("latents", LatentsContent)
TEXT = ArtifactKind("text", TextContent)
PATCHES = ArtifactKind("patches", PatchesContent)
SHARDS = ArtifactKind("shards", ShardsContent)
EXPERT = ArtifactKind("expert", ExpertContent)
ROUTER = ArtifactKind("router", RouterContent)
CHECKPOINT = ArtifactKind("checkpoint", CheckpointContent)
PIPELINE = ArtifactKind("pipeline", PipelineContent)
