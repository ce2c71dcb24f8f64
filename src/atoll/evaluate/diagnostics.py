"""What governs an ensemble's quality, measured on held-out samples: router, experts, disagreement, mixtures.

The images, their noise and the error are those of `atoll.experts.validation`, so the error of an expert on its own
cluster, of monolith and student, and the router's cross-entropy are the numbers in their manifests. Every expert and
the router is asked for its answer. All figures of this file follow from those answers, so they cost one pass over
experts and samples whatever the routings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.progress import progress
from atoll.data.dataset import Batch, Shards
from atoll.ensemble import Ensemble
from atoll.evaluate.results import ErrorMatrix, ExpertDiagnostics, Matrix, RouterChoice, RouterMetrics
from atoll.experts.validation import TIME_BINS, Summary, ValidationSet, condition_of, validate, velocity_errors
from atoll.flow import rng
from atoll.nets import Condition

DRAW_STREAM = 34
CALIBRATION_BINS = 15
FORM = 3
"""The version of the definitions: metrics that were stored under another one have the same fields and other meaning."""


@dataclass(frozen=True)
class Noisy:
    """Held-out samples on the way to noise."""

    batch: Batch
    x: Tensor
    t: Tensor
    target: Tensor
    """eps - x0."""
    draw: Tensor
    """A number in [0, 1) for each, for routings that draw experts."""

    def condition(self, told: frozenset[str]) -> Condition:
        """What a model is told of them."""
        return condition_of(self.batch, told)


def noisy(shards: Shards, limit: int, seed: int, *, device: torch.device) -> Iterator[Noisy]:
    """Yield the validation's images, at most `limit` of each cluster, noised once in every bin of time."""
    for part in ValidationSet(shards, seed, limit).batches(device):
        noised = part.noised
        draw = rng.uniform(len(noised.t), seed=seed, stream=DRAW_STREAM, first=part.first)
        yield Noisy(part.batch, noised.input, noised.t, noised.target, draw.to(device))


@dataclass(frozen=True)
class Answers:
    """What an ensemble said of all noisy held-out samples; one row for each sample."""

    t: Tensor
    cluster: Tensor
    column: Tensor
    """Which expert is that of the sample's own cluster; -1 if it is missing."""
    probabilities: Tensor | None
    """The router's (rows, experts); None without a router."""
    errors: Tensor
    """Mean squared error of each expert's velocity (rows, experts)."""
    angles: Tensor
    """Mean angle between the velocities of two experts, in degrees (rows,)."""
    chosen_angles: Tensor | None
    """Angle between the two most probable experts (rows,)."""
    routed: dict[str, Tensor]
    """Error of the mixed velocity under each routing (rows,)."""
    nearest: Tensor | None = None
    """Probabilities from the clusters' own densities (rows, experts); None if an expert came without."""
    numbers: tuple[int, ...] = ()
    """Those of the experts, in the order of their columns."""


@torch.no_grad()
def ask(model: Ensemble, shards: Shards, routings: Sequence[str], *, limit: int, seed: int) -> Answers:
    """Ask every expert and the router about held-out samples."""
    parts: list[dict[str, Tensor]] = []
    with progress("held-out errors of the experts", len(ValidationSet(shards, seed, limit))) as bar:
        for sample in noisy(shards, limit, seed, device=model.device):
            parts.append(_ask(model, sample, routings))
            bar.update(len(sample.t))
    joined = {key: torch.cat([part[key] for part in parts]).cpu() for key in parts[0]}
    own = torch.tensor([expert.clusters[0] for expert in model.experts])
    matches = joined["cluster"][:, None] == own
    column = torch.where(matches.any(1), matches.int().argmax(1), -1)
    routed = {routing: joined[f"routed {routing}"] for routing in routings}
    return Answers(
        joined["t"],
        joined["cluster"],
        column,
        joined.get("probabilities"),
        joined["errors"],
        joined["angles"],
        joined.get("chosen_angles"),
        routed,
        joined.get("nearest"),
        tuple(own.tolist()),
    )


def _ask(model: Ensemble, sample: Noisy, routings: Sequence[str]) -> dict[str, Tensor]:
    condition, experts = sample.condition(model.conditioning), len(model.experts)
    velocities = torch.stack(
        [expert_velocity(model, number, sample, condition=condition) for number in range(experts)], 1
    )
    found = {
        "t": sample.t,
        "cluster": sample.batch.cluster,
        "errors": velocity_errors(velocities, sample.target[:, None]),
        "angles": mean_angle(velocities),
    }
    if model.router is not None and experts > 1:
        p = model.route(sample.x, sample.t, condition, routing="full")
        found["probabilities"] = p
        two = p.topk(2).indices[..., None, None, None].expand(-1, -1, *velocities.shape[2:])
        found["chosen_angles"] = mean_angle(velocities.gather(1, two))
    if experts > 1 and all(member.density is not None for member in model.references):
        found["nearest"] = model.route(sample.x, sample.t, condition, routing="nearest:full")
    for routing in routings:
        cluster, draw = sample.batch.cluster, sample.draw
        weights = model.route(sample.x, sample.t, condition, routing=routing, cluster=cluster, draw=draw)
        mixed = torch.einsum("bk,bk...->b...", weights, velocities)
        found[f"routed {routing}"] = velocity_errors(mixed, sample.target)
    return found


