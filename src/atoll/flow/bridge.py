"""The bridge: a network trained under any (schedule, prediction) answers with the velocity on the linear path.

Exact mode. At linear time t the state is x = (1-t) x0 + t eps. The expert's own state of equal signal-to-noise ratio,
z_s = alpha_s x0 + sigma_s eps with sigma_s/alpha_s = t/(1-t), is x rescaled by c = alpha_s/(1-t) = sigma_s/t: the same
information, so an ideal expert's E[x0|z_s] is E[x0|x]. The expert is asked at (c x, s), and its answer gives

    v = (x - x0)/t     for t >= 1/2, where x0 is the well-conditioned half of the pair,
    v = (eps - x)/(1-t) for t < 1/2, where eps is.

In both, v is linear in x and in the output, and the pair (x - t v, x + (1-t) v) is consistent with x by construction.

Near the ends three things keep the answer finite, none of which changes an ideal expert's answer between them:
 - a discrete table ends at some SNR; beyond it (and within `END` of 0 and 1) the expert is asked at its last time, with
   the state kept at the scale it knows;
 - x0 is bounded: E[x0|x] is an average of data, so it lies within the range of the data (`x0_bound` standard deviations
   from the mean);
 - with `prediction_error` e > 0, the RMS error of the network's output, x0 at t >= 1/2 is shrunk to the data's mean by
   the Wiener factor 1/(1 + (e dx0/doutput / data_std)²): an epsilon network's x0 is worth nothing as alpha goes to 0.

They need the mean m and the standard deviation of the data (`data_mean`, `data_std`): one number, or one for each
channel. Standardized latents have 0 and 1; latents that were multiplied by one factor do not. The bridge computes with
x0 - m: every prediction is linear in (x0, eps), so the part that belongs to (m, 0) is subtracted from state and output,
and m from the velocity.

A network that computes in half precision has a rounding error of its own, 2^-7 for bfloat16, however fine the state is.
It counts as one more part of e, and as the error of eps at t < 1/2, where an x0 network divides by sigma.

The published modes are HDDM's conversion of epsilon experts, kept for comparison. Both feed the raw x at step
round(999 t), clamp x0 to ±20 and return v = eps - x0 with the raw eps. The paper does not state which alpha and sigma
recover x0 from a state of the linear path, so there are two readings:

    published-linear     x0 = (x - t eps) / max(1-t, 0.01)               alpha and sigma of the linear path
    published-schedule   x0 = (x - sigma_t eps) / max(alpha_t, 0.01)     alpha and sigma of the expert's own schedule
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from atoll.core.errors import unknown
from atoll.core.names import BridgeMode, Prediction
from atoll.flow.predictions import Pair, check_prediction, from_pair, pair_weights
from atoll.flow.schedules import LINEAR, Schedule, broadcast, check_times

END = 1e-4
"""Closest approach to t = 0 and t = 1, where one of the halves of the pair carries no information."""

PUBLISHED_STEPS = 999
PUBLISHED_ALPHA_FLOOR = 0.01
PUBLISHED_X0_CLAMP = 20.0


class Query(NamedTuple):
    """What to ask the network: its input, the time it is told, and that time on its schedule's own [0, 1]."""

    state: Tensor
    timestep: Tensor
    time: Tensor


class Linear(NamedTuple):
    """v = state · x + output · y, with coefficients shaped to multiply x: (batch, 1 or channels, 1, …)."""

    state: Tensor
    output: Tensor


