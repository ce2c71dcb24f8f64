"""The Paris release as an ensemble: flow-matching experts conditioned on CLIP text, and an unconditioned router.

    FOLDER/expert_0 … expert_7/   config.json, diffusion_pytorch_model.safetensors
    FOLDER/router/                config.json, pytorch_model.safetensors
    FOLDER/vae, text_encoder, tokenizer

Captions are padded to full length and attended to without a mask, and the null condition is the empty caption. Latents
are those of the autoencoder times its scaling factor. Timesteps are 1000 t, and the velocity is noise - data.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator
from safetensors import safe_open
from torch import Tensor, nn

from atoll import flow
from atoll.core.errors import AtollError
from atoll.core.manifests import LatentSpec, TextSpec
from atoll.encoders.autoencoder import AutoencoderConfig, Codec, PixelCodec, Statistics, open_codec
from atoll.encoders.encoders import Encoders
from atoll.encoders.text import TextEncoder, open_text_encoder
from atoll.experts.expert import Declaration, ExpertReference
from atoll.experts.source import ModelReference
from atoll.experts.stored import shapes, weights_file
from atoll.nets import DiT, DiTConfig, Router, RouterConfig
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE
from atoll.nets.layouts import Layout, layout, read_weights
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


@dataclass(frozen=True)
class Paris:
    """A folder with the layout of the Paris release."""

    folder: Path

    @staticmethod
    def matches(folder: Path) -> bool:
        """Return whether the first expert has the tensors of a Paris expert."""
        file = folder / "expert_0" / WEIGHTS_FILE
        return file.is_file() and layout("paris").matches(shapes(file))

    def open(self, model: str) -> ModelReference:
        """Find the experts with the router, or one expert (`expert:K`)."""
        found = sorted(int(path.name[7:]) for path in self.folder.glob("expert_*") if path.name[7:].isdecimal())
        if found != list(range(len(found))):
            raise AtollError(
                f"{self.folder} has experts {found}; expected consecutive numbers from expert_0, one for each cluster"
            )
        encoders = self._encoders()
        null_text = cache(lambda: encoders.text_encoder()([""])[0][0].cpu())  # the empty caption (tokens, width)
        experts = [self._reference(number, null_text) for number in found]
        opened = ModelReference(experts, None, encoders).choose(model, self.folder)
        return opened if len(opened.experts) == 1 else replace(opened, router=self._router(len(experts)))

    def _encoders(self) -> Encoders:
        """Return CLIP with full-length captions, and the autoencoder."""
        text = _TextConfig.read(self._file("text_encoder"))

        def text_encoder(device: torch.device, dtype: torch.dtype) -> TextEncoder:
            folder, tokenizer = str(self.folder / "text_encoder"), self.folder / "tokenizer"
            tokens = text.max_position_embeddings
            opened = open_text_encoder(folder, tokens, tokenizer, device=device, dtype=dtype)
            return WholeCaptions(opened.network, opened.tokenizer, tokens, device=device, dtype=dtype)

        def autoencoder(device: torch.device, dtype: torch.dtype) -> Codec | PixelCodec:
            return open_codec(str(self.folder / "vae"), device=device, dtype=dtype)

        return Encoders(autoencoder, text_encoder)

    def _router(self, experts: int) -> ExpertReference:
        known, file = layout("paris-router"), weights_file(self.folder / "router", ROUTER_FILES)
        config = _config(known, file)
        assert isinstance(config, RouterConfig)
        if config.experts != experts:
            raise AtollError(f"{file} is a router of {config.experts} experts, but {self.folder} has {experts}")
        declaration = self._declaration("router", tuple(range(experts)), config)
        return ExpertReference(
            declaration, lambda: _filled(Router(config), known, file, config=config), file.stat().st_size
        )

    def _reference(self, number: int, null_text: Callable[[], Tensor]) -> ExpertReference:
        known, file = layout("paris"), weights_file(self.folder / f"expert_{number}")
        config = _config(known, file)
        assert isinstance(config, DiTConfig)

        def network() -> nn.Module:
            network = _filled(DiT(config), known, file, config=config)
            # The release has no learned null condition: it encodes the empty caption.
            network.null_text = nn.Parameter(null_text())
            return network

        declaration = self._declaration(f"expert_{number}", (number,), config)
        return ExpertReference(declaration, network, file.stat().st_size, file)

    def _declaration(self, name: str, clusters: tuple[int, ...], config: DiTConfig | RouterConfig) -> Declaration:
        """Return the declaration of an expert or of the router, from the configurations of the release."""
        text = _TextConfig.read(self._file("text_encoder"))
        autoencoder = self._file("vae")
        router = isinstance(config, RouterConfig)
        return Declaration(
            name=name,
            clusters=clusters,
            network=config,
            conditioning=frozenset() if router else frozenset({"text"}),
            statistics=Statistics.of_scale(AutoencoderConfig.read(autoencoder).scale(autoencoder), config.channels),
            latents=LatentSpec(autoencoder="vae", shape=(config.channels, config.size, config.size)),
            text=TextSpec(
                encoder="text_encoder", max_tokens=text.max_position_embeddings, dimensions=text.hidden_size
            ),
            labels=(),
            bridge=flow.Objective().bridge(),
        )  # fmt: skip

    def _file(self, part: str) -> Path:
        file = self.folder / part / CONFIG_FILE
        if not file.is_file():
            raise AtollError(
                f"{file} is missing; the Paris release has vae, text_encoder and tokenizer beside its experts"
            )
        return file


class _Lazy(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is accessed."""

    def __init__(self, file: Path) -> None:
        self.content: Any = safe_open(file, "pt")

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.content.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.content.keys())

    def __len__(self) -> int:
        return len(self.content.keys())


def _config(known: Layout, file: Path) -> DiTConfig | RouterConfig:
    """Read a network's configuration from config.json and the shapes of its tensors, which must agree."""
    given = file.parent / CONFIG_FILE
    fields = json.loads(given.read_text(encoding="utf-8")) if given.is_file() else {}
    if not known.matches(shapes(file)):
        raise AtollError(f"{file} does not hold a {known.title}")
    config: DiTConfig | RouterConfig = known.read_config(_Lazy(file), fields, None)  # type: ignore[arg-type]
    wrong = [
        f"{name} is {fields[name]} in the configuration and {ours} in the weights"
        for name, ours in known.write_config(config).items()
        if name in fields and fields[name] != ours
    ]
    if wrong:
        raise AtollError(f"{given} disagrees with {file.name}: {'; '.join(wrong)}")
    return config


def _filled(network: nn.Module, known: Layout, file: Path, *, config: DiTConfig | RouterConfig) -> nn.Module:
    network.load_state_dict(known.to_native(read_weights(file), config))
    return network
