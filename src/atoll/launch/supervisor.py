"""One attempt at a step, as every launcher runs it: hold the step's lease, run the command, say how it ended.

    python -m atoll.launch.supervisor --run RUN --step experts/003 -- COMMAND …

Exit codes: 0 done, 75 make another attempt, anything else failed for good. An attempt that dies without a word is to be
made again, too. How often is decided here, in one way for all launchers: a step may die `--retries` times without
having got further than before; input that was refused (code 2) is not tried again.

The lease makes sure that no two machines work on one step. Attempts under one ticket ($ATOLL_TICKET: one submission)
succeed one another at once, since the scheduler starts the next only after the last. Whoever gets the lease ends what a
dead attempt left running on this machine: a killed torchrun leaves its workers behind, out of sight of a scheduler that
follows parents and children.
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
from types import FrameType
from typing import TextIO

from atoll.core import layout
from atoll.core.artifacts import Artifact, to_json
from atoll.core.layout import MANIFEST_FILE
from atoll.core.metrics_file import last_line
from atoll.islands.leases import Lease, LeaseLost, Seen, State, look
from atoll.islands.store import Store
from atoll.launch.base import AGAIN, NODE, TICKET, logs_of

LEASE_SECONDS = 60.0
REFUSED = 2
"""Exit code of `atoll` for input that was refused."""
MARK = "ATOLL_STEP"
"""Environment variable of everything that works on a step, so that what was left behind can be found."""
_FOLLOW = """
import ctypes, os, sys
if hasattr(ctypes.CDLL(None), "prctl"):
    ctypes.CDLL(None).prctl(1, 15)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""On Linux a command is told to stop (PR_SET_PDEATHSIG, SIGTERM) when its attempt dies: nobody else would."""
_ENDED: tuple[State, ...] = ("released", "failed", "refused", "done")


@dataclass
class Attempt:
    """One attempt."""

    run: Path
    step: str
    ticket: str
    retries: int
    images: int
    command: list[str]
    log: TextIO
    lease_seconds: float = LEASE_SECONDS

    def make(self) -> int:
        """Take the lease, run the command, and tell the launcher what to do next."""
        stop = _stop_signals()
        lease = self._take(stop)
        if lease is None:
            return AGAIN
        try:
            with lease:
                return self._work(lease, stop)
        except LeaseLost as lost:
            self._say(f"{lost}; nothing more is done here")
            return AGAIN

    @property
    def mark(self) -> str:
        """The value of `MARK` for this step."""
        return f"{self.run}:{self.step}"

    @property
    def _tally(self) -> Path:
        return self.run / layout.LAUNCH_TALLIES / f"{self.step}.json"

    def _say(self, words: str) -> None:
        line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')} {holder(self.ticket)}] {words}"
        print(line, file=self.log, flush=True)
        print(line, flush=True)

    def _take(self, stop: threading.Event) -> Lease | None:
        """The lease, as soon as whoever holds it lets go or is silent for too long; None if told to stop before."""
        store, said = Store.open(self.run), False
        while not stop.is_set():
            seen = look(store, self.step)
            dead = seen is not None and seen.record.state == "held" and is_over(seen, self.ticket)
            states, epoch = ((*_ENDED, "held"), seen.record.epoch) if dead and seen else (_ENDED, None)
            lease = Lease.take(
                store, self.step, self.lease_seconds, holder=holder(self.ticket), state=states, epoch=epoch
            )
            if lease is not None:
                return lease
            if seen is not None and not said:
                self._say(f"{seen.record.holder} works on {self.step}; waiting for it to finish or to fall silent")
                said = True
            stop.wait(2)
        return None

    def _work(self, lease: Lease, stop: threading.Event) -> int:
        end_strays(self.mark)
        deaths, saved = self._count_deaths()
        if deaths > self.retries:
            return self._fail(lease, 1, f"died {deaths} times without getting further")
        self._note(deaths + 1, saved)  # until it is known better: a kill leaves no time to write
        self._say(f"attempt at {self.step}, from {saved:,} images" if saved else f"attempt at {self.step}")
        code = self._supervise(lease, stop)
        if code == 0:
            self._note(0, saved)
            made = Artifact(self.run, layout.final(self.step)).manifest()
            lease.end("done", images=self.images, manifest=made.digest if made else None)
            return 0
        if stop.is_set() or code == AGAIN:
            self._note(deaths, saved)
            lease.end("released")
            return AGAIN
        if code == REFUSED:
            return self._fail(lease, code, "the input was refused")
        deaths = 1 if saved_images(self.run, self.step) > saved else deaths + 1
        if deaths > self.retries:
            return self._fail(lease, code if code > 0 else 1, f"ended with code {code}, {deaths} times in a row")
        self._say(f"ended with code {code}; another attempt follows")
        lease.end("released", why=f"ended with code {code}")
        return AGAIN

    def _fail(self, lease: Lease, code: int, why: str) -> int:
        self._tally.unlink(missing_ok=True)
        self._say(f"{self.step} failed: {why}; see {self.log.name}")
        lease.end("failed", why=f"{why}; see {self.log.name}", failures=lease.record.failures + 1)
        return code

    def _count_deaths(self) -> tuple[int, int]:
        """How often this submission died without getting further, and how far it is."""
        saved = saved_images(self.run, self.step)
        with suppress(FileNotFoundError, json.JSONDecodeError):
            before = json.loads(self._tally.read_text(encoding="utf-8"))
            if before["ticket"] == self.ticket and before["saved"] >= saved:
                return before["deaths"], saved
        return 0, saved

    def _note(self, deaths: int, saved: int) -> None:
        note = to_json({"ticket": self.ticket, "deaths": deaths, "saved": saved})
        Artifact(self.run, layout.LAUNCH_TALLIES).write(f"{self.step}.json", note)

    def _supervise(self, lease: Lease, stop: threading.Event) -> int:
        """Run the command until it ends; pass on that it shall stop, and end it if the lease is lost."""
        environment = {**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(
            [sys.executable, "-c", _FOLLOW, *self.command], stdin=subprocess.DEVNULL,
            stdout=self.log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        told, looked = False, 0.0
        while True:
            try:
                return child.wait(0.25)
            except subprocess.TimeoutExpired:
                if stop.is_set() and not told:
                    child.terminate()
                    told = True
                if lease.lost:
                    end_strays(self.mark)
                    child.wait()
                    lease.check()
                if time.monotonic() - looked > 5:
                    looked = time.monotonic()
                    lease.tell(total=self.images)
                    if line := last_line(self.run / layout.metrics(self.step)):
                        lease.tell(images=line.images, rate=line.images_per_second)


def saved_images(run: Path, step: str) -> int:
    """How far the newest committed checkpoint of a training job is."""
    found = (run / layout.checkpoints(step)).glob(f"*/{MANIFEST_FILE}")
    return max((int(path.parent.name) for path in found if path.parent.name.isdigit()), default=0)


# Who holds a lease


def place() -> str:
    """A name for this machine since its last start, where process numbers mean one thing."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


