"""Diagnostics of an ensemble on validation images: router, experts, their disagreement, and their mixtures.

The images, their noise and the error are those of `atoll.experts.validation`. The error of an expert on its cluster,
the errors of monolith and student, and the cross-entropy of the router are therefore the numbers in their manifests.

The velocity of a mixture is linear in the velocities of the experts, v = Σ_k w_k v_k. So each expert and the router run
once on every noisy image, and the error of any routing follows from the same velocities: the cost does not depend on
the number of routings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.apps.evaluate.results import ErrorMatrix, ExpertDiagnostics, Matrix, RouterMetrics
from atoll.core.device import full_float32
from atoll.core.progress import progress
from atoll.data.dataset import Shards
from atoll.ensemble import Ensemble
from atoll.experts.expert import condition_of
from atoll.experts.validation import TIME_BINS, Summary, ValidationBatch, ValidationSet, validate, velocity_errors
from atoll.flow import rng
from atoll.nets import Condition

# 15 equal bins of confidence, as in Guo et al. (2017), "On Calibration of Modern Neural Networks".
CALIBRATION_BINS = 15
# Raise this number when a metric gets another definition and keeps its fields: cached metrics of the old definition are
# then computed again.
DEFINITION_VERSION = 4


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
    """Run every expert and the router on the validation images, at most `limit` of each cluster."""
    parts: list[dict[str, Tensor]] = []
    validation = ValidationSet(shards, seed, limit)
    with progress("validation errors of the experts", len(validation), unit="noisy images") as bar:
        for part in validation.batches(model.device):
            parts.append(_measure_batch(model, part, routings, draw=draw_of(part, seed)))
            bar.update(len(part.noised.t))
    joined = {key: torch.cat([part[key].cpu() for part in parts]) for key in parts[0]}
    own = torch.tensor([expert.clusters[0] for expert in model.declarations])
    matches = joined["cluster"][:, None] == own
    return Measurements(
        t=joined["t"],
        cluster=joined["cluster"],
        column=torch.where(matches.any(1), matches.int().argmax(1), -1),
        probabilities=joined.get("probabilities"),
        errors=joined["errors"],
        angles=joined["angles"],
        top_2_angles=joined.get("top_2_angles"),
        routed={routing: joined[f"routed {routing}"] for routing in routings},
        nearest=joined.get("nearest"),
        numbers=tuple(own.tolist()),
    )


def draw_of(part: ValidationBatch, seed: int) -> Tensor:
    """Return a uniform random number in [0, 1) for each row, on the CPU, for routings that draw an expert."""
    return rng.uniform(len(part.noised.t), seed=seed, stream=rng.Stream.EVALUATION_DRAW, first=part.first)


def _measure_batch(
    model: Ensemble, part: ValidationBatch, routings: Sequence[str], *, draw: Tensor
) -> dict[str, Tensor]:
    x, t, target = part.noised.input, part.noised.t, part.noised.target
    condition, experts = condition_of(part.batch, model.conditioning), len(model.declarations)
    # The oracle routing with one cluster for every row runs the expert of this cluster and no other.
    # (rows, experts, C, H, W): the velocities of all experts are in memory at once. The validation's batch size of 64
    # keeps them small.
    alone = [torch.full((len(x),), expert.clusters[0]) for expert in model.declarations]
    velocities = torch.stack([model.velocity(x, t, condition, routing="oracle", cluster=own) for own in alone], 1)
    found = {
        "t": t,
        "cluster": part.batch.cluster,
        "errors": velocity_errors(velocities, target[:, None], t[:, None]),
        "angles": mean_angle(velocities),
    }
    if model.router is not None and experts > 1:
        p = model.route(x, t, condition, routing="full")
        found["probabilities"] = p
        top_2 = p.topk(2).indices[..., None, None, None].expand(-1, -1, *velocities.shape[2:]).to(velocities.device)
        found["top_2_angles"] = mean_angle(velocities.gather(1, top_2))
    if experts > 1 and all(reference.density is not None for reference in model.references):
        found["nearest"] = model.route(x, t, condition, routing="nearest:full")
    for routing in routings:
        weights = model.route(x, t, condition, routing=routing, cluster=part.batch.cluster, draw=draw)
        mixed = torch.einsum("bk,bk...->b...", weights.to(velocities.device), velocities)
        found[f"routed {routing}"] = velocity_errors(mixed, target, t)
    return found


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
    """Return the validation error of a dense model (monolith, student) on the same noisy images."""
    with progress(f"validation error of {name}", len(ValidationSet(shards, seed, limit)), unit="noisy images") as bar:

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

    def of_expert(number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the error of one expert in each row, and the mean error of the others."""
        error = errors.gather(1, number[:, None])[:, 0]
        return error, (errors.sum(1) - error) / max(1, errors.shape[1] - 1)

    found: dict[str, Summary | RouterMetrics] = {}
    if errors.shape[1] > 1:
        own, others = of_expert(column)
        found |= {"own_cluster_error": Summary.of(own, t), "other_clusters_error": Summary.of(others, t)}
    if measured.top_2_angles is not None:
        found["disagreement_of_top_2_degrees"] = Summary.of(measured.top_2_angles, measured.t)
    if measured.probabilities is not None:
        p = measured.probabilities[present]
        chosen = p.argmax(1)
        error, others = of_expert(chosen)
        found |= {
            "router": router_metrics(p, column, t),
            "router_choice_is_best": Summary.of((chosen == errors.argmin(1)).float(), t),
            "router_choice_error": Summary.of(error, t),
            "router_others_error": Summary.of(others, t),
        }
    if measured.nearest is not None:
        found["nearest"] = router_metrics(measured.nearest[present], column, t)
    return ExpertDiagnostics(
        velocity_error={routing: Summary.of(error, measured.t) for routing, error in measured.routed.items()},
        expert_on_cluster=error_matrix(measured),
        disagreement_degrees=Summary.of(measured.angles, measured.t),
        **found,
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
