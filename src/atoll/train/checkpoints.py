"""Checkpoints for resuming: safetensors files that torch.distributed.checkpoint (DCP) loads, with a manifest.

A checkpoint is the artifact `JOB/checkpoints/IMAGES`, named by the images seen. For every parameter of shape S it holds
three or more float32 tensors of shape S: weight, both moments of AdamW or the momentum of Muon, and one for each EMA.
Each process writes one file, with the shards that it holds under FSDP2, or else its share of the tensors. The files
record the offsets of shards, so another number of processes can load them and each reads only its shards.

Training does not wait while a checkpoint is written (`CheckpointSaver`). The state is copied to host memory
(`HostCopy`). A thread then writes the copy, hashes it meanwhile, and commits the checkpoint in three phases: the main
process removes leftovers and begins the artifact, all processes write, and the main process collects the hashes and
commits. The threads of all processes use the saving group (see `distributed`), which tolerates long waits. At most one
checkpoint is in the making: the next one waits for it.

The manifest is written last and holds the hash of every file. A job that is killed while saving leaves a folder without
manifest, which is ignored, and the newest checkpoint is the newest that verifies.

Nothing else needs saving: order of images, noise, times and dropout are functions of (seed, position), the learning
rate is a function of the images seen, and Adam's step count is images / batch size.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from atoll.core import disk, layout
from atoll.core.artifacts import Artifact, FileEntry
from atoll.core.device import ASYNCHRONOUS
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.core.host_memory import pinned_budget
from atoll.core.layout import MANIFEST_FILE
from atoll.core.manifests import CHECKPOINT, CheckpointContent
from atoll.core.progress import say
from atoll.train.ema import EMA

CHUNK_BYTES = 64 << 20
"""Size of a chunk, a power of two: torch rounds pinned memory up to one, which would waste a third of it for tensors of
other sizes. A chunk is also what the writing thread hashes and writes at a time without holding the GIL."""
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of dtypes in safetensors."""


