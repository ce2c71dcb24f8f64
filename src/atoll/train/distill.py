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
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from atoll import flow
from atoll.core import layout
from atoll.core.device import ASYNCHRONOUS, compute_dtype, dtype_name, upload
from atoll.core.distributed import ALONE, DistContext
from atoll.core.manifests import ComputeSpec, ExpertContent
from atoll.experts.expert import DeviceOptions, OpenExpert, condition_of
from atoll.experts.expert_cache import ExpertCache
from atoll.experts.run import expert_of_run
from atoll.experts.validation import Summary, time_weight, validate
from atoll.nets import Condition
from atoll.train.spec import teachers
from atoll.train.tasks import ExpertTask, Forward, Losses, TrainingInputs

TEACHER_BATCH = 64
"""Images of one forward pass of a teacher: the order of magnitude of a training batch, but without gradients."""
TEACHERS = 1
"""Teachers in memory beside the student, whose training needs most of it. A block opens each of them once, so more of
them would save little time: the cache reads the next teacher ahead."""


@dataclass(frozen=True)
class _Targets:
    """The targets of a block's positions: for each size of images, one tensor (rows, C, H, W)."""

    by_size: list[Tensor]
    owner: "np.ndarray[Any, Any]"
    """Index of the size of each position (B,)."""
    row: "np.ndarray[Any, Any]"
    """Row of each position among the positions of its size (B,)."""


