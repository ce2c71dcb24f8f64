"""A full disk is an error of one line, with file, need and free space, on a real file system that is full."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from atoll import cli
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import CHECKPOINT
from atoll.nets.io import write_weights
from atoll.train import resolve_job, train_job
from disks import small_disk
from shapes import write_run
from train.conftest import Copy


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 16 << 20) as folder:
        yield folder


def fill(folder: Path, left: int = 0) -> None:
    """Fill the disk up to some bytes."""
    with (folder / "filler").open("ab") as stream:
        stream.write(bytes(max(0, shutil.disk_usage(folder).free - left)))


@pytest.mark.parametrize(
    "write",
    [
        lambda run: Artifact(run, "x").write("file", bytes(2_000_000)),
        lambda run: Artifact(run, "x").write_parts("file", [bytes(1_000_000)] * 2),
        lambda run: Artifact(run, "x").write_tensors("file", {"a": torch.zeros(500_000)}),
        lambda run: write_weights({"a": torch.zeros(500_000)}, run / "x/file"),
    ],
    ids=["bytes", "parts", "tensors", "weights"],
)
def test_the_error_names_file_need_and_free_space(disk: Path, write: Callable[[Path], object]) -> None:
    fill(disk, left=1_000_000)
    with pytest.raises(
        AtollError, match=r"disk/x/file: the disk is full: the file needs 2.0 MB, and (1.0|0.9) MB is free"
    ):
        write(disk)
    assert [path.name for path in (disk / "x").iterdir()] == [], "a full disk needs the space of the half-written file"


def test_a_plan_that_does_not_fit(disk: Path) -> None:
    (disk / "x").mkdir()
    fill(disk)
    with pytest.raises(AtollError, match=r"plan\.json: the disk is full"):
        Artifact(disk, "x").begin(CHECKPOINT, {"long": "x" * 10_000})


def one_line(error: str) -> str:
    """Return the message of an error, which must be the last thing that was printed, without a traceback."""
    assert "Traceback" not in error
    line = error.strip().splitlines()[-1]
    assert line.startswith("atoll: ")
    return line


def test_prepare(disk: Path, shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(disk / "run", shapes)
    fill(disk, left=200_000)
    assert cli.main(["prepare", str(disk / "run")]) == 2
    assert "the disk is full" in one_line(capsys.readouterr().err)
    (disk / "filler").unlink()
    assert cli.main(["prepare", str(disk / "run")]) == 0, "the same command again finishes the work"


def test_training_checks_the_space_before_it_starts(
    disk: Path, new_run: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(new_run(), disk / "run")
    fill(disk, left=500_000)
    assert cli.main(["train", str(disk / "run"), "--expert", "0"]) == 2
    line = one_line(capsys.readouterr().err)
    assert "experts/000/checkpoints: training needs" in line
    assert "for 3 checkpoints and the result, and 0." in line
    assert not (disk / "run/experts/000/metrics.jsonl").exists()
    assert cli.main(["train", str(disk / "run"), "--expert", "0", "--train.save_every", "160", "--dry-run"]) == 0


def test_a_disk_that_fills_while_training(disk: Path, new_run: Copy) -> None:
    """The thread that writes checkpoints fails; the error names its file."""
    shutil.copytree(new_run(), disk / "run")

    class Filled:
        def on_step(self, images: int) -> bool:
            if images == 24:
                fill(disk, left=100_000)
            return False

        def on_checkpoint(self, checkpoint: Artifact) -> None:
            pass

    spec = resolve_job(disk / "run", config.load(disk / "run"), "expert", expert=0)
    with pytest.raises(AtollError, match=r"checkpoints/0+32/state-00000.safetensors: the disk is full: the file needs"):
        train_job(spec, Filled())
    (disk / "filler").unlink()
    assert train_job(spec).content["compute"]["images"] == 160


def test_other_files(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(disk)
    assert cli.main(["init", str(disk / "run")]) == 2
    assert "the disk is full" in one_line(capsys.readouterr().err)
