"""What is trained: an expert, the router, the dense monolith or a student. The loop is the same for all of them.

A task holds its data, its network and its loss. The monolith is an expert of all clusters: dense is K = 1.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll import flow
from atoll.core.manifests import BridgeSpec, ExpertContent, NetworkContent, RouterContent
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

DROP_STREAM = 12
CALIBRATION_IMAGES = IMAGES
"""Of all clusters together: the bridge has one number to fit, and the outputs for all of them are in memory at once."""
PREVIEW_CALIBRATION_IMAGES = 64
"""For the grids during training, which are only looked at."""


class Losses(NamedTuple):
    """One number for each sample of a batch, its time, and further numbers by name."""

    loss: Tensor
    t: Tensor
    extra: dict[str, Tensor]


Forward = Callable[..., Tensor]
"""The network as it is trained: wrapped, compiled, or itself."""


@dataclass(frozen=True)
class Task(ABC):
    """Data, network and loss of one job."""

    name: str
    network: nn.Module
    shards: Shards
    held_out: Shards
    seed: int

    @abstractmethod
    def losses(self, forward: Forward, batch: Batch, position: int) -> Losses:
        """The losses of a batch whose first sample has this position in the run."""

    def expert(self) -> OpenExpert | None:
        """Return the network as an expert, which previews are sampled from; None for a router."""
        return None

    @abstractmethod
    def finish(self, content: NetworkContent, processes: Processes = ALONE) -> NetworkContent:
        """Calibrate with the averaged weights in place, and add to `content` what is measured on held-out images.

        All processes call it with equal networks, each validates its share, and all get the same metrics.
        """

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device

    def latents(self, batch: Batch, position: int) -> Tensor:
        """x0: drawn from the autoencoder's posterior by position, and normalised."""
        return self.shards.latents(batch, seed=self.seed, position=position)


def as_expert(task: Task, conditioning: frozenset[str], bridge: flow.Bridge) -> OpenExpert:
    """Return a task's network as an expert on the latents of its own data."""
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


def drop_condition(condition: Condition, share: float, count: int, *, seed: int, position: int) -> Condition:
    """Forget the condition of a share of the images, chosen by position, so that guidance has its other half."""
    given = given_condition(condition)
    if not share or given is None:
        return condition
    u = rng.uniform(count, seed=seed, stream=DROP_STREAM, first=position)
    return condition.drop((u < share).to(given.device))


def given_condition(condition: Condition) -> Tensor | None:
    """Some part of the condition, or None if there is none."""
    return next((part for part in (condition.text, condition.pooled, condition.label) if part is not None), None)


