from itertools import product
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from atoll.core.errors import AtollError
from atoll.data.kmeans import Floats, IntegerArray, fine_count, fit_fine, merge, nearest_center, separation


def blobs(sizes: list[int], dimensions: int = 32, noise: float = 0.5, seed: int = 0) -> tuple[Floats, IntegerArray]:
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(len(sizes), dimensions))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    rows = centers[labels] + noise * generator.normal(size=(len(labels), dimensions))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels


def fine_sums(rows: Floats, count: int, seed: int = 0) -> tuple[Floats, IntegerArray, IntegerArray]:
    fine, _ = nearest_center(rows, fit_fine(rows, count, 20, seed=seed))
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, fine, rows)
    return sums, np.bincount(fine, minlength=count), fine


def reject_unless(hard: bool) -> NoReturn:
    assert hard
    reject()


def test_fine_centers_find_the_blobs() -> None:
    rows, labels = blobs([200, 300, 400], noise=0.2)
    centers = fit_fine(rows, 3, 20, seed=0)
    assert_allclose(np.linalg.norm(centers, axis=1), 1, atol=1e-5)
    fine, distance = nearest_center(rows, centers)
    assert len({(a, b) for a, b in zip(fine.tolist(), labels.tolist(), strict=True)}) == 3
    assert_allclose(distance, 1 - (rows * centers[fine]).sum(1), atol=1e-5)


def test_the_same_seed_gives_the_same_centers() -> None:
    rows, _ = blobs([300, 300])
    assert np.array_equal(fit_fine(rows, 8, 10, seed=4), fit_fine(rows, 8, 10, seed=4))
    assert not np.array_equal(fit_fine(rows, 8, 10, seed=4), fit_fine(rows, 8, 10, seed=5))


def imbalance(sizes: IntegerArray, groups: IntegerArray) -> float:
    """Return the largest cluster size divided by the mean size."""
    loads = np.bincount(groups, weights=sizes)
    return float(loads.max() / loads.mean())


def cosine(sums: Floats, groups: IntegerArray) -> float:
    """Return the sum of the cosines between all images and the centers of their clusters."""
    return float(sum(np.linalg.norm(sums[groups == k].sum(0)) for k in range(groups.max() + 1)))


def test_the_merge_finds_the_optimal_partition() -> None:
    """Against trying every way to put 8 fine clusters into 3."""
    generator = np.random.default_rng(1)
    for case in range(6):
        sums = generator.normal(size=(8, 5)) * generator.uniform(5, 30, size=(8, 1))
        sizes = generator.integers(10, 40, size=8)
        limit = 1.4
        best = 0.0
        for groups in map(np.array, product(range(3), repeat=8)):
            loads = np.bincount(groups, weights=sizes, minlength=3)
            if loads.max() <= limit * sizes.sum() / 3 and loads.min() > 0:
                best = max(best, sum(np.linalg.norm(sums[groups == k].sum(0)) for k in range(3)))
        merged = merge(sums, sizes, 3, max_imbalance=limit, seed=case)
        assert cosine(sums, merged) >= 0.97 * best
        assert cosine(sums, merged) <= best + 1e-9


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(20, 300), min_size=2, max_size=6),
    clusters=st.integers(2, 6),
    limit=st.sampled_from([1.1, 1.25, 2.0]),
    seed=st.integers(0, 5),
)
def test_the_limit_holds_and_no_cluster_is_empty(sizes: list[int], clusters: int, limit: float, seed: int) -> None:
    rows, _ = blobs(sizes, dimensions=8, seed=seed)
    count = fine_count(len(rows), clusters, 1024)
    sums, fine_sizes, fine = fine_sums(rows, count, seed)
    used = np.flatnonzero(fine_sizes)
    try:
        merged = merge(sums[used], fine_sizes[used], clusters, max_imbalance=limit, seed=seed)
    except AtollError:
        # Only where it is hard: a limit that leaves less room than the largest fine cluster takes.
        reject_unless(fine_sizes.max() > (limit - 1) * len(rows) / clusters)
    table = np.full(count, -1)
    table[used] = merged
    counts = np.bincount(table[fine], minlength=clusters)
    assert counts.sum() == len(rows)
    assert counts.min() > 0
    assert counts.max() <= limit * len(rows) / clusters


