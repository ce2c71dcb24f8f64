import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from atoll.data.shuffle import shuffled


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**31))
def test_every_shuffle_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(count, dtype=np.uint64), count, seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(count))


def test_a_slice_of_positions_gives_the_slice_of_the_shuffle() -> None:
    whole = shuffled(np.arange(1000, dtype=np.uint64), 1000, seed=3, epoch=7)
    assert np.array_equal(shuffled(np.arange(400, 500, dtype=np.uint64), 1000, seed=3, epoch=7), whole[400:500])


def test_the_order_does_not_change_between_versions() -> None:
    assert shuffled(np.arange(10, dtype=np.uint64), 10, seed=0, epoch=0).tolist() == [2, 3, 5, 7, 0, 1, 9, 4, 6, 8]


def test_large_counts_need_no_memory() -> None:
    count = 10**12
    order = shuffled(np.arange(count - 5, count, dtype=np.uint64), count, seed=1, epoch=0)
    assert len(set(order.tolist())) == 5
    assert order.max() < count


@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_every_item_is_equally_likely_at_every_position(vary: str) -> None:
    """Pearson's test on the table of (place, item) over many seeds or epochs, at a chance of 1 in 10,000."""
    count, draws = 12, 2000
    table = np.zeros((count, count))
    for number in range(draws):
        given = {"seed": 5, "epoch": 9, vary: number}
        table[np.arange(count), shuffled(np.arange(count, dtype=np.uint64), count, **given)] += 1
    statistic = ((table - draws / count) ** 2 / (draws / count)).sum()
    assert chi2(df=(count - 1) ** 2).sf(statistic) > 1e-4


def test_consecutive_items_are_separated() -> None:
    """The distance between what follows each other is that of a random permutation: a third of the count."""
    count = 10_000
    order = shuffled(np.arange(count, dtype=np.uint64), count, seed=0, epoch=1).astype(np.int64)
    assert abs(np.abs(np.diff(order)).mean() / (count / 3) - 1) < 0.03


def test_shuffling_zero_items_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot shuffle 0 items"):
        shuffled(np.arange(0, dtype=np.uint64), 0, 0, epoch=0)
