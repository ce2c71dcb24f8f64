"""`atoll convert`: other people's checkpoints in and out, with an account of what was done."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from atoll.convert import LAYOUTS, Layout, check_fit, detect, read_weights, sha256, write_weights
from atoll.convert.fold import Change, FlowMatchingOptions, to_flow_matching
from atoll.core.errors import AtollError, unknown
from atoll.core.networks import CLASS_NAME, ConfigJson, DiTConfig, LatentScale, RouterConfig, read_network
from atoll.core.version import __version__
from atoll.nets.adapters import KINDS
from atoll.nets.conditioning import Condition
from atoll.nets.dit import DiT
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE, build
from atoll.nets.router import Router, without_retired

CONVERSION_FILE = "conversion.json"
NORMALIZATION = "normalization"
"""The key of config.json under which a network declares how its latents were scaled; null if it is not known."""
TARGETS = ("atoll", "flow-matching", *LAYOUTS)
"""What `convert` can make: Atoll's own layout, a flow-matching expert, or someone else's layout."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that was read, in native terms."""

    file: Path
    layout: str
    config: DiTConfig | RouterConfig
    state: dict[str, Tensor]
    changes: list[Change] = field(default_factory=list)
    """What reading changed besides names, and what was made anew because the file lacks it."""

    def network(self) -> DiT | Router:
        """The source as a network."""
        with torch.device("meta"):
            network = DiT(self.config) if isinstance(self.config, DiTConfig) else Router(self.config)
        network.load_state_dict(self.state, assign=True)
        return network


@dataclass(frozen=True)
class Conversion:
    """What a conversion did; this is what conversion.json holds."""

    source: dict[str, str]
    target: str
    options: FlowMatchingOptions | None
    changes: list[Change]
    figures: dict[str, float]
    files: dict[str, str]
    atoll: str = __version__


def read_source(
    path: str | Path, heads: int | None = None, layout: str | None = None, *, num_classes: int | None = None
) -> Source:
    """Read a checkpoint: a `.pt` or `.safetensors` file, or a folder with one and perhaps a config.json.

    `layout` and `num_classes` are for files that do not show them; they take precedence over config.json.
    """
    path = Path(path)
    file = _weights_in(path) if path.is_dir() else path
    state = {name: _in_float32(tensor) for name, tensor in read_weights(file).items()}
    config_file = file.parent / CONFIG_FILE
    given = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    kind = given.get(CLASS_NAME)
    if kind in ("DiT", "Router"):
        if layout is not None or num_classes is not None:
            raise AtollError(f"{file} is in Atoll's own layout; leave out --layout and --num-classes")
        return _native(file, given, state)
    null: dict[str, Tensor] = {}
    if kind in KINDS:
        given, state, null = _unwrapped(given, state, file)
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
    changes = _convention(found) + _made_anew(found, state, config)
    return Source(file, found.name, config, found.to_native(state, config) | null, changes)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _native(file: Path, given: ConfigJson, state: dict[str, Tensor]) -> Source:
    """A network of Atoll's own, as its config.json describes it."""
    with torch.device("meta"):
        network = build(read_network(given))
    assert isinstance(network, DiT | Router)
    state = without_retired(state)
    check_fit(state, network.state_dict(), f"the network of {file.parent / CONFIG_FILE}")
    return Source(file, "atoll", network.config, state)


def _normalization(file: Path, given: Mapping[str, Any], found: Layout) -> LatentScale | None:
    """Return how a network's latents were scaled; None if that is not known.

    Its config.json decides, or else the autoencoder of the pipeline that it is a part of, or else the layout, whose
    releases all have one scale. An export of Atoll is no such pipeline: its experts have declarations of their own.
    """
    folder = file.resolve().parent
    if NORMALIZATION in given or (folder / "declaration.json").is_file():
        values = given.get(NORMALIZATION)
        return None if values is None else LatentScale.read(values, file.parent / CONFIG_FILE)
    autoencoder = folder.parent / "vae" / CONFIG_FILE
    if (folder.parent / "model_index.json").is_file() and autoencoder.is_file():
        return LatentScale.of_autoencoder(json.loads(autoencoder.read_text(encoding="utf-8")), autoencoder)
    return found.normalization


def _convention(found: Layout) -> list[Change]:
    return [Change("time and sign", "changed", 0, found.convention)] if found.convention else []


def _made_anew(found: Layout, state: dict[str, Tensor], config: Any) -> list[Change]:
    """The tensors, or rows of them, that the native network needs and a file does not have."""
    return [
        Change(name, "new", tensor.numel() - (state[name].numel() if name in state else 0), note)
        for name, (tensor, note) in found.complete(state, config).items()
    ]


def _weights_in(folder: Path) -> Path:
    if (folder / WEIGHTS_FILE).is_file():
        return folder / WEIGHTS_FILE
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".pt", ".pth", ".bin"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise AtollError(f"{folder}: expected one weight file, found {names}; give the file itself")
    return files[0]