def holder(ticket: str) -> str:
    """How this process signs a lease."""
    return f"{socket.gethostname()}:{os.getpid()} {ticket} {place()}"


def is_over(seen: Seen, ticket: str = "") -> bool:
    """Whether an attempt that holds a lease is dead: its process is gone from here, or its ticket is ours.

    A scheduler may give our ticket to a second machine while the first is only cut off. So it must have been silent
    too: a living attempt renews three times in its lease's length.
    """
    words = seen.record.holder.split(" ")
    if len(words) != 3:
        return False
    process, its_ticket, its_place = words
    number = process.rpartition(":")[2]
    if its_place == place() and os.path.isdir("/proc/self"):
        return not is_alive(number)
    return its_ticket == ticket and seen.age > seen.record.duration / 2


def is_alive(process: str) -> bool:
    """Whether a process of this machine runs; one that is dead and not yet buried does not."""
    if not (process.isascii() and process.isdigit()):
        return False  # it comes from a lease record: it must not become a path
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def end_strays(mark: str) -> None:
    """Kill whatever on this machine still works on a step: only the holder of its lease may call this."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or it is someone else's
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _stop_signals() -> threading.Event:
    """SIGTERM, SIGUSR1 and SIGINT ask for an orderly end."""
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop.set()

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, note)
    return stop


def main(argv: list[str] | None = None) -> int:
    """The command line of one attempt."""
    parser = argparse.ArgumentParser(prog="python -m atoll.launch.supervisor", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--step", required=True)
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--lease", type=float, default=LEASE_SECONDS)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(argv)
    if os.environ.get(NODE, os.environ.get("SLURM_PROCID", "0")) != "0":
        # A further node of an island: its first one holds the lease.
        os.execvp(given.command[0], given.command)
    ticket = os.environ.get(TICKET) or f"process-{os.getpid()}"
    file = logs_of(given.run) / f"{given.step}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as log:
        work = (given.run, given.step, ticket, given.retries, given.images, given.command, log)
        return Attempt(*work, given.lease).make()


if __name__ == "__main__":
    sys.exit(main())
