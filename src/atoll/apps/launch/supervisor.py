"""Run one attempt at a step, under any launcher: hold the lease of the step, run the command, report how it ended.

    python -m atoll.apps.launch.supervisor --run RUN --step experts/003 -- COMMAND …

Exit codes: 0 done, 75 repeat, anything else failed permanently. A launcher must also repeat an attempt that was killed.
The number of attempts is limited here, in one way for all launchers: a step is retried at most `--retries` times
in a row without progress. Invalid input (exit code 2 of `atoll`) is not repeated.

The lease ensures that no two machines work on one step. The attempts of one submission ($ATOLL_SUBMISSION) follow each
other without waiting for the lease to expire, because the scheduler starts the next one only after the previous one.
The holder of the lease kills orphan processes of earlier attempts on this machine: a killed torchrun leaves its worker
processes running, and schedulers that follow process trees do not find them.
"""

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from atoll.apps.launch.launcher import NODE_VARIABLE, RETRY_CODE, SUBMISSION_VARIABLE
from atoll.apps.share.lease_records import LeaseStatus, get_lease
from atoll.apps.share.leases import Lease, LeaseLost
from atoll.apps.share.store import Store
from atoll.core import layout
from atoll.core.artifacts import Artifact, to_json
from atoll.core.layout import MANIFEST_FILE
from atoll.core.metrics_file import progress_of

# A choice: half of the 120 s of `atoll join`, whose workers may have worse connections than those of one launcher.
LEASE_SECONDS = 60.0
"""Seconds without renewal after which another attempt may take over the step."""
INPUT_ERROR_CODE = 2
"""Exit code of `atoll` for invalid input."""
STEP_VARIABLE = "ATOLL_STEP"
"""Environment variable of all processes of a step, by which orphan processes are found."""
# A supervisor that is killed with SIGKILL cannot stop its command. On Linux, the kernel does: PR_SET_PDEATHSIG (1)
# sends SIGTERM (15) to the command when its parent dies. The setting survives the exec.
_STOP_WITH_PARENT = """
import ctypes, os, sys
if hasattr(ctypes.CDLL(None), "prctl"):
    ctypes.CDLL(None).prctl(1, 15)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Wrapper that runs a command and, on Linux, sends it SIGTERM when the supervisor dies."""


