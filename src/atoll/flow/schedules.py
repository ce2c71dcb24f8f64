"""Noise schedules: z_t = alpha(t) x0 + sigma(t) eps, with data at t = 0 and noise at t = 1.

The functions of a schedule take times of any shape. `Schedule.at` checks times (batch,) and returns coefficients
that broadcast over a batch (batch, …). Predictions, bridge and objectives are derived from these functions.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.device import constant
from atoll.core.errors import unknown
from atoll.core.manifests import ScheduleSpec

TIMESTEP_SCALE = 1000.0
"""Timestep of networks at t = 1: the scale of the time embeddings of DiT, PixArt and the diffusers schedulers."""


class Coefficients(NamedTuple):
    """The values alpha and sigma and their derivatives in t, shaped (batch, 1, …) to multiply a batch."""

    alpha: Tensor
    sigma: Tensor
    d_alpha: Tensor
    d_sigma: Tensor


def check_times(t: Tensor, x: Tensor) -> Tensor:
    """Return t in at least float32 with shape (batch,); raise an error for a wrong shape, dtype or range.

    One time for the whole batch may also be a scalar or have shape (1,).
    """
    if not t.is_floating_point():
        raise ValueError(f"t must be a floating point tensor in [0, 1], got {t.dtype}")
    if x.ndim == 0:
        raise ValueError("x must have a batch dimension, got a scalar")
    if t.ndim > 1 or (t.numel() != 1 and t.shape[0] != x.shape[0]):
        raise ValueError(f"t must have shape ({x.shape[0]},) for x of shape {tuple(x.shape)}, got {tuple(t.shape)}")
    # On a GPU, this comparison would wait for all queued kernels at every step, so only tensors on the CPU are checked.
    if t.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(((t >= 0) & (t <= 1)).all()):
        raise ValueError(f"t must be in [0, 1] (0 is data, 1 is noise), got {t.min().item():g} to {t.max().item():g}")
    return _at_least_float32(t).expand(x.shape[0])


def broadcast(values: Tensor, x: Tensor) -> Tensor:
    """Reshape values (batch,) to (batch, 1, …), so that they multiply x of shape (batch, …)."""
    return values.reshape(-1, *([1] * (x.ndim - 1)))


class Schedule(ABC):
    """A noise schedule, continuous in t on [0, 1]; its log-SNR falls strictly from t = 0 to t = 1."""

    @property
    @abstractmethod
    def spec(self) -> ScheduleSpec:
        """Plain values for a manifest; `schedule` is the inverse."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Return the scale of the data."""

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """Return the scale of the noise."""

    @abstractmethod
    def d_alpha(self, t: Tensor) -> Tensor:
        """Return the derivative of alpha in t."""

    @abstractmethod
    def d_sigma(self, t: Tensor) -> Tensor:
        """Return the derivative of sigma in t."""

    def log_snr(self, t: Tensor) -> Tensor:
        """Return log(alpha² / sigma²); infinite where one of them is 0."""
        t = _at_least_float32(t)
        return 2 * (self.alpha(t).log() - self.sigma(t).log())

    @abstractmethod
    def time_of_log_snr(self, log_snr: Tensor) -> Tensor:
        """Return the t at which `log_snr(t)` has this value; outside the range of the schedule, the nearest end."""

    def timestep(self, t: Tensor) -> Tensor:
        """Return the timestep that is the input of a network at time t."""
        return TIMESTEP_SCALE * _at_least_float32(t)

    def input_scale(self, t: Tensor) -> Tensor:
        """Return the factor on the state before it enters a network; 1 unless the schedule is variance exploding."""
        return torch.ones_like(_at_least_float32(t))

    def at(self, t: Tensor, x: Tensor) -> Coefficients:
        """Return coefficients that broadcast over x (batch, …), for times t (batch,)."""
        t = check_times(t, x)
        values = (self.alpha(t), self.sigma(t), self.d_alpha(t), self.d_sigma(t))
        return Coefficients(*(broadcast(value, x) for value in values))

    def add_noise(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return z_t = alpha x0 + sigma eps."""
        if x0.shape != eps.shape:
            raise ValueError(f"x0 and eps must have equal shapes, got {tuple(x0.shape)} and {tuple(eps.shape)}")
        c = self.at(t, x0)
        return (c.alpha * x0 + c.sigma * eps).to(x0.dtype)


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """Flow matching: alpha = 1 - t, sigma = t. The path on which Atoll samples."""

    @property
    def spec(self) -> ScheduleSpec:
        """Plain values for a manifest; `schedule` is the inverse."""
        return ScheduleSpec(name="linear")

    def alpha(self, t: Tensor) -> Tensor:
        """Return 1 - t."""
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        """Return t."""
        return t.clone()

    def d_alpha(self, t: Tensor) -> Tensor:
        """Return -1."""
        return torch.full_like(t, -1)

    def d_sigma(self, t: Tensor) -> Tensor:
        """Return 1."""
        return torch.ones_like(t)

    def time_of_log_snr(self, log_snr: Tensor) -> Tensor:
        """Solve t/(1-t) = exp(-log_snr/2) for t."""
        return torch.sigmoid(-log_snr / 2)


@dataclass(frozen=True)
class CosineSchedule(Schedule):
    """The continuous cosine schedule: alpha = cos(πt/2), sigma = sin(πt/2)."""

    @property
    def spec(self) -> ScheduleSpec:
        """Plain values for a manifest; `schedule` is the inverse."""
        return ScheduleSpec(name="cosine")

    def alpha(self, t: Tensor) -> Tensor:
        """Return cos(πt/2), written as a sine so that it is exactly 0 at t = 1."""
        return torch.sin(math.pi / 2 * (1 - t))

    def sigma(self, t: Tensor) -> Tensor:
        """Return sin(πt/2)."""
        return torch.sin(math.pi / 2 * t)

    def d_alpha(self, t: Tensor) -> Tensor:
        """Return -π/2 sin(πt/2)."""
        return -math.pi / 2 * self.sigma(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        """Return π/2 cos(πt/2)."""
        return math.pi / 2 * self.alpha(t)

    def time_of_log_snr(self, log_snr: Tensor) -> Tensor:
        """Solve tan(πt/2) = exp(-log_snr/2) for t."""
        return 2 / math.pi * torch.atan(torch.exp(-log_snr / 2))


@dataclass(frozen=True)
class DiscreteSchedule(Schedule):
    """The table `alphas_cumprod` of a DDPM: step i is t = i/(T-1), and the log-SNR is linear between steps.

    The timestep of a network is t (T-1), which need not be an integer. A last entry of 0 (zero terminal SNR) is
    replaced by 1e-12, because its log-SNR must be finite.
    """

    alphas_cumprod: tuple[float, ...]
    made_from: ScheduleSpec | None = field(default=None, compare=False)
    """The name and options that the table was built from, if any."""
    _log_snr: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _tables: dict[tuple[torch.device, torch.dtype], Tensor] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Check the table and compute its log-SNR in double precision."""
        table = torch.tensor([float(value) for value in self.alphas_cumprod], dtype=torch.float64)
        if table.numel() < 2:
            raise ValueError(f"alphas_cumprod needs at least 2 steps, got {table.numel()}")
        if table[-1] == 0:
            table[-1] = 1e-12
        if not bool(((table > 0) & (table < 1)).all()):
            raise ValueError(
                "alphas_cumprod must lie strictly between 0 and 1 (only the last may be 0), "
                f"got {table.min().item():g} to {table.max().item():g}"
            )
        rising = torch.nonzero(table.diff() >= 0)
        if rising.numel():
            step = int(rising[0]) + 1
            raise ValueError(
                f"alphas_cumprod must fall at every step, but step {step} has {table[step].item():g} "
                f"after {table[step - 1].item():g}"
            )
        object.__setattr__(self, "alphas_cumprod", tuple(table.tolist()))
        object.__setattr__(self, "_log_snr", tuple((table.log() - torch.log1p(-table)).tolist()))

    @classmethod
    def from_betas(cls, betas: Tensor, made_from: ScheduleSpec | None = None) -> "DiscreteSchedule":
        """Build the schedule of a sequence of betas (T,)."""
        return cls(tuple(torch.cumprod(1 - betas.double(), 0).tolist()), made_from)

    @property
    def spec(self) -> ScheduleSpec:
        """Plain values for a manifest; `schedule` is the inverse."""
        return self.made_from or ScheduleSpec(name="ddpm", alphas_cumprod=self.alphas_cumprod)

    @property
    def steps(self) -> int:
        """Number of steps T in the table."""
        return len(self.alphas_cumprod)

    def log_snr(self, t: Tensor) -> Tensor:
        """Interpolate the table linearly."""
        t = _at_least_float32(t)
        # Linear in log-SNR, not in alpha: so `time_of_log_snr` is an exact inverse, which the bridge needs.
        table, position = self._table(t), t * (self.steps - 1)
        left = position.detach().floor().clamp(0, self.steps - 2)
        low, high = table[left.long()], table[left.long() + 1]
        return low + (position - left) * (high - low)

    def alpha(self, t: Tensor) -> Tensor:
        """Return the root of sigmoid(log_snr): variance preserving."""
        return torch.sigmoid(self.log_snr(t)).sqrt()

    def sigma(self, t: Tensor) -> Tensor:
        """Return the root of sigmoid(-log_snr)."""
        return torch.sigmoid(-self.log_snr(t)).sqrt()

    def d_alpha(self, t: Tensor) -> Tensor:
        """Return alpha' = alpha sigma² λ'/2, where λ is the log-SNR."""
        return self.alpha(t) * self.sigma(t) ** 2 * self._d_log_snr(t) / 2

    def d_sigma(self, t: Tensor) -> Tensor:
        """Return sigma' = -sigma alpha² λ'/2."""
        return -self.sigma(t) * self.alpha(t) ** 2 * self._d_log_snr(t) / 2

    def time_of_log_snr(self, log_snr: Tensor) -> Tensor:
        """Invert the interpolated table exactly."""
        log_snr = _at_least_float32(log_snr)
        rising = -self._table(log_snr)
        wanted = (-log_snr).clamp(rising[0], rising[-1])
        right = torch.searchsorted(rising, wanted.contiguous()).clamp(1, self.steps - 1)
        low, high = rising[right - 1], rising[right]
        return (right - 1 + (wanted - low) / (high - low)) / (self.steps - 1)

    def timestep(self, t: Tensor) -> Tensor:
        """Return the step, from 0 to T-1."""
        return (self.steps - 1) * _at_least_float32(t)

    def _d_log_snr(self, t: Tensor) -> Tensor:
        slopes = self._table(t).diff() * (self.steps - 1)
        return slopes[(t * (self.steps - 1)).floor().long().clamp(0, self.steps - 2)]

    def _table(self, like: Tensor) -> Tensor:
        # Copied to a device once. Looked up here and not in `constant`, which would hash a thousand numbers every time.
        kept = self._tables.get((like.device, like.dtype))
        if kept is None:
            kept = self._tables[like.device, like.dtype] = constant(self._log_snr, like)
        return kept


@dataclass(frozen=True)
class EDMSchedule(Schedule):
    """The variance exploding schedule of EDM: alpha = 1, and sigma^(1/rho) is linear in t (Karras 2022, eq. 5).

    The input of networks is z / sqrt(1 + sigma²) (c_in of EDM for data of unit variance), which has unit variance.
    """

    # The defaults are those of Karras 2022, table 1.

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 < self.sigma_min < self.sigma_max or self.rho <= 0:
            raise ValueError(f"edm needs 0 < sigma_min < sigma_max and rho > 0, got {self}")

    @property
    def spec(self) -> ScheduleSpec:
        """Plain values for a manifest; `schedule` is the inverse."""
        return ScheduleSpec(name="edm", sigma_min=self.sigma_min, sigma_max=self.sigma_max, rho=self.rho)

    @property
    def _low(self) -> float:
        return float(self.sigma_min ** (1 / self.rho))

    @property
    def _span(self) -> float:
        return float(self.sigma_max ** (1 / self.rho) - self._low)

    def alpha(self, t: Tensor) -> Tensor:
        """Return 1."""
        return torch.ones_like(t)

    def sigma(self, t: Tensor) -> Tensor:
        """Return (low + t span)^rho."""
        return (self._low + t * self._span) ** self.rho

    def d_alpha(self, t: Tensor) -> Tensor:
        """Return 0."""
        return torch.zeros_like(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        """Return rho span (low + t span)^(rho-1)."""
        return self.rho * self._span * (self._low + t * self._span) ** (self.rho - 1)

    def time_of_log_snr(self, log_snr: Tensor) -> Tensor:
        """Solve sigma(t) = exp(-log_snr/2) for t."""
        sigma = torch.exp(-_at_least_float32(log_snr) / 2).clamp(self.sigma_min, self.sigma_max)
        return ((sigma ** (1 / self.rho) - self._low) / self._span).clamp(0, 1)

    def input_scale(self, t: Tensor) -> Tensor:
        """Return 1 / sqrt(1 + sigma²)."""
        return (1 + self.sigma(_at_least_float32(t)) ** 2).rsqrt()


def ddpm_linear(steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> DiscreteSchedule:
    """Build the schedule with betas linear in the step: DDPM, and the released DiT checkpoints."""
    _check_betas(steps, beta_start, beta_end)
    betas = torch.linspace(beta_start, beta_end, steps, dtype=torch.float64)
    made_from = ScheduleSpec(name="ddpm-linear", steps=steps, beta_start=beta_start, beta_end=beta_end)
    return DiscreteSchedule.from_betas(betas, made_from)


def ddpm_scaled_linear(steps: int = 1000, beta_start: float = 0.00085, beta_end: float = 0.012) -> DiscreteSchedule:
    """Build the schedule with roots of betas linear in the step: Stable Diffusion."""
    _check_betas(steps, beta_start, beta_end)
    betas = torch.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=torch.float64) ** 2
    made_from = ScheduleSpec(name="ddpm-scaled-linear", steps=steps, beta_start=beta_start, beta_end=beta_end)
    return DiscreteSchedule.from_betas(betas, made_from)


def ddpm_cosine(steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> DiscreteSchedule:
    """Build the cosine table of Nichol and Dhariwal with clipped betas (2021, eq. 17)."""
    _check_betas(steps, 0.5, max_beta)
    grid = torch.arange(steps + 1, dtype=torch.float64) / steps
    level = torch.cos((grid + offset) / (1 + offset) * math.pi / 2) ** 2
    betas = (1 - level[1:] / level[:-1]).clamp(max=max_beta)
    made_from = ScheduleSpec(name="ddpm-cosine", steps=steps, offset=offset, max_beta=max_beta)
    return DiscreteSchedule.from_betas(betas, made_from)


def _ddpm(alphas_cumprod: Sequence[float]) -> DiscreteSchedule:
    return DiscreteSchedule(tuple(alphas_cumprod))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "linear": LinearSchedule,
    "cosine": CosineSchedule,
    "ddpm-linear": ddpm_linear,
    "ddpm-scaled-linear": ddpm_scaled_linear,
    "ddpm-cosine": ddpm_cosine,
    "ddpm": _ddpm,
    "edm": EDMSchedule,
}

LINEAR = LinearSchedule()


def schedule(name: str, **options: Any) -> Schedule:
    """Build a schedule by name; options are those of its constructor."""
    if name not in SCHEDULES:
        raise ValueError(unknown("schedule", name, SCHEDULES))
    try:
        return SCHEDULES[name](**options)
    except TypeError as error:
        raise ValueError(f"schedule {name!r}: {error}") from error


def _check_betas(steps: int, beta_start: float, beta_end: float) -> None:
    if steps < 2 or not (0 < beta_start < 1 and 0 < beta_end < 1):
        raise ValueError(
            f"expected steps >= 2 and betas strictly between 0 and 1, got {steps}, {beta_start}, {beta_end}"
        )


def _at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
