"""The trace of a pipeline: odd names, time and sign are found, and what does not fit is refused."""

from typing import Any

import pytest
import torch

from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.encoders.trace import Recorder, trace
from base.odd import FLAWS, SCHEDULERS, odd

SIZES = Size(64, 64), Size(96, 48)
SMALL, WIDE = Size(64, 64), Size(64, 96)


def recorder(pipe: Any, **options: Any) -> Recorder:
    slot = "unet" if hasattr(pipe, "unet") else "transformer"
    with torch.device("meta"):
        network = type(getattr(pipe, slot)).from_config(getattr(pipe, slot).config)
    return Recorder(pipe, slot, network, options)


@pytest.mark.parametrize("prediction", SCHEDULERS)
def test_odd_names_time_and_sign_are_found(prediction: str) -> None:
    found, *_ = trace(recorder(odd(None, prediction)), *SIZES)
    assert found.prediction == prediction
    assert (found.state, found.time, found.sign, found.by_prompt) == ("picture", "moment", -1, ("words",))
    assert (found.scale, found.offset) == pytest.approx((250, 3), rel=1e-4)


@pytest.mark.parametrize("prediction", SCHEDULERS)
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_pipeline_that_does_not_fit_is_refused_with_the_argument(flaw: str, prediction: str) -> None:
    with pytest.raises(AtollError, match=FLAWS[flaw]):
        trace(recorder(odd(flaw, prediction)), *SIZES)
