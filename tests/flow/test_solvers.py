import diffusers
import pytest
import torch
from oracles import FLOAT, separated_mixture

from atoll import flow
from atoll.vocabulary import SOLVERS

MIXTURE = separated_mixture()
NOISE = torch.randn(500, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)


def exact_end() -> torch.Tensor:
    """The true end of the flow, by far more steps than any solver under test takes."""
    return flow.solve(MIXTURE.velocity, NOISE, steps=2000, solver="heun")


END = exact_end()


def error(solver: str, steps: int) -> float:
    x = flow.solve(MIXTURE.velocity, NOISE, steps=steps, solver=solver)
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


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_is_the_step_of_diffusers(shift: float) -> None:
    """Same times, same step, same sign of velocity as FlowMatchEulerDiscreteScheduler.step."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    sigmas = flow.solver_times(25)[:-1]
    scheduler.set_timesteps(sigmas=sigmas)
    x = ours = NOISE.float()
    times = flow.solver_times(25, shift)
    for i, timestep in enumerate(scheduler.timesteps):
        assert timestep.item() / 1000 == pytest.approx(times[i], abs=1e-6)
        v = MIXTURE.velocity(x.double(), torch.full((500,), float(timestep) / 1000, dtype=FLOAT)).float()
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
        ours = flow.euler(lambda *_, v=v: v, ours, times[i : i + 2])
        torch.testing.assert_close(ours, x, rtol=1e-5, atol=1e-5)


def test_solver_times() -> None:
    assert flow.solver_times(4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert flow.solver_times(2, shift=3.0) == [1.0, 0.75, 0.0]
    with pytest.raises(ValueError, match="steps >= 1"):
        flow.solver_times(0)


def test_unknown_solvers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown solver 'dpm\+' .did you mean 'dpm\+\+'"):
        flow.solve(MIXTURE.velocity, NOISE, solver="dpm+")
    with pytest.raises(ValueError, match="unknown diffusers solver"):
        flow.diffusers_scheduler("euler")
