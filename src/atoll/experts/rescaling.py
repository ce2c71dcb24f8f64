"""Experts may normalise their latents differently: the change between two such spaces, exact on the linear path.

Let x0' = a x0 + b, with one scale a and a shift b for each channel. The state x = (1-t) x0 + t eps of one space and the
state x' = (1-t') x0' + t' eps of the other carry the same information if their noise is equally strong, t'/(1-t') =
a t/(1-t). With n = 1 - t + a t:

    t' = a t / n,      x' = (a x + (1-t) b) / n,      v = v'/n + (1 - 1/a) x' + b/a.

eps is the same on both sides, so noise stays N(0, I) in either space. If a differs between channels there is no such
t': each channel would want a time of its own, and no network trained with one time for all knows the answer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.data.stages.latents import Statistics
from atoll.flow.schedules import broadcast

TOLERANCE = 1e-4
"""Relative difference of the channels' scales that counts as one scale."""


@dataclass(frozen=True)
class Rescaling:
    """From the common space into an expert's own, x0' = scale x0 + shift."""

    scale: float
    shift: tuple[float, ...]

    def state(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x' and t' for states x (batch, channels, …) at times t (batch or 1,)."""
        n = 1 - t + self.scale * t
        own = (self.scale * x + broadcast(1 - t, x) * self._channels(x)) / broadcast(n, x)
        return own, self.scale * t / n

    def velocity(self, own: Tensor, own_state: Tensor, t: Tensor) -> Tensor:
        """The velocity in the common space from that in the expert's own at `state(x, t)`."""
        n = broadcast(1 - t + self.scale * t, own)
        return own / n + (1 - 1 / self.scale) * own_state + self._channels(own) / self.scale

    def log_volume(self, t: Tensor, dimensions: int) -> Tensor:
        """log |dx'/dx|: what turns a log-density of x' into one of x."""
        return dimensions * torch.log(self.scale / (1 - t + self.scale * t))

    def _channels(self, x: Tensor) -> Tensor:
        shift = torch.tensor(self.shift, dtype=x.dtype, device=x.device)
        return shift.view(-1, *[1] * (x.ndim - 2))


def rescaling(common: Statistics, own: Statistics, name: str) -> Rescaling | None:
    """The change from the common space to an expert's own; None if they are one."""
    if common == own:
        return None
    if len(common.mean) != len(own.mean):
        raise AtollError(f"{name} has latents of {len(own.mean)} channels, the others of {len(common.mean)}")
    scales = [ours / theirs for ours, theirs in zip(common.std, own.std, strict=True)]
    if max(scales) > (1 + TOLERANCE) * min(scales):
        raise AtollError(
            f"{name} scales its latent channels {min(scales):.4g} to {max(scales):.4g} times as the others do. One "
            "scale for all channels could be converted exactly; several cannot, for the noise would be of another "
            "strength in each channel. Train it with the statistics of the others (data/latents of one preparation)"
        )
    scale = sum(scales) / len(scales)
    pairs = zip(common.mean, own.mean, own.std, strict=True)
    return Rescaling(scale, tuple((ours - theirs) / std for ours, theirs, std in pairs))
