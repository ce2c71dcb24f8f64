"""The networks in the folder of a pipeline: what `atoll export` wrote, or the Paris release, here or on the hub."""

import json
import re
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.layout import MANIFEST_FILE
from atoll.core.manifests import PIPELINE
from atoll.core.untrusted import Foreign
from atoll.data.encoders import Encoders
from atoll.data.pretrained import model_folder
from atoll.experts.paris import Paris
from atoll.experts.source import Opened
from atoll.experts.stored import Stored, weights_of

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


class ModelIndex(Foreign):
    """The model_index.json of a folder: the class of its pipeline and, of an exported one, of its components."""

    class_name: str | None = Field(None, alias="_class_name")
    components: dict[str, tuple[str | None, str | None]] = Field(default_factory=dict)
    """Library and class by the component's name; both are None for a component that is left out."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: object) -> object:
        """Find the components among the other keys. Those of other pipelines are not read: they follow no one rule."""
        if not isinstance(values, dict):
            return {}
        kind = values.get("_class_name")
        kind = kind if isinstance(kind, str) else None  # diffusers names a custom pipeline by a list
        named = [name for name in values if kind == PIPELINE_CLASS and not name.startswith("_")]
        return {"_class_name": kind, "components": {name: values[name] for name in named}}

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read it from its folder; empty if there is none."""
        file = folder / INDEX_FILE
        return cls.read(file) if file.is_file() else cls()

    @property
    def exported(self) -> bool:
        """Whether Atoll wrote the folder."""
        return self.class_name == PIPELINE_CLASS

    @property
    def has_router(self) -> bool:
        """Whether it lists a router."""
        return self.components.get("router", (None, None))[0] is not None

    def expert_names(self, folder: Path) -> list[str]:
        """expert_0, expert_1, … as it lists them, after checking the class of every component."""
        names = [name for name in self.components if re.fullmatch(r"expert_\d+", name)]
        expected = [f"expert_{number}" for number in range(len(names))]
        if not names or set(names) != set(expected):
            raise AtollError(f"{folder / INDEX_FILE} lists the experts {sorted(names)}; expected expert_0, expert_1, …")
        classes = dict.fromkeys(expected, EXPERT_CLASS) | ({"router": ROUTER_CLASS} if self.has_router else {})
        for name, (library, kind) in self.components.items():
            if name in classes and (library, kind) != (COMPONENTS, classes[name]):
                raise AtollError(f"{folder / INDEX_FILE}: {name} is a {library}.{kind}, expected a {classes[name]}")
            if name not in classes and (name not in LIBRARIES or library not in (None, LIBRARIES[name])):
                found = [library, kind]
                raise AtollError(f"{folder / INDEX_FILE} has a component {name} of {found}, which no export has")
        return expected


def is_folder(source: str | Path) -> bool:
    """Whether this is a pipeline's folder, or could be the name of one on the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        return (path / INDEX_FILE).is_file() or (path / "expert_0").is_dir()
    return _HUB_NAME.fullmatch(str(source)) is not None


def fetch(source: str | Path) -> Path:
    """The folder itself, from the hub if it is a name."""
    return model_folder(str(source), PATTERNS).resolve()


def open_folder(source: str | Path, model: str) -> Opened:
    """Find the networks of a folder; `model` is `experts`, or `expert:K` for one of them."""
    folder = fetch(source)
    index = ModelIndex.of(folder)
    if index.exported:
        stored = verify(folder, index)
        router = stored.pop("router").reference() if index.has_router else None
        experts = [expert.reference() for expert in stored.values()]
        declared = experts[0].declaration
        return Opened(experts, router, Encoders.of(declared.latents, declared.text, folder)).choose(model, folder)
    if Paris.recognises(folder):
        return Paris(folder).open(model)
    raise refusal(folder, index)


def refusal(folder: Path, index: ModelIndex) -> AtollError:
    """Why a folder is not an ensemble."""
    if (folder / "expert_0").is_dir():
        weights_of(folder / "expert_0")
        return AtollError(f"{folder / 'expert_0'} holds neither an expert of Atoll nor one of the Paris release")
    kind = index.class_name or "nothing that Atoll knows"
    return AtollError(
        f"{folder} holds {kind}, not experts with a router; open it with diffusers, or bring its network in with: "
        f"atoll convert {folder} DST"
    )


def verify(folder: Path, index: ModelIndex) -> dict[str, Stored]:
    """Check that all files are there, as they were when the folder was written, and fit the declared networks."""
    artifact = Artifact(folder.parent, folder.name)
    if artifact.manifest() is None:
        raise AtollError(
            f"{folder} has no {MANIFEST_FILE}: its export was not finished, or it was copied in part; copy it again"
        )
    artifact.open(PIPELINE, verify=True)
    names = [*index.expert_names(folder), *(["router"] if index.has_router else [])]
    return {name: Stored.open(folder / name) for name in names}


def forget_paths(folder: Path) -> None:
    """Take out of configurations where diffusers and transformers once read them from."""
    for pattern in (INDEX_FILE, "*/config.json", "*/tokenizer_config.json"):
        for file in folder.glob(pattern):
            values = json.loads(file.read_text(encoding="utf-8"))
            kept = {key: value for key, value in values.items() if key not in ("_name_or_path", "name_or_path")}
            if kept != values:
                file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
