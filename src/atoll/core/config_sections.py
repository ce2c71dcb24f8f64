"""The sections of a run's configuration. Every key has a default, and a description that `atoll init` writes."""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from atoll.core import networks
from atoll.core.errors import AtollError, unknown
from atoll.core.names import OBJECTIVES, Prediction, ScheduleName, TimesName, WeightingName
from atoll.core.sizes import Size


class Section(BaseModel):
    """A section of the configuration: frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ObjectiveSection(Section):
    """The training objective of one expert, with the names of `atoll.flow`."""

    schedule: ScheduleName = Field("linear", description="noise schedule")
    prediction: Prediction = Field("velocity", description="prediction target of the network")
    times: TimesName = Field("uniform", description="distribution of the training times")
    time_mean: float = Field(0.0, description="mean of logit-normal and log-normal times")
    time_std: float = Field(1.0, gt=0, description="standard deviation of logit-normal and log-normal times")
    time_shift: float = Field(1.0, gt=0, description="values above 1 train more at high noise")
    weighting: WeightingName = Field("constant", description="loss weight as a function of time")
    min_snr_gamma: float = Field(5.0, gt=0, description="gamma of the min-snr weighting")


NAMED_OBJECTIVES: dict[str, ObjectiveSection] = {name: ObjectiveSection(**parts) for name, parts in OBJECTIVES.items()}


def _objective_by_name(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value not in NAMED_OBJECTIVES:
        raise ValueError(unknown("objective", value, OBJECTIVES))
    return NAMED_OBJECTIVES[value]


def _checked(kind: Literal["DiT", "Router"]) -> AfterValidator:
    """Return a validator of a network's name, fields and values, so that errors appear before the network is built."""

    def check(choice: NetworkChoice) -> NetworkChoice:
        try:
            networks.check_choice(choice, kind)
        except AtollError as error:
            raise ValueError(str(error)) from error
        return choice

    return AfterValidator(check)


def _folders(value: object) -> object:
    folders = value if isinstance(value, dict) else {"default": "" if value is None else value}
    if all((key == "default" or isinstance(key, int)) and isinstance(folders[key], str) for key in folders):
        return value
    raise ValueError(f"expected a folder, or {{default: FOLDER, 3: FOLDER}} by expert, got {value!r}")


def _buckets(value: object) -> object:
    """Check the sizes of a list. YAML reads an unquoted `off` as false."""
    if isinstance(value, list | tuple):
        try:
            sizes = [Size.parse(str(item)) for item in value]
        except AtollError as error:
            raise ValueError(str(error)) from error
        if len(set(sizes)) < len(sizes) or not sizes:
            raise ValueError(f"expected different sizes, at least one, got {value!r}")
        return [str(size) for size in sizes]
    value = "off" if value is False else value
    if value not in ("auto", "off"):
        raise ValueError(f"expected auto, off, or a list of sizes such as [64x64, 96x64], got {value!r}")
    return value


def _captions(value: object) -> object:
    """Check that several columns are at least one, and that their weights are positive."""
    if isinstance(value, list | dict) and (not value or not all(isinstance(name, str) and name for name in value)):
        raise ValueError(f"expected the names of columns or JSON keys, got {value!r}")
    if isinstance(value, list) and len(set(value)) < len(value):
        raise ValueError(f"expected different names, got {value!r}")
    return value


Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ExpertKey = Literal["default"] | int
_EMA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
"""Names of EMAs become parts of file names, so they must not contain a path separator. 32 characters are a choice."""


def _check_ema_names(ema: dict[str, float]) -> dict[str, float]:
    for name in ema:
        if not _EMA_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a name of at most 32 letters, digits, '-' and '_'")
    return ema


WEAK = "weak"
"""Name of the EMA that is the weak network of autoguidance."""
HalfLives = Annotated[dict[str, float], Field(min_length=1), AfterValidator(_check_ema_names)]
NetworkChoice = str | dict[str, Any]  # a named size, or some fields of a network
ExpertNetwork = Annotated[NetworkChoice, _checked("DiT")]
RouterNetwork = Annotated[NetworkChoice, _checked("Router")]
NamedObjective = Annotated[ObjectiveSection, BeforeValidator(_objective_by_name)]


