"""A network in a pipeline folder: its weights, as a diffusers class where that is exact, and its declaration.

    expert_0/
        config.json, diffusion_pytorch_model.safetensors    the network
        declaration.json       objective, bridge, statistics, conditioning, clusters, data, compute
        cluster.safetensors    density of the cluster's latents and captions, for `nearest` routing
        null.safetensors       the learned null condition, if the diffusers class has no parameter for it
        adapter_config.json, adapter_model.safetensors      instead of the network: an adapter of a base, as peft has it
        pytorch_lora_weights.safetensors                    the same adapter, for load_lora_weights of diffusers
        manifest.json          of a shared run: the manifest of the network, whose digest is in the signed snapshot

Some DiTs compute exactly what a class of diffusers computes. Those are stored in that class, so that diffusers can read
them. A conversion counts as exact if converting back reproduces the configuration and, except for the null condition,
every weight bit for bit.

In an export of a shared run, a network is compared with the signed snapshot beside it. The digest of its weights is
that of names and values in Atoll's own layout, so a network of a diffusers class is converted back and then compared.
"""

import json
import re
from collections.abc import Mapping
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
from atoll.core.networks import CLASS_NAME, DIFFUSERS_CLASSES, BaseConfig, ConfigJson, NetworkConfig, read_network
from atoll.data.density import DENSITY_FILE, Density
from atoll.experts.expert import Declaration, NetworkReference
from atoll.nets import DiT, build, load_network, save_network
from atoll.nets.adapters import KINDS, DiffusersExpert
from atoll.nets.base import open_base
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE, check_fit, read_weights, weights_digest, write_weights
from atoll.nets.layouts import layout
from atoll.verify.local_trust import signed_networks
from atoll.verify.trust import Network
from atoll.verify.untrusted import check_bounded, strict_json

DECLARATION_FILE = "declaration.json"
NULL_FILE = "null.safetensors"
LAYOUTS = {"PixArtTransformer2DModel": "diffusers-pixart", "DiTTransformer2DModel": "diffusers-dit"}
"""Diffusers classes that compute exactly what some DiTs compute, and the layouts of their weights."""


PEFT_WEIGHTS, LORA_WEIGHTS = "adapter_model.safetensors", "pytorch_lora_weights.safetensors"
"""Names of an adapter's files in peft and in diffusers."""
ADAPTER = "LoRA"
"""What the weights of an adapter are stored as; there is no config.json for them."""


