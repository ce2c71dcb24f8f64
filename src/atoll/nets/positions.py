"""Position embeddings of image tokens that are added to them: 2-D sines and cosines, or a learned table.

A grid of another size than the network's own is stretched over the same range of coordinates, row by row and column by
column, as in PixArt. Grids are computed on the CPU once and stay on the device, so that a training or sampling step
computes none (`sincos_on`). Rotary positions are in `rotary`.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from atoll.nets.rotary import CACHED


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
