"""What is trained: an expert, the router, the dense monolith or a student. The loop is the same for all of them.

A task holds its data, its network and its loss. The monolith is an expert of all clusters: dense is K = 1.
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
from atoll.data.reader import Batch, Shards
from atoll.flow import randomness
from atoll.nets import Condition, Router

DROP_STREAM, HELD_OUT_STREAM = 12, 14
TIME_BINS = 10


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

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the result declares of itself."""

    def velocity(self) -> Callable[..., Tensor] | None:
        """The network as a velocity field, if it paints pictures: what sample grids are drawn with."""
        return None

    def finish(self) -> dict[str, Any]:
        """Last touches with the averaged weights in place, and the figures they give on held-out data."""
        return {}

    def latents(self, batch: Batch, position: int) -> Tensor:
        """x0: drawn from the autoencoder's posterior by position, and normalised."""
        return self.shards.latents(batch, seed=self.seed, position=position)


def condition_of(batch: Batch, use: frozenset[str]) -> Condition:
    """What a network is told of a batch: any of text, pooled and label."""
    return Condition(
        text=batch.text.float() if "text" in use and batch.text is not None else None,
        text_mask=batch.mask if "text" in use else None,
        pooled=batch.pooled.float() if "pooled" in use and batch.pooled is not None else None,
        label=batch.label if "label" in use else None,
    )


def drop(condition: Condition, share: float, count: int, seed: int, position: int) -> Condition:
    """Forget the condition of a share of the samples, chosen by position, so that guidance has its other half."""
    given = told_something(condition)
    if not share or given is None:
        return condition
    u = randomness.uniform(count, seed=seed, stream=DROP_STREAM, first=position)
    return condition.drop((u < share).to(given.device))


def told_something(condition: Condition) -> Tensor | None:
    """Some part of the condition, or None if there is none."""
    return next((part for part in (condition.text, condition.pooled, condition.label) if part is not None), None)


@dataclass(frozen=True)
class ExpertTask(Task):
    """Diffusion training on one cluster, or on all of them for the monolith."""

    objective: flow.Objective
    told: frozenset[str]
    dropout: float

    def losses(self, forward: Forward, batch: Batch, position: int) -> Losses:
        """The objective's loss."""
        x0 = self.latents(batch, position)
        noised = self.objective.corrupt(x0, seed=self.seed, position=position)
        condition = drop(condition_of(batch, self.told), self.dropout, len(x0), self.seed, position)
        output = forward(noised.input, noised.network_time, condition)
        return Losses(self.objective.loss(output[:, : x0.shape[1]], noised), noised.t, {})

    def velocity(self) -> Callable[..., Tensor]:
        """The network over its bridge, calibrated on a few held-out samples."""
        return self.calibrated(limit=64).wrap(self.answer)

    def answer(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """The network's prediction, without a learned variance."""
        output: Tensor = self.network(x, time, condition)
        return output[:, : x.shape[1]]

    def calibrated(self, limit: int) -> flow.Bridge:
        """The bridge with the prediction error that fits held-out samples best."""
        return calibrate(self.objective.bridge(), self.answer, self, self.told, limit)

    def facts(self) -> dict[str, Any]:
        """Objective and conditioning."""
        return {"objective": self.objective.spec, "told": sorted(self.told)}

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Calibrate the bridge; held-out error of the velocity over it."""
        bridge = self.calibrated(limit=1024)
        figures = held_out_velocity(self, bridge.wrap(self.answer), self.told)
        return {"bridge": {"prediction_error": bridge.prediction_error}, **figures}


@dataclass(frozen=True)
class RouterTask(Task):
    """Which cluster did this noisy picture come from? On the linear path, at all times."""

    told: frozenset[str]
    dropout: float

    def losses(self, forward: Forward, batch: Batch, position: int) -> Losses:
        """Cross-entropy of the clusters. What it is told is dropped as for experts: guidance asks it without, too."""
        noised = on_linear_path(self.latents(batch, position), self.seed, position)
        condition = drop(condition_of(batch, self.told), self.dropout, len(noised.t), self.seed, position)
        logits = forward(noised.input, noised.network_time, condition).float()
        hit = (logits.argmax(1) == batch.cluster).float()
        return Losses(functional.cross_entropy(logits, batch.cluster, reduction="none"), noised.t, {"accuracy": hit})

    def facts(self) -> dict[str, Any]:
        """What the router sees and the prior it carries."""
        counts = self.shards.cluster_sizes()
        return {"told": sorted(self.told), "cluster_sizes": counts, "prior_entropy": entropy(counts)}

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Calibrate on held-out data; loss and accuracy by time beside the prior's entropy."""
        router = self.network
        assert isinstance(router, Router)
        if not len(self.held_out):
            router.temperature.fill_(1.0)
            return {"temperature": 1.0, "held_out_loss": None, "held_out_accuracy": None}
        logits, clusters, t = self._held_out_logits(router)
        temperature = best_temperature(logits, clusters)
        router.temperature.fill_(temperature)
        loss = functional.cross_entropy(logits / temperature, clusters, reduction="none")
        hit = (logits.argmax(1) == clusters).float()
        sizes = torch.tensor(self.shards.cluster_sizes(), dtype=torch.float32)
        figures: dict[str, Any] = {
            "temperature": temperature,
            "held_out_loss": loss.mean().item(),
            "held_out_accuracy": hit.mean().item(),
            "loss_by_time": by_time(loss, t),
            "accuracy_by_time": by_time(hit, t),
            "chance_accuracy": (sizes.max() / sizes.sum()).item(),
        }
        clean = figures["accuracy_by_time"][0]
        figures["at_chance"] = bool(clean is not None and clean < figures["chance_accuracy"] + 0.05)
        if figures["at_chance"]:
            print(
                f"warning: the router is at chance even on clean pictures (accuracy {clean:.3f}, largest cluster "
                f"{figures['chance_accuracy']:.3f}): nothing in a picture tells its cluster, or training was too short",
                flush=True,
            )
        return figures

    def _held_out_logits(self, router: Router) -> tuple[Tensor, Tensor, Tensor]:
        logits, clusters, times = [], [], []
        router.temperature.fill_(1.0)
        for batch, noised in held_out_noised(self):
            logits.append(router.logits(noised.input, noised.network_time, condition_of(batch, self.told)))
            clusters.append(batch.cluster)
            times.append(noised.t)
        return torch.cat(logits), torch.cat(clusters), torch.cat(times)


def on_linear_path(x0: Tensor, seed: int, position: int) -> flow.Noised:
    """Noise a batch as flow matching does, whatever the experts' objectives."""
    return flow.Objective().corrupt(x0, seed=seed, position=position)


def entropy(counts: list[int]) -> float:
    """Entropy of the clusters' prior in nats: the best cross-entropy at t = 1."""
    total = sum(counts)
    return -sum(n / total * math.log(n / total) for n in counts if n)


def by_time(values: Tensor, t: Tensor) -> list[float | None]:
    """Mean of the values in each of ten bins of time; None where there is none."""
    bins = (t * TIME_BINS).long().clamp(max=TIME_BINS - 1)
    sums = torch.zeros(TIME_BINS, device=t.device).index_add_(0, bins, values.float())
    counts = torch.zeros(TIME_BINS, device=t.device).index_add_(0, bins, torch.ones_like(t, dtype=torch.float32))
    return [s / n if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True)]