class DataSection(Section):
    """The source of the images and how they are stored."""

    source: str = Field("emoji", description="folder, tar files, parquet files, name of a datasets dataset, or emoji")
    kind: Literal["folder", "webdataset", "parquet", "datasets", "emoji"] | None = Field(
        None, description="kind of the source; null detects it"
    )
    image: str | None = Field(None, description="column of the images; null detects it by its usual names")
    caption: Annotated[str | list[str] | dict[str, Weight] | None, BeforeValidator(_captions)] = Field(
        None,
        description="column or JSON key of the captions, a list of several, or their weights "
        "{name: weight}; null detects it",
    )
    caption_lines: bool = Field(False, description="make every line of a .txt file a caption of its own")
    label: str | None = Field(None, description="column or JSON key of the class labels; null detects it")
    id: str | None = Field(None, description="column of the image ids; null detects it")
    split: str = Field("train", description="split of a datasets dataset")
    val_fraction: float = Field(0.05, ge=0, lt=1, description="fraction of the captions held out from training")
    resolution: int = Field(64, ge=8, description="side of the square images, in pixels")
    buckets: Annotated[Literal["auto", "off"] | list[str], BeforeValidator(_buckets)] = Field(
        "off",
        description="sizes that images are cropped to: off is the square alone, auto finds sizes of about the same "
        "area that fit the images; or a list of sizes such as [64x64, 96x64]",
    )
    max_upscale: float = Field(
        2.0, ge=1, description="with buckets, reject images that would be enlarged by a larger factor"
    )
    flip: bool = Field(False, description="train on each image and its mirror image, drawn with equal probability")
    max_rejects: float = Field(0.01, ge=0, le=1, description="stop if a larger fraction of the images is unreadable")
    chunk: int = Field(1024, ge=1, description="images per file of a stage; an interruption loses at most one chunk")
    shard_rows: int = Field(8192, ge=1, description="images per shard file")
    workers: int = Field(2, ge=1, description="threads that read and decode images")


class FeaturesSection(Section):
    """The image features that clustering and `train.align` use."""

    model: str = Field(
        "efficientnet-lite0", description="efficientnet-lite0, or a transformers vision model (hub name or folder)"
    )
    resolution: int | None = Field(None, ge=32, description="input side in pixels; null is the network's default")
    batch_size: int = Field(32, ge=1, description="images per forward pass")
    patch_dimensions: int = Field(
        0, ge=0, le=1024, description="dimensions of the stored patch features, which train.align needs: 64; 0 is none"
    )


class ClustersSection(Section):
    """The partition of the data. Each cluster trains one expert."""

    count: int = Field(8, ge=1, description="number of clusters and experts; 1 trains one dense model")
    method: Literal["features", "labels", "random"] = Field(
        "features",
        description="cluster by features or class labels, or at random (ablation: not learnable by a router)",
    )
    num_fine: int = Field(1024, ge=1, description="fine clusters before merging into `count`; fewer for small datasets")
    max_imbalance: float = Field(1.25, gt=1, description="largest allowed cluster size divided by the mean size")
    sample_rows: int = Field(131072, ge=1, description="images the fine clustering is fitted to; bounds its memory")
    iterations: int = Field(25, ge=1, description="iterations of the fine clustering")
    seed: int = Field(0, ge=0, lt=2**31, description="random seed of the partition")


class LatentsSection(Section):
    """The latents that experts are trained on."""

    autoencoder: str = Field(
        "emoji",
        description="emoji (built in), pixels (no autoencoder), or a diffusers AutoencoderKL or AutoencoderTiny",
    )
    normalization: Literal["per-channel", "scale"] = Field(
        "per-channel", description="per-channel mean 0 and std 1, or the autoencoder's shift and scaling factor"
    )
    batch_size: int = Field(32, ge=1, description="images per forward pass")
    dtype: Literal["float16", "bfloat16", "float32"] = Field("float16", description="stored precision")


class TextSection(Section):
    """The text embeddings that experts are conditioned on."""

    encoder: str = Field("minilm", description="minilm, none, or a transformers text encoder (hub name or folder)")
    max_tokens: int = Field(32, ge=1, description="longer captions are truncated to this many tokens")
    batch_size: int = Field(64, ge=1, description="captions per forward pass")
    dtype: Literal["float16", "bfloat16", "float32"] = Field("float16", description="stored precision")


class AlignSection(Section):
    """Alignment of a middle block with patch features."""

    weight: float = Field(0.5, gt=0, le=1000, description="weight of the alignment in the loss")
    until: float = Field(0.4, gt=0, le=1, description="share of total_images after which it is off")
    block: int | None = Field(
        None, ge=1, description="aligned block, counted from 1; null is 2/7 of all blocks, as in REPA (8 of 28)"
    )