@dataclass(frozen=True)
class Bridge:
    """From (schedule, prediction) into velocity on the linear path. Dimensions of x beyond the first are free."""

    schedule: Schedule
    prediction: Prediction
    mode: BridgeMode = "exact"
    x0_bound: float | None = 10.0
    prediction_error: float = 0.0
    data_mean: float | tuple[float, ...] = 0.0
    data_std: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        """Check the options."""
        check_prediction(self.prediction)
        if self.mode not in get_args(BridgeMode):
            raise ValueError(unknown("bridge mode", self.mode, get_args(BridgeMode)))
        if self.published and self.prediction not in ("epsilon", "velocity"):
            raise ValueError(f"the published conversion covers epsilon and velocity experts, not {self.prediction!r}")
        least = min(self.data_std) if isinstance(self.data_std, tuple) else self.data_std
        if self.prediction_error < 0 or least <= 0 or (self.x0_bound is not None and self.x0_bound <= 0):
            raise ValueError(f"expected prediction_error >= 0, data_std > 0 and x0_bound > 0, got {self}")

    @property
    def identity(self) -> bool:
        """Whether the network answers with the velocity on the linear path already."""
        return self.schedule == LINEAR and self.prediction == "velocity"

    @property
    def published(self) -> bool:
        """Whether the mode is one of the two readings of HDDM's conversion."""
        return self.mode != "exact"

    @property
    def exact_range(self) -> tuple[float, float]:
        """The linear times whose SNR the schedule reaches: within them the bridge is exact for an ideal expert."""
        ends = self.schedule.log_snr(torch.tensor([0.0, 1.0], dtype=torch.float64))
        low, high = LINEAR.time_of_log_snr(ends).tolist()
        return max(low, END), min(high, 1 - END)

    def query(self, x: Tensor, t: Tensor) -> Query:
        """The question to put to the network when the linear path is at state x and time t."""
        t = check_times(t, x)
        if self.identity:
            return Query(x, LINEAR.timestep(t), t)
        if self.published:
            step = (PUBLISHED_STEPS * t).round()
            return Query(x, step, step / PUBLISHED_STEPS)
        time = self._matched_time(t)
        scale, input_scale = self._state_scale(t, time, x), broadcast(self.schedule.input_scale(time), x)
        state = scale * input_scale * x
        if self._off_center:
            # Zero where the schedule reaches the SNR. Beyond, the mean gets the weight it has in the expert's states.
            missing = broadcast(self.schedule.alpha(time), x) - scale * broadcast(1 - t, x)
            state = state + missing * input_scale * self._channels(self.data_mean, x)
        return Query(state.to(x.dtype), self.schedule.timestep(time), time)

    def velocity(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity on the linear path, in x's dtype, from the network's output for `query(x, t)`.

        Pass the output in the dtype in which the network computed: near the ends it is trusted no further than its
        rounding error allows.
        """
        if output.shape != x.shape:
            raise ValueError(f"output and state must have one shape, got {tuple(output.shape)} and {tuple(x.shape)}")
        if self.identity:
            return output.to(x.dtype)
        t = check_times(t, x)
        if self.published:
            return self._published(output, x, t).to(x.dtype)
        resolution, rounding = (torch.finfo(part.dtype).eps for part in (x, output))
        weights = self._linear(t, x, rounding if rounding > resolution else 0.0)
        state, mean = x, self._channels(self.data_mean, x)
        if self._off_center:
            state = x - broadcast(1 - t, x) * mean
            output = output - self._share_of_x0(t, x) * mean
        v = weights.state * state + weights.output * output
        if self.x0_bound is not None:
            t_wide, bound = broadcast(t.clamp(min=END), x), self.x0_bound * self._channels(self.data_std, x)
            x0 = state - t_wide * v
            bounded = x0.clamp(-bound, bound)
            v = torch.where(x0 == bounded, v, (state - bounded) / t_wide)
        return (v - mean if self._off_center else v).to(x.dtype)

    def wrap(self, network: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The network as a velocity field: `field(x, t, **condition)`."""

        def field(x: Tensor, t: Tensor, **condition: Any) -> Tensor:
            query = self.query(x, t)
            return self.velocity(network(query.state, query.timestep, **condition), x, t)

        return field

    def _matched_time(self, t: Tensor) -> Tensor:
        """The schedule's time of equal SNR."""
        return self.schedule.time_of_log_snr(LINEAR.log_snr(t.clamp(END, 1 - END)))

    @property
    def _off_center(self) -> bool:
        """Whether the data's mean is not 0: only then is there something to center."""
        return any(self.data_mean) if isinstance(self.data_mean, tuple) else self.data_mean != 0

    @staticmethod
    def _channels(values: float | tuple[float, ...], x: Tensor) -> Any:
        """Return one number, or one for each channel shaped to multiply x (batch, channels, …)."""
        if not isinstance(values, tuple):
            return values
        if x.ndim < 2 or len(values) != x.shape[1]:
            raise ValueError(f"the data mean and std have {len(values)} channels, got states {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.tensor(values, dtype=dtype, device=x.device).view(-1, *[1] * (x.ndim - 2))

    def _share_of_x0(self, t: Tensor, x: Tensor) -> Tensor:
        """Return the factor of x0 in the prediction, which is linear in (x0, eps)."""
        time = self._matched_time(t)
        one = torch.ones_like(broadcast(time, x))
        return from_pair(Pair(one, torch.zeros_like(one)), time, self.prediction, schedule=self.schedule)

    def _state_scale(self, t: Tensor, time: Tensor, x: Tensor) -> Tensor:
        """Return the factor c from x to the expert's state, shaped to multiply x.

        It is alpha_s/(1-t) = sigma_s/t where the schedule reaches the SNR. Written as the ratio of the two states'
        standard deviations, it also holds beyond that range.
        """
        variance, t = self._channels(self.data_std, x) ** 2, broadcast(t, x)
        own = self.schedule.at(time, x)
        scale: Tensor = (variance * own.alpha**2 + own.sigma**2).sqrt() / (variance * (1 - t) ** 2 + t**2).sqrt()
        return scale

    def _linear(self, t: Tensor, x: Tensor, rounding: float) -> Linear:
        """Return v, for data of mean 0, as a linear function of state and output.

        `rounding` is the rounding error of the output where it is coarser than that of the state, else 0.
        """
        time, inner = self._matched_time(t), broadcast(t.clamp(END, 1 - END), x)
        w = pair_weights(self.prediction, self.schedule.at(time, x), torch.finfo(x.dtype).eps)
        scale = self._state_scale(t, time, x)
        error = math.hypot(self.prediction_error, rounding)
        trust = (1 + (error * w.x0_output / self._channels(self.data_std, x)) ** 2).reciprocal()
        noisy = Linear((1 - trust * w.x0_state * scale) / inner, -trust * w.x0_output / inner)
        trust_eps = (1 + (rounding * w.eps_output) ** 2).reciprocal()  # eps has mean 0 and standard deviation 1
        clean = Linear((trust_eps * w.eps_state * scale - 1) / (1 - inner), trust_eps * w.eps_output / (1 - inner))
        return Linear(*(torch.where(broadcast(t, x) >= 0.5, a, b) for a, b in zip(noisy, clean, strict=True)))

    def _published(self, eps: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """HDDM's conversion of epsilon at state x and times t (batch,); a velocity expert's output is used as it is."""
        if self.prediction == "velocity":
            return eps
        schedule = LINEAR if self.mode == "published-linear" else self.schedule
        c = schedule.at(t, x)
        x0 = (x - c.sigma * eps) / c.alpha.clamp(min=PUBLISHED_ALPHA_FLOOR)
        return eps - x0.clamp(-PUBLISHED_X0_CLAMP, PUBLISHED_X0_CLAMP)
