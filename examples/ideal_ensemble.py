"""An ensemble with a known velocity: ideal experts and the ideal router of a Gaussian mixture.

The marginal velocity of a Gaussian mixture has a closed form, and so do its restriction to some components (an ideal
expert) and the posterior of the components (an ideal router). Routing strategies are tested against this ensemble, as
bridges and solvers are against `flow.GaussianMixture`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll import flow
from atoll.core import layout
from atoll.core.manifests import LatentSpec
from atoll.core.networks import DiTConfig
from atoll.data.density import FIT_IMAGES, Density
from atoll.encoders.autoencoder import Statistics
from atoll.ensemble.ensemble import Ensemble
from atoll.experts.expert import Declaration, NetworkReference, OpenRouter
from atoll.nets import Router

END = 1e-5
"""Smallest time: predictions divide by sigma. It is far below any solver step (1e-3 for 1,000 steps)."""


class IdealNetwork(nn.Module):
    """The output of a perfectly trained network, for some components and an objective."""

    def __init__(self, mixture: flow.GaussianMixture, objective: flow.Objective) -> None:
        super().__init__()
        self.mixture, self.objective = mixture, objective

    def forward(self, x: Tensor, time: Tensor, _condition: object = None) -> Tensor:
        """Return the exact prediction at a network's input (batch, D, 1, 1) and timestep (batch or 1,)."""
        schedule = self.objective.schedule
        last = float(schedule.timestep(torch.ones(1)))
        t = (time.double() / last).clamp(END, 1).expand(len(x))
        # The network's input is the scaled state of its schedule; the mixture needs the unscaled one.
        z = x.flatten(1).double() / schedule.input_scale(t)[:, None]
        return self.mixture.predict(z, t, self.objective.prediction, schedule=schedule).view(x.shape).to(x.dtype)


class IdealRouter(nn.Module):
    """The exact posterior of the clusters, where a cluster is a set of components."""

    def __init__(self, mixture: flow.GaussianMixture, clusters: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.mixture, self.clusters = mixture, clusters

    def logits(self, x: Tensor, time: Tensor, _condition: object = None) -> Tensor:
        """Return the log-probabilities of the clusters (batch, clusters), up to a constant."""
        t = (time.double() / flow.TIMESTEP_SCALE).clamp(END, 1).expand(len(x))
        density = self.mixture.log_density(x.flatten(1).double(), t)
        return torch.stack([density[:, list(cluster)].logsumexp(1) for cluster in self.clusters], 1).to(x.dtype)


def ideal_ensemble(
    mixture: flow.GaussianMixture,
    clusters: Sequence[Sequence[int]],
    objectives: Sequence[str] = ("flow-matching",),
    *,
    normalizations: Sequence[Statistics] | None = None,
) -> Ensemble:
    """Build one ideal expert for each cluster of components, and the ideal router.

    The experts take the objectives in turn. The mixture is over latents of shape (D, 1, 1). `normalizations` has
    the statistics of each expert's latents; the default is mean 0 and standard deviation 1, as the mixture.
    """
    dimensions = mixture.means.shape[1]
    plain = Statistics((0.0,) * dimensions, (1.0,) * dimensions)
    references = []
    for number, components in enumerate(clusters):
        objective = flow.objective(objectives[number % len(objectives)])
        normalization = normalizations[number] if normalizations else plain
        part = normalize_mixture(mixture.part(components), normalization)
        share = float(mixture.weights[list(components)].sum())
        drawn = part.sample(FIT_IMAGES, torch.Generator().manual_seed(number)).view(-1, dimensions, 1, 1)
        # Counts matter only relative to each other; a million images make the rounding of the shares negligible.
        density = Density.fit(drawn, count=round(1e6 * share))
        bridge = objective.bridge(x0_bound=None)
        declaration = _declaration(layout.expert_job(number), (number,), normalization, bridge=bridge)
        references.append(NetworkReference(declaration, _opener(part, objective), 0, density=density))
    known = _declaration("router", tuple(range(len(clusters))), plain, bridge=flow.Objective().bridge())
    return Ensemble(references, OpenRouter(known, cast(Router, IdealRouter(mixture, clusters))))


def normalize_mixture(mixture: flow.GaussianMixture, normalization: Statistics) -> flow.GaussianMixture:
    """Return the mixture of the same data, normalized by other statistics."""
    mean = torch.tensor(normalization.mean, dtype=mixture.means.dtype)
    scale = 1 / torch.tensor(normalization.std, dtype=mixture.means.dtype)
    covariances = scale[:, None] * mixture.covariances * scale
    return flow.GaussianMixture(mixture.weights, (mixture.means - mean) * scale, covariances)


def _opener(mixture: flow.GaussianMixture, objective: flow.Objective) -> Any:
    return lambda: IdealNetwork(mixture, objective)


def _declaration(
    name: str, clusters: tuple[int, ...], normalization: Statistics, *, bridge: flow.Bridge
) -> Declaration:
    latents = LatentSpec(autoencoder="pixels", shape=(len(normalization.mean), 1, 1))
    no_network = DiTConfig()  # a required field; no network is built from it
    return Declaration(name, clusters, no_network, frozenset(), normalization, latents, None, (), bridge)
