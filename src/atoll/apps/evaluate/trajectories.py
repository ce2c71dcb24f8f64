"""Sampling trajectories: which expert leads, how close the estimate is to its data, and the effect of finer steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.apps.evaluate.generated import GeneratedSet, Prompts
from atoll.apps.evaluate.results import ExpertUse, Trajectory
from atoll.core.progress import progress
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.ensemble import RoutingState, Sampler, SamplerState, Settings
from atoll.ensemble.routing import Decision
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.density import resized
from atoll.flow import rng

# An arbitrary number that no other random stream uses. Changing it changes the initial noise.
NOISE_STREAM = 35
# Training latents of each cluster that estimates are compared with: an order of magnitude. 512 latents of 4 x 32 x 32
# take 8 MB.
LATENTS_PER_CLUSTER = 512


def cluster_latents(run: Path, clusters: int, size: Size) -> list[Tensor]:
    """Return some training latents of every cluster, evenly spread over its shards, each (N, C·H·W).

    They are those of one size; a cluster without images of that size has all of its latents resized to it.
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


@dataclass
class _Record:
    """The distances at each evaluation of the velocity: one value for each image, in the order of sizes."""

    t: list[float] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    closest: list[Tensor] = field(default_factory=list)

    def add(self, t: float, distances: Tensor, lead: Tensor) -> None:
        """Add the distances (N, clusters) of the estimates; `lead` (N,) is the cluster of the leading expert."""
        chosen = distances.gather(1, lead[:, None])[:, 0]
        self.t.append(t)
        self.chosen.append(chosen)
        self.others.append((distances.sum(1) - chosen) / (distances.shape[1] - 1))
        self.closest.append((distances.argmin(1) == lead).float())


def _joined(records: Sequence[_Record]) -> dict[str, list[float]]:
    """Return the fields of a `Trajectory`: means over the images of all sizes; empty if nothing was recorded."""
    names = ("distance_to_chosen_cluster", "distance_to_other_clusters", "chosen_is_closest_share")
    found = {"t": records[0].t}
    for name, key in zip(names, ("chosen", "others", "closest"), strict=True):
        steps = zip(*(getattr(record, key) for record in records), strict=True)
        found[name] = [torch.cat(parts).mean().item() for parts in steps]
    return found if records[0].t else {}


@torch.no_grad()
def follow(
    model: Sampler, prompts: Prompts, settings: Settings, *, clusters: Callable[[Size], list[Tensor]], label: str
) -> Trajectory:
    """Sample with N and with 2 N steps from the same noise. `clusters` returns the `cluster_latents` of a size.

    `refinement` is the mean over images of |x_N - x_2N| / |x_2N|, the relative change of the final latent. With several
    experts, the distances of the estimate of x0 to the clusters are recorded at every evaluation with N steps.
    """
    groups, records, changes, first = prompts.by_size(), [], [], 0
    finer = replace(settings, steps=2 * settings.steps)
    with progress(f"trajectories of {label}", 3 * len(groups) * settings.steps, unit="steps") as bar:
        for given, rows in groups.items():
            size, own, record = given or model.ensemble.sizes[0], prompts.part(rows), _Record()
            shape = (len(own), model.ensemble.shape[0], size.height, size.width)
            noise = rng.normal(shape, seed=settings.seed, stream=NOISE_STREAM, first=first).to(model.ensemble.device)
            near = clusters(size)
            coarse = _solve(model, own, settings, noise=noise, bar=bar, record=record, clusters=near)
            fine = _solve(model, own, finer, noise=noise, bar=bar, record=None, clusters=near)
            changes.append((coarse - fine).flatten(1).norm(dim=1) / fine.flatten(1).norm(dim=1))
            records.append(record)
            first += len(own)
    change = torch.cat(changes)
    return Trajectory(
        refinement=change.mean().item(),
        refinement_std=change.std().item() if len(change) > 1 else 0.0,
        num_trajectories=len(prompts),
        steps=(settings.steps, 2 * settings.steps),
        **_joined(records),
    )


def _solve(
    sampler: Sampler,
    prompts: Prompts,
    settings: Settings,
    *,
    noise: Tensor,
    bar: Any,
    record: _Record | None,
    clusters: list[Tensor],
) -> Tensor:
    ensemble = sampler.ensemble
    condition = sampler.encode(prompts.captions, prompts.labels if "label" in ensemble.conditioning else None)
    rows = torch.arange(len(prompts))
    decisions: list[Decision] = []
    state = SamplerState(
        noise,
        BatchConditions.of(condition, rows),
        RoutingState(settings.seed, trace=decisions),
        torch.tensor(prompts.clusters),
    )
    cluster_of = torch.tensor([expert.clusters[0] for expert in ensemble.experts])

    def record_estimate(x: Tensor, t: float, v: Tensor) -> None:
        if record is not None and len(cluster_of) > 1 and len(clusters) > 1:
            lead = cluster_of[decisions[-1].weights.argmax(1)]
            # On the linear path x_t = (1 - t) x0 + t eps and v = eps - x0, so x0 = x_t - t v.
            record.add(t, nearest_distances(x - t * v, clusters).cpu(), lead)
        bar.update(1)

    return sampler.run(state, settings, on_velocity=record_estimate)


def expert_use(images: GeneratedSet) -> ExpertUse | None:
    """Return the use of the experts in a set of generated images; None for a dense model."""
    use = images.use()
    if use is None:
        return None
    return ExpertUse(
        t=use["t"].tolist(),
        weight=use["weights"].tolist(),
        lead_share=use["lead"].tolist(),
        active=use["active"].tolist(),
        mean_lead_share=use["lead"].mean(0).tolist(),
        mean_active=use["active"].mean().item(),
    )
