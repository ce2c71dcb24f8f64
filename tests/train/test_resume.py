"""Exact resume: an interrupted job has the same final weights, bit for bit, on one machine."""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from train.conftest import Copy
from train.workers import (
    assert_same_weights,
    finish,
    kill_after,
    kill_at,
    metrics,
    start,
    stop_at_the_first_line,
    stopped,
    weights,
)
from waiting import HOUR

TOLD = ("--student", "--student.steps", "2", "--student.cluster", "true", "--student.corrector", "0.25")
JOBS = {"expert": ("--expert", "1"), "router": ("--router",), "student": ("--student",), "few steps": TOLD}
FOLDERS = {"expert": "experts/001", "router": "router", "student": "student", "few steps": "student"}


def kill_until_done(run: Path, kills: int, arguments: tuple[str, ...], seconds: float, seed: int = 0) -> int:
    """Kill the job at random moments `kills` times, then let it finish; return the number of kills."""
    chance, killed = random.Random(seed), 0
    while killed < kills:
        # The first kills come early: a fast machine must not finish the job before there were five of them.
        code = kill_after(run, chance.uniform(0.05, 0.3 if killed < 5 else seconds), *arguments)
        if code == 0:
            return killed
        assert code == -signal.SIGKILL, (run / "log.txt").read_text()
        killed += 1
    assert finish(run, *arguments) == 0, (run / "log.txt").read_text()
    return killed


def copy_experts(run: Path, trained_experts: Path) -> None:
    """Copy the finished experts, a student's teachers, into a run."""
    shutil.copytree(trained_experts / "experts", run / "experts")


@pytest.mark.parametrize("kind", JOBS)
def test_a_killed_job_resumes_to_the_same_weights(kind: str, new_run: Copy, trained_experts: Path) -> None:
    """N + M images without interruption equal N, kill -9, M: weights, both EMAs and losses."""
    straight, broken = new_run("straight"), new_run("broken")
    for run in (straight, broken):
        if FOLDERS[kind] == "student":
            copy_experts(run, trained_experts)
    assert finish(straight, *JOBS[kind]) == 0
    kill_at(broken, 32, *JOBS[kind])
    assert finish(broken, *JOBS[kind]) == 0
    assert_same_weights(straight / FOLDERS[kind] / "final", broken / FOLDERS[kind] / "final")
    assert [line["loss"] for line in metrics(straight, FOLDERS[kind])] == [
        line["loss"] for line in metrics(broken, FOLDERS[kind])
    ]


def test_a_resumed_job_has_the_same_optimizer_state(new_run: Copy) -> None:
    """Checkpoints of a job that stopped half-way and resumed equal those of one that did not."""
    straight, broken = (new_run(name, train={"keep_last": 99}) for name in ("straight", "broken"))
    for run, stops in ((straight, [128]), (broken, [64, 128])):
        for stop in stops:
            kill_at(run, stop, "--expert", "0")
    ends = [run / f"experts/000/checkpoints/{128:012d}" for run in (straight, broken)]
    assert_same_weights(*ends)
    assert {key.split(":")[1].split(".")[0] for key in weights(ends[0])} == {"network", "optimizer", "ema"}


def sweep(new_run: Copy, kills: int) -> None:
    straight, broken = new_run("straight", train={"total_images": 480}), new_run("broken", train={"total_images": 480})
    assert finish(straight, "--expert", "1") == 0
    assert kill_until_done(broken, kills, ("--expert", "1"), 1.5) >= min(kills, 5)
    assert_same_weights(straight / "experts/001/final", broken / "experts/001/final")


def test_twenty_kills_in_one_job(new_run: Copy) -> None:
    sweep(new_run, 20)


@pytest.mark.slow
def test_a_hundred_kills_in_one_job(new_run: Copy) -> None:
    sweep(new_run, 100)


def stop_in_a_terminal() -> None:
    """As stop_at_the_first_line, with the usual handler of Ctrl-C: in the background of a shell it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop_at_the_first_line()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_exits_with_the_requeue_code(number: int, new_run: Copy) -> None:
    straight, interrupted = (
        new_run("straight", train={"save_every": 10_000}),
        new_run("interrupted", train={"save_every": 10_000}),
    )
    assert finish(straight, "--expert", "0") == 0
    process = start(interrupted, "--expert", "0", "--train.log_every", "8", prepare=stop_in_a_terminal)
    with stopped(process):
        os.kill(process.pid, number)
    process.join(HOUR)
    assert process.exitcode == 75
    assert len(list((interrupted / "experts/000/checkpoints").glob("*/manifest.json"))) == 1
    assert "run the command again to resume" in (interrupted / "log.txt").read_text()
    assert finish(interrupted, "--expert", "0", "--train.log_every", "8") == 0
    assert_same_weights(straight / "experts/000/final", interrupted / "experts/000/final")


def test_leftovers_of_a_kill_while_saving_are_removed_by_the_next_checkpoint(new_run: Copy) -> None:
    run = new_run(train={"save_every": 64, "keep_last": 1})
    left = run / f"experts/000/checkpoints/{7:012d}"
    left.mkdir(parents=True)
    kill_at(run, 64, "--expert", "0")
    assert not left.exists()


DAMAGES = {
    "flipped bit": lambda file: file.write_bytes(
        file.read_bytes()[:-100] + bytes([file.read_bytes()[-100] ^ 1]) + file.read_bytes()[-99:]
    ),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1000]),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(damage: str, new_run: Copy) -> None:
    straight, damaged = new_run("straight"), new_run("damaged")
    assert finish(straight, "--expert", "0") == 0
    kill_at(damaged, 64, "--expert", "0", "--train.keep_last", "2")
    folder = damaged / "experts/000/checkpoints"
    good, bad = sorted(path.parent for path in folder.glob("*/manifest.json"))
    DAMAGES[damage](next(bad.glob("*.safetensors")))
    (damaged / "log.txt").write_text("")
    assert finish(damaged, "--expert", "0") == 0
    log = (damaged / "log.txt").read_text()
    assert f"{bad} is damaged and was moved to {bad.name}.damaged" in log
    assert good.name != bad.name
    assert_same_weights(straight / "experts/000/final", damaged / "experts/000/final")


def test_training_a_finished_job_does_nothing(new_run: Copy) -> None:
    run = new_run()
    assert finish(run, "--expert", "0") == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "log.txt"}
    assert finish(run, "--expert", "0") == 0
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "log.txt"}
    assert before == after
    assert not (run / "experts/000/checkpoints").exists()


def test_resuming_with_other_settings_is_an_error_that_names_them(new_run: Copy) -> None:
    run = new_run()
    kill_at(run, 32, "--expert", "0")
    assert finish(run, "--expert", "0", "--train.lr", "0.5") == 2
    assert "train.lr was 0.001, now 0.5" in (run / "log.txt").read_text()
