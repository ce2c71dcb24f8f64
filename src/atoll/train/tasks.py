"""Training tasks: the data, network and loss of an expert, the router or the dense monolith.

The monolith is an expert of all clusters (K = 1). The student's task is in `distill`. After training, `finish` measures
the network on held-out images and calibrates the one number that the training loss does not determine: the prediction
error of an expert's bridge (`calibrate`), or the temperature of a router (`best_temperature`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll import flow
from atoll.core.device import full_float32
from atoll.core.manifests import BridgeSpec, ExpertContent, NetworkContent, RouterContent
from atoll.data.chunks import prefetch
from atoll.data.dataset import Batch, Shards
from atoll.experts.expert import Declaration, OpenExpert
from atoll.experts.validation import (
    ALONE,
    IMAGES,
    Processes,
    Summary,
    ValidationSet,
    condition_of,
    validate,
    velocity_errors,
)
from atoll.flow import rng
from atoll.nets import Condition, Router
from atoll.train.align import Projector
from atoll.train.inputs import TrainingInputs

DROP_STREAM = 12
"""Random stream of condition dropout. Stream numbers are arbitrary; changing one changes every trained weight."""
CALIBRATION_IMAGES = IMAGES
"""Held-out images of all clusters together for calibrating a bridge: one number is fitted, and the outputs for all
images are in memory at once, so more images would cost memory and gain little."""
PREVIEW_CALIBRATION_IMAGES = 64
"""Images for calibrating the bridge of a preview, which is only looked at: cheap, and accurate enough."""
CHANCE_MARGIN = 0.05
"""A router whose accuracy on nearly clean images exceeds that of the largest cluster by less than this is reported as
at chance. An order of magnitude: above the sampling error of some hundred images, far below a useful accuracy."""


class Losses(NamedTuple):
    """The loss (batch,) of each image, its time (batch,), and further metrics (batch,) by name."""

    loss: Tensor
    t: Tensor
    extra: dict[str, Tensor]
    regularization: Tensor | None = None
    """What is added to the loss in training (batch,); None for nothing."""

    @property
    def minimized(self) -> Tensor:
        """What training minimizes, for each image (batch,)."""
        return self.loss if self.regularization is None else self.loss + self.regularization


Forward = Callable[..., Tensor]
"""The network as it is trained: plain, or wrapped for several processes."""


@dataclass(frozen=True)
class Task(ABC):
    """The data, network and loss of one job."""

    name: str
    network: nn.Module
    shards: Shards
    held_out: Shards
    seed: int
    objective: flow.Objective
    """How inputs are noised. Routers and students are trained on the linear path, whatever the experts' objectives."""
    conditioning: frozenset[str]
    dropout: float

    @abstractmethod
    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the losses of a batch. Nothing in it may wait for the device."""

    def inputs(self, batch: Batch, position: int) -> TrainingInputs:
        """Draw latents, noise, times and dropout of a batch on the CPU; `position` is that of its first image."""
        x0 = self.shards.latents(batch, seed=self.seed, position=position)
        noised = self.objective.corrupt(x0, seed=self.seed, position=position)
        condition = condition_of(batch, self.conditioning)
        condition = drop_condition(condition, self.dropout, len(x0), seed=self.seed, position=position)
        # The loss needs no eps, so it is not copied to the device.
        noised = noised._replace(eps=noised.eps[:0])
        return TrainingInputs(batch.index, position, noised, condition, batch.cluster, batch.patches)

    def stream(
        self, batch_size: int, start: int, *, parts: int = 1, rank: int, world_size: int, workers: int, pin: bool
    ) -> Iterator[TrainingInputs]:
        """Yield the inputs of this rank from position `start` on, made by `workers` threads ahead of the consumer.

        A batch of `batch_size` images is divided into `parts` micro-batches.
        """

        def make(positions: "np.ndarray[Any, Any]") -> TrainingInputs:
            first = int(positions[0])
            batch = self.shards.draw(positions, self.seed, batch_size=batch_size, patches=first < self.burn_in)
            inputs = self.inputs(batch, first)
            return inputs.pin() if pin else inputs

        positions = self.shards.positions(batch_size // parts, start, rank=rank, world_size=world_size)
        return prefetch(positions, make, workers)

    def expert(self) -> OpenExpert | None:
        """Return the network as an expert, for previews; None for a router."""
        return None

    @property
    def auxiliary(self) -> nn.Module | None:
        """A network that is trained with this one, without EMA, and is not part of the result; None for none."""
        return None

    @property
    def burn_in(self) -> int:
        """Images at the start of training that have further losses: those of the auxiliary network."""
        return 0

    @abstractmethod
    def finish(self, content: NetworkContent, processes: Processes = ALONE) -> NetworkContent:
        """Calibrate the network, which has the EMA weights, and add its held-out metrics to `content`.

        All processes call it with equal networks. Each validates its share, and all get the same metrics.
        """

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device


def as_expert(task: Task, conditioning: frozenset[str], bridge: flow.Bridge) -> OpenExpert:
    """Return a task's network as an expert, in the normalization of its data."""
    network: Any = task.network
    content = task.shards.content
    declaration = Declaration(
        name=task.name,
        clusters=(content.cluster,),
        network=network.config,
        conditioning=conditioning,
        statistics=task.shards.statistics,
        latents=content.latents,
        text=content.text,
        labels=content.labels,
        bridge=bridge,
    )
    return OpenExpert(declaration, network)


