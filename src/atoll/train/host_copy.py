"""A copy of the training state in host memory, which a thread can write to a file while training goes on.

The copy is the data of one safetensors file: the tensors of this process one after the other, as bytes in chunks of
host memory. On an accelerator the chunks are pinned, so the copies are queued behind the step before and ahead of the
next one, and the host does not wait for them. The chunks are allocated for the first copy and used again for all
others, because pinning memory is slow. They cost as much host memory as the part of the state that the process writes.
If that is more than the process may pin, they are ordinary memory, and the host waits for the copies.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.core.device import ASYNCHRONOUS
from atoll.core.host_memory import pinned_budget
from atoll.train.distributed import DistContext

CHUNK_BYTES = 64 << 20
"""Size of a chunk, a power of two: torch rounds pinned memory up to one, which would waste a third of it for tensors of
other sizes. A chunk is also what the writing thread hashes and writes at a time without holding the GIL."""
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of dtypes in safetensors."""


class Shard(NamedTuple):
    """The part of a tensor that one process writes."""

    name: str
    local: Tensor
    offsets: tuple[int, ...]
    """Where the part begins in the full tensor."""


def own_shards(tensors: Mapping[str, Tensor], rank: int, size: int) -> Iterator[Shard]:
    """Yield what process `rank` of `size` writes: its shards of sharded tensors, and its share of the others."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    start = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            local, (chunk,) = tensor.to_local(), tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            # A tensor with fewer rows than there are processes leaves some of them without a part.
            if local.numel():
                yield Shard(name, local, tuple(chunk.offsets))
        # All processes have the full tensor: it is written by the one in whose part of all bytes it begins.
        elif start * size // total == rank:
            yield Shard(name, tensor, (0,) * tensor.ndim)
        start += tensor.nbytes


class HostCopy:
    """The state of one process in host memory."""

    def __init__(self, context: DistContext) -> None:
        self._context = context
        self._asynchronous = context.device.type in ASYNCHRONOUS
        self._chunks: list[Tensor] = []
        self._header = b""
        self._copied: torch.Event | None = None

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors; on an accelerator, queue the copies and do not wait. They replace those of the last call."""
        shards = list(own_shards(tensors, self._context.rank, self._context.size))
        self._header = header(shards)
        if not self._chunks:
            total = sum(shard.local.nbytes for shard in shards)
            sizes = (min(CHUNK_BYTES, total - start) for start in range(0, total, CHUNK_BYTES))
            pinned = self._asynchronous and total <= pinned_budget()
            self._chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        position = 0
        for shard in shards:
            source = shard.local.reshape(-1).view(torch.uint8)
            while len(source):
                number, start = divmod(position, CHUNK_BYTES)
                part = source[: CHUNK_BYTES - start]
                target = self._chunks[number][start : start + len(part)]
                if part.device.type == "cpu":
                    # One memcpy. `copy_` divides the work among threads, which is 40 times slower on a busy machine.
                    target.numpy()[:] = part.numpy()
                else:
                    target.copy_(part, non_blocking=True)
                source, position = source[len(part) :], position + len(part)
        if self._asynchronous:
            self._copied = torch.Event(self._context.device)
            self._copied.record()

    def parts(self) -> list[bytes | memoryview]:
        """Return the bytes of a safetensors file, to any thread; wait for the device first."""
        if self._copied is not None:
            # The current device is per thread. Without this, the thread would also open the first device.
            torch.accelerator.set_device_index(self._context.device)
            self._copied.synchronize()
        return [self._header, *(chunk.numpy().data for chunk in self._chunks)]


def header(shards: Sequence[Shard]) -> bytes:
    """Return the header of a safetensors file with this data, as torch.distributed.checkpoint writes and reads it."""
    entries: dict[str, object] = {}
    start = 0
    for name, local, _ in shards:
        offsets = [start, start + local.nbytes]
        entries[name] = {"dtype": _DTYPES[local.dtype], "shape": list(local.shape), "data_offsets": offsets}
        start = offsets[1]
    sharding = {shard.name: {"saved_offsets": shard.offsets} for shard in shards}
    metadata = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the data begins at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
