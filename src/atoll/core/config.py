"""The configuration of a run: YAML validated by pydantic, with the same keys as dotted options on the command line.

`RUN/atoll.yaml` holds a run's settings. Every key has a default. An unknown key is an error that suggests the nearest
valid one. `--section.key VALUE` on any verb that reads a run overrides
the file. VALUE is parsed as YAML, so the file and the command line share one validation.
"""

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from atoll.core.config_sections import (
    Clusters,
    Data,
    ExpertKey,
    ExpertNetwork,
    Features,
    Island,
    Latents,
    Monolith,
    NamedObjective,
    NetworkChoice,
    Objective,
    Router,
    Section,
    SharedStart,
    Student,
    Text,
    Train,
)
from atoll.core.errors import AtollError, nearest
from atoll.core.layout import CONFIG_FILE, JobKind


class Config(Section):
    """All settings of a run."""

    preset: str | None = Field(None, description="preset of the run; a dry run prints its published costs")
    data: Data = Data()
    features: Features = Features()
    clusters: Clusters = Clusters()
    latents: Latents = Latents()
    text: Text = Text()
    experts: dict[ExpertKey, NamedObjective] = Field(
        {"default": Objective()},
        description="objective of every expert (default) or of one expert by number; a name or its fields",
    )
    networks: dict[ExpertKey, ExpertNetwork] = Field(
        {"default": "DiT-XS/2"},
        description="network of every expert (default) or of one expert by number; a named size or its fields",
    )
    train: Train = Train()
    shared_start: SharedStart = SharedStart()
    router: Router = Router()
    monolith: Monolith = Monolith()
    student: Student = Student()
    island: Island = Island()

    @field_validator("networks")
    @classmethod
    def _add_default_network(cls, networks: dict[ExpertKey, NetworkChoice]) -> dict[ExpertKey, NetworkChoice]:
        return {"default": "DiT-XS/2", **networks}

    @field_validator("experts")
    @classmethod
    def _add_default_objective(cls, experts: dict[ExpertKey, Objective]) -> dict[ExpertKey, Objective]:
        return {"default": Objective(), **experts}

    @model_validator(mode="after")
    def _expert_numbers_exist(self) -> Self:
        initial = self.train.init_from if isinstance(self.train.init_from, dict) else {}
        for section, keys in (("experts", self.experts), ("networks", self.networks), ("train.init_from", initial)):
            for key in keys:
                if isinstance(key, int) and not 0 <= key < self.clusters.count:
                    last = self.clusters.count - 1
                    raise ValueError(f"{section}.{key}: there is no expert {key}; this run has experts 0 to {last}")
        return self

    @model_validator(mode="after")
    def _aligns_with_patches(self) -> Self:
        if self.train.align is not None and not self.features.patch_dimensions:
            raise ValueError(
                "train.align needs patch features; set features.patch_dimensions: 64 and run atoll prepare, or set "
                "train.align: null"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_are_equal(self) -> Self:
        for name in ("shared_start", "router", "monolith", "student"):
            own = getattr(self, name)
            if own.batch_size is not None and own.batch_size % self.train.grad_accum_steps:
                steps = self.train.grad_accum_steps
                raise ValueError(f"{name}.batch_size {own.batch_size} is not a multiple of grad_accum_steps {steps}")
        return self

    @model_validator(mode="after")
    def _result_is_an_ema_of_the_monolith(self) -> Self:
        # The section `train` has checked its own EMAs; the monolith may have others.
        known = self.monolith.ema or self.train.ema
        if self.train.result_ema not in (None, *known):
            raise ValueError(f"train.result_ema is {self.train.result_ema!r}; monolith.ema has {', '.join(known)}")
        return self

    @model_validator(mode="after")
    def _experts_fit_the_shared_start(self) -> Self:
        if not self.shared_start.flops_share:
            return self
        for key, network in self.networks.items():
            if network != self.networks["default"]:
                raise ValueError(f"networks.{key}: with shared_start, all experts have the network networks.default")
        if isinstance(self.train.init_from, dict) and self.train.init_from.keys() - {"default"}:
            raise ValueError("train.init_from: with shared_start, experts start from it; give one folder for the start")
        return self

    def objective(self, expert: int) -> Objective:
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
        experts' share is rounded to steps and the start gets the rest, so start and experts have the total of before.
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
    """Read `RUN/atoll.yaml`, apply dotted overrides and validate the result."""
    file = Path(run) / CONFIG_FILE
    if not file.is_file():
        raise AtollError(f"{file}: no such file; write one with: atoll init {run}")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise AtollError(f"{file}: not readable as YAML: {error}") from error
    return resolve(values or {}, overrides or {}, source=str(file))


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
        found = _section_in(section.model_fields[part].annotation) if part in section.model_fields else None
        section = found or section
    return list(section.model_fields)


def _section_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (dict, Union, UnionType, Annotated):
        return next((found for part in get_args(annotation) if (found := _section_in(part))), None)
    return None
