from typing import Any

import diffusers
import pytest
import torch
from oracles import FLOAT, separated_mixture

from atoll import flow
from atoll.core.errors import AtollError
from atoll.core.names import SOLVERS

MIXTURE = separated_mixture()
NOISE = torch.randn(500, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)


def exact_end() -> torch.Tensor:
    """Return the exact end of the flow, computed with far more steps than any tested solver."""
    return flow.solve(MIXTURE.velocity, NOISE, steps=2000, solver="heun")


END = exact_end()


def error(solver: str, steps: int, shift: float = 1.0) -> float:
    x = flow.solve(MIXTURE.velocity, NOISE, steps=steps, solver=solver, shift=shift)
    return (x - END).norm(dim=1).median().item()


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
def test_the_order_of_convergence(solver: str, order: int) -> None:
    """Halving the step divides the error by 2 to the order."""
    assert error(solver, 100) / error(solver, 200) == pytest.approx(2**order, rel=0.25)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_reaches_the_data(solver: str) -> None:
    assert error(solver, 50) < 0.08


@pytest.mark.parametrize("solver", ["heun", "flow-heun", "dpm++", "unipc"])
def test_higher_order_solvers_beat_euler_at_equal_steps(solver: str) -> None:
    assert error(solver, 40) < error("euler", 40)