@dataclass(frozen=True)
class TrainState:
    """Everything that training modifies."""

    network: nn.Module
    ema: EMA
    optimizer: torch.optim.Optimizer
    auxiliary: "TrainState | None" = None
    """The state of a network that only training needs (`Task.auxiliary`); None without one."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of the network, then of the auxiliary network."""
        return [self.optimizer, *(self.auxiliary.optimizers if self.auxiliary else [])]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, without copies, so that loading into them restores the state in place."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.ema.parameters.items():
            tensors[f"network.{name}"] = parameter.detach()
            for key, moment in self._moments(parameter).items():
                if key != "step":
                    tensors[f"optimizer.{key}.{name}"] = moment
        for ema, weights in self.ema.weights.items():
            tensors |= {f"ema.{ema}.{name}": weight for name, weight in weights.items()}
        if self.auxiliary is not None:
            tensors |= {f"auxiliary.{name}": tensor for name, tensor in self.auxiliary.tensors().items()}
        return tensors

    def at_step(self, step: int) -> None:
        """Set the optimizer's step count, which is not stored."""
        for parameter in self.ema.parameters.values():
            if "step" in (moments := self._moments(parameter)):  # Muon needs no step count
                moments["step"].fill_(step)
        if self.auxiliary is not None:
            self.auxiliary.at_step(step)

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer's state of one parameter; create it before the first step."""
        # AdamW creates its state in its first step. Loading needs the tensors before that, under AdamW's names. Muon
        # has its state from the start.
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


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
    """A copy of the training state in host memory, which a thread can write to a file while training goes on.

    The copy is the data of one safetensors file: the tensors of this process one after the other, as bytes in chunks of
    host memory. On an accelerator the chunks are pinned, so the copies are queued behind the step before and ahead of
    the next one, and the host does not wait for them. The chunks are allocated for the first copy and used again for
    all others, because pinning memory is slow. They cost as much host memory as the part of the state that the process
    writes. If that is more than the process may pin, they are ordinary memory, and the host waits for the copies.
    """

    def __init__(self, processes: DistContext) -> None:
        self._processes = processes
        self._asynchronous = processes.device.type in ASYNCHRONOUS
        self._chunks: list[Tensor] = []
        self._header = b""
        self._copied: torch.Event | None = None

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors; on an accelerator, queue the copies and do not wait. They replace those of the last call."""
        shards = list(own_shards(tensors, self._processes.rank, self._processes.size))
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
            self._copied = torch.Event(self._processes.device)
            self._copied.record()

    def parts(self) -> list[bytes | memoryview]:
        """Return the bytes of a safetensors file, to any thread; wait for the device first."""
        if self._copied is not None:
            # The current device is per thread. Without this, the thread would also open the first device.
            torch.accelerator.set_device_index(self._processes.device)
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


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one job."""

    run: Path
    job: str
    made_from: Mapping[str, Any]
    processes: DistContext
    keep_last: int = 2

    @property
    def folder(self) -> Path:
        return self.run / layout.checkpoints(self.job)

    def write(self, copy: HostCopy, images: int, seconds: float) -> Artifact:
        """Write a checkpoint on all processes; it is valid once the main process has committed it.

        It may run in another thread than training.
        """
        artifact, threads = self._artifact(images), replace(self.processes, control=self.processes.saving)

        def begin() -> None:
            shutil.rmtree(artifact.folder, ignore_errors=True)
            artifact.begin(CHECKPOINT, self.made_from)

        threads.on_main(begin)
        entries = threads.on_all(lambda: asdict(artifact.write_parts(file_of(self.processes.rank), copy.parts())))

        def commit() -> None:
            hashed = {file_of(rank): FileEntry(**entry) for rank, entry in enumerate(entries)}
            for name in hashed:
                if not artifact.path(name).is_file():
                    raise AtollError(
                        f"{artifact.path(name)} was written by another process, but the main process does not see it; "
                        "all processes of a job need a common file system"
                    )
            artifact.commit(CheckpointContent(images=images, seconds=seconds), hashed=hashed)
            # Delete old checkpoints, and folders without manifest, of jobs that were killed while saving.
            committed = self._committed()
            for old in set(self._all()) - set(committed[-self.keep_last :]):
                if old < committed[-1]:
                    # The manifest is removed first: a half-removed checkpoint must not look complete.
                    self._artifact(old).path(MANIFEST_FILE).unlink(missing_ok=True)
                    shutil.rmtree(self._artifact(old).folder)

        threads.on_main(commit)
        return artifact

    def load_newest(self, state: TrainState) -> tuple[int, float]:
        """Load the newest valid checkpoint into the state; return the images seen and the seconds trained."""
        images = self.processes.on_main(self._newest_valid)
        if images == 0:
            return 0, 0.0
        artifact = self._artifact(images)
        tensors = state.tensors()
        # DCP warns that `no_dist` assumes a single process.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            reader = HuggingFaceStorageReader(str(artifact.folder))
            load(tensors, storage_reader=reader, process_group=self.processes.control, no_dist=self.processes.size == 1)
        return images, artifact.read(CHECKPOINT).seconds

    def check_space(self, state: TrainState, saves: int) -> None:
        """Raise an error if the disk has no room for the checkpoints of `saves` more saves, and for the result."""
        # A new checkpoint is written before the oldest one is deleted.
        new = max(1, min(saves, self.keep_last + 1 - len(self._committed()))) if saves else 0
        result = sum(weight.nbytes for weights in state.ema.weights.values() for weight in weights.values())
        need = new * sum(tensor.nbytes for tensor in state.tensors().values()) + result
        free = disk.free_bytes(self.folder)
        if need > free:
            raise AtollError(
                f"{self.folder}: training needs {disk.size_text(need)} for {new} checkpoints and the result, and "
                f"{disk.size_text(free)} is free on this disk. Free some space, or lower train.keep_last"
            )

    def newest(self) -> str:
        """Return the folder of the newest committed checkpoint, or "none", for messages."""
        committed = self._committed()
        return str(self._artifact(max(committed)).folder) if committed else "none"

    def _newest_valid(self) -> int:
        """Return the images of the newest checkpoint that verifies; move damaged ones aside. 0 if there is none."""
        for images in sorted(self._all(), reverse=True):
            artifact = self._artifact(images)
            try:
                if artifact.manifest() is None:
                    continue
                artifact.open(CHECKPOINT, verify=True)
            except AtollError as error:
                aside = artifact.folder.with_name(f"{artifact.folder.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                artifact.folder.rename(aside)
                say(f"{artifact.folder} is damaged and was moved to {aside.name}: {error}")
                continue
            artifact.check(CHECKPOINT, self.made_from)
            return images
        return 0

    def _all(self) -> list[int]:
        return [int(path.name) for path in self.folder.glob("*") if path.name.isdigit()]

    def _committed(self) -> list[int]:
        return sorted(images for images in self._all() if self._artifact(images).manifest())

    def _artifact(self, images: int) -> Artifact:
        return Artifact(self.run, layout.checkpoint(self.job, images))


def load_weights(artifact: Artifact, network: nn.Module) -> None:
    """Load only the weights of a checkpoint, in one process; other processes may have written parts of them."""
    tensors: dict[str, Tensor] = {f"network.{name}": part.detach() for name, part in network.named_parameters()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        load(tensors, storage_reader=HuggingFaceStorageReader(str(artifact.folder)), no_dist=True)


def file_of(rank: int) -> str:
    """Return the name of the file that a process writes."""
    return f"state-{rank:05d}.safetensors"


class CheckpointSaver:
    """Saves checkpoints in a thread, one at a time. All methods are called by the training thread.

    `on_commit` is called there too, once a checkpoint is committed. An error of the thread is raised by the next `save`
    or `wait`, which all processes call in the same step.
    """

    def __init__(self, checkpoints: Checkpoints, on_commit: Callable[[Artifact], object]) -> None:
        self._checkpoints, self._on_commit = checkpoints, on_commit
        self._copy = HostCopy(checkpoints.processes)
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: futures.Future[Artifact] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the pending checkpoint and call `on_commit`; raise its error unless training failed already."""
        self._thread.shutdown()
        if kind is None:
            self.wait()
        else:
            self.poll()

    def save(self, state: TrainState, images: int, seconds: float) -> None:
        """Copy the state, and begin to write it; wait for the checkpoint before."""
        self.wait()
        self._copy.take(state.tensors())
        self._pending = self._thread.submit(self._checkpoints.write, self._copy, images, seconds)

    def poll(self) -> bool:
        """Call `on_commit` if the pending checkpoint is committed; return whether it failed."""
        if self._pending is None or not self._pending.done():
            return False
        if self._pending.exception() is not None:
            return True
        self.wait()
        return False

    def wait(self) -> None:
        """Wait for the pending checkpoint and call `on_commit`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._on_commit(pending.result())

    def newest(self) -> str:
        """Return the folder of the newest committed checkpoint, or "none"; wait for the pending one."""
        futures.wait([] if self._pending is None else [self._pending])
        return self._checkpoints.newest()
