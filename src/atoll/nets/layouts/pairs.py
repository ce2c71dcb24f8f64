"""A checkpoint layout: one list of pairs of native and foreign tensors describes the translation in both directions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from atoll.core.errors import AtollError
from atoll.core.networks import STABLE_DIFFUSION, ConfigJson, DiTConfig, LatentScale, RouterConfig
from atoll.nets.io import check_fit
from atoll.nets.positions import is_sincos

State = dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    """One native tensor and the foreign tensors that hold it.

    A single foreign name is the same tensor, possibly with another shape. Several names are its parts along the first
    axis or, with `copies`, equal copies of it.
    """

    native: str
    foreign: tuple[str, ...]
    copies: bool = False
    foreign_shape: tuple[int, ...] | None = None
    joined: tuple[str, ...] = ()
    """Native tensors (`native` is the first) whose concatenation along the first axis is one foreign tensor."""
    repeats: int = 0
    """Number of rows of the foreign tensor, each equal to the native vector."""


def pairs_of(prefix_pairs: Mapping[str, str]) -> list[Pair]:
    """Return the pairs of weights and biases of linear layers that differ only in name."""
    return [
        Pair(f"{native}.{part}", (f"{foreign}.{part}",))
        for native, foreign in prefix_pairs.items()
        for part in ("weight", "bias")
    ]


def patch_pair(config: DiTConfig | RouterConfig, foreign: str) -> list[Pair]:
    """Return the pairs of the patch projection, a convolution in the foreign layout and a linear layer here."""
    shape = (config.width, config.channels, config.patch, config.patch)
    return [
        Pair("patch.weight", (f"{foreign}.weight",), foreign_shape=shape),
        Pair("patch.bias", (f"{foreign}.bias",)),
    ]


def parts_of(native: str, *foreign: str) -> list[Pair]:
    """Return the pairs of a native layer whose rows are those of several foreign layers, in order."""
    return [Pair(f"{native}.{part}", tuple(f"{name}.{part}" for name in foreign)) for part in ("weight", "bias")]


def differences(config: DiTConfig | RouterConfig, **required: object) -> str | None:
    """Return a sentence about all fields that do not have the required value; None if there are none.

    All foreign layouts have the block of the papers, so a ModernDiT fits none of them.
    """
    required = {"norm": "layer", "mlp": "gelu", **required}
    if config.positions == "rope":
        required = {"positions": "sincos", **required}
    wrong = [
        f"{name} must be {value!r}, but is {getattr(config, name)!r}"
        for name, value in required.items()
        if getattr(config, name) != value
    ]
    return "; ".join(wrong) or None


POSITION_SCALES = (1.0, 0.5, 2.0)
"""Scales of the fixed positions in released checkpoints: DiT, SiT and PixArt up to 512 px have 1; the converters of
diffusers also use 0.5 and 2."""


class Positions(TypedDict, total=False):
    """Fields of `DiTConfig` for its positions."""

    positions: Literal["sincos", "learned"]
    position_scale: float


def positions_of(positions: Tensor, grid: int, scales: tuple[float, ...] = (1.0,)) -> Positions:
    """Return `sincos` with its scale if the stored positions equal the formula, else `learned`."""
    for scale in scales:
        if bool(is_sincos(positions, grid, scale)):
            return {"positions": "sincos", "position_scale": scale}
    return {"positions": "learned"}


@dataclass(frozen=True)
class Layout:
    """A foreign checkpoint layout: how to recognize it, and how to translate it."""

    name: str
    title: str
    key_names: tuple[str, ...]
    """Names of tensors by which the layout is recognized; all of them must exist."""
    read_config: Callable[[State, Mapping[str, Any], int | None], Any]
    """Returns the native configuration for tensors, foreign config.json (may be empty) and number of heads or None."""
    pairs: Callable[[Any], list[Pair]]
    build: Callable[[Any], nn.Module]
    """Builds the native network of a configuration."""
    refuse: Callable[[Any], str | None]
    """Returns the reason why a native network cannot be written in this layout, or None."""
    write_config: Callable[[Any], ConfigJson]
    optional: tuple[str, ...] = ()
    """Native tensors that this layout lacks. When read, the network initializes them; null conditions are zero."""
    complete: Callable[[State, Any], dict[str, tuple[Tensor, str]]] = lambda _state, _config: {}
    """Returns new tensors, or completed ones, for those that the file lacks; each with a note for the report."""
    after_reading: Callable[[State], State] = lambda state: state
    """Changes native tensors after reading, for other conventions of time or sign."""
    before_writing: Callable[[State], State] = lambda state: state
    """The inverse of `after_reading`."""
    convention: str = ""
    """Description of both, for the report."""
    normalization: LatentScale = STABLE_DIFFUSION
    """Scale of the latents of the released networks, used for files without a declaration or pipeline."""

    def matches(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether tensors are in this layout."""
        return all(key_name in state for key_name in self.key_names)

    def to_native(self, state: State, config: Any) -> State:
        """Translate foreign tensors to native ones; raise an error that lists all tensors that do not fit."""
        with torch.device("meta"):
            template = self.build(config).state_dict()
        state = state | {name: tensor for name, (tensor, _) in self.complete(state, config).items()}
        check_fit(state, self._foreign(template, config), f"the {self.title} layout")
        native: State = {}
        for pair in self.pairs(config):
            _read_pair(pair, state, template, native=native)
        return self.after_reading(native | self._made_by_network(self.unsupported_tensors(template, config), config))

    def from_native(self, state: State, config: Any) -> State:
        """Translate native tensors to this layout, without those that it lacks."""
        reason = self.refuse(config)
        if reason:
            raise AtollError(f"this network cannot be written in the {self.title} layout: {reason}")
        return self._foreign(self.before_writing(state), config)

    def _foreign(self, state: Mapping[str, Tensor], config: Any) -> State:
        foreign: State = {}
        for pair in self.pairs(config):
            _write_pair(pair, state, foreign)
        return foreign

    def unsupported_tensors(self, state: Mapping[str, Tensor], config: Any) -> list[str]:
        """Return the names of native tensors that this layout lacks."""
        placed = {name for pair in self.pairs(config) for name in (pair.native, *pair.joined)}
        return [name for name in state if self.optional and name.endswith(self.optional) and name not in placed]

    def _made_by_network(self, names: list[str], config: Any) -> State:
        """Return newly initialized buffers (such as positions), and zeros for null conditions."""
        # The weights stay on the meta device: only the small buffers are allocated.
        with torch.device("meta"):
            network = self.build(config)
        for name, buffer in list(network.named_buffers()):
            network.register_buffer(name, torch.empty_like(buffer, device="cpu"))
        network.init_weights()  # type: ignore[operator]
        shapes, buffers = network.state_dict(), dict(network.named_buffers())
        return {name: buffers[name] if name in buffers else torch.zeros(shapes[name].shape) for name in names}


