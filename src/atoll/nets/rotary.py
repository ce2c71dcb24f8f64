"""Two-dimensional rotary position embedding (RoPE): the position of a token rotates its queries and keys.

A head of width d is d/2 pairs of features. The first half of the pairs turns with the column of the token, the second
half with its row, each pair by its own angle per token. The scalar product of a rotated query and a rotated key then
depends on their offset in columns and rows only, so there is no table of a fixed size.

Coordinates count tokens, as in FLUX. A larger grid has the same angles between neighbors and larger offsets at its
ends; nothing is stretched. `position_scale` divides the coordinates, for those who prefer interpolation.
"""

from functools import lru_cache

import torch
from torch import Tensor

BASE = 100.0
"""The slowest pair turns once in about 2 pi · 100 tokens. Language models have 10000 for thousands of tokens in a row;
RoPE for vision transformers (Heo et al. 2024) has its square root, because a side of an image has tens."""
CACHED = 64
"""Number of grids and devices whose angles are kept: more than the aspect ratios of a dataset. One grid of 64 x 64
tokens takes 1 MB."""


@lru_cache(maxsize=CACHED)
def rotation(
    rows: int, columns: int, head_width: int, *, scale: float, device: torch.device, unrotated: int = 0
) -> Tensor:
    """Return cosines and sines of the angles, (2, tokens, head width / 2), in float32.

    The tokens are `unrotated` ones, such as a CLS token, and then rows · columns. The result is copied to the device
    once; all later steps find it there.
    """
    pairs = head_width // 4
    with torch.inference_mode(False):  # otherwise angles that sampling made could not be used in training
        frequencies = BASE ** (-torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs)
        across, down = (
            torch.arange(count, dtype=torch.float64, device="cpu")[:, None] / scale * frequencies
            for count in (columns, rows)
        )
        angles = torch.cat(
            [across[None].expand(rows, columns, pairs), down[:, None].expand(rows, columns, pairs)], dim=-1
        ).flatten(0, 1)
        angles = torch.cat([angles.new_zeros(unrotated, 2 * pairs), angles])
        # A blocking copy: the angles are shared by all networks, which may compute on other streams.
        return torch.stack([angles.cos(), angles.sin()]).float().to(device)


def rotate(x: Tensor, turned: Tensor) -> Tensor:
    """Rotate queries or keys (batch, heads, tokens, head width) by angles of `rotation`; return float32.

    A pair is a feature of the first half of the head and the one at the same place of the second half.
    """
    cosines, sines = turned.unbind(0)
    first, second = x.float().chunk(2, dim=-1)
    rotated = [
        torch.addcmul(first * cosines, second, sines, value=-1),
        torch.addcmul(second * cosines, first, sines),
    ]
    return torch.cat(rotated, dim=-1)
