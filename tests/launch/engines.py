"""Test drivers of the launchers: start a launch, and preempt the machine of a job."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from launch import slurm
from waiting import HOUR

MAIN = "import sys; from atoll.cli import main; sys.exit(main(sys.argv[1:]))"


class Local:
    """Two parallel processes on this machine."""

    options: tuple[str, ...] = ("--on", "local", "--max-parallel", "2")

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def launch(self, run: Path, *options: str) -> subprocess.Popen[str]:
        return self._start(MAIN, "launch", str(run), *self.options, "--island.cores", "1", *options)

    def _start(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    @contextmanager
    def preempted(self, run: Path, step: str) -> Iterator[None]:
        """Send SIGTERM to the attempt, as the owner of a machine would."""
        os.kill(attempts(run, step)[0], signal.SIGTERM)
        yield


class Command(Local):
    """A shell script as a scheduler: it starts every job at once, in a session of its own."""

    script = """#!/bin/sh
    # usage: scheduler.sh NAME FILE: start FILE and print a job id, as schedulers do
    test "$#" -eq 2 && test -x "$2" || { echo "usage: NAME FILE" >&2; exit 3; }
    echo "$1" >> "$(dirname "$0")/submitted.txt"
    setsid "$2" > /dev/null 2>&1 < /dev/null &
    echo "job $!"
    """

    def start(self) -> None:
        # A path with a space and a quote: templates are split into words, but paths are not.
        self.folder = Path(tempfile.mkdtemp(prefix="scheduler of o'neill "))
        self.file = self.folder / "scheduler.sh"
        self.file.write_text("\n".join(line.strip() for line in self.script.splitlines()))
        self.file.chmod(0o755)
        self.options = ("--on", "command", f"{shlex.quote(str(self.file))} {{name}} {{command}}", "--wait")

    def stop(self) -> None:
        shutil.rmtree(self.folder)


class Slurm(Local):
    """Two nodes of one core each; a job in a partition of higher priority preempts a node."""

    options = ("--on", "slurm", "--wait")

    def start(self) -> None:
        self.cluster = slurm.Cluster()
        self.cluster.start()

    def stop(self) -> None:
        self.cluster.stop()

    @property
    def environment(self) -> dict[str, str]:
        return {**self.cluster.environment, "OMP_NUM_THREADS": "1"}

    @contextmanager
    def preempted(self, run: Path, step: str) -> Iterator[None]:
        job = self.job_of(run, step)
        taker = ["srun", "--partition=high", f"--nodelist={self.cluster.node_of(job)}", "sleep", "2"]
        better = subprocess.Popen(taker, env=self.environment)
        yield
        assert better.wait(HOUR) == 0

    def job_of(self, run: Path, step: str) -> str:
        words = Path(f"/proc/{attempts(run, step)[0]}/environ").read_bytes().decode().split("\0")
        return next(word.split("=slurm-")[1] for word in words if word.startswith("ATOLL_SUBMISSION="))


class Ray(Local):
    """A head and two nodes of one core each; a node dies and is replaced."""

    options = ("--on", "ray", "--wait")

    def start(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Not 127.0.0.1: Ray replaces it by the machine's outward address.
        head = {"num_cpus": 0, "node_ip_address": "127.0.0.2", "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = {f"127.0.0.{number}": self._add(f"127.0.0.{number}") for number in (3, 4)}

    def _add(self, address: str) -> object:
        return self.cluster.add_node(num_cpus=1, node_ip_address=address)

    def stop(self) -> None:
        self.cluster.shutdown()

    def launch(self, run: Path, *options: str) -> subprocess.Popen[str]:
        connect = f"import ray; ray.init({self.cluster.address!r}, _node_ip_address='127.0.0.2', log_to_driver=False)"
        return self._start(f"{connect}; {MAIN}", "launch", str(run), *self.options, "--island.cores", "1", *options)

    @contextmanager
    def preempted(self, run: Path, step: str) -> Iterator[None]:
        """Kill the raylet of the node that runs a job."""
        self.cluster.remove_node(self.nodes.pop(self._address_of(run, step)), allow_graceful=False)
        yield
        self.nodes["127.0.0.5"] = self._add("127.0.0.5")

    def _address_of(self, run: Path, step: str) -> str:
        """Return the address of the node that runs the attempt, from the command line of its raylet."""
        worker = psutil.Process(attempts(run, step)[0]).parent()
        words = " ".join(worker.parent().cmdline())
        return next(address for address in self.nodes if f"={address}" in words)


ENGINES = {"local": Local, "command": Command, "slurm": Slurm, "ray": Ray}


def attempts(run: Path, step: str) -> list[int]:
    """Return the supervisor processes of a step on this machine."""
    return [
        number for number, words in processes() if "atoll.apps.launch.supervisor" in words and step in words
        and str(run) in words
    ]  # fmt: skip


def trainers(run: Path, step: str) -> list[int]:
    """Return all processes of a step."""
    return [number for number, _ in processes() if f"ATOLL_STEP={run}:{step}" in environment_of(number)]


def ranks(run: Path) -> set[str]:
    """Return the ranks, as "0 of 2", of the processes that torchrun has started for a run, on any node."""
    found = [environment_of(number) for number, words in processes() if {"atoll.cli", "train", str(run)} <= set(words)]
    known = [dict(word.split("=", 1) for word in words if "=" in word) for words in found]
    return {f"{one['RANK']} of {one['WORLD_SIZE']}" for one in known if {"RANK", "WORLD_SIZE"} <= one.keys()}


def environment_of(process: int) -> list[str]:
    """Return the environment of a process as NAME=VALUE; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def processes() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        # The command line of srun contains the whole command, too; that of an attempt begins with Python.
        if "python" in Path(words[0]).name:
            yield int(folder.name), words


class Watch(threading.Thread):
    """Watch a run continuously: which checkpoints and results were written, and how often."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.stopped = run, threading.Event()
        self.versions: dict[str, set[tuple[int, int]]] = {}

    def run(self) -> None:
        while not self.stopped.wait(0.01):
            self.scan()

    def scan(self) -> None:
        for pattern in ("experts/*/checkpoints/*/manifest.json", "experts/*/final/manifest.json"):
            for path in self.run_folder.glob(pattern):
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue
                name = path.parent.relative_to(self.run_folder).as_posix()
                self.versions.setdefault(name, set()).add((found.st_ino, found.st_mtime_ns))

    def checkpoints(self, step: str) -> list[int]:
        return sorted(
            int(name.split("/")[-1]) for name in list(self.versions) if name.startswith(f"{step}/checkpoints/")
        )

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join()
        self.scan()


def wait_until(condition: object, process: subprocess.Popen[str], what: str) -> None:
    """Wait for an effect of a launch; fail if the launch fails first."""
    deadline = time.monotonic() + HOUR
    while not condition():
        assert process.poll() in (None, 0), process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, f"{what}: timeout"
        time.sleep(0.01)
