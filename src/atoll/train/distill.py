"""Distillation: a dense student regresses the velocity of the expert of each image's cluster (DDM section 3.4).

No router is needed: the teacher is chosen by the cluster label, and the bridge converts its output to a velocity.

Batches mix all clusters, so a batch needs many teachers, but only one of them should be in memory beside the student.
Targets are therefore computed in blocks of B = `student.block` consecutive positions of training, which span many
batches. Each expert in turn is opened, evaluated on its images of the block, and closed. Its velocities are written to
the targets (B, C, H, W), which stay on the CPU until the batches of the block were trained. With several processes each
computes only the rows that it will train on; the others are NaN, so that a wrong assignment would stop training.

Block k covers the positions k B … (k + 1) B - 1, whatever the batch size and wherever the job resumes. Order, noise and
time of an image are functions of (seed, position), so a job that resumes inside a block computes the same targets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from atoll import flow
from atoll.core import layout
from atoll.core.device import ASYNCHRONOUS
from atoll.core.manifests import ExpertContent, NetworkContent
from atoll.data.dataset import Batch
from atoll.experts.expert import DeviceOptions, OpenExpert, open_expert
from atoll.experts.run import expert_of_run
from atoll.experts.validation import ALONE, Processes, condition_of, validate
from atoll.train.inputs import TrainingInputs
from atoll.train.spec import teachers
from atoll.train.tasks import Forward, Losses, Task, as_expert

TEACHER_BATCH = 64
"""Images of one forward pass of a teacher: the order of magnitude of a training batch, but without gradients."""


@dataclass
class _Block:
    """The targets (B, C, H, W) of consecutive positions from `first` on."""

    first: int = -1
    targets: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class StudentTask(Task):
    """A dense network that is trained on the velocities of all experts."""

    run: Path
    block: int
    micro: int
    _current: _Block = field(default_factory=_Block)

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the mean squared error against the teacher's velocity for each image."""
        noised = inputs.noised
        target = self._targets(inputs.position, len(inputs.index)).to(noised.input.device, non_blocking=True)
        output = forward(noised.input, noised.timestep, inputs.condition)[:, : target.shape[1]]
        return Losses((output.float() - target).square().flatten(1).mean(1), noised.t, {})

    def expert(self) -> OpenExpert:
        """Return the network as a flow-matching expert."""
        return as_expert(self, self.conditioning, flow.Objective().bridge())

    @torch.no_grad()
    def finish(self, content: NetworkContent, processes: Processes = ALONE) -> ExpertContent:
        """Measure the held-out error against eps - x0 of the data, as for any expert."""
        error = validate(
            self.expert().velocity, self.held_out, seed=self.seed, conditioning=self.conditioning, device=self.device,
            processes=processes,
        )  # fmt: skip
        return ExpertContent(
            **dict(content) | {"held_out_loss": error.mean, "loss_by_time": error.by_time},
            objective=flow.Objective().spec,
            teachers=tuple(teachers(self.run, tuple(self._experts()))),
        )

    def _experts(self) -> range:
        return range(self.shards.content.clusters)

    def _targets(self, position: int, count: int) -> Tensor:
        """Return the targets (count, C, H, W) of the positions from `position` on, from one block or several."""
        parts = []
        while count:
            first = position - position % self.block
            if self._current.first != first:
                self._current.targets = self._compute_block(first)
                self._current.first = first
            part = self._current.targets[position - first : position - first + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def _compute_block(self, first: int) -> Tensor:
        """Compute the targets (B, C, H, W) of a block for this process; the rows of other processes are NaN."""
        # A micro-batch is split evenly: rank r trains on the r-th part of its positions (see `Shards.stream`).
        rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        whose = (first + torch.arange(self.block)) % self.micro // (self.micro // processes)
        numbers = self.shards.order(np.arange(first, first + self.block, dtype=np.uint64), self.seed)
        clusters = self.shards.read(numbers).cluster
        device = self.device
        shape = (self.block, *self.shards.content.latents.shape)
        targets = torch.full(shape, torch.nan, pin_memory=device.type in ASYNCHRONOUS)
        for expert in self._experts():
            mine = torch.nonzero((clusters == expert) & (whose == rank)).flatten()
            if len(mine):
                reference = expert_of_run(self.run, layout.expert_job(expert), verify=True)
                teacher = open_expert(reference, self.shards.statistics, DeviceOptions(device))
                for rows in torch.split(mine, TEACHER_BATCH):
                    targets[rows] = self._teacher_velocities(teacher, first, rows, numbers=numbers, device=device)
        return targets

    def _teacher_velocities(
        self, teacher: OpenExpert, first: int, rows: Tensor, *, numbers: "np.ndarray[Any, Any]", device: torch.device
    ) -> Tensor:
        """Return one teacher's velocities (rows, C, H, W) for some rows of a block, noised as for the student."""
        # Rows are not consecutive, so latents and noise are drawn one by one, each by its position.
        inputs, times = [], []
        batch = self.shards.read(numbers[rows.numpy()]).to(device)
        for row, image in zip(rows.tolist(), _single(batch), strict=True):
            x0 = self.shards.latents(image, seed=self.seed, position=first + row)
            noised = self.objective.corrupt(x0, seed=self.seed, position=first + row)
            inputs.append(noised.input)
            times.append(noised.t)
        with torch.autocast(device.type, enabled=False):  # the teacher's bridge was calibrated in full precision
            velocity = teacher.velocity(torch.cat(inputs), torch.cat(times), condition_of(batch, teacher.conditioning))
        return velocity.float().cpu()


def _single(batch: Batch) -> Iterator[Batch]:
    """Yield the images of a batch as batches of one."""
    for i in range(len(batch.index)):
        yield Batch(
            *(part[i : i + 1] for part in (batch.index, batch.cluster, batch.label, batch.mean)),
            *(None if part is None else part[i : i + 1] for part in (batch.std, batch.text, batch.mask, batch.pooled)),
        )