def write(folder: Path, network: nn.Module, content: NetworkContent, *, density: Density | None) -> None:
    """Write a network with its declaration."""
    folder.mkdir(parents=True, exist_ok=True)
    state, exact = network.state_dict(), diffusers_layout(network)
    if exact is None:
        save_network(network, folder)  # type: ignore[arg-type]
    else:
        weights, fields = exact
        write_weights(weights, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if null := {name: part for name, part in state.items() if "null_" in name}:
            write_weights(null, folder / NULL_FILE)
    write_declaration(folder, content, density=density)


def write_declaration(folder: Path, content: NetworkContent, *, density: Density | None) -> None:
    """Write the files beside the weights of a network."""
    if density is not None:
        save_file({name: part.cpu().contiguous() for name, part in density.tensors().items()}, folder / DENSITY_FILE)
    (folder / DECLARATION_FILE).write_bytes(to_json(content.model_dump(mode="json")))


def write_base_expert(folder: Path, config: BaseConfig, state: Mapping[str, Tensor], *, slot: str) -> None:
    """Write the weights of an expert of a base, whose network is the component `slot` of its pipeline.

    A whole network is written as its diffusers class. An adapter is written twice, in the files of peft and of
    diffusers, which differ in the names of tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if config.lora is None:
        write_weights({stored_name(config, name): part for name, part in state.items()}, folder / WEIGHTS_FILE)
        fields = {CLASS_NAME: config.network_class, **config.network}
        (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        return
    from peft import LoraConfig

    paths = sorted({name.rpartition(".lora_")[0] for name in state})
    # peft matches a name with the ends of all paths. A regular expression names exactly these layers, if that differs.
    with torch.device("meta"):
        modules = open_base(config).named_modules()
    others = [path for path, _ in modules if path not in paths]
    ambiguous = any(path.endswith(tuple(f".{known}" for known in paths)) for path in others)
    targets: Any = f"({'|'.join(map(re.escape, paths))})" if ambiguous else paths
    lora = config.lora
    settings: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    settings["target_modules"] = targets
    # Written here, because peft writes the targets in the order of a set, which is another one in every process.
    adapter: Any = LoraConfig(**settings, base_model_name_or_path=config.base, inference_mode=True)
    text = json.dumps({**adapter.to_dict(), "target_modules": targets}, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    write_weights({stored_name(config, name): part for name, part in state.items()}, folder / PEFT_WEIGHTS)
    # Without these settings, diffusers takes alpha for the rank.
    metadata = json.dumps({f"{slot}.{name}": value for name, value in settings.items()}, sort_keys=True)
    tensors = {f"{slot}.{name}": part.contiguous().clone() for name, part in state.items()}
    save_file(tensors, folder / LORA_WEIGHTS, metadata={"format": "pt", "lora_adapter_metadata": metadata})


def stored_name(config: NetworkConfig, name: str) -> str:
    """Return the name of a tensor in the file of a diffusers class or of peft."""
    if isinstance(config, BaseConfig):
        return name.removeprefix("network.") if config.lora is None else f"base_model.model.{name}"
    return name.removeprefix("model.")


def diffusers_layout(network: nn.Module) -> tuple[dict[str, Tensor], ConfigJson] | None:
    """Return weights and config.json of a diffusers class that stores this network exactly; None if there is none."""
    state = network.state_dict()
    if isinstance(network, DiffusersExpert):
        inner = {name.removeprefix("model."): part for name, part in state.items() if name.startswith("model.")}
        own = {key: value for key, value in dict(network.model.config).items() if not key.startswith("_")}
        return inner, {CLASS_NAME: DIFFUSERS_CLASSES[network.class_name], **own}
    if not isinstance(network, DiT):
        return None
    config = network.config
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
        declared, own = content.network, content.network.class_name
        able, kind, weights = {own}, ADAPTER, PEFT_WEIGHTS
        if isinstance(declared, BaseConfig):
            able = {ADAPTER if declared.lora else declared.network_class}
        elif own in KINDS or own == "DiT":
            able |= {DIFFUSERS_CLASSES[own]} if own in KINDS else set(LAYOUTS)
        if able != {ADAPTER}:
            if not configuration.is_file():
                raise AtollError(f"{configuration} is missing; copy the folder again")
            fields = strict_json(configuration.read_bytes(), str(configuration))
            kind, weights = str(fields.get(CLASS_NAME)) if isinstance(fields, dict) else "", WEIGHTS_FILE
            if kind == own and read_network(fields) != declared:
                raise AtollError(f"{configuration} is not the network that {file} declares")
        if kind not in able:
            raise AtollError(f"{configuration} names a {kind}, but {file} declares a {own}")
        signed = signed_networks(folder.parent)
        if signed is not None and content.job not in signed:
            raise AtollError(
                f"{folder}: the signed snapshot in this export does not list {content.job}; export it again"
            )
        stored = cls(folder, content, kind, weights_file(folder, (weights,)), signed[content.job] if signed else None)
        # The tensors of the declared network in the stored class.
        with torch.device("meta"):
            network = build(content.network)
        expected = network.state_dict()
        if kind != own and isinstance(network, DiT):
            expected = layout(LAYOUTS[kind]).from_native(expected, network.config)
        elif kind != own:
            expected = {
                stored_name(declared, name): part
                for name, part in expected.items()
                if isinstance(declared, BaseConfig) or name.startswith("model.")
            }
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
            # with other names. The wrapper may have buffers that are not stored, so it is built on the CPU.
            native = own == "DiT"
            with torch.device("meta" if native else "cpu"):
                network = built = build(self.content.network)
            state = read_weights(self.weights)
            if native:
                state = layout(LAYOUTS[self.stored_class]).to_native(state, built.config)
            else:
                names = {stored_name(built.config, name): name for name in built.state_dict()}
                state = {names.get(name, name): part for name, part in state.items()}
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
        values = strict_json(file.read_bytes(), str(file))
        if isinstance(network := values.get("network"), dict):
            # A network is built from it, so it must not ask for a million layers. The parts of a base come from its
            # own folder.
            check_bounded(network.get("lora") if "base" in network else network, "network")
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
