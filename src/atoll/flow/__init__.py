"""The mathematics of diffusion: schedules, predictions, the bridge to velocity, objectives, solvers.

One convention everywhere: t = 0 is data, t = 1 is noise, x_t = (1-t) x0 + t eps, velocity = eps - x0, and the timestep
of a network is 1000 t, or the step of a DDPM table. The quantity alpha eps - sigma x0 is always called `v_prediction`,
never velocity.
"""

from atoll.core.names import OBJECTIVES, PREDICTIONS, SCHEDULES, SOLVERS, Prediction
from atoll.flow.bridge import Bridge, Query
from atoll.flow.gaussian_mixture import GaussianMixture
from atoll.flow.objectives import Noised, Objective, TimeSampling, Weighting, objective
from atoll.flow.predictions import CleanAndNoise, convert, from_pair, to_pair
from atoll.flow.schedules import (
    LINEAR,
    TIMESTEP_SCALE,
    CosineSchedule,
    DiscreteSchedule,
    EDMSchedule,
    LinearSchedule,
    Schedule,
    schedule,
)
from atoll.flow.solvers import (
    OnStep,
    SolverStep,
    check_scheduler,
    diffusers_scheduler,
    run_scheduler,
    solve,
    solver_times,
    step,
)

__all__ = [
    "LINEAR",
    "OBJECTIVES",
    "PREDICTIONS",
    "SCHEDULES",
    "SOLVERS",
    "TIMESTEP_SCALE",
    "Bridge",
    "CleanAndNoise",
    "CosineSchedule",
    "DiscreteSchedule",
    "EDMSchedule",
    "GaussianMixture",
    "LinearSchedule",
    "Noised",
    "Objective",
    "OnStep",
    "Prediction",
    "Query",
    "Schedule",
    "SolverStep",
    "TimeSampling",
    "Weighting",
    "check_scheduler",
    "convert",
    "diffusers_scheduler",
    "from_pair",
    "objective",
    "run_scheduler",
    "schedule",
    "solve",
    "solver_times",
    "step",
    "to_pair",
]
