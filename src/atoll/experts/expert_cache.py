"""Experts in memory: opened when first needed, at most `limit` of them at once, the least recently used one leaves.

Weights are mapped from their safetensors file, so what is not in memory is on the disk or in the system's cache of it.
On an accelerator the next expert is copied while the present one computes. Results do not depend on any of this.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import AtollError
from atoll.data.stages.latents import Statistics
from atoll.experts.batch_conditions import BatchConditions, replace_rows
from atoll.experts.expert import DeviceOptions, ExpertReference, OpenExpert, open_expert, select_parts
from atoll.experts.quantize import quantize
from atoll.experts.rescaling import rescaling
from atoll.nets import Condition, DiT, PreparedCondition

PROBES = 4
"""States on which the error of quantized weights is measured."""


@dataclass(eq=False)
class LoadedExpert:
    """An expert in memory, with what it made of the conditions it was last told."""

    expert: OpenExpert
    _distinct: Condition | None = None
    _versions: list[int] = field(default_factory=list)
    _prepared: PreparedCondition | None = None
    _rows: Tensor | None = None
    _taken: PreparedCondition | None = None

    def condition(self, told: BatchConditions, rows: Tensor) -> Condition | PreparedCondition:
        """The conditions of these numbers, as the network takes them."""
        network = self.expert.network
        if not (told.reused and isinstance(network, DiT)):
            mine = self._own(told)
            told_nothing = mine.text is None and mine.pooled is None and mine.label is None
            return mine if told_nothing else mine[rows]
        self._prepare(network, told, rows)
        assert self._prepared is not None
        if self._rows is None or self._taken is None or not torch.equal(self._rows, rows):
            self._rows, self._taken = rows, self._prepared[rows]
        return self._taken

    def _prepare(self, network: DiT, told: BatchConditions, rows: Tensor) -> None:
        """Prepare all conditions when they are told for the first time, and later those that were replaced."""
        if self._distinct is not told.distinct:
            self._distinct, self._versions = told.distinct, list(told.versions)
            self._prepared, self._rows = network.prepare(self._own(told)), None
        elif told.versions:
            new = [number for number in sorted(set(rows.tolist())) if self._versions[number] != told.versions[number]]
            if new:
                assert self._prepared is not None
                places = torch.tensor(new, device=rows.device)
                replace_rows(self._prepared, places, network.prepare(self._own(told)[places]))
                self._rows = None
                for number in new:
                    self._versions[number] = told.versions[number]

    def _own(self, told: BatchConditions) -> Condition:
        mine, dtype = select_parts(told.distinct, self.expert.conditioning), self.expert.dtype
        parts = {name: getattr(mine, name) for name in ("text", "pooled")}
        return replace(mine, **{name: part.to(dtype) for name, part in parts.items() if part is not None})


@dataclass(eq=False)
class ExpertCache:
    """The experts of an ensemble, of which some are in memory."""

    references: Sequence[ExpertReference]
    space: Statistics
    device_options: DeviceOptions
    limit: int
    loads: int = 0
    """How often an expert was opened."""
    quantization_error: dict[str, float] = field(default_factory=dict)
    """By how much eight-bit weights change the velocity of each expert that was opened, relative to its size."""
    _loaded: "OrderedDict[int, LoadedExpert]" = field(default_factory=OrderedDict)
    _prefetched: dict[int, "Future[LoadedExpert]"] = field(default_factory=dict)
    _thread: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        """Check that the limit makes sense and that all experts fit into one space."""
        if self.limit < 1:
            raise AtollError(f"max_loaded_experts is {self.limit}; at least one expert must be in memory")
        for reference in self.references:
            rescaling(self.space, reference.declaration.statistics, reference.declaration.name)

    def order(self, wanted: Sequence[int]) -> list[int]:
        """Those in memory first: what is there is used before it has to leave."""
        return sorted(wanted, key=lambda number: number not in self._loaded)

    def put(self, number: int, expert: OpenExpert) -> None:
        """Keep an expert that is open already."""
        self._loaded[number] = LoadedExpert(expert)

    def get(self, number: int, following: int | None = None) -> LoadedExpert:
        """An expert, ready to answer; the one to follow is fetched meanwhile if there is room for both."""
        loaded = self._loaded.pop(number, None) or self._arrived(number)
        self._loaded[number] = loaded
        if following is not None and following not in self._loaded:
            self._fetch(following)
        return loaded

    def _arrived(self, number: int) -> LoadedExpert:
        coming = self._prefetched.pop(number, None)
        if coming is not None:
            return coming.result()
        self._make_room()
        return self._load(number)

    def _fetch(self, number: int) -> None:
        file = self.references[number].file
        if self.device_options.device.type == "cpu" or self.limit == 1:
            if file is not None and hasattr(os, "posix_fadvise"):
                with file.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            return
        if not self._prefetched:
            self._make_room()
            self._thread = self._thread or ThreadPoolExecutor(1)
            self._prefetched[number] = self._thread.submit(self._load, number)

    def _make_room(self) -> None:
        while len(self._loaded) + len(self._prefetched) >= self.limit:
            self._loaded.popitem(last=False)

    def _load(self, number: int) -> LoadedExpert:
        reference = self.references[number]
        self.loads += 1
        expert = open_expert(reference, self.space, self.device_options)
        if self.device_options.quantize:
            name = reference.declaration.name
            self.quantization_error[name] = _quantized(expert, self.device_options.quantize, self.device_options.device)
        return LoadedExpert(expert)


@torch.no_grad()
def _quantized(expert: OpenExpert, kind: str, device: torch.device) -> float:
    """Quantize an expert in place; by how much its velocity changes on states of noise, relative to its size."""
    x = torch.randn(PROBES, *expert.declaration.shape, generator=torch.Generator().manual_seed(0)).to(device)
    t = torch.linspace(0.1, 0.9, PROBES, device=device)
    before = expert.velocity(x, t)
    quantize(expert.network, kind)
    return float((expert.velocity(x, t) - before).norm() / before.norm())


def weight_bytes(network: nn.Module) -> int:
    """Bytes of a network's weights and buffers."""
    tensors: list[Any] = [*network.parameters(), *network.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
