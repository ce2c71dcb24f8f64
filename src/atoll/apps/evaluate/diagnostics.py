"""Diagnostics of an ensemble on held-out images: router, experts, their disagreement, and their mixtures.

The images, their noise and the error are those of `atoll.experts.validation`. The error of an expert on its cluster,
the errors of monolith and student, and the cross-entropy of the router are therefore the numbers in their manifests.

The velocity of a mixture is linear in the velocities of the experts, v = Σ_k w_k v_k. So each expert and the router run
once on every noisy image, and the error of any routing follows from the same velocities: the cost does not depend on
the number of routings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atoll.apps.evaluate.results import ErrorMatrix, ExpertDiagnostics, Matrix, RouterChoice, RouterMetrics
from atoll.core.device import full_float32
from atoll.core.progress import progress
from atoll.data.dataset import Batch, Shards
from atoll.ensemble import Ensemble
from atoll.experts.validation import TIME_BINS, Summary, ValidationSet, condition_of, validate, velocity_errors
from atoll.flow import rng
from atoll.nets import Condition

# An arbitrary number that no other random stream uses. Changing it changes the results of drawn and sample-1.
DRAW_STREAM = 34
# 15 equal bins of confidence, as in Guo et al. (2017), "On Calibration of Modern Neural Networks".
CALIBRATION_BINS = 15
# Raise this number when a metric gets another definition and keeps its fields: cached metrics of the old definition are
# then computed again.
DEFINITION_VERSION = 4


@dataclass(frozen=True)
class NoisyBatch:
    """Held-out images on the linear path to noise."""

    batch: Batch
    x: Tensor
    """The noisy latents x_t (rows, C, H, W)."""
    t: Tensor
    """The times (rows,)."""
    target: Tensor
    """The velocity eps - x0 (rows, C, H, W)."""
    draw: Tensor
    """A uniform random number in [0, 1) for each row, on the CPU, for routings that draw an expert."""

    def condition(self, conditioning: frozenset[str]) -> Condition:
        """Return the condition of a network with this conditioning."""
        return condition_of(self.batch, conditioning)


def noisy_batches(shards: Shards, limit: int, seed: int, *, device: torch.device) -> Iterator[NoisyBatch]:
    """Yield the validation images, at most `limit` of each cluster, each noised once in every time bin."""
    for part in ValidationSet(shards, seed, limit).batches(device):
        noised = part.noised
        draw = rng.uniform(len(noised.t), seed=seed, stream=DRAW_STREAM, first=part.first)
        yield NoisyBatch(part.batch, noised.input, noised.t, noised.target, draw)


@dataclass(frozen=True)
class Measurements:
    """Errors of all experts, and probabilities of the router, on all noisy images; one row for each noisy image."""

    t: Tensor
    cluster: Tensor
    column: Tensor
    """The column of the expert of the row's cluster; -1 if that expert is missing."""
    probabilities: Tensor | None
    """The router's probabilities (rows, experts); None without a router."""
    errors: Tensor
    """Error of the velocity of each expert (rows, experts), as in `experts.validation`."""
    angles: Tensor
    """Mean angle between the velocities of two experts, in degrees (rows,)."""
    top_2_angles: Tensor | None
    """Angle between the velocities of the two most probable experts, in degrees (rows,)."""
    routed: dict[str, Tensor]
    """Error of the mixed velocity (rows,), by routing."""
    nearest: Tensor | None = None
    """Probabilities from the densities of the clusters (rows, experts); None if an expert has no density."""
    numbers: tuple[int, ...] = ()
    """The numbers of the experts, in the order of the columns."""


