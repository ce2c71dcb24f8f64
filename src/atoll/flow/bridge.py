"""The bridge: convert the output of a network of any (schedule, prediction) to the velocity on the linear path.

Equations have the numbers of docs/explanation/bridge.md.

Exact mode. At time t the state x (batch, channels, …) of the linear path is

    x = (1-t) x0 + t eps

The schedule of the expert has a time s of equal signal-to-noise ratio, whose state is x with another scale:

    z_s = alpha_s x0 + sigma_s eps,   sigma_s / alpha_s = t / (1-t)                  (1)
    z_s = c x,   c = alpha_s / (1-t) = sigma_s / t                                  (2)

Both states hold the same information, so E[x0|z_s] = E[x0|x]: an ideal expert predicts the same x0 from either. The
bridge evaluates the expert at (c x, s), converts its output to the pair (x0, eps), and returns

    v = (x - x0) / t       for t >= 1/2, where the estimate of x0 is well conditioned   (3)
    v = (eps - x) / (1-t)  for t < 1/2, where that of eps is                            (4)

In both, v is linear in x and in the output, and the pair (x - t v, x + (1-t) v) is consistent with x by construction.

Near t = 0 and t = 1, four safeguards keep the velocity finite. None of them changes the output of an ideal expert
within the range of its schedule:
 - Range: a discrete table ends at some SNR. Beyond it (and within `END` of 0 and 1), the expert is evaluated at its
   last time, with the state at the scale of its training.
 - Bound: E[x0|x] is an average of data, so x0 is limited to the range of the data (`x0_bound` standard deviations from
   the mean).
 - Precision: a network in half precision has a rounding error (2^-7 for bfloat16), even if the state is in float32. It
   is added to e of equation (5), and used as the error of eps at t < 1/2, where an x0 network divides by sigma.
 - Calibration: with `prediction_error` e > 0, the RMS error of the output, x0 at t >= 1/2 is shrunk toward the mean of
   the data by the Wiener factor (5). The x0 of an epsilon network carries no information as alpha goes to 0.

    1 / (1 + (e |dx0/doutput| / data_std)²)                                         (5)

They need the mean m and the standard deviation of the data (`data_mean`, `data_std`): one number, or one per channel.
Standardized latents have 0 and 1; latents that were only multiplied by a factor do not. The bridge computes with
x0 - m: every prediction is linear in (x0, eps), so the part that belongs to (m, 0) is subtracted from state and output,
and m from the velocity.

The published modes are HDDM's conversion of epsilon experts, for comparison. Both evaluate the expert at the raw x and
step round(999 t), clamp x0 to ±20, and return v = eps - x0 with the raw eps. The paper does not state which alpha and
sigma recover x0 from a state of the linear path, so there are two readings:

    published-linear     x0 = (x - t eps) / max(1-t, 0.01)             with alpha, sigma of the linear path       (6)
    published-schedule   x0 = (x - sigma_t eps) / max(alpha_t, 0.01)   with alpha, sigma of the expert's schedule (7)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from atoll.core.device import constant
from atoll.core.errors import unknown
from atoll.core.names import BridgeMode, Prediction
from atoll.flow.predictions import CleanAndNoise, check_prediction, from_pair, pair_weights
from atoll.flow.schedules import LINEAR, Schedule, broadcast, check_times

# A choice: below the shortest step of practical samplers (1e-3 at 1,000 steps), above the resolution of float32 (6e-8).
END = 1e-4
"""Closest approach to t = 0 and t = 1, where x0 or eps carries no information."""

# The constants of HDDM's conversion, equations (6) and (7).
PUBLISHED_STEPS = 999
PUBLISHED_ALPHA_FLOOR = 0.01
PUBLISHED_X0_CLAMP = 20.0


class Query(NamedTuple):
    """The input of the network: its state, its timestep, and the same time on the [0, 1] of its schedule."""

    state: Tensor
    timestep: Tensor
    time: Tensor


class Linear(NamedTuple):
    """v = state · x + output · y, with coefficients shaped to multiply x: (batch, 1 or channels, 1, …)."""

    state: Tensor
    output: Tensor


@dataclass(frozen=True)
class Bridge:
    """The conversion from (schedule, prediction) to velocity on the linear path, for x of shape (batch, …)."""

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
        """Whether the network already predicts the velocity on the linear path."""
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
        """Return the input of the network for state x (batch, …) and time t (batch,) of the linear path."""
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
            # Zero where the schedule reaches the SNR. Beyond, the mean gets the weight that it has in the states of the
            # expert's training, alpha_s instead of c (1-t).
            missing = broadcast(self.schedule.alpha(time), x) - scale * broadcast(1 - t, x)
            state = state + missing * input_scale * self._channels(self.data_mean, x)
        return Query(state.to(x.dtype), self.schedule.timestep(time), time)

    def velocity(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity on the linear path, in the dtype of x, from the output of the network for `query(x, t)`.

        Pass the output in the dtype in which the network computed: near the ends its weight depends on its rounding
        error.
        """
        if output.shape != x.shape:
            raise ValueError(f"output and state must have equal shapes, got {tuple(output.shape)} and {tuple(x.shape)}")
        if self.identity:
            return output.to(x.dtype)
        t = check_times(t, x)
        if self.published:
            return self._published(output, x, t).to(x.dtype)
        resolution, rounding = (torch.finfo(part.dtype).eps for part in (x, output))
        weights = self._linear(t, x, rounding if rounding > resolution else 0.0)
        state, mean = x, self._channels(self.data_mean, x)
        if self._off_center:
            # From here on, everything is for the centered data x0 - mean.
            state = x - broadcast(1 - t, x) * mean
            output = output - self._x0_factor(t, x) * mean
        v = weights.state * state + weights.output * output
        if self.x0_bound is not None:
            t_wide, bound = broadcast(t.clamp(min=END), x), self.x0_bound * self._channels(self.data_std, x)
            x0 = state - t_wide * v
            bounded = x0.clamp(-bound, bound)
            # Only clamped elements are recomputed with (3): the others keep their exact bits.
            v = torch.where(x0 == bounded, v, (state - bounded) / t_wide)
        return (v - mean if self._off_center else v).to(x.dtype)

    def linear_state(self, state: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (batch, …) and t (batch,) of the linear path from the input of a network: the inverse of `query`."""
        time = (timestep / self.schedule.timestep(torch.ones_like(timestep))).clamp(0, 1)
        if self.identity:
            return state, time
        t = LINEAR.time_of_log_snr(self.schedule.log_snr(time))
        # 1/c of equation (2), without a division by alpha or sigma alone, which may be 0
        norm = torch.hypot(self.schedule.alpha(time), self.schedule.sigma(time)) * self.schedule.input_scale(time)
        return broadcast(torch.hypot(1 - t, t) / norm, state).to(state) * state, t

    def wrap(self, network: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the network as a velocity field `field(x, t, **condition)`."""

        def field(x: Tensor, t: Tensor, **condition: Any) -> Tensor:
            query = self.query(x, t)
            return self.velocity(network(query.state, query.timestep, **condition), x, t)

        return field

    def _matched_time(self, t: Tensor) -> Tensor:
        """Return the time s of the schedule with equal SNR, equation (1)."""
        return self.schedule.time_of_log_snr(LINEAR.log_snr(t.clamp(END, 1 - END)))

    @property
    def _off_center(self) -> bool:
        """Whether the mean of the data is not 0, so that centering is needed."""
        return any(self.data_mean) if isinstance(self.data_mean, tuple) else self.data_mean != 0

    @staticmethod
    def _channels(values: float | tuple[float, ...], x: Tensor) -> Any:
        """Return one number, or one per channel shaped (channels, 1, …) to multiply x (batch, channels, …)."""
        if not isinstance(values, tuple):
            return values
        if x.ndim < 2 or len(values) != x.shape[1]:
            raise ValueError(f"the data mean and std have {len(values)} channels, got states {tuple(x.shape)}")
        vector = constant(values, x if x.dtype == torch.float64 else x[:0].float())
        return vector.view(-1, *[1] * (x.ndim - 2))

    def _x0_factor(self, t: Tensor, x: Tensor) -> Tensor:
        """Return the factor of x0 in the prediction, which is linear in (x0, eps)."""
        time = self._matched_time(t)
        one = torch.ones_like(broadcast(time, x))
        return from_pair(CleanAndNoise(one, torch.zeros_like(one)), time, self.prediction, schedule=self.schedule)

    def _state_scale(self, t: Tensor, time: Tensor, x: Tensor) -> Tensor:
        """Return the factor c of equation (2) from x to the state of the expert, shaped to multiply x.

        Written as the ratio of the standard deviations of both states, it also holds beyond the SNR of the schedule.
        """
        variance, t = self._channels(self.data_std, x) ** 2, broadcast(t, x)
        own = self.schedule.at(time, x)
        scale: Tensor = (variance * own.alpha**2 + own.sigma**2).sqrt() / (variance * (1 - t) ** 2 + t**2).sqrt()
        return scale

    def _linear(self, t: Tensor, x: Tensor, rounding: float) -> Linear:
        """Return v, for data of mean 0, as a linear function of state and output: equations (3), (4) and (5).

        `rounding` is the rounding error of the output if it is coarser than that of the state, else 0.
        """
        time, inner = self._matched_time(t), broadcast(t.clamp(END, 1 - END), x)
        w = pair_weights(self.prediction, self.schedule.at(time, x), torch.finfo(x.dtype).eps)
        scale = self._state_scale(t, time, x)
        error = math.hypot(self.prediction_error, rounding)
        trust = (1 + (error * w.x0_output / self._channels(self.data_std, x)) ** 2).reciprocal()
        # `noisy` is (3) with x0 from the output, shrunk by (5); `clean` is (4) with eps from the output.
        noisy = Linear((1 - trust * w.x0_state * scale) / inner, -trust * w.x0_output / inner)
        trust_eps = (1 + (rounding * w.eps_output) ** 2).reciprocal()  # eps has mean 0 and standard deviation 1
        clean = Linear((trust_eps * w.eps_state * scale - 1) / (1 - inner), trust_eps * w.eps_output / (1 - inner))
        return Linear(*(torch.where(broadcast(t, x) >= 0.5, a, b) for a, b in zip(noisy, clean, strict=True)))

    def _published(self, eps: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return HDDM's conversion (6) or (7) of eps; the output of a velocity expert is returned unchanged."""
        if self.prediction == "velocity":
            return eps
        schedule = LINEAR if self.mode == "published-linear" else self.schedule
        c = schedule.at(t, x)
        x0 = (x - c.sigma * eps) / c.alpha.clamp(min=PUBLISHED_ALPHA_FLOOR)
        return eps - x0.clamp(-PUBLISHED_X0_CLAMP, PUBLISHED_X0_CLAMP)
