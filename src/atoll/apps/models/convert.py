"""`atoll convert`: translate checkpoints of others to Atoll and back, with a report of all changes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from atoll.apps.models.fold import ConversionRow, FlowMatchingOptions, to_flow_matching
from atoll.core.artifacts import sha256_of
from atoll.core.errors import AtollError, unknown
from atoll.core.networks import (
    CLASS_NAME,
    DIFFUSERS_CLASSES,
    ConfigJson,
    DiTConfig,
    LatentScale,
    RouterConfig,
    read_network,
)
from atoll.core.version import __version__
from atoll.nets.adapters import KINDS
from atoll.nets.conditioning import Condition
from atoll.nets.dit import DiT
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE, build, check_fit, read_weights, write_weights
from atoll.nets.layouts import LAYOUTS, Layout, detect
from atoll.nets.router import Router

CONVERSION_FILE = "conversion.json"
NORMALIZATION = "normalization"
"""Key of config.json that declares how the latents of a network were scaled; null if it is unknown."""
TARGETS = ("atoll", "flow-matching", *LAYOUTS)
"""Targets of `convert`: the layout of Atoll, a flow-matching expert, or the layout of another project."""


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint that was read and translated to the layout of Atoll."""

    file: Path
    layout: str
    config: DiTConfig | RouterConfig
    state: dict[str, Tensor]
    changes: list[ConversionRow] = field(default_factory=list)
    """Changes besides names: other conventions, and new tensors that the file lacks."""

    def network(self) -> DiT | Router:
        """Return the source as a network."""
        with torch.device("meta"):
            network = DiT(self.config) if isinstance(self.config, DiTConfig) else Router(self.config)
        network.load_state_dict(self.state, assign=True)
        return network


@dataclass(frozen=True)
class Conversion:
    """The report of a conversion, as written to conversion.json."""

    source: dict[str, str]
    target: str
    options: FlowMatchingOptions | None
    changes: list[ConversionRow]
    metrics: dict[str, float]
    files: dict[str, str]
    atoll: str = __version__


def read_source(
    path: str | Path, heads: int | None = None, layout: str | None = None, *, num_classes: int | None = None
) -> ForeignCheckpoint:
    """Read a checkpoint: a `.pt` or `.safetensors` file, or a folder with one and optionally a config.json.

    `layout` and `num_classes` are for files that do not determine them; they take precedence over config.json.
    """
    # The file, and the config.json beside it.
    file = Path(path)
    if file.is_dir() and (file / WEIGHTS_FILE).is_file():
        file = file / WEIGHTS_FILE
    elif file.is_dir():
        files = sorted(part for part in file.iterdir() if part.suffix in (".safetensors", ".pt", ".pth", ".bin"))
        if len(files) != 1:
            names = ", ".join(part.name for part in files) or "none"
            raise AtollError(f"{file}: expected one weight file, found {names}; give the path of the file")
        file = files[0]
    state = {name: part.float() if part.is_floating_point() else part for name, part in read_weights(file).items()}
    config_file = file.parent / CONFIG_FILE
    given = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    kind = given.get(CLASS_NAME)
    # A network in the layout of Atoll.
    if kind in ("DiT", "Router"):
        if layout is not None or num_classes is not None:
            raise AtollError(f"{file} is in the layout of Atoll; omit --layout and --num-classes")
        with torch.device("meta"):
            network = build(read_network(given))
        assert isinstance(network, DiT | Router)
        check_fit(state, network.state_dict(), f"the network of {config_file}")
        return ForeignCheckpoint(file, "atoll", network.config, state)
    # An expert that wraps a diffusers model: read the model, and the null condition as a DiT stores it.
    null: dict[str, Tensor] = {}
    if kind in KINDS:
        inside = {name.removeprefix("model."): part for name, part in state.items() if name.startswith("model.")}
        if not any(candidate.matches(inside) for candidate in LAYOUTS.values()):
            raise AtollError(f"{file}: a {kind} cannot be converted; supported layouts: {', '.join(LAYOUTS)}")
        null = {name: tensor.flatten() for name, tensor in state.items() if name.startswith("null_")}
        # It was trained with Atoll, so the scale of the released networks of its layout does not apply.
        state, given = inside, {NORMALIZATION: None, **given, CLASS_NAME: DIFFUSERS_CLASSES[kind]}
    # A network in the layout of others.
    if num_classes is not None:
        given = given | {"num_classes": num_classes}
    found = detect(state, layout or given.get("layout"), file.name)
    try:
        config = found.read_config(state, given, heads)
    except KeyError as missing:
        raise AtollError(
            f"{file} or its config.json lacks {missing}, which the {found.title} layout needs"
        ) from missing
    config = replace(config, normalization=_normalization(file, given, found))
    changes = [ConversionRow("time and sign", "changed", 0, found.convention)] if found.convention else []
    changes += [
        ConversionRow(name, "new", tensor.numel() - (state[name].numel() if name in state else 0), note)
        for name, (tensor, note) in found.complete(state, config).items()
    ]
    return ForeignCheckpoint(file, found.name, config, found.to_native(state, config) | null, changes)


def _normalization(file: Path, given: Mapping[str, Any], found: Layout) -> LatentScale | None:
    """Return how the latents of a network were scaled; None if it is unknown.

    Its config.json decides, else the autoencoder of its diffusers pipeline, else the layout, whose releases all have
    one scale. An export of Atoll is not such a pipeline: each of its experts has a declaration.json.
    """
    folder = file.resolve().parent
    if NORMALIZATION in given or (folder / "declaration.json").is_file():
        values = given.get(NORMALIZATION)
        return None if values is None else LatentScale.read(values, file.parent / CONFIG_FILE)
    autoencoder = folder.parent / "vae" / CONFIG_FILE
    if (folder.parent / "model_index.json").is_file() and autoencoder.is_file():
        return LatentScale.of_autoencoder(json.loads(autoencoder.read_text(encoding="utf-8")), autoencoder)
    return found.normalization


