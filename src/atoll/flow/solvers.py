"""Solvers: integrate a velocity field from noise at t = 1 to data at t = 0.

Euler and Heun are implemented here. All others are diffusers schedulers with flow sigmas, run by one small adapter.
"""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.device import upload
from atoll.core.errors import AtollError, first_line, unknown
from atoll.core.names import OWN_SOLVERS, SOLVERS
from atoll.flow.schedules import TIMESTEP_SCALE, broadcast

VelocityField = Callable[[Tensor, Tensor], Tensor]
"""velocity(x, t) with times t (batch,) on the CPU, whatever the device of x: the host needs them for its decisions, and
would wait for an accelerator to read them back."""
OnStep = Callable[[int, float, Tensor], tuple[Tensor, bool]]
"""Called after each step with its number, its time and the new states. Returns the states to go on with, and whether to
go on at all."""


def solver_times(steps: int, shift: float = 1.0) -> list[float]:
    """Return steps + 1 times from 1 to 0: equidistant, then shifted by t -> s t/(1 + (s-1) t)."""
    if steps < 1 or shift <= 0:
        raise ValueError(f"expected steps >= 1 and shift > 0, got {steps} and {shift}")
    even = [1 - i / steps for i in range(steps + 1)]
    return [min(1.0, shift * t / (1 + (shift - 1) * t)) for t in even]


def solve(
    velocity: VelocityField,
    x: Tensor,
    *,
    steps: int = 50,
    solver: str = "euler",
    shift: float = 1.0,
    scheduler_times: bool = False,
    on_step: OnStep | None = None,
) -> Tensor:
    """Integrate from noise x at t = 1 to t = 0 with a solver by name; `scheduler_times` as in `run_scheduler`."""
    if solver not in SOLVERS:
        raise ValueError(unknown("solver", solver, SOLVERS))
    if scheduler_times and solver in OWN_SOLVERS:
        raise ValueError(f"scheduler_times needs a diffusers solver such as flow-euler; {solver!r} is part of Atoll")
    if solver not in OWN_SOLVERS:
        scheduler = diffusers_scheduler(solver, shift)
        return _run(scheduler, velocity, x, steps=steps, scheduler_times=scheduler_times, on_step=on_step)
    for number, (t, t_next) in enumerate(pairwise(solver_times(steps, shift))):
        x = step(velocity, x, [t], to=[t_next], solver=solver).x
        x, goes_on = (x, True) if on_step is None else on_step(number, t, x)
        if not goes_on:
            break
    return x


class SolverStep(NamedTuple):
    """The result of one step: the new states, and the velocity v at the old ones, which gives the estimate x - t v."""

    x: Tensor
    velocity: Tensor


def step(
    velocity: VelocityField, x: Tensor, t: Sequence[float], *, to: Sequence[float], solver: str = "euler"
) -> SolverStep:
    """Move states x (batch, ...) from times t to the times `to`: one time for each state, or one for all.

    Euler is of first order, with one evaluation. Heun is of second order, with two evaluations, but only one in a step
    that ends at t = 0, where no network was trained.
    """
    # Differences of times are computed in double precision and rounded once. So a state moves to the same bits whether
    # its time is given alone or with those of others.
    spans = [after - before for before, after in zip(t, to, strict=True)]
    span: float | Tensor = spans[0] if len(spans) == 1 else broadcast(upload(_times(spans, x), x.device), x)
    first = velocity(x, _times(t, x))
    v = first
    if solver == "heun" and max(to) > 0:
        v = (v + velocity(x + span * v, _times(to, x))) / 2
        if min(to) == 0:
            v = torch.where(broadcast(upload(_times(to, x), x.device), x) > 0, v, first)
    return SolverStep(x + span * v, first)


