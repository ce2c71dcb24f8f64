"""Stateless shuffling: the image at each position of an epoch is a function of (seed, epoch, position).

The idea: a Feistel network maps pairs (left, right) of half-words one-to-one, whatever its round function is. So it
permutes the numbers below 4^h, h the bits of a half-word, where 4^h is the smallest power of four that is at least
`count`. A result that is not below `count` is mapped again until it is ("cycle walking"), which keeps the map a
permutation. On average this takes less than four applications.
"""

from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.uint64]]

# Four rounds of a Feistel network are pseudorandom if the round function is (Luby and Rackoff 1988, strong form);
# twice as many is a margin for our cheap round function. The tests check uniformity.
_ROUNDS = 8


def shuffled(positions: Integers, count: int, seed: int, *, epoch: int) -> Integers:
    """Return the item at each of these positions of a shuffle of `count` items; each (seed, epoch) has its shuffle.

    It needs no memory and can start at any position. The order is the same on every machine and numpy version.
    """
    if count < 1:
        raise ValueError(f"cannot shuffle {count} items")
    half = np.uint64(max(1, (int(count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) + _mix(_mix(np.uint64(seed)) ^ np.uint64(epoch)))
    result = np.asarray(positions, dtype=np.uint64).copy()
    outside = np.ones(result.shape, dtype=bool)
    # Cycle walking: only results outside the range are mapped again.
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[outside] = (left << half) | right
        outside = result >= count
    return result


def _mix(value: Any) -> Any:
    """Return the finalizer of SplitMix64 (Steele et al. 2014): each result bit depends on every bit of the value."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