@dataclass(frozen=True)
class ExpertTask(Task):
    """Diffusion training on one cluster, or on all of them for the monolith."""

    objective: flow.Objective
    conditioning: frozenset[str]
    dropout: float

    def losses(self, forward: Forward, batch: Batch, position: int) -> Losses:
        """The objective's loss."""
        x0 = self.latents(batch, position)
        noised = self.objective.corrupt(x0, seed=self.seed, position=position)
        condition = condition_of(batch, self.conditioning)
        condition = drop_condition(condition, self.dropout, len(x0), seed=self.seed, position=position)
        output = forward(noised.input, noised.timestep, condition)
        return Losses(self.objective.loss(output[:, : x0.shape[1]], noised), noised.t, {})

    def expert(self) -> OpenExpert:
        """Return the network over its bridge, calibrated on a few held-out images."""
        # Every process calibrates for itself: FSDP2 runs a sharded network on all of them together.
        return as_expert(self, self.conditioning, self.calibrated(PREVIEW_CALIBRATION_IMAGES))

    def predict(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """The network's prediction, without a learned variance."""
        output: Tensor = self.network(x, time, condition)
        return output[:, : x.shape[1]]

    def calibrated(self, images: int, processes: Processes = ALONE) -> flow.Bridge:
        """The bridge with the prediction error that fits about so many held-out images best."""
        clusters = max(1, len(self.held_out.cluster_ranges()))
        chosen = ValidationSet(self.held_out, self.seed, max(1, images // clusters))
        bridge = self.objective.bridge(**self.shards.statistics.bridge_options)
        return calibrate(
            bridge, self.predict, chosen, conditioning=self.conditioning, device=self.device, processes=processes
        )

    @torch.no_grad()
    def finish(self, content: NetworkContent, processes: Processes = ALONE) -> ExpertContent:
        """Calibrate the bridge, then measure the held-out error of the velocity over it."""
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
    """Which cluster did this noisy picture come from? On the linear path, at all times."""

    conditioning: frozenset[str]
    dropout: float

    def losses(self, forward: Forward, batch: Batch, position: int) -> Losses:
        """Cross-entropy of the clusters. What it is told is dropped as for experts: guidance asks it without, too."""
        noised = on_linear_path(self.latents(batch, position), self.seed, position)
        condition = condition_of(batch, self.conditioning)
        condition = drop_condition(condition, self.dropout, len(noised.t), seed=self.seed, position=position)
        logits = forward(noised.input, noised.timestep, condition).float()
        hit = (logits.argmax(1) == batch.cluster).float()
        return Losses(functional.cross_entropy(logits, batch.cluster, reduction="none"), noised.t, {"accuracy": hit})

    @torch.no_grad()
    def finish(self, content: NetworkContent, processes: Processes = ALONE) -> RouterContent:
        """Calibrate the temperature on held-out images, then measure loss and accuracy beside the prior's entropy."""
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
        hit = (logits.argmax(1) == clusters).float()
        sizes = torch.tensor(counts, dtype=torch.float32)
        chance = (sizes.max() / sizes.sum()).item()
        error, accuracy = Summary.of(loss, t), Summary.of(hit, t)
        assert accuracy.by_time is not None
        clean = accuracy.by_time[0]
        at_chance = clean is not None and clean < chance + 0.05
        if at_chance and processes.rank == 0:
            print(
                f"warning: the router is at chance even on clean images (accuracy {clean:.3f}, largest cluster "
                f"{chance:.3f}): an image does not show its cluster, or training was too short",
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
        """Return logits (rows, experts), clusters (rows,) and times (rows,) of all held-out images, on the CPU."""
        router.temperature.fill_(1.0)
        held_out, mine = ValidationSet(self.held_out, self.seed), []
        for part in held_out.batches(self.device, processes):
            noised, condition = part.noised, condition_of(part.batch, self.conditioning)
            logits = router.logits(noised.input, noised.timestep, condition)
            columns = (logits, part.batch.cluster[:, None], noised.t[:, None])
            mine.append((part, torch.cat([column.cpu().double() for column in columns], 1)))
        # One double holds a logit, a cluster's number or a time of float32 exactly, so one sum gathers all three.
        rows = held_out.gather(mine, processes, shape=(router.config.experts + 2,))
        return rows[:, :-2].float(), rows[:, -2].long(), rows[:, -1].float()


def on_linear_path(x0: Tensor, seed: int, position: int) -> flow.Noised:
    """Noise a batch as flow matching does, whatever the experts' objectives."""
    return flow.Objective().corrupt(x0, seed=seed, position=position)


def entropy(counts: list[int]) -> float:
    """Entropy of the clusters' prior in nats: the best cross-entropy at t = 1."""
    total = sum(counts)
    return -sum(n / total * math.log(n / total) for n in counts if n)


def best_temperature(logits: Tensor, clusters: Tensor) -> float:
    """The temperature of least cross-entropy, by golden-section search on its logarithm."""

    def loss(log_temperature: float) -> float:
        return functional.cross_entropy(logits / math.exp(log_temperature), clusters).item()

    return math.exp(minimize(loss, math.log(0.05), math.log(20.0)))


def minimize(function: Callable[[float], float], low: float, high: float, *, steps: int = 40) -> float:
    """Where a function with one valley is least, by golden-section search."""
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
    """Fit the bridge's `prediction_error`, its one number that is not exact mathematics, to held-out images.

    Near noise an epsilon network's x0 is its error times sigma/alpha. How far to shrink it is a fact about the network.
    Each process keeps the outputs for its own share; what is gathered is the error of each image, so all of them take
    the same steps of the search and end with the same number.
    """
    if bridge.identity or not len(held_out):
        return bridge
    outputs = []
    for part in held_out.batches(device, processes):
        query = bridge.query(part.noised.input, part.noised.t)
        outputs.append((part, network(query.state, query.timestep, condition_of(part.batch, conditioning))))

    def error(known: float) -> float:
        candidate = replace(bridge, prediction_error=known)
        errors = [
            (part, velocity_errors(candidate.velocity(output, part.noised.input, part.noised.t), part.noised.target))
            for part, output in outputs
        ]
        return held_out.gather(errors, processes).mean().item()

    best = math.exp(minimize(lambda log_error: error(math.exp(log_error)), math.log(1e-4), math.log(2.0), steps=20))
    return replace(bridge, prediction_error=best) if error(best) < error(0.0) else bridge
