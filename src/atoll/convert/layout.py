"""One description of a foreign layout serves both directions: a list of pairs of native and foreign tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from atoll.core.errors import AtollError
from atoll.core.networks import STABLE_DIFFUSION, ConfigJson, DiTConfig, LatentScale, RouterConfig
from atoll.nets.io import check_fit
from atoll.nets.layers import is_sincos

State = dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    """One native tensor and the foreign tensors that hold it.

    One foreign name is the same tensor, perhaps of another shape. Several are its parts along the first axis, or, with
    `copies`, equal copies of it.
    """

    native: str
    foreign: tuple[str, ...]
    copies: bool = False
    foreign_shape: tuple[int, ...] | None = None
    joined: tuple[str, ...] = ()
    """Native tensors, `native` the first of them, that along the first axis are one foreign tensor."""
    repeats: int = 0
    """The foreign tensor has this many rows, each equal to the native vector."""


def pairs_of(prefix_pairs: Mapping[str, str]) -> list[Pair]:
    """Weight and bias of linear layers that only differ by name."""
    return [
        Pair(f"{native}.{part}", (f"{foreign}.{part}",))
        for native, foreign in prefix_pairs.items()
        for part in ("weight", "bias")
    ]


def patch_pair(config: DiTConfig | RouterConfig, foreign: str) -> list[Pair]:
    """The patch projection, a convolution elsewhere and a linear layer here."""
    shape = (config.width, config.channels, config.patch, config.patch)
    return [
        Pair("patch.weight", (f"{foreign}.weight",), foreign_shape=shape),
        Pair("patch.bias", (f"{foreign}.bias",)),
    ]


def parts_of(native: str, *foreign: str) -> list[Pair]:
    """One native layer whose rows are the rows of several foreign ones, in order."""
    return [Pair(f"{native}.{part}", tuple(f"{name}.{part}" for name in foreign)) for part in ("weight", "bias")]


def differences(config: DiTConfig, **required: object) -> str | None:
    """Return the fields that have another value than required, as one sentence; None if there are none."""
    wrong = [
        f"{name} must be {value!r} and is {getattr(config, name)!r}"
        for name, value in required.items()
        if getattr(config, name) != value
    ]
    return "; ".join(wrong) or None


POSITION_SCALES = (1.0, 0.5, 2.0)
"""Scales of the fixed positions in released checkpoints: DiT, SiT and PixArt up to 512 px have 1; diffusers' converters
know 0.5 and 2 as well."""


class Positions(TypedDict, total=False):
    """Fields of `DiTConfig` that say how it gets its positions."""

    positions: Literal["sincos", "learned"]
    position_scale: float


def positions_of(positions: Tensor, grid: int, scales: tuple[float, ...] = (1.0,)) -> Positions:
    """Return fixed positions if the stored ones have the values of the formula; otherwise they were learned."""
    for scale in scales:
        if bool(is_sincos(positions, grid, scale)):
            return {"positions": "sincos", "position_scale": scale}
    return {"positions": "learned"}


@dataclass(frozen=True)
class Layout:
    """A checkpoint layout of someone else: how to recognise it, and how it translates."""

    name: str
    title: str
    marks: tuple[str, ...]
    """Keys that only this layout has, all of them."""
    read_config: Callable[[State, Mapping[str, Any], int | None], Any]
    """Native configuration from the tensors, the foreign config.json (perhaps empty) and the heads, if given."""
    pairs: Callable[[Any], list[Pair]]
    build: Callable[[Any], nn.Module]
    """The native network of a configuration."""
    refuse: Callable[[Any], str | None]
    """Why a native network cannot be written in this layout; None if it can."""
    write_config: Callable[[Any], ConfigJson]
    optional: tuple[str, ...] = ()
    """Native tensors that this layout has no place for. When reading, the network makes them itself; a null condition
    starts at zero."""
    complete: Callable[[State, Any], dict[str, tuple[Tensor, str]]] = lambda _state, _config: {}
    """Foreign tensors that the file lacks, whole or in part, made anew; each with a note for the account."""
    after_reading: Callable[[State], State] = lambda state: state
    """A change of native tensors that were read: another convention of time or sign."""
    before_writing: Callable[[State], State] = lambda state: state
    """The inverse of `after_reading`."""
    convention: str = ""
    """What these two change, for the account."""
    normalization: LatentScale = STABLE_DIFFUSION
    """How the latents of the released networks were scaled, for files that have nothing beside them that tells."""

    def matches(self, state: Mapping[str, Tensor]) -> bool:
        """Whether these tensors are in this layout."""
        return all(mark in state for mark in self.marks)

    def to_native(self, state: State, config: Any) -> State:
        """Foreign tensors as native ones; refuses, by name, whatever is missing, surplus or of another shape."""
        with torch.device("meta"):
            template = self.build(config).state_dict()
        state = state | {name: tensor for name, (tensor, _) in self.complete(state, config).items()}
        check_fit(state, self._foreign(template, config), f"the {self.title} layout")
        native: State = {}
        for pair in self.pairs(config):
            _read_pair(pair, state, template, native=native)
        return self.after_reading(native | self._made_by_network(self.without_place(template, config), config))

    def from_native(self, state: State, config: Any) -> State:
        """Native tensors in this layout, without those that it has no place for."""
        reason = self.refuse(config)
        if reason:
            raise AtollError(f"this network cannot be written in the {self.title} layout: {reason}")
        return self._foreign(self.before_writing(state), config)

    def _foreign(self, state: Mapping[str, Tensor], config: Any) -> State:
        foreign: State = {}
        for pair in self.pairs(config):
            _write_pair(pair, state, foreign)
        return foreign

    def without_place(self, state: Mapping[str, Tensor], config: Any) -> list[str]:
        """The native tensors that have no place in this layout."""
        placed = {name for pair in self.pairs(config) for name in (pair.native, *pair.joined)}
        return [name for name in state if self.optional and name.endswith(self.optional) and name not in placed]

    def _made_by_network(self, names: list[str], config: Any) -> State:
        """Fresh buffers (such as positions) from a network whose weights stay on the meta device; zeros for nulls."""
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
    """Number of blocks whose keys start with `prefix.N.`."""
    return 1 + max(int(key[len(prefix) + 1 :].split(".")[0]) for key in state if key.startswith(f"{prefix}."))


HEADS = {256: 4, 384: 6, 768: 12, 1024: 16, 1152: 16}
"""Heads of the named widths; tensors alone do not tell them."""


def heads_for(width: int, given: int | None) -> int:
    """The number of heads: as given, or that of the named size with this width."""
    if given is not None:
        return given
    if width not in HEADS:
        raise AtollError(
            f"the number of heads cannot be read from the tensors of a network of width {width}; give --heads"
        )
    return HEADS[width]
