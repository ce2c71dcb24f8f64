"""Budgets of a training step on an accelerator: how often the host waits, and what it copies."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import nullgpu
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.train.job import train_job
from atoll.train.loop import Requeue
from atoll.train.spec import resolve_job

pytestmark = pytest.mark.slow
WARM_UP_STEPS, STEPS = 3, 8
"""The first steps allocate memory and state; the budgets are of the steps after them."""
OBJECTIVES = ("flow-matching", "flow-matching-logit-normal", "ddpm", "ddpm-linear", "ddpm-min-snr", "x0", "ve-x0")


@dataclass
class Steps:
    """Counts each step of a job, from the end of one to the end of the next."""

    seen: list[nullgpu.Seen] = field(default_factory=list)
    checkpoints: int = 0

    def __post_init__(self) -> None:
        self._watch = nullgpu.watch()
        self._current = self._watch.__enter__()

    def on_step(self, images: int) -> bool:
        del images
        self._watch.__exit__(None, None, None)
        self.seen.append(self._current)
        self._watch = nullgpu.watch()
        self._current = self._watch.__enter__()
        # The job stops before it is validated: on the null GPU all metrics are nonsense.
        return len(self.seen) == STEPS

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        del checkpoint
        self.checkpoints += 1


def train_steps(run: Path, tmp_path: Path, kind: str, **overrides: str) -> list[nullgpu.Seen]:
    """Train some steps and return what each did; lines of metrics and checkpoints come after them."""
    folder = tmp_path / "run"
    if not folder.exists():
        shutil.copytree(run, folder)
    settings = {"train.log_every": "1000000", "train.save_every": "1000000", **overrides}
    config = configuration.load(folder, {key.replace("__", "."): value for key, value in settings.items()})
    steps = Steps()
    with pytest.raises(Requeue):
        train_job(resolve_job(folder, config, kind, expert=0 if kind == "expert" else None), steps)
    assert steps.checkpoints <= 1, "only the one that it stops with, on the main process"
    return steps.seen[WARM_UP_STEPS:]


def check(steps: list[nullgpu.Seen]) -> None:
    assert steps
    for step in steps:
        assert sum(step.synchronizations.values()) <= 1, step.synchronizations
        assert step.pageable_copies == {}
        copies = step.counts["h2d_pinned"]
        assert copies
        assert step.counts["side_copy"] >= copies, "inputs are copied on a side stream"
        assert step.counts["launch"] > 50, "the step ran on the device"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_of_an_expert_waits_once_and_copies_ahead(run: Path, tmp_path: Path, objective: str) -> None:
    check(train_steps(run, tmp_path, "expert", experts__default=objective))


@pytest.mark.parametrize(
    "overrides",
    [
        {"train__grad_accum_steps": "4"},
        {"train__precision": "bfloat16"},
        {"train__activation_checkpointing": "true"},
        {"train__conditioning": "none"},
        {"train__ema": "{short: 100, long: 1000}"},
    ],
)
def test_a_step_with_other_settings_waits_once(run: Path, tmp_path: Path, overrides: dict[str, str]) -> None:
    check(train_steps(run, tmp_path, "expert", **overrides))


@pytest.mark.parametrize("kind", ["router", "monolith"])
def test_a_step_of_router_and_monolith_waits_once(run: Path, tmp_path: Path, kind: str) -> None:
    check(train_steps(run, tmp_path, kind))