@dataclass
class Attempt:
    """One attempt at a step."""

    run: Path
    step: str
    submission: str
    retries: int
    images: int
    lease_seconds: float
    command: list[str]
    log: TextIO

    def execute(self) -> int:
        """Acquire the lease, run the command, and return the exit code for the launcher."""
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        # Wait for the lease until it is free, expired or held by a dead attempt.
        store, lease, reported = Store.open(self.run), None, False
        while lease is None:
            if stop.is_set():
                return RETRY_CODE
            lease = try_lease(store, self.step, self.submission, duration=self.lease_seconds)
            if lease is None:
                if not reported and (held := get_lease(store, self.step)) is not None:
                    self._log(f"{held.record.holder} is running {self.step}; waiting for it to finish or expire")
                    reported = True
                stop.wait(2)  # seconds; short compared with the start of a job
        try:
            with lease:
                return self._run_command(lease, stop)
        except LeaseLost as lost:
            self._log(f"{lost}; this attempt ends")
            return RETRY_CODE

    @property
    def step_id(self) -> str:
        """The value of `STEP_VARIABLE` for this step."""
        return f"{self.run}:{self.step}"

    @property
    def _failure_file(self) -> Path:
        return self.run / layout.LAUNCH_FAILURES / f"{self.step}.json"

    def _log(self, message: str) -> None:
        line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')} {holder(self.submission)}] {message}"
        print(line, file=self.log, flush=True)
        print(line, flush=True)

    def _run_command(self, lease: Lease, stop: threading.Event) -> int:
        kill_orphans(self.step_id)
        # Failures of this submission since its newest checkpoint
        failures, saved = 0, saved_images(self.run, self.step)
        with suppress(FileNotFoundError, json.JSONDecodeError):
            recorded = json.loads(self._failure_file.read_text(encoding="utf-8"))
            if recorded["submission"] == self.submission and recorded["saved"] >= saved:
                failures = recorded["failures"]
        if failures > self.retries:
            return self._fail(lease, 1, f"failed {failures} times without progress")
        self._write_failures(failures + 1, saved)  # in advance: after a kill nothing can be written
        self._log(f"attempt at {self.step}, from {saved:,} images" if saved else f"attempt at {self.step}")
        code = self._supervise(lease, stop)
        if code == 0:
            self._write_failures(0, saved)
            made = Artifact(self.run, layout.final(self.step)).manifest()
            lease.end("done", images=self.images, manifest=made.digest if made else None)
            return 0
        if stop.is_set() or code == RETRY_CODE:
            self._write_failures(failures, saved)
            lease.end("released")
            return RETRY_CODE
        if code == INPUT_ERROR_CODE:
            return self._fail(lease, code, "the input was refused")
        failures = 1 if saved_images(self.run, self.step) > saved else failures + 1
        if failures > self.retries:
            return self._fail(lease, code if code > 0 else 1, f"ended with code {code}, {failures} times in a row")
        self._log(f"ended with code {code}; another attempt follows")
        lease.end("released", why=f"ended with code {code}")
        return RETRY_CODE

    def _fail(self, lease: Lease, code: int, why: str) -> int:
        self._failure_file.unlink(missing_ok=True)
        self._log(f"{self.step} failed: {why}; see {self.log.name}")
        lease.end("failed", why=f"{why}; see {self.log.name}", failures=lease.record.failures + 1)
        return code

    def _write_failures(self, failures: int, saved: int) -> None:
        content = to_json({"submission": self.submission, "failures": failures, "saved": saved})
        Artifact(self.run, layout.LAUNCH_FAILURES).write(f"{self.step}.json", content)

    def _supervise(self, lease: Lease, stop: threading.Event) -> int:
        """Run the command until it ends; forward a stop signal, and kill it if the lease is lost."""
        environment = {**os.environ, STEP_VARIABLE: self.step_id, "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(
            [sys.executable, "-c", _STOP_WITH_PARENT, *self.command], stdin=subprocess.DEVNULL,
            stdout=self.log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        stop_sent, checked = False, 0.0
        while True:
            try:
                return child.wait(0.25)
            except subprocess.TimeoutExpired:
                if stop.is_set() and not stop_sent:
                    child.terminate()
                    stop_sent = True
                if lease.lost:
                    kill_orphans(self.step_id)
                    child.wait()
                    lease.check()
                if time.monotonic() - checked > 5:  # several times per renewal of the lease (20 s)
                    checked = time.monotonic()
                    lease.set_pending(total=self.images)
                    if line := progress_of(self.run / self.step):
                        lease.set_pending(images=line.images, rate=line.images_per_second)


def saved_images(run: Path, step: str) -> int:
    """Return the number of images of the newest committed checkpoint of a training job."""
    found = (run / layout.checkpoints(step)).glob(f"*/{MANIFEST_FILE}")
    return max((int(path.parent.name) for path in found if path.parent.name.isdigit()), default=0)


# The holder of a lease


def try_lease(store: Store, step: str, submission: str, *, duration: float = LEASE_SECONDS) -> Lease | None:
    """Acquire the lease of a step if it is free, expired, ended or held by a dead process; else return None."""
    over = get_lease(store, step)
    if over is not None and over.record.state == "held" and not is_dead(over, submission):
        over = None  # until it expires; a dead holder is not waited for
    return Lease.acquire(store, step, duration, holder=holder(submission), over=over)


def machine_id() -> str:
    """Return an id of this machine, its boot and its process namespace: with equal ids, process ids are comparable."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


def holder(submission: str) -> str:
    """Return the name of this process in a lease record: host:pid, submission, machine id."""
    return f"{socket.gethostname()}:{os.getpid()} {submission} {machine_id()}"


def is_dead(lease_status: LeaseStatus, submission: str = "") -> bool:
    """Return whether the attempt that holds a lease is dead, before its lease expires.

    On this machine, it is dead if its process is gone. On another machine, it is dead if it belongs to this submission
    and has not renewed for half of the duration. The second condition is needed because a scheduler can restart a job
    elsewhere while the first machine is only disconnected; a live attempt renews three times per duration.
    """
    parts = lease_status.record.holder.split(" ")
    if len(parts) != 3:
        return False
    process, its_submission, its_machine = parts
    if its_machine != machine_id() or not os.path.isdir("/proc/self"):
        return its_submission == submission and lease_status.age > lease_status.record.duration / 2
    number = process.rpartition(":")[2]
    if not (number.isascii() and number.isdigit()):
        return True  # anybody may write a lease record: its text must not become a path
    try:
        state = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"  # a zombie


def kill_orphans(step_id: str) -> None:
    """Kill all other processes of a step on this machine. Only the holder of its lease may call this."""
    variable = f"{STEP_VARIABLE}={step_id}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if int(folder.name) != os.getpid() and variable in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def main() -> int:
    """Parse the command line and run one attempt."""
    parser = argparse.ArgumentParser(prog="python -m atoll.apps.launch.supervisor", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--step", required=True)
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--lease", dest="lease_seconds", type=float, default=LEASE_SECONDS)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    submission = os.environ.get(SUBMISSION_VARIABLE) or f"process-{os.getpid()}"
    os.environ[SUBMISSION_VARIABLE] = submission  # with it, `atoll train` takes no lease of its own
    if os.environ.get(NODE_VARIABLE, os.environ.get("SLURM_PROCID", "0")) != "0":
        # Another node than the first of an island: the first one holds the lease, this one only runs the command.
        os.execvp(given.command[0], given.command)
    file = given.run / layout.LAUNCH_LOGS / f"{given.step}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as log:
        return Attempt(submission=submission, log=log, **vars(given)).execute()


if __name__ == "__main__":
    sys.exit(main())
