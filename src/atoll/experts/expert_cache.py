"""The expert cache: a least-recently-used cache of at most `limit` experts in memory.

An ensemble has K experts, but sampling with top-1 or top-2 routing needs few of them at a time. An expert is opened
when it is first needed; if the cache is full, the least recently used one is dropped first, so at most `limit` networks
are in memory at any moment. Weights are memory-mapped from their safetensors files, so reopening an expert usually
reads the page cache of the system, not the disk.

While one expert computes, the next one of the same evaluation is fetched: on an accelerator a thread copies it to the
device if the limit allows two experts; otherwise the operating system reads its file ahead. Experts in memory run
first. None of this changes the results, because the velocities are summed in the order of the experts.

Each loaded expert also keeps the conditions that it prepared (`BatchConditions`); they are dropped with it.
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
"""States on which the error of quantized weights is measured: four times from 0.1 to 0.9, in two forward passes."""


@dataclass(eq=False)
class LoadedExpert:
    """An expert in memory, with the conditions that it prepared last."""

    expert: OpenExpert
    # `_prepared` belongs to `_distinct` at `_versions`. `_taken` is `_prepared[_rows]`, kept because the rows of an
    # expert often stay the same from one step to the next, and gathering keys and values copies a lot of memory.
    _distinct: Condition | None = None
    _versions: list[int] = field(default_factory=list)
    _prepared: PreparedCondition | None = None
    _rows: Tensor | None = None
    _taken: PreparedCondition | None = None

    def condition(self, conditions: BatchConditions, rows: Tensor) -> Condition | PreparedCondition:
        """Return the conditions of these rows (images,), prepared if the network can and later steps use them again."""
        network = self.expert.network
        if not (conditions.reused and isinstance(network, DiT)):
            mine = self._select(conditions)
            unconditioned = mine.text is None and mine.pooled is None and mine.label is None
            return mine if unconditioned else mine[rows]
        self._prepare(network, conditions, rows)
        assert self._prepared is not None
        if self._rows is None or self._taken is None or not torch.equal(self._rows, rows):
            self._rows, self._taken = rows, self._prepared[rows]
        return self._taken

    def _prepare(self, network: DiT, conditions: BatchConditions, rows: Tensor) -> None:
        """Prepare all distinct conditions of a new batch; later, only those among `rows` that were replaced."""
        if self._distinct is not conditions.distinct:
            self._distinct, self._versions = conditions.distinct, list(conditions.versions)
            self._prepared, self._rows = network.prepare(self._select(conditions)), None
        elif conditions.versions:
            versions = conditions.versions
            changed = [row for row in sorted(set(rows.tolist())) if self._versions[row] != versions[row]]
            if changed:
                assert self._prepared is not None
                slots = torch.tensor(changed, device=rows.device)
                replace_rows(self._prepared, slots, network.prepare(self._select(conditions)[slots]))
                self._rows = None
                for row in changed:
                    self._versions[row] = versions[row]

    def _select(self, conditions: BatchConditions) -> Condition:
        """Return the parts that this network is conditioned on, in its precision."""
        mine, dtype = select_parts(conditions.distinct, self.expert.conditioning), self.expert.dtype
        parts = {name: getattr(mine, name) for name in ("text", "pooled")}
        return replace(mine, **{name: part.to(dtype) for name, part in parts.items() if part is not None})


@dataclass(eq=False)
class ExpertCache:
    """The experts of an ensemble, of which at most `limit` are in memory."""

    references: Sequence[ExpertReference]
    space: Statistics
    device_options: DeviceOptions
    limit: int
    loads: int = 0
    """Number of times that an expert was opened."""
    quantization_error: dict[str, float] = field(default_factory=dict)
    """Relative change of the velocity by quantized weights, for each expert that was opened."""
    _loaded: "OrderedDict[int, LoadedExpert]" = field(default_factory=OrderedDict)
    _prefetched: dict[int, "Future[LoadedExpert]"] = field(default_factory=dict)
    _thread: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        """Check the limit, and that the latents of all experts can be converted to the common normalization."""
        if self.limit < 1:
            raise AtollError(f"max_loaded_experts is {self.limit}; at least one expert must be in memory")
        for reference in self.references:
            rescaling(self.space, reference.declaration.statistics, reference.declaration.name)

    def order(self, needed: Sequence[int]) -> list[int]:
        """Return the needed experts with those in memory first, so that none is dropped before it was used."""
        return sorted(needed, key=lambda number: number not in self._loaded)

    def put(self, number: int, expert: OpenExpert) -> None:
        """Add an expert that is already open."""
        self._loaded[number] = LoadedExpert(expert)

    def get(self, number: int, following: int | None = None) -> LoadedExpert:
        """Return an expert, opened if needed, and start to fetch the one that follows."""
        # Popping and inserting moves the expert to the end of the ordered dictionary: the most recently used position.
        loaded = self._loaded.pop(number, None)
        if loaded is None and (prefetched := self._prefetched.pop(number, None)) is not None:
            loaded = prefetched.result()
        elif loaded is None:
            self._make_room()
            loaded = self._load(number)
        self._loaded[number] = loaded
        if following is not None and following not in self._loaded:
            self._prefetch(following)
        return loaded

    def _prefetch(self, number: int) -> None:
        file = self.references[number].file
        if self.device_options.device.type == "cpu" or self.limit == 1:
            if file is not None and hasattr(os, "posix_fadvise"):
                with file.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            return
        # One at a time: a prefetched expert counts against the limit.
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
            self.quantization_error[name] = _quantize_and_measure(
                expert, self.device_options.quantize, self.device_options.device
            )
        return LoadedExpert(expert)


@torch.no_grad()
def _quantize_and_measure(expert: OpenExpert, kind: str, device: torch.device) -> float:
    """Quantize an expert in place; return the relative change of its unconditional velocity on states of noise."""
    # A fixed seed, so that the reported error of an expert is the same every time it is opened.
    x = torch.randn(PROBES, *expert.declaration.shape, generator=torch.Generator().manual_seed(0)).to(device)
    t = torch.linspace(0.1, 0.9, PROBES, device=device)
    before = expert.velocity(x, t)
    quantize(expert.network, kind)
    return float((expert.velocity(x, t) - before).norm() / before.norm())


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of a network's weights and buffers."""
    tensors: list[Any] = [*network.parameters(), *network.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
