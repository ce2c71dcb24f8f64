import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import FLOAT

from atoll import flow
from atoll.core.names import PREDICTIONS, SCHEDULES, Prediction
from atoll.flow.predictions import CleanAndNoise

SCHEDULE_OBJECTS = {name: flow.schedule(name) for name in SCHEDULES}
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda inner: (3, *inner))


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from(SCHEDULES),
    source=st.sampled_from(PREDICTIONS),
    target=st.sampled_from(PREDICTIONS),
    shape=shapes,
    times=st.lists(st.floats(1e-3, 1 - 1e-3), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_every_pair_converts_both_ways(
    name: str, source: Prediction, target: Prediction, shape: tuple[int, ...], times: list[float], seed: int
) -> None:
    """Compare with values computed from x0 and eps by definition, in both directions, for 2-D to 5-D tensors."""
    schedule, generator = SCHEDULE_OBJECTS[name], torch.Generator().manual_seed(seed)
    x0, eps = (torch.randn(shape, generator=generator, dtype=FLOAT) for _ in range(2))
    t = torch.tensor(times, dtype=FLOAT)
    x = schedule.add_noise(x0, eps, t)
    given_value = flow.from_pair(CleanAndNoise(x0, eps), t, source, schedule=schedule)
    wanted = flow.from_pair(CleanAndNoise(x0, eps), t, target, schedule=schedule)
    got = flow.convert(given_value, x, t, source=source, target=target, schedule=schedule)
    scale = 1 + wanted.abs().max()
    assert (got - wanted).abs().max() <= 1e-8 * scale
    back = flow.convert(got, x, t, source=target, target=source, schedule=schedule)
    assert (back - given_value).abs().max() <= 1e-8 * (1 + given_value.abs().max())


def test_definitions_on_the_linear_path() -> None:
    x0, eps = torch.tensor([[2.0]], dtype=FLOAT), torch.tensor([[-1.0]], dtype=FLOAT)
    t = torch.tensor([0.25], dtype=FLOAT)
    values = {
        name: flow.from_pair(CleanAndNoise(x0, eps), t, name, schedule=flow.LINEAR).item() for name in PREDICTIONS
    }
    assert values == pytest.approx(
        {"velocity": -3.0, "epsilon": -1.0, "x0": 2.0, "v_prediction": 0.75 * -1 - 0.25 * 2, "score": 1 / 0.25}
    )


def test_times_broadcast_over_the_first_dimension() -> None:
    """In a batch of shape (3, 3, 3, 3), a wrong broadcast would not raise an error."""
    x0, eps = torch.randn(2, 3, 3, 3, 3, dtype=FLOAT).unbind(0)
    t = torch.tensor([0.1, 0.5, 0.9], dtype=FLOAT)
    for name, schedule in SCHEDULE_OBJECTS.items():
        together = schedule.add_noise(x0, eps, t)
        for i in range(3):
            alone = schedule.add_noise(x0[i : i + 1], eps[i : i + 1], t[i : i + 1])
            # A cosine of three times and one of a single time may be computed by different instructions.
            torch.testing.assert_close(together[i : i + 1], alone, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize("source", PREDICTIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_ends_are_finite_and_keep_the_dtype(
    name: str, source: Prediction, target: Prediction, dtype: torch.dtype
) -> None:
    """At t = 0 and t = 1, where alpha or sigma is 0, rounding errors of the input are amplified to order 1 at most."""
    schedule = SCHEDULE_OBJECTS[name]
    generator = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(4, 64, generator=generator).to(dtype) for _ in range(2))
    t = torch.tensor([0.0, 1e-6, 1 - 1e-6, 1.0])
    x = schedule.add_noise(x0, eps, t)
    got = flow.convert(
        flow.from_pair(CleanAndNoise(x0, eps), t, source, schedule=schedule),
        x,
        t,
        source=source,
        target=target,
        schedule=schedule,
    )
    assert got.dtype == dtype
    assert got.isfinite().all()
    if target in ("x0", "epsilon", "v_prediction"):
        wanted = flow.from_pair(CleanAndNoise(x0, eps), t, target, schedule=schedule).float()
        assert got.float().abs().max() <= 2 * (1 + wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", PREDICTIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pair_is_always_consistent_with_the_state(name: str, source: Prediction, dtype: torch.dtype) -> None:
    """The identity alpha x0 + sigma eps = x holds even for a prediction that contradicts x at the ends."""
    schedule = SCHEDULE_OBJECTS[name]
    generator = torch.Generator().manual_seed(1)
    x, output = (torch.randn(5, 32, generator=generator).to(dtype) for _ in range(2))
    t = torch.tensor([0.0, 0.01, 0.5, 0.99, 1.0])
    x0, eps = flow.to_pair(output, x, t, prediction=source, schedule=schedule)
    c = schedule.at(t, x)
    error = (c.alpha * x0.float() + c.sigma * eps.float() - x.float()).abs()
    terms = (c.alpha * x0.float()).abs() + (c.sigma * eps.float()).abs() + 1
    assert (error / terms).max() <= 4 * torch.finfo(dtype).eps


def test_invalid_input_is_an_error() -> None:
    x = torch.zeros(4, 3)
    good = torch.full((4,), 0.5)
    cases = [
        (
            lambda: flow.convert(x, x, torch.full((3,), 0.5), source="x0", target="epsilon", schedule=flow.LINEAR),
            r"shape \(4,\)",
        ),
        (
            lambda: flow.convert(x, x, torch.full((4, 1), 0.5), source="x0", target="epsilon", schedule=flow.LINEAR),
            r"got \(4, 1\)",
        ),
        (
            lambda: flow.convert(x, x, torch.full((4,), 1.5), source="x0", target="epsilon", schedule=flow.LINEAR),
            r"in \[0, 1\].*1.5",
        ),
        (
            lambda: flow.convert(
                x, x, torch.full((4,), float("nan")), source="x0", target="epsilon", schedule=flow.LINEAR
            ),
            r"in \[0, 1\]",
        ),
        (
            lambda: flow.convert(x, x, torch.tensor([1, 0, 1, 0]), source="x0", target="epsilon", schedule=flow.LINEAR),
            "floating point",
        ),
        (lambda: flow.convert(x[:2], x, good, source="x0", target="epsilon", schedule=flow.LINEAR), "equal shapes"),
        (lambda: flow.convert(x, x, good, source="x_0", target="epsilon", schedule=flow.LINEAR), "did you mean 'x0'"),
        (
            lambda: flow.convert(x, x, good, source="x0", target="velcity", schedule=flow.LINEAR),
            "did you mean 'velocity'",
        ),
        (lambda: flow.LINEAR.add_noise(x, x[:, :2], good), "equal shapes"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
