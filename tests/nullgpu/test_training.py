"""Budgets of a training step on an accelerator: how often the host waits, and what it copies."""

import os
import threading
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import torch
from torch import nn
from torch._dynamo.utils import counters

import nullgpu
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.distributed import DistContext
from atoll.core.host_memory import pinned_budget
from atoll.train.checkpoints import HostCopy
from atoll.train.job import build_task, train_job
from atoll.train.loop import Requeue
from atoll.train.spec import TrainSpec, resolve_job

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


def resolve(run: Path, kind: str, **overrides: str) -> TrainSpec:
    """Resolve a job without lines of metrics and checkpoints, except at its end."""
    settings = {"train.log_every": "1000000", "train.save_every": "1000000", **overrides}
    config = configuration.load(run, {key.replace("__", "."): value for key, value in settings.items()})
    return resolve_job(run, config, kind, expert=0 if kind == "expert" else None)


def train_steps(run: Path, kind: str, **overrides: str) -> list[nullgpu.Seen]:
    """Train some steps and return what each did."""
    steps = Steps()
    with pytest.raises(Requeue):
        train_job(resolve(run, kind, **overrides), steps)
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


def test_training_computes_in_bfloat16_by_default(own_run: Path) -> None:
    assert resolve(own_run, "expert").settings.precision == "bfloat16"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_of_an_expert_waits_once_and_copies_ahead(own_run: Path, objective: str) -> None:
    check(train_steps(own_run, "expert", experts__default=objective))


@pytest.mark.parametrize(
    "overrides",
    [
        {"train__grad_accum_steps": "4"},
        {"train__precision": "float32"},
        {"train__activation_checkpointing": "true"},
        {"train__conditioning": "none"},
        {"train__ema": "{short: 100, long: 1000}"},
        {"train__optimizer": "muon", "train__weight_decay": "0.1"},
        {"train__align": "{until: 1}"},
        {"train__align": "{until: 1}", "train__grad_accum_steps": "4", "train__activation_checkpointing": "true"},
    ],
)
def test_a_step_with_other_settings_waits_once(own_run: Path, overrides: dict[str, str]) -> None:
    check(train_steps(own_run, "expert", **overrides))


@pytest.mark.parametrize("kind", ["router", "monolith"])
def test_a_step_of_router_and_monolith_waits_once(own_run: Path, kind: str) -> None:
    check(train_steps(own_run, kind))


@pytest.mark.parametrize("align", ["null", "{until: 1}"])
def test_a_step_with_compiled_blocks_waits_once(own_run: Path, monkeypatch: pytest.MonkeyPatch, align: str) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()  # the graph of another test would be used again
    unique_graphs = counters["stats"]["unique_graphs"]
    check(train_steps(own_run, "expert", train__compile="true", train__align=align))
    assert counters["stats"]["unique_graphs"] == unique_graphs + 1, "one graph for both blocks"


class Pending(Steps):
    """Steps during which the thread cannot finish the first checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.last = threading.Event()

    def on_step(self, images: int) -> bool:
        if len(self.seen) == STEPS - 1:
            self.last.set()
        return super().on_step(images)


def test_steps_do_not_wait_while_a_checkpoint_is_written(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that saves queues one copy for each tensor of the state, to pinned memory, and waits for none."""
    steps, parts = Pending(), HostCopy.parts

    def at_the_end(self: HostCopy) -> list[bytes | memoryview]:
        assert steps.last.wait(3600)
        return parts(self)

    monkeypatch.setattr(HostCopy, "parts", at_the_end)
    saving = WARM_UP_STEPS + 1
    spec = resolve(own_run, "expert", train__save_every=str(8 * saving))
    with pytest.raises(Requeue):
        train_job(spec, steps)
    # From the end of the saving step to the end of the next one; the last steps may overlap with the writing thread.
    check(steps.seen[WARM_UP_STEPS : STEPS - 1])
    tensors = 4 * len(list(build_task(spec).network.parameters()))
    copies = [step.counts["d2h"] for step in steps.seen[WARM_UP_STEPS : STEPS - 1]]
    assert copies == [1, tensors + 1, 1, 1], "the values of the step check, and once the state"
    assert steps.checkpoints == 2


def test_a_copy_of_the_state_is_pinned_only_within_the_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    state, processes = torch.arange(64.0), DistContext(0, 1, torch.device("cuda", 0))
    for siblings, pinned in ((1, True), (pinned_budget(), False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(siblings))
        copy = HostCopy(processes)
        copy.take({"state": state.to(processes.device)})
        _, data = copy.parts()
        assert bytes(data) == state.numpy().tobytes()
        assert [chunk.is_pinned() for chunk in copy._chunks] == [pinned]
