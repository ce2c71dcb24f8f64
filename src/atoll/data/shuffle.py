"""Shuffling without state: the place of every sample in an epoch is a formula in (seed, epoch, position)."""

from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 8


def shuffled(positions: Integers, count: int, seed: int, *, epoch: int) -> Integers:
    """Where a shuffle of `count` items puts these positions; a permutation for every (seed, epoch).

    A Feistel network permutes the numbers below the next power of four; a result that is too large is sent through
    again until it fits, which keeps it a permutation. It needs no memory, can start anywhere, and gives the same
    order on every machine and with every version of numpy.
    """
    if count < 1:
        raise ValueError(f"cannot shuffle {count} items")
    half = np.uint64(max(1, (int(count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) + _mix(_mix(np.uint64(seed)) ^ np.uint64(epoch)))
    result = np.asarray(positions, dtype=np.uint64).copy()
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[outside] = (left << half) | right
        outside = result >= count
    return result


def _mix(value: Any) -> Any:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of the value."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