class RecordedTimes(list[float]):
    """A zero velocity field that records its times."""

    def __call__(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.append(t[0].item())
        return torch.zeros_like(x)


@pytest.mark.parametrize(("solver", "bound"), [("unipc", 1e-4), ("dpm++", 1e-3)])
def test_multistep_solvers_evaluate_at_the_times_of_their_steps(solver: str, bound: float) -> None:
    """Times truncated to integer timesteps would leave an error of about 0.002 at any number of steps."""
    assert error(solver, 160) < bound


@pytest.mark.parametrize(("solver", "steps", "shift"), [("unipc", 100, 12), ("unipc", 250, 5), ("dpm++", 100, 12)])
def test_first_timesteps_may_coincide(solver: str, steps: int, shift: float) -> None:
    assert error(solver, steps, shift) < 0.03


@pytest.mark.parametrize("solver", ["flow-euler", "flow-heun"])
@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_the_shift_is_applied_once(solver: str, shift: float) -> None:
    recorded = RecordedTimes()
    flow.solve(recorded, NOISE, steps=20, solver=solver, shift=shift)
    assert list(dict.fromkeys(recorded)) == pytest.approx(flow.solver_times(20, shift)[:-1], abs=1e-6)


def test_flow_heun_converges_like_heun_at_a_large_shift() -> None:
    assert error("flow-heun", 160, 12) == pytest.approx(error("heun", 160, 12), rel=1e-3)


FLOW: dict[str, Any] = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        diffusers.FlowMatchHeunDiscreteScheduler(),
        diffusers.FlowMatchLCMScheduler(),
        diffusers.DPMSolverMultistepScheduler(**FLOW),
        diffusers.DPMSolverMultistepScheduler(**FLOW, algorithm_type="sde-dpmsolver++", flow_shift=3.0),
        diffusers.DPMSolverSinglestepScheduler(**FLOW),
        diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=5.0),
        diffusers.LTXEulerAncestralRFScheduler(),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_schedulers_that_take_velocities_are_accepted(scheduler: Any) -> None:
    before = torch.get_rng_state()
    flow.check_scheduler(scheduler)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        (diffusers.DDIMScheduler(), "velocities"),
        (diffusers.DDIMScheduler(prediction_type="v_prediction"), "velocities"),
        (diffusers.DDPMScheduler(), "velocities"),
        (diffusers.EulerDiscreteScheduler(), "velocities"),
        (diffusers.EulerDiscreteScheduler(timestep_spacing="trailing"), "velocities"),
        (diffusers.DPMSolverMultistepScheduler(), "velocities"),
        # Its last step ends near the data, but its states before are off the path.
        (diffusers.DEISMultistepScheduler(prediction_type="v_prediction"), "velocities"),
        (diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction"), "velocities"),
        (diffusers.UniPCMultistepScheduler(use_flow_sigmas=True), "velocities"),
        (diffusers.DEISMultistepScheduler(**FLOW), "leaves noise"),
        (diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "velocities"),
        (diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "`mu` must be passed"),
        (diffusers.CogVideoXDPMScheduler(), "missing 2 required positional arguments"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_schedulers_are_refused(scheduler: Any, reason: str) -> None:
    """Also by `run_scheduler`, before it evaluates the velocity."""
    recorded = RecordedTimes()
    message = f"{type(scheduler).__name__} cannot be used .*{reason}.* Use FlowMatchEulerDiscreteScheduler"
    with pytest.raises(AtollError, match=message):
        flow.run_scheduler(scheduler, recorded, NOISE.float(), steps=10)
    assert recorded == []


def test_a_scheduler_with_other_settings_keeps_its_times() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_karras_sigmas=True)
    scheduler.set_timesteps(10)
    own = scheduler.timesteps / 1000
    recorded = RecordedTimes()
    flow.run_scheduler(scheduler, recorded, NOISE.float(), steps=10)
    assert recorded == pytest.approx(own.tolist(), abs=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_equals_the_step_of_diffusers(shift: float) -> None:
    """The times, the step and the sign of the velocity equal those of FlowMatchEulerDiscreteScheduler.step."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    sigmas = flow.solver_times(25)[:-1]
    scheduler.set_timesteps(sigmas=sigmas)
    x = ours = NOISE.float()
    times = flow.solver_times(25, shift)
    for i, timestep in enumerate(scheduler.timesteps):
        assert timestep.item() / 1000 == pytest.approx(times[i], abs=1e-6)
        v = MIXTURE.velocity(x.double(), torch.full((500,), float(timestep) / 1000, dtype=FLOAT)).float()
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
        ours = flow.step(lambda *_, v=v: v, ours, times[i : i + 1], to=times[i + 1 : i + 2]).x
        torch.testing.assert_close(ours, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("solver", ["flow-euler", "flow-heun"])
def test_a_plain_flow_scheduler_can_keep_its_times(solver: str, shift: float) -> None:
    """Compare with the loop of diffusers pipelines: the same times and the same samples."""
    scheduler = flow.diffusers_scheduler(solver, shift)
    scheduler.set_timesteps(20)
    x = NOISE.float()
    for timestep in scheduler.timesteps:
        t = torch.full((len(x),), float(timestep) / 1000, dtype=FLOAT)
        x = scheduler.step(MIXTURE.velocity(x.double(), t).float(), timestep, x, return_dict=False)[0]
    recorded = RecordedTimes()
    flow.solve(recorded, NOISE.float(), steps=20, solver=solver, shift=shift, scheduler_times=True)
    assert recorded == pytest.approx((scheduler.timesteps / 1000).tolist(), abs=1e-6)
    assert recorded != pytest.approx(flow.solver_times(20, shift)[: len(recorded)], abs=1e-4)
    field = lambda x, t: MIXTURE.velocity(x.double(), t.double()).float()  # noqa: E731
    ours = flow.solve(field, NOISE.float(), steps=20, solver=solver, shift=shift, scheduler_times=True)
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-4)


def test_euler_and_heun_have_no_scheduler_times() -> None:
    with pytest.raises(ValueError, match="needs a diffusers solver such as flow-euler"):
        flow.solve(MIXTURE.velocity, NOISE, solver="heun", scheduler_times=True)


def test_solver_times() -> None:
    assert flow.solver_times(4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert flow.solver_times(2, shift=3.0) == [1.0, 0.75, 0.0]
    assert [flow.solver_times(1, shift) for shift in (0.1, 0.2, 0.45)] == 3 * [[1.0, 0.0]]
    with pytest.raises(ValueError, match="steps >= 1"):
        flow.solver_times(0)


def test_unknown_solvers_are_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown solver 'dpm\+' .did you mean 'dpm\+\+'"):
        flow.solve(MIXTURE.velocity, NOISE, solver="dpm+")
    with pytest.raises(ValueError, match="unknown diffusers solver"):
        flow.diffusers_scheduler("euler")
