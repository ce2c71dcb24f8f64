"""The bridge for data whose mean and standard deviation are not 0 and 1, compared with exact Gaussian data."""

import pytest
import torch
from oracles import FLOAT, ScaledGaussian
from torch import Tensor

from atoll import flow
from atoll.core.names import Prediction

SCALED = ScaledGaussian((1.06, -0.3, 0.0, 0.5), (0.60, 0.84, 0.7, 0.65))
"""The range of mean and std of Stable Diffusion latents after multiplication by 0.18215."""
PREDICTIONS: list[Prediction] = ["epsilon", "x0", "v_prediction", "velocity", "score"]
SCHEDULES = ["linear", "cosine", "ddpm-linear", "ddpm-scaled-linear", "edm"]


def moments(data: ScaledGaussian) -> dict[str, tuple[float, ...]]:
    return {"data_mean": data.mean, "data_std": data.std}


def states(data: ScaledGaussian, t: Tensor, seed: int = 0) -> Tensor:
    """Return noisy data (times, channels, 3, 3) on the linear path."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(t), len(data.mean), 3, 3)
    x0, eps = (torch.randn(shape, generator=generator, dtype=FLOAT) for _ in range(2))
    wide = t[:, None, None, None]
    return (1 - wide) * (data.wide(data.mean) + data.wide(data.std) * x0) + wide * eps


def bridged(data: ScaledGaussian, bridge: flow.Bridge, x: Tensor, t: Tensor, error: float = 0.0) -> Tensor:
    """Return the velocity of the ideal network through the bridge, with an output error of this size."""
    query = bridge.query(x, t)
    scale = bridge.schedule.input_scale(query.time)[:, None, None, None]
    c = bridge.schedule.at(query.time, x)
    output = data.predict(query.state / scale, c, bridge.prediction)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    return bridge.velocity(output + error * noise, x, t)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_ideal_experts_of_scaled_data_give_the_exact_velocity(name: str, prediction: Prediction) -> None:
    bridge = flow.Bridge(flow.schedule(name), prediction, **moments(SCALED))
    low, high = bridge.exact_range
    t = torch.linspace(max(low, 1e-3), min(high, 1 - 1e-3), 500, dtype=FLOAT)
    x = states(SCALED, t)
    error = (bridged(SCALED, bridge, x, t) - SCALED.velocity(x, t)).abs().max()
    assert error <= (1e-6 if name in ("linear", "cosine", "edm") else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prediction", ["epsilon", "score"])
def test_near_noise_x0_shrinks_to_the_mean_of_the_data(prediction: Prediction, dtype: torch.dtype) -> None:
    """The prediction carries no information about x0 there, so the velocity must be eps - E[x0]."""
    t = torch.cat([torch.full((200,), 0.9999, dtype=FLOAT), torch.ones(200, dtype=FLOAT)])
    x = states(SCALED, t)
    options = {"schedule": flow.schedule("cosine"), "prediction": prediction, "prediction_error": 0.05}
    errors = {}
    for name, data in (("own", moments(SCALED)), ("standard", {})):
        bridge = flow.Bridge(**options, **data)
        output = SCALED.predict(bridge.query(x, t).state, bridge.schedule.at(bridge.query(x, t).time, x), prediction)
        velocity = bridge.velocity(output.to(dtype), x.to(dtype), t.to(torch.promote_types(dtype, torch.float32)))
        errors[name] = (velocity.double() - SCALED.velocity(x, t)).mean((0, 2, 3))
    torch.testing.assert_close(errors["own"], torch.zeros(4, dtype=FLOAT), atol=0.005, rtol=0)
    off_by_the_mean = torch.tensor(SCALED.mean, dtype=FLOAT)
    torch.testing.assert_close(errors["standard"], off_by_the_mean, atol=0.005, rtol=0)


@pytest.mark.parametrize("time", [0.9, 0.97, 0.99])
def test_the_wiener_factor_uses_the_moments_of_the_data(time: float) -> None:
    """For an epsilon network with an error of 5 %, the true mean and std beat 0 and 1, and beat no shrinkage."""
    t = torch.full((500,), time, dtype=FLOAT)
    x = states(SCALED, t)
    errors = []
    for options in ({"prediction_error": 0.05, **moments(SCALED)}, {"prediction_error": 0.05}, {}):
        bridge = flow.Bridge(flow.schedule("cosine"), "epsilon", x0_bound=None, **options)
        velocity = bridged(SCALED, bridge, x, t, error=0.05)
        errors.append(float((velocity - SCALED.velocity(x, t)).square().mean()))
    assert errors[0] < 0.95 * min(errors[1:])


def test_beyond_a_table_the_mean_of_the_data_is_kept() -> None:
    """The table of Stable Diffusion ends at t = 0.0283 and 0.936; outside, the expert is evaluated at its last step.

    In the middle of the states, x = (1-t) m, the exact velocity is -m at every time. The data are latents as the
    autoencoder gives them.
    """
    data = ScaledGaussian((5.8, -1.6), (3.3, 4.6))
    t = torch.cat([torch.linspace(1e-3, 0.028, 50, dtype=FLOAT), torch.linspace(0.94, 1, 50, dtype=FLOAT)])
    mean = data.wide(data.mean)
    x = ((1 - t)[:, None, None, None] * mean).expand(-1, -1, 3, 3)
    for options, close in ((moments(data), True), ({}, False)):
        bridge = flow.Bridge(flow.schedule("ddpm-scaled-linear"), "epsilon", **options)
        assert bool((bridged(data, bridge, x, t) + mean).abs().max() < 1e-5) == close


def test_the_bound_of_x0_is_around_the_mean_of_the_data() -> None:
    """For data from 17 to 23, a bound of ±10 would clamp everything, and one of ten standard deviations nothing."""
    data = ScaledGaussian((20.0, 0.0), (0.6, 5.0))
    t = torch.linspace(0.01, 0.99, 300, dtype=FLOAT)
    x = states(data, t)
    exact = data.velocity(x, t)
    for options, close in ((moments(data), True), ({}, False)):
        bridge = flow.Bridge(flow.schedule("cosine"), "epsilon", **options)
        assert bool((bridged(data, bridge, x, t) - exact).abs().max() < 1e-6) == close
    bridge = flow.Bridge(flow.schedule("cosine"), "epsilon", **moments(data))
    x0 = x - t[:, None, None, None] * bridge.velocity(1000 * torch.ones_like(x), x, t)
    assert (x0 - data.wide(data.mean)).abs().amax((0, 2, 3)) == pytest.approx([6.0, 50.0])


def test_one_number_applies_to_every_channel() -> None:
    data = ScaledGaussian((0.7, 0.7), (0.5, 0.5))
    t = torch.linspace(0, 1, 50, dtype=FLOAT)
    x = states(data, t)
    options = {"schedule": flow.schedule("ddpm-linear"), "prediction": "v_prediction", "prediction_error": 0.1}
    one, each = flow.Bridge(**options, data_mean=0.7, data_std=0.5), flow.Bridge(**options, **moments(data))
    torch.testing.assert_close(bridged(data, one, x, t), bridged(data, each, x, t))


def test_a_wrong_number_of_channels_is_an_error() -> None:
    bridge = flow.Bridge(flow.schedule("cosine"), "epsilon", **moments(SCALED))
    with pytest.raises(ValueError, match=r"have 4 channels, got states \(2, 3, 8, 8\)"):
        bridge.query(torch.zeros(2, 3, 8, 8), torch.zeros(2))
    with pytest.raises(ValueError, match="data_std > 0"):
        flow.Bridge(flow.schedule("cosine"), "epsilon", data_std=(1.0, 0.0))
