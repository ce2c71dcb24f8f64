"""One attempt at a step: its lease, exit codes, retries and orphan processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.apps.launch.launcher import RETRY_CODE
from atoll.apps.launch.supervisor import holder, is_dead, saved_images
from atoll.apps.share.lease_records import LeaseStatus, get_lease
from atoll.apps.share.leases import Lease
from atoll.apps.share.store import Store
from launch.engines import trainers
from waiting import HOUR, wait_for

STEP = "experts/000"


def start(
    run: Path, code: str, submission: str = "test-1", retries: int = 2, lease: float = HOUR
) -> subprocess.Popen[str]:
    """Start an attempt whose command is a few lines of Python."""
    command = [sys.executable, "-m", "atoll.apps.launch.supervisor", "--run", str(run), "--step", STEP]
    command += ["--retries", str(retries), "--lease", str(lease), "--", sys.executable, "-c", code]
    environment = {**os.environ, "ATOLL_SUBMISSION": submission}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def attempt(run: Path, code: str, **options: object) -> int:
    process = start(run, code, **options)
    process.communicate(timeout=HOUR)
    return process.returncode


def state(run: Path) -> str:
    lease_status = get_lease(Store.open(run), STEP)
    return lease_status.record.state if lease_status else "none"


def checkpoint(run: Path, images: int) -> None:
    folder = run / STEP / "checkpoints" / f"{images:012d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("code", "expected_code", "expected_state"), [(0, 0, "done"), (75, 75, "released"), (2, 2, "failed")]
)
def test_exit_codes_and_the_lease_after_them(
    tmp_path: Path, code: int, expected_code: int, expected_state: str
) -> None:
    assert attempt(tmp_path, f"raise SystemExit({code})") == expected_code
    assert state(tmp_path) == expected_state


def test_a_crash_is_repeated_until_the_limit_of_retries(tmp_path: Path) -> None:
    assert [attempt(tmp_path, "raise SystemExit(9)") for _ in range(3)] == [RETRY_CODE, RETRY_CODE, 9]
    assert state(tmp_path) == "failed"
    assert "experts/000.log" in get_lease(Store.open(tmp_path), STEP).record.why
    assert attempt(tmp_path, "raise SystemExit(9)", submission="test-2") == RETRY_CODE, (
        "a new launch must count from zero"
    )


def test_a_job_that_makes_progress_is_always_repeated(tmp_path: Path) -> None:
    for images in range(100, 600, 100):
        checkpoint(tmp_path, images)
        assert attempt(tmp_path, "raise SystemExit(9)", retries=1) == RETRY_CODE
    assert saved_images(tmp_path, STEP) == 500
    assert attempt(tmp_path, "raise SystemExit(9)", retries=1) == 9


def test_killed_attempts_count_as_failures(tmp_path: Path) -> None:
    log = tmp_path / "launch/logs/experts/000.log"
    for number in (1, 2):
        process = start(tmp_path, "import time; time.sleep(3600)", retries=1)
        wait_for(lambda number=number: log.exists() and log.read_text().count("attempt at") == number, "it runs")
        process.kill()
        process.wait()
    assert attempt(tmp_path, "pass", retries=1) == 1
    assert "failed 2 times without progress" in log.read_text()
    wait_for(lambda: not trainers(tmp_path, STEP), "they are gone")


def test_the_holder_of_the_lease_kills_orphan_processes(tmp_path: Path) -> None:
    """A killed torchrun leaves orphans: its workers have their own sessions and continue."""
    orphans = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], "
    orphans += "start_new_session=True); time.sleep(3600)"
    first = start(tmp_path, orphans)
    wait_for(lambda: len(trainers(tmp_path, STEP)) == 2, "two processes")
    first.kill()
    first.wait()
    wait_for(lambda: len(trainers(tmp_path, STEP)) == 1, "the command ends with its attempt, its child does not")
    assert attempt(tmp_path, "pass") == 0
    wait_for(lambda: not trainers(tmp_path, STEP), "they are gone")


def test_two_attempts_at_one_step_run_one_after_another(tmp_path: Path) -> None:
    note = f"import time; f = open({str(tmp_path / 'notes')!r}, 'a'); f.write('in\\n'); f.flush(); time.sleep(1.5); "
    note += "f.write('out\\n')"
    first = start(tmp_path, note)
    wait_for(lambda: trainers(tmp_path, STEP), "the first runs")
    second = start(tmp_path, note, submission="test-2")
    assert first.wait(HOUR) == second.wait(HOUR) == 0
    assert (tmp_path / "notes").read_text().split() == ["in", "out", "in", "out"]


def test_an_attempt_that_loses_its_lease_stops(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(3600)", lease=15)
    wait_for(lambda: trainers(tmp_path, STEP), "it runs")
    store = Store.open(tmp_path)
    # Its next renewal comes after a third of the duration and finds the next key taken.
    wait_for(
        lambda: Lease.acquire(store, STEP, HOUR, holder="another", over=get_lease(store, STEP)), "the lease is taken"
    )
    assert process.wait(HOUR) == RETRY_CODE, "it must stop before the command ends, with 0"
    assert not trainers(tmp_path, STEP)
    assert get_lease(store, STEP).record.holder == "another"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_stops_the_job_and_requests_another_attempt(tmp_path: Path, number: signal.Signals) -> None:
    saves = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('ready', flush=True)"
    )
    process = start(tmp_path, f"{saves}; time.sleep(3600)")
    log = tmp_path / "launch/logs/experts/000.log"
    wait_for(lambda: log.exists() and "ready" in log.read_text(), "it runs")
    process.send_signal(number)
    assert process.wait(HOUR) == RETRY_CODE
    assert state(tmp_path) == "released"


def test_a_job_that_is_stopped_while_it_starts_is_not_counted_as_failed(tmp_path: Path) -> None:
    for _ in range(3):
        process = start(tmp_path, "import time; time.sleep(3600)", retries=0)
        wait_for(lambda: trainers(tmp_path, STEP), "it runs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(HOUR) == RETRY_CODE
    assert attempt(tmp_path, "pass", retries=0) == 0


def test_the_holder_of_a_lease_names_machine_and_process(tmp_path: Path) -> None:
    words = holder("submission").split(" ")
    assert words[0].endswith(f":{os.getpid()}")
    assert len(words) == 3


def test_an_attempt_of_this_submission_elsewhere_is_dead_only_after_half_of_its_lease(tmp_path: Path) -> None:
    lease = Lease.acquire(Store.open(tmp_path), STEP, 60, holder="elsewhere:1 submission 12345678")
    assert lease is not None
    fresh, stale = LeaseStatus(lease.record, age=29), LeaseStatus(lease.record, age=31)
    assert [is_dead(lease_status, "submission") for lease_status in (fresh, stale)] == [False, True]
    assert not is_dead(stale, "another submission")
    own_record = lease.record.model_copy(update={"holder": holder("submission")})
    assert not is_dead(LeaseStatus(own_record, age=31), "submission"), "this process is alive"