def diffusers_scheduler(solver: str, shift: float = 1.0) -> Any:
    """Return a diffusers scheduler by name, with flow sigmas and velocity prediction."""
    import diffusers

    if solver == "flow-euler":
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    if solver == "flow-heun":
        return diffusers.FlowMatchHeunDiscreteScheduler(shift=shift)
    classes = {"dpm++": diffusers.DPMSolverMultistepScheduler, "unipc": diffusers.UniPCMultistepScheduler}
    if solver not in classes:
        raise ValueError(unknown("diffusers solver", solver, ["flow-euler", "flow-heun", *classes]))
    return classes[solver](prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def run_scheduler(
    scheduler: Any,
    velocity: VelocityField,
    x: Tensor,
    *,
    steps: int,
    scheduler_times: bool = False,
    on_step: OnStep | None = None,
) -> Tensor:
    """Run any diffusers scheduler that `check_scheduler` accepts.

    A plain flow Euler or flow Heun scheduler runs on `solver_times`, so that it gives the same images as the solvers of
    this module. With `scheduler_times` it keeps the times of its `set_timesteps`, which end at t = 0.001 before the
    last step: the times of diffusers pipelines, and of the published Paris samples.
    """
    check_scheduler(scheduler)
    return _run(scheduler, velocity, x, steps=steps, scheduler_times=scheduler_times, on_step=on_step)


def check_scheduler(scheduler: Any) -> None:
    """Raise `AtollError` unless a scheduler integrates velocities on the linear path x_t = (1 - t) x_0 + t noise.

    It gets the exact velocity of data with one point x_0, which is (x - x_0)/t. Then a scheduler of any kind must keep
    rms(x - (1 - t) x_0) = t and end at x_0, whether it is deterministic or adds noise.
    """
    with torch.random.fork_rng(devices=[]):  # a scheduler that adds noise must not change the caller's random numbers
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed the generators of GPUs
        point, noise = torch.randn(2, 1, 4, 32, 32, device="cpu").unbind()
        deviations: list[Tensor] = []

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            t = broadcast(t, x)
            deviations.append(((x - (1 - t) * point).square().mean().sqrt() - t).abs().max())
            return (x - point) / t

        reason = "it does not take velocities on the linear path from noise to data, or leaves noise in the images"
        try:
            end = _run(scheduler, velocity, noise, steps=10)
            deviations.append((end - point).square().mean().sqrt())
        except Exception as error:  # a scheduler that is made for something else may fail anywhere
            deviations.append(torch.tensor(torch.nan))
            reason = first_line(error)
    # With diffusers 0.42, schedulers that take velocities stay below 0.015, and all others are above 0.14. The maximum
    # of torch is NaN if one value is, which is not below anything.
    if not torch.stack(deviations).max() < 0.05:
        raise AtollError(
            f"{type(scheduler).__name__} cannot be used with these settings: {reason}. Use "
            "FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, or DPMSolverMultistepScheduler or "
            'UniPCMultistepScheduler with use_flow_sigmas=True, prediction_type="flow_prediction"'
        )


def _run(
    scheduler: Any,
    velocity: VelocityField,
    x: Tensor,
    *,
    steps: int,
    scheduler_times: bool = False,
    on_step: OnStep | None = None,
) -> Tensor:
    """Run a scheduler without checking it."""
    scheduler = copy(scheduler)  # `set_timesteps` must not change the scheduler of the caller
    if _only_shifted(scheduler) and not scheduler_times:
        # The constructor has shifted its sigma_min, and set_timesteps would shift it again.
        scheduler.sigma_min = 1 / steps
    scheduler.set_timesteps(steps, device="cpu")  # as scalars of the host, timesteps need no copy to the device
    if hasattr(scheduler, "set_begin_index"):
        # Without it, the index is searched by the first timestep, which is ambiguous if two integers are equal.
        scheduler.set_begin_index(0)
    for number, (t, timestep) in enumerate(zip(_exact_times(scheduler), scheduler.timesteps, strict=True)):
        x = scheduler.step(velocity(x, _times([t], x)), timestep, x, return_dict=False)[0]
        x, goes_on = (x, True) if on_step is None else on_step(number, t, x)
        if not goes_on:
            break
    return x


def _only_shifted(scheduler: Any) -> bool:
    """Return whether it is flow Euler or flow Heun of diffusers with no option but the shift."""
    import diffusers

    kind = type(scheduler)
    if kind not in (diffusers.FlowMatchEulerDiscreteScheduler, diffusers.FlowMatchHeunDiscreteScheduler):
        return False
    plain = kind(shift=scheduler.config.shift).config
    return all(scheduler.config[name] == plain[name] for name in plain if not name.startswith("_"))


def _exact_times(scheduler: Any) -> list[float]:
    """Return the times of the timesteps: the flow sigmas with which the scheduler computes, if it has them."""
    times = scheduler.timesteps.cpu().double() / TIMESTEP_SCALE
    sigmas = getattr(scheduler, "sigmas", times)[: len(times)].cpu().double()
    # A timestep may be its sigma truncated to an integer, so they differ by less than 1 of 1000; 1.1 leaves room for
    # rounding. Sigmas that are not times of a flow differ by far more.
    exact = len(sigmas) == len(times) and bool((sigmas - times).abs().max() < 1.1 / TIMESTEP_SCALE)
    return (sigmas if exact else times).tolist()  # type: ignore[no-any-return]


def _times(t: Sequence[float], x: Tensor) -> Tensor:
    """Return times (batch,) on the CPU, in at least float32."""
    return torch.tensor(t, dtype=torch.promote_types(x.dtype, torch.float32)).expand(x.shape[0])
