"""The batches of experts."""

import pytest
import torch

from atoll.ensemble.ensemble import expert_batches, padded_size

WEIGHTS = torch.tensor([[0.0, 1.0, 0.0], [0.25, 0.75, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])


@pytest.mark.parametrize("padded", [False, True])
def test_the_batches_hold_every_nonzero_weight_once(padded: bool) -> None:
    row, weight, spans = expert_batches(WEIGHTS, padded=padded)
    values = torch.arange(15.0).view(3, 5)
    total = torch.zeros(5)  # the weighted sum (rows,) as the ensemble computes it
    for expert, span in spans.items():
        total.index_add_(0, row[span], values[expert][row[span]] * weight[span])
    torch.testing.assert_close(total, (WEIGHTS.T * values).sum(0))
    sizes = [span.stop - span.start for span in spans.values()]
    assert sizes == [2, 4, 1]
    assert len(row) == len(weight) == sum(sizes)
    assert (weight > 0).all(), "these sizes need no padding"


def test_padding_repeats_a_row_with_weight_zero() -> None:
    weights = torch.zeros(7, 3)
    weights[:5, 0] = weights[5:, 2] = 1.0
    assert expert_batches(weights, padded=False)[2] == {0: slice(0, 5), 2: slice(5, 7)}
    row, weight, spans = expert_batches(weights, padded=True)
    assert spans == {0: slice(0, 6), 2: slice(6, 8)}
    assert row.tolist() == [0, 1, 2, 3, 4, 4, 5, 6]
    assert weight.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


def test_there_are_few_sizes_with_little_padding() -> None:
    sizes = [padded_size(count) for count in range(1, 129)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert all(count <= size < 1.5 * count + 1 for count, size in enumerate(sizes, 1))
    shares = [(size - count) / size for count, size in enumerate(sizes, 1)]
    assert max(shares) < 1 / 3
    assert sum(shares) / len(shares) == pytest.approx(0.13, abs=0.005)
