"""The configuration of a run: YAML validated by pydantic, with the same keys as dotted options on the command line.

`RUN/atoll.yaml` holds a run's settings. Every key has a default. An unknown key is an error that suggests the nearest
valid one. `--section.key VALUE` on any verb that reads a run overrides the file. VALUE is parsed as YAML, so the file
and the command line share one validation. `to_yaml` writes the file with a comment for every key.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from atoll.core import config_sections as sections
from atoll.core.config_sections import NAMED_OBJECTIVES, ExpertKey, NetworkChoice, ObjectiveSection, Section
from atoll.core.errors import AtollError, nearest
from atoll.core.layout import CONFIG_FILE, JobKind
from atoll.core.names import HUB_NAME
from atoll.core.networks import base_name


class Config(Section):
    """All settings of a run."""

    preset: str | None = Field(None, description="preset of the run; a dry run prints its published costs")
    data: sections.DataSection = sections.DataSection()
    features: sections.FeaturesSection = sections.FeaturesSection()
    clusters: sections.ClustersSection = sections.ClustersSection()
    latents: sections.LatentsSection = sections.LatentsSection()
    text: sections.TextSection = sections.TextSection()
    experts: dict[ExpertKey, sections.NamedObjective] = Field(
        {"default": ObjectiveSection()},
        description="objective of every expert (default) or of one expert by number; a name or its fields",
    )
    networks: dict[ExpertKey, sections.ExpertNetwork] = Field(
        {"default": "DiT-XS/2"},
        description="network of every expert (default) or of one expert by number; a named size or its fields",
    )
    train: sections.TrainSection = sections.TrainSection()
    shared_start: sections.SharedStartSection = sections.SharedStartSection()
    router: sections.RouterSection = sections.RouterSection()
    monolith: sections.MonolithSection = sections.MonolithSection()
    student: sections.StudentSection = sections.StudentSection()
    island: sections.IslandSection = sections.IslandSection()

    @field_validator("experts", "networks")
    @classmethod
    def _add_default(cls, given: dict[ExpertKey, Any], info: ValidationInfo) -> dict[ExpertKey, Any]:
        return {**cls.model_fields[info.field_name or ""].default, **given}

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        """Check what several sections say together."""
        train, count = self.train, self.clusters.count
        # The encoders of a base model are those of its pipeline.
        choice = self.networks["default"]
        if isinstance(choice, dict) and "base" in choice:
            name = base_name(choice["base"], choice.get("options", {}))
            latents, text = {"autoencoder": name, "normalization": "scale"}, {"encoder": name}
            object.__setattr__(self, "latents", self.latents.model_copy(update=latents))
            object.__setattr__(self, "text", self.text.model_copy(update=text))
        # Experts by number
        initial = train.init_from if isinstance(train.init_from, dict) else {}
        for section, keys in (("experts", self.experts), ("networks", self.networks), ("train.init_from", initial)):
            for key in keys:
                if isinstance(key, int) and not 0 <= key < count:
                    raise ValueError(
                        f"{section}.{key}: there is no expert {key}; this run has experts 0 to {count - 1}"
                    )
        # Alignment
        if train.align is not None and not self.features.patch_dimensions:
            raise ValueError(
                "train.align needs patch features; set features.patch_dimensions: 64 and run atoll prepare, or set "
                "train.align: null"
            )
        # Micro-batches are equal.
        for name in ("shared_start", "router", "monolith", "student"):
            size = getattr(self, name).batch_size
            if size is not None and size % train.grad_accum_steps:
                raise ValueError(
                    f"{name}.batch_size {size} is not a multiple of grad_accum_steps {train.grad_accum_steps}"
                )
        # The section `train` has checked its own EMAs; the monolith may have others.
        known = self.monolith.ema or train.ema
        if train.result_ema not in (None, *known):
            raise ValueError(f"train.result_ema is {train.result_ema!r}; monolith.ema has {', '.join(known)}")
        # Experts fit the shared start.
        for key, network in self.networks.items() if self.shared_start.flops_share else ():
            if network != self.networks["default"]:
                raise ValueError(f"networks.{key}: with shared_start, all experts have the network networks.default")
        if self.shared_start.flops_share and initial.keys() - {"default"}:
            raise ValueError("train.init_from: with shared_start, experts start from it; give one folder for the start")
        return self

    def objective(self, expert: int) -> ObjectiveSection:
        """Return the objective of one expert."""
        if not 0 <= expert < self.clusters.count:
            raise AtollError(f"there is no expert {expert}: this run has experts 0 to {self.clusters.count - 1}")
        return self.experts.get(expert, self.experts["default"])

    def network(self, expert: int) -> NetworkChoice:
        """Return the network of one expert."""
        return self.networks.get(expert, self.networks["default"])

    def total_images(self, kind: JobKind) -> int:
        """Return the number of images that a job is trained on, before it is rounded up to full steps.

        A shared start takes its share from every expert. All networks are equal, so the FLOPs follow the images. The
        experts' share is rounded to steps, and the start gets the rest. Together they train on as many images as
        without a shared start.
        """
        # At least one step is left to each side, however small or large the share.
        share, batch_size = self.shared_start.flops_share, self.train.batch_size
        if share and kind in ("expert", "start"):
            steps = -(-self.train.total_images // batch_size)
            own = min(max(1, round((1 - share) * steps)), max(1, steps - 1))
            return batch_size * (own if kind == "expert" else self.clusters.count * max(1, steps - own))
        own_images: int | None = getattr(getattr(self, kind, None), "total_images", None)
        return own_images or self.train.total_images

    def init_from(self, expert: int | None) -> str | None:
        """Return the folder of initial weights; None is random initialization. Pass None as `expert` for other jobs."""
        chosen = self.train.init_from
        if not isinstance(chosen, dict):
            return chosen
        return chosen.get("default") if expert is None else chosen.get(expert, chosen.get("default"))


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases: a few hundred bytes of nested aliases can expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node, or raise an error if it is an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it contains an alias")
        return super().compose_node(parent, index)


def load(run: str | Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Read `RUN/atoll.yaml`, apply dotted overrides and validate the result.

    A relative `data.source` in the file is relative to the run.
    """
    file = Path(run) / CONFIG_FILE
    values = _read(file)
    data = values.get("data") if isinstance(values, dict) else None
    if isinstance(data, dict) and isinstance(data.get("source"), str):
        source = absolute_source(data["source"], Path(run), kind=data.get("kind"))
        values = {**values, "data": {**data, "source": source}}
    return resolve(values, overrides or {}, source=str(file))