def test_a_catch_all_cluster_is_divided() -> None:
    rows, _ = blobs([2000, 100, 100, 100])
    sums, sizes, _ = fine_sums(rows, 128)
    free, bounded = (
        merge(sums, sizes, 4, max_imbalance=100.0, seed=0),
        merge(sums, sizes, 4, max_imbalance=1.25, seed=0),
    )
    assert imbalance(sizes, free) > 2
    assert imbalance(sizes, bounded) <= 1.25
    assert cosine(sums, bounded) <= cosine(sums, free) + 1e-9


def test_blobs_of_equal_size_are_not_divided() -> None:
    rows, labels = blobs([300] * 4, noise=0.3)
    sums, sizes, fine = fine_sums(rows, 32)
    coarse = merge(sums, sizes, 4, max_imbalance=1.25, seed=0)[fine]
    assert len(set(zip(coarse.tolist(), labels.tolist(), strict=True))) == 4


def test_a_fine_cluster_above_the_limit_is_an_error_with_advice() -> None:
    sums, sizes = np.eye(4) * 10, np.array([97, 1, 1, 1])
    with pytest.raises(AtollError, match=r"one fine cluster has 97 of 100 images.*raise clusters.num_fine"):
        merge(sums, sizes, 2, max_imbalance=1.25, seed=0)
    with pytest.raises(AtollError, match="cannot fill 2 clusters"):
        merge(np.eye(3), np.array([10, 10, 10]), 2, max_imbalance=1.25, seed=0)


UNEVEN = np.array([415, 88, 130, 156, 131, 410, 441, 311, 67, 92, 199, 244, 329, 265, 169, 121])


def test_a_restart_that_gets_stuck_is_skipped() -> None:
    generator = np.random.default_rng(0)
    for seed in range(6):
        sums = generator.normal(size=(16, 8))
        sums *= (UNEVEN / np.linalg.norm(sums, axis=1))[:, None]
        assert imbalance(UNEVEN, merge(sums, UNEVEN, 6, max_imbalance=1.25, seed=seed)) <= 1.25


def test_packing_largest_first_is_the_fallback_when_every_restart_gets_stuck() -> None:
    sums, sizes = np.array([[0, 6.0], [1, -3], [1, 8], [0, -5]]), np.array([6, 3, 8, 5])
    assert merge(sums, sizes, 2, max_imbalance=1.05, seed=0).tolist() == [1, 0, 0, 1]


def test_fewer_groups_than_clusters_are_an_error_with_advice() -> None:
    with pytest.raises(AtollError, match=r"only 2 distinct groups of images for 3 clusters; lower clusters.count"):
        merge(np.eye(3), np.array([10, 10, 0]), 3, max_imbalance=2.0, seed=0)


def test_the_advice_for_classes_does_not_mention_fine_clusters() -> None:
    for sizes in (np.array([97, 1, 1, 1]), np.array([10, 10, 10])):
        with pytest.raises(AtollError, match=r"class.*; raise clusters.max_imbalance or lower clusters.count$"):
            merge(np.eye(len(sizes)), sizes, 2, max_imbalance=1.25, seed=0, part="class")


def test_a_single_cluster_holds_everything() -> None:
    merged = merge(np.eye(3), np.array([5, 6, 7]), 1, max_imbalance=1.25, seed=0)
    assert merged.tolist() == [0, 0, 0]


def test_the_number_of_fine_clusters_fits_the_data() -> None:
    assert fine_count(10_000_000, 8, 1024) == 1024
    assert fine_count(6_400, 8, 1024) == 200
    assert fine_count(500, 8, 1024) == 64
    assert fine_count(10, 8, 1024) == 10
    assert fine_count(10_000_000, 8, 4) == 8


def test_separation_of_true_groups_is_higher_than_of_random_ones() -> None:
    rows, labels = blobs([150] * 3, noise=0.2)
    good = separation(rows, labels)
    random = separation(rows, np.random.default_rng(0).permutation(labels))
    assert good["neighbors"] == 1.0
    assert good["silhouette"] > 0.7
    assert abs(random["neighbors"] - 1 / 3) < 0.05
    assert abs(random["silhouette"]) < 0.1
    assert random["explained"] < 0.05 < 0.8 < good["explained"]


def test_explained_is_the_fraction_of_the_spread() -> None:
    rows = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    assert separation(rows, np.array([0, 0, 1, 1]), neighbors=1) == {
        "neighbors": 1.0,
        "explained": pytest.approx(1.0),
        "silhouette": pytest.approx(1.0),
    }
    assert separation(rows, np.zeros(4, int), neighbors=1)["explained"] == pytest.approx(0.0)