def best_temperature(logits: Tensor, clusters: Tensor) -> float:
    """The temperature of least cross-entropy, by golden-section search on its logarithm."""

    def loss(log_temperature: float) -> float:
        return functional.cross_entropy(logits / math.exp(log_temperature), clusters).item()

    return math.exp(minimise(loss, math.log(0.05), math.log(20.0)))


def minimise(function: Callable[[float], float], low: float, high: float, steps: int = 40) -> float:
    """Where a function with one valley is least, by golden-section search."""
    left, right = high - randomness.GOLDEN * (high - low), low + randomness.GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - randomness.GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + randomness.GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2


@torch.no_grad()
def calibrate(bridge: flow.Bridge, network: Forward, task: Task, told: frozenset[str], limit: int) -> flow.Bridge:
    """Fit the bridge's `prediction_error`, its one number that is not exact mathematics, to held-out samples.

    Near noise an epsilon network's x0 is its error times sigma/alpha. How far to shrink it is a fact about the network.
    """
    if bridge.identity or not len(task.held_out):
        return bridge
    asked = []
    for batch, noised in held_out_noised(task, limit=limit):
        query = bridge.query(noised.input, noised.t)
        asked.append((network(query.state, query.network_time, condition_of(batch, told)), noised))

    def error(known: float) -> float:
        candidate = replace(bridge, prediction_error=known)
        distances = [(candidate.velocity(y, n.input, n.t) - n.target).square().mean() for y, n in asked]
        return float(torch.stack(distances).mean())

    best = math.exp(minimise(lambda log_error: error(math.exp(log_error)), math.log(1e-4), math.log(2.0), steps=20))
    return replace(bridge, prediction_error=best) if error(best) < error(0.0) else bridge


def held_out_noised(task: Task, batch: int = 256, limit: int = 1024) -> Iterator[tuple[Batch, flow.Noised]]:
    """Held-out samples (at most `limit`, always the same), each noised once in every bin of time."""
    shards, device = task.held_out, next(task.network.parameters()).device
    count = min(len(shards), limit)
    chosen = np.linspace(0, max(len(shards) - 1, 0), count).round().astype(np.int64)
    for number in range(TIME_BINS):
        for start in range(0, count, batch):
            rows = shards.read(chosen[start : start + batch]).to(device)
            position = number * count + start
            u = randomness.uniform(len(rows.index), seed=task.seed, stream=HELD_OUT_STREAM, first=position)
            t = ((number + u) / TIME_BINS).to(device)
            x0 = task.latents(rows, position)
            yield rows, flow.Objective().corrupt(x0, seed=task.seed + 1, position=position, t=t)


def held_out_velocity(task: Task, field: Callable[..., Tensor], told: frozenset[str]) -> dict[str, Any]:
    """Mean squared error of the velocity against eps - x0 on held-out samples, whole and by time."""
    errors, times = [], []
    for batch, noised in held_out_noised(task):
        velocity = field(noised.input, noised.t, condition=condition_of(batch, told))
        errors.append((velocity - noised.target).square().flatten(1).mean(1))
        times.append(noised.t)
    if not errors:
        return {"held_out_loss": None}
    error, t = torch.cat(errors), torch.cat(times)
    return {"held_out_loss": error.mean().item(), "loss_by_time": by_time(error, t)}
