from typing import Any

import numpy as np
import pytest
import torch
from oracles import FLOAT

from atoll import flow
from atoll.core.config_sections import NAMED_OBJECTIVES
from atoll.core.manifests import ObjectiveSpec
from atoll.core.names import OBJECTIVES
from atoll.flow import rng
from atoll.flow.objectives import MAX_WEIGHT

BATCH = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_random_streams_keep_their_numbers() -> None:
    """Weights and images of a seed depend on them."""
    assert [*map(int, rng.Stream)] == [1, 2, *range(11, 25), 31, 34, 35, 1 << 20]


def noise(x0: torch.Tensor, **how: Any) -> torch.Tensor:
    """Return the noise that every objective adds: the target of a network that predicts it."""
    return flow.Objective(prediction="epsilon").corrupt(x0, **how).target


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_is_a_function_of_seed_and_step(name: str) -> None:
    objective = flow.objective(name)
    first, again = (objective.corrupt(BATCH, seed=3, step=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in ({"seed": 4, "step": 5}, {"seed": 3, "step": 6}):
        assert not torch.equal(noise(BATCH, seed=3, step=5), noise(BATCH, **other))
        assert not torch.equal(first.t, objective.corrupt(BATCH, **other).t)


def test_an_image_gets_the_same_noise_in_any_batch() -> None:
    """Two processes must equal one: positions 64 to 127 as one batch of 64 or as two of 32."""
    objective = flow.objective("ddpm")
    whole = objective.corrupt(BATCH, seed=1, step=1)
    halves = [objective.corrupt(BATCH[i : i + 32], seed=1, position=64 + i) for i in (0, 32)]
    assert torch.equal(whole.target, torch.cat([half.target for half in halves]))  # noise, drawn image by image
    for name in flow.Noised._fields:
        torch.testing.assert_close(getattr(whole, name), torch.cat([getattr(half, name) for half in halves]))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_positions_get_their_own_noise(name: str) -> None:
    """A teacher's images are scattered over a block: each is noised as if it were alone, bit for bit."""
    objective, positions = flow.objective(name), np.array([70, 3, 2**40, 4], dtype=np.uint64)
    scattered = objective.corrupt(BATCH[:4], seed=1, position=positions)
    drawn = noise(BATCH[:4], seed=1, position=positions)
    for i, position in enumerate(positions.tolist()):
        alone = objective.corrupt(BATCH[i : i + 1], seed=1, position=position)
        assert torch.equal(drawn[i : i + 1], noise(BATCH[i : i + 1], seed=1, position=position))
        for field in flow.Noised._fields:
            torch.testing.assert_close(getattr(scattered, field)[i : i + 1], getattr(alone, field))
    with pytest.raises(ValueError, match="got 3 positions for 4 rows"):
        objective.corrupt(BATCH[:4], seed=1, position=positions[:3])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_perfect_network_has_no_loss_and_its_bridge_gives_the_velocity(name: str) -> None:
    """Convert the target at the noised input through the bridge; the result is eps - x0 of the same pair."""
    objective = flow.objective(name)
    x0 = BATCH.double()
    noised = objective.corrupt(x0, seed=0, t=torch.linspace(0.05, 0.95, 64, dtype=FLOAT))
    assert objective.loss(noised.target, noised).max() == 0
    bridge = objective.bridge(x0_bound=None)
    t = flow.LINEAR.time_of_log_snr(objective.schedule.log_snr(noised.t))
    eps = noise(x0, seed=0)
    x = flow.LINEAR.add_noise(x0, eps, t)
    query = bridge.query(x, t)
    torch.testing.assert_close(query.state, noised.input, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(query.timestep, noised.timestep.double(), rtol=1e-4, atol=1e-2)
    velocity = bridge.velocity(noised.target, x, t)
    torch.testing.assert_close(velocity, eps - x0, rtol=1e-6, atol=1e-5)


def test_flow_matching_is_the_textbook_batch() -> None:
    noised = flow.objective("flow-matching").corrupt(BATCH, seed=0)
    t, eps = noised.t[:, None, None, None], noise(BATCH, seed=0)
    torch.testing.assert_close(noised.input, (1 - t) * BATCH + t * eps)
    torch.testing.assert_close(noised.target, eps - BATCH)
    torch.testing.assert_close(noised.timestep, 1000 * noised.t)


def test_noise_and_times_have_the_declared_distributions() -> None:
    many = torch.zeros(20_000, 4)
    uniform = flow.objective("flow-matching").corrupt(many, seed=0)
    assert abs(noise(many, seed=0).mean()) < 4.5 / 80_000**0.5
    assert abs(noise(many, seed=0).std() - 1) < 4.5 / 160_000**0.5
    assert abs(uniform.t.mean() - 0.5) < 4.5 * (1 / 12 / 20_000) ** 0.5
    logit = torch.logit(flow.objective("flow-matching", times="logit-normal", time_mean=-0.5).corrupt(many, seed=0).t)
    assert logit.mean().item() == pytest.approx(-0.5, abs=0.03)
    assert logit.std().item() == pytest.approx(1.0, abs=0.03)
    exploding = flow.objective("ve-x0")
    log_sigma = exploding.schedule.sigma(exploding.corrupt(many, seed=0).t).log()
    assert log_sigma.mean().item() == pytest.approx(-1.2, abs=0.04)
    assert log_sigma.std().item() == pytest.approx(1.2, abs=0.04)


def test_shift_moves_times_toward_noise() -> None:
    plain, shifted = (flow.objective("flow-matching", time_shift=s).corrupt(BATCH, seed=0).t for s in (1.0, 3.0))
    torch.testing.assert_close(shifted, 3 * plain / (1 + 2 * plain))


def test_min_snr_weights_are_those_of_the_paper() -> None:
    t = torch.linspace(0.01, 0.99, 99, dtype=FLOAT)
    schedule = flow.schedule("cosine")
    snr = schedule.log_snr(t).exp()
    capped = snr.clamp(max=5)
    expected = {"x0": capped, "epsilon": capped / snr, "v_prediction": capped / (snr + 1)}
    for prediction, weights in expected.items():
        got = flow.Weighting("min-snr").weights(t, prediction, schedule)
        torch.testing.assert_close(got, weights.clamp(max=MAX_WEIGHT), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "ddpm-linear"])
@pytest.mark.parametrize("prediction", ["x0", "epsilon", "v_prediction", "velocity"])
@pytest.mark.parametrize("other", ["velocity", "epsilon", "x0"])
def test_as_weightings_measure_the_error_on_the_other_prediction(name: str, prediction: str, other: str) -> None:
    """The weighted error of one prediction equals the plain error of the other, for the same wrong estimate."""
    objective = flow.objective(schedule=name, prediction=prediction, weighting=f"as-{other}")
    x0 = BATCH.double()
    t = torch.linspace(0.1, 0.7, 64, dtype=FLOAT)  # where no weight reaches its maximum
    noised = objective.corrupt(x0, seed=0, t=t)
    wrong = noised.target + 0.1
    converted = flow.convert(wrong, noised.input, t, source=prediction, target=other, schedule=objective.schedule)
    truth = flow.from_pair(flow.CleanAndNoise(x0, noise(x0, seed=0)), t, other, schedule=objective.schedule)
    expected = (converted - truth).square().flatten(1).mean(1)
    torch.testing.assert_close(objective.loss(wrong, noised).double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weighting", ["constant", "min-snr", "as-x0"])
def test_one_time_for_the_whole_batch_may_be_a_scalar(weighting: str) -> None:
    objective = flow.objective("ddpm", weighting=weighting)
    one, each = (objective.corrupt(BATCH, seed=0, t=t) for t in (torch.tensor(0.3), torch.full((64,), 0.3)))
    torch.testing.assert_close(objective.loss(BATCH, one), objective.loss(BATCH, each))


def test_weights_stay_finite_at_the_ends() -> None:
    ends = torch.tensor([0.0, 1.0])
    for schedule in ("linear", "cosine", "edm"):
        for prediction in ("x0", "epsilon", "velocity"):
            for weighting in ("min-snr", "as-velocity", "as-epsilon", "as-x0"):
                weights = flow.Weighting(weighting).weights(ends, prediction, flow.schedule(schedule))
                assert weights.isfinite().all(), (schedule, prediction, weighting)
                assert weights.max() <= MAX_WEIGHT


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_built_again_from_its_spec_through_json(name: str) -> None:
    objective = flow.objective(name)
    assert flow.Objective.of(ObjectiveSpec.model_validate_json(objective.spec.model_dump_json())) == objective


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_configuration_has_the_same_objectives(name: str) -> None:
    assert flow.objective(**NAMED_OBJECTIVES[name].model_dump()) == flow.objective(name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flow.objective("flow-maching"), "did you mean 'flow-matching'"),
        (lambda: flow.objective(predicton="x0"), "did you mean 'prediction'"),
        (lambda: flow.objective(time_evn=True), "unknown part of an objective 'time_evn'"),
        (lambda: flow.objective(times="unifrm"), "did you mean 'uniform'"),
        (lambda: flow.objective(weighting="min_snr"), "did you mean 'min-snr'"),
        (lambda: flow.objective(time_std=0.0), "std > 0"),
        (lambda: flow.objective(min_snr_gamma=-1.0), "gamma > 0"),
        (lambda: flow.objective().corrupt(torch.zeros(4, 3, dtype=torch.long), seed=0), "floating point batch"),
        (lambda: flow.objective().corrupt(torch.zeros(4), seed=0), "floating point batch"),
        (
            lambda: flow.objective().loss(torch.zeros(2, 5), flow.objective().corrupt(torch.zeros(2, 3), seed=0)),
            r"output must have shape \(2, 3\), got \(2, 5\)",
        ),
    ],
)
def test_invalid_input_is_an_error(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
