"""The networks of a pipeline folder, local or on the hub: an export of Atoll or the Paris release.

An export of adapters has no autoencoder, text encoder or base network. It names the pipeline that has them.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, JsonValue, model_validator

from atoll.core.artifacts import Artifact, Manifest
from atoll.core.errors import AtollError
from atoll.core.layout import MANIFEST_FILE, model_job
from atoll.core.manifests import PIPELINE, NetworkContent
from atoll.core.networks import LOCAL, BaseConfig, base_name
from atoll.data.foreign_files import link_outside
from atoll.encoders.base_pipeline import register_base
from atoll.encoders.encoders import Encoders
from atoll.encoders.hub import check_here, is_hub_name, local_folder
from atoll.encoders.pretrained import check_weights, fingerprint_of, model_folder
from atoll.experts.expert import Declaration, ModelReference
from atoll.experts.network_folder import NetworkFolder, weights_file
from atoll.experts.paris import is_paris, open_paris
from atoll.verify.local_trust import signed_networks, whole_model
from atoll.verify.untrusted import Foreign

PIPELINE_CLASS = "AtollPipeline"
COMPONENTS = "atoll.apps.models.pipeline"
EXPERT_CLASS, ROUTER_CLASS = "ExpertModel", "RouterModel"
PIPELINE_MODULE, NETWORK_MODULE = "pipeline", re.compile(r"network_[0-9a-f]{16}")
"""Modules of the classes in a folder with its own code, which Atoll does not run."""
INDEX_FILE, ADAPTERS_FILE = "model_index.json", "adapters.json"
"""What an export contains: a pipeline of diffusers, or experts of a base."""
LIBRARIES = {"vae": "diffusers", "scheduler": "diffusers", "text_encoder": "transformers", "tokenizer": "transformers"}
LIBRARIES["router"] = COMPONENTS
"""Library of each component's class. A folder cannot name any other module to import."""
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.md", "*.model", "*.py")
"""Files that are fetched from the hub: no pickles. Code is compared with the manifest and never run."""
_DOCUMENTS = frozenset({".md", ".png", ".jpg", ".webp", ".html"})
"""Suffixes of files that may be added to an export: no library loads them."""
_RECORDS = (MANIFEST_FILE, "signature.json", "snapshot.json", "root.json")
"""Files about the export that its manifest cannot list."""


class ModelIndex(Foreign):
    """The model_index.json of a folder: the class of its pipeline and, in an export of Atoll, of its components."""

    class_name: str | None = Field(None, alias="_class_name")
    components: dict[str, tuple[str | None, str | None]] = Field(default_factory=dict)
    """Library and class by the component's name; both are None for an omitted component."""
    standalone: bool = False
    """Whether the folder contains the code of its classes."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: object) -> object:
        """Collect the components from the other keys, in exports of Atoll only: other pipelines have other keys."""
        if not isinstance(values, dict):
            return {}
        kind = values.get("_class_name")
        # diffusers names a custom pipeline by a list: module and class
        standalone = kind == [PIPELINE_MODULE, PIPELINE_CLASS]
        kind = PIPELINE_CLASS if standalone else kind if isinstance(kind, str) else None
        named = [name for name in values if kind == PIPELINE_CLASS and not name.startswith("_")]
        found = {name: values[name] for name in named}
        return {"_class_name": kind, "components": found, "standalone": standalone}

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the index of a folder; it is empty if the folder has none."""
        file = folder / INDEX_FILE
        return cls.read(file) if file.is_file() else cls()

    @property
    def exported(self) -> bool:
        """Whether Atoll wrote the folder."""
        return self.class_name == PIPELINE_CLASS

    @property
    def has_router(self) -> bool:
        """Whether the index lists a router."""
        return self.components.get("router", (None, None))[0] is not None

    def names(self, folder: Path) -> list[str]:
        """Return expert_0, expert_1, … and the router, if there is one, after checking the class of every component."""
        names = [name for name in self.components if re.fullmatch(r"expert_\d+", name)]
        expected = [f"expert_{number}" for number in range(len(names))]
        if not names or set(names) != set(expected):
            raise AtollError(f"{folder / INDEX_FILE} lists the experts {sorted(names)}; expected expert_0, expert_1, …")
        classes = dict.fromkeys(expected, EXPERT_CLASS) | ({"router": ROUTER_CLASS} if self.has_router else {})
        for name, (library, kind) in self.components.items():
            own = NETWORK_MODULE.fullmatch(library or "") if self.standalone else library == COMPONENTS
            if name in classes and (not own or kind != classes[name]):
                raise AtollError(f"{folder / INDEX_FILE}: {name} is a {library}.{kind}, expected a {classes[name]}")
            if name not in classes and (name not in LIBRARIES or library not in (None, LIBRARIES[name])):
                found = [library, kind]
                raise AtollError(
                    f"{folder / INDEX_FILE} has a component {name} of {found}, which exports of Atoll do not have"
                )
        return list(classes)