def _unwrapped(
    given: ConfigJson, state: dict[str, Tensor], file: Path
) -> tuple[ConfigJson, dict[str, Tensor], dict[str, Tensor]]:
    """The diffusers model inside an expert of another kind, and its learned null condition as a DiT has it."""
    inside = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    expert = str(given[CLASS_NAME])
    if not any(candidate.matches(inside) for candidate in LAYOUTS.values()):
        raise AtollError(f"{file}: a {expert} stays in its own layout; known ones: {', '.join(LAYOUTS)}")
    null = {name: tensor.flatten() for name, tensor in state.items() if name.startswith("null_")}
    # It was trained here, so no layout's release tells how its latents were scaled.
    described = {NORMALIZATION: None, **given, CLASS_NAME: KINDS[expert].model_class}
    return described, inside, null


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
    """Convert a checkpoint into the folder `destination`; nothing is written if anything does not fit."""
    if to not in TARGETS:
        raise AtollError(unknown("target", to, TARGETS))
    destination = Path(destination)
    if destination.exists() and any(destination.iterdir() if destination.is_dir() else [destination]) and not force:
        raise AtollError(f"{destination} exists and is not empty; choose another folder, or replace it with --force")
    read = read_source(source, heads, layout, num_classes=num_classes)
    options = options or FlowMatchingOptions()
    if to == "flow-matching":
        state, fields, changes, figures = _flow_matching(read, options)
    else:
        state, fields, changes = _relayout(read, to)
        figures = {}
    write_weights(state, destination / WEIGHTS_FILE)
    (destination / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    conversion = Conversion(
        source={"file": read.file.name, "layout": read.layout, "sha256": sha256(read.file)},
        target=to,
        options=options if to == "flow-matching" else None,
        changes=changes + read.changes,
        figures=figures,
        files={name: sha256(destination / name) for name in (WEIGHTS_FILE, CONFIG_FILE)},
    )
    (destination / CONVERSION_FILE).write_text(json.dumps(asdict(conversion), indent=2) + "\n", encoding="utf-8")
    return conversion


def _relayout(source: Source, to: str) -> tuple[dict[str, Tensor], ConfigJson, list[Change]]:
    """The same network in another layout. What the layout cannot say is listed."""
    total = sum(tensor.numel() for tensor in source.state.values())
    total -= sum(change.parameters for change in source.changes if change.action == "new")
    if to == "atoll":
        changes = [Change("all tensors", "renamed", total, f"from {source.layout}")]
        return source.state, source.config.to_dict(), changes
    chosen = LAYOUTS[to]
    if (chosen.build is Router) != isinstance(source.config, RouterConfig):
        raise AtollError(
            f"{source.file} holds {'a router' if chosen.build is DiT else 'an expert'}, which {to} is not for"
        )
    foreign, fields = chosen.from_native(source.state, source.config), chosen.write_config(source.config)
    left = chosen.without_place(source.state, source.config)
    gone = sum(source.state[name].numel() for name in left)
    changes = [Change("all tensors with a place in the layout", "renamed", total - gone, f"{source.layout} to {to}")]
    if left:
        changes.append(Change(", ".join(left), "left out", gone, f"no place in the {chosen.title} layout"))
    scale = source.config.normalization
    if scale != chosen.normalization:  # else nothing would contradict the layout's own when it is read again
        fields[NORMALIZATION] = None if scale is None else asdict(scale)
    there = replace(chosen.read_config(foreign, fields, source.config.heads), normalization=scale)
    changes += _convention(chosen) + _differences(source.config.to_dict(), there.to_dict(), chosen.title)
    return foreign, fields, changes


def _differences(here: Mapping[str, Any], there: Mapping[str, Any], title: str) -> list[Change]:
    """Settings that the other side fixes differently; the weights are the same, the arithmetic is not quite."""
    return [
        Change(name, "changed", 0, f"{here[name]} here, {there[name]} in {title}: answers differ slightly")
        for name in here
        if here[name] != there[name]
    ]


def _flow_matching(
    source: Source, options: FlowMatchingOptions
) -> tuple[dict[str, Tensor], ConfigJson, list[Change], dict[str, float]]:
    if not isinstance(source.config, DiTConfig):
        raise AtollError(f"{source.file} holds a router; only an expert becomes a flow-matching expert")
    state, config, changes, figures = to_flow_matching(source.state, source.config, options)
    converted = Source(source.file, "atoll", config, state)
    figures["feature_error"] = feature_error(source, converted, options.time)
    return state, config.to_dict(), changes, figures


@torch.no_grad()
def feature_error(source: Source, converted: Source, time: Literal["steps", "snr", "same"] = "same") -> float:
    """Relative difference of what enters the final layer, for noise at four times without condition."""
    before, after = source.network(), converted.network()
    assert isinstance(before, DiT)
    assert isinstance(after, DiT)
    x = torch.randn(
        4, before.config.channels, before.config.size, before.config.size, generator=torch.Generator().manual_seed(0)
    )
    times = torch.tensor([100.0, 350.0, 600.0, 850.0])
    clock = after.time_table[times.long()] if time != "same" else times
    expected = before.features(x, clock, Condition())
    return float((after.features(x, times, Condition()) - expected).norm() / expected.norm())


def as_table(conversion: Conversion, source: Path, destination: Path) -> Table:
    """The account of a conversion for the terminal."""
    table = Table(
        "what",
        "done",
        "parameters",
        "note",
        title=f"{source} ({conversion.source['layout']}) to {destination} ({conversion.target})",
    )
    for change in conversion.changes:
        table.add_row(change.what, change.action, f"{change.parameters:,}", change.note)
    if "feature_error" in conversion.figures:
        error = conversion.figures["feature_error"]
        table.caption = f"what enters the final layer differs from the source by {error:.2e} (relative)"
    return table
