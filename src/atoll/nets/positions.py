"""Positions of image tokens: added to them (2-D sines and cosines, or a learned table), or rotary (RoPE).

Added positions: a grid of another size than the network's own is stretched over the same range of coordinates, row by
row and column by column, as in PixArt.

Rotary positions rotate the queries and keys of each token. A head of width d is d/2 pairs of features. The first half
of the pairs turns with the column of the token, the second half with its row, each pair by its own angle per token. The
scalar product of a rotated query and a rotated key then depends on their offset in columns and rows only, so there is
no table of a fixed size. Coordinates count tokens, as in FLUX. A larger grid has the same angles between neighbors and
larger offsets at its ends; nothing is stretched. `position_scale` divides the coordinates, for those who prefer
interpolation.

Both are computed on the CPU once for each grid and stay on the device, so that a training or sampling step computes
none (`sincos_on`, `rotation`).
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

BASE = 100.0
"""The slowest pair turns once in about 2 pi · 100 tokens. Language models have 10000 for thousands of tokens in a row;
RoPE for vision transformers (Heo et al. 2024) has its square root, because a side of an image has tens."""
CACHED = 64
"""Number of grids and devices whose angles are kept: more than the aspect ratios of a dataset. One grid of 64 x 64
tokens takes 1 MB."""


def sincos_positions(width: int, rows: int, columns: int, *, base: int, scale: float = 1.0) -> Tensor:
    """Return 2-D sine-cosine positions (1, rows · columns, width): first half for the column, second for the row.

    A grid of another size than base × base is stretched over the same range of coordinates, as if the positions were
    interpolated; `scale` shrinks that range.
    """
    frequencies = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width // 4))

    def axis(count: int) -> Tensor:
        coordinates = torch.arange(count, dtype=torch.float32, device="cpu") / (count / base) / scale
        angles = coordinates[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1).float()

    across = axis(columns)[None].expand(rows, columns, width // 2)
    down = axis(rows)[:, None].expand(rows, columns, width // 2)
    return torch.cat([across, down], dim=-1).reshape(1, rows * columns, width)


@lru_cache(maxsize=CACHED)
def sincos_on(
    width: int, rows: int, columns: int, *, base: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Return the sine-cosine positions of a grid on a device; computed and copied once, for all networks and steps."""
    with torch.inference_mode(False):  # otherwise positions that sampling made could not be used in training
        # A blocking copy: the positions are shared by all networks, which may compute on other streams.
        return sincos_positions(width, rows, columns, base=base, scale=scale).to(device, dtype)


def is_sincos(table: Tensor, grid: int, scale: float = 1.0) -> Tensor:
    """Return whether a stored table of grid × grid positions equals the formula, as a bool tensor without a branch."""
    made = sincos_on(table.shape[-1], grid, grid, base=grid, device=table.device, dtype=torch.float32, scale=scale)
    table = table.float()
    # A table that is exactly representable in half precision was rounded to it: allow for that rounding error.
    halves = [(table == table.to(kind)).all() * torch.finfo(kind).eps for kind in (torch.bfloat16, torch.float16)]
    tolerance = 1e-5 + (1e-5 + torch.stack(halves).amax()) * made.abs()
    return ((table - made).abs() <= tolerance).all()


def resized_positions(table: Tensor, grid: int, rows: int, *, columns: int) -> Tensor:
    """Interpolate a learned table of grid × grid positions to another grid."""
    image = table.transpose(1, 2).reshape(1, -1, grid, grid)
    resized = functional.interpolate(image, (rows, columns), mode="bicubic", align_corners=False)
    return resized.flatten(2).transpose(1, 2)


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
