"""The clustering: fine spherical k-means, and a balanced merge of the fine clusters.

Features are unit vectors. Let T_k be the sum of the vectors of cluster k. The best center of the cluster is the
direction of T_k, and the sum of the cosines between all images and their centers is Σ_k ‖T_k‖. The merge maximizes
this sum under the constraint that no cluster has more images than a limit.

Balance matters because each cluster trains one expert: a small cluster's expert overfits, and a large one's determines
how long the training takes. k-means alone gives sizes that differ by factors. So the data is first divided into many
fine clusters, which are then merged as a whole: the merge handles F fine clusters of sizes n_f and sums S_f, of shape
(F,) and (F, D), instead of all images. It has three steps, repeated from several random starts:

1. Balanced k-means: assign fine clusters to centers, with a price per image for each cluster that rises while the
   cluster is too large and falls while it is not (the dual variable of the size constraint).
2. Move fine clusters out of clusters that are still too large, with the least loss per image.
3. Move single fine clusters as long as a move increases Σ_k ‖T_k‖ and respects the limit.
"""

from contextlib import suppress
from typing import Any, Literal

import numpy as np

from atoll.core.errors import AtollError

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
IntegerArray = np.ndarray[Any, np.dtype[np.integer[Any]]]

GroupName = Literal["fine cluster", "class"]
_ADVICE: dict[GroupName, str] = {
    "fine cluster": "raise clusters.num_fine or clusters.max_imbalance",
    "class": "raise clusters.max_imbalance or lower clusters.count",
}
# Orders of magnitude. Restarts and rounds are cheap, because the merge handles at most clusters.num_fine vectors, not
# images. Assignments usually stop changing within some ten rounds.
_RESTARTS = 8
_ROUNDS = 30
_PRICE_STEPS = 60