class BaseReference(Foreign):
    """The base of exported adapters."""

    name: str
    """Name on the hub; `local` if it has none."""
    fingerprint: str


class AdapterIndex(Foreign):
    """The adapters.json of an export."""

    base: BaseReference
    experts: tuple[dict[str, JsonValue], ...] = Field(min_length=1)
    router: str | None = None

    @property
    def names(self) -> list[str]:
        """The folders of all networks."""
        return [f"expert_{number}" for number in range(len(self.experts))] + (["router"] if self.router else [])

    def encoders(self, experts: Sequence[Declaration], base: str | None) -> Encoders:
        """Find the pipeline of the base, in the folder `base` if one is given; let experts open its network."""
        networks = [own.network for own in experts if isinstance(own.network, BaseConfig)]
        if {own.weights for own in networks} != {self.base.fingerprint}:
            raise AtollError(f"the experts are not those of the base that {ADAPTERS_FILE} names; export them again")
        network, declared = networks[0], experts[0]
        wanted = f"{self.base.name} with the fingerprint {network.weights[:16]}"
        if base is None and self.base.name == LOCAL:
            raise AtollError(
                f"these experts are adapters of a base that has no public name ({wanted}); ask for a copy of it, and "
                "give its folder: --base FOLDER, or atoll.load(…, base=FOLDER)"
            )
        name = base_name(base or self.base.name, network.trace.options)
        if (found := register_base(name)) != network.weights:
            raise AtollError(f"{base or self.base.name} has the fingerprint {found[:16]}, but the base is {wanted}")
        text = declared.text and declared.text.model_copy(update={"encoder": name})
        return Encoders.of(declared.latents.model_copy(update={"autoencoder": name}), text)


def is_folder(source: str | Path) -> bool:
    """Return whether this is a pipeline folder, or could be the name of one on the hub."""
    if folder := local_folder(source):
        return (folder / INDEX_FILE).is_file() or (folder / "expert_0").is_dir()
    return is_hub_name(source)


def fetch(source: str | Path) -> Path:
    """Return the folder; download it first if `source` is a name on the hub."""
    check_here(source, "For the model of this name on the hub, run the command in another folder")
    return model_folder(source if isinstance(source, str) else str(source.absolute()), PATTERNS).resolve()


def open_folder(source: str | Path, model: str, *, base: str | None = None, find_base: bool = True) -> ModelReference:
    """Find the networks of a folder; `model` is `experts`, or `expert:K` for one of them.

    The base of adapters is the folder `base`, or the one that they name. Without `find_base` it need not be here.
    """
    folder = fetch(source)
    index = ModelIndex.of(folder)
    adapters = AdapterIndex.read(folder / ADAPTERS_FILE) if (folder / ADAPTERS_FILE).is_file() else None
    if adapters is not None or index.exported:
        stored = verify(folder, index.names(folder) if adapters is None else adapters.names)
        router = stored.pop("router").reference() if "router" in stored else None
        experts = [expert.reference() for expert in stored.values()]
        declared = experts[0].declaration
        if adapters is not None and find_base:
            encoders = adapters.encoders([own.declaration for own in experts], base)
        else:
            encoders = Encoders.of_folder(folder, declared.latents, declared.text)
        return ModelReference(experts, router, encoders).choose(model, folder)
    if is_paris(folder):
        return open_paris(folder, model)
    raise unsupported_folder(folder, index)


