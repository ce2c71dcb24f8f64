"""The configuration of a run: YAML checked by pydantic, with the same keys as dotted options on the command line.

A run's settings are in `RUN/atoll.yaml`. Every key has a default; an unknown key is an error that names the nearest
right one. `--section.key VALUE` on any verb that takes a run overrides the file, and VALUE is read as YAML, so a file
and a command line are checked by the same code and fail with the same words.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from atoll.core import networks
from atoll.core.errors import AtollError, nearest
from atoll.core.layout import CONFIG_FILE
from atoll.core.names import OBJECTIVES, Prediction, ScheduleName, TimesName, WeightingName, unknown_objective


class Section(BaseModel):
    """A part of the configuration: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Objective(Section):
    """How one expert is trained; the names are those of `atoll.flow`."""

    schedule: ScheduleName = Field("linear", description="noise schedule")
    prediction: Prediction = Field("velocity", description="what the network answers with")
    times: TimesName = Field("uniform", description="how training times are drawn")
    time_mean: float = Field(0.0, description="mean of logit-normal and log-normal times")
    time_std: float = Field(1.0, gt=0, description="spread of logit-normal and log-normal times")
    time_shift: float = Field(1.0, gt=0, description="above 1: more training at high noise")
    weighting: WeightingName = Field("constant", description="weight of each time in the loss")
    min_snr_gamma: float = Field(5.0, gt=0, description="gamma of the min-snr weighting")


NAMED_OBJECTIVES: dict[str, Objective] = {name: Objective(**parts) for name, parts in OBJECTIVES.items()}


