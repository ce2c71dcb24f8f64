import math

import pytest
import torch
from oracles import FLOAT, random_mixture
from torch import Tensor

from atoll import flow
from atoll.core.names import PREDICTIONS, SCHEDULES, BridgeMode, Prediction
from atoll.flow.schedules import broadcast

CONTINUOUS = ("linear", "cosine", "edm")


def ideal_answer(mixture: flow.GaussianMixture, bridge: flow.Bridge, query: flow.Query) -> Tensor:
    """Return the output of an ideal network for the bridge, after undoing the input scale of the schedule."""
    state = query.state / broadcast(bridge.schedule.input_scale(query.time), query.state)
    time = query.time.clamp(1e-9, 1)
    return mixture.predict(state, time, bridge.prediction, schedule=bridge.schedule)


def noisy_states(mixture: flow.GaussianMixture, t: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x0 = mixture.sample(len(t), generator)
    return flow.LINEAR.add_noise(x0, torch.randn(x0.shape, generator=generator, dtype=FLOAT), t)


def bridged(mixture: flow.GaussianMixture, bridge: flow.Bridge, x: Tensor, t: Tensor) -> Tensor:
    return bridge.velocity(ideal_answer(mixture, bridge, bridge.query(x, t)), x, t)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_ideal_experts_of_every_kind_give_the_same_velocity(name: str, prediction: Prediction) -> None:
    mixture, bridge = random_mixture(), flow.Bridge(flow.schedule(name), prediction)
    low, high = bridge.exact_range
    t = torch.linspace(max(low, 1e-3), min(high, 1 - 1e-3), 2000, dtype=FLOAT)
    x = noisy_states(mixture, t)
    error = (bridged(mixture, bridge, x, t) - mixture.velocity(x, t)).abs().max()
    assert error <= (1e-6 if name in CONTINUOUS else 1e-4)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_schedules_that_reach_both_ends_are_exact_everywhere(name: str) -> None:
    assert flow.Bridge(flow.schedule(name), "epsilon").exact_range == (1e-4, 1 - 1e-4)


def test_the_bridge_from_an_arbitrary_table() -> None:
    table = torch.linspace(0.998, 0.002, 300, dtype=FLOAT).pow(1.5)
    bridge = flow.Bridge(flow.DiscreteSchedule(tuple(table.tolist())), "epsilon")
    t = torch.linspace(*bridge.exact_range, 1000, dtype=FLOAT)
    mixture = random_mixture(seed=7)
    x = noisy_states(mixture, t)
    assert (bridged(mixture, bridge, x, t) - mixture.velocity(x, t)).abs().max() <= 1e-4


def test_beyond_a_table_the_velocity_stays_close() -> None:
    """The linear betas of DDPM end at t = 0.0099 and t = 0.9937; outside, the expert is evaluated at its last step."""
    mixture, bridge = random_mixture(), flow.Bridge(flow.schedule("ddpm-linear"), "epsilon")
    low, high = bridge.exact_range
    assert (low, high) == pytest.approx((0.0099, 0.9937), abs=1e-4)
    t = torch.cat([torch.linspace(0, low, 200, dtype=FLOAT), torch.linspace(high, 1, 200, dtype=FLOAT)])
    x = noisy_states(mixture, t)
    truth = mixture.velocity(x, t.clamp(1e-6, 1))
    error = (bridged(mixture, bridge, x, t) - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max() < 0.15
    assert error.mean() < 0.02


def test_both_readings_of_the_published_conversion_are_biased_where_the_schedules_differ() -> None:
    """The metrics of benchmarks/README.md; `python docs/figures/bridge_bias.py` draws them over t."""
    mixture, cosine = random_mixture(), flow.schedule("cosine")
    t = torch.linspace(1e-3, 1 - 1e-3, 2000, dtype=FLOAT)
    x = noisy_states(mixture, t)
    truth = mixture.velocity(x, t)
    relative = {
        mode: ((bridged(mixture, flow.Bridge(cosine, "epsilon", mode), x, t) - truth).norm(dim=1) / truth.norm(dim=1))
        for mode in ("exact", "published-linear", "published-schedule")
    }
    assert relative["exact"].max() < 1e-9
    assert relative["published-linear"].mean() > 0.3
    # With alpha and sigma of the expert's schedule, x0 is less biased, but not exact.
    assert 0.1 < relative["published-schedule"].mean() < 0.6 * relative["published-linear"].mean()


@pytest.mark.parametrize("mode", ["published-linear", "published-schedule"])
def test_the_published_conversion_follows_its_formula(mode: BridgeMode) -> None:
    cosine = flow.schedule("cosine")
    bridge = flow.Bridge(cosine, "epsilon", mode=mode)
    x, eps = torch.tensor([[0.5], [2.0], [3.0]]), torch.tensor([[0.2], [1.0], [-1.0]])
    t = torch.tensor([0.25, 0.7004, 0.9999])
    query = bridge.query(x, t)
    assert query.timestep.tolist() == [250.0, 700.0, 999.0]
    assert query.state is x
    velocity = bridge.velocity(eps, x, t)
    alpha, sigma = (0.75, 0.25) if mode == "published-linear" else (math.cos(math.pi / 8), math.sin(math.pi / 8))
    assert velocity[0].item() == pytest.approx(0.2 - (0.5 - sigma * 0.2) / alpha)
    # (3 + sigma) / 0.01 is far beyond the clamp at 20.
    assert velocity[2].item() == pytest.approx(-1.0 - 20.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("prediction", "low", "high"), [("epsilon", 0.999, 0.9999), ("score", 0.999, 0.9999), ("x0", 1e-4, 1e-3)]
)
def test_a_half_precision_output_is_regularized_at_its_resolution(
    prediction: Prediction, low: float, high: float, dtype: torch.dtype
) -> None:
    """Near an end the rounding error of bfloat16 becomes several times the velocity, unless it is regularized."""
    mixture, bridge = random_mixture(), flow.Bridge(flow.schedule("cosine"), prediction, x0_bound=None)
    t = torch.linspace(low, high, 4000, dtype=FLOAT)
    x = noisy_states(mixture, t)
    truth = mixture.velocity(x, t)
    output = ideal_answer(mixture, bridge, bridge.query(x, t)).to(dtype)

    def error(output: Tensor) -> float:
        velocity = bridge.velocity(output, x.float(), t.float())
        assert velocity.dtype == torch.float32
        return float((velocity - truth).square().mean().sqrt() / truth.square().mean().sqrt())

    assert error(output) < 0.9  # an error of the resolution may grow to order 1, the scale of the data
    if dtype == torch.bfloat16:  # a cast before the bridge would hide the rounding error
        assert error(output.float()) > 2.0


def test_a_calibrated_expert_in_half_precision_is_still_shrunk() -> None:
    """At t = 1, an epsilon expert with an error of 5 % carries no information about x0, in any precision."""
    bridge = flow.Bridge(flow.schedule("cosine"), "epsilon", x0_bound=None, prediction_error=0.05)
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    t, output = torch.ones(100), torch.ones_like(x)
    velocities = [bridge.velocity(output.to(dtype), x, t) for dtype in (torch.float32, torch.bfloat16)]
    torch.testing.assert_close(velocities[1], velocities[0], atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_velocity_is_finite_at_the_ends(name: str, prediction: Prediction, dtype: torch.dtype) -> None:
    """A network with an error of 0.1 everywhere still gives a velocity whose x0 is within the bound."""
    bridge = flow.Bridge(flow.schedule(name), prediction, x0_bound=6.0)
    t = torch.tensor([0.0, 1e-7, 1e-4, 0.5, 1 - 1e-4, 1 - 1e-7, 1.0])
    x = torch.randn(7, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    velocity = bridge.velocity(0.1 * torch.ones_like(x), x, t)
    assert velocity.dtype == dtype
    assert velocity.isfinite().all()
    if not bridge.identity:
        noisy = t >= 0.5
        x0 = x[noisy].float() - t[noisy, None, None, None] * velocity[noisy].float()
        assert x0.abs().max() <= 6.0 * (1 + 4 * torch.finfo(dtype).eps)


def test_bounding_x0_keeps_the_pair_consistent_with_the_state() -> None:
    bridge = flow.Bridge(flow.schedule("cosine"), "epsilon", x0_bound=1.0)
    t = torch.full((4,), 0.9, dtype=FLOAT)
    x, output = torch.ones(4, 2, dtype=FLOAT), -torch.ones(4, 2, dtype=FLOAT)
    velocity = bridge.velocity(output, x, t)
    x0, eps = x - 0.9 * velocity, x + 0.1 * velocity
    torch.testing.assert_close(x0, torch.ones_like(x0))
    torch.testing.assert_close(0.1 * x0 + 0.9 * eps, x)


def test_a_bound_as_wide_as_the_data_does_not_change_an_ideal_expert() -> None:
    mixture = random_mixture()
    t = torch.linspace(1e-3, 1 - 1e-3, 1000, dtype=FLOAT)
    x = noisy_states(mixture, t)
    results = [
        bridged(mixture, flow.Bridge(flow.schedule("cosine"), "epsilon", x0_bound=bound), x, t)
        for bound in (10.0, None)
    ]
    assert torch.equal(*results)


def test_the_prediction_error_lowers_the_velocity_error_near_noise() -> None:
    """An error of 2 % in eps is an error of 2 in x0 at t = 0.99, which the Wiener factor removes."""
    mixture = random_mixture()
    t = torch.full((4000,), 0.99, dtype=FLOAT)
    x = noisy_states(mixture, t)
    centre, spread = float(mixture.means.mean()), float(mixture.sample(5000, torch.Generator().manual_seed(1)).std())
    disturbance = 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=FLOAT)
    errors = []
    for known in (0.0, 0.02):
        bridge = flow.Bridge(
            flow.schedule("cosine"), "epsilon", x0_bound=None, prediction_error=known, data_mean=centre, data_std=spread
        )
        output = ideal_answer(mixture, bridge, bridge.query(x, t)) + disturbance
        errors.append((bridge.velocity(output, x, t) - mixture.velocity(x, t)).square().mean().sqrt().item())
    assert errors[0] == pytest.approx(0.02 / 0.01, rel=0.05)
    assert errors[1] < 0.6 * errors[0]


def test_wrap_returns_a_velocity_field_with_conditions() -> None:
    seen = {}

    def network(state: Tensor, time: Tensor, **condition: object) -> Tensor:
        seen.update(condition, time=time)
        return state

    field = flow.objective("ddpm-linear").bridge().wrap(network)
    x = torch.randn(2, 3)
    assert field(x, torch.tensor([0.5, 0.5]), label=4).shape == x.shape
    assert seen["label"] == 4
    assert 0 < seen["time"][0] < 999


def test_flow_matching_needs_no_bridge() -> None:
    bridge = flow.objective("flow-matching").bridge()
    x, output, t = torch.randn(2, 3), torch.randn(2, 3), torch.tensor([0.2, 0.7])
    assert bridge.identity
    assert bridge.query(x, t).state is x
    assert bridge.query(x, t).timestep.tolist() == pytest.approx([200.0, 700.0])
    assert bridge.velocity(output, x, t) is output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction": "epslion"}, "unknown prediction 'epslion' .did you mean 'epsilon'"),
        ({"mode": "exakt"}, "unknown bridge mode 'exakt' .did you mean 'exact'"),
        ({"mode": "published"}, "unknown bridge mode 'published' .did you mean 'published-linear'"),
        ({"prediction": "x0", "mode": "published-linear"}, "covers epsilon and velocity"),
        ({"x0_bound": 0.0}, "x0_bound > 0"),
        ({"prediction_error": -1.0}, "prediction_error >= 0"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flow.Bridge(**{"schedule": flow.schedule("cosine"), "prediction": "epsilon", **options})


def test_wrong_shapes_are_errors() -> None:
    bridge = flow.Bridge(flow.schedule("cosine"), "epsilon")
    with pytest.raises(ValueError, match="equal shapes"):
        bridge.velocity(torch.zeros(2, 4), torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"t must have shape \(2,\)"):
        bridge.query(torch.zeros(2, 3), torch.zeros(3))
