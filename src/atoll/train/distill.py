"""Distillation: a dense student regresses the velocity of the expert of each sample's own cluster (DDM section 3.4).

No router is needed: the teacher is chosen by the cluster label, and its answer carried over the bridge into velocity.
Targets are computed for a block of images at a time, expert after expert, so one teacher is in memory at once. A block
is fixed by its position in the run, so a job that resumes in the middle of it computes the same targets again.
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
from atoll.core.manifests import ExpertContent, NetworkContent
from atoll.data.dataset import Batch
from atoll.experts.expert import DeviceOptions, OpenExpert, open_expert
from atoll.experts.run import expert_of_run
from atoll.experts.validation import ALONE, Processes, condition_of, validate
from atoll.train.spec import teachers
from atoll.train.tasks import Forward, Losses, Task, as_expert, drop_condition, on_linear_path

TEACHER_BATCH = 64


@dataclass
class _Block:
    """The teachers' answers for some consecutive images of the run."""

    first: int = -1
    targets: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class StudentTask(Task):
    """A dense network that learns from all experts."""

    conditioning: frozenset[str]
    dropout: float
    run: Path
    block: int
    micro: int
    _current: _Block = field(default_factory=_Block)

    def losses(self, forward: Forward, batch: Batch, position: int) -> Losses:
        """Mean squared distance to the teacher's velocity."""
        x0 = self.latents(batch, position)
        noised = on_linear_path(x0, self.seed, position)
        target = self._targets(position, len(x0)).to(x0.device)
        condition = condition_of(batch, self.conditioning)
        condition = drop_condition(condition, self.dropout, len(x0), seed=self.seed, position=position)
        output = forward(noised.input, noised.timestep, condition)[:, : x0.shape[1]]
        return Losses((output.float() - target).square().flatten(1).mean(1), noised.t, {})

    def expert(self) -> OpenExpert:
        """Return the network, which predicts the velocity."""
        return as_expert(self, self.conditioning, flow.Objective().bridge())

    @torch.no_grad()
    def finish(self, content: NetworkContent, processes: Processes = ALONE) -> ExpertContent:
        """Measure the held-out error against the data, as for any expert. A student is a flow-matching expert."""
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
        """Targets of the images from `position` on."""
        parts = []
        while count:
            first = position - position % self.block
            if self._current.first != first:
                self._current.targets = self._compute_block(first)
                self._current.first = first
            part = self._current.targets[position - first : position - first + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return torch.cat(parts)

    @torch.inference_mode()
    def _compute_block(self, first: int) -> Tensor:
        """The teachers' velocities of this process's images of a block, with one teacher in memory at a time."""
        rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        whose = (first + torch.arange(self.block)) % self.micro // (self.micro // processes)
        numbers = self.shards.order(np.arange(first, first + self.block, dtype=np.uint64), self.seed)
        clusters = self.shards.read(numbers).cluster
        targets = torch.full((self.block, *self.shards.content.latents.shape), torch.nan)
        device = next(self.network.parameters()).device
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
        """One teacher's velocities for scattered images of a block, each noised as the student will see it."""
        inputs, times = [], []
        batch = self.shards.read(numbers[rows.numpy()]).to(device)
        for row, sample in zip(rows.tolist(), _single(batch), strict=True):
            noised = on_linear_path(self.latents(sample, first + row), self.seed, first + row)
            inputs.append(noised.input)
            times.append(noised.t)
        with torch.autocast(device.type, enabled=False):  # its bridge was calibrated in full precision
            answer = teacher.velocity(torch.cat(inputs), torch.cat(times), condition_of(batch, teacher.conditioning))
        return answer.float().cpu()


def _single(batch: Batch) -> Iterator[Batch]:
    """The images of a batch one by one."""
    for i in range(len(batch.index)):
        yield Batch(
            *(part[i : i + 1] for part in (batch.index, batch.cluster, batch.label, batch.mean)),
            *(None if part is None else part[i : i + 1] for part in (batch.std, batch.text, batch.mask, batch.pooled)),
        )