def fine_count(rows: int, clusters: int, at_most: int) -> int:
    """Return the number of fine clusters: about 32 images in each, enough of them to balance, at most one per image."""
    # 32 images give a stable center, and eight fine clusters per cluster let sizes vary in steps of an eighth. Both
    # numbers are choices, which matter for small datasets only: large ones have `at_most`.
    return min(rows, max(clusters, min(at_most, max(rows // 32, 8 * clusters))))


def fit_fine(rows: Floats, count: int, iterations: int, *, seed: int) -> Floats:
    """Return the centers (count, D) of spherical k-means, each of length 1."""
    import faiss

    kmeans = faiss.Kmeans(
        rows.shape[1],
        count,
        niter=iterations,
        seed=seed,
        spherical=True,
        # Use all rows: faiss would otherwise warn below 39 rows per center and subsample above 256.
        min_points_per_centroid=1,
        max_points_per_centroid=len(rows),
    )
    kmeans.train(np.ascontiguousarray(rows, dtype=np.float32))
    return np.asarray(kmeans.centroids)


def nearest_center(rows: Floats, centers: Floats) -> tuple[IntegerArray, Floats]:
    """Return the center with the largest cosine for every row, and 1 minus that cosine."""
    import faiss

    index = faiss.IndexFlatIP(centers.shape[1])
    index.add(np.ascontiguousarray(centers, dtype=np.float32))
    cosine, nearest = index.search(np.ascontiguousarray(rows, dtype=np.float32), 1)
    return nearest[:, 0].astype(np.int32), 1 - cosine[:, 0]


class _Stuck(Exception):  # noqa: N818 - it names a state
    """No fine cluster can move without breaking the limit elsewhere."""


def merge(
    sums: Floats,
    sizes: IntegerArray,
    clusters: int,
    *,
    max_imbalance: float,
    seed: int,
    part: GroupName = "fine cluster",
) -> IntegerArray:
    """Merge parts, given by the sums of their vectors (F, D) and their sizes (F,), into `clusters` balanced clusters.

    Return the cluster of each part (F,). No cluster gets more than `max_imbalance` times the mean number of images.
    Raise `AtollError` if that is impossible.
    """
    total = int(sizes.sum())
    limit = max_imbalance * total / clusters
    if (found := np.count_nonzero(sizes)) < clusters:
        raise AtollError(f"only {found} distinct groups of images for {clusters} clusters; lower clusters.count")
    if sizes.max() > limit:
        raise AtollError(
            f"one {part} has {sizes.max()} of {total} images, but {clusters} clusters with max_imbalance "
            f"{limit * clusters / total:g} may have {limit:.0f} each; {_ADVICE[part]}"
        )

    # The balanced grouping of every restart that finds one; if none does, packing the largest part first.
    generator = np.random.Generator(np.random.PCG64(seed))
    attempts: list[IntegerArray] = []
    for _ in range(_RESTARTS if clusters > 1 else 1):
        with suppress(_Stuck):
            attempts.append(_balanced_kmeans(sums, sizes, clusters, limit=limit, generator=generator))
    if not attempts:
        attempts = _pack(sizes, clusters, limit)

    if not attempts:
        raise AtollError(
            f"cannot fill {clusters} clusters with at most {limit:.0f} images each, because the images of a {part} "
            f"stay together; {_ADVICE[part]}"
        )
    improved = [_improve(sums, sizes, groups, clusters=clusters, limit=limit) for groups in attempts]
    best = max(improved, key=lambda groups: np.linalg.norm(_group_sums(sums, groups, clusters), axis=1).sum())
    return best.astype(np.int32)


def _pack(sizes: IntegerArray, clusters: int, limit: float) -> list[IntegerArray]:
    """Assign the largest part first, each to the smallest cluster, regardless of similarity; [] if the limit fails."""
    groups: IntegerArray = np.zeros(len(sizes), int)
    loads = np.zeros(clusters)
    for fine in np.argsort(-sizes, kind="stable"):
        groups[fine] = loads.argmin()
        loads[groups[fine]] += sizes[fine]
    return [groups] if loads.max() <= limit else []


def _group_sums(sums: Floats, groups: IntegerArray, clusters: int) -> Floats:
    one_hot = np.zeros((clusters, len(groups)))
    one_hot[groups, np.arange(len(groups))] = 1
    totals: Floats = one_hot @ sums
    return totals


def _unit(vectors: Floats) -> Floats:
    units: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return units


def _balanced_kmeans(
    sums: Floats, sizes: IntegerArray, clusters: int, *, limit: float, generator: np.random.Generator
) -> IntegerArray:
    """Return the cluster of each fine cluster, by spherical k-means whose assignments respect the limit."""
    centers = _spread_centers(sums, sizes, clusters, generator=generator)
    groups: IntegerArray = np.full(len(sums), -1)
    for _ in range(_ROUNDS):
        before, groups = groups, _assign_evenly(sums @ centers.T, sizes, limit)
        if np.array_equal(before, groups):
            break
        centers = _unit(_group_sums(sums, groups, clusters))
    return groups


def _spread_centers(sums: Floats, sizes: IntegerArray, clusters: int, *, generator: np.random.Generator) -> Floats:
    """Return initial centers (clusters, D) by k-means++, with weights size · (1 - cosine to the nearest center)."""
    directions = _unit(sums)
    weight = sizes.astype(float)
    chosen: list[int] = []
    for _ in range(clusters):
        chosen.append(int(generator.choice(len(sums), p=weight / weight.sum())))
        distance = np.clip(1 - directions @ directions[chosen].T, 0, None).min(1)
        weight = sizes * distance
        weight[chosen] = 0
        # All remaining parts coincide with a center: draw any of them.
        if weight.sum() <= 0:
            weight = np.where(np.isin(np.arange(len(sums)), chosen), 0.0, 1.0)
    return directions[chosen]


def _assign_evenly(gain: Floats, sizes: IntegerArray, limit: float) -> IntegerArray:
    """Assign each fine cluster to the largest `gain` (F, K), minus prices that rise for clusters above the limit."""
    clusters = gain.shape[1]
    weight = np.maximum(sizes, 1)[:, None]
    price = np.zeros(clusters)
    # Subgradient steps on the prices. The first step is a quarter of the range of gains per image, and steps shrink
    # like 1/(1 + round/4), as convergence needs; the exact numbers are choices.
    step = float(np.ptp(gain / weight)) / 4
    for round in range(_PRICE_STEPS):
        groups = (gain - price * weight).argmax(1)
        loads = np.bincount(groups, weights=sizes, minlength=clusters)
        if loads.max() <= limit:
            break
        price = np.maximum(0, price + step / (1 + round / 4) * (loads / limit - 1))
        # Only differences of prices matter.
        price -= price.min()
    # Fine clusters are indivisible, so prices alone may never meet the limit.
    return _relieve(gain - price * weight, sizes, groups, limit=limit)


def _relieve(gain: Floats, sizes: IntegerArray, groups: IntegerArray, *, limit: float) -> IntegerArray:
    """Move fine clusters out of the largest cluster, with the least loss per image, until the limit holds."""
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


def _improve(sums: Floats, sizes: IntegerArray, groups: IntegerArray, *, clusters: int, limit: float) -> IntegerArray:
    """Make the best single move repeatedly, while it increases Σ‖T_k‖ and respects the limit."""
    # Moving part f from cluster a to b changes the sum by ‖T_b + S_f‖ - ‖T_b‖ (joined) plus ‖T_a - S_f‖ - ‖T_a‖
    # (left). With the products S_f·T_k (F, K) at hand, all F·K moves are evaluated without forming new vectors:
    # ‖T + S‖² = ‖T‖² + 2 S·T + ‖S‖².
    groups = groups.copy()
    everyone = np.arange(len(sums))
    totals = _group_sums(sums, groups, clusters)
    loads = np.bincount(groups, weights=sizes, minlength=clusters)
    own_square = (sums**2).sum(1)
    inner = sums @ totals.T
    # Each move increases the sum, so the loop ends by itself; the bound is for rounding errors.
    for _ in range(10 * len(sums)):
        norms = np.linalg.norm(totals, axis=1)
        joined = np.sqrt(np.maximum(norms**2 + 2 * inner + own_square[:, None], 0)) - norms
        here = inner[everyone, groups]
        left = np.sqrt(np.maximum(norms[groups] ** 2 - 2 * here + own_square, 0)) - norms[groups]
        rise = joined + left[:, None]
        rise[loads[None, :] + sizes[:, None] > limit] = -np.inf
        rise[everyone, groups] = -np.inf
        # The last member stays, so that no cluster becomes empty.
        rise[loads[groups] <= sizes] = -np.inf
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


def separation(rows: Floats, groups: IntegerArray, neighbors: int = 10) -> dict[str, float]:
    """Return how well groups of unit vectors (N, D) are separated.

    `neighbors`: fraction of a row's nearest neighbors in the same group. `explained`: fraction of the spread around the
    common center that the group centers explain. `silhouette`: mean of (b - a) / max(a, b), with a and b the cosine
    distances to the row's center and to the nearest other center.
    """
    clusters = int(groups.max()) + 1
    rows = rows.astype(np.float64)
    totals = _group_sums(rows, groups, clusters)
    similar = rows @ rows.T
    np.fill_diagonal(similar, -np.inf)
    count = min(neighbors, len(rows) - 1)
    nearest = np.argpartition(-similar, count - 1, axis=1)[:, :count]
    spread = len(rows) - np.linalg.norm(totals.sum(0))
    explained = (np.linalg.norm(totals, axis=1).sum() - np.linalg.norm(totals.sum(0))) / spread
    distance = 1 - rows @ _unit(totals).T
    own = distance[np.arange(len(rows)), groups]
    distance[np.arange(len(rows)), groups] = np.inf
    other = distance.min(1)
    return {
        "neighbors": float((groups[nearest] == groups[:, None]).mean()),
        "explained": float(explained),
        "silhouette": float(((other - own) / np.maximum(own, other)).mean()) if clusters > 1 else 0.0,
    }
