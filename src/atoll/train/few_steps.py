"""Few-step students: a network learns steps of its teacher's flow from noise alone (FreeFlow's predictor).

Equations and reasons are in `atoll.flow.flow_map`. The teacher is the expert of the image's cluster, with its bridge
and with guidance. The shards give captions and labels, and the shapes of latents; the latents are not used. With S
steps and a batch of B images:

    noise (B, C, H, W)  ── i student steps ──>  x_i   states of the i-th step, i = position mod S for each image
    F = student(x_i, t_i, d)                          with d uniform in (0, 1/S], the one pass with gradients
    target (B, C, H, W)                               two passes for dF/dd, one of the teacher where F arrives

With `student.corrector`, a share of the images makes the last step in full, to a sample. Its target is F minus the
correction: the difference of the velocities of noised samples and of the teacher. The online network that learns the
former begins as the student does. FreeFlow has one step; correcting the last one of several is ours, and so is that
guidance has no interval of its own here.

A student of one expert needs that expert alone. A student of all clusters keeps all teachers in memory: their states
depend on the student, so targets cannot be computed ahead of its training.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll import flow
from atoll.core import layout
from atoll.core.device import compute_dtype, full_float32, upload
from atoll.core.distributed import ALONE, DistContext
from atoll.core.errors import AtollError
from atoll.core.manifests import ComputeSpec, ExpertContent
from atoll.data.dataset import Batch
from atoll.ensemble import Ensemble
from atoll.experts.expert import DeviceOptions, OpenExpert, condition_of
from atoll.experts.run import expert_of_run
from atoll.experts.validation import Summary, time_weight
from atoll.flow import rng
from atoll.flow.flow_map import correction, step_targets
from atoll.flow.schedules import LINEAR
from atoll.nets import Condition
from atoll.train.distill import StudentTask
from atoll.train.tasks import Forward, Losses, TrainingInputs

VALIDATION_IMAGES = 256
"""Images of the validation: distances of images of equal noise have a small variance, so a few hundred suffice."""
TEACHER_STEPS = 50
"""Euler steps of the teacher in the validation: those of sampling."""
CORRECTOR_TIME = 0.8
"""Mean of the logit of a corrected sample's time. FreeFlow prefers high noise in this way; its standard deviation of 1
is the usual one, and not known of FreeFlow."""
FLOOR = 1e-3
"""Added to the squared error by which a prediction is divided beside a corrector: far below the errors that matter."""


@dataclass(frozen=True)
class FewStepTask(StudentTask):
    """A student that samples in few steps."""

    @cached_property
    def teacher(self) -> Ensemble:
        """The teachers. Their files are verified here, once."""
        jobs = [layout.expert_job(number) for number in self.spec.clusters]
        references = [expert_of_run(self.spec.run, job, verify=True) for job in jobs]
        options = DeviceOptions(self.device, compute_dtype(self.device))
        return Ensemble(references, device_options=options, routing="oracle")

    def inputs(self, batch: Batch, position: int) -> TrainingInputs:
        """Draw noise and dropout of a batch; `noised.input` is pure noise."""
        inputs = super().inputs(batch, position)
        noise = rng.normal(tuple(batch.mean.shape), seed=self.seed, stream=rng.Stream.STUDENT_NOISE, first=position)
        ones = torch.ones(len(noise))
        noised = flow.Noised(noise, LINEAR.timestep(ones), noise, ones, ones)
        return TrainingInputs(inputs.index, position, noised, inputs.condition, inputs.cluster)

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the mean squared error against the target for each image, weighted as in validation.

        The error of an x0 teacher's velocity grows as 1/t at the end of the last step, as that of `StudentTask`.

        Beside a corrector, predictions are divided by their squared error, as in FreeFlow: else errors on which both
        disagree dominate. Corrections are scaled so that both have gradients of the same mean norm in a batch. FreeFlow
        has a factor between these norms, of little influence from 0.3 to 3; here it is 1.
        """
        steps, count, device = self.spec.few_steps, len(inputs.index), self.device
        # Times and clusters stay on the CPU, where they are known: reading them from the device would wait for it.
        step = torch.arange(inputs.position, inputs.position + count) % steps
        u = rng.uniform(count, seed=self.seed, stream=rng.Stream.STUDENT_LENGTH, first=inputs.position)
        corrected = self._corrected(inputs.position, count)
        step, u = torch.where(corrected, steps - 1, step), torch.where(corrected, 0, u)
        t, d = 1 - step / steps, (1 - u) / steps

        def average(x: Tensor, t: Tensor, d: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
            times, lengths = upload(t, device), upload(d, device)
            condition, cluster = inputs.condition[rows], inputs.cluster[rows]
            return self.velocity(self.network, x, times, condition=condition, cluster=cluster, length=lengths)

        x = inputs.noised.input
        with torch.no_grad():
            for done in range(steps - 1):
                rows = torch.nonzero(step > done).flatten()
                there = upload(rows, device)
                start, length = torch.full((len(rows),), 1 - done / steps), torch.full((len(rows),), 1 / steps)
                x = x.index_add(0, there, average(x[there], start, length, there), alpha=-1 / steps)
        times, lengths = upload(t, device), upload(d, device)
        output = self.velocity(forward, x, times, condition=inputs.condition, cluster=inputs.cluster, length=lengths)
        clusters, end = self._clusters(inputs.index), upload(t - d, device)

        # Predictions
        own = torch.nonzero(~corrected).flatten()
        rows = upload(own, device)
        # A difference of two values in bfloat16 would be mostly rounding error.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            velocity = self.teacher_velocity(inputs.condition[rows], clusters[own])
            known = partial(average, rows=rows)
            target = step_targets(
                velocity, known, x[rows], t[own], d[own], longest=1 / steps, at_d=output[rows].detach()
            )
        error, weight = (output[rows] - target).square().flatten(1).mean(1), time_weight(end[rows])
        if not corrected.any():
            return Losses(weight * error, end, {})

        # Corrections
        weight = weight / (error.detach() + FLOOR)
        last = torch.nonzero(corrected).flatten()
        others = upload(last, device)
        condition, cluster = inputs.condition[others], inputs.cluster[others]

        def online(x: Tensor, r: Tensor) -> Tensor:
            assert self.auxiliary is not None
            return self.velocity(self.auxiliary, x, upload(r, device), condition=condition, cluster=cluster)

        first, shape = inputs.position + last.numpy(), (len(last), *x.shape[1:])
        noise = rng.normal(shape, seed=self.seed, stream=rng.Stream.CORRECTOR_NOISE, first=first)
        logit = rng.normal((len(last), 1), seed=self.seed, stream=rng.Stream.CORRECTOR_TIME, first=first)[:, 0]
        r = torch.sigmoid(CORRECTOR_TIME + logit)
        sample, velocity = x[others] - output[others].detach() / steps, self.teacher_velocity(condition, clusters[last])
        difference, regularization = correction(velocity, online, sample, r, upload(noise, device))
        size = difference.square().flatten(1).mean(1).sqrt().mean()
        difference *= (weight * error.detach().sqrt()).mean() / (size + FLOOR)
        change = (output[others] - output[others].detach() + difference).square().flatten(1).mean(1)

        # In the order of the batch
        order = torch.argsort(torch.cat([own, last]))
        back = upload(order, device)
        added = torch.cat([torch.zeros_like(error), regularization])[back]
        return Losses(torch.cat([weight * error, change])[back], end, {}, added)

    def _corrected(self, position: int, count: int) -> Tensor:
        """Return whether images (batch,) are corrected: groups of as many as there are steps, evenly spread."""
        assert self.spec.student is not None
        group = torch.arange(position, position + count, dtype=torch.double) // self.spec.few_steps
        share = self.spec.student.corrector
        found = ((group + 1) * share).floor() > (group * share).floor()
        if share and not 0 < found.sum() < count:
            raise AtollError(
                f"student.corrector {share:g} with {self.spec.few_steps} steps needs more than {count} images of a "
                "process at a time"
            )
        return found

    def teacher_velocity(self, condition: Condition, cluster: Tensor) -> flow.solvers.VelocityField:
        """Return the guided velocity field of each image's teacher; the clusters (batch,) are on the CPU."""
        assert self.spec.student is not None
        scale, dtype = self.spec.student.guidance_scale, self.teacher.device_options.dtype
        described = condition.map(lambda part: part.to(dtype) if part.is_floating_point() else part)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                return self.teacher.velocity(x, t, described, guidance_scale=scale, cluster=cluster).float()

        return velocity

    def expert(self) -> OpenExpert | None:  # type: ignore[override]
        """Return None: previews and validations during training evaluate velocities at any time."""
        return None

    @torch.no_grad()
    @full_float32()
    def finish(self, compute: ComputeSpec, processes: DistContext = ALONE) -> ExpertContent:
        """Measure the mean squared distance of the student's latents from those of its teacher with the same noise.

        Every process measures all of them: it costs little beside training.
        """
        del processes
        error, steps = Summary(None), self.spec.few_steps
        if len(self.validation):
            size, count = next(iter(self.validation.image_counts().items()))
            places = np.linspace(0, count - 1, min(count, VALIDATION_IMAGES)).round()
            distances = list[Tensor]()
            for numbers in np.array_split(self.validation.numbers(size, places), -(-len(places) // 64)):
                batch = self.validation.read(numbers)
                first = len(distances) * 64
                noise = rng.normal(
                    tuple(batch.mean.shape), seed=self.seed, stream=rng.Stream.STUDENT_VALIDATION, first=first
                )
                distances.append(self._distance(noise.to(self.device), batch.to(self.device), batch.cluster))
            error = Summary(torch.cat(distances).mean().item())
        return ExpertContent(
            **self.declared(compute, error),
            **self.made_by(),
            objective=self.objective.spec,
            steps=steps,
        )

    def _distance(self, noise: Tensor, batch: Batch, clusters: Tensor) -> Tensor:
        """Return the squared distance of the two latents of each image (batch,); the clusters are on the CPU."""
        condition, steps = condition_of(batch, self.spec.conditioning), self.spec.few_steps
        length = noise.new_full((1,), 1 / steps)

        def student(x: Tensor, t: Tensor) -> Tensor:
            t, cluster = upload(t, x.device), batch.cluster
            return self.velocity(self.network, x, t, condition=condition, cluster=cluster, length=length)

        ours = flow.solve(student, noise, steps=steps)
        theirs = flow.solve(self.teacher_velocity(condition, clusters), noise, steps=TEACHER_STEPS)
        return (ours - theirs).square().flatten(1).mean(1).cpu()

    def _clusters(self, index: Tensor) -> Tensor:
        """Return the clusters (batch,) of images by their numbers, on the CPU."""
        ranges: dict[int, Any] = self.shards.cluster_ranges()
        starts = torch.tensor([own.start for own in ranges.values()])
        return torch.tensor(list(ranges))[torch.searchsorted(starts, index, right=True) - 1]
