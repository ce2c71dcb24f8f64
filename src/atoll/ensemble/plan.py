"""What sampling will take in memory, told before it starts.

Weights are counted from the networks' descriptions. The working memory of one evaluation is counted by running the
largest expert on tensors without content, and adding up what is alive at the fullest moment.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.ensemble.sampler import Sampled
from atoll.experts.expert_cache import Member, Placement, Residents, weights_of
from atoll.nets import Condition, DiT, build

MEGABYTE = 1e6
MAPPED = 1 << 25
"""From this size on, glibc gives a tensor a mapping of its own."""
HEAP = 2.4
"""Heap over live tensors below that size, measured on forward passes of DiTs with batches of 16 to 128."""


class Planned(Sampled, Protocol):
    """What a plan needs of an ensemble."""

    placement: Placement
    residents: Residents


@dataclass(frozen=True)
class Plan:
    """Bytes of every part at the fullest moment, beyond what the process has before anything is loaded."""

    experts: int
    resident: int
    batch: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "total": self.total}

    def lines(self) -> list[str]:
        """For people."""
        head = f"memory plan: {self.resident} of {self.experts} experts in memory, batches of {self.batch}"
        rows = [f"  {name:<44} {size / MEGABYTE:10.1f} MB" for name, size in self.parts.items()]
        return [head, *rows, f"  {'together':<44} {self.total / MEGABYTE:10.1f} MB"]


def plan(ensemble: Planned, batch: int, distinct: int, *, guided: bool) -> Plan:
    """The plan for batches of `batch` samples told `distinct` different things, with or without guidance."""
    placement, members = ensemble.placement, ensemble.members
    sizes = sorted((expert_bytes(member, placement) for member in members), reverse=True)
    limit = min(ensemble.residents.limit, len(members))
    rows = batch * (2 if guided and ensemble.told else 1)
    largest = max(members, key=lambda member: member.size)
    working, conditions = working_bytes(largest, placement, rows, distinct=distinct)
    parts = {
        "experts": sum(sizes[:limit]),
        "prepared conditions": limit * conditions,
        "one evaluation of an expert": working,
        "latents": 6 * rows * 4 * torch.Size(ensemble.shape).numel(),
    }
    if ensemble.router is not None:
        parts["router"] = weights_of(ensemble.router.network)
    if placement.dtype != torch.float32 or placement.quantise:
        parts["a file while its weights are converted"] = max(member.size for member in members)
    if ensemble.told & {"text", "pooled"}:
        parts["text encoder"] = weights_of(ensemble.models.text_encoder.network)
    codec = ensemble.models.codec
    if hasattr(codec, "network"):
        parts["autoencoder"] = weights_of(codec.network)
    return Plan(len(members), limit, batch, {name: int(size) for name, size in parts.items() if size})


def expert_bytes(member: Member, placement: Placement) -> int:
    """Bytes of an expert's weights, as they are kept."""
    with torch.device("meta"):
        network = build(dict(member.declaration.network))
    width = placement.dtype.itemsize
    linear = sum(part.weight.numel() for part in network.modules() if isinstance(part, nn.Linear))
    saved = linear * (width - 1) if placement.quantise else 0
    return weights_of(network) * width // 4 - saved


def working_bytes(member: Member, placement: Placement, rows: int, *, distinct: int) -> tuple[int, int]:
    """Memory of one evaluation of `rows` samples, and of their prepared conditions."""
    declaration = member.declaration
    text = declaration.text if "text" in declaration.told else None
    with FakeTensorMode(), _default(placement.dtype):
        network = build(dict(declaration.network)).eval()
        x = torch.zeros(rows, *declaration.shape, dtype=placement.dtype)
        tokens = torch.zeros(distinct + 1, text["max_tokens"], text["dimensions"]) if text else None
        label = torch.zeros(distinct + 1, dtype=torch.long) if "label" in declaration.told else None
        condition: Any = Condition(text=tokens, label=label)
        prepared = 0
        with torch.no_grad():
            if isinstance(network, DiT):
                kept = network.prepare(condition)
                condition = network.prepare(Condition(text=_rows(tokens, rows), label=_rows(label, rows)))
                texts = [*tree_leaves(kept.keys_values), *tree_leaves(condition.keys_values)]
                prepared = sum(part.numel() * part.element_size() for part in texts)
            else:
                condition = Condition(text=_rows(tokens, rows), label=_rows(label, rows))
            weigh = held_by_heap if placement.device.type == "cpu" else int
            return peak_bytes(lambda: network(x, torch.zeros(1), condition), weigh), prepared


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this dtype, for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _rows(part: Tensor | None, rows: int) -> Tensor | None:
    return None if part is None else part.new_zeros(rows, *part.shape[1:])


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def held_by_heap(size: int) -> int:
    """What a tensor on the CPU costs: freed ones leave holes in the C library's heap; large ones are mapped."""
    return size if size >= MAPPED else int(HEAP * size)


def peak_bytes(work: Callable[[], object], weigh: Callable[[int], int] = int) -> int:
    """Bytes of the tensors that are alive at the fullest moment of some work, besides those it was given."""
    meter = _Meter(weigh)
    with meter:
        work()
    return meter.peak


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every tensor that operations make, from its making to its end."""

    def __init__(self, weigh: Callable[[int], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weigh = weigh
        self.alive: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        answer = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(answer):
            if isinstance(tensor, Tensor) and (_storage(tensor) in self.alive or _storage(tensor) not in given):
                self._follow(tensor)
        self.peak = max(self.peak, self.bytes)
        return answer

    def _follow(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key not in self.alive:
            self.bytes += self.weigh(_bytes(tensor))
        self.alive[key] = self.alive.get(key, 0) + 1
        weakref.finalize(tensor, self._forget, key, self.weigh(_bytes(tensor)))

    def _forget(self, key: int, size: int) -> None:
        self.alive[key] -= 1
        if not self.alive[key]:
            del self.alive[key]
            self.bytes -= size


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
