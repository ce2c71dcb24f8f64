import math

import diffusers
import pytest
import torch
from oracles import FLOAT

from atoll import flow
from atoll.core.names import SCHEDULES

INNER = torch.linspace(0.003, 0.997, 777, dtype=FLOAT)
DIFFUSERS = {"ddpm-linear": "linear", "ddpm-scaled-linear": "scaled_linear", "ddpm-cosine": "squaredcos_cap_v2"}


def diffusers_twin(name: str, **options: object) -> diffusers.DDPMScheduler:
    betas = {"ddpm-scaled-linear": {"beta_start": 0.00085, "beta_end": 0.012}}.get(name, {})
    return diffusers.DDPMScheduler(1000, beta_schedule=DIFFUSERS[name], **betas, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_derivatives_are_those_of_autograd(name: str) -> None:
    schedule = flow.schedule(name)
    t = INNER.clone().requires_grad_(True)
    for value, derivative in ((schedule.alpha, schedule.d_alpha), (schedule.sigma, schedule.d_sigma)):
        total = value(t).sum()
        expected = torch.autograd.grad(total, t)[0] if total.requires_grad else torch.zeros_like(t)
        torch.testing.assert_close(derivative(INNER), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_log_snr_falls_and_matches_its_definition_and_inverse(name: str) -> None:
    schedule = flow.schedule(name)
    log_snr = schedule.log_snr(INNER)
    assert (log_snr.diff() < 0).all()
    torch.testing.assert_close(log_snr, 2 * torch.log(schedule.alpha(INNER) / schedule.sigma(INNER)))
    torch.testing.assert_close(schedule.time_of_log_snr(log_snr), INNER, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_log_snr_beyond_the_range_gives_the_nearest_end(name: str) -> None:
    times = flow.schedule(name).time_of_log_snr(torch.tensor([math.inf, 80.0, -80.0, -math.inf]))
    torch.testing.assert_close(times, torch.tensor([0.0, 0.0, 1.0, 1.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
def test_continuous_schedules_are_exact_at_the_ends(name: str, dtype: torch.dtype) -> None:
    """Zeros are exact on every processor; the sine of pi/2 may be rounded to just below 1."""
    schedule, ends = flow.schedule(name), torch.tensor([0.0, 1.0], dtype=dtype)
    rounding = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(schedule.alpha(ends), torch.tensor([1.0, 0.0], dtype=dtype), **rounding)
    torch.testing.assert_close(schedule.sigma(ends), torch.tensor([0.0, 1.0], dtype=dtype), **rounding)


def test_edm_covers_its_range_of_sigmas() -> None:
    schedule = flow.schedule("edm")
    t = torch.tensor([0.0, 0.5, 1.0], dtype=FLOAT)
    middle = ((0.002 ** (1 / 7) + 80 ** (1 / 7)) / 2) ** 7
    assert schedule.sigma(t).tolist() == pytest.approx([0.002, middle, 80.0])
    assert schedule.input_scale(t)[2].item() == pytest.approx(1 / math.sqrt(1 + 80**2))


@pytest.mark.parametrize("name", DIFFUSERS)
def test_tables_equal_those_of_diffusers(name: str) -> None:
    ours = torch.tensor(flow.schedule(name).alphas_cumprod, dtype=FLOAT)
    theirs = diffusers_twin(name).alphas_cumprod.double()
    # diffusers multiplies a thousand factors in float32.
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize("name", DIFFUSERS)
def test_add_noise_and_v_prediction_equal_those_of_diffusers(name: str) -> None:
    twin = diffusers_twin(name)
    schedule = flow.DiscreteSchedule(tuple(twin.alphas_cumprod.tolist()))
    generator = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(8, 4, 8, 8, generator=generator) for _ in range(2))
    steps = torch.tensor([0, 1, 10, 250, 500, 750, 998, 999])
    t = steps.double() / 999
    torch.testing.assert_close(schedule.timestep(t), steps.double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(schedule.add_noise(x0, eps, t), twin.add_noise(x0, eps, steps), rtol=1e-5, atol=1e-5)
    ours = flow.from_pair(flow.CleanAndNoise(x0, eps), t, "v_prediction", schedule=schedule)
    torch.testing.assert_close(ours, twin.get_velocity(x0, eps, steps), rtol=1e-5, atol=1e-5)


def test_zero_terminal_snr_tables_are_accepted() -> None:
    twin = diffusers_twin("ddpm-scaled-linear", rescale_betas_zero_snr=True)
    schedule = flow.DiscreteSchedule(tuple(twin.alphas_cumprod.tolist()))
    assert schedule.alpha(torch.ones(1)).item() < 1e-5
    assert schedule.log_snr(torch.linspace(0, 1, 50)).isfinite().all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_built_again_from_its_spec(name: str) -> None:
    schedule = flow.schedule(name)
    assert flow.schedule(**schedule.spec.model_dump()) == schedule


def test_a_custom_table_is_built_again_from_its_spec() -> None:
    schedule = flow.DiscreteSchedule((0.9, 0.5, 0.1))
    again = flow.schedule(**schedule.spec.model_dump())
    assert again == schedule
    assert again.log_snr(torch.tensor(0.25, dtype=FLOAT)).item() == pytest.approx((math.log(9) + 0.0) / 2)


def test_half_precision_times_are_converted_to_float32() -> None:
    c = flow.schedule("cosine").at(torch.tensor([0.5], dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16))
    assert c.alpha.dtype == torch.float32
    assert c.alpha.item() == pytest.approx(math.sqrt(0.5))


def test_one_time_for_the_whole_batch() -> None:
    x = torch.ones(3, 2)
    for t in (torch.tensor(0.25), torch.tensor([0.25])):
        torch.testing.assert_close(flow.LINEAR.add_noise(x, 0 * x, t), 0.75 * x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flow.DiscreteSchedule((0.9, 0.95, 0.1)), "must fall at every step, but step 1 has 0.95 after 0.9"),
        (lambda: flow.DiscreteSchedule((1.0, 0.5)), "strictly between 0 and 1"),
        (lambda: flow.DiscreteSchedule((0.9, -0.5)), "strictly between 0 and 1"),
        (lambda: flow.DiscreteSchedule((0.9, float("nan"))), "strictly between 0 and 1"),
        (lambda: flow.DiscreteSchedule((0.9,)), "at least 2 steps"),
        (lambda: flow.schedule("cosin"), "unknown schedule 'cosin' .did you mean 'cosine'"),
        (lambda: flow.schedule("edm", sigma_min=3.0, sigma_max=1.0), "sigma_min < sigma_max"),
        (lambda: flow.schedule("ddpm-linear", beta_start=2.0), "betas strictly between 0 and 1"),
        (lambda: flow.schedule("linear", sigma_min=1.0), "schedule 'linear'"),
    ],
)
def test_invalid_schedules_are_errors(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