def _read_pair(pair: Pair, state: State, template: Mapping[str, Tensor], *, native: State) -> None:
    if pair.joined:
        sizes = [template[name].shape[0] for name in pair.joined]
        parts = torch.split(state[pair.foreign[0]], sizes)
        native.update({name: part.contiguous() for name, part in zip(pair.joined, parts, strict=True)})
        return
    tensors = [state[name] for name in pair.foreign]
    if pair.repeats:
        native[pair.native] = tensors[0][0].contiguous()
        return
    if pair.copies:
        different = [name for name, tensor in zip(pair.foreign, tensors, strict=True) if not tensor.equal(tensors[0])]
        if different:
            raise AtollError(f"expected equal copies of {pair.foreign[0]}, but these differ: {', '.join(different)}")
        tensors = tensors[:1]
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    native[pair.native] = whole.reshape(template[pair.native].shape).contiguous()


def _write_pair(pair: Pair, state: Mapping[str, Tensor], foreign: State) -> None:
    if pair.joined:
        foreign[pair.foreign[0]] = torch.cat([state[name] for name in pair.joined])
        return
    whole = state[pair.native]
    if pair.repeats:
        foreign[pair.foreign[0]] = whole.expand(pair.repeats, -1).contiguous()
    elif len(pair.foreign) == 1:
        foreign[pair.foreign[0]] = whole if pair.foreign_shape is None else whole.reshape(pair.foreign_shape)
    elif pair.copies:
        foreign.update({name: whole.clone() for name in pair.foreign})
    else:
        parts = whole.chunk(len(pair.foreign))
        foreign.update({name: part.contiguous() for name, part in zip(pair.foreign, parts, strict=True)})


def block_count(state: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of blocks, whose tensors are named `prefix.N.…`."""
    return 1 + max(int(key[len(prefix) + 1 :].split(".")[0]) for key in state if key.startswith(f"{prefix}."))


HEADS = {256: 4, 384: 6, 768: 12, 1024: 16, 1152: 16}
"""Number of heads of the named sizes, by width: shapes of tensors do not determine it."""


def heads_for(width: int, given: int | None) -> int:
    """Return the given number of heads, or that of the named size with this width."""
    if given is not None:
        return given
    if width not in HEADS:
        raise AtollError(f"the number of heads of a network of width {width} is unknown; pass it with --heads")
    return HEADS[width]