@dataclass(frozen=True)
class StudentTask(ExpertTask):
    """A dense network that is trained on the velocities of all experts: a flow-matching expert of all clusters."""

    _blocks: dict[int, _Targets] = field(default_factory=dict)
    """The targets of the current block, by its first position."""

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the mean squared error against the teacher's velocity for each image, weighted as in validation.

        The velocity of an x0 teacher is its x0 error divided by t, so without the weight the smallest times, where
        targets are noise, would make up the loss. At the first position of a block it waits for the block's targets.
        """
        x, t = inputs.noised.input, inputs.noised.t
        target = upload(self._targets(inputs.position, len(inputs.index)), x.device)
        velocity = self.velocity(forward, x, t, condition=inputs.condition, cluster=inputs.cluster)
        return Losses(time_weight(t) * (velocity - target).square().flatten(1).mean(1), t, {})

    def velocity(
        self, network: Forward, x: Tensor, t: Tensor, *, condition: Condition, cluster: Tensor, **told: Tensor
    ) -> Tensor:
        """Return the student's velocity (batch, C, H, W), in float32."""
        query, told = self.bridge.query(x, t), told | ({"cluster": cluster} if self.spec.told_clusters else {})
        output = network(query.state, query.timestep, condition, **told)[:, : x.shape[1]]
        return self.bridge.velocity(output.float(), x, t)

    def expert(self) -> OpenExpert | None:  # type: ignore[override]
        """Return the network as an expert, for previews; None if it is told the cluster, which previews do not know."""
        return None if self.spec.told_clusters else super().expert()

    def validated(self, bridge: flow.Bridge, processes: DistContext) -> Summary:
        """Return the validation error of the velocity; a student that is told the cluster is told that of the image."""
        if not self.spec.told_clusters:
            return super().validated(bridge, processes)
        return validate(
            partial(self.velocity, self.network),
            self.validation,
            seed=self.seed,
            conditioning=self.spec.conditioning,
            device=self.device,
            processes=processes,
            told=True,
        )

    def finish(self, compute: ComputeSpec, processes: DistContext = ALONE) -> ExpertContent:
        """Measure the validation error against eps - x0 of the data, as for any expert; name the teachers."""
        return super().finish(compute, processes).model_copy(update=self.made_by())

    def made_by(self) -> dict[str, Any]:
        """Return the fields that the manifests of all students have."""
        precision = dtype_name(compute_dtype(self.device))
        return {"teachers": tuple(teachers(self.spec.run, self.spec.clusters)), "teacher_dtype": precision}

    @cached_property
    def _teachers(self) -> ExpertCache:
        """The teachers by cluster. Their files are verified here, once."""
        jobs = [layout.expert_job(number) for number in self.spec.clusters]
        references = [expert_of_run(self.spec.run, job, verify=True) for job in jobs]
        options = DeviceOptions(self.device, compute_dtype(self.device))
        return ExpertCache(references, self.shards.statistics, options, TEACHERS)

    @property
    def noising(self) -> flow.Objective:
        """The linear path."""
        return flow.Objective()

    @cached_property
    def bridge(self) -> flow.Bridge:
        """The conversion of what the student predicts to a velocity."""
        return self.objective.bridge(**self.shards.statistics.bridge_options)

    @property
    def _block(self) -> int:
        assert self.spec.student is not None
        return self.spec.student.block

    def _targets(self, position: int, count: int) -> Tensor:
        """Return the targets (count, C, H, W) of the positions from `position` on, from one block or several."""
        parts, block = [], self._block
        while count:
            start = position % block
            if position - start not in self._blocks:
                self._blocks.clear()
                self._blocks[position - start] = self._compute_block(position - start)
            targets = self._blocks[position - start]
            # The positions have one size, because a batch has. Rows of a size are in the order of positions.
            row, here = int(targets.row[start]), min(count, block - start)
            parts.append(targets.by_size[targets.owner[start]][row : row + here])
            position, count = position + here, count - here
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.no_grad()
    def _compute_block(self, first: int) -> _Targets:
        """Compute the targets of a block for this process; the rows of other processes are NaN."""
        shards, settings, device = self.shards, self.spec.settings, self.device
        queued = device.type in ASYNCHRONOUS
        positions = np.arange(first, first + self._block, dtype=np.uint64)
        numbers = shards.order(positions, self.seed, settings.batch_size)

        # Targets of NaN
        owner, row = np.empty((2, len(positions)), np.int64)
        targets = _Targets([], owner, row)
        for size, indices in shards.by_size(numbers).items():
            owner[indices], row[indices] = len(targets.by_size), np.arange(len(indices))
            shape = (len(indices), shards.content.latents.shape[0], size.height, size.width)
            targets.by_size.append(torch.full(shape, torch.nan, pin_memory=queued))

        # The rows of this process by cluster. A micro-batch is split evenly: rank r trains on the r-th part of its
        # positions (see `Shards.positions`).
        rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        micro_batch = settings.batch_size // settings.grad_accum_steps
        mine = positions % micro_batch // (micro_batch // processes) == rank
        rows = {
            cluster: np.flatnonzero(mine & (numbers >= images.start) & (numbers < images.stop))
            for cluster, images in shards.cluster_ranges().items()
        }

        # One teacher after the other
        order = self._teachers.order([cluster for cluster, own in rows.items() if len(own)])
        for cluster, following in zip(order, [*order[1:], None], strict=True):
            teacher = self._teachers.get(cluster, following).expert
            for indices in shards.by_size(numbers[rows[cluster]]).values():
                for part in np.split(rows[cluster][indices], range(TEACHER_BATCH, len(indices), TEACHER_BATCH)):
                    velocities = self._teacher_velocities(teacher, positions[part])
                    # The host draws the next batch while the device computes this one, and waits once, at the end.
                    for index, velocity in zip(part, velocities, strict=True):
                        targets.by_size[owner[index]][row[index]].copy_(velocity, non_blocking=queued)
        if queued:
            torch.accelerator.current_stream(device).synchronize()
        return targets

    def _teacher_velocities(self, teacher: OpenExpert, positions: "np.ndarray[Any, Any]") -> Tensor:
        """Return a teacher's velocities (batch, C, H, W) for images at some positions, noised as for the student."""
        device, batch = self.device, self.shards.draw(positions, self.seed, batch_size=self.spec.settings.batch_size)
        x0 = self.shards.latents(batch, seed=self.seed, position=positions)
        noised = self.noising.corrupt(x0, seed=self.seed, position=positions)
        condition = condition_of(batch, teacher.conditioning).map(
            lambda part: upload(part.to(teacher.dtype) if part.is_floating_point() else part, device)
        )
        # A teacher computes in the precision of its weights, not in the student's (autocast).
        with torch.autocast(device.type, enabled=False):
            return teacher.velocity(upload(noised.input, device), upload(noised.t, device), condition).float()
