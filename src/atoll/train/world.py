"""The processes of one island: alone, or under torchrun with DDP or FSDP2. Networks know nothing of this."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Parallel = Literal["ddp", "fsdp2"]


@dataclass(frozen=True)
class World:
    """One process among those that train a job."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
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
    def gradients(self, network: nn.Module, last: bool) -> Iterator[None]:
        """Exchange gradients only for the last of the micro-batches that make up a step."""
        if isinstance(network, FSDPModule):
            network.set_requires_gradient_sync(last)
        if isinstance(network, DistributedDataParallel) and not last:
            with network.no_sync():
                yield
        else:
            yield

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, wish: bool) -> bool:
        """Whether any process wishes it: all of them stop, or none."""
        if self.size == 1:
            return wish
        flag = torch.tensor([wish], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def tell(self, value: int) -> int:
        """The first process's number, in every process."""
        if self.size == 1:
            return value
        number = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.broadcast(number, 0)
        return int(number.item())

    def wait(self) -> None:
        """Go on together."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started, or be alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(0, 1, device)
        return
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full, gathered if FSDP2 holds it in parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def transformer_blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, Atoll's or diffusers': the units of FSDP2 and of checkpointing."""
    inner = getattr(network, "model", network)
    for name in ("blocks", "transformer_blocks"):
        if isinstance(found := getattr(inner, name, None), nn.ModuleList):
            return list(found)
    return []
