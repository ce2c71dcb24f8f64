"""Distillation: a dense student regresses the velocity of the expert of each image's cluster (DDM section 3.4).

No router is needed: the teacher is chosen by the cluster label, and the bridge converts its output to a velocity.

Batches mix all clusters, so a batch needs many teachers, but only `TEACHERS` of them should be in memory beside the
student. Targets are therefore computed in blocks of B = `student.block` consecutive positions of training, which span
many batches. Each expert in turn is taken from the expert cache and evaluated on its images of the block. Its
velocities are written to the targets (B, C, H, W), which stay on the CPU until the batches of the block were trained;
images of several sizes have one such tensor for each size.
With several processes each computes only the rows that it will train on; the others are NaN, so that a wrong assignment
would stop training.

Block k covers the positions k B … (k + 1) B - 1, whatever the batch size and wherever the job resumes. Order, noise and
time of an image are functions of (seed, position), so a job that resumes inside a block computes the same targets.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from atoll import flow
from atoll.core import layout
from atoll.core.device import ASYNCHRONOUS, compute_dtype, dtype_name, upload
from atoll.core.manifests import ExpertContent, NetworkContent
from atoll.experts.expert import DeviceOptions, OpenExpert
from atoll.experts.expert_cache import ExpertCache
from atoll.experts.run import expert_of_run
from atoll.experts.validation import ALONE, Processes, condition_of, time_weight, validate
from atoll.train.inputs import TrainingInputs
from atoll.train.spec import teachers
from atoll.train.tasks import Forward, Losses, Task, as_expert

TEACHER_BATCH = 64
"""Images of one forward pass of a teacher: the order of magnitude of a training batch, but without gradients."""
TEACHERS = 1
"""Teachers in memory beside the student, whose training needs most of it. A block opens each of them once, so more of
them would save little time: the cache reads the next teacher ahead."""


@dataclass
class _Targets:
    """The targets of the consecutive positions of a block: for each size, those of its positions (rows, C, H, W)."""

    first: int = -1
    """The first position of the block."""
    owner: "np.ndarray[Any, Any]" = field(default_factory=lambda: np.empty(0, np.int64))
    """Index of the size of each position (B,)."""
    row: "np.ndarray[Any, Any]" = field(default_factory=lambda: np.empty(0, np.int64))
    """Row of each position among those of its size (B,)."""
    by_size: list[Tensor] = field(default_factory=list)

    def of(self, index: int) -> Tensor:
        """Return the target (C, H, W) of one position of the block."""
        return self.by_size[int(self.owner[index])][int(self.row[index])]


@dataclass(frozen=True)
class StudentTask(Task):
    """A dense network that is trained on the velocities of all experts."""

    run: Path
    block: int
    batch_size: int
    micro: int
    """Images of a micro-batch of all processes."""
    _current: list[_Targets] = field(default_factory=lambda: [_Targets()])

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the mean squared error against the teacher's velocity for each image, weighted as in validation.

        The velocity of an x0 teacher is its x0 error divided by t, so without the weight the smallest times, where
        targets are noise, would make up the loss. At the first position of a block it waits for the block's targets.
        """
        noised = inputs.noised
        target = upload(self._targets(inputs.position, len(inputs.index)), noised.input.device)
        output = forward(noised.input, noised.timestep, inputs.condition)[:, : target.shape[1]]
        error = (output.float() - target).square().flatten(1).mean(1)
        return Losses(time_weight(noised.t) * error, noised.t, {})

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
            teacher_dtype=dtype_name(compute_dtype(self.device)),
        )

    def _experts(self) -> range:
        return range(self.shards.content.clusters)

    @cached_property
    def _teachers(self) -> ExpertCache:
        """The teachers by cluster. Their files are verified here, once."""
        references = [expert_of_run(self.run, layout.expert_job(number), verify=True) for number in self._experts()]
        options = DeviceOptions(self.device, compute_dtype(self.device))
        return ExpertCache(references, self.shards.statistics, options, TEACHERS)

    def _targets(self, position: int, count: int) -> Tensor:
        """Return the targets (count, C, H, W) of the positions from `position` on, from one block or several."""
        parts = []
        while count:
            first = position - position % self.block
            if self._current[0].first != first:
                self._current[0] = self._compute_block(first)
            targets, start = self._current[0], position - first
            # The positions have one size, because a batch has. Rows of a size are in the order of positions.
            row, here = int(targets.row[start]), min(count, self.block - start)
            parts.append(targets.by_size[targets.owner[start]][row : row + here])
            position, count = position + here, count - here
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.no_grad()
    def _compute_block(self, first: int) -> _Targets:
        """Compute the targets of a block for this process; the rows of other processes are NaN."""
        # A micro-batch is split evenly: rank r trains on the r-th part of its positions (see `Shards.stream`).
        rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        positions = np.arange(first, first + self.block, dtype=np.uint64)
        mine = positions % self.micro // (self.micro // processes) == rank
        numbers = self.shards.order(positions, self.seed, self.batch_size)
        rows = {
            cluster: np.flatnonzero(mine & (numbers >= images.start) & (numbers < images.stop))
            for cluster, images in self.shards.cluster_ranges().items()
        }
        device = self.device
        queued = device.type in ASYNCHRONOUS
        targets = self._empty_targets(first, numbers, pin=queued)
        order = self._teachers.order([cluster for cluster, own in rows.items() if len(own)])
        for cluster, following in zip(order, [*order[1:], None], strict=True):
            teacher = self._teachers.get(cluster, following).expert
            for indices in self.shards.by_size(numbers[rows[cluster]]).values():
                own = rows[cluster][indices]
                for start in range(0, len(own), TEACHER_BATCH):
                    part = own[start : start + TEACHER_BATCH]
                    velocities = self._teacher_velocities(teacher, positions[part])
                    # The host draws the next batch while the device computes this one, and waits once, at the end.
                    for row, velocity in zip(part.tolist(), velocities, strict=True):
                        targets.of(row).copy_(velocity, non_blocking=queued)
        if queued:
            torch.accelerator.current_stream(device).synchronize()
        return targets

    def _empty_targets(self, first: int, numbers: "np.ndarray[Any, Any]", *, pin: bool) -> _Targets:
        """Return targets of NaN for the images with these numbers, which are at the positions from `first` on."""
        by_size: list[Tensor] = []
        owner, row = np.empty((2, self.block), np.int64)
        channels = self.shards.content.latents.shape[0]
        for size, indices in self.shards.by_size(numbers).items():
            owner[indices], row[indices] = len(by_size), np.arange(len(indices))
            shape = (len(indices), channels, size.height, size.width)
            by_size.append(torch.full(shape, torch.nan, pin_memory=pin))
        return _Targets(first, owner, row, by_size)

    def _teacher_velocities(self, teacher: OpenExpert, positions: "np.ndarray[Any, Any]") -> Tensor:
        """Return a teacher's velocities (batch, C, H, W) for images at some positions, noised as for the student."""
        device, batch = self.device, self.shards.draw(positions, self.seed, batch_size=self.batch_size)
        x0 = self.shards.latents(batch, seed=self.seed, position=positions)
        noised = self.objective.corrupt(x0, seed=self.seed, position=positions)
        condition = condition_of(batch, teacher.conditioning).map(
            lambda part: upload(part.to(teacher.dtype) if part.is_floating_point() else part, device)
        )
        # The precision of a teacher is that of its weights, not that of the student's training (autocast).
        with torch.autocast(device.type, enabled=False):
            return teacher.velocity(upload(noised.input, device), upload(noised.t, device), condition).float()
