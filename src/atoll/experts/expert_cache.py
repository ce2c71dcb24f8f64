"""The expert cache: a least-recently-used cache of at most `limit` experts in the memory of each device.

An ensemble has K experts, but sampling with top-1 or top-2 routing needs few of them at a time. An expert is opened
when it is first needed; if its device is full, the least recently used one is dropped first, so at most `limit`
networks are on a device at any moment. While one expert computes, the next one of the same evaluation is fetched.
Experts in memory run first. None of this changes the results, because the velocities are summed in the order of the
experts.

On a CPU, weights are memory-mapped from their safetensors files, so reopening an expert usually reads the page cache of
the system, not the disk. To fetch the next expert means that the system reads its file ahead.

On an accelerator an expert goes from its file to pinned host memory in compute precision, and from there to the device
on a side stream, so that the copy overlaps with the kernels of other experts:

    file --thread: read, cast, pin--> host copy --side stream--> device

The thread does both steps if the device has room for two experts. With room for one it prepares the host copy, and the
copy to the device starts when the expert before it is dropped. Host copies are kept as far as memory allows, so that an
expert is read and cast once. The host never waits for a copy; the device does, at the first kernel that needs it.

Each loaded expert also keeps the conditions that it prepared (`BatchConditions`); they are dropped with it.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from atoll.core.device import ASYNCHRONOUS, upload
from atoll.core.errors import AtollError
from atoll.core.host_memory import pinned_budget, pinned_size
from atoll.core.networks import BaseConfig
from atoll.encoders.autoencoder import Statistics
from atoll.experts.batch_conditions import BatchConditions, replace_rows
from atoll.experts.expert import DeviceOptions, NetworkReference, OpenExpert, Rescaling, select_parts
from atoll.nets import Condition, DiT, PreparedCondition
from atoll.nets.base import BaseExpert
from atoll.nets.quantization import quantize

PROBES = 4
"""States on which the error of quantized weights is measured: four times from 0.1 to 0.9, in two forward passes."""


@dataclass(eq=False)
class LoadedExpert:
    """An expert in memory, and a cache of the conditions that it prepared last."""

    expert: OpenExpert
    device: torch.device
    copied: torch.Event | None = None
    """Recorded on the side stream after the weights; None if nothing needs to wait for them any more."""
    # `_prepared` belongs to `_distinct` at `_versions`. `_taken` is `_prepared[_rows]`, kept because the rows of an
    # expert often stay the same from one step to the next, and gathering keys and values copies a lot of memory.
    _distinct: Condition | None = None
    _versions: list[int] = field(default_factory=list)
    _prepared: PreparedCondition | None = None
    _rows: Tensor | None = None
    _taken: PreparedCondition | None = None

    def condition(self, conditions: BatchConditions, rows: Tensor, index: Tensor) -> Condition | PreparedCondition:
        """Return the conditions of these rows (images,), prepared if the network can and later steps use them again.

        `rows` is on the CPU, and `index` the same on the expert's device.
        """
        network, versions = self.expert.network, conditions.versions
        if not (conditions.reused and isinstance(network, DiT)):
            return self._select(conditions)[index]
        if self._distinct is not conditions.distinct:
            # A new batch: prepare all distinct conditions.
            self._distinct, self._versions = conditions.distinct, list(versions)
            self._prepared, self._rows = network.prepare(self._select(conditions)), None
        assert self._prepared is not None
        used = sorted(set(rows.tolist())) if versions else []
        if changed := [row for row in used if self._versions[row] != versions[row]]:
            # Later, prepare only those that were replaced.
            slots = upload(torch.tensor(changed), self.device)
            replace_rows(self._prepared, slots, network.prepare(self._select(conditions)[slots]))
            self._rows = None
            for row in changed:
                self._versions[row] = versions[row]
        if self._rows is None or self._taken is None or not torch.equal(self._rows, rows):
            self._rows, self._taken = rows, self._prepared[index]
        return self._taken

    def _select(self, conditions: BatchConditions) -> Condition:
        """Return the parts that this network is conditioned on, on its device and in its precision."""
        mine = select_parts(conditions.distinct, self.expert.conditioning)
        if mine.dropped is not None and mine.dropped.device != self.device:
            mine = mine.map(lambda part: part.to(self.device, non_blocking=True))
        parts = {name: getattr(mine, name) for name in ("text", "pooled")}
        return replace(mine, **{name: part.to(self.expert.dtype) for name, part in parts.items() if part is not None})


@dataclass(eq=False)
class PinnedNetwork:
    """A network that is ready for inference, with its weights in pinned host memory, from which devices read."""

    network: nn.Module
    size: int
    """Bytes of pinned memory."""
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Move the weights to pinned memory."""

        def pin(tensor: Tensor) -> Tensor:
            self.weights.append(tensor.pin_memory())
            return self.weights[-1]

        self.network._apply(pin)  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Give the network its host weights back, which frees those on the device."""
        # Module._apply visits parameters and buffers always in the same order.
        weights = iter(self.weights)
        self.network._apply(lambda _: next(weights))  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class ExpertCache:
    """The experts of an ensemble, of which at most `limit` are in the memory of each device."""

    references: Sequence[NetworkReference]
    normalization: Statistics
    """The common normalization of latents."""
    device_options: DeviceOptions
    limit: int
    devices: Sequence[torch.device] = ()
    """The device of each expert; by default they are spread over those of the options."""
    loads: int = 0
    """Number of times that an expert was brought to its device."""
    quantization_error: dict[str, float] = field(default_factory=dict)
    """Relative change of the velocity by quantized weights, for each expert that was opened."""
    _loaded: "OrderedDict[int, LoadedExpert]" = field(default_factory=OrderedDict)
    _host: "OrderedDict[int, PinnedNetwork]" = field(default_factory=OrderedDict)
    _fetching: "tuple[int, Future[LoadedExpert] | Future[nn.Module]] | None" = None
    """The number of an expert, and its copy on the device, or only on the host."""
    _streams: dict[torch.device, torch.Stream] = field(default_factory=dict)
    _base: nn.Module | None = None
    """The network that adapters share. It stays in memory when the last of them is dropped."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "atoll-experts"))

    def __post_init__(self) -> None:
        """Check the limit, and that the latents of all experts can be converted to the common normalization."""
        if self.limit < 1:
            raise AtollError(f"max_loaded_experts is {self.limit}; at least one expert must be in memory")
        for reference in self.references:
            declaration = reference.declaration
            Rescaling.between(self.normalization, declaration.statistics, declaration.name)  # raises an error if not
            network, kind = declaration.network, self.device_options.quantize
            if kind and isinstance(network, BaseConfig) and (network.lora is None or network.lora.quantize != kind):
                raise AtollError(
                    f"{declaration.name} was trained on a base that is not quantized; omit --quantize, or train it "
                    f"with networks.default.lora.quantize: {kind}"
                )
        options = self.device_options
        self.devices = tuple(self.devices) or spread_experts(self.references, options.devices or (options.device,))

    def __contains__(self, number: int) -> bool:
        """Return whether an expert is in memory."""
        return number in self._loaded

    def order(self, needed: Sequence[int], *, last: torch.device | None = None) -> list[int]:
        """Return the needed experts in an order in which none is dropped before it was used.

        Those in memory come first on each device. The experts on the device `last` come after all others.
        """
        return sorted(needed, key=lambda number: (self.devices[number] == last, number not in self._loaded))

    def put(self, number: int, expert: OpenExpert) -> None:
        """Add an expert that is already open."""
        self._loaded[number] = LoadedExpert(expert, self.devices[number])

    def get(self, number: int, following: int | None = None) -> LoadedExpert:
        """Return an expert, opened if needed, and start to fetch the one that follows."""
        if number not in self._loaded and self._fetching is not None:
            # The thread fetches this expert, or one that is not needed after all.
            fetched, future = self._fetching
            self._fetching = None
            if isinstance(loaded := future.result(), LoadedExpert):
                self._loaded[fetched] = loaded
        if number not in self._loaded:
            self._make_room(number)
            self._loaded[number] = self._load(number)
        expert = self._loaded[number]
        self._loaded.move_to_end(number)  # the position of the most recently used
        if expert.copied is not None:
            # The current stream waits for the weights, and keeps their memory until it has used them.
            stream = torch.accelerator.current_stream(expert.device)
            stream.wait_event(expert.copied)
            for tensor in (*expert.expert.network.parameters(), *expert.expert.network.buffers()):
                tensor.record_stream(stream)
            expert.copied = None
        if following is not None and following not in self._loaded:
            self._prefetch(following)
        return expert

    def _prefetch(self, number: int) -> None:
        file = self.references[number].file
        if not self._copies_ahead(number):
            if file is not None and hasattr(os, "posix_fadvise"):
                with file.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        elif self._fetching is None:  # one at a time
            if self.limit > 1 or not self._on_device(number):
                self._make_room(number)
                self._fetching = number, self._thread.submit(self._load, number)
            else:
                self._fetching = number, self._thread.submit(self._host_copy, number)

    def _on_device(self, number: int) -> list[int]:
        """Return the experts on the device of an expert, the least recently used first."""
        return [other for other in self._loaded if self.devices[other] == self.devices[number]]

    def _make_room(self, number: int) -> None:
        """Drop experts from the device of an expert until it fits."""
        loaded = self._on_device(number)
        for dropped in loaded[: max(0, len(loaded) + 1 - self.limit)]:
            del self._loaded[dropped]
            if dropped in self._host:
                self._host[dropped].restore()

    def _copies_ahead(self, number: int) -> bool:
        """Return whether an expert goes to its device through pinned memory."""
        # Do not prefetch quantized experts: they are quantized on the device. Nor adapters: to open one changes the
        # layers of the base, with which another expert may be computing.
        shared = isinstance(self.references[number].declaration.network, BaseConfig)
        return self.devices[number].type in ASYNCHRONOUS and not self.device_options.quantize and not shared

    def _load(self, number: int) -> LoadedExpert:
        declaration, device, copied = self.references[number].declaration, self.devices[number], None
        options = replace(self.device_options, device=device)
        self.loads += 1
        if not self._copies_ahead(number):
            network = options.put(self.references[number].open())
        else:
            network = self._host_copy(number)
            if next(network.parameters()).device != device:
                side = self._streams.setdefault(device, torch.Stream(device=device))
                with side:
                    network.to(device, non_blocking=True)
                    copied = torch.Event(device)
                    copied.record(side)
        if isinstance(network, BaseExpert) and network.config.lora:
            self._base = network.base
        expert = OpenExpert.of(declaration, network, self.normalization, options.dtype)
        if options.quantize and not isinstance(network, BaseExpert):  # whose base was quantized when it was opened
            self.quantization_error[declaration.name] = _quantize_and_measure(expert, options.quantize, device)
        return LoadedExpert(expert, device, copied)

    def _host_copy(self, number: int) -> nn.Module:
        """Return an expert's network, read and pinned unless that was done before."""
        if number in self._host:
            self._host.move_to_end(number)
            return self._host[number].network
        network = self.device_options.prepare(self.references[number].open())
        if next(network.parameters()).device.type != "cpu":
            return network  # a component of a pipeline, which is on its device already
        # If all experts fit on the devices, host copies are only needed until they are there. They are dropped when the
        # next one is read, because the copy of this one may still be going on.
        evicts = any(self.devices.count(device) > self.limit for device in self.devices)
        budget = pinned_budget() if evicts else 0
        # Others are dropped before this one is pinned: torch never gives pinned memory back, it only uses it again.
        needed = sum(pinned_size(tensor.nbytes) for tensor in (*network.parameters(), *network.buffers()))
        while self._host and needed + sum(copy.size for copy in self._host.values()) > budget:
            self._host.popitem(last=False)
        self._host[number] = PinnedNetwork(network, needed)
        return network


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
    return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))


def spread_experts(references: Sequence[NetworkReference], devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """Return a device for each expert, such that all devices hold about the same bytes, and get about the same use.

    Experts go largest first to the device with the fewest bytes so far, the classic heuristic of scheduling (longest
    processing time first). Experts are usually of one size; then the number of images of their clusters decides: a
    router sends images to experts about as often as their clusters occur in the data. Adapters are on the first device,
    because they share their base.
    """
    use = [reference.density.images if reference.density else 0.0 for reference in references]
    held = dict.fromkeys(devices, (0, 0.0))  # bytes and use of each device
    placed = [devices[0]] * len(references)
    for number in sorted(range(len(references)), key=lambda number: (-references[number].size, -use[number])):
        network = references[number].declaration.network
        adapter = isinstance(network, BaseConfig) and network.lora is not None
        device = devices[0] if adapter else min(devices, key=held.__getitem__)
        size, used = held[device]
        held[device] = size + references[number].size, used + use[number]
        placed[number] = device
    return tuple(placed)