def drop_condition(condition: Condition, probability: float, count: int, *, seed: int, position: int) -> Condition:
    """Replace the condition of a random share of the images by the null condition, for classifier-free guidance."""
    given = next((part for part in (condition.text, condition.pooled, condition.label) if part is not None), None)
    if not probability or given is None:
        return condition
    u = rng.uniform(count, seed=seed, stream=DROP_STREAM, first=position)
    return condition.drop((u < probability).to(given.device))


@dataclass(frozen=True)
class ExpertTask(Task):
    """Diffusion training on one cluster, or on all clusters for the monolith."""

    alignment: Projector | None = None

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Return the loss of the objective for each image, and its alignment."""
        noised = inputs.noised
        if self.alignment is None or inputs.patches is None:
            output = forward(noised.input, noised.timestep, inputs.condition)
            return Losses(self._loss(output, noised), noised.t, {})
        spec = self.alignment.spec
        output, tokens = forward(noised.input, noised.timestep, inputs.condition, tap=spec.block)
        alignment = self.alignment(tokens, inputs.patches, spec.token_grid(*noised.input.shape[2:]))
        return Losses(self._loss(output, noised), noised.t, {"alignment": alignment}, spec.weight * alignment)

    def _loss(self, output: Tensor, noised: flow.Noised) -> Tensor:
        # Channels beyond those of x0 would be a learned variance, which is not trained.
        return self.objective.loss(output[:, : noised.target.shape[1]], noised)

    @property
    def auxiliary(self) -> nn.Module | None:
        """The projector of the alignment."""
        return self.alignment

    @property
    def burn_in(self) -> int:
        """Images with alignment."""
        return 0 if self.alignment is None else self.alignment.spec.images

    def expert(self) -> OpenExpert:
        """Return the network with its bridge, calibrated on a few held-out images."""
        # Every process calibrates on all images: a network sharded by FSDP2 must run on all processes together.
        return as_expert(self, self.conditioning, self.calibrated(PREVIEW_CALIBRATION_IMAGES))

    def predict(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """Return the network's prediction (batch, C, H, W), without the channels of a learned variance."""
        output: Tensor = self.network(x, time, condition)
        return output[:, : x.shape[1]]

    def calibrated(self, images: int, processes: Processes = ALONE) -> flow.Bridge:
        """Return the bridge, calibrated on about this number of held-out images."""
        clusters = max(1, len(self.held_out.cluster_ranges()))
        chosen = ValidationSet(self.held_out, self.seed, max(1, images // clusters))
        bridge = self.objective.bridge(**self.shards.statistics.bridge_options)
        return calibrate(
            bridge, self.predict, chosen, conditioning=self.conditioning, device=self.device, processes=processes
        )

    @torch.no_grad()
    @full_float32()
    def finish(self, content: NetworkContent, processes: Processes = ALONE) -> ExpertContent:
        """Calibrate the bridge, then measure the held-out error of the velocity."""
        bridge = self.calibrated(CALIBRATION_IMAGES, processes)
        velocity = as_expert(self, self.conditioning, bridge).velocity
        error = validate(
            velocity,
            self.held_out,
            seed=self.seed,
            conditioning=self.conditioning,
            device=self.device,
            processes=processes,
        )
        return ExpertContent(
            **dict(content) | {"held_out_loss": error.mean, "loss_by_time": error.by_time},
            objective=self.objective.spec,
            bridge=BridgeSpec(prediction_error=bridge.prediction_error),
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
    def finish(self, content: NetworkContent, processes: Processes = ALONE) -> RouterContent:
        """Calibrate the temperature on held-out images, then measure loss and accuracy.

        For comparison the manifest also has the entropy of the cluster prior, which is the best possible loss at t = 1,
        and the accuracy of always predicting the largest cluster.
        """
        router, counts = self.network, self.shards.cluster_sizes()
        assert isinstance(router, Router)
        prior = {"cluster_sizes": tuple(counts), "prior_entropy": entropy(counts)}
        if not len(self.held_out):
            router.temperature.fill_(1.0)
            return RouterContent(**dict(content) | prior, temperature=1.0)
        logits, clusters, t = self._held_out_logits(router, processes)
        temperature = best_temperature(logits, clusters)
        router.temperature.fill_(temperature)
        loss = functional.cross_entropy(logits / temperature, clusters, reduction="none")
        correct = (logits.argmax(1) == clusters).float()
        sizes = torch.tensor(counts, dtype=torch.float32)
        chance = (sizes.max() / sizes.sum()).item()
        error, accuracy = Summary.of(loss, t), Summary.of(correct, t)
        assert accuracy.by_time is not None
        clean = accuracy.by_time[0]  # t < 0.1
        at_chance = clean is not None and clean < chance + CHANCE_MARGIN
        if at_chance and processes.rank == 0:
            print(
                f"warning: the router is at chance even on clean images (accuracy {clean:.3f}, largest cluster "
                f"{chance:.3f}): the clusters cannot be recognized from the images, or training was too short",
                flush=True,
            )
        return RouterContent(
            **dict(content) | prior | {"held_out_loss": error.mean, "loss_by_time": error.by_time},
            temperature=temperature,
            held_out_accuracy=accuracy.mean,
            accuracy_by_time=accuracy.by_time,
            chance_accuracy=chance,
            at_chance=at_chance,
        )

    def _held_out_logits(self, router: Router, processes: Processes) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (rows, experts), clusters (rows,) and times (rows,) of the held-out images, on the CPU."""
        router.temperature.fill_(1.0)
        held_out, mine = ValidationSet(self.held_out, self.seed), []
        for part in held_out.batches(self.device, processes):
            noised, condition = part.noised, condition_of(part.batch, self.conditioning)
            logits = router.logits(noised.input, noised.timestep, condition)
            columns = (logits, part.batch.cluster[:, None], noised.t[:, None])
            mine.append((part, torch.cat([column.cpu().double() for column in columns], 1)))
        # A float64 represents float32 logits and times and cluster numbers exactly, so one sum gathers all three.
        rows = held_out.gather(mine, processes, shape=(router.config.experts + 2,))
        return rows[:, :-2].float(), rows[:, -2].long(), rows[:, -1].float()


def entropy(counts: list[int]) -> float:
    """Return the entropy of the cluster prior in nats, the best possible cross-entropy at t = 1."""
    total = sum(counts)
    return -sum(n / total * math.log(n / total) for n in counts if n)


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
    left, right = high - rng.GOLDEN * (high - low), low + rng.GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - rng.GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + rng.GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2


@torch.no_grad()
def calibrate(
    bridge: flow.Bridge,
    network: Forward,
    held_out: ValidationSet,
    *,
    conditioning: frozenset[str],
    device: torch.device,
    processes: Processes = ALONE,
) -> flow.Bridge:
    """Return the bridge with the `prediction_error` that has the smallest velocity error on held-out images.

    The bridge converts outputs to velocities exactly, except for one number. An epsilon network estimates
    x0 = (z - sigma eps) / alpha, so an error e of its output becomes an error e sigma/alpha of x0, which grows without
    bound near t = 1. The bridge shrinks such an x0 towards the mean of the data by the Wiener factor
    1 / (1 + (e sigma/alpha / data_std)²). The right e is the RMS error of the network, which only data can show. The
    error of x0 is bounded for every other prediction, so their bridges are exact and need no such number.

    The networks' outputs (rows, C, H, W) do not depend on e, so they are computed once and kept, and a search over
    log e needs no further forward passes. Each process keeps the outputs of its share. The errors (rows,) are gathered
    in every step of the search, so all processes take the same steps and find the same number.
    """
    if bridge.prediction not in ("epsilon", "score") or not len(held_out):
        return bridge
    outputs = []
    for part in held_out.batches(device, processes):
        query = bridge.query(part.noised.input, part.noised.t)
        outputs.append((part, network(query.state, query.timestep, condition_of(part.batch, conditioning))))

    def error(prediction_error: float) -> float:
        candidate = replace(bridge, prediction_error=prediction_error)
        errors = []
        for part, output in outputs:
            velocity = candidate.velocity(output, part.noised.input, part.noised.t)
            errors.append((part, velocity_errors(velocity, part.noised.target, part.noised.t)))
        return held_out.gather(errors, processes).mean().item()

    # From a negligible error to twice the standard deviation of the noise; 20 steps find it to 0.1 %.
    best = math.exp(minimize(lambda log_error: error(math.exp(log_error)), math.log(1e-4), math.log(2.0), steps=20))
    return replace(bridge, prediction_error=best) if error(best) < error(0.0) else bridge