def convert(
    source: str | Path,
    destination: str | Path,
    to: str = "atoll",
    *,
    options: FlowMatchingOptions | None = None,
    heads: int | None = None,
    force: bool = False,
    layout: str | None = None,
    num_classes: int | None = None,
) -> Conversion:
    """Convert a checkpoint into the folder `destination`; write nothing if a tensor does not fit."""
    if to not in TARGETS:
        raise AtollError(unknown("target", to, TARGETS))
    destination = Path(destination)
    if destination.exists() and any(destination.iterdir() if destination.is_dir() else [destination]) and not force:
        raise AtollError(f"{destination} exists and is not empty; choose another folder, or overwrite with --force")
    read = read_source(source, heads, layout, num_classes=num_classes)
    options = (options or FlowMatchingOptions()) if to == "flow-matching" else None
    metrics: dict[str, float] = {}
    if options is None:
        state, fields, changes = _relayout(read, to)
    elif isinstance(read.config, DiTConfig):
        state, config, changes, metrics = to_flow_matching(read.state, read.config, options)
        fields = config.to_dict()
        metrics["feature_error"] = feature_error(
            read, ForeignCheckpoint(read.file, "atoll", config, state), options.time
        )
    else:
        raise AtollError(f"{read.file} holds a router; only experts can be converted to flow matching")
    write_weights(state, destination / WEIGHTS_FILE)
    (destination / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    conversion = Conversion(
        source={"file": read.file.name, "layout": read.layout, "sha256": sha256_of(read.file)},
        target=to,
        options=options,
        changes=changes + read.changes,
        metrics=metrics,
        files={name: sha256_of(destination / name) for name in (WEIGHTS_FILE, CONFIG_FILE)},
    )
    (destination / CONVERSION_FILE).write_text(json.dumps(asdict(conversion), indent=2) + "\n", encoding="utf-8")
    return conversion


def _relayout(source: ForeignCheckpoint, to: str) -> tuple[dict[str, Tensor], ConfigJson, list[ConversionRow]]:
    """Translate a network to another layout; list what the layout cannot represent."""
    total = sum(tensor.numel() for tensor in source.state.values())
    total -= sum(change.parameters for change in source.changes if change.action == "new")
    if to == "atoll":
        changes = [ConversionRow("all tensors", "renamed", total, f"from {source.layout}")]
        return source.state, source.config.to_dict(), changes
    chosen = LAYOUTS[to]
    if (chosen.build is Router) != isinstance(source.config, RouterConfig):
        found = "a router" if chosen.build is DiT else "an expert"
        raise AtollError(f"{source.file} holds {found}, which the layout {to} does not support")
    foreign, fields = chosen.from_native(source.state, source.config), chosen.write_config(source.config)
    left = chosen.unsupported_tensors(source.state, source.config)
    gone = sum(source.state[name].numel() for name in left)
    changes = [ConversionRow("all tensors of the layout", "renamed", total - gone, f"{source.layout} to {to}")]
    if left:
        changes.append(ConversionRow(", ".join(left), "omitted", gone, f"not part of the {chosen.title} layout"))
    scale = source.config.normalization
    # Write the scale only if it differs from the layout's, which is the default when the file is read again.
    if scale != chosen.normalization:
        fields[NORMALIZATION] = None if scale is None else asdict(scale)
    if chosen.convention:
        changes.append(ConversionRow("time and sign", "changed", 0, chosen.convention))
    # Settings that the layout fixes to other values: equal weights, slightly different arithmetic.
    target = replace(chosen.read_config(foreign, fields, source.config.heads), normalization=scale).to_dict()
    changes += [
        ConversionRow(name, "changed", 0, f"{own} here, {target[name]} in {chosen.title}: outputs differ slightly")
        for name, own in source.config.to_dict().items()
        if own != target[name]
    ]
    return foreign, fields, changes


@torch.no_grad()
def feature_error(
    source: ForeignCheckpoint, converted: ForeignCheckpoint, time: Literal["steps", "snr", "same"] = "same"
) -> float:
    """Return the relative difference of the inputs of the final layer, for noise at four timesteps, unconditioned."""
    before, after = source.network(), converted.network()
    assert isinstance(before, DiT)
    assert isinstance(after, DiT)
    x = torch.randn(
        4, before.config.channels, before.config.size, before.config.size, generator=torch.Generator().manual_seed(0)
    )
    # A small sample over the range of timesteps: the metric detects wrong conversions, it does not rank good ones.
    times = torch.tensor([100.0, 350.0, 600.0, 850.0])
    source_timestep = after.time_table[times.long()] if time != "same" else times
    expected = before.features(x, source_timestep, Condition())
    return float((after.features(x, times, Condition()) - expected).norm() / expected.norm())


def as_table(conversion: Conversion, source: Path, destination: Path) -> Table:
    """Return the report of a conversion as a table for the terminal."""
    title = f"{source} ({conversion.source['layout']}) to {destination} ({conversion.target})"
    table = Table("item", "action", "parameters", "note", title=title)
    for change in conversion.changes:
        table.add_row(change.item, change.action, f"{change.parameters:,}", change.note)
    if "feature_error" in conversion.metrics:
        error = conversion.metrics["feature_error"]
        table.caption = f"relative difference of the final layer's input from the source: {error:.2e}"
    return table
