"""Random numbers as a function of (seed, stream, position).

The draw of an image depends on its position in the run, not on the batch size or the rank. So a batch can be made again
anywhere: after a resume, on another number of processes, or in validation. Each position has a generator of its own, so
the numbers of two positions do not overlap, whatever the sizes of their images.
"""

from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
Positions = int | np.ndarray[Any, Any]
"""The positions of a batch: that of its first image if they are consecutive, or an array (batch,) of all of them."""


@unique
class Stream(IntEnum):
    """What numbers are drawn for. Another number would change every result, so none is ever changed or used again."""

    TIME = 1
    """Training times."""
    NOISE = 2
    """Training noise."""
    POSTERIOR = 11
    """Samples of the autoencoder's posterior."""
    CONDITION_DROPOUT = 12
    """Images that are trained without their condition, for guidance."""
    PREVIEW = 13
    """Initial noise of preview samples."""
    VALIDATION = 14
    """Times of validation images."""
    FLIP = 15
    """The choice between an image and its mirror image."""
    CAPTION = 16
    """The choice of a caption."""
    BATCH = 17
    """The order of the batches in an epoch."""
    ADAPTER_DROPOUT = 18
    """Dropout of adapters, by torch's own generator."""
    STUDENT_NOISE = 19
    """Initial noise in the training of a few-step student."""
    STUDENT_LENGTH = 20
    """Lengths of its steps."""
    SAMPLE = 21
    """Initial noise of sampling."""
    STUDENT_VALIDATION = 22
    """Initial noise in its validation."""
    CORRECTOR_NOISE = 23
    """Noise that is added to its samples."""
    CORRECTOR_TIME = 24
    """Times of its noised samples."""
    EVALUATION_SEED = 31
    """Seeds of the images that are generated for an evaluation."""
    EVALUATION_DRAW = 34
    """Drawn experts in the diagnostics of an evaluation."""
    TRAJECTORY = 35
    """Initial noise of measured trajectories."""
    DRAW = 1 << 20
    """Drawn experts; later evaluations of sample-1 use the streams after it, so it is far above the others."""


def key(seed: int, stream: int, position: int) -> int:
    """Return a well-mixed 64-bit key: the finalizer of splitmix64, applied to each part in turn."""
    # The constants are those of splitmix64 (Steele, Lea and Flood 2014).
    mixed = 0
    for part in (seed, stream, position):
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


def generator(seed: int, stream: int, position: int) -> torch.Generator:
    """Return a new generator for one position of one stream."""
    return torch.Generator().manual_seed(key(seed, stream, position))


def uniform(count: int, *, seed: int, stream: int, first: Positions) -> Tensor:
    """Return numbers in [0, 1), shape (count,), for positions first, first + 1, and so on, or for those given."""
    # The upper 24 bits: as many as the significand of float32 holds, so that 1 cannot occur by rounding.
    draws = [key(seed, stream, position) >> 40 for position in _listed(first, count)]
    return torch.tensor(draws, dtype=torch.float32) / 2**24


def normal(shape: tuple[int, ...], *, seed: int, stream: int, first: Positions) -> Tensor:
    """Return standard normal numbers (count, ...) for positions first, first + 1, and so on, or for those given."""
    noise = torch.empty(shape)
    for row, position in zip(noise, _listed(first, shape[0]), strict=True):
        torch.randn(shape[1:], generator=generator(seed, stream, position), out=row)
    return noise


def _listed(first: Positions, count: int) -> Sequence[int]:
    positions = first.tolist() if isinstance(first, np.ndarray) else range(first, first + count)
    if len(positions) != count:
        raise ValueError(f"got {len(positions)} positions for {count} rows")
    return positions
