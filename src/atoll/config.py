"""The configuration of a run: YAML checked by pydantic, with the same keys as dotted options on the command line.

A run's settings are in `RUN/atoll.yaml`. Every key has a default; an unknown key is an error that names the nearest
right one. `--section.key VALUE` on any verb that takes a run overrides the file, and VALUE is read as YAML, so a file
and a command line are checked by the same code and fail with the same words.
"""

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from atoll.errors import AtollError, nearest, unknown

CONFIG_FILE = "atoll.yaml"


class Section(BaseModel):
    """A part of the configuration: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Objective(Section):
    """How one expert is trained; the names are those of `atoll.flow`."""

    schedule: Literal["linear", "cosine", "ddpm-linear", "ddpm-scaled-linear", "ddpm-cosine", "edm"] = Field(
        "linear", description="noise schedule"
    )
    prediction: Literal["velocity", "epsilon", "x0", "v_prediction", "score"] = Field(
        "velocity", description="what the network answers with"
    )
    times: Literal["uniform", "logit-normal", "log-normal"] = Field("uniform", description="how training times are drawn")
    weighting: Literal["constant", "min-snr", "as-velocity", "as-epsilon", "as-x0"] = Field(
        "constant", description="weight of each time in the loss"
    )


NAMED_OBJECTIVES: dict[str, Objective] = {
    "flow-matching": Objective(),
    "flow-matching-logit-normal": Objective(times="logit-normal"),
    "ddpm": Objective(schedule="cosine", prediction="epsilon"),
    "ddpm-linear": Objective(schedule="ddpm-linear", prediction="epsilon"),
    "x0": Objective(schedule="linear", prediction="x0", weighting="as-velocity"),
    "v-prediction": Objective(schedule="cosine", prediction="v_prediction"),
    "edm": Objective(schedule="edm", prediction="x0", times="log-normal", weighting="as-velocity"),
}


def _objective_by_name(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value not in NAMED_OBJECTIVES:
        raise ValueError(unknown("objective", value, NAMED_OBJECTIVES))
    return NAMED_OBJECTIVES[value]


NamedObjective = Annotated[Objective, BeforeValidator(_objective_by_name)]


class Clusters(Section):
    """The partition of the data: one cluster, one expert, one island."""

    count: int = Field(8, ge=1, description="number of clusters and of experts; 1 is the dense model")


class Config(Section):
    """Everything a run needs to know."""

    clusters: Clusters = Clusters()
    experts: dict[Literal["default"] | int, NamedObjective] = Field(
        default_factory=lambda: {"default": Objective()},
        description="objective of every expert (default) and of single ones by number; a name or its parts",
    )

    @field_validator("experts")
    @classmethod
    def _default_is_there(
        cls, experts: dict[Literal["default"] | int, Objective]
    ) -> dict[Literal["default"] | int, Objective]:
        return {"default": Objective(), **experts}

    def objective(self, expert: int) -> Objective:
        """The objective of one expert."""
        if not 0 <= expert < self.clusters.count:
            raise AtollError(f"there is no expert {expert}: this run has experts 0 to {self.clusters.count - 1}")
        return self.experts.get(expert, self.experts["default"])


PRESETS: dict[str, dict[str, Any]] = {
    "ddm": {"clusters": {"count": 8}, "experts": {"default": "flow-matching"}},
    "hddm": {"clusters": {"count": 8}, "experts": {"default": "flow-matching", 0: "ddpm", 3: "ddpm"}},
}


def load(run: str | Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Read `RUN/atoll.yaml`, apply dotted overrides, check everything."""
    file = Path(run) / CONFIG_FILE
    if not file.is_file():
        raise AtollError(f"{file}: no such file; write one with: atoll init {run}")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AtollError(f"{file}: not readable as YAML: {error}") from error
    return resolve(values or {}, overrides or {}, source=str(file))


def resolve(values: object, overrides: Mapping[str, str] | None = None, source: str = "config") -> Config:
    """Check a tree of settings, with dotted overrides on top, and fill in the defaults."""
    if not isinstance(values, dict):
        raise AtollError(f"{source}: expected sections with keys, got {type(values).__name__}")
    for dotted, text in (overrides or {}).items():
        values = _with_override(values, dotted.split("."), yaml.safe_load(text))
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise AtollError("\n".join(f"{source}: {_explain(item)}" for item in error.errors())) from error


def _with_override(values: dict[Any, Any], path: list[str], value: object) -> dict[Any, Any]:
    key = yaml.safe_load(path[0])
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
    if error["loc"][0] == "experts" and "[key]" in error["loc"]:
        return f"unknown key {where!r}; expected 'default' or the number of an expert"
    return f"{where}: {error['msg']}, got {error['input']!r}"


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


def to_yaml(config: Config) -> str:
    """The whole configuration with a comment for every key, as `atoll init` writes it."""
    lines: list[str] = []
    _write_section(config, lines, "")
    return "\n".join(lines) + "\n"


def _write_section(section: BaseModel, lines: list[str], indent: str) -> None:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            if lines and not indent:
                lines.append("")
            lines.append(f"{indent}{name}:" + (f"  # {type(value).__doc__}" if not indent else ""))
            _write_section(value, lines, indent + "  ")
            continue
        plain = section.model_dump(mode="json", include={name})[name]
        if name == "experts":
            plain = {key: _objective_name(objective) for key, objective in value.items()}
        comment = f"  # {field.description}" if field.description else ""
        if isinstance(plain, dict) and plain:
            lines.extend(["", f"{indent}{name}:{comment}"] if not indent else [f"{indent}{name}:{comment}"])
            lines.extend(f"{indent}  {key}: {_inline(item)}" for key, item in plain.items())
        else:
            lines.append(f"{indent}{name}: {_inline(plain)}{comment}")


def _inline(value: object) -> str:
    """One value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("\n...\n").strip()


def _objective_name(objective: Objective) -> object:
    for name, known in NAMED_OBJECTIVES.items():
        if known == objective:
            return name
    return objective.model_dump(mode="json")
