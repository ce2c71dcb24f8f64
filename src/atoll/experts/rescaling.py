"""Conversion between experts that normalize their latents differently, exact on the linear path.

Let x0' = a x0 + b be the latents of the expert, with one scale a and a shift b for each channel. The common state
x = (1-t) x0 + t eps and the expert's state x' = (1-t') x0' + t' eps carry the same information if they have the same
signal-to-noise ratio, t'/(1-t') = a t/(1-t). With n = 1 - t + a t:

    t' = a t / n,      x' = (a x + (1-t) b) / n,      v = v'/n + (1 - 1/a) x' + b/a.

eps is the same on both sides, so noise is N(0, I) in both. If a differs between channels, there is no such t': each
channel would need a different time, and the networks were trained with one time for all channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.device import constant
from atoll.core.errors import AtollError
from atoll.encoders.autoencoder import Statistics
from atoll.flow.schedules import broadcast

TOLERANCE = 1e-4
"""Relative difference of the channels' scales up to which they count as one. Statistics that were written and read as
decimal numbers differ by far less, and those of different data by far more."""


@dataclass(frozen=True)
class Rescaling:
    """The conversion of latents from the common normalization to an expert's: x0' = scale x0 + shift."""

    scale: float
    shift: tuple[float, ...]

    def state(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return x' and t' for states x (batch, channels, …) at times t (batch or 1,)."""
        n = 1 - t + self.scale * t
        own = (self.scale * x + broadcast(1 - t, x) * self._channels(x)) / broadcast(n, x)
        return own, self.scale * t / n

    def velocity(self, own: Tensor, own_state: Tensor, t: Tensor) -> Tensor:
        """Return the common velocity from the expert's velocity v' and its state x', both shaped as x."""
        n = broadcast(1 - t + self.scale * t, own)
        return own / n + (1 - 1 / self.scale) * own_state + self._channels(own) / self.scale

    def log_volume(self, t: Tensor, dimensions: int) -> Tensor:
        """Return log |det dx'/dx|, which turns a log-density of x' into one of x."""
        return dimensions * torch.log(self.scale / (1 - t + self.scale * t))

    def _channels(self, x: Tensor) -> Tensor:
        return constant(self.shift, x).view(-1, *[1] * (x.ndim - 2))


def rescaling(common: Statistics, own: Statistics, name: str) -> Rescaling | None:
    """Return the conversion from the common normalization to an expert's; None if they are equal."""
    if common == own:
        return None
    if len(common.mean) != len(own.mean):
        raise AtollError(f"{name} has latents of {len(own.mean)} channels, the others of {len(common.mean)}")
    scales = [ours / theirs for ours, theirs in zip(common.std, own.std, strict=True)]
    if max(scales) > (1 + TOLERANCE) * min(scales):
        raise AtollError(
            f"{name} scales its latent channels {min(scales):.4g} to {max(scales):.4g} times as the others do. A "
            "single factor for all channels could be converted exactly; different factors cannot, because the noise "
            "would have a different strength in each channel. Train it with the latent statistics of the others"
        )
    scale = sum(scales) / len(scales)
    # x0' = (z - m')/s' with z = s x0 + m, so a = s/s' and b = (m - m')/s'.
    pairs = zip(common.mean, own.mean, own.std, strict=True)
    return Rescaling(scale, tuple((ours - theirs) / std for ours, theirs, std in pairs))
