"""Stateless shuffling: the image at each position of an epoch is a function of (seed, epoch, position).

The idea: a Feistel network maps pairs (left, right) of half-words one-to-one, whatever its round function is. So it
permutes the numbers below 4^h, h the bits of a half-word, where 4^h is the smallest power of four that is at least
`count`. A result that is not below `count` is mapped again until it is ("cycle walking"), which keeps the map a
permutation. On average this takes less than four applications.

If images have several sizes, each batch has images of one size (`BatchOrder`). Every size s has its own endless stream
of images, and the batch j of that size takes the positions jB … (j+1)B of it, B the batch size. Of the n_s images of a
size, floor(e·n_s / B) batches come before epoch e. So epoch e has floor((e+1)·n_s / B) - floor(e·n_s / B) batches of
each size, which are shuffled together. Over the epochs, every image appears equally often, whatever its size. The batch
of a step is found by bisection over the epochs and one shuffle. Nothing is stored, so training resumes at any step.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.flow import rng

WordArray = np.ndarray[Any, np.dtype[np.uint64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


# Four rounds of a Feistel network are pseudorandom if the round function is (Luby and Rackoff 1988, strong form);
# twice as many is a margin for our cheap round function. The tests check uniformity.
_ROUNDS = 8


def shuffled(positions: WordArray, count: int, seed: int, *, epoch: int) -> WordArray:
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


@dataclass(frozen=True)
class BatchOrder:
    """The order of batches of some sizes."""

    counts: Sequence[int]
    """Number of images of each size, at least 1."""
    batch_size: int
    seed: int

    def locate(self, step: int) -> tuple[int, int]:
        """Return the size of the batch of a step (its index in `counts`), and the number of the batch in that size."""
        epoch = self._epoch(step)
        size, batch = self._batches(epoch, np.array([step - sum(self._before(epoch))], dtype=np.uint64))
        return int(size[0]), int(batch[0])

    def images(self, steps: int) -> list[int]:
        """Return the number of images of each size in the first steps."""
        epoch = self._epoch(steps)
        before = self._before(epoch)
        sizes, _ = self._batches(epoch, np.arange(steps - sum(before), dtype=np.uint64))
        batches = np.bincount(sizes, minlength=len(self.counts)) + before
        return [int(count) * self.batch_size for count in batches]

    def _batches(self, epoch: int, slots: WordArray) -> tuple[Indices, Indices]:
        """Return size and number of the batches at some places of an epoch."""
        first, following = (np.array(self._before(number), dtype=np.int64) for number in (epoch, epoch + 1))
        ends = np.cumsum(following - first)
        # Before the shuffle, the batches of an epoch are in the order of sizes; those of size i end at `ends[i]`.
        mixed = shuffled(slots, int(ends[-1]), rng.key(self.seed, rng.Stream.BATCH, 0), epoch=epoch).astype(np.int64)
        sizes = np.searchsorted(ends, mixed, side="right").astype(np.int64)
        return sizes, following[sizes] - ends[sizes] + mixed

    def _before(self, epoch: int) -> list[int]:
        """Return the number of batches of each size before an epoch."""
        return [epoch * count // self.batch_size for count in self.counts]

    def _epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        # Each size has a batch at the latest every `batch_size` epochs.
        epochs = range((step + 1) * self.batch_size)
        return bisect.bisect_right(epochs, step, key=lambda epoch: sum(self._before(epoch + 1)))
