"""Training tasks: the data, network and loss of an expert, the router or the dense monolith.

The monolith is an expert of all clusters (K = 1). The student's task is in `distill`. After training, `finish` measures
the network on validation images and calibrates the one number that the training loss does not determine: the prediction
error of an expert's bridge (`calibrated`), or the temperature of a router (`best_temperature`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll import flow
from atoll.core.device import ASYNCHRONOUS, full_float32
from atoll.core.distributed import ALONE, DistContext
from atoll.core.manifests import BridgeSpec, ComputeSpec, Curve, DataSpec, ExpertContent, NetworkContent, RouterContent
from atoll.core.progress import say
from atoll.data.chunks import prefetch
from atoll.data.dataset import Batch, Shards
from atoll.experts.calibration import measure
from atoll.experts.expert import CPU, Declaration, OpenExpert, condition_of
from atoll.experts.run import known_densities
from atoll.experts.validation import IMAGES, Summary, ValidationSet, validate, velocity_errors
from atoll.flow import rng
from atoll.nets import Condition, Router
from atoll.train.spec import TrainSpec, shared_start

CALIBRATION_IMAGES = IMAGES
"""Validation images of all clusters together for calibrating a bridge: one number is fitted, and the outputs for all
images are in memory at once, so more images would cost memory and gain little."""
PREVIEW_CALIBRATION_IMAGES = 64
"""Images for calibrating the bridge of a preview, which is only looked at: cheap, and accurate enough."""
GOLDEN = 0.6180339887498949
"""Fractional part of the golden ratio, for golden-section search."""
CHANCE_MARGIN = 0.05
"""A router whose accuracy on nearly clean images exceeds the share of the largest cluster by less than this is reported
as at chance. Rough choice: above the sampling error of some hundred images, far below a useful accuracy."""


class Losses(NamedTuple):
    """The loss (batch,) of each image, its time (batch,), and further metrics (batch,) by name."""

    loss: Tensor
    t: Tensor
    extra: dict[str, Tensor]
    regularization: Tensor | None = None
    """Added to the loss in training (batch,); None for nothing."""

    @property
    def minimized(self) -> Tensor:
        """What training minimizes, for each image (batch,)."""
        return self.loss if self.regularization is None else self.loss + self.regularization


@dataclass(frozen=True)
class TrainingInputs:
    """One micro-batch, ready for the network."""

    index: Tensor
    """Numbers of the images (B,), for error messages. They stay on the CPU."""
    position: int
    """Position of the first image in the training stream."""
    noised: flow.Noised
    condition: Condition
    cluster: Tensor
    """Cluster of each image (B,), the target of a router."""
    patches: Tensor | None = None
    """Patch features (B, grid, grid, D) to align with; None without alignment."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "TrainingInputs":
        """Apply a function to all tensors that the device needs."""
        noised = flow.Noised(*(function(part) for part in self.noised))
        patches = None if self.patches is None else function(self.patches)
        condition, cluster = self.condition.map(function), function(self.cluster)
        return TrainingInputs(self.index, self.position, noised, condition, cluster, patches)


Forward = Callable[..., Tensor]
"""The network as it is trained: plain, or wrapped for several processes."""


