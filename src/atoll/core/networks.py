"""Network specifications: all fields of a DiT and of a router, checked by pydantic, and the named sizes.

No torch here: the configuration of a run is checked with these before any network is built.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, PlainSerializer, ValidationError
from pydantic.dataclasses import dataclass

from atoll.core.errors import AtollError, unknown
from atoll.core.names import Prediction

# S to XL are the sizes of the DiT paper (Peebles and Xie 2023, table 1). XS is our addition: it trains on a CPU.
SIZES: dict[str, dict[str, int]] = {
    "XS": {"width": 256, "depth": 8, "heads": 4},
    "S": {"width": 384, "depth": 12, "heads": 6},
    "B": {"width": 768, "depth": 12, "heads": 12},
    "L": {"width": 1024, "depth": 24, "heads": 16},
    "XL": {"width": 1152, "depth": 28, "heads": 16},
}
FAMILIES: dict[str, dict[str, str | bool]] = {
    "DiT": {},
    "ModernDiT": {"positions": "rope", "norm": "rms", "qk_norm": True, "mlp": "swiglu"},
}
"""The block of the papers, and one with RoPE, RMSNorm, QK-norm and SwiGLU: the parts of LightningDiT (Yao and Wang
2025), with the AdaLN-Single and within 1 % of the parameters of the papers' sizes."""
NAMES: dict[str, dict[str, int | str | bool]] = {
    f"{family}-{size}/{patch}": {**shape, "patch": patch, **block}
    for family, block in FAMILIES.items()
    for size, shape in SIZES.items()
    for patch in (2, 4, 8)
}
"""The named sizes: DiT-XS/2, …, DiT-XL/8, and ModernDiT-XS/2, …, ModernDiT-XL/8."""
NormKind = Literal["layer", "rms"]
MlpKind = Literal["gelu", "swiglu"]
DEFAULT_NAME = "DiT-XS/2"
DiffusersName = Literal["PixArtExpert", "DiTExpert", "SD3Expert", "UNetExpert"]
DIFFUSERS_CLASSES: dict[str, str] = {
    "PixArtExpert": "PixArtTransformer2DModel",
    "DiTExpert": "DiTTransformer2DModel",
    "SD3Expert": "SD3Transformer2DModel",
    "UNetExpert": "UNet2DModel",
}
"""The class of diffusers that each adapter wraps."""
DIFFUSERS_EXPERTS: tuple[str, ...] = tuple(DIFFUSERS_CLASSES)
"""Classes of experts that wrap a diffusers model."""
BASE = "base:"
"""What the name of a base model begins with, where an autoencoder or a text encoder is named."""
LOCAL = "local"
"""Stands for a local folder in whatever may leave this machine; its fingerprint identifies the network."""
CLASS_NAME = "_class_name"
"""The key of config.json for the class of a network, as in diffusers."""
ConfigJson = dict[str, JsonValue]
"""The content of a config.json: `_class_name` and the fields of that class."""

_CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(gt=0)]


AUTOENCODER_SCALES = {"AutoencoderKL": 0.18215, "AutoencoderTiny": 1.0}
"""Defaults of diffusers for a config.json without a scaling factor, such as that of stabilityai/sd-vae-ft-mse."""


@dataclass(frozen=True, config=_CHECKED)
class LatentScale:
    """The normalization x0 = (z - shift_factor) · scaling_factor of an autoencoder's latents z, as in diffusers."""

    scaling_factor: Ratio
    shift_factor: float = 0.0

    def __str__(self) -> str:
        shifted = f"(z - {self.shift_factor:g})" if self.shift_factor else "z"
        return f"{shifted} * {self.scaling_factor:g}"

    @classmethod
    def read(cls, values: Mapping[str, Any], source: object) -> Self:
        """Check the two factors; `source` names their file in errors."""
        try:
            return cls(**values)
        except (TypeError, ValidationError) as error:
            wrong = error.errors() if isinstance(error, ValidationError) else []
            raise AtollError(f"{source}: {'; '.join(map(_sentence, wrong)) or error}") from error

    @classmethod
    def of_autoencoder(cls, settings: Mapping[str, Any], source: object) -> Self:
        """Return the factors in an autoencoder's config.json."""
        scaling = settings.get("scaling_factor", AUTOENCODER_SCALES.get(settings.get("_class_name", "")))
        if scaling is None:
            raise AtollError(
                f"{source} has no scaling_factor, which latents.normalization: scale needs; "
                "set latents.normalization: per-channel, or add the factor to that file"
            )
        return cls.read({"scaling_factor": scaling, "shift_factor": settings.get("shift_factor") or 0.0}, source)


