"""Classifier-free guidance (Ho and Salimans 2022): v = v_null + g (v_condition - v_null).

Only images whose guidance scale g is not 1 need the velocity with the null condition. The rows of a batch are therefore
all images with their conditions, followed by the guided images with the null condition: (batch + guided, C, H, W).
"""

import torch
from torch import Tensor

from atoll.core.device import upload
from atoll.flow.schedules import broadcast

Guidance = float | Tensor
"""A guidance scale: one number for all images, or one for each (batch,). 1 is no guidance."""


def guided_rows(guidance_scale: Guidance, count: int, *, conditioned: bool) -> Tensor:
    """Return the indices (guided,), on the CPU, of the images that also need the velocity with the null condition."""
    if not conditioned or (isinstance(guidance_scale, float | int) and guidance_scale == 1):
        return torch.empty(0, dtype=torch.long)
    if isinstance(guidance_scale, Tensor) and guidance_scale.numel() == count:
        return torch.nonzero(guidance_scale.cpu().flatten() != 1).flatten()
    return torch.arange(count)


def guide(v: Tensor, guided: Tensor, guidance_scale: Guidance, *, rescale: float = 0.0) -> Tensor:
    """Return v_null + g (v - v_null) for the guided images, and v for the others: (batch, C, H, W).

    `v` (batch + guided, C, H, W) holds the velocities of all images, then those of the guided ones with the null
    condition; `guided` (guided,) is on the CPU. Guidance increases the standard deviation of the velocity; `rescale` in
    [0, 1] moves it back towards that of the conditional velocity (Lin et al. 2023, arXiv 2305.08891, section 3.4).
    """
    count = len(v) - len(guided)
    everything = len(guided) == count
    index = guided if everything else upload(guided, v.device)
    conditioned, null = v[:count] if everything else v[:count][index], v[count:]
    scale: Guidance = guidance_scale
    if isinstance(guidance_scale, Tensor):
        some = guidance_scale.cpu().flatten().expand(count)[guided]
        scale = broadcast(upload(some.to(v.dtype), v.device), v)
    result = null + scale * (conditioned - null)
    if rescale:
        pixels = tuple(range(1, v.ndim))
        factor = conditioned.std(pixels, keepdim=True) / result.std(pixels, keepdim=True).clamp(min=1e-12)
        result = result * (rescale * factor + 1 - rescale)
    return result if everything else v[:count].index_copy(0, index, result)