@torch.no_grad()
@full_float32()
def measure(model: Ensemble, shards: Shards, routings: Sequence[str], *, limit: int, seed: int) -> Measurements:
    """Run every expert and the router on the held-out images."""
    parts: list[dict[str, Tensor]] = []
    with progress(
        "held-out errors of the experts", len(ValidationSet(shards, seed, limit)), unit="noisy images"
    ) as bar:
        for noisy in noisy_batches(shards, limit, seed, device=model.device):
            parts.append(_measure_batch(model, noisy, routings))
            bar.update(len(noisy.t))
    joined = {key: torch.cat([part[key].cpu() for part in parts]) for key in parts[0]}
    own = torch.tensor([expert.clusters[0] for expert in model.experts])
    matches = joined["cluster"][:, None] == own
    column = torch.where(matches.any(1), matches.int().argmax(1), -1)
    routed = {routing: joined[f"routed {routing}"] for routing in routings}
    return Measurements(
        joined["t"],
        joined["cluster"],
        column,
        joined.get("probabilities"),
        joined["errors"],
        joined["angles"],
        joined.get("top_2_angles"),
        routed,
        joined.get("nearest"),
        tuple(own.tolist()),
    )


def _measure_batch(model: Ensemble, noisy: NoisyBatch, routings: Sequence[str]) -> dict[str, Tensor]:
    condition, experts = noisy.condition(model.conditioning), len(model.experts)
    # (rows, experts, C, H, W): the velocities of all experts are in memory at once. The validation's batch size of 64
    # keeps them small.
    velocities = torch.stack([expert_velocity(model, k, noisy, condition=condition) for k in range(experts)], 1)
    found = {
        "t": noisy.t,
        "cluster": noisy.batch.cluster,
        "errors": velocity_errors(velocities, noisy.target[:, None], noisy.t[:, None]),
        "angles": mean_angle(velocities),
    }
    if model.router is not None and experts > 1:
        p = model.route(noisy.x, noisy.t, condition, routing="full")
        found["probabilities"] = p
        top_2 = p.topk(2).indices[..., None, None, None].expand(-1, -1, *velocities.shape[2:]).to(velocities.device)
        found["top_2_angles"] = mean_angle(velocities.gather(1, top_2))
    if experts > 1 and all(reference.density is not None for reference in model.references):
        found["nearest"] = model.route(noisy.x, noisy.t, condition, routing="nearest:full")
    for routing in routings:
        cluster, draw = noisy.batch.cluster, noisy.draw
        weights = model.route(noisy.x, noisy.t, condition, routing=routing, cluster=cluster, draw=draw)
        mixed = torch.einsum("bk,bk...->b...", weights.to(velocities.device), velocities)
        found[f"routed {routing}"] = velocity_errors(mixed, noisy.target, noisy.t)
    return found


def expert_velocity(model: Ensemble, number: int, noisy: NoisyBatch, *, condition: Condition) -> Tensor:
    """Return the velocity of one expert alone (rows, C, H, W)."""
    # The oracle routing with this expert's cluster for every row runs this expert and no other.
    cluster = torch.full((len(noisy.x),), model.experts[number].clusters[0])
    return model.velocity(noisy.x, noisy.t, condition, routing="oracle", cluster=cluster)


def mean_angle(velocities: Tensor) -> Tensor:
    """Return the mean angle in degrees over all pairs of experts: (rows, experts, …) to (rows,); 0 for one expert."""
    # In float64, on the CPU: near 0 degrees arccos turns a rounding error of 1e-7 in the cosine into 0.03 degrees.
    flat = torch.nn.functional.normalize(velocities.flatten(2).cpu().double(), dim=-1)
    cosines = flat @ flat.transpose(1, 2)
    first, second = torch.triu_indices(flat.shape[1], flat.shape[1], 1)
    if not len(first):
        return torch.zeros(len(flat), dtype=flat.dtype)
    return torch.rad2deg(torch.arccos(cosines[:, first, second].clamp(-1, 1))).mean(1)