@dataclass(frozen=True)
class Task(ABC):
    """The data, network and loss of one job."""

    spec: TrainSpec
    network: nn.Module
    shards: Shards
    validation: Shards
    auxiliary: nn.Module | None = None
    """A network that is trained besides, without EMA, and not part of the result: the projector of an alignment, or the
    online velocity of a corrector."""

    @property
    def seed(self) -> int:
        return self.spec.settings.seed

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @cached_property
    def objective(self) -> flow.Objective:
        """What the network predicts."""
        return flow.Objective() if self.spec.objective is None else flow.Objective.of(self.spec.objective)

    @property
    def noising(self) -> flow.Objective:
        """How inputs are noised. Routers and students are trained on the linear path, whatever the experts do."""
        return self.objective

    @abstractmethod
    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the losses of a batch. Nothing in it may wait for the device."""

    def inputs(self, batch: Batch, position: int) -> TrainingInputs:
        """Draw latents, noise, times and dropout of a batch on the CPU; its first image is at `position`."""
        x0 = self.shards.latents(batch, seed=self.seed, position=position)
        noised = self.noising.corrupt(x0, seed=self.seed, position=position)
        # A random share of the images gets the null condition, for classifier-free guidance.
        condition, dropout = condition_of(batch, self.spec.conditioning), self.spec.settings.cfg_dropout
        if dropout and self.spec.conditioning:
            u = rng.uniform(len(x0), seed=self.seed, stream=rng.Stream.CONDITION_DROPOUT, first=position)
            condition = condition.drop(u < dropout)
        return TrainingInputs(batch.index, position, noised, condition, batch.cluster, batch.patches)

    def stream(self, start: int, processes: DistContext) -> Iterator[TrainingInputs]:
        """Yield the micro-batches of this process from position `start` on, on its device.

        Latents, times, noise and dropout of an image are functions of (seed, position), so any thread can draw them.
        Drawn on the CPU in the reading threads, they do not depend on the accelerator and cost the training thread no
        time. While a step runs, the inputs of the next one are copied to an accelerator on a side stream.
        """
        settings, device = self.spec.settings, processes.device
        aligned = 0 if self.spec.align is None else self.spec.align.images

        def make(positions: "np.ndarray[Any, Any]") -> TrainingInputs:
            first = int(positions[0])
            batch = self.shards.draw(positions, self.seed, batch_size=settings.batch_size, patches=first < aligned)
            inputs = self.inputs(batch, first)
            return inputs.map(Tensor.pin_memory) if device.type in ASYNCHRONOUS else inputs

        micro_batch = settings.batch_size // settings.grad_accum_steps
        positions = self.shards.positions(micro_batch, start, rank=processes.rank, world_size=processes.size)
        drawn = prefetch(positions, make, settings.workers)
        copied = (inputs.map(lambda part: part.to(device, non_blocking=True)) for inputs in drawn)
        if device.type not in ASYNCHRONOUS:
            yield from copied
            return
        side, main = torch.Stream(device=device), torch.accelerator.current_stream(device)
        with side:
            ahead = next(copied)
        while True:
            ready = ahead
            main.wait_stream(side)  # on the device: the host does not wait
            ready.map(lambda part: part.record_stream(main) or part)  # type: ignore[func-returns-value]
            with side:
                ahead = next(copied)
            yield ready

    def expert(self) -> OpenExpert | None:
        """Return the network as an expert, for previews; None for a router."""
        return None

    @abstractmethod
    def finish(self, compute: ComputeSpec, processes: DistContext = ALONE) -> NetworkContent:
        """Calibrate and validate the network, which has the EMA weights; return the content of its manifest.

        All processes call it with equal networks. Each validates its share, and all get the same metrics.
        """

    def declared(self, compute: ComputeSpec, error: Summary) -> dict[str, Any]:
        """Return the fields that the manifests of all networks have."""
        return {
            **{name: getattr(self.shards.content, name) for name in DataSpec.model_fields},
            "job": self.spec.job,
            "clusters": self.spec.clusters,
            "network": self.spec.network,
            "conditioning": tuple(sorted(self.spec.conditioning)),
            "compute": compute,
            "validation_loss": error.mean,
            "loss_by_time": error.by_time,
        }


@dataclass(frozen=True)
class ExpertTask(Task):
    """Diffusion training on one cluster, or on all clusters for the monolith."""

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the loss of the objective for each image, and its alignment."""
        noised, align, extra = inputs.noised, self.spec.align, dict[str, Tensor]()
        if self.auxiliary is None or align is None or inputs.patches is None:
            output, regularization = forward(noised.input, noised.timestep, inputs.condition), None
        else:
            output, tokens = forward(noised.input, noised.timestep, inputs.condition, tap=align.block)
            extra["alignment"] = self.auxiliary(tokens, inputs.patches, align.token_grid(*noised.input.shape[2:]))
            regularization = align.weight * extra["alignment"]
        # Further channels of the output would be a learned variance, which is not trained.
        loss = self.objective.loss(output[:, : noised.target.shape[1]], noised)
        return Losses(loss, noised.t, extra, regularization)

    def expert(self) -> OpenExpert:
        """Return the network with its bridge, calibrated on a few validation images."""
        # Every process calibrates on all images: a network sharded by FSDP2 must run on all processes together.
        return self.as_expert(self.calibrated(PREVIEW_CALIBRATION_IMAGES))

    def as_expert(self, bridge: flow.Bridge) -> OpenExpert:
        """Return the network as an expert with this bridge, in the normalization of its data."""
        network: Any = self.network
        content = self.shards.content
        declaration = Declaration(
            name=self.spec.job,
            clusters=(content.cluster,),
            network=network.config,
            conditioning=self.spec.conditioning,
            statistics=self.shards.statistics,
            latents=content.latents,
            text=content.text,
            labels=content.labels,
            bridge=bridge,
        )
        return OpenExpert(declaration, network)

    def predict(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """Return the network's prediction (batch, C, H, W), without the channels of a learned variance."""
        output: Tensor = self.network(x, time, condition)
        return output[:, : x.shape[1]]

    @torch.no_grad()
    def calibrated(self, images: int, processes: DistContext = ALONE) -> flow.Bridge:
        """Return the bridge with the `prediction_error` of the smallest velocity error on about `images` images.

        The bridge converts outputs to velocities exactly, except for one number. An epsilon network estimates
        x0 = (z - sigma eps) / alpha, so an error e of its output becomes an error e sigma/alpha of x0, which grows
        without bound near t = 1. The bridge shrinks such an x0 towards the mean of the data by the Wiener factor
        1 / (1 + (e sigma/alpha / data_std)²). The right e is the RMS error of the network, which only data can show.
        The error of x0 is bounded for every other prediction, so their bridges are exact and need no such number.

        The outputs (rows, C, H, W) do not depend on e, so they are computed once and kept, and a search over log e
        needs no further forward passes. Each process keeps the outputs of its share. The errors (rows,) are gathered in
        every step of the search, so all processes take the same steps and find the same number.
        """
        bridge = self.objective.bridge(**self.shards.statistics.bridge_options)
        clusters = max(1, len(self.validation.cluster_ranges()))
        validation = ValidationSet(self.validation, self.seed, max(1, images // clusters))
        if bridge.prediction not in ("epsilon", "score") or not len(validation):
            return bridge
        outputs = []
        for part in validation.batches(self.device, processes):
            query = bridge.query(part.noised.input, part.noised.t)
            condition = condition_of(part.batch, self.spec.conditioning)
            outputs.append((part, self.predict(query.state, query.timestep, condition)))

        def error(prediction_error: float) -> float:
            candidate = replace(bridge, prediction_error=prediction_error)
            errors = []
            for part, output in outputs:
                velocity = candidate.velocity(output, part.noised.input, part.noised.t)
                errors.append((part, velocity_errors(velocity, part.noised.target, part.noised.t)))
            return validation.gather(errors, processes).mean().item()

        # From a negligible error to twice the standard deviation of the noise; 20 steps find it to 0.1 %.
        best = math.exp(minimize(lambda log_error: error(math.exp(log_error)), math.log(1e-4), math.log(2.0), steps=20))
        return replace(bridge, prediction_error=best) if error(best) < error(0.0) else bridge

    @torch.no_grad()
    @full_float32()
    def finish(self, compute: ComputeSpec, processes: DistContext = ALONE) -> ExpertContent:
        """Calibrate the bridge, then measure the validation error of the velocity."""
        bridge = self.calibrated(CALIBRATION_IMAGES, processes)
        error = self.validated(bridge, processes)
        return ExpertContent(
            **self.declared(compute, error),
            objective=self.objective.spec,
            bridge=BridgeSpec(prediction_error=bridge.prediction_error),
            start=shared_start(self.spec.run) if self.spec.from_start else None,
            calibration=self.calibration() if self.spec.kind == "expert" else None,
        )

    def calibration(self) -> Curve | None:
        """Return the expert's vote on the temperature of `nearest` routing, if this machine has other densities."""
        found = known_densities(self.spec.run)
        (own,), rows = self.spec.clusters, ValidationSet(self.validation, self.seed)
        if own not in found or len(found) < 2 or not len(rows):
            return None
        kinds = frozenset({"pooled", "label"})
        parts = ((part.noised.input, part.noised.t, condition_of(part.batch, kinds)) for part in rows.batches(CPU))
        return measure(list(found.values()), list(found).index(own), parts)

    def validated(self, bridge: flow.Bridge, processes: DistContext) -> Summary:
        """Return the validation error of the velocity."""
        return validate(
            self.as_expert(bridge).velocity,
            self.validation,
            seed=self.seed,
            conditioning=self.spec.conditioning,
            device=self.device,
            processes=processes,
        )


@dataclass(frozen=True)
class RouterTask(Task):
    """Classification of the cluster of a noisy image, on the linear path at all times (DDM's router)."""

    # Conditions are dropped as for experts: under guidance the router also needs p(k | x) of the null condition.

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the cross-entropy of the clusters for each image."""
        noised = inputs.noised
        logits = forward(noised.input, noised.timestep, inputs.condition).float()
        correct = (logits.argmax(1) == inputs.cluster).float()
        loss = functional.cross_entropy(logits, inputs.cluster, reduction="none")
        return Losses(loss, noised.t, {"accuracy": correct})

    @torch.no_grad()
    @full_float32()
    def finish(self, compute: ComputeSpec, processes: DistContext = ALONE) -> RouterContent:
        """Calibrate the temperature on validation images, then measure loss and accuracy.

        For comparison the manifest also has the entropy of the cluster prior, which is the best possible loss at t = 1,
        and the accuracy of always predicting the largest cluster.
        """
        router, counts = self.network, self.shards.cluster_sizes()
        assert isinstance(router, Router)
        shares = [count / sum(counts) for count in counts]
        prior = {"cluster_sizes": tuple(counts), "prior_entropy": -sum(p * math.log(p) for p in shares if p)}
        if not len(self.validation):
            router.temperature.fill_(1.0)
            return RouterContent(**self.declared(compute, Summary(None)), **prior, temperature=1.0)
        logits, clusters, t = self._validation_logits(router, processes)
        temperature = best_temperature(logits, clusters)
        router.temperature.fill_(temperature)
        loss = functional.cross_entropy(logits / temperature, clusters, reduction="none")
        accuracy = Summary.of((logits.argmax(1) == clusters).float(), t)
        sizes = torch.tensor(counts, dtype=torch.float32)
        chance = (sizes.max() / sizes.sum()).item()
        assert accuracy.by_time is not None
        clean = accuracy.by_time[0]  # t < 0.1
        at_chance = clean is not None and clean < chance + CHANCE_MARGIN
        if at_chance and processes.rank == 0:
            say(
                f"warning: the router is at chance even on clean images (accuracy {clean:.3f}, largest cluster "
                f"{chance:.3f}): the clusters cannot be recognized from the images, or training was too short",
            )
        return RouterContent(
            **self.declared(compute, Summary.of(loss, t)),
            **prior,
            temperature=temperature,
            validation_accuracy=accuracy.mean,
            accuracy_by_time=accuracy.by_time,
            chance_accuracy=chance,
            at_chance=at_chance,
        )

    def _validation_logits(self, router: Router, processes: DistContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (rows, experts), clusters (rows,) and times (rows,) of the validation images, on the CPU."""
        router.temperature.fill_(1.0)
        validation, mine = ValidationSet(self.validation, self.seed), []
        for part in validation.batches(self.device, processes):
            noised, condition = part.noised, condition_of(part.batch, self.spec.conditioning)
            logits = router.logits(noised.input, noised.timestep, condition)
            columns = (logits, part.batch.cluster[:, None], noised.t[:, None])
            mine.append((part, torch.cat([column.cpu().double() for column in columns], 1)))
        # A float64 represents float32 logits and times and cluster numbers exactly, so one sum gathers all three.
        rows = validation.gather(mine, processes, shape=(router.config.experts + 2,))
        return rows[:, :-2].float(), rows[:, -2].long(), rows[:, -1].float()


def best_temperature(logits: Tensor, clusters: Tensor) -> float:
    """Return the temperature with the smallest cross-entropy of logits / temperature (rows, experts)."""
    # Cross-entropy is convex in 1/temperature, so it has one minimum. 0.05 to 20 is far wider than any sensible result.

    def loss(log_temperature: float) -> float:
        return functional.cross_entropy(logits / math.exp(log_temperature), clusters).item()

    return math.exp(minimize(loss, math.log(0.05), math.log(20.0)))


def minimize(function: Callable[[float], float], low: float, high: float, *, steps: int = 40) -> float:
    """Return the minimizer of a function with one minimum, by golden-section search.

    Every step shrinks the interval by 0.618 with one evaluation; 40 steps leave 4e-9 of it.
    """
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2
