"""The way from noise to a picture: who leads, how near the estimate is to their data, what finer steps change."""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.progress import progress
from atoll.data.dataset import Shards
from atoll.ensemble import RoutingState, Sampler, SamplerState, Settings
from atoll.ensemble.routing import Decision
from atoll.evaluate.generated import Prompts, Samples
from atoll.evaluate.results import ExpertUse, Trajectory
from atoll.experts.batch_conditions import BatchConditions
from atoll.flow import rng

NOISE_STREAM = 35
BANK = 512


def bank(run: Path, clusters: int) -> list[Tensor]:
    """Some training latents of every cluster, flat: what `nearest` measures distances to."""
    found = []
    for cluster in range(clusters):
        shards = Shards.open(run, [cluster])
        rows = np.linspace(0, len(shards) - 1, min(BANK, len(shards))).round().astype(np.int64)
        found.append(shards.statistics.normalize(shards.read(rows).mean.float()).flatten(1))
    return found


def nearest(x0: Tensor, clusters: list[Tensor]) -> Tensor:
    """Root mean squared distance of each estimate to the nearest of each cluster's latents, (samples, clusters)."""
    flat = x0.flatten(1).float()
    distances = [torch.cdist(flat, latents.to(flat.device)).min(1).values for latents in clusters]
    return torch.stack(distances, 1) / math.sqrt(flat.shape[1])


@dataclass
class _Record:
    """The fields of a `Trajectory` that grow with each evaluation."""

    t: list[float] = field(default_factory=list)
    distance_to_chosen_cluster: list[float] = field(default_factory=list)
    distance_to_other_clusters: list[float] = field(default_factory=list)
    chosen_is_closest_share: list[float] = field(default_factory=list)

    def add(self, t: float, distances: Tensor, lead: Tensor) -> None:
        """Distances (samples, clusters) of the estimates, and the cluster of each sample's leading expert."""
        mine = distances.gather(1, lead[:, None])[:, 0]
        self.t.append(t)
        others = (distances.sum(1) - mine) / (distances.shape[1] - 1)
        self.distance_to_chosen_cluster.append(mine.mean().item())
        self.distance_to_other_clusters.append(others.mean().item())
        self.chosen_is_closest_share.append((distances.argmin(1) == lead).float().mean().item())


@torch.no_grad()
def follow(model: Sampler, prompts: Prompts, settings: Settings, *, clusters: list[Tensor], what: str) -> Trajectory:
    """Sample with N and with 2 N steps from the same noise.

    `refinement` is the mean over samples of |x_N - x_2N| / |x_2N|, the relative change of the final latent; the
    distances are those of the estimate x - t·v to the clusters, at every evaluation of the first pass.
    """
    record = _Record()
    shape = (len(prompts), *model.ensemble.shape)
    noise = rng.normal(shape, seed=settings.seed, stream=NOISE_STREAM, first=0).to(model.ensemble.device)
    with progress(f"refinement of {what}", 3 * settings.steps, unit="steps") as bar:
        coarse = _solve(model, prompts, settings, noise=noise, bar=bar, record=record, clusters=clusters)
        finer = replace(settings, steps=2 * settings.steps)
        fine = _solve(model, prompts, finer, noise=noise, bar=bar, record=None, clusters=clusters)
    change = (coarse - fine).flatten(1).norm(dim=1) / fine.flatten(1).norm(dim=1)
    return Trajectory(
        refinement=change.mean().item(),
        refinement_std=change.std().item() if len(change) > 1 else 0.0,
        samples=len(prompts),
        steps=(settings.steps, 2 * settings.steps),
        **(asdict(record) if record.t else {}),
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
    rows = torch.arange(len(prompts), device=ensemble.device)
    decisions: list[Decision] = []
    state = SamplerState(
        noise,
        BatchConditions.of(condition, rows),
        RoutingState(settings.seed, trace=decisions),
        torch.tensor(prompts.clusters),
    )
    homes = torch.tensor([expert.clusters[0] for expert in ensemble.experts])

    def follow_estimate(x: Tensor, t: float, v: Tensor) -> None:
        if record is not None and len(homes) > 1 and len(clusters) > 1:
            lead = homes[decisions[-1].weights.argmax(1)]
            record.add(t, nearest(x - t * v, clusters).cpu(), lead)
        bar.update(1)

    return sampler.run(state, settings, on_velocity=follow_estimate)


def expert_use(samples: Samples) -> ExpertUse | None:
    """Mean weight of each expert, share of samples it leads, and number of experts that run, by time; None if dense."""
    use = samples.use()
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
