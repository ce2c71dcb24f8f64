"""Budgets of training steps on images of five sizes: the positions of a grid are copied to the device once."""

import os
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import numpy as np
from test_training import WARM_UP_STEPS, Steps, check

from atoll.core import config as configuration
from atoll.data.dataset import Shards
from atoll.train.job import train_job
from atoll.train.loop import Requeue
from atoll.train.spec import resolve_job
from sized import NETWORK, SIZES, write_sized

pytestmark = pytest.mark.slow
STEPS = 32


class ManySteps(Steps):
    """Steps of a longer job."""

    def on_step(self, images: int) -> bool:
        super().on_step(images)
        return len(self.seen) == STEPS


@pytest.mark.parametrize(
    ("kind", "positions", "align"),
    [
        ("expert", "sincos", False),
        ("expert", "rope", False),
        ("router", "sincos", False),
        ("router", "rope", False),
        ("expert", "sincos", True),
    ],
)
def test_steps_copy_the_positions_of_a_size_once(tmp_path: Path, kind: str, positions: str, align: bool) -> None:
    network = {**NETWORK, "positions": positions}
    changes = {
        "networks": {"default": network}, "router": {"network": network, "total_images": 8 * STEPS + 8},
        "train": {"total_images": 8 * STEPS + 8, "batch_size": 8, "log_every": 10**6, "save_every": 10**6,
                  "sample_every": 0, "compile": False, "align": {"until": 1} if align else None},
        "features": {"patch_dimensions": 6},
    }  # fmt: skip
    run = write_sized(tmp_path / "run", patches=6, **changes)
    spec = resolve_job(run, configuration.load(run), kind, expert=0 if kind == "expert" else None)
    steps = ManySteps()
    with pytest.raises(Requeue):
        train_job(spec, steps)
    shards = Shards.open(run, list(spec.clusters))
    order = shards.order(np.arange(8 * STEPS, dtype=np.uint64), spec.settings.seed, 8)
    sizes = [next(iter(shards.by_size(order[8 * step : 8 * step + 8]))) for step in range(STEPS)]
    assert set(sizes) == set(SIZES)
    # The first step of a size copies its positions, and the inputs of a step are copied one step ahead.
    seen_before = [step for step in range(WARM_UP_STEPS, STEPS) if sizes[step] in sizes[:step]]
    assert len(seen_before) > 20
    check([steps.seen[step] for step in seen_before])
