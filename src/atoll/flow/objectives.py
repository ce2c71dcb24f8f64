"""Training objectives: schedule, prediction, distribution of times, and weighting of the loss.

    objective = atoll.flow.objective("ddpm")
    noised = objective.corrupt(x0, seed=0, step=17)
    loss = objective.loss(network(noised.input, noised.timestep), noised).mean()

All random numbers are a function of (seed, position of the image in the run), so any batch can be reproduced.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from atoll.core.errors import unknown
from atoll.core.manifests import ObjectiveSpec
from atoll.core.names import OBJECTIVES, Prediction, TimesName, WeightingName
from atoll.flow import rng
from atoll.flow.bridge import Bridge
from atoll.flow.predictions import CleanAndNoise, check_prediction, from_pair, pair_weights
from atoll.flow.schedules import LINEAR, Schedule, broadcast, schedule

# Weights such as 1/t² diverge at an end. The limit is 1/t² at t = 0.05, so it applies to 5 % of the times.
MAX_WEIGHT = 400.0
"""Maximum weight of an image in the loss."""


class Noised(NamedTuple):
    """A noised batch: input, timestep and target of the network, and the times t (batch,) of the images."""

    input: Tensor
    timestep: Tensor
    target: Tensor
    t: Tensor
    weight: Tensor
    """Weight of each image in the loss, (batch,)."""


@dataclass(frozen=True)
class TimeSampling:
    """The distribution of training times; uniform numbers are mapped by its inverse distribution function.

    uniform: on [low, high]. logit-normal: sigmoid(N(mean, std²)) (Esser 2024). log-normal: ln sigma ~ N(mean, std²)
    (Karras 2022), for any schedule through its SNR. `shift` s maps t to s t/(1 + (s-1) t), more noise for s > 1.
    """

    name: TimesName = "uniform"
    low: float = 0.0
    high: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        """Check the options."""
        if self.name not in get_args(TimesName):
            raise ValueError(unknown("time sampling", self.name, get_args(TimesName)))
        if not 0 <= self.low < self.high <= 1 or self.std <= 0 or self.shift <= 0:
            raise ValueError(f"expected 0 <= low < high <= 1, std > 0 and shift > 0, got {self}")

    def times(self, u: Tensor, schedule: Schedule) -> Tensor:
        """Return times for uniform numbers u (batch,) in [0, 1)."""
        if self.name == "uniform":
            t = self.low + (self.high - self.low) * u
        else:
            # u may be exactly 0, where the inverse normal distribution is -inf: 1e-9 limits it to ±6 deviations.
            gauss = self.mean + self.std * torch.special.ndtri(u.double().clamp(1e-9, 1 - 1e-9)).to(u.dtype)
            t = torch.sigmoid(gauss) if self.name == "logit-normal" else schedule.time_of_log_snr(-2 * gauss)
        return self.shift * t / (1 + (self.shift - 1) * t)


@dataclass(frozen=True)
class Weighting:
    """The weight of each time in the mean squared error of the prediction.

    constant: 1. min-snr: min(SNR, gamma) on the error of x0 (Hang 2023). as-NAME: equivalent to a constant weight on
    the error of another prediction NAME.

    The x0 error of an output error d is |dx0/doutput| d. So a weight w on the squared x0 error is the weight
    (dx0/doutput)² w on the squared output error, and a constant weight on prediction P is w = (dx0/dP)^-2.
    """

    name: WeightingName = "constant"
    gamma: float = 5.0

    def __post_init__(self) -> None:
        """Check the options."""
        if self.name not in get_args(WeightingName):
            raise ValueError(unknown("weighting", self.name, get_args(WeightingName)))
        if self.gamma <= 0:
            raise ValueError(f"min-snr needs gamma > 0, got {self.gamma}")

    def weights(self, t: Tensor, prediction: Prediction, schedule: Schedule) -> Tensor:
        """Return one weight per image, shape (batch,), at most `MAX_WEIGHT`."""
        if self.name == "constant":
            return torch.ones_like(t)
        own = _x0_per_output(prediction, t, schedule)
        if self.name == "min-snr":
            on_x0 = schedule.log_snr(t).exp().clamp(max=self.gamma)
        else:
            other: dict[str, Prediction] = {"as-velocity": "velocity", "as-epsilon": "epsilon", "as-x0": "x0"}
            on_x0 = _x0_per_output(other[self.name], t, schedule) ** -2
        return (own**2 * on_x0).nan_to_num(nan=1.0, posinf=MAX_WEIGHT).clamp(max=MAX_WEIGHT)


@dataclass(frozen=True)
class Objective:
    """The training objective of an expert. The defaults are flow matching."""

    schedule: Schedule = LINEAR
    prediction: Prediction = "velocity"
    times: TimeSampling = TimeSampling()
    weighting: Weighting = Weighting()

    def __post_init__(self) -> None:
        """Check the name of the prediction."""
        check_prediction(self.prediction)

    def corrupt(
        self, x0: Tensor, *, seed: int, step: int = 0, position: rng.Positions | None = None, t: Tensor | None = None
    ) -> Noised:
        """Add noise to a batch x0 (batch, …) and return input, timestep and target.

        Image i of step n has position n · batch + i, unless `position` is given, of the first image or of each. Times
        are drawn from the distribution of the objective, or given by `t` (for validation at fixed times).
        """
        if not x0.is_floating_point() or x0.ndim < 2:
            raise ValueError(f"x0 must be a floating point batch (batch, ...), got {x0.dtype} {tuple(x0.shape)}")
        first = step * x0.shape[0] if position is None else position
        if t is None:
            u = rng.uniform(x0.shape[0], seed=seed, stream=rng.Stream.TIME, first=first)
            t = self.times.times(u, self.schedule).to(x0.device)
        eps = rng.normal(tuple(x0.shape), seed=seed, stream=rng.Stream.NOISE, first=first).to(x0.device, x0.dtype)
        state = self.schedule.add_noise(x0, eps, t)
        scale = broadcast(self.schedule.input_scale(t), x0)
        target = from_pair(CleanAndNoise(x0, eps), t, self.prediction, schedule=self.schedule)
        weight = self.weighting.weights(t, self.prediction, self.schedule)
        return Noised((scale * state).to(x0.dtype), self.schedule.timestep(t), target, t, weight)

    def loss(self, output: Tensor, noised: Noised) -> Tensor:
        """Return the weighted mean squared error of each image, in float32: shape (batch,)."""
        if output.shape != noised.target.shape:
            raise ValueError(f"output must have shape {tuple(noised.target.shape)}, got {tuple(output.shape)}")
        error = (output.float() - noised.target.float()).square().flatten(1).mean(1)
        return noised.weight * error

    def bridge(self, **options: Any) -> Bridge:
        """Return the bridge from a network with this objective to velocity on the linear path."""
        return Bridge(self.schedule, self.prediction, **options)

    @property
    def spec(self) -> ObjectiveSpec:
        """Plain values for a manifest; `Objective.of` is the inverse."""
        return ObjectiveSpec(
            schedule=self.schedule.spec,
            prediction=self.prediction,
            times=self.times.name,
            time_low=self.times.low,
            time_high=self.times.high,
            time_mean=self.times.mean,
            time_std=self.times.std,
            time_shift=self.times.shift,
            weighting=self.weighting.name,
            min_snr_gamma=self.weighting.gamma,
        )

    @staticmethod
    def of(spec: ObjectiveSpec) -> "Objective":
        """Build the objective of a manifest."""
        return objective(**spec.model_dump())


def objective(name: str | None = None, **parts: Any) -> Objective:
    """Build an objective by name, by its parts, or by name with changes: `objective("ddpm", time_shift=2.0)`."""
    if name is not None and name not in OBJECTIVES:
        raise ValueError(unknown("objective", name, OBJECTIVES))
    spec = {**(OBJECTIVES[name] if name else {}), **parts}
    known = [*ObjectiveSpec.model_fields]
    if wrong := [part for part in spec if part not in known]:
        raise ValueError("; ".join(unknown("part of an objective", part, known) for part in wrong))
    noise = spec.pop("schedule", "linear")
    prediction = spec.pop("prediction", "velocity")
    times = {key.removeprefix("time_"): spec.pop(key) for key in list(spec) if key.startswith("time_")}
    weighting = {"gamma": spec.pop("min_snr_gamma")} if "min_snr_gamma" in spec else {}
    sampling, weight = spec.pop("times", "uniform"), spec.pop("weighting", "constant")
    return Objective(
        schedule(**noise) if isinstance(noise, dict) else schedule(noise),
        prediction,
        TimeSampling(sampling, **times),
        Weighting(weight, **weighting),
    )


def _x0_per_output(prediction: Prediction, t: Tensor, schedule: Schedule) -> Tensor:
    """Return |dx0/doutput| at each time: the factor from an error of the prediction to one of x0."""
    t = t.reshape(-1)  # one time for the whole batch may be a scalar
    return pair_weights(prediction, schedule.at(t, torch.empty_like(t)), torch.finfo(t.dtype).eps).x0_output.abs()
