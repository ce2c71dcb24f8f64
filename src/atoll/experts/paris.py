"""The Paris release as an ensemble: flow-matching experts conditioned on CLIP text, and an unconditioned router.

    FOLDER/expert_0 … expert_7/   config.json, diffusion_pytorch_model.safetensors
    FOLDER/router/                config.json, pytorch_model.safetensors
    FOLDER/vae, text_encoder, tokenizer

Captions are padded to full length and attended to without a mask, and the null condition is the empty caption. Latents
are those of the autoencoder times its scaling factor. Timesteps are 1000 t, and the velocity is noise - data.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from pydantic import model_validator
from safetensors import safe_open
from torch import Tensor, nn

from atoll import flow
from atoll.core.errors import AtollError
from atoll.core.manifests import LatentSpec, TextSpec
from atoll.encoders.autoencoder import AutoencoderConfig, Statistics, open_codec
from atoll.encoders.encoders import Encoders
from atoll.encoders.text import TextEncoder, open_text_encoder
from atoll.experts.expert import Declaration, ModelReference, NetworkReference
from atoll.experts.network_folder import shapes, weights_file
from atoll.nets import DiT, DiTConfig, RouterConfig, build
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE, read_weights
from atoll.nets.layouts import Layout, layout
from atoll.verify.untrusted import Foreign

ROUTER_FILES = ("pytorch_model.safetensors", WEIGHTS_FILE)


class WholeCaptions(TextEncoder):
    """A text encoder that pads captions to full length and attends to the padding, as the release was trained."""

    def tokenize(self, captions: list[str]) -> dict[str, Tensor]:
        """Return token ids and a mask of ones."""
        how = {"padding": "max_length", "truncation": True, "max_length": self.max_tokens, "return_tensors": "pt"}
        numbers = self.tokenizer(captions, **how)["input_ids"]
        return {"input_ids": numbers, "attention_mask": torch.ones_like(numbers)}


class _TextConfig(Foreign):
    """The config.json of CLIP's text encoder, or of a full CLIP model, which has the fields under `text_config`."""

    max_position_embeddings: int
    hidden_size: int

    @model_validator(mode="before")
    @classmethod
    def _inner(cls, values: object) -> object:
        return values.get("text_config", values) if isinstance(values, dict) else values


def is_paris(folder: Path) -> bool:
    """Return whether the first expert has the tensors of a Paris expert."""
    file = folder / "expert_0" / WEIGHTS_FILE
    return file.is_file() and layout("paris").matches(shapes(file))


def open_paris(folder: Path, model: str) -> ModelReference:
    """Find the experts with the router, or one expert (`expert:K`)."""
    found = sorted(int(path.name[7:]) for path in folder.glob("expert_*") if path.name[7:].isdecimal())
    if found != list(range(len(found))):
        raise AtollError(
            f"{folder} has experts {found}; expected consecutive numbers from expert_0, one for each cluster"
        )
    text_config, codec_config = folder / "text_encoder" / CONFIG_FILE, folder / "vae" / CONFIG_FILE
    for file in (text_config, codec_config):
        if not file.is_file():
            raise AtollError(
                f"{file} is missing; the Paris release has vae, text_encoder and tokenizer beside its experts"
            )
    text, scale = _TextConfig.read(text_config), AutoencoderConfig.read(codec_config).scale(codec_config)
    tokens = text.max_position_embeddings

    def text_encoder(device: torch.device, dtype: torch.dtype) -> TextEncoder:
        opened = open_text_encoder(
            str(folder / "text_encoder"), tokens, folder / "tokenizer", device=device, dtype=dtype
        )
        return WholeCaptions(opened.network, opened.tokenizer, tokens, device=device, dtype=dtype)

    encoders = Encoders(lambda device, dtype: open_codec(str(folder / "vae"), device=device, dtype=dtype), text_encoder)
    null_text = cache(lambda: encoders.text_encoder()([""])[0][0].cpu())  # the empty caption (tokens, width)

    def reference(name: str, clusters: tuple[int, ...], known: Layout, file: Path) -> NetworkReference:
        config = _config(known, file)

        def network() -> nn.Module:
            network = build(config)
            network.load_state_dict(known.to_native(read_weights(file), config))
            if isinstance(network, DiT):
                # The release has no learned null condition: it encodes the empty caption.
                network.null_text = nn.Parameter(null_text())
            return network

        declaration = Declaration(
            name=name,
            clusters=clusters,
            network=config,
            conditioning=frozenset() if isinstance(config, RouterConfig) else frozenset({"text"}),
            statistics=Statistics.of_scale(scale, config.channels),
            latents=LatentSpec(autoencoder="vae", shape=(config.channels, config.size, config.size)),
            text=TextSpec(encoder="text_encoder", max_tokens=tokens, dimensions=text.hidden_size),
            labels=(),
            bridge=flow.Objective().bridge(),
        )
        return NetworkReference(declaration, network, file.stat().st_size, file)

    experts = [
        reference(f"expert_{number}", (number,), layout("paris"), weights_file(folder / f"expert_{number}"))
        for number in found
    ]
    opened = ModelReference(experts, None, encoders).choose(model, folder)
    if len(opened.experts) == 1:
        return opened
    file = weights_file(folder / "router", ROUTER_FILES)
    router = reference("router", tuple(found), layout("paris-router"), file)
    known = router.declaration.network
    if isinstance(known, RouterConfig) and known.experts != len(experts):
        raise AtollError(f"{file} is a router of {known.experts} experts, but {folder} has {len(experts)}")
    return replace(opened, router=router)


def _config(known: Layout, file: Path) -> DiTConfig | RouterConfig:
    """Read a network's configuration from config.json and the shapes of its tensors, which must agree."""
    given = file.parent / CONFIG_FILE
    fields = json.loads(given.read_text(encoding="utf-8")) if given.is_file() else {}
    tensors = shapes(file)
    if not known.matches(tensors):
        raise AtollError(f"{file} does not hold a {known.title}")
    with safe_open(file, "pt") as content:  # of the positions, the values matter too
        tensors["pos_embed"] = content.get_tensor("pos_embed")
    config: DiTConfig | RouterConfig = known.read_config(tensors, fields, None)
    wrong = [
        f"{name} is {fields[name]} in the configuration and {ours} in the weights"
        for name, ours in known.write_config(config).items()
        if name in fields and fields[name] != ours
    ]
    if wrong:
        raise AtollError(f"{given} disagrees with {file.name}: {'; '.join(wrong)}")
    return config