class TrainSection(Section):
    """Training settings of every job. Those that are not experts can override some of them in their sections."""

    total_images: int = Field(500_000, ge=1, description="images seen in training, counted with repetition")
    batch_size: int = Field(64, ge=1, description="images per optimizer step, over all processes")
    grad_accum_steps: int = Field(1, ge=1, description="micro-batches per optimizer step")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw, or muon for the matrices of the transformer blocks and adamw for the rest"
    )
    lr: float = Field(3e-4, gt=0, description="learning rate")
    warmup_images: int = Field(10_000, ge=0, description="images over which the learning rate rises linearly from 0")
    lr_schedule: Literal["constant", "cosine"] = Field("constant", description="learning rate after the warmup")
    beta2: float = Field(0.99, gt=0, lt=1, description="beta2 of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute precision; auto is bfloat16 on GPUs that compute in it; weights stay float32"
    )
    ema: HalfLives = Field(
        {"ema": 25_000.0},
        description="EMAs of the weights, name: half-life in images",
    )
    result_ema: str | None = Field(None, description="name of the EMA that is the result; null is the first")
    weak_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="also store the EMA after this share of total_images, as the weak network of autoguidance; 0 is "
        "none. For experts and the monolith",
    )
    conditioning: Literal["auto", "text", "label", "both", "none"] = Field(
        "auto", description="what experts are conditioned on; auto is text if the data has captions, else labels"
    )
    cfg_dropout: float = Field(0.1, ge=0, le=1, description="probability of dropping the conditioning, for guidance")
    init_from: Annotated[str | dict[ExpertKey, str] | None, BeforeValidator(_folders)] = Field(
        None, description="folder of initial weights, or {default: FOLDER, 3: FOLDER} per expert; null is random"
    )
    align: AlignSection | None = Field(
        None, description="alignment with the stored patch features: {weight: 0.5, until: 0.4}; null is none"
    )
    activation_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    compile: bool | Literal["auto"] = Field(
        "auto", description="compile the blocks of the network with torch.compile; auto is true on GPUs"
    )
    parallel: Literal["ddp", "fsdp2"] = Field("ddp", description="data parallelism under torchrun")
    save_every: int = Field(50_000, ge=1, description="images between two checkpoints")
    keep_last: int = Field(2, ge=1, description="number of checkpoints to keep")
    log_every: int = Field(2_000, ge=1, description="images between two lines of metrics.jsonl")
    validate_every: int = Field(
        0,
        ge=0,
        description="images between two validations of the resulting EMA, logged as validation_loss; 0 disables them",
    )
    sample_every: int = Field(100_000, ge=0, description="images between two sample grids; 0 disables them")
    sample_count: int = Field(16, ge=0, description="images per sample grid")
    sample_guidance_scale: float = Field(
        3.0, ge=0, description="guidance scale of the sample grids; 1 disables guidance"
    )
    workers: int = Field(2, ge=1, description="threads that read batches ahead")
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = Field([], description="trackers besides metrics.jsonl")
    seed: int = Field(0, ge=0, description="random seed of weights, data order, timesteps and noise")

    @property
    def weak_images(self) -> int:
        """Number of images after which the weak network is stored, in full steps; 0 without one."""
        return math.ceil(self.weak_share * self.total_images / self.batch_size) * self.batch_size

    @property
    def averages(self) -> int:
        """Number of averaged weights that training keeps: the EMAs and the weak network."""
        return len(self.ema) + (self.weak_share > 0)

    @model_validator(mode="after")
    def _micro_batches_are_equal(self) -> Self:
        if self.batch_size % self.grad_accum_steps:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of grad_accum_steps {self.grad_accum_steps}"
            )
        return self

    @model_validator(mode="after")
    def _result_is_an_ema(self) -> Self:
        if self.result_ema not in (None, *self.ema):
            raise ValueError(f"result_ema is {self.result_ema!r}; expected one of {', '.join(self.ema)}")
        if self.weak_share and WEAK in self.ema:
            raise ValueError(f"with weak_share, the weak network has the name {WEAK}; give this EMA another one")
        return self

    @model_validator(mode="after")
    def _muon_has_whole_matrices(self) -> Self:
        if self.optimizer == "muon" and self.parallel == "fsdp2":
            raise ValueError("muon needs whole matrices, and fsdp2 shards them; set parallel: ddp or optimizer: adamw")
        return self


