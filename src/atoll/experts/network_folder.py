"""A network in a pipeline folder: its weights, as a diffusers class where that is exact, and its declaration.

    expert_0/
        config.json, diffusion_pytorch_model.safetensors    the network
        declaration.json       objective, bridge, statistics, conditioning, clusters, data, compute
        cluster.safetensors    density of the cluster's latents and captions, for `nearest` routing
        null.safetensors       the learned null condition, if the diffusers class has no parameter for it
        manifest.json          of a shared run: the manifest of the network, whose digest is in the signed snapshot

Some DiTs compute exactly what a class of diffusers computes. Those are stored in that class, so that diffusers can read
them. A conversion counts as exact if converting back reproduces the configuration and, except for the null condition,
every weight bit for bit.

In an export of a shared run, a network is compared with the signed snapshot beside it. The digest of its weights is
that of names and values in Atoll's own layout, so a network of a diffusers class is converted back and then compared.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.core.artifacts import ArtifactKind, Content, Manifest, sha256_of, to_json
from atoll.core.errors import AtollError
from atoll.core.layout import MANIFEST_FILE
from atoll.core.manifests import EXPERT, ROUTER, ExpertContent, NetworkContent, RouterContent
from atoll.core.networks import CLASS_NAME, ConfigJson
from atoll.data.density import DENSITY_FILE, Density
from atoll.experts.expert import Declaration, NetworkReference
from atoll.nets import DiT, build, load_network, save_network
from atoll.nets.adapters import KINDS, DiffusersExpert
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE, check_fit, read_weights, weights_digest, write_weights
from atoll.nets.layouts import layout
from atoll.verify.local_trust import signed_network
from atoll.verify.trust import Network

DECLARATION_FILE = "declaration.json"
NULL_FILE = "null.safetensors"
LAYOUTS = {"PixArtTransformer2DModel": "diffusers-pixart", "DiTTransformer2DModel": "diffusers-dit"}
"""Diffusers classes that compute exactly what some DiTs compute, and the layouts of their weights."""


def write(folder: Path, network: nn.Module, content: NetworkContent, *, density: Density | None) -> None:
    """Write a network with its declaration."""
    folder.mkdir(parents=True, exist_ok=True)
    state, exact = network.state_dict(), diffusers_layout(network) if isinstance(network, DiT) else None
    if isinstance(network, DiffusersExpert):
        inner = {name.removeprefix("model."): part for name, part in state.items() if name.startswith("model.")}
        fields = {key: value for key, value in dict(network.model.config).items() if not key.startswith("_")}
        exact = inner, {CLASS_NAME: network.model_class, **fields}
    if exact is None:
        save_network(network, folder)  # type: ignore[arg-type]
    else:
        weights, fields = exact
        write_weights(weights, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if null := {name: part for name, part in state.items() if "null_" in name}:
            write_weights(null, folder / NULL_FILE)
    if density is not None:
        save_file({name: part.cpu().contiguous() for name, part in density.tensors().items()}, folder / DENSITY_FILE)
    (folder / DECLARATION_FILE).write_bytes(to_json(content.model_dump(mode="json")))


def diffusers_layout(network: DiT) -> tuple[dict[str, Tensor], ConfigJson] | None:
    """Return weights and config.json of a diffusers class that stores this network exactly; None if there is none."""
    config, state = network.config, network.state_dict()
    for candidate in map(layout, LAYOUTS.values()):
        if candidate.refuse(config) is not None:
            continue
        foreign, fields = candidate.from_native(state, config), candidate.write_config(config)
        # Diffusers classes have no field for the normalization of the latents; declaration.json stores it.
        if candidate.read_config(foreign, fields, config.heads) != replace(config, normalization=None):
            continue
        back = candidate.to_native(foreign, config)
        if all(torch.equal(back[name], part) for name, part in state.items() if "null_" not in name):
            return foreign, fields
    return None


@dataclass(frozen=True)
class NetworkFolder:
    """A network folder as `write` creates it."""

    folder: Path
    content: NetworkContent
    stored_class: str
    """The class in config.json: that of the declared network, or a diffusers class that stores it exactly."""
    weights: Path
    signed: Network | None = None
    """In an export of a shared run: what the signed snapshot lists for this network."""

    @classmethod
    def open(cls, folder: Path) -> "NetworkFolder":
        """Read the declaration, and check that the weights have the names and shapes of the declared network.

        In an export of a shared run, declaration and density must be those of the manifest that the snapshot lists.
        """
        file, configuration = folder / DECLARATION_FILE, folder / CONFIG_FILE
        if not file.is_file():
            raise AtollError(f"{file} is missing, which declares how the network was trained; export the run again")
        content = read_declaration(file)
        # The class in config.json must be able to store the declared network.
        if not configuration.is_file():
            raise AtollError(f"{configuration} is missing; copy the folder again")
        kind = str(json.loads(configuration.read_text(encoding="utf-8")).get(CLASS_NAME))
        own = content.network.class_name
        able = {own} | ({KINDS[own].model_class} if own in KINDS else set(LAYOUTS) if own == "DiT" else set())
        if kind not in able:
            raise AtollError(f"{configuration} names a {kind}, but {file} declares a {own}")
        stored = cls(folder, content, kind, weights_file(folder), signed_network(folder.parent, content.job))
        # The tensors of the declared network in the stored class.
        with torch.device("meta"):
            network = build(content.network)
        expected = network.state_dict()
        if kind != own and isinstance(network, DiT):
            expected = layout(LAYOUTS[kind]).from_native(expected, network.config)
        elif kind != own:
            inner = [name for name in expected if name.startswith("model.")]
            expected = {name.removeprefix("model."): expected[name] for name in inner}
        check_fit(shapes(stored.weights), expected, f"the network that {file} declares")
        if stored.signed is not None:
            stored._check_declaration(stored.signed)
        return stored

    def _check_declaration(self, signed: Network) -> None:
        file, density = self.folder / MANIFEST_FILE, self.folder / DENSITY_FILE
        if not file.is_file() or sha256_of(file) != signed.manifest:
            raise self._not_signed("manifest")
        manifest = Manifest.from_values(json.loads(file.read_bytes()))
        kind: ArtifactKind[Any] = EXPERT if isinstance(self.content, ExpertContent) else ROUTER
        declared: NetworkContent = kind.parse(manifest, file)
        # An export names pretrained models without paths of a machine. Their fingerprints must be equal.
        latents, text = self.content.latents, self.content.text
        names: dict[str, Content] = {
            "latents": declared.latents.model_copy(update={"autoencoder": latents.autoencoder})
        }
        if text is not None and declared.text is not None:
            names["text"] = declared.text.model_copy(update={"encoder": text.encoder})
        if declared.model_copy(update={**names, "manifest": signed.manifest}) != self.content:
            raise self._not_signed("declaration")
        listed = manifest.files.get(DENSITY_FILE)
        if (sha256_of(density) if density.is_file() else None) != (listed and listed.sha256):
            raise self._not_signed("density")

    def _not_signed(self, what: str) -> AtollError:
        return AtollError(
            f"{self.folder}: the {what} of {self.content.job} is not the one of the signed snapshot in this export; "
            "copy or export it again"
        )

    def reference(self) -> NetworkReference:
        """Return a reference to the network; its weights are read when it is opened."""
        density = self.folder / DENSITY_FILE
        return NetworkReference(
            Declaration.of(self.content),
            self.network,
            self.weights.stat().st_size,
            self.weights,
            Density.from_tensors(load_file(density)) if density.is_file() else None,
        )

    def network(self) -> nn.Module:
        """Read the network, converted back from a diffusers class if it was stored as one.

        Weights that differ from the signed snapshot are an error.
        """
        own = self.content.network.class_name
        if self.stored_class == own:
            network: nn.Module = load_network(self.folder)
        else:
            # Stored as a diffusers class: a DiT whose tensors are converted back, or a wrapper of the diffusers model
            # with the tensor prefix "model.". The wrapper may have buffers that are not stored, so it is built on the
            # CPU.
            native = own == "DiT"
            with torch.device("meta" if native else "cpu"):
                network = built = build(self.content.network)
            state = read_weights(self.weights)
            if native:
                state = layout(LAYOUTS[self.stored_class]).to_native(state, built.config)
            else:
                state = {f"model.{name}": part for name, part in state.items()}
            file = self.folder / NULL_FILE
            state |= load_file(file) if file.is_file() else {}
            check_fit(state, network.state_dict(), f"the network that {self.folder / DECLARATION_FILE} declares")
            network.load_state_dict(state, assign=native)
        # The tensors in memory are compared, not the file: it could be replaced between check and reading.
        if self.signed and weights_digest(sorted(network.state_dict().items())) != self.signed.weights:
            raise self._not_signed("weights")
        return network


def read_declaration(file: Path) -> NetworkContent:
    """Read the declaration of a network in a pipeline folder."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return (ExpertContent if "objective" in values else RouterContent).model_validate(values)
    except ValueError as error:
        raise AtollError(f"{file} is not the declaration of a network ({error}); export the run again") from error


def weights_file(folder: Path, names: tuple[str, ...] = (WEIGHTS_FILE,)) -> Path:
    """Return the safetensors file of a network folder; pickles are never read."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    if not folder.is_dir():
        raise AtollError(f"{folder} is missing")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if pickles:
        raise AtollError(
            f"{folder} holds its weights as {', '.join(pickles)}: a pickle, which can run code when it is read. Atoll "
            f"reads safetensors only; if you trust the file, convert it with: atoll convert {folder / pickles[0]} DST"
        )
    raise AtollError(f"{folder} has no {' or '.join(names)}")


def shapes(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on the meta device: names, shapes, no values."""
    try:
        with safe_open(file, "pt") as content:
            return {name: torch.empty(content.get_slice(name).get_shape(), device="meta") for name in content.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise AtollError(f"{file} is not a complete safetensors file ({error}); copy it again") from error
