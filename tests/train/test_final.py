"""The end of a job on two processes: both validate, one writes, and no wait times out early or lasts forever."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.distributed import STEP_TIMEOUT, WAIT_TIMEOUT, group_options
from atoll.core.manifests import EXPERT
from atoll.train import TrainSpec, build_task, resolve_job, train_job
from atoll.train import job as jobs
from train.conftest import Copy
from train.ranks import die, full_disk, log, no_hook, record_batches, run_ranks, slow_hashing
from train.workers import assert_same_weights

Trained = Callable[..., Path]


class Stopped(Exception):  # noqa: N818 - not an error
    """Raised after training and saving, before the commit."""


@pytest.fixture
def trained(new_run: Copy, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Return a function that makes runs with a job that was trained to its end and saved, but not committed."""

    def make(job: Callable[[Path], TrainSpec], **changes: Any) -> Path:
        run = new_run(**changes)
        with monkeypatch.context() as patch:
            patch.setattr(jobs, "commit", _stop)
            with pytest.raises(Stopped):
                train_job(job(run))
        return run

    return make


def _stop(*arguments: object, **options: object) -> None:
    raise Stopped


def expert(run: Path) -> TrainSpec:
    return resolve_job(run, config.load(run), "expert", expert=0)


def router(run: Path) -> TrainSpec:
    return resolve_job(run, config.load(run), "router")


def declared(run: Path, job: str) -> dict[str, Any]:
    manifest = Artifact(run, f"{job}/final").manifest()
    assert manifest is not None, "the result was never committed"
    return dict(manifest.content)


@pytest.mark.parametrize("phase", ["save", "resume", "end"])
def test_the_result_is_committed_even_if_the_main_process_is_slow(phase: str, trained: Trained, new_run: Copy) -> None:
    """Hashing a checkpoint or the result, or verifying a checkpoint, takes longer than the training group's timeout."""
    settings = {"total_images": 16, "log_every": 8}
    run = new_run(train=settings) if phase == "save" else trained(expert, train=settings)
    hook = partial(slow_hashing, phase=phase)
    assert run_ranks(run, "--expert", "0", hook=hook, together=True) == [0, 0], log(run, 1).read_text()[-3000:]
    assert declared(run, "experts/000")["validation_loss"] > 0
    assert not (run / "experts/000/checkpoints").exists()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_all_processes_share_the_final_validation(parallel: str, trained: Trained) -> None:
    """For a DDPM expert, whose bridge is calibrated first: two processes get the metrics of one process."""
    one = trained(expert, train={"total_images": 16, "log_every": 8, "parallel": parallel}, experts={"default": "ddpm"})
    two = one.with_name("two")
    shutil.copytree(one, two)
    train_job(expert(one))
    assert run_ranks(two, "--expert", "0", hook=record_batches) == [0, 0], log(two, 0).read_text()[-3000:]

    seen = [
        [tuple(map(int, line.split())) for line in (two / f"rows-{r}.txt").read_text().splitlines()] for r in (0, 1)
    ]
    assert not set(seen[0]) & set(seen[1])
    counts = [sum(rows for _, rows in part) for part in seen]
    validation = len(build_task(resolve_job(one, config.load(one), "expert", expert=0)).validation)
    assert counts == [10 * validation] * 2, "twice (calibration, validation) half of ten rows of an image, of one EMA"

    assert_same_weights(one / "experts/000/final", two / "experts/000/final")
    alone, shared = declared(one, "experts/000"), declared(two, "experts/000")
    assert shared["bridge"]["prediction_error"] == pytest.approx(alone["bridge"]["prediction_error"], rel=1e-4)
    assert alone["bridge"]["prediction_error"] > 0
    assert shared["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-6)
    assert shared["loss_by_time"] == pytest.approx(alone["loss_by_time"], rel=1e-6)


def test_two_processes_calibrate_the_router_like_one_process(trained: Trained) -> None:
    one = trained(router, train={"total_images": 16, "log_every": 8})
    two = one.with_name("two")
    shutil.copytree(one, two)
    train_job(router(one))
    assert run_ranks(two, "--router", hook=record_batches) == [0, 0], log(two, 0).read_text()[-3000:]
    rows = [(two / f"rows-{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1]) == 15, "three clusters in ten time bins, for one EMA"
    alone, shared = declared(one, "router"), declared(two, "router")
    assert shared["temperature"] == pytest.approx(alone["temperature"], rel=1e-4)
    for metric in ("validation_loss", "validation_accuracy", "loss_by_time", "accuracy_by_time"):
        assert shared[metric] == pytest.approx(alone[metric], rel=1e-6), metric


def test_if_the_main_process_cannot_write_the_others_fail_with_its_error(trained: Trained) -> None:
    run = trained(expert, train={"total_images": 16, "log_every": 8})
    codes = run_ranks(run, "--expert", "0", hook=full_disk)
    assert None not in codes, "a process hangs"
    assert 0 not in codes
    assert "the main process failed: OSError: no space left on device" in log(run, 1).read_text()
    assert run_ranks(run, "--expert", "0", hook=no_hook) == [0, 0], "the checkpoint is enough to try again"


@pytest.mark.parametrize("who", [0, 1])
def test_if_a_process_dies_at_the_end_the_other_one_ends_too(who: int, trained: Trained) -> None:
    run = trained(expert, train={"total_images": 16, "log_every": 8})
    codes = run_ranks(run, "--expert", "0", hook=partial(die, who=who))
    assert codes[who] == 9
    assert codes[1 - who] not in (0, None)


def test_an_existing_result_is_not_changed_by_any_process(trained: Trained) -> None:
    run = trained(expert, train={"total_images": 16, "log_every": 8})
    made = train_job(expert(run))
    assert run_ranks(run, "--expert", "0", hook=full_disk) == [0, 0]
    assert Artifact(run, "experts/000/final").open(EXPERT).digest == made.digest


def test_the_result_of_a_faster_job_is_kept(new_run: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    """Another job commits while this one trains its last step; `seconds` makes its manifest differ."""
    faster, slower = new_run("faster"), new_run("slower")
    first = train_job(expert(faster))

    class Copied:
        def on_step(self, images: int) -> bool:
            if images == 160:
                shutil.copytree(faster / "experts/000/final", slower / "experts/000/final")
            return False

        def on_checkpoint(self, checkpoint: Artifact) -> None:
            pass

    assert train_job(expert(slower), Copied()).digest == first.digest
    assert "another job has finished it" in capsys.readouterr().out
    assert Artifact(slower, "experts/000/final").open(EXPERT, verify=True).digest == first.digest
    assert not (slower / "experts/000/checkpoints").exists()


def test_process_groups_have_explicit_timeouts_and_devices() -> None:
    gpu = torch.device("cuda", 3)
    assert group_options(gpu) == {"device_id": gpu, "timeout": STEP_TIMEOUT}
    assert group_options(torch.device("cpu")) == {"backend": "gloo", "timeout": STEP_TIMEOUT}
    assert WAIT_TIMEOUT > 4 * STEP_TIMEOUT
