"""The diffusers pipeline of a base model, without its network: prompts to arguments, images to latents and back.

A base is named `base:FOLDER` or `base:OWNER/NAME`, with the options of the pipeline's call as JSON behind a #. The
latents of Atoll are the states of the pipeline's network. Packed tokens (tokens, channels) become a grid (channels,
height, width), as they lie in the image; so routers, densities and sizes work as for any latents.
"""

import hashlib
import inspect
import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils._pytree import tree_map

from atoll.core.device import compute_dtype, upload
from atoll.core.device import device as default_device
from atoll.core.errors import AtollError, first_line
from atoll.core.networks import BASE, LOCAL, BaseConfig, TraceSpec
from atoll.core.sizes import Size
from atoll.encoders.hub import public_name
from atoll.encoders.pretrained import Pixels, deterministic_inference, encode_images, fingerprint, model_folder
from atoll.encoders.trace import PROMPTS, Process, Recorder, Unpacking, UntraceableError, trace, unpacking
from atoll.nets.arguments import Arguments
from atoll.nets.base import FOLDERS, pooled

SLOTS = ("transformer", "unet")
"""Components that may be the denoising network."""


@dataclass(frozen=True)
class BaseName:
    """The parts of a base's name."""

    model: str
    """Folder, or name on the hub."""
    options: dict[str, Any]
    folder: Path
    components: dict[str, tuple[str, str]]
    """Library and class of every component that is not null."""

    @classmethod
    def parse(cls, name: str) -> "BaseName":
        """Find the folder of a base, and read the list of its components."""
        model, _, options = name.removeprefix(BASE).partition("#")
        if model == LOCAL:
            raise AtollError(
                "the base model is a folder of somebody else's machine; get a copy of it, and set "
                "networks.default.base in atoll.yaml to its path"
            )
        folder = model_folder(model)
        file = folder / "model_index.json"
        if not file.is_file():
            raise AtollError(f"{folder} has no model_index.json; expected the folder of a diffusers pipeline")
        index = json.loads(file.read_text(encoding="utf-8"))
        if wrong := [key for key in index if not key.isidentifier()]:  # folders of components
            raise UntraceableError(f"{file} lists a component {wrong[0]!r}; expected a name of letters, digits and _")
        components = {key: tuple(own) for key, own in index.items() if isinstance(own, list) and own[0] is not None}
        return cls(model, json.loads(options) if options else {}, folder, components)

    @property
    def slot(self) -> str:
        """The component that is the denoising network."""
        found = [name for name in self.components if name.startswith(SLOTS)]
        if len(found) != 1:
            raise UntraceableError(
                f"{self.model} has {len(found)} denoising networks ({', '.join(found)}); expected one"
            )
        return found[0]

    def weights(self, *components: str) -> str:
        """Return the fingerprint of some components."""
        return fingerprint(self.folder, tuple(components))

    @property
    def encoders(self) -> list[str]:
        """The components that turn prompts into arguments."""
        return [name for name in self.components if name.startswith(("text_encoder", "tokenizer"))]


