"""A step with a loss or gradient that is not finite, on the CPU: never applied, never saved, and its images named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.train import build_task, resolve_job
from atoll.train.checkpoints import Checkpoints
from atoll.train.loop import train
from atoll.train.tasks import ExpertTask, Forward, Losses, TrainingInputs
from train.conftest import Copy

ALONE = DistContext(0, 1, torch.device("cpu"))
BATCH, BAD_STEP, BAD_ROW = 8, 5, 3


class Recorder:
    """A callback that records the steps and checkpoints of a job."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.checkpoints: list[int] = []

    def on_step(self, images: int) -> bool:
        self.steps.append(images)
        return False

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        self.checkpoints.append(int(checkpoint.folder.name))


class BadLoss(ExpertTask):
    """One image of one step has no finite loss."""

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        found = super().losses(forward, inputs)
        bad = (torch.arange(BATCH) == BAD_ROW) & (inputs.position == BATCH * (BAD_STEP - 1))
        return found._replace(loss=torch.where(bad, torch.nan, found.loss))


class BadGradient(ExpertTask):
    """The gradient of one step overflows, although its losses are finite."""

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        found = super().losses(forward, inputs)
        if inputs.position == BATCH * (BAD_STEP - 1):
            found.loss.register_hook(lambda gradient: gradient * torch.inf)
        return found


@pytest.mark.parametrize(("kind", "what"), [(BadLoss, "loss"), (BadGradient, "gradient")])
def test_a_bad_step_is_never_applied_and_never_saved(kind: type[ExpertTask], what: str, new_run: Copy) -> None:
    run = new_run(train={"save_every": BATCH, "batch_size": BATCH})
    spec = resolve_job(run, config.load(run), "expert", expert=0)
    plain, recorder = build_task(spec), Recorder()
    task = kind(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})
    folder = run / f"experts/000/checkpoints/{BATCH * (BAD_STEP - 1):012d}"
    with pytest.raises(
        AtollError, match=f"the {what} is not finite on images .*newest checkpoint is {folder}"
    ) as error:
        train(task, Checkpoints(run, spec.job, {}, ALONE), recorder)
    assert recorder.steps == recorder.checkpoints == [BATCH * step for step in range(1, BAD_STEP)]
    positions = torch.arange(BATCH * (BAD_STEP - 1), BATCH * BAD_STEP).numpy().astype("uint64")
    images = task.shards.ids(task.shards.order(positions, task.seed).tolist())
    named = str(error.value).partition("images ")[2].partition(". ")[0].split(", ")
    assert named == (images if what == "gradient" else [images[BAD_ROW]])
    stored = load_file(next(Path(folder).glob("*.safetensors")))
    for name, parameter in task.network.named_parameters():
        assert torch.equal(parameter, stored[f"network.{name}"]), "the weights are those of the last good step"
