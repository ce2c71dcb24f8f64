"""The order of batches if images have several sizes: each batch has images of one size.

Every size s has its own endless stream of images (see `shuffle.py`), and the batch j of that size takes the positions
jB … (j+1)B of it, B the batch size. Of the n_s images of a size, floor(e·n_s / B) batches come before epoch e. So epoch
e has floor((e+1)·n_s / B) - floor(e·n_s / B) batches of each size, which are shuffled together. Over the epochs, every
image appears equally often, whatever its size.

The batch of a step is found by bisection over the epochs and one shuffle. Nothing is stored, so training resumes at any
step.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.data.shuffle import Integers, shuffled
from atoll.flow import rng

Indices = np.ndarray[Any, np.dtype[np.int64]]

BATCH_STREAM = 17
"""Random stream of the order of the batches in an epoch."""


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

    def _batches(self, epoch: int, slots: Integers) -> tuple[Indices, Indices]:
        """Return size and number of the batches at some places of an epoch."""
        first, following = (np.array(self._before(number), dtype=np.int64) for number in (epoch, epoch + 1))
        ends = np.cumsum(following - first)
        # Before the shuffle, the batches of an epoch are in the order of sizes; those of size i end at `ends[i]`.
        mixed = shuffled(slots, int(ends[-1]), rng.key(self.seed, BATCH_STREAM, 0), epoch=epoch).astype(np.int64)
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
