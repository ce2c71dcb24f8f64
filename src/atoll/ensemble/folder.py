"""Opening a pipeline's folder as one model: what `atoll export` wrote, or the Paris release, here or on the hub."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.layout import MANIFEST_FILE
from atoll.core.manifests import PIPELINE
from atoll.data.pretrained import folder_of
from atoll.data.stages.latents import Codec, Pixel, open_codec
from atoll.data.stages.text import TextEncoder, open_text_encoder
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.paris import Paris
from atoll.ensemble.sampler import Models
from atoll.experts.expert_cache import Placement
from atoll.experts.router import OpenRouter
from atoll.experts.stored import Stored, weights_of
from atoll.nets import Router

PIPELINE_CLASS = "AtollPipeline"
COMPONENTS = "atoll.export.pipeline"
EXPERT_CLASS, ROUTER_CLASS = "ExpertModel", "RouterModel"
INDEX_FILE = "model_index.json"
LIBRARIES = {"vae": "diffusers", "scheduler": "diffusers", "text_encoder": "transformers", "tokenizer": "transformers"}
LIBRARIES["router"] = COMPONENTS
"""Where the classes of components come from; no other module is imported because a file says so."""
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.md", "*.model")
"""All that is fetched from the hub: no pickles and no code."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_folder(source: str | Path) -> bool:
    """Whether this is a pipeline's folder, or could be the name of one on the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        return (path / INDEX_FILE).is_file() or (path / "expert_0").is_dir()
    return _HUB_NAME.fullmatch(str(source)) is not None


def fetch(source: str | Path) -> Path:
    """The folder itself, from the hub if it is a name."""
    return folder_of(str(source), PATTERNS).resolve()


def load_folder(
    source: str | Path, model: str, placement: Placement, *, resident: int | None = None, routing: str = "top-1"
) -> Ensemble:
    """Open a folder as one model; `model` is `experts`, or `expert:K` for one of them."""
    folder = fetch(source)
    index = read_index(folder)
    if index.get("_class_name") == PIPELINE_CLASS:
        verify(folder, index)
        return _exported(folder, index, model, placement=placement, resident=resident, routing=routing)
    if Paris.recognises(folder):
        paris = Paris(folder)
        members = paris.members()
        chosen = _chosen(members, model, folder)
        router = None if len(chosen) == 1 else paris.open_router(placement.device, placement.dtype)
        ensemble = Ensemble(chosen, router, placement=placement, resident=resident, routing=routing)
        ensemble.models = paris.models
        return ensemble
    raise refusal(folder, index)


def read_index(folder: Path) -> dict[str, Any]:
    """The content of model_index.json; empty if there is none."""
    file = folder / INDEX_FILE
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AtollError(f"{file} is not JSON ({error}); copy the folder again") from error
    return values if isinstance(values, dict) else {}


def refusal(folder: Path, index: dict[str, Any]) -> AtollError:
    """Why a folder is not an ensemble."""
    if (folder / "expert_0").is_dir():
        weights_of(folder / "expert_0")
        return AtollError(f"{folder / 'expert_0'} holds neither an expert of Atoll nor one of the Paris release")
    kind = index.get("_class_name", "nothing that Atoll knows")
    return AtollError(
        f"{folder} holds {kind}, not experts with a router; open it with diffusers, or bring its network in with: "
        f"atoll convert {folder} DST"
    )


def expert_names(folder: Path, index: dict[str, Any]) -> list[str]:
    """expert_0, expert_1, … as model_index.json lists them, each of the right class."""
    names = [name for name in index if re.fullmatch(r"expert_\d+", name)]
    expected = [f"expert_{number}" for number in range(len(names))]
    if not names or set(names) != set(expected):
        raise AtollError(f"{folder / INDEX_FILE} lists the experts {sorted(names)}; expected expert_0, expert_1, …")
    classes = dict.fromkeys(expected, EXPERT_CLASS)
    if has_router(index):
        classes["router"] = ROUTER_CLASS
    for name, kind in classes.items():
        if list(index[name]) != [COMPONENTS, kind]:
            raise AtollError(f"{folder / INDEX_FILE}: {name} is a {'.'.join(map(str, index[name]))}, expected a {kind}")
    for name in [name for name in index if name not in classes and not name.startswith("_")]:
        if name not in LIBRARIES or index[name][0] not in (None, LIBRARIES[name]):
            raise AtollError(f"{folder / INDEX_FILE} has a component {name} of {index[name]}, which no export has")
    return expected


def verify(folder: Path, index: dict[str, Any]) -> None:
    """Check that all files are there, as they were when the folder was written, and fit the declared networks."""
    artifact = Artifact(folder.parent, folder.name)
    if artifact.manifest() is None:
        raise AtollError(
            f"{folder} has no {MANIFEST_FILE}: its export was not finished, or it was copied in part; copy it again"
        )
    artifact.open(PIPELINE, verify=True)
    for name in [*expert_names(folder, index), *(["router"] if has_router(index) else [])]:
        Stored.open(folder / name)


def has_router(index: dict[str, Any]) -> bool:
    """Whether model_index.json lists a router."""
    return index.get("router", [None])[0] is not None


def forget_paths(folder: Path) -> None:
    """Take out of configurations where diffusers and transformers once read them from."""
    for pattern in (INDEX_FILE, "*/config.json", "*/tokenizer_config.json"):
        for file in folder.glob(pattern):
            values = json.loads(file.read_text(encoding="utf-8"))
            kept = {key: value for key, value in values.items() if key not in ("_name_or_path", "name_or_path")}
            if kept != values:
                file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


@dataclass(eq=False)
class FolderModels(Models):
    """Text encoder and autoencoder that are in the folder."""

    folder: Path

    @cached_property
    def codec(self) -> Codec | Pixel:
        """The autoencoder."""
        pixels = self.declaration.latents.autoencoder == "pixels"
        return open_codec("pixels" if pixels else str(self.folder / "vae"))

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The text encoder, with the tokenizer beside it."""
        text = self.declaration.text
        if text is None:
            raise AtollError("these experts were trained without text: they take no prompts")
        return open_text_encoder(str(self.folder / "text_encoder"), text.max_tokens, self.folder / "tokenizer")


def _exported(
    folder: Path, index: dict[str, Any], model: str, *, placement: Placement, resident: int | None, routing: str
) -> Ensemble:
    members = [Stored.open(folder / name).member() for name in expert_names(folder, index)]
    chosen = _chosen(members, model, folder)
    router = None
    if len(chosen) > 1 and has_router(index):
        stored = Stored.open(folder / "router")
        placed = Placement(placement.device, placement.dtype, None, placement.compile).put(stored.network())
        assert isinstance(placed, Router)
        router = OpenRouter(stored.declaration, placed, placement.dtype)
    ensemble = Ensemble(chosen, router, placement=placement, resident=resident, routing=routing)
    ensemble.models = FolderModels(members[0].declaration, folder)
    return ensemble


def _chosen(members: list[Any], model: str, folder: Path) -> list[Any]:
    kind, _, number = model.partition(":")
    if model == "experts":
        return members
    if kind == "expert" and number.isdecimal() and int(number) < len(members):
        return [members[int(number)]]
    raise AtollError(
        f"there is no model {model!r} in {folder}; it holds experts, expert:0 to expert:{len(members) - 1}"
    )
