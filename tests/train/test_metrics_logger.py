"""The metrics logger: metrics.jsonl, trackers and grids of images."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.metrics_file import MetricsLine, progress_of
from atoll.ensemble.saving import COLORS
from atoll.train import metrics_logger
from atoll.train.job import train_job
from atoll.train.metrics_logger import truncate_metrics
from atoll.train.previews import grid
from atoll.train.spec import resolve_job
from train.conftest import Copy
from train.workers import finish, metrics


def test_tensorboard_gets_the_metrics(new_run: Copy) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = new_run(train={"trackers": ["tensorboard"], "total_images": 64})
    assert finish(run, "--expert", "0") == 0, (run / "log.txt").read_text()
    events = EventAccumulator(str(run / "experts/000/tensorboard"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss")]
    assert logged == [(line["images"], pytest.approx(line["loss"])) for line in metrics(run, "experts/000")]
    assert {"lr", "gradient_norm", "images_per_second"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize(("job", "name"), [("--expert 0", "samples"), ("--router", "routing")])
def test_tensorboard_gets_the_previews(new_run: Copy, job: str, name: str) -> None:
    """A grid of samples, or a plot of the router's probabilities for validation images."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    previews = {"sample_every": 32, "sample_count": 4, "sample_guidance_scale": 1}
    run = new_run(train={"trackers": ["tensorboard"], "total_images": 64, **previews})
    assert finish(run, *job.split()) == 0, (run / "log.txt").read_text()
    folder = run / ("router" if name == "routing" else "experts/000")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    logged = {event.step: event.encoded_image_string for event in events.Images(name)}
    assert sorted(logged) == [32, 64]
    for step, encoded in logged.items():
        shown, stored = Image.open(BytesIO(encoded)), Image.open(folder / f"grids/{step:012d}.png")
        assert np.array_equal(np.asarray(shown), np.asarray(stored))
    if name == "routing":
        # Four rows with the image and the colors of the three clusters, and nothing of others
        found = {tuple(color) for color in np.asarray(stored)[44:, 80:].reshape(-1, 3).tolist()}
        colors = {ImageColor.getrgb(color) for color in COLORS}
        assert len(found & colors) == 3


def test_a_tracker_that_is_not_installed_is_an_error(new_run: Copy) -> None:
    run = new_run(train={"trackers": ["wandb"], "total_images": 8})
    assert finish(run, "--expert", "0") == 2
    assert "wandb is not installed; pip install wandb" in (run / "log.txt").read_text()


def test_metrics_have_images_steps_losses_and_rates(new_run: Copy) -> None:
    run = new_run()
    assert finish(run, "--expert", "0") == 0
    lines = metrics(run, "experts/000")
    assert [line["images"] for line in lines] == [32, 64, 96, 128, 160]
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20]
    for line in lines:
        assert line["images_per_second"] > 0
        assert len(line["loss_by_time"]) == 10
        present = [value for value in line["loss_by_time"] if value is not None]
        assert min(present) <= line["loss"] <= max(present)
    assert lines[0]["lr"] == pytest.approx(1e-3)


def test_a_job_shows_its_loss_between_two_lines_of_metrics(new_run: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_logger, "_PROGRESS_SECONDS", -1.0)  # after every step
    run = new_run(train={"total_images": 64, "log_every": 64})
    found: list[MetricsLine | None] = []

    class Reader:
        def on_step(self, images: int) -> bool:
            found.append(progress_of(run / "experts/000"))
            if images == 32:
                (line,) = (line for line in status(Store.open(run)) if line.job == "experts/000")
                assert found[-1] is not None
                assert (line.state, line.images, line.loss, line.lr) == ("running", 32, found[-1].loss, found[-1].lr)
            return False

        def on_checkpoint(self, checkpoint: Artifact) -> None: ...

    train_job(resolve_job(run, config.load(run), "expert", expert=0), Reader())
    assert [line and line.images for line in found] == list(range(8, 72, 8))
    (logged,) = metrics(run, "experts/000")
    last = found[-1]
    assert last is not None
    # Before the number of steps over which it is averaged, the shown loss is the mean of all.
    assert last.loss == pytest.approx(logged["loss"], rel=1e-5)
    assert (last.lr, last.total, last.text) == (logged["lr"], 64, f"loss {logged['loss']:.4g} lr {logged['lr']:.1e}")
    assert not (run / "experts/000/progress.json").exists(), "the last line of the metrics has replaced it"


def test_metrics_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"images": n}) + "\n" for n in (10, 20, 30)) + '{"imag')
    truncate_metrics(file, 20)
    assert file.read_text() == '{"images": 10}\n{"images": 20}\n'


def test_a_grid_contains_every_image_in_order() -> None:
    images = np.stack([np.full((4, 4, 3), value, dtype=np.uint8) for value in (10, 20, 30, 40, 50)])
    sheet = np.asarray(grid(images))
    assert sheet.shape == (8, 12, 3)
    assert sheet[0, ::4, 0].tolist() == [10, 20, 30]
    assert sheet[4, ::4, 0].tolist() == [40, 50, 255]
