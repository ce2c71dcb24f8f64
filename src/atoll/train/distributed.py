"""The processes of one island: alone, or under torchrun with DDP or FSDP2. Networks know nothing of this.

There are two process groups. The default one (NCCL on GPUs) carries the tensors of training, and its timeout notices a
process that hangs within a step. While the main process works alone (it hashes and writes a checkpoint or the result)
the others must not wait in that group: they would run into its timeout, and the job would never end. They wait in a
second group, over gloo on the CPU, which may take hours. A process that dies closes its connections there, so the
others end at once and not at the timeout; a wait on the rendezvous store would not notice.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from atoll.core.errors import AtollError

Parallel = Literal["ddp", "fsdp2"]
T = TypeVar("T")
STEP_TIMEOUT = timedelta(minutes=30)
"""Of collectives within training. The slowest step is the first: the main process opens trackers before it, and one
process may compile the network or read cold shards over a network while the others wait. NCCL's default of 10 minutes
is short for that; 30 minutes is gloo's default."""
WAIT_TIMEOUT = timedelta(hours=4)
"""Of the group in which processes wait for work of the main one and for each other's share of the validation. Verifying
and hashing two checkpoints of a network of 3 B parameters (60 GB each) at 50 MB/s takes 40 minutes. Too short loses a
finished job; too long only matters if a machine disappears without closing its connections."""


@dataclass(frozen=True)
class DistContext:
    """One process among those that train a job."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """The group to wait in; None is the default group."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0

    def wrap(self, network: nn.Module, parallel: Parallel, precision: torch.dtype) -> nn.Module:
        """The network as this world trains it; the parameters of `network` itself stay the ones to save."""
        network = network.to(self.device)
        if parallel == "fsdp2" and self.size > 1:
            # Inputs stay as they are: times in eight bits would not be those of sampling. Autocast does the rest.
            policy = MixedPrecisionPolicy(precision, torch.float32, cast_forward_inputs=False)
            mesh = init_device_mesh(self.device.type, (self.size,))
            for block in transformer_blocks(network):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            return cast(nn.Module, fully_shard(network, mesh=mesh, mp_policy=policy))
        return DistributedDataParallel(network) if self.size > 1 else network

    @contextmanager
    def sync_gradients(self, network: nn.Module, last: bool) -> Iterator[None]:
        """Exchange gradients only for the last of the micro-batches that make up a step."""
        if isinstance(network, FSDPModule):
            network.set_requires_gradient_sync(last)
        if isinstance(network, DistributedDataParallel) and not last:
            with network.no_sync():
                yield
        else:
            yield

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any_rank(self, wish: bool) -> bool:
        """Whether any process wishes it: all of them stop, or none."""
        if self.size == 1:
            return wish
        flag = torch.tensor([wish], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over all processes, for which they may wait long."""
        if self.size > 1:
            dist.all_reduce(rows, group=self.control)
        return rows

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main process while the others wait; return its result, plain JSON values, on all of them.

        If it fails, all of them fail: the main process with its exception, the others with an error that names it.
        """
        if self.size == 1:
            return work()
        if self.is_main:
            try:
                result = work()
                message = json.dumps({"result": result})
            except BaseException as error:
                with suppress(RuntimeError):  # the others are gone: what matters is why this process failed
                    self._broadcast(json.dumps({"error": f"{type(error).__name__}: {error}"}))
                raise
            self._broadcast(message)
            return result
        answer = json.loads(self._broadcast())
        if "error" in answer:
            raise AtollError(f"process {self.rank} ends because the main process failed: {answer['error']}")
        return cast(T, answer["result"])

    def _broadcast(self, text: str = "") -> str:
        """Return the main process's text on all of them. As bytes of JSON: nothing is unpickled."""
        encoded = text.encode()
        length = torch.tensor([len(encoded)])
        dist.broadcast(length, 0, group=self.control)
        buffer = bytearray(encoded) if self.is_main else bytearray(int(length))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), 0, group=self.control)
        return buffer.decode()

    def barrier(self) -> None:
        """Go on together."""
        if self.size > 1:
            dist.barrier(group=self.control)


@contextmanager
def init_distributed(device: torch.device) -> Iterator[DistContext]:
    """Join the processes that torchrun started, or be alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield DistContext(0, 1, device)
        return
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(**group_options(device))
    try:
        control = dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT)
        yield DistContext(dist.get_rank(), dist.get_world_size(), device, control)
    finally:
        dist.destroy_process_group()


def group_options(device: torch.device) -> dict[str, Any]:
    """Return the arguments of `init_process_group`.

    With `device_id` NCCL connects at once, so a wrong network shows before training, and no collective has to guess
    which GPU is that of its process.
    """
    if device.type == "cpu":
        return {"backend": "gloo", "timeout": STEP_TIMEOUT}
    return {"device_id": device, "timeout": STEP_TIMEOUT}


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor in full, gathered if FSDP2 holds it in parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def transformer_blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, Atoll's or diffusers': the units of FSDP2 and of checkpointing."""
    inner = getattr(network, "model", network)
    for name in ("blocks", "transformer_blocks"):
        if isinstance(found := getattr(inner, name, None), nn.ModuleList):
            return list(found)
    return []
