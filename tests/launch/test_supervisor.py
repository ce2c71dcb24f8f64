"""One attempt at a step: its lease, its exit codes, how often it is made again, and what it leaves behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.islands.leases import Lease, Seen, look
from atoll.islands.store import Store
from atoll.launch.base import AGAIN
from atoll.launch.supervisor import holder, is_over, saved_images
from launch.engines import trainers
from launch.slurm import wait_for

STEP = "experts/000"


def start(run: Path, code: str, ticket: str = "test-1", retries: int = 2, lease: float = 60) -> subprocess.Popen[str]:
    """An attempt whose command is a few lines of Python."""
    command = [sys.executable, "-m", "atoll.launch.supervisor", "--run", str(run), "--step", STEP]
    command += ["--retries", str(retries), "--lease", str(lease), "--", sys.executable, "-c", code]
    environment = {**os.environ, "ATOLL_TICKET": ticket}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def attempt(run: Path, code: str, **how: object) -> int:
    process = start(run, code, **how)
    process.communicate(timeout=60)
    return process.returncode


def state(run: Path) -> str:
    seen = look(Store.open(run), STEP)
    return seen.record.state if seen else "none"


def checkpoint(run: Path, samples: int) -> None:
    folder = run / STEP / "checkpoints" / f"{samples:012d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(("code", "answer", "ends"), [(0, 0, "done"), (75, 75, "released"), (2, 2, "failed")])
def test_exit_codes_and_the_lease_after_them(tmp_path: Path, code: int, answer: int, ends: str) -> None:
    assert attempt(tmp_path, f"raise SystemExit({code})") == answer
    assert state(tmp_path) == ends


def test_a_crash_is_tried_again_until_it_happens_too_often_in_a_row(tmp_path: Path) -> None:
    assert [attempt(tmp_path, "raise SystemExit(9)") for _ in range(3)] == [AGAIN, AGAIN, 9]
    assert state(tmp_path) == "failed"
    assert "experts/000.log" in look(Store.open(tmp_path), STEP).record.why
    assert attempt(tmp_path, "raise SystemExit(9)", ticket="test-2") == AGAIN, "a new launch counts anew"


def test_a_job_that_gets_further_is_always_tried_again(tmp_path: Path) -> None:
    for samples in range(100, 600, 100):
        checkpoint(tmp_path, samples)
        assert attempt(tmp_path, "raise SystemExit(9)", retries=1) == AGAIN
    assert saved_images(tmp_path, STEP) == 500
    assert attempt(tmp_path, "raise SystemExit(9)", retries=1) == 9


def test_attempts_killed_without_a_word_count_too(tmp_path: Path) -> None:
    log = tmp_path / "launch/logs/experts/000.log"
    for number in (1, 2):
        process = start(tmp_path, "import time; time.sleep(60)", retries=1)
        wait_for(lambda number=number: log.exists() and log.read_text().count("attempt at") == number, "it runs")
        process.kill()
        process.wait()
    assert attempt(tmp_path, "pass", retries=1) == 1
    assert "died 2 times without getting further" in log.read_text()
    wait_for(lambda: not trainers(tmp_path, STEP), "they are gone")


def test_whoever_has_the_lease_ends_what_a_dead_attempt_left_running(tmp_path: Path) -> None:
    """As a killed torchrun does: its workers are in sessions of their own and go on."""
    orphans = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    orphans += "start_new_session=True); time.sleep(60)"
    first = start(tmp_path, orphans)
    wait_for(lambda: len(trainers(tmp_path, STEP)) == 2, "two processes")
    first.kill()
    first.wait()
    wait_for(lambda: len(trainers(tmp_path, STEP)) == 1, "the command ends with its attempt, its child does not")
    assert attempt(tmp_path, "pass") == 0
    wait_for(lambda: not trainers(tmp_path, STEP), "they are gone")


def test_two_attempts_at_one_step_take_turns(tmp_path: Path) -> None:
    note = f"import time; f = open({str(tmp_path / 'notes')!r}, 'a'); f.write('in\\n'); f.flush(); time.sleep(1.5); "
    note += "f.write('out\\n')"
    first = start(tmp_path, note)
    wait_for(lambda: trainers(tmp_path, STEP), "the first runs")
    second = start(tmp_path, note, ticket="test-2")
    assert first.wait(60) == second.wait(60) == 0
    assert (tmp_path / "notes").read_text().split() == ["in", "out", "in", "out"]


def test_an_attempt_whose_lease_is_taken_stops_and_leaves_the_rest_to_the_new_holder(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(60)", lease=6)
    wait_for(lambda: trainers(tmp_path, STEP), "it runs")
    store = Store.open(tmp_path)
    # Its next renewal, a third of the lease's length away, finds the next key taken.
    wait_for(lambda: Lease.take(store, STEP, 60, holder="another", state=("held",)), "the lease is taken")
    assert process.wait(50) == AGAIN, "long before the command would have ended"
    assert not trainers(tmp_path, STEP)
    assert look(store, STEP).record.holder == "another"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_the_job_and_asks_for_another_attempt(tmp_path: Path, number: signal.Signals) -> None:
    saves = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('ready', flush=True)"
    )
    process = start(tmp_path, f"{saves}; time.sleep(60)")
    log = tmp_path / "launch/logs/experts/000.log"
    wait_for(lambda: log.exists() and "ready" in log.read_text(), "it runs")
    process.send_signal(number)
    assert process.wait(30) == AGAIN
    assert state(tmp_path) == "released"


def test_a_job_that_is_told_to_stop_while_it_starts_is_not_counted_as_dead(tmp_path: Path) -> None:
    for _ in range(3):
        process = start(tmp_path, "import time; time.sleep(60)", retries=0)
        wait_for(lambda: trainers(tmp_path, STEP), "it runs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == AGAIN
    assert attempt(tmp_path, "pass", retries=0) == 0


def test_the_holder_of_a_lease_is_told_apart_by_machine_and_process(tmp_path: Path) -> None:
    words = holder("ticket").split(" ")
    assert words[0].endswith(f":{os.getpid()}")
    assert len(words) == 3


def test_an_attempt_of_our_ticket_elsewhere_is_dead_once_it_is_silent_too(tmp_path: Path) -> None:
    lease = Lease.take(Store.open(tmp_path), STEP, 60, holder="elsewhere:1 ticket 12345678")
    assert lease is not None
    cut_off, silent = Seen(lease.record, age=29), Seen(lease.record, age=31)
    assert [is_over(seen, "ticket") for seen in (cut_off, silent)] == [False, True]
    assert not is_over(silent, "another ticket")
    here = lease.record.model_copy(update={"holder": holder("ticket")})
    assert not is_over(Seen(here, age=31), "ticket"), "it is this very process"
