"""The processes of one training job: a single one, or several under torchrun with DDP or FSDP2.

There are three process groups. The default group (NCCL on GPUs) carries the tensors of training, and its timeout
detects a process that hangs within a step. While the main process works alone, verifying a checkpoint or writing the
result, the others must not wait in that group: they would run into its timeout, and the job would never end. They wait
in the control group, over gloo on the CPU, which may take hours. If a process dies, its connections in that group
close, so the others end at once; a wait on the rendezvous store would only end at its timeout.

The saving group is a second one of this kind, for the threads that write checkpoints. Collectives of one group must be
called in the same order on all processes, and two threads have no common order.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atoll.core.errors import AtollError

Parallel = Literal["ddp", "fsdp2"]
T = TypeVar("T")
STEP_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives within training. The slowest step is the first: the main process opens trackers before it,
and one process may compile the network or read shards over a slow network while the others wait. NCCL's default of 10
minutes is short for that; 30 minutes is gloo's default."""
WAIT_TIMEOUT = timedelta(hours=4)
"""Timeout of the control and saving groups, in which processes wait for the main process and for each other's share of
the validation. Verifying two checkpoints of 3 B parameters (60 GB each) at 50 MB/s takes 40 minutes. A short timeout
could lose a finished job; a long one only matters if a machine vanishes without closing its connections."""


@dataclass(frozen=True)
class DistContext:
    """One process among those that train a job, and its communication with the others."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """The control group; None is the default group."""
    saving: dist.ProcessGroup | None = None
    """The group of the threads that write checkpoints."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def only_device(self, devices: str | None) -> str | None:
        """Return the device of this process if there are several, else the requested ones."""
        if self.size > 1 and devices is not None:
            raise AtollError("leave --devices out under torchrun: every process has its own device")
        return str(self.device) if self.size > 1 else devices

    def wrap(
        self, network: nn.Module, parallel: Parallel, precision: torch.dtype, *, blocks: Sequence[nn.Module]
    ) -> nn.Module:
        """Wrap a network in DDP, or its blocks and itself in FSDP2, if there are several processes.

        Its parameters stay those of `network`.
        """
        network = network.to(self.device)
        if parallel == "fsdp2" and self.size > 1:
            # Importing it takes most of a second, which sampling and single processes need not wait for.
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            # Inputs are not cast: bfloat16 has 8 significant bits, which would round timesteps. Autocast does the rest.
            policy = MixedPrecisionPolicy(precision, torch.float32, cast_forward_inputs=False)
            mesh = init_device_mesh(self.device.type, (self.size,))
            for block in blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            return cast(nn.Module, fully_shard(network, mesh=mesh, mp_policy=policy))
        if self.size == 1:
            return network
        # Buffers are constants here, so they need no broadcast; gradients that are views of the buckets save a copy.
        return DistributedDataParallel(network, broadcast_buffers=False, gradient_as_bucket_view=True)

    @contextmanager
    def sync_gradients(self, network: nn.Module, last: bool) -> Iterator[None]:
        """Exchange gradients only in the last micro-batch of a step; before that, they accumulate locally."""
        if callable(choose := getattr(network, "set_requires_gradient_sync", None)):  # FSDP2
            choose(last)
        if isinstance(network, DistributedDataParallel) and not last:
            with network.no_sync():
                yield
        else:
            yield

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, in the group of training."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work | None:
        """Start to copy a tensor of one process to all, in the group of training; None for a single process."""
        return dist.broadcast(tensor, source, async_op=True) if self.size > 1 else None

    def average_gradients(self, module: nn.Module) -> None:
        """Replace the gradients of a module that is not wrapped by their means over all processes."""
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        if self.size == 1 or not gradients:
            return
        # One exchange for all of them.
        flat = self.all_reduce(torch.cat([gradient.flatten() for gradient in gradients])) / self.size
        means = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))

    def any_rank(self, value: bool) -> bool:
        """Return whether the value is true on any process, so that all of them stop, or none."""
        if self.size == 1:
            return value
        # In the control group, which is on the CPU: a flag on an accelerator could be read only after all queued work.
        flag = torch.tensor([value], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.control)
        return bool(flag.item())

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over all processes, in the control group: one may be much slower."""
        if self.size > 1:
            dist.all_reduce(rows, group=self.control)
        return rows

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main process while the others wait; return its result (JSON values) on all of them.

        If it fails, all processes fail: the main process with its exception, the others with an error that quotes it.
        """
        return cast(T, self.on_all(lambda: work() if self.is_main else None)[0])

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on all processes; return the results (JSON values) of all on each, in the order of ranks.

        If it fails on one process, all fail: that one with its exception, the others with an error that quotes it.
        """
        if self.size == 1:
            return [work()]
        failure: BaseException | None = None
        try:
            message = json.dumps({"result": work()})
        except BaseException as error:
            failure, message = error, json.dumps({"error": f"{type(error).__name__}: {error}"})
        try:
            received = [json.loads(text) for text in self._gather(message)]
        except RuntimeError:
            if failure is None:
                raise
        # If the others are gone too, this process still raises its error.
        if failure is not None:
            raise failure
        for rank, found in enumerate(received):
            if "error" in found:
                failed = "the main process" if rank == 0 else f"process {rank}"
                raise AtollError(f"process {self.rank} ends because {failed} failed: {found['error']}")
        return [cast(T, found["result"]) for found in received]

    def _gather(self, text: str) -> list[bytes]:
        """Return the texts of all processes, with spaces at their ends."""
        # Bytes, first their numbers. `all_gather_object` would do the same with pickles.
        encoded = text.encode()
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(encoded)]), group=self.control)
        longest = max(int(length) for length in lengths)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self.control)
        return [bytes(text.tolist()) for text in texts]


ALONE = DistContext(0, 1, torch.device("cpu"))
"""A single process, for work that several may share."""
_active: DistContext | None = None
"""The context of this process while there are process groups, of which it can have only one set."""


@contextmanager
def init_distributed(device: torch.device) -> Iterator[DistContext]:
    """Initialize the process groups under torchrun; without torchrun, yield a context of one process.

    Within such a block, another one has the same context: `atoll join` trains several jobs with the same processes.
    """
    global _active
    if _active is not None:
        yield _active
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield DistContext(0, 1, device)
        return
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(**group_options(device))
    try:
        control, saving = (dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT) for _ in range(2))
        _active = DistContext(dist.get_rank(), dist.get_world_size(), device, control, saving)
        yield _active
        # No process closes its connections while another still uses them.
        dist.barrier(control)
    finally:
        _active = None
        dist.destroy_process_group()


def group_options(device: torch.device) -> dict[str, Any]:
    """Return the arguments of `init_process_group`.

    With `device_id` NCCL connects at once, so a network problem shows before training, and every collective uses the
    GPU of its process.
    """
    if device.type == "cpu":
        return {"backend": "gloo", "timeout": STEP_TIMEOUT}
    return {"device_id": device, "timeout": STEP_TIMEOUT}


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from all processes if FSDP2 has sharded it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
