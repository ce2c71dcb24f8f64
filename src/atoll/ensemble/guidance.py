"""Classifier-free guidance: the velocity is extrapolated from the one without the condition (Ho and Salimans 2022)."""

import torch
from torch import Tensor

from atoll.flow.schedules import broadcast

Guidance = float | Tensor
"""A guidance scale: one for all images, or one for each (batch,). 1 is no guidance."""


def guided_rows(guidance_scale: Guidance, x: Tensor, *, conditioned: bool) -> Tensor:
    """Return the numbers of the images that also need the velocity without condition."""
    if not conditioned or (isinstance(guidance_scale, float | int) and guidance_scale == 1):
        return torch.empty(0, dtype=torch.long, device=x.device)
    if isinstance(guidance_scale, Tensor):
        return torch.nonzero(guidance_scale.to(x.device) != 1).flatten()
    return torch.arange(len(x), device=x.device)


def guide(v: Tensor, guided: Tensor, guidance_scale: Guidance, *, rescale: float = 0.0) -> Tensor:
    """Return v_null + g (v - v_null) for the guided images, and v for the others.

    `v` (batch + guided, …) holds the velocities of all images, then those of the guided ones without condition.
    Guidance makes velocities too large; `rescale` moves their spread back to that of the unguided ones (Lin 2023).
    """
    count = len(v) - len(guided)
    conditioned, null = v[:count][guided], v[count:]
    scale = guidance_scale if isinstance(guidance_scale, float | int) else broadcast(guidance_scale.to(v)[guided], v)
    result = null + scale * (conditioned - null)
    if rescale:
        spread = tuple(range(1, v.ndim))
        factor = conditioned.std(spread, keepdim=True) / result.std(spread, keepdim=True).clamp(min=1e-12)
        result = result * (rescale * factor + 1 - rescale)
    return v[:count].index_copy(0, guided, result)