def expert_velocity(model: Ensemble, number: int, sample: Noisy, *, condition: Condition) -> Tensor:
    """The velocity of one expert alone."""
    cluster = torch.full_like(sample.batch.cluster, model.experts[number].clusters[0])
    return model.velocity(sample.x, sample.t, condition, routing="oracle", cluster=cluster)


def mean_angle(velocities: Tensor) -> Tensor:
    """Mean angle in degrees over the pairs of (rows, experts, …); 0 for one expert."""
    flat = torch.nn.functional.normalize(velocities.flatten(2).double(), dim=-1)
    cosines = flat @ flat.transpose(1, 2)
    first, second = torch.triu_indices(flat.shape[1], flat.shape[1], 1)
    if not len(first):
        return torch.zeros(len(flat), dtype=flat.dtype, device=flat.device)
    return torch.rad2deg(torch.arccos(cosines[:, first, second].clamp(-1, 1))).mean(1)


def dense_error(model: Ensemble, shards: Shards, limit: int, *, seed: int, name: str) -> Summary:
    """Held-out error of a dense model (monolith, student) on the very same noisy samples."""
    with progress(f"held-out error of {name}", len(ValidationSet(shards, seed, limit))) as bar:

        def velocity(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            bar.update(len(t))
            return model.velocity(x, t, condition)

        return validate(velocity, shards, seed=seed, conditioning=model.conditioning, limit=limit, device=model.device)


def report(answers: Answers) -> ExpertDiagnostics:
    """Return all metrics that follow from the answers."""
    here = answers.column >= 0
    column, t, errors = answers.column[here], answers.t[here], answers.errors[here]
    own, others = errors.gather(1, column[:, None])[:, 0], errors.shape[1] - 1
    p, top_2, nearest = answers.probabilities, answers.chosen_angles, answers.nearest
    return ExpertDiagnostics(
        velocity_error={routing: Summary.of(error, answers.t) for routing, error in answers.routed.items()},
        expert_on_cluster=error_matrix(answers),
        disagreement_degrees=Summary.of(answers.angles, answers.t),
        own_cluster_error=Summary.of(own, t) if others else None,
        other_clusters_error=Summary.of((errors.sum(1) - own) / others, t) if others else None,
        disagreement_of_top_2_degrees=None if top_2 is None else Summary.of(top_2, answers.t),
        router=None if p is None else router_metrics(p[here], column, t),
        router_choice=None if p is None else selection(p[here], errors, t),
        nearest=None if nearest is None else router_metrics(nearest[here], column, t),
    )


def error_matrix(answers: Answers) -> ErrorMatrix:
    """Return the error of each expert (column) on each cluster (row), in all and by time."""
    clusters = int(answers.cluster.max()) + 1
    bins = (answers.t * TIME_BINS).long().clamp(max=TIME_BINS - 1)

    def rows(keep: Tensor) -> Matrix:
        means = [answers.errors[keep & (answers.cluster == cluster)].double().mean(0) for cluster in range(clusters)]
        return tuple(tuple(None if value != value else value for value in row.tolist()) for row in means)

    every = torch.ones_like(bins, dtype=torch.bool)
    by_time = tuple(rows(bins == number) for number in range(TIME_BINS))
    return ErrorMatrix(experts=answers.numbers, mean=rows(every), by_time=by_time)


def router_metrics(p: Tensor, column: Tensor, t: Tensor) -> RouterMetrics:
    """Return accuracy, cross-entropy, confidence and calibration error of probabilities (rows, experts)."""
    confidence, guess = p.max(1)
    hit = (guess == column).float()
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
    """Expected calibration error: |accuracy - confidence| in bins of confidence, weighted by their samples."""
    if not len(hit):
        return None
    bins = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, (hit - confidence).double())
    return (gaps.abs().sum() / len(hit)).item()


def selection(p: Tensor, errors: Tensor, t: Tensor) -> RouterChoice:
    """How often the router's first choice is the expert of least error, and the errors of chosen and other experts."""
    chosen = p.argmax(1)
    error = errors.gather(1, chosen[:, None])[:, 0]
    others = (errors.sum(1) - error) / max(1, errors.shape[1] - 1)
    best = (chosen == errors.argmin(1)).float()
    return RouterChoice(
        is_best_share=Summary.of(best, t), chosen_error=Summary.of(error, t), others_error=Summary.of(others, t)
    )


def held_out(run: Path, clusters: int) -> Shards:
    """The held-out samples of all clusters."""
    return Shards.open(run, list(range(clusters)), "held-out")