def unsupported_folder(folder: Path, index: ModelIndex) -> AtollError:
    """Return the error that explains why a folder cannot be opened as an ensemble."""
    if (folder / "expert_0").is_dir():
        weights_file(folder / "expert_0")  # raises an error about pickles or missing weights
        return AtollError(f"{folder / 'expert_0'} holds neither an expert of Atoll nor one of the Paris release")
    kind = index.class_name or "no known pipeline"
    return AtollError(
        f"{folder} holds {kind}, not experts with a router; open it with diffusers, or convert its network with: "
        f"atoll convert {folder} DST"
    )


def verify(folder: Path, names: Sequence[str]) -> dict[str, NetworkFolder]:
    """Check the hashes of all files, and that the weights of these networks fit their declarations.

    In an export of a shared run, the networks must be those of its signed snapshot.
    """
    artifact = Artifact(folder.parent, folder.name)
    if artifact.manifest() is None:
        raise AtollError(
            f"{folder} has no {MANIFEST_FILE}: its export was not finished, or its copy is incomplete; copy it again"
        )
    manifest = artifact.open(PIPELINE, verify=True)
    # The libraries find some files by their names alone, such as an adapter or the index of sharded weights. So there
    # must be no file that the manifest does not list, and no link to elsewhere.
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if reason := link_outside(folder, path):
            raise AtollError(f"{path} is {reason}; copy the export again")
        harmless = path.suffix in _DOCUMENTS or any(part.startswith(".") for part in name.parts)
        if not (path.is_dir() or harmless or name.as_posix() in (*manifest.files, *_RECORDS)):
            raise AtollError(f"{path} is not listed in {folder / MANIFEST_FILE}, so nobody vouches for it; remove it")
    stored = {name: NetworkFolder.open(folder / name) for name in names}
    if (signed := signed_networks(folder)) is not None:
        model = PIPELINE.parse(manifest, folder).model
        jobs = sorted(network.content.job for network in stored.values())
        if jobs != sorted(whole_model(signed) if model == "experts" else {model_job(model)}):
            raise AtollError(f"{folder} does not have exactly the networks of the signed snapshot; export it again")
        _check_encoders(folder, manifest, stored["expert_0"].content)
    return stored


def _check_encoders(folder: Path, manifest: Manifest, declared: NetworkContent) -> None:
    """Raise an error unless the encoders have the fingerprints that the signed networks declare."""

    def hashes(part: str) -> dict[str, str]:
        files = manifest.files.items()
        return {name.removeprefix(part): entry.sha256 for name, entry in files if name.startswith(part)}

    text = declared.text.weights if declared.text else None
    for part, recorded in (("vae/", declared.latents.weights), ("text_encoder/", text)):
        if own := hashes(part):
            check_weights(part[:-1], str(folder / part), recorded=recorded, found=fingerprint_of(own))
    # The tokenizer's files are those beside the weights of the text encoder.
    if not hashes("tokenizer/").items() <= hashes("text_encoder/").items():
        raise AtollError(f"{folder / 'tokenizer'} is not the tokenizer of the signed networks; export it again")


def remove_source_paths(folder: Path) -> None:
    """Remove the local paths that diffusers and transformers write into configurations."""
    for pattern in (INDEX_FILE, "config.json", "*/config.json", "*/tokenizer_config.json"):
        for file in folder.glob(pattern):
            values = json.loads(file.read_text(encoding="utf-8"))
            kept = {key: value for key, value in values.items() if key not in ("_name_or_path", "name_or_path")}
            if kept != values:
                file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
