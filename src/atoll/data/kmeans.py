"""The mathematics of the partition: fine spherical k-means, and a balanced merge of its centres.

Features are unit vectors. A cluster k is described by the sum T_k of its vectors; the direction of T_k is the best
centre, and the total cosine of the samples to their centres is Σ_k ‖T_k‖. That sum is what the merge maximises while no
cluster may hold more samples than the limit.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from atoll.core.errors import AtollError

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Integers = np.ndarray[Any, np.dtype[np.integer[Any]]]

Part = Literal["fine cluster", "class"]
_ADVICE: dict[Part, str] = {
    "fine cluster": "raise clusters.num_fine or clusters.max_imbalance",
    "class": "raise clusters.max_imbalance or lower clusters.count",
}
_RESTARTS = 8
_ROUNDS = 30
_PRICE_STEPS = 60


def fine_count(rows: int, clusters: int, at_most: int) -> int:
    """Number of fine clusters: about 32 samples in each, enough of them to balance, never more than samples."""
    return min(rows, max(clusters, min(at_most, max(rows // 32, 8 * clusters))))


def fit_fine(rows: Floats, count: int, iterations: int, *, seed: int) -> Floats:
    """Centres (count, D) of spherical k-means, each of length one."""
    import faiss

    kmeans = faiss.Kmeans(
        rows.shape[1],
        count,
        niter=iterations,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=len(rows),
    )
    kmeans.train(np.ascontiguousarray(rows, dtype=np.float32))
    return np.asarray(kmeans.centroids)


def nearest_centre(rows: Floats, centres: Floats) -> tuple[Integers, Floats]:
    """The centre with the largest cosine for every row, and 1 minus that cosine."""
    import faiss

    index = faiss.IndexFlatIP(centres.shape[1])
    index.add(np.ascontiguousarray(centres, dtype=np.float32))
    cosine, nearest = index.search(np.ascontiguousarray(rows, dtype=np.float32), 1)
    return nearest[:, 0].astype(np.int32), 1 - cosine[:, 0]


@dataclass(frozen=True)
class Merged:
    """A balanced merge: which cluster every fine cluster went to, and how well it fits."""

    coarse_of_fine: Integers
    imbalance: float
    cosine: float
    """Mean cosine of the samples to the centre of their cluster."""


class _Stuck(Exception):  # noqa: N818 - it names a state
    """No fine cluster can move without breaking the limit elsewhere."""


def merge(
    sums: Floats, sizes: Integers, clusters: int, *, max_imbalance: float, seed: int, part: Part = "fine cluster"
) -> Merged:
    """Join parts, given by the sum of their vectors and their number of samples, into `clusters` even ones."""
    total = int(sizes.sum())
    limit = max_imbalance * total / clusters
    _check_parts(sizes, clusters, limit, part=part)
    best: tuple[float, Integers] | None = None
    for groups in _attempts(sums, sizes, clusters, limit=limit, seed=seed):
        groups = _improve(sums, sizes, groups, clusters=clusters, limit=limit)
        score = float(np.linalg.norm(_group_sums(sums, groups, clusters), axis=1).sum())
        if best is None or score > best[0]:
            best = score, groups
    if best is None:
        raise AtollError(
            f"the samples of a {part} stay together, which is too coarse to fill {clusters} clusters with at most "
            f"{limit:.0f} samples each; {_ADVICE[part]}"
        )
    loads = np.bincount(best[1], weights=sizes, minlength=clusters)
    return Merged(best[1].astype(np.int32), float(loads.max() * clusters / total), best[0] / total)


def _check_parts(sizes: Integers, clusters: int, limit: float, *, part: Part) -> None:
    """Refuse what no merge can fill or balance."""
    if (found := np.count_nonzero(sizes)) < clusters:
        raise AtollError(f"only {found} distinct groups of samples for {clusters} clusters; lower clusters.count")
    if sizes.max() > limit:
        total = sizes.sum()
        raise AtollError(
            f"one {part} holds {sizes.max()} of {total} samples, but {clusters} clusters with max_imbalance "
            f"{limit * clusters / total:g} may hold {limit:.0f} each; {_ADVICE[part]}"
        )


def _attempts(sums: Floats, sizes: Integers, clusters: int, *, limit: float, seed: int) -> Iterator[Integers]:
    """Every balanced grouping that some restart finds; if none does, that of packing the largest first."""
    generator = np.random.Generator(np.random.PCG64(seed))
    found = False
    for _ in range(_RESTARTS if clusters > 1 else 1):
        with suppress(_Stuck):
            yield _balanced_kmeans(sums, sizes, clusters, limit=limit, generator=generator)
            found = True
    if not found:
        with suppress(_Stuck):
            yield _pack(sizes, clusters, limit)


def _pack(sizes: Integers, clusters: int, limit: float) -> Integers:
    """Largest first, each to the emptiest cluster, whatever it looks like."""
    groups: Integers = np.zeros(len(sizes), int)
    loads = np.zeros(clusters)
    for fine in np.argsort(-sizes, kind="stable"):
        groups[fine] = loads.argmin()
        loads[groups[fine]] += sizes[fine]
    if loads.max() > limit:
        raise _Stuck
    return groups


def _group_sums(sums: Floats, groups: Integers, clusters: int) -> Floats:
    one_hot = np.zeros((clusters, len(groups)))
    one_hot[groups, np.arange(len(groups))] = 1
    totals: Floats = one_hot @ sums
    return totals


def _unit(vectors: Floats) -> Floats:
    units: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return units


def _balanced_kmeans(
    sums: Floats, sizes: Integers, clusters: int, *, limit: float, generator: np.random.Generator
) -> Integers:
    """Spherical k-means over the fine clusters in which every assignment respects the limit."""
    centres = _spread_centres(sums, sizes, clusters, generator=generator)
    groups: Integers = np.full(len(sums), -1)
    for _ in range(_ROUNDS):
        before, groups = groups, _assign_evenly(sums @ centres.T, sizes, limit)
        if np.array_equal(before, groups):
            break
        centres = _unit(_group_sums(sums, groups, clusters))
    return groups


def _spread_centres(sums: Floats, sizes: Integers, clusters: int, *, generator: np.random.Generator) -> Floats:
    """k-means++ by samples: each next centre is drawn with the weight of what the ones before it leave unexplained."""
    directions = _unit(sums)
    weight = sizes.astype(float)
    chosen: list[int] = []
    for _ in range(clusters):
        chosen.append(int(generator.choice(len(sums), p=weight / weight.sum())))
        distance = np.clip(1 - directions @ directions[chosen].T, 0, None).min(1)
        weight = sizes * distance
        weight[chosen] = 0
        if weight.sum() <= 0:
            weight = np.where(np.isin(np.arange(len(sums)), chosen), 0.0, 1.0)
    return directions[chosen]


def _assign_evenly(gain: Floats, sizes: Integers, limit: float) -> Integers:
    """Send each fine cluster where `gain` (F, K) is largest, at prices that rise where too many samples go."""
    clusters = gain.shape[1]
    weight = np.maximum(sizes, 1)[:, None]
    price = np.zeros(clusters)
    step = float(np.ptp(gain / weight)) / 4
    for round in range(_PRICE_STEPS):
        groups = (gain - price * weight).argmax(1)
        loads = np.bincount(groups, weights=sizes, minlength=clusters)
        if loads.max() <= limit:
            break
        price = np.maximum(0, price + step / (1 + round / 4) * (loads / limit - 1))
        price -= price.min()
    return _relieve(gain - price * weight, sizes, groups, limit=limit)


def _relieve(gain: Floats, sizes: Integers, groups: Integers, *, limit: float) -> Integers:
    """Move fine clusters out of full clusters, the least loss for a sample first, until the limit holds."""
    groups = groups.copy()
    clusters = gain.shape[1]
    loads = np.bincount(groups, weights=sizes, minlength=clusters)
    weight = np.maximum(sizes, 1)
    while loads.max() > limit:
        full = int(loads.argmax())
        members = np.flatnonzero((groups == full) & (sizes > 0))
        loss = (gain[members, full][:, None] - gain[members]) / weight[members][:, None]
        loss[loads[None, :] + sizes[members][:, None] > limit] = np.inf
        loss[:, full] = np.inf
        member, target = np.unravel_index(loss.argmin(), loss.shape)
        if not np.isfinite(loss[member, target]):
            raise _Stuck
        loads[full] -= sizes[members[member]]
        loads[target] += sizes[members[member]]
        groups[members[member]] = target
    return groups


def _improve(sums: Floats, sizes: Integers, groups: Integers, *, clusters: int, limit: float) -> Integers:
    """Take the best single move again and again while it raises Σ‖T_k‖ and keeps the limit."""
    groups = groups.copy()
    everyone = np.arange(len(sums))
    totals = _group_sums(sums, groups, clusters)
    loads = np.bincount(groups, weights=sizes, minlength=clusters)
    own_square = (sums**2).sum(1)
    inner = sums @ totals.T
    for _ in range(10 * len(sums)):
        norms = np.linalg.norm(totals, axis=1)
        joined = np.sqrt(np.maximum(norms**2 + 2 * inner + own_square[:, None], 0)) - norms
        here = inner[everyone, groups]
        left = np.sqrt(np.maximum(norms[groups] ** 2 - 2 * here + own_square, 0)) - norms[groups]
        rise = joined + left[:, None]
        rise[loads[None, :] + sizes[:, None] > limit] = -np.inf
        rise[everyone, groups] = -np.inf
        rise[loads[groups] <= sizes] = -np.inf  # the last member stays: no cluster may end up empty
        fine, target = np.unravel_index(rise.argmax(), rise.shape)
        if rise[fine, target] <= 1e-9 * norms.sum():
            break
        source = groups[fine]
        totals[source] -= sums[fine]
        totals[target] += sums[fine]
        loads[source] -= sizes[fine]
        loads[target] += sizes[fine]
        groups[fine] = target
        inner[:, [source, target]] = sums @ totals[[source, target]].T
    return groups


def separation(rows: Floats, groups: Integers, neighbours: int = 10) -> dict[str, float]:
    """How well groups of unit vectors keep apart.

    `neighbours`: share of a row's nearest neighbours that are in its own group. `explained`: share of the spread about
    the common centre that the group centres take away. `silhouette`: (b - a) / max(a, b) averaged, with a and b the
    cosine distances to the own and to the nearest other centre.
    """
    clusters = int(groups.max()) + 1
    rows = rows.astype(np.float64)
    totals = _group_sums(rows, groups, clusters)
    similar = rows @ rows.T
    np.fill_diagonal(similar, -np.inf)
    count = min(neighbours, len(rows) - 1)
    nearest = np.argpartition(-similar, count - 1, axis=1)[:, :count]
    spread = len(rows) - np.linalg.norm(totals.sum(0))
    explained = (np.linalg.norm(totals, axis=1).sum() - np.linalg.norm(totals.sum(0))) / spread
    distance = 1 - rows @ _unit(totals).T
    own = distance[np.arange(len(rows)), groups]
    distance[np.arange(len(rows)), groups] = np.inf
    other = distance.min(1)
    return {
        "neighbours": float((groups[nearest] == groups[:, None]).mean()),
        "explained": float(explained),
        "silhouette": float(((other - own) / np.maximum(own, other)).mean()) if clusters > 1 else 0.0,
    }