class BasePipeline:
    """A pipeline without its network, and the trace of its calls."""

    def __init__(self, name: str, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        import diffusers
        from diffusers.utils import logging

        logging.disable_progress_bar()
        self.name = BaseName.parse(name)
        self.device = device or default_device()
        self.dtype = compute_dtype(self.device, dtype)
        folder, slot = self.name.folder, self.name.slot
        library, kind = self.name.components[slot]
        if library != "diffusers" or not hasattr(diffusers, kind):
            raise UntraceableError(f"the {slot} is a {library}.{kind}, which diffusers does not have")
        network_class = getattr(diffusers, kind)
        self.network_config = network_class.load_config(folder / slot)
        with torch.device("meta"):
            network = network_class.from_config(self.network_config)
        # Pipelines read sizes from the configuration of their network when they are made.
        options: dict[str, Any] = {slot: network, "dtype": self.dtype, "use_safetensors": True}
        try:
            self.pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **options, trust_remote_code=False)
        except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise UntraceableError(f"diffusers cannot open {self.name.model}: {first_line(error)}") from error
        setattr(self.pipe, slot, None)
        self.pipe.set_progress_bar_config(disable=True)
        if self.device.type != "cpu":
            # One component at a time is on the device.
            self.pipe.enable_model_cpu_offload(device=self.device)
        self._recorder = Recorder(self.pipe, slot, network, self.name.options)
        self._unpackings: dict[Size, Unpacking] = {}
        self._lock = threading.RLock()
        """Held while a recorder replaces parts of the pipeline, and while others use these parts."""
        self.traced = self._trace()
        """The trace of the network's calls, and notes about what was switched off."""

    def _trace(self) -> tuple[TraceSpec, list[str]]:
        """Trace the network's calls. The result is kept for this machine."""
        import diffusers

        known = {"pipeline": type(self.pipe).__name__, "network": self.network_config, "options": self.name.options}
        known |= {"components": self.name.components, "scheduler": self.pipe.scheduler.config}
        known |= {"diffusers": diffusers.__version__, "trace": Path(__file__).with_name("trace.py").read_text()}
        key = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
        file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll" / "traces" / f"{key}.json"
        adapter = TypeAdapter(tuple[TraceSpec, list[str]])
        if file.is_file():
            return adapter.validate_json(file.read_bytes())
        side = self._first_side
        with _refusing(f"at {side} pixels"):
            found, _, notes = trace(self._recorder, Size.square(side), Size(side, side + side // 2))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(adapter.dump_json((found, notes)))
        return found, notes

    @property
    def _first_side(self) -> int:
        """A small side that the autoencoder and the network divide: eight patches of the widest kind."""
        return 64 * max(1, int(getattr(self.pipe, "vae_scale_factor", 8)) // 8)

    @cached_property
    def _side(self) -> int:
        """The side of the image that the pipeline makes when asked for this one; some scale all to their own area."""
        return self._made(self._probe(Size.square(self._first_side))).height

    @cached_property
    def recorder(self) -> Recorder:
        """The pipeline with the options that its trace needs."""
        spec, _ = self.traced
        return replace(self._recorder, options=spec.options, scheduler=Process.of(self.pipe.scheduler).scheduler)

    def config(self) -> BaseConfig:
        """Return the declaration of the base network, without an adapter."""
        slot = self.name.slot
        fields = {key: value for key, value in self.network_config.items() if not key.startswith("_")}
        spec, _ = self.traced
        size = Size.square(self._side)
        return BaseConfig(
            base=public_name(self.name.model),
            weights=self.name.weights(slot),
            network_class=self.name.components[slot][1],
            network=json.loads(json.dumps(fields)),
            channels=self.latent_shape(size)[0],
            trace=spec,
        )

    def default_side(self) -> int | None:
        """Return the side in pixels of the images that the pipeline makes by default; None if it needs a size."""
        known = inspect.signature(self.pipe.__call__).parameters
        asked = {name: known[name].default for name in ("height", "width")}
        if inspect.Parameter.empty in asked.values():
            return None
        small = Size.square(self._side)
        options: tuple[dict[str, Any], ...] = ({}, asked)
        with _refusing("at its default size"):
            runs = [self.recorder.run(PROMPTS[:1], small, steps=1, **own) for own in options]
        values, default_values = (steps[0].sample.numel() for steps in runs)
        return round(self._side * math.sqrt(default_values / values))

    def describe(self, resolution: int) -> list[tuple[str, str]]:
        """Return what the trace found, as pairs of a word and a text, for images of a side in pixels."""
        spec, notes = self.traced
        network = self._recorder.network
        parameters = sum(parameter.numel() for parameter in network.parameters())
        channels, side, _ = self.latent_shape(Size.square(resolution))
        offset = f" {'+' if spec.offset > 0 else '-'} {abs(spec.offset):g}" if spec.offset else ""
        flows = spec.prediction == "velocity"
        time = f"{spec.scale:g} · sigma" if flows else f"{spec.scale / 1000:g} · step of {spec.schedule['name']}"
        return [
            ("pipeline", type(self.pipe).__name__),
            ("network", f"{type(network).__name__}, {parameters:,} parameters"),
            (
                "state",
                f"{spec.state}, {'tokens' if spec.packed else 'a grid'}{' in a list' if spec.state_list else ''}",
            ),
            ("time", f"{spec.time} = {time}{offset}"),
            ("sign", f"{spec.prediction} = {'-' if spec.sign < 0 else ''}output"),
            ("prompt", ", ".join(spec.by_prompt)),
            ("latents", f"{channels} x {side} x {side} for images of {resolution} x {resolution} pixels"),
            *(("note", note) for note in notes),
        ]

    # Prompts

    def arguments(self, prompt: str, size: Size) -> Arguments:
        """Return the arguments of the network for a prompt, for an image of this size in pixels, on the CPU."""
        spec, _ = self.traced
        with self._lock:
            found = self.recorder.arguments([prompt], size)
        kept = {name: value for name, value in found.items() if name in spec.batching}
        return {name: tree_map(_on_cpu, value) for name, value in kept.items()}

    def pooled(self, arguments: Arguments) -> Tensor:
        """Return one vector for a prompt, for routers and densities."""
        return pooled(self.traced[0], arguments)

    # Images

    def _unpacking(self, size: Size) -> Unpacking:
        """Return the map from states to the autoencoder's latents, for images of a size in pixels."""
        found = self._probe(size)
        if (made := self._made(found)) != size:
            raise UntraceableError(
                f"asked for an image of {size} pixels, the pipeline makes one of {made}; set data.resolution to "
                f"{self._side}, or choose sizes that it keeps"
            )
        return found

    def _probe(self, size: Size) -> Unpacking:
        """Find this map; the pipeline may make an image of another size than asked."""
        if size not in self._unpackings:
            with self._lock, _refusing(f"when it decodes {size} pixels"):
                self._unpackings[size] = unpacking(self.recorder, size)
        return self._unpackings[size]

    def _made(self, found: Unpacking) -> Size:
        """Return the size in pixels of the images whose latents the pipeline decodes."""
        return Size(*(self._scale * side for side in found.shape[-2:]))

    @cached_property
    def _video(self) -> bool:
        """Whether the autoencoder takes videos, here of one frame."""
        return len(self._probe(Size.square(self._first_side)).shape) == 4

    @cached_property
    def _scale(self) -> int:
        """Side of an image over the side of the autoencoder's latents."""
        side = self._first_side
        with _refusing("when it encodes an image"):
            return side // self._encoded(torch.zeros(1, 3, side, side))["mean"].shape[-1]

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """Return channels, height and width of the latents of an image."""
        values = self._unpacking(size).order.numel()
        spec, _ = self.traced
        if not spec.packed:
            channels, height, width = (own for own in self._state_shape(size) if own != 1)
            return channels, height, width
        channels = spec.state_shape[-1]
        factor = round((size.height * size.width * channels / values) ** 0.5)
        return channels, size.height // factor, size.width // factor

    def _state_shape(self, size: Size) -> tuple[int, ...]:
        with self._lock:
            return tuple(self.recorder.run(PROMPTS[:1], size, steps=1)[0].sample.shape[1:])

    def _encoded(self, x: Tensor) -> dict[str, Tensor]:
        vae = self.pipe.vae
        output = vae.encode((x.unsqueeze(2) if self._video else x).to(vae.device, vae.dtype))
        if hasattr(output, "latent_dist"):
            return {"mean": output.latent_dist.mean.float(), "std": output.latent_dist.std.float()}
        return {"mean": (output.latent if hasattr(output, "latent") else output.latents).float()}

    @property
    def factor(self) -> int:
        """Side of an image over the side of its latents."""
        size = Size.square(self._side)
        return size.height // self.latent_shape(size)[1]

    def encode(self, pixels: Pixels) -> dict[str, Tensor]:
        """Return `mean` and, if there is a posterior, `std` (N, C, H, W) of images (N, height, width, 3)."""
        size = Size(*pixels.shape[1:3])
        found, shape = self._unpacking(size), self.latent_shape(size)
        x = upload(torch.from_numpy(pixels), self.device).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        parts = encode_images(self._encoded, x)
        made = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        states = {"mean": found.pack(made["mean"])}
        if "std" in made:
            spread = Unpacking(found.order, found.scale.abs(), torch.zeros_like(found.shift), found.shape)
            states["std"] = spread.pack(made["std"])
        return {name: self._grid(state, shape) for name, state in states.items()}

    def decode(self, latents: Tensor) -> Tensor:
        """Return 8-bit images (N, height, width, 3)."""
        size = Size(latents.shape[2] * self.factor, latents.shape[3] * self.factor)
        spec, _ = self.traced
        states = latents.flatten(2).transpose(1, 2) if spec.packed else latents
        z = self._unpacking(size).unpack(states.float().cpu())
        with self._lock, deterministic_inference():
            vae = self.pipe.vae
            x: Tensor = vae.decode(z.to(vae.device, vae.dtype), return_dict=False)[0]
        x = x[:, :, 0] if x.ndim == 5 else x
        return x.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)

    def _grid(self, states: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return states (N, values) as latents (N, C, H, W)."""
        channels, height, width = shape
        spec, _ = self.traced
        if spec.packed:
            return states.reshape(-1, height * width, channels).transpose(1, 2).reshape(-1, *shape)
        return states.reshape(-1, *shape)


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Refuse a pipeline that fails, with the reason."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UntraceableError(f"the pipeline fails {where}: {first_line(error) or type(error).__name__}") from error


def register_base(name: str) -> str:
    """Let experts open the network of a base by its fingerprint, which is returned."""
    base = BaseName.parse(name)
    weights = base.weights(base.slot)
    FOLDERS[weights] = base.folder / base.slot
    return weights


@cache
def open_base(name: str, device: torch.device | None = None, dtype: torch.dtype | None = None) -> BasePipeline:
    """Open the pipeline of a base, once for each device and precision."""
    return BasePipeline(name, device, dtype)