def _objective_by_name(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value not in NAMED_OBJECTIVES:
        raise ValueError(unknown_objective(value))
    return NAMED_OBJECTIVES[value]


def _checked(kind: Literal["DiT", "Router"]) -> AfterValidator:
    """Check a network's name, fields and values when the configuration is read, not when the network is built."""

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


ExpertKey = Literal["default"] | int
_EMA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
"""Names of EMAs become parts of file names, so they must not lead to another folder."""


def _check_ema_names(ema: dict[str, float]) -> dict[str, float]:
    for name in ema:
        if not _EMA_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a name of at most 32 letters, digits, '-' and '_'")
    return ema


HalfLives = Annotated[dict[str, float], Field(min_length=1), AfterValidator(_check_ema_names)]
NetworkChoice = str | dict[str, Any]  # a named size, or some fields of a network
ExpertNetwork = Annotated[NetworkChoice, _checked("DiT")]
RouterNetwork = Annotated[NetworkChoice, _checked("Router")]
NamedObjective = Annotated[Objective, BeforeValidator(_objective_by_name)]


class Data(Section):
    """The pictures: where they come from and how they are cut up."""

    source: str = Field("emoji", description="a folder, tars, parquet files, a datasets name, or the built-in emoji")
    kind: Literal["folder", "webdataset", "parquet", "datasets", "emoji"] | None = Field(
        None, description="take the source for this kind; null finds out"
    )
    image: str | None = Field(None, description="column of the pictures; null finds it by its usual name, as below")
    caption: str | None = Field(None, description="column or JSON key of the captions")
    label: str | None = Field(None, description="column or JSON key of the classes")
    id: str | None = Field(None, description="column of the ids")
    split: str = Field("train", description="split of a datasets name")
    held_out: float = Field(0.05, ge=0, lt=1, description="share of the captions that training never sees")
    resolution: int = Field(64, ge=8, description="side of the square pictures, in pixels")
    max_rejects: float = Field(0.01, ge=0, le=1, description="stop if a larger share of the pictures is bad")
    chunk: int = Field(1024, ge=1, description="samples in one file of a stage: what an interruption can cost")
    shard_rows: int = Field(8192, ge=1, description="samples in one shard file")
    workers: int = Field(2, ge=1, description="threads that read and decode pictures ahead of the network")


class Features(Section):
    """What the clustering sees of a picture."""

    model: str = Field(
        "efficientnet-lite0", description="efficientnet-lite0, or a transformers vision model by name or folder"
    )
    resolution: int | None = Field(None, ge=32, description="side of the network's input; null is the network's own")
    batch: int = Field(32, ge=1, description="pictures in one forward pass")


class Clusters(Section):
    """The partition of the data: one cluster, one expert, one island."""

    count: int = Field(8, ge=1, description="number of clusters and of experts; 1 is the dense model")
    method: Literal["features", "labels", "random"] = Field(
        "features", description="by features, by the given classes, or at random (an ablation: no router can learn it)"
    )
    fine: int = Field(1024, ge=1, description="fine clusters that are merged into `count`; fewer for small data")
    max_imbalance: float = Field(1.25, gt=1, description="largest cluster over the mean, by number of samples")
    sample_rows: int = Field(131072, ge=1, description="rows that the fine clusters are fitted to; bounds the memory")
    iterations: int = Field(25, ge=1, description="of the fine clustering")
    seed: int = Field(0, ge=0, lt=2**31, description="of everything random in the partition")


class Latents(Section):
    """What the experts see of a picture."""

    autoencoder: str = Field(
        "emoji", description="emoji (shipped), pixels (none), or a diffusers AutoencoderKL or AutoencoderTiny"
    )
    normalization: Literal["per-channel", "scale"] = Field(
        "per-channel", description="mean 0 and std 1 in each channel, or the autoencoder's own shift and scaling factor"
    )
    batch: int = Field(32, ge=1, description="pictures in one forward pass")
    dtype: Literal["float16", "bfloat16", "float32"] = Field("float16", description="as stored")


class Text(Section):
    """What the experts see of a caption."""

    encoder: str = Field("minilm", description="minilm, none, or a transformers text encoder by name or folder")
    max_tokens: int = Field(32, ge=1, description="longer captions are cut")
    batch: int = Field(64, ge=1, description="captions in one forward pass")
    dtype: Literal["float16", "bfloat16", "float32"] = Field("float16", description="as stored")


class Train(Section):
    """How every job trains; router, monolith and student may differ in their own sections."""

    samples: int = Field(500_000, ge=1, description="samples that training sees; progress is counted in them")
    batch: int = Field(64, ge=1, description="samples of one step, over all processes")
    accumulate: int = Field(1, ge=1, description="parts a step is made in, to save memory")
    lr: float = Field(3e-4, gt=0, description="learning rate")
    warmup: int = Field(10_000, ge=0, description="samples over which the learning rate rises")
    decay: Literal["constant", "cosine"] = Field("constant", description="learning rate after the warm-up")
    beta2: float = Field(0.99, gt=0, lt=1, description="of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="of the arithmetic; weights are float32")
    ema: HalfLives = Field(
        {"ema": 25_000.0}, description="averages of the weights: half-life in samples; the first is used"
    )
    condition: Literal["auto", "text", "label", "both", "none"] = Field(
        "auto", description="what experts are told; auto is text if there is, else the label if there is"
    )
    condition_dropout: float = Field(0.1, ge=0, le=1, description="share of samples trained without, for guidance")
    init_from: Annotated[str | dict[ExpertKey, str] | None, BeforeValidator(_folders)] = Field(
        None, description="folder of a network to start from, or {default: FOLDER, 3: FOLDER} by expert"
    )
    checkpointing: bool = Field(False, description="compute activations twice to save memory")
    compile: bool = Field(False, description="torch.compile")
    parallel: Literal["ddp", "fsdp2"] = Field("ddp", description="how processes under torchrun share the work")
    save_every: int = Field(50_000, ge=1, description="samples between two checkpoints")
    keep_last: int = Field(2, ge=1, description="checkpoints that are kept")
    log_every: int = Field(2_000, ge=1, description="samples between two lines of metrics.jsonl")
    grid_every: int = Field(100_000, ge=0, description="samples between two grids of pictures; 0 is never")
    grid_size: int = Field(16, ge=0, description="pictures in a grid")
    grid_guidance: float = Field(3.0, ge=0, description="guidance in the grids; 1 is none")
    workers: int = Field(2, ge=1, description="threads that read batches ahead")
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = Field([], description="besides metrics.jsonl")
    seed: int = Field(0, ge=0, description="of weights, order, times and noise")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.batch % self.accumulate:
            raise ValueError(f"batch {self.batch} is not a multiple of accumulate {self.accumulate}")
        return self


class Router(Section):
    """The router's training, where it differs from `train`."""

    network: RouterNetwork = Field("DiT-B/2", description="a named size or its parts")
    told: Literal["nothing", "pooled", "label", "auto"] = Field(
        "nothing", description="besides the noisy latent; auto is the caption if there is, else the label if there is"
    )
    samples: int | None = Field(None, ge=1, description="null is train.samples")
    batch: int | None = Field(None, ge=1, description="null is train.batch")
    lr: float | None = Field(None, gt=0, description="null is train.lr")
    decay: Literal["constant", "cosine"] | None = Field(None, description="null is train.decay")


class Monolith(Section):
    """The dense model's training, where it differs from `train`: it sees the data of all clusters."""

    samples: int | None = Field(None, ge=1, description="null is train.samples")
    batch: int | None = Field(None, ge=1, description="null is train.batch")
    lr: float | None = Field(None, gt=0, description="null is train.lr")
    decay: Literal["constant", "cosine"] | None = Field(None, description="null is train.decay")
    warmup: int | None = Field(None, ge=0, description="null is train.warmup")
    ema: HalfLives | None = Field(None, description="null is train.ema")
    save_every: int | None = Field(None, ge=1, description="null is train.save_every")
    log_every: int | None = Field(None, ge=1, description="null is train.log_every")


class Student(Section):
    """The distilled dense model's training, where it differs from `train`."""

    network: ExpertNetwork | None = Field(None, description="null is networks.default")
    samples: int | None = Field(None, ge=1, description="null is train.samples")
    batch: int | None = Field(None, ge=1, description="null is train.batch")
    lr: float | None = Field(None, gt=0, description="null is train.lr")
    block: int = Field(8192, ge=1, description="samples whose targets are computed at once, expert after expert")


class Island(Section):
    """What atoll launch asks of a scheduler for every training job; no result depends on it."""

    nodes: int = Field(1, ge=1, description="machines of one island")
    gpus: int = Field(0, ge=0, description="GPUs of each node")
    processes: int | None = Field(None, ge=1, description="on each node; null is one for each GPU, or one")
    cores: int | None = Field(None, ge=1, description="of each node; null is a fair share, or the scheduler's default")
    memory_gb: float | None = Field(None, gt=0, description="of each node; null is the scheduler's default")
    hours: float | None = Field(None, gt=0, description="time limit of one attempt; null is the scheduler's default")
    setup: list[str] = Field([], description="Slurm: lines of shell before every job, such as module load cuda")
    sbatch: list[str] = Field([], description="Slurm: further options of sbatch, such as --partition=gpu")
    resources: dict[str, float] = Field({}, description="Ray: further resources that a job takes")


class Config(Section):
    """Everything a run needs to know."""

    preset: str | None = Field(None, description="what the run started from; a dry run shows what is published of it")
    data: Data = Data()
    features: Features = Features()
    clusters: Clusters = Clusters()
    latents: Latents = Latents()
    text: Text = Text()
    experts: dict[ExpertKey, NamedObjective] = Field(
        {"default": Objective()},
        description="objective of every expert (default) and of single ones by number; a name or its parts",
    )

    networks: dict[ExpertKey, ExpertNetwork] = Field(
        {"default": "DiT-XS/2"},
        description="network of every expert (default) and of single ones by number; a named size or its parts",
    )
    train: Train = Train()
    router: Router = Router()
    monolith: Monolith = Monolith()
    student: Student = Student()
    island: Island = Island()

    @field_validator("networks")
    @classmethod
    def _default_network_is_there(cls, networks: dict[ExpertKey, NetworkChoice]) -> dict[ExpertKey, NetworkChoice]:
        return {"default": "DiT-XS/2", **networks}

    @field_validator("experts")
    @classmethod
    def _default_is_there(cls, experts: dict[ExpertKey, Objective]) -> dict[ExpertKey, Objective]:
        return {"default": Objective(), **experts}

    @model_validator(mode="after")
    def _numbers_are_of_experts(self) -> Self:
        initial = self.train.init_from if isinstance(self.train.init_from, dict) else {}
        for section, keys in (("experts", self.experts), ("networks", self.networks), ("train.init_from", initial)):
            for key in keys:
                if isinstance(key, int) and not 0 <= key < self.clusters.count:
                    last = self.clusters.count - 1
                    raise ValueError(f"{section}.{key}: there is no expert {key}; this run has experts 0 to {last}")
        return self

    @model_validator(mode="after")
    def _own_batches_have_whole_parts(self) -> Self:
        for name, own in (("router", self.router), ("monolith", self.monolith), ("student", self.student)):
            if own.batch is not None and own.batch % self.train.accumulate:
                raise ValueError(f"{name}.batch {own.batch} is not a multiple of accumulate {self.train.accumulate}")
        return self

    def objective(self, expert: int) -> Objective:
        """The objective of one expert."""
        if not 0 <= expert < self.clusters.count:
            raise AtollError(f"there is no expert {expert}: this run has experts 0 to {self.clusters.count - 1}")
        return self.experts.get(expert, self.experts["default"])

    def network(self, expert: int) -> NetworkChoice:
        """The network of one expert."""
        return self.networks.get(expert, self.networks["default"])

    def init_from(self, expert: int | None) -> str | None:
        """The folder of a network that an expert starts from; None for a fresh one, and for `expert` of other jobs."""
        chosen = self.train.init_from
        if not isinstance(chosen, dict):
            return chosen
        return chosen.get("default") if expert is None else chosen.get(expert, chosen.get("default"))


def load(run: str | Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Read `RUN/atoll.yaml`, apply dotted overrides, check everything."""
    file = Path(run) / CONFIG_FILE
    if not file.is_file():
        raise AtollError(f"{file}: no such file; write one with: atoll init {run}")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise AtollError(f"{file}: not readable as YAML: {error}") from error
    return resolve(values or {}, overrides or {}, source=str(file))


def resolve(values: object, overrides: Mapping[str, str] | None = None, source: str = "config") -> Config:
    """Check a tree of settings, with dotted overrides on top, and fill in the defaults."""
    if not isinstance(values, dict):
        raise AtollError(f"{source}: expected sections with keys, got {type(values).__name__}")
    for dotted, text in (overrides or {}).items():
        values = _with_override(values, dotted.split("."), _from_text(text))
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = dict.fromkeys(f"{source}: {_explain(item)}" for item in error.errors())
        raise AtollError("\n".join(lines)) from error


def _from_text(text: str) -> Any:
    """A value of the command line: YAML, or else just text, such as *.tar."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # a date that does not exist is the latter
        return text


def _with_override(values: dict[Any, Any], path: list[str], value: object) -> dict[Any, Any]:
    key = _from_text(path[0])
    if len(path) == 1:
        return {**values, key: value}
    below = values.get(key)
    return {**values, key: _with_override(below if isinstance(below, dict) else {}, path[1:], value)}


def _explain(error: Any) -> str:
    """One pydantic error as a sentence with the dotted key first."""
    loc = [str(part) for part in error["loc"] if part != "[key]"]
    where = ".".join(loc) or "(top)"
    if error["type"] == "extra_forbidden":
        known = keys_at(loc[:-1])
        guess = nearest(loc[-1], known)
        hint = f"did you mean {'.'.join([*loc[:-1], guess])!r}?" if guess else f"known: {', '.join(known)}"
        return f"unknown key {where!r}; {hint}"
    if "[key]" in error["loc"]:
        return f"unknown key '{loc[0]}.{loc[1]}'; expected 'default' or the number of an expert"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" + ("" if error["type"] == "value_error" else f", got {error['input']!r}")


def keys_at(path: list[str]) -> list[str]:
    """The keys that exist in the section at `path`."""
    section: type[BaseModel] = Config
    for part in path:
        found = _section_in(section.model_fields[part].annotation) if part in section.model_fields else None
        section = found or section
    return list(section.model_fields)


def _section_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (dict, Union, UnionType, Annotated):
        return next((found for part in get_args(annotation) if (found := _section_in(part))), None)
    return None