def _read(file: Path) -> Any:
    if not file.is_file():
        raise AtollError(f"{file}: no such file; write one with: atoll init {file.parent}")
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise AtollError(f"{file}: not readable as YAML: {error}") from error


def absolute_source(source: str, folder: Path, kind: object = None) -> str:
    """Return the absolute path of a source that is relative to a folder; names on the hub and emoji stay as they are.

    So what a run is made from does not depend on the folder in which a later command runs.
    """
    if source.partition(":")[0] == "emoji" or HUB_NAME.fullmatch(source):
        return source
    path = Path(os.path.abspath(folder / Path(source).expanduser()))
    return source if kind == "datasets" and not path.exists() else str(path)


def store(run: Path, overrides: Mapping[str, str]) -> None:
    """Write overrides into atoll.yaml. Other lines and comments stay as they are, if a line has the value of a key."""
    file = run / CONFIG_FILE
    for dotted, given in overrides.items():
        text, keys, value = file.read_text(encoding="utf-8"), dotted.split("."), _from_text(given)
        node: yaml.Node | None = yaml.compose(text, yaml.SafeLoader)
        for key in keys:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            node = next((below for name, below in pairs if name.value == key), None)
        if node is None or node.start_mark.line != node.end_mark.line:
            text = to_yaml(resolve(_with_override(_read(file), keys, value), source=str(file)))
        else:
            start, end = node.start_mark.index, node.end_mark.index
            space = " " if text[start - 1] == ":" else ""  # the key had no value
            text = f"{text[:start]}{space}{_inline(value)}{text[end:]}"
        file.write_text(text, encoding="utf-8")


def resolve(values: object, overrides: Mapping[str, str] | None = None, source: str = "config") -> Config:
    """Validate nested settings after applying dotted overrides, and fill in the defaults."""
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
    """Parse a command-line value as YAML; return it unchanged if it is not YAML, such as *.tar."""
    try:
        return yaml.load(text, PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError):  # a date that does not exist, thousands of brackets
        return text


def _with_override(values: dict[Any, Any], path: list[str], value: object) -> dict[Any, Any]:
    key = _from_text(path[0])
    if len(path) == 1:
        return {**values, key: value}
    below = values.get(key)
    return {**values, key: _with_override(below if isinstance(below, dict) else {}, path[1:], value)}


def _explain(error: Any) -> str:
    """Return a pydantic error as a sentence that starts with the dotted key."""
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
    return f"{where}: {message}" + ("" if error["type"] == "value_error" else f", got {error['input']!r:.80}")


def keys_at(path: list[str]) -> list[str]:
    """Return the keys of the section at `path`."""
    section: type[BaseModel] = Config
    for part in path:
        if part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _section_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (dict, Union, UnionType, Annotated):
        return next((found for part in get_args(annotation) if (found := _section_in(part))), None)
    return None


def to_yaml(config: Config, notes: Mapping[str, str] | None = None) -> str:
    """Return the whole configuration as YAML, with a comment for every key; `notes` add to the comments by key."""
    lines: list[str] = []
    _write_section(config, lines, "", notes=notes or {})
    return "\n".join(lines) + "\n"


def _write_section(section: BaseModel, lines: list[str], above: str, *, notes: Mapping[str, str]) -> None:
    indent = "  " if above else ""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel) and not indent:
            lines.extend([*([""] if lines else []), f"{name}:  # {type(value).__doc__}"])
            _write_section(value, lines, f"{name}.", notes=notes)
            continue
        plain = section.model_dump(mode="json", include={name})[name]
        if name == "experts":
            names = {objective: known for known, objective in NAMED_OBJECTIVES.items()}
            plain = {
                key: names.get(objective) or objective.model_dump(mode="json", exclude_defaults=True)
                for key, objective in value.items()
            }
        note = f" ({notes[above + name]})" if above + name in notes else ""
        comment = f"  # {field.description}{note}" if field.description else ""
        if isinstance(plain, dict) and plain:
            lines.extend([*([] if indent else [""]), f"{indent}{name}:{comment}"])
            lines.extend(f"{indent}  {key}: {_inline(item)}" for key, item in plain.items())
        else:
            lines.append(f"{indent}{name}: {_inline(plain)}{comment}")


def _inline(value: object) -> str:
    """Return one value as YAML on one line."""
    # The width is larger than any value, so that PyYAML never breaks the line.
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("\n...\n").strip()