STABLE_DIFFUSION = LatentScale(AUTOENCODER_SCALES["AutoencoderKL"])
"""The normalization of Stable Diffusion's latents. DiT, SiT, PixArt-alpha and Paris were trained with it."""


@dataclass(frozen=True, config=_CHECKED)
class NamedConfig:
    """A network specification that has named sizes and is stored as a config.json."""

    class_name: ClassVar[str]

    @classmethod
    def named(cls, name: str, **changes: Any) -> Self:
        """Return the specification of a named size (`DiT-XL/2`), with other fields given by keyword."""
        if name not in NAMES:
            raise AtollError(unknown("network size", name, NAMES))
        return cls.from_dict({**NAMES[name], **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parse the output of `to_dict`. Raise `AtollError` with the name of an unknown field or a wrong value."""
        known = [field.name for field in fields(cls)]
        given = {name: value for name, value in values.items() if name != CLASS_NAME}
        for name in given:
            if name not in known:
                raise AtollError(unknown(f"field of {cls.__name__}", name, known))
        try:
            return cls(**given)
        except ValidationError as error:
            raise AtollError("; ".join(_sentence(item) for item in error.errors())) from error
        except ValueError as error:
            raise AtollError(str(error)) from error

    def to_dict(self) -> ConfigJson:
        """Return the content of config.json."""
        return {CLASS_NAME: self.class_name, **asdict(self)}


@dataclass(frozen=True, config=_CHECKED)
class DiTConfig(NamedConfig):
    """The architecture of a DiT."""

    class_name = "DiT"
    width: Positive = 384
    depth: Positive = 12
    heads: Positive = 6
    patch: Positive = 2
    channels: Positive = 4
    out_channels: Positive = 4
    """Twice `channels` for networks with a learned variance."""
    size: Positive = 32
    """Side of the latents that added positions are made for; they are interpolated for other sizes."""
    mlp_ratio: Ratio = 4.0
    """Hidden width of the MLP over `width`. A SwiGLU has two thirds of it, and so the same number of parameters."""
    mlp: MlpKind = "gelu"
    modulation: Literal["single", "zero"] = "single"
    """AdaLN-Single (one shared projection and a table per block) or AdaLN-Zero (one projection per block)."""
    final_modulation: Literal["single", "zero"] | None = None
    """The same choice for the final layer; None is that of `modulation`."""
    text_width: Count = 0
    """Width of the text tokens; 0 for a network without text."""
    text_projection: Literal["linear", "mlp"] = "linear"
    null_tokens: Positive = 1
    """Tokens of the null condition: one learned token, or a whole null caption (120 tokens in PixArt-alpha)."""
    num_classes: Count = 0
    pooled_width: Count = 0
    qk_norm: bool = False
    """RMSNorm of queries and keys, with learned scales."""
    norm: NormKind = "layer"
    """The norm that is modulated: LayerNorm or RMSNorm."""
    positions: Literal["sincos", "learned", "rope"] = "sincos"
    """Added to the tokens (sincos, learned), or rotary for any grid (rope)."""
    position_scale: Ratio = 1.0
    """Divisor of the position coordinates (`interpolation_scale` in diffusers)."""
    frequency_shift: Literal[0, 1] = 0
    """With 1, the lowest frequency of the timestep embedding is exactly 1/10000, as diffusers has it for DiT."""
    embedder_per_block: bool = False
    """One timestep and label embedder per block, as diffusers has them for DiT."""
    time_table: bool = False
    """A stored table from the timestep to the timestep that is embedded, for converted DDPM weights."""
    norm_eps: Ratio = 1e-6
    mlp_norm_eps: Ratio = 1e-6
    normalization: LatentScale | None = None
    """Scaling of the latents that a released network was trained on; it does not change the network's output."""

    def __post_init__(self) -> None:
        _check_shape(self)
        if self.embedder_per_block and self.modulation != "zero":
            raise ValueError("embedder_per_block needs modulation 'zero': AdaLN-Single has one shared embedder")

    @property
    def grid(self) -> int:
        """Number of tokens along one side, at the native size."""
        return self.size // self.patch

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def final(self) -> Literal["single", "zero"]:
        """The modulation of the final layer."""
        return self.final_modulation or self.modulation


@dataclass(frozen=True, config=_CHECKED)
class RouterConfig(NamedConfig):
    """The architecture of a router; the default is the DiT-B/2 of DDM and Paris."""

    class_name = "Router"
    experts: Positive = 8
    width: Positive = 768
    depth: Positive = 12
    heads: Positive = 12
    patch: Positive = 2
    channels: Positive = 4
    size: Positive = 32
    mlp_ratio: Ratio = 4.0
    num_classes: Count = 0
    """Number of classes that the router is conditioned on; 0 if it is not conditioned on the class label."""
    pooled_width: Count = 0
    """Width of the pooled text that the router is conditioned on; 0 if it is not conditioned on text."""
    norm_eps: Ratio = 1e-6
    qk_norm: bool = False
    norm: NormKind = "layer"
    mlp: MlpKind = "gelu"
    positions: Literal["sincos", "rope"] = "sincos"
    normalization: LatentScale | None = None
    """Scaling of the latents that a released router was trained on."""

    def __post_init__(self) -> None:
        _check_shape(self)


@dataclass(frozen=True, config=_CHECKED)
class DiffusersConfig:
    """A diffusers model as an expert. Its fields are those of the model; diffusers checks them when it is built."""

    class_name: DiffusersName
    # Through JSON, so that a specification equals the one that is read back: diffusers has tuples, JSON has lists.
    fields: Annotated[ConfigJson, BeforeValidator(lambda fields: json.loads(json.dumps(fields)))]
    """The fields of config.json."""

    def to_dict(self) -> ConfigJson:
        """Return the content of config.json."""
        return {CLASS_NAME: self.class_name, **self.fields}

    @property
    def text_width(self) -> int:
        """Width of the text tokens; 0 for a network without text."""
        return self._number("caption_channels") or self._number("joint_attention_dim")

    @property
    def pooled_width(self) -> int:
        """Width of the pooled text; 0 for a network without."""
        return self._number("pooled_projection_dim")

    @property
    def patch(self) -> int:
        """What the sides of latents must be multiples of: the patch size, or what a UNet divides them by."""
        if self.class_name == "UNetExpert":
            # Each block but the last halves the sides. diffusers has four blocks by default.
            levels = self.fields.get("block_out_channels")
            return int(2 ** ((len(levels) if isinstance(levels, list) else 4) - 1))
        return self._number("patch_size") or 2  # the default of diffusers' transformers

    def _number(self, name: str) -> int:
        value = self.fields.get(name)
        return value if isinstance(value, int) else 0


@dataclass(frozen=True, config=_CHECKED)
class TraceSpec:
    """How a pipeline calls its network: prediction = sign · network(state, scale · time + offset, conditioning).

    The time is the timestep of the noise schedule over 1000: sigma in flow matching, the step over 1000 for a table.
    """

    state: str
    """Name of the argument with the noisy latents."""
    state_shape: tuple[int, ...]
    """Shape of this argument for one image; only the places of dimensions of size 1 count."""
    state_list: bool
    """Whether the states of a batch are a list."""
    time: str
    scale: float
    offset: float
    sign: Literal[-1, 1]
    batching: dict[str, JsonValue]
    """How the other arguments of a batch are made of those of its images (`nets/arguments.py`)."""
    by_prompt: tuple[str, ...]
    """Arguments that depend on the prompt. The others depend on the size alone, or on nothing."""
    options: dict[str, JsonValue]
    """Keyword arguments of the pipeline's call."""
    prediction: Prediction = "velocity"
    schedule: dict[str, JsonValue] = field(default_factory=lambda: {"name": "linear"})
    """Name and options of the noise schedule, as of a manifest."""

    def check_objective(self, schedule: str, prediction: str) -> None:
        """Raise `AtollError` for an objective that the network was not trained with."""
        if (schedule, prediction) != (self.schedule["name"], self.prediction):
            raise AtollError(
                f"the objective has schedule {schedule} and prediction {prediction}, but the base was trained with "
                f"{self.schedule['name']} and {self.prediction}; set experts.default: "
                f"{{schedule: {self.schedule['name']}, prediction: {self.prediction}}}"
            )

    @property
    def packed(self) -> bool:
        """Whether the state is a sequence of tokens (tokens, channels) instead of a grid (channels, height, width)."""
        return len([size for size in self.state_shape if size != 1]) == 2


def base_name(model: str, options: Mapping[str, Any]) -> str:
    """Return the name of a base model as autoencoder and text encoder, with the options of its pipeline's call."""
    return f"{BASE}{model}" + (f"#{json.dumps(options, sort_keys=True)}" if options else "")


MAX_RANK = 1024
"""Four times the largest rank in common use. A full rank is better trained as a whole, with `lora: null`."""


@dataclass(frozen=True, config=_CHECKED)
class LoraSpec:
    """A LoRA adapter."""

    rank: Annotated[int, Field(gt=0, le=MAX_RANK)] = 16
    alpha: Ratio = 16.0
    targets: Literal["auto"] | tuple[str, ...] = "auto"
    """Names of linear layers, or their ends; auto is all linear layers."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    quantize: Literal["int8"] | None = None
    """Precision of the linear layers of the frozen base, in training and in sampling; None is that of the rest."""


@dataclass(frozen=True, config=_CHECKED)
class BaseConfig(NamedConfig):
    """The network of a diffusers pipeline as an expert, with an adapter or as a whole."""

    class_name = "BaseExpert"
    base: str
    """Name of the pipeline on the hub, or `local`."""
    weights: str
    """Fingerprint of the network's files."""
    network_class: str
    network: dict[str, JsonValue]
    """The config.json of the network."""
    channels: Positive
    trace: TraceSpec
    lora: LoraSpec | None = None

    @property
    def patch(self) -> int:
        """What the sides of latents must be multiples of."""
        patch = self.network.get("patch_size", self.network.get("all_patch_size"))
        patch = patch[0] if isinstance(patch, list) and patch else patch
        if isinstance(levels := self.network.get("block_out_channels"), list):
            patch = 2 ** (len(levels) - 1)  # each block but the last halves the sides
        return patch if isinstance(patch, int) and not self.trace.packed else 1


CLASS = "class"
"""The key of a network of one's own in the configuration: `{class: package.module:Class, …}`."""


@dataclass(frozen=True, config=_CHECKED)
class OwnConfig:
    """A network of one's own. Its class is code outside Atoll, so only runs of this machine open it (`nets/own.py`)."""

    class_name: ClassVar[str] = "OwnNetwork"
    path: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """Module and class, as `package.module:Class`."""
    fields: Annotated[ConfigJson, BeforeValidator(lambda fields: json.loads(json.dumps(fields)))]
    """Keyword arguments of the class."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parse the output of `to_dict`, or a choice in the configuration."""
        fields = {name: value for name, value in values.items() if name not in (CLASS_NAME, CLASS)}
        try:
            return cls(values.get(CLASS, ""), fields)
        except ValidationError as error:
            raise AtollError(
                f"class: expected package.module:Class, such as my_networks:ConvExpert, got {values.get(CLASS)!r:.80}"
            ) from error

    def to_dict(self) -> ConfigJson:
        """Return the content of config.json."""
        return {CLASS_NAME: self.class_name, CLASS: self.path, **self.fields}

    # What the rest of Atoll asks for. A network without such a field does without it.

    @property
    def patch(self) -> int:
        """What the sides of latents must be multiples of."""
        return self._number("patch") or 1

    @property
    def text_width(self) -> int:
        """Width of the text tokens; 0 for a network without text."""
        return self._number("text_width")

    @property
    def pooled_width(self) -> int:
        """Width of the pooled text; 0 for a network without."""
        return self._number("pooled_width")

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for a network without."""
        return self._number("num_classes")

    def _number(self, name: str) -> int:
        value = self.fields.get(name)
        return value if isinstance(value, int) else 0


NetworkConfig = DiTConfig | RouterConfig | DiffusersConfig | BaseConfig | OwnConfig


def read_network(values: Mapping[str, Any]) -> NetworkConfig:
    """Parse the content of a config.json. Raise `AtollError` with the name of a wrong class, field or value."""
    kind = values.get(CLASS_NAME, DiTConfig.class_name)
    if kind == DiTConfig.class_name:
        return DiTConfig.from_dict(values)
    if kind == RouterConfig.class_name:
        return RouterConfig.from_dict(values)
    if kind == BaseConfig.class_name:
        return BaseConfig.from_dict(values)
    if kind == OwnConfig.class_name:
        return OwnConfig.from_dict(values)
    if kind not in DIFFUSERS_EXPERTS:
        known = (DiTConfig.class_name, RouterConfig.class_name, *DIFFUSERS_EXPERTS)
        raise AtollError(unknown("kind of network", kind, known))
    return DiffusersConfig(kind, {name: value for name, value in values.items() if name != CLASS_NAME})


def adapted(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of a diffusers model as that of its adapter; any other one unchanged."""
    name = next((own for own, other in DIFFUSERS_CLASSES.items() if other == values.get(CLASS_NAME)), None)
    if name is None:
        return values
    return {CLASS_NAME: name, **{key: value for key, value in values.items() if not key.startswith("_")}}


def _read(value: object) -> object:
    """Parse a network in a manifest; pydantic expects a `ValueError`."""
    try:
        return read_network(value) if isinstance(value, Mapping) else value
    except AtollError as error:
        raise ValueError(str(error)) from error


NetworkDeclaration = Annotated[NetworkConfig, BeforeValidator(_read), PlainSerializer(lambda config: config.to_dict())]
"""A network in a manifest: the content of its config.json."""


def check_choice(choice: str | Mapping[str, Any], kind: Literal["DiT", "Router"]) -> None:
    """Raise `AtollError` for a network in the configuration with a wrong name, field or value."""
    parts = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "base" in parts and kind == "DiT":
        lora_of(parts)
        return
    if CLASS in parts and kind == "DiT":
        OwnConfig.from_dict(parts)
        return
    own, known = parts.pop(CLASS_NAME, kind), (kind,) if kind == "Router" else (kind, *DIFFUSERS_EXPERTS)
    if own not in known:
        raise AtollError(unknown("kind of network", own, known))
    if own != kind:
        return
    name = parts.pop("name", DEFAULT_NAME)
    if not isinstance(name, str) or name not in NAMES:
        raise AtollError(unknown("network size", name, NAMES))
    spec: dict[str, Any] = {**NAMES[name], **parts}
    # The size comes from the data, which may not be prepared yet. One patch is a size that is always valid.
    spec.setdefault("size", spec["patch"])
    (DiTConfig if kind == "DiT" else RouterConfig).from_dict(spec)


def lora_of(choice: Mapping[str, Any]) -> LoraSpec | None:
    """Return the adapter of a base model in the configuration; None trains the base as a whole."""
    for name in choice:
        if name not in ("base", "options", "lora"):
            raise AtollError(unknown("field of a base model", name, ("base", "options", "lora")))
    given = choice.get("lora", {})
    try:
        return None if given is None else LoraSpec(**given)
    except (TypeError, ValidationError) as error:
        problems = error.errors() if isinstance(error, ValidationError) else []
        raise AtollError(f"lora: {'; '.join(map(_sentence, problems)) or error}") from error


def check_fits_data(choice: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    """Raise `AtollError` if fields of a network in the configuration disagree with the prepared data.

    `size` may differ, since position embeddings are interpolated. `out_channels` may be twice the channels, for a
    learned variance.
    """
    for name, value in needed.items():
        given = choice.get(name, value)
        allowed: Iterable[Any] = (value, 2 * value) if name == "out_channels" else (value,)
        if name != "size" and given not in allowed:
            raise AtollError(f"{name} is {given}, but the prepared data needs {value}; omit {name}")


def _check_shape(config: DiTConfig | RouterConfig) -> None:
    # 2D sine-cosine positions take a quarter of the width each for sine and cosine of x and of y.
    if config.width % config.heads or config.width % 4:
        raise ValueError(f"width {config.width} must be a multiple of 4 and of heads {config.heads}")
    head_width = config.width // config.heads
    if config.positions == "rope" and head_width % 4:
        raise ValueError(f"positions 'rope' need a head width that is a multiple of 4; width / heads is {head_width}")
    if config.size % config.patch:
        raise ValueError(f"size {config.size} is not a multiple of patch {config.patch}")


def _sentence(error: Any) -> str:
    where, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}, got {error['input']!r}" if where else message
