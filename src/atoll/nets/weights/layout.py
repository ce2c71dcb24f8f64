"""One description of a foreign layout serves both directions: a list of pairs of native and foreign tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import AtollError

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


def pairs_of(prefix_pairs: Mapping[str, str]) -> list[Pair]:
    """Weight and bias of linear layers that only differ by name."""
    return [
        Pair(f"{native}.{part}", (f"{foreign}.{part}",))
        for native, foreign in prefix_pairs.items()
        for part in ("weight", "bias")
    ]


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
    write_config: Callable[[Any], dict[str, Any]]
    optional: tuple[str, ...] = ()
    """Native tensors that this layout has no place for. When reading, the network makes them itself; a null condition
    starts at zero."""
    unused: tuple[str, ...] = ()
    """Foreign tensors that a file may carry and the native network has no place for."""

    def matches(self, state: Mapping[str, Tensor]) -> bool:
        """Whether these tensors are in this layout."""
        return all(mark in state for mark in self.marks)

    def to_native(self, state: State, config: Any) -> State:
        """Foreign tensors as native ones; refuses, by name, whatever is missing, surplus or of another shape."""
        with torch.device("meta"):
            template = self.build(config).state_dict()
        used = {name: tensor for name, tensor in state.items() if name not in self.unused}
        check_fit(used, self._foreign(template, config), f"the {self.title} layout")
        native: State = {}
        for pair in self.pairs(config):
            _read_pair(pair, state, template, native)
        return native | self._made_by_network(self.without_place(template), config)

    def from_native(self, state: State, config: Any) -> State:
        """Native tensors in this layout; the null condition, which it has no place for, stays behind."""
        reason = self.refuse(config)
        if reason:
            raise AtollError(f"this network cannot be written in the {self.title} layout: {reason}")
        return self._foreign(state, config)

    def _foreign(self, state: Mapping[str, Tensor], config: Any) -> State:
        foreign: State = {}
        for pair in self.pairs(config):
            _write_pair(pair, state, foreign)
        return foreign

    def without_place(self, state: Mapping[str, Tensor]) -> list[str]:
        """The native tensors that have no place in this layout."""
        return [name for name in state if name.endswith(self.optional)] if self.optional else []

    def _made_by_network(self, names: list[str], config: Any) -> State:
        """Fresh buffers (positions, prior) from a network whose weights stay on the meta device; zeros for nulls."""
        with torch.device("meta"):
            network = self.build(config)
        for name, buffer in list(network.named_buffers()):
            network.register_buffer(name, torch.empty_like(buffer, device="cpu"))
        network.init_weights()  # type: ignore[operator]
        shapes, buffers = network.state_dict(), dict(network.named_buffers())
        return {name: buffers[name] if name in buffers else torch.zeros(shapes[name].shape) for name in names}


def _read_pair(pair: Pair, state: State, template: Mapping[str, Tensor], native: State) -> None:
    if pair.joined:
        sizes = [template[name].shape[0] for name in pair.joined]
        parts = torch.split(state[pair.foreign[0]], sizes)
        native.update({name: part.contiguous() for name, part in zip(pair.joined, parts, strict=True)})
        return
    tensors = [state[name] for name in pair.foreign]
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
    if len(pair.foreign) == 1:
        foreign[pair.foreign[0]] = whole if pair.foreign_shape is None else whole.reshape(pair.foreign_shape)
    elif pair.copies:
        foreign.update({name: whole.clone() for name in pair.foreign})
    else:
        parts = whole.chunk(len(pair.foreign))
        foreign.update({name: part.contiguous() for name, part in zip(pair.foreign, parts, strict=True)})


def check_fit(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Refuse tensors that do not fit, listing every one of them by name."""
    problems = [f"missing {name} {tuple(expected[name].shape)}" for name in expected if name not in given]
    problems += [f"not expected {name} {tuple(given[name].shape)}" for name in given if name not in expected]
    problems += [
        f"{name} has shape {tuple(given[name].shape)}, expected {tuple(expected[name].shape)}"
        for name in expected
        if name in given and given[name].shape != expected[name].shape
    ]
    if problems:
        raise AtollError(f"the weights do not fit {what}; nothing was loaded:\n  " + "\n  ".join(problems))


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