class SharedStartSection(Section):
    """One dense network that all experts start from. Null takes the value of the train section."""

    flops_share: float = Field(
        0.0, ge=0, lt=1, description="share of the experts' training FLOPs that the start takes; 0 disables it"
    )
    batch_size: int | None = Field(None, ge=1, description="images per optimizer step")
    lr: float | None = Field(None, gt=0, description="learning rate")
    lr_schedule: Literal["constant", "cosine"] | None = Field(None, description="learning rate after the warmup")


class RouterSection(Section):
    """Training settings of the router. Null takes the value of the train section."""

    network: RouterNetwork = Field("DiT-B/2", description="named size, or the fields of a network")
    conditioning: Literal["none", "pooled", "label", "auto"] = Field(
        "none",
        description="what the router is conditioned on; auto is the pooled caption if there is one, else the label",
    )
    total_images: int | None = Field(None, ge=1, description="images seen in training")
    batch_size: int | None = Field(None, ge=1, description="images per optimizer step")
    lr: float | None = Field(None, gt=0, description="learning rate")
    lr_schedule: Literal["constant", "cosine"] | None = Field(None, description="learning rate after the warmup")


class MonolithSection(Section):
    """Training settings of the monolith, which sees all clusters. Null takes the value of the train section."""

    total_images: int | None = Field(None, ge=1, description="images seen in training")
    batch_size: int | None = Field(None, ge=1, description="images per optimizer step")
    lr: float | None = Field(None, gt=0, description="learning rate")
    lr_schedule: Literal["constant", "cosine"] | None = Field(None, description="learning rate after the warmup")
    warmup_images: int | None = Field(
        None, ge=0, description="images over which the learning rate rises linearly from 0"
    )
    ema: HalfLives | None = Field(None, description="EMAs of the weights, name: half-life in images")
    save_every: int | None = Field(None, ge=1, description="images between two checkpoints")
    log_every: int | None = Field(None, ge=1, description="images between two lines of metrics.jsonl")


class StudentSection(Section):
    """Training settings of the distilled student. Null takes the value of the train section."""

    network: ExpertNetwork | None = Field(
        None, description="named size, or the fields of a network; null is networks.default"
    )
    total_images: int | None = Field(None, ge=1, description="images seen in training")
    batch_size: int | None = Field(None, ge=1, description="images per optimizer step")
    lr: float | None = Field(None, gt=0, description="learning rate")
    init_from: str | None = Field(
        None,
        description="initial weights: start (the shared start), expert:K, or a folder; null is train.init_from, and "
        "its expert for a few-step student of one expert",
    )
    cluster: bool = Field(False, description="tell the student the cluster; in sampling, the routing chooses it")
    steps: int = Field(
        0, ge=0, description="sampling steps of a few-step student, such as 1, 2 or 4; 0 samples as its experts"
    )
    guidance_scale: float = Field(
        1.0, ge=0, description="guidance scale that a few-step student learns; it then samples without guidance"
    )
    corrector: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="share of the batch that corrects the distribution of a few-step student's samples, such as 0.25",
    )
    block: int = Field(8192, ge=1, description="images whose targets are computed at once, one expert after the other")


class IslandSection(Section):
    """Resources that atoll launch requests for each training job. They do not change results."""

    nodes: int = Field(1, ge=1, description="nodes per job")
    gpus: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="GPUs per node; auto is one if this machine has GPUs, and on Slurm and Ray if train.precision is "
        "bfloat16, as in the presets for GPUs; else none",
    )
    processes: int | None = Field(None, ge=1, description="processes per node; null is one per GPU, or one")
    cores: int | None = Field(
        None, ge=1, description="CPU cores per node; null is an equal share, or the scheduler's default"
    )
    memory_gb: float | None = Field(None, gt=0, description="memory per node in GB; null is the scheduler's default")
    hours: float | None = Field(
        None, gt=0, description="time limit of one attempt in hours; null is the scheduler's default"
    )
    setup: list[str] = Field([], description="Slurm: shell lines before every job, such as module load cuda")
    sbatch: list[str] = Field([], description="Slurm: additional sbatch options, such as --partition=gpu")
    resources: dict[str, float] = Field({}, description="Ray: additional resources per job")
