"""A step with a loss that is not finite, on an accelerator: skipped on the device, found by the host one step later.

The null GPU computes nothing. So the values that the step check reads are written to device memory, its operations are
computed on the host, and the fused optimizer is replaced by one that adds 1 to the weights unless `found_inf` is 1.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import torch
from safetensors.torch import load_file
from test_training import resolve
from torch import Tensor

import nullgpu
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.train.job import train_job
from atoll.train.loop import StepCheck

pytestmark = pytest.mark.slow
BATCH, BAD_STEP, BAD_ROW = 8, 5, 3


@dataclass
class Recorder:
    """Injects one bad loss or gradient, and records what the optimizer and the callback get."""

    bad: str
    found_inf: list[float] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    """The first parameter on the device."""
    images: list[str] = field(default_factory=list)
    """The images of the bad step."""
    steps: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)

    def on_step(self, images: int) -> bool:
        self.steps.append(images)
        return False

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        self.checkpoints.append(int(checkpoint.folder.name))

    def begin(self, check: StepCheck, step: list[tuple[Tensor, Tensor]], norm: Tensor, mean: Tensor) -> Tensor:
        number = len(self.found_inf) + 1
        for loss, _ in step:
            loss.copy_(torch.ones(loss.shape))
        norm.copy_(torch.tensor(2.0))
        if number == BAD_STEP:
            values = torch.ones(BATCH)
            values[BAD_ROW] = torch.nan
            self.images = check._task.shards.ids(step[0][1].tolist())
            step[0][0].copy_(values) if self.bad == "loss" else norm.copy_(torch.tensor(torch.inf))
        with nullgpu.HostComputed():
            return begin(check, step, norm, mean)

    def update(self, parameters: list[Tensor], *_: Any, found_inf: Tensor, **__: Any) -> None:
        assert found_inf.is_cuda
        self.found_inf.append(found_inf.item())
        for parameter in parameters:
            parameter.copy_(parameter.cpu() + (1 - found_inf.cpu()))
        self.weights = parameters[0]


begin = StepCheck.begin


@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize(("save_every", "saved"), [(4, [4]), (5, []), (1, [1, 2, 3, 4])])
def test_a_bad_step_is_never_applied_and_never_saved(
    own_run: Path, monkeypatch: pytest.MonkeyPatch, *, bad: str, save_every: int, saved: list[int]
) -> None:
    """It is step 5. Checkpoints come one step before it, at the same step, or at every step."""
    recorder = Recorder(bad)
    monkeypatch.setattr(StepCheck, "begin", lambda check, *given: recorder.begin(check, *given))
    monkeypatch.setattr(torch, "_fused_adamw_", recorder.update)
    folders = [own_run / f"experts/000/checkpoints/{BATCH * number:012d}" for number in saved]
    newest = folders[-1] if folders else "none"
    with pytest.raises(AtollError, match=f"the {bad} is not finite .* the newest checkpoint is {newest}") as error:
        train_job(resolve(own_run, "expert", train__save_every=str(BATCH * save_every)), recorder)
    named = str(error.value).partition("images ")[2].partition(". ")[0].split(", ")
    assert named == (recorder.images if bad == "gradient" else [recorder.images[BAD_ROW]])
    assert recorder.found_inf == [0.0] * (BAD_STEP - 1) + [1.0], "no update follows the bad step"
    # The host reads the values of a step in the next one.
    assert recorder.steps == [BATCH * number for number in range(1, BAD_STEP + 1)]
    assert recorder.checkpoints == [BATCH * number for number in saved]
    if folders:
        (file,) = folders[-1].glob("*.safetensors")
        stored = next(value for key, value in load_file(file).items() if key.startswith("network."))
        assert torch.equal(recorder.weights.cpu(), stored), "the weights are those of the last good step"