def dense_error(model: Ensemble, shards: Shards, limit: int, *, seed: int, name: str) -> Summary:
    """Return the held-out error of a dense model (monolith, student) on the same noisy images."""
    with progress(f"held-out error of {name}", len(ValidationSet(shards, seed, limit)), unit="noisy images") as bar:

        def velocity(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            bar.update(len(t))
            return model.velocity(x, t, condition)

        return validate(velocity, shards, seed=seed, conditioning=model.conditioning, limit=limit, device=model.device)


def summarize(measured: Measurements) -> ExpertDiagnostics:
    """Return all metrics that follow from the measurements."""
    # Rows whose own expert is missing count in the errors of the routings and in the matrix. They are left out where
    # the metric is about the own expert.
    present = measured.column >= 0
    column, t, errors = measured.column[present], measured.t[present], measured.errors[present]
    own, others = errors.gather(1, column[:, None])[:, 0], errors.shape[1] - 1
    p, top_2, nearest = measured.probabilities, measured.top_2_angles, measured.nearest
    return ExpertDiagnostics(
        velocity_error={routing: Summary.of(error, measured.t) for routing, error in measured.routed.items()},
        expert_on_cluster=error_matrix(measured),
        disagreement_degrees=Summary.of(measured.angles, measured.t),
        own_cluster_error=Summary.of(own, t) if others else None,
        other_clusters_error=Summary.of((errors.sum(1) - own) / others, t) if others else None,
        disagreement_of_top_2_degrees=None if top_2 is None else Summary.of(top_2, measured.t),
        router=None if p is None else router_metrics(p[present], column, t),
        router_choice=None if p is None else router_choice(p[present], errors, t),
        nearest=None if nearest is None else router_metrics(nearest[present], column, t),
    )


def error_matrix(measured: Measurements) -> ErrorMatrix:
    """Return the error of each expert (column) on each cluster (row), over all times and in each time bin."""
    clusters = int(measured.cluster.max()) + 1
    bins = (measured.t * TIME_BINS).long().clamp(max=TIME_BINS - 1)

    def rows(keep: Tensor) -> Matrix:
        means = [measured.errors[keep & (measured.cluster == cluster)].double().mean(0) for cluster in range(clusters)]
        # The mean of no rows is NaN, the only value that differs from itself; JSON has null instead.
        return tuple(tuple(None if value != value else value for value in row.tolist()) for row in means)

    every = torch.ones_like(bins, dtype=torch.bool)
    by_time = tuple(rows(bins == number) for number in range(TIME_BINS))
    return ErrorMatrix(experts=measured.numbers, mean=rows(every), by_time=by_time)


def router_metrics(p: Tensor, column: Tensor, t: Tensor) -> RouterMetrics:
    """Return accuracy, cross-entropy, confidence and calibration error of probabilities (rows, experts)."""
    confidence, guess = p.max(1)
    hit = (guess == column).float()
    # The clamp keeps the loss of a probability that underflowed to 0 finite: at most 27.6 nats.
    loss = -p.gather(1, column[:, None])[:, 0].clamp(min=1e-12).log()
    bins = (t * TIME_BINS).long().clamp(max=TIME_BINS - 1)
    by_bin = tuple(calibration_error(confidence[bins == number], hit[bins == number]) for number in range(TIME_BINS))
    return RouterMetrics(
        accuracy=Summary.of(hit, t),
        cross_entropy=Summary.of(loss, t),
        confidence=Summary.of(confidence, t),
        calibration_error=Summary(calibration_error(confidence, hit), by_bin),
    )


def calibration_error(confidence: Tensor, hit: Tensor) -> float | None:
    """Return the expected calibration error: |accuracy - confidence| in bins of confidence, weighted by their rows."""
    if not len(hit):
        return None
    # Σ_bins (n_bin / n) |mean(hit) - mean(confidence)| = Σ_bins |Σ (hit - confidence)| / n: no bin count is needed.
    bins = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, (hit - confidence).double())
    return (gaps.abs().sum() / len(hit)).item()


def router_choice(p: Tensor, errors: Tensor, t: Tensor) -> RouterChoice:
    """Return how often the most probable expert has the smallest error, and the errors of it and of the others."""
    chosen = p.argmax(1)
    error = errors.gather(1, chosen[:, None])[:, 0]
    others = (errors.sum(1) - error) / max(1, errors.shape[1] - 1)
    best = (chosen == errors.argmin(1)).float()
    return RouterChoice(
        is_best_share=Summary.of(best, t), chosen_error=Summary.of(error, t), others_error=Summary.of(others, t)
    )


def held_out_shards(run: Path, clusters: int) -> Shards:
    """Open the held-out images of all clusters."""
    return Shards.open(run, list(range(clusters)), "held-out")
