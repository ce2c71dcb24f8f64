"""Sampling trajectories: which expert leads, how close the estimate is to its data, and the effect of finer steps."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.apps.evaluate.generated import Prompts
from atoll.apps.evaluate.results import Trajectory
from atoll.core.progress import progress
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.density import resized
from atoll.ensemble import RoutingState, Sampler, SamplerState, SampleSettings
from atoll.ensemble.routing import Decision
from atoll.experts.batch_conditions import BatchConditions
from atoll.flow import rng

# Training latents of each cluster that estimates are compared with: an order of magnitude. 512 latents of 4 x 32 x 32
# take 8 MB.
LATENTS_PER_CLUSTER = 512


def cluster_latents(run: Path, clusters: int, size: Size) -> list[Tensor]:
    """Return some training latents of every cluster, evenly spread over its shards, each (N, C·H·W).

    All latents have one size; those of a cluster without images of this size are resized.
    """
    found = []
    for cluster in range(clusters):
        shards = Shards.open(run, [cluster])
        known = shards.image_counts().get(size)
        count = known or len(shards)
        own = np.linspace(0, count - 1, min(LATENTS_PER_CLUSTER, count)).round().astype(np.int64)
        own = shards.numbers(size, own) if known else own
        parts = [shards.read(own[part]).mean.float() for part in shards.by_size(own).values()]
        found.append(torch.cat([resized(shards.statistics.normalize(part), size).flatten(1) for part in parts]))
    return found


def nearest_distances(x0: Tensor, clusters: list[Tensor]) -> Tensor:
    """Return the RMS distance of each estimate (N, C, H, W) to the nearest latent of each cluster, (N, clusters)."""
    flat = x0.flatten(1).float()
    distances = [torch.cdist(flat, latents.to(flat.device)).min(1).values for latents in clusters]
    return torch.stack(distances, 1) / math.sqrt(flat.shape[1])


Estimates = list[tuple[float, Tensor, Tensor, Tensor]]
"""At each evaluation: t and, for each image (N,), the distance to the leading cluster, the mean distance to the
other clusters, and whether the leading one is the closest."""


@torch.no_grad()
def follow(
    model: Sampler, prompts: Prompts, settings: SampleSettings, *, clusters: Callable[[Size], list[Tensor]], label: str
) -> Trajectory:
    """Sample with N and with 2 N steps from the same noise. `clusters` returns the `cluster_latents` of a size.

    `refinement` is the mean over images of |x_N - x_2N| / |x_2N|, the relative change of the final latent. With several
    experts, the distances of the estimate of x0 to the clusters are recorded at every evaluation with N steps.
    """
    groups, changes, first = prompts.by_size(), [], 0
    records: list[Estimates] = []
    finer = replace(settings, steps=2 * settings.steps)
    with progress(f"trajectories of {label}", 3 * len(groups) * settings.steps, unit="steps") as bar:
        for given, rows in groups.items():
            size, own, record = given or model.ensemble.sizes[0], prompts.part(rows), Estimates()
            shape = (len(own), model.ensemble.shape[0], size.height, size.width)
            noise = rng.normal(shape, seed=settings.seed, stream=rng.Stream.TRAJECTORY, first=first).to(
                model.ensemble.device
            )
            near = clusters(size)
            coarse = _solve(model, own, settings, noise=noise, bar=bar, record=record, clusters=near)
            fine = _solve(model, own, finer, noise=noise, bar=bar, record=None, clusters=near)
            changes.append((coarse - fine).flatten(1).norm(dim=1) / fine.flatten(1).norm(dim=1))
            records.append(record)
            first += len(own)
    # Means over the images of all sizes, at each evaluation
    names = ("distance_to_chosen_cluster", "distance_to_other_clusters", "chosen_is_closest_share")
    series: dict[str, list[float]] = {}
    for evaluation in zip(*records, strict=True):
        series.setdefault("t", []).append(evaluation[0][0])
        for number, name in enumerate(names, 1):
            joined = torch.cat([values[number] for values in evaluation])
            series.setdefault(name, []).append(joined.mean().item())
    change = torch.cat(changes)
    return Trajectory(
        refinement=change.mean().item(),
        refinement_std=change.std().item() if len(change) > 1 else 0.0,
        num_trajectories=len(prompts),
        steps=(settings.steps, 2 * settings.steps),
        **series,
    )


def _solve(
    sampler: Sampler,
    prompts: Prompts,
    settings: SampleSettings,
    *,
    noise: Tensor,
    bar: Any,
    record: Estimates | None,
    clusters: list[Tensor],
) -> Tensor:
    ensemble = sampler.ensemble
    condition = sampler.encode(prompts.captions, prompts.labels if "label" in ensemble.conditioning else None)
    conditions, decisions = BatchConditions.of(condition, torch.arange(len(prompts))), list[Decision]()
    routing = RoutingState(settings.seed, trace=decisions)
    state = SamplerState(noise, conditions, routing, torch.tensor(prompts.clusters))
    cluster_of = torch.tensor([expert.clusters[0] for expert in ensemble.declarations])

    def record_estimate(x: Tensor, t: float, v: Tensor) -> None:
        if record is not None and len(cluster_of) > 1 and len(clusters) > 1:
            lead = cluster_of[decisions[-1].weights.argmax(1)]
            # On the linear path x_t = (1 - t) x0 + t eps and v = eps - x0, so x0 = x_t - t v.
            distances = nearest_distances(x - t * v, clusters).cpu()
            chosen = distances.gather(1, lead[:, None])[:, 0]
            others = (distances.sum(1) - chosen) / (distances.shape[1] - 1)
            record.append((t, chosen, others, (distances.argmin(1) == lead).float()))
        bar.update(1)

    return sampler.run(state, settings, on_velocity=record_estimate)
