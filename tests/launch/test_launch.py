"""The guarantees of all launchers, on real ones: killed and preempted jobs finish with the same results."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import slurm
from launch.engines import ENGINES, Command, Local, Watch, attempts, ranks, trainers, wait_until
from train.conftest import merge
from train.workers import TINY, assert_same_weights, finish, metrics
from waiting import HOUR

Run = Callable[..., Path]
LONGER = {"train": {"total_images": 960, "save_every": 64, "keep_last": 99, "log_every": 64}}


@pytest.fixture(scope="module", params=["local", "command", "slurm", pytest.param("ray", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Iterator[Local]:
    if request.param == "slurm" and (reason := slurm.missing_requirement()):
        pytest.skip(reason)
    if request.param == "ray":
        pytest.importorskip("ray", reason="RAY IS NOT TESTED: pip install 'atoll[ray]'")
    engine = ENGINES[request.param]()
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def copy_run(prepared: Path, run: Path, **changes: Any) -> Path:
    values = merge(merge(merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY), LONGER), changes)
    shutil.copytree(prepared / "data" / "shards", run / "data" / "shards")
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return run


@pytest.fixture
def new_run(prepared: Path, tmp_path: Path) -> Run:
    """Make copies of the prepared run, with jobs long enough to be interrupted."""
    return lambda name="run", **changes: copy_run(prepared, tmp_path / name, **changes)


@pytest.fixture(scope="module")
def plain(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all experts trained one after another with `atoll train`."""
    run = copy_run(prepared, tmp_path_factory.mktemp("plain") / "run")
    for expert in range(3):
        assert finish(run, "--expert", str(expert)) == 0
    return run


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=HOUR)
    return process.returncode, out, err


def kill(run: Path, step: str) -> None:
    """Kill all processes of a step, its supervisor included."""
    for process in trainers(run, step) + attempts(run, step):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def log_of(run: Path, step: str) -> str:
    return (run / "launch" / "logs" / f"{step}.log").read_text()


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def test_killed_and_preempted_experts_finish_with_equal_weights(engine: Local, new_run: Run, plain: Path) -> None:
    run = new_run()
    with Watch(run) as watch:
        launch = engine.launch(run, "--jobs", "experts")
        # Each expert is interrupted at its own first checkpoint: either of the two may be far ahead of the other.
        with ExitStack() as preempted:
            interruptions = {
                "experts/000": lambda: kill(run, "experts/000"),
                "experts/001": lambda: preempted.enter_context(engine.preempted(run, "experts/001")),
            }
            while interruptions:
                wait_until(lambda: any(map(watch.checkpoints, interruptions)), launch, "a checkpoint")
                for step in filter(watch.checkpoints, list(interruptions)):
                    interruptions.pop(step)()
            again = engine.launch(run, "--jobs", "experts", "--json")
        code, _, err = ended(launch)
        assert code == 0, err
        code, out, err = ended(again)
        assert code == 0, err

    for expert in range(3):
        step = f"experts/{expert:03d}"
        assert_same_weights(plain / step / "final", run / step / "final")
        assert len(watch.versions[f"{step}/final"]) == 1, "exactly one manifest"
        twice = {name for name, times in watch.versions.items() if name.startswith(step) and len(times) > 1}
        assert not twice, f"written again, so not resumed from the last checkpoint: {twice}"
        losses = [{line["images"]: line["loss"] for line in metrics(folder, step)} for folder in (plain, run)]
        # A job that receives a stop signal writes an additional line of metrics. Expert 1 was preempted.
        assert losses[0] == losses[1] or expert == 1
        starts = re.findall(r"attempt at \S+?(?:, from ([\d,]+) images)?\n", log_of(run, step))
        assert len(starts) == (1 if expert == 2 else 2), log_of(run, step)
        if expert < 2:
            assert int(starts[1].replace(",", "")) >= 64, "it must resume from its last checkpoint"
    assert json.loads(out)["submitted"] == [], "a queued or running job must not be submitted again"

    before = snapshot(run / "experts")
    code, out, err = ended(engine.launch(run, "--jobs", "experts", "--json"))
    assert code == 0, err
    assert json.loads(out) == {"submitted": [], "running": {}, "blocked": {}}
    assert snapshot(run / "experts") == before


def test_a_job_that_cannot_succeed_blocks_only_its_dependents(engine: Local, new_run: Run) -> None:
    """A shard of expert 1 is missing, so it fails. The other experts finish, and the student does not start."""
    run = new_run(train={"total_images": 16})
    next((run / "data/shards/cluster_001").glob("*.safetensors")).unlink()
    code, _, err = ended(engine.launch(run, "--jobs", "experts", "student"))
    assert code == 2
    assert "not finished: experts/001, student" in err
    finals = sorted(path.parent.parent.name for path in run.glob("experts/*/final/manifest.json"))
    assert finals == ["000", "002"]
    assert "is missing although the manifest lists it" in log_of(run, "experts/001")
    assert log_of(run, "experts/001").count("attempt at") == 1, "invalid input must not be repeated"
    assert not (run / "launch/logs/student.log").exists()


def test_several_processes_of_an_island_train_one_expert(engine: Local, new_run: Run, plain: Path) -> None:
    """Local and command: two processes on one node. Slurm and Ray: one process on each of two nodes."""
    run = new_run(train={"total_images": 160})
    straight = new_run("straight", train={"total_images": 160})
    assert finish(straight, "--expert", "0") == 0
    shape = ("--island.processes", "2") if type(engine) in (Local, Command) else ("--island.nodes", "2")
    launch = engine.launch(run, "--jobs", "experts", "--experts", "0", *shape)
    wait_until(lambda: ranks(run) == {"0 of 2", "1 of 2"}, launch, "two processes that train")
    code, _, err = ended(launch)
    assert code == 0, f"{err}\n{log_of(run, 'experts/000')}"
    losses = [[line["loss"] for line in metrics(folder, "experts/000")] for folder in (straight, run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
