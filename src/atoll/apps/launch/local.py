"""Launcher for this machine: a fixed number of parallel processes, each with its part of the cores and GPUs."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple, TextIO
from uuid import uuid4

from atoll.apps.launch.launcher import RETRY_CODE, SUBMISSION_VARIABLE, Launcher
from atoll.apps.launch.steps import Group, JobStep
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.metrics_file import progress_of
from atoll.core.progress import progress, say

# Short compared with the start of a job (seconds), so that a free slot is filled without delay.
_PAUSE = 0.1
"""Seconds between two checks of the running processes."""
_PROGRESS_SECONDS = 1.0
"""Seconds between two updates of the progress bar; jobs write their progress as often."""
_LAST_LINES = 14
"""Number of lines of a failed job's log to print: an error message that names ten files, and a little context."""


@dataclass
class Running:
    """A running process and its slot."""

    process: subprocess.Popen[bytes]
    group: Group
    step: JobStep
    slot: int
    stop_sent: bool = False
    """Whether SIGTERM was sent to it."""


@dataclass
class Local(Launcher):
    """Runs up to `max_parallel` steps in parallel until none is left, in the foreground."""

    foreground: ClassVar[bool] = True
    submission: str = field(default_factory=lambda: f"local-{uuid4().hex[:8]}")
    _groups: list[Group] = field(default_factory=list)
    _left: dict[str, set[str]] = field(default_factory=dict)
    _running: list[Running] = field(default_factory=list)
    _failed: list[str] = field(default_factory=list)
    _list: TextIO | None = None
    _stop: bool = False

    def __post_init__(self) -> None:
        """Give an island one GPU if it may have any (`island.gpus: auto`) and this machine has GPUs."""
        if self.settings.island.gpus == "auto":
            self.settings = replace(self.settings, gpus_if_auto=min(1, len(visible_gpus().names)))

    @property
    def max_parallel(self) -> int:
        """Number of parallel steps: the requested number, or as many islands as the GPUs of this machine allow."""
        settings, gpus = self.settings, len(visible_gpus().names)
        if settings.island.nodes > 1:
            raise AtollError("--on local supports one node; for islands of several nodes use --on slurm or --on ray")
        fits = gpus // settings.gpus_per_island if settings.gpus_per_island else 1
        # With auto, more jobs than GPUs share them.
        if settings.island.gpus not in ("auto", 0) and (settings.max_parallel or 1) > fits:
            count = settings.max_parallel or 1
            raise AtollError(f"{count} islands of {settings.gpus_per_island} GPUs do not fit: there are {gpus}")
        return settings.max_parallel or fits

    def active_steps(self, groups: Sequence[Group]) -> dict[str, str]:
        """Return the unfinished steps of other local launches. Each launch holds a lock on a file that lists them."""
        del groups
        found: dict[str, str] = {}
        for file in (self.settings.run / layout.LAUNCH_LISTS).glob("*.json"):
            with file.open("r", encoding="utf-8") as stream:
                # The kernel releases a lock when its process dies, so a lock that can be taken means a dead launch.
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.unlink(missing_ok=True)  # its launcher is gone
                except BlockingIOError:
                    found |= dict.fromkeys(json.load(stream), file.stem)
        return found

    def show(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> str:
        """Return the commands with the environment variables that are set for them, as if all slots were free."""
        del active
        lines = [f"# {self.max_parallel} at a time, with {self.cores} cores each"]
        for group in groups:
            lines.append(f"# {group.name}" + (f", after {', '.join(group.needs)}" if group.needs else ""))
            for number, step in enumerate(group.steps):
                environment = self.environment(group, number % self.max_parallel)
                variables = " ".join(f"{key}={value}" for key, value in environment.items())
                lines.append(f"{variables} {shlex.join(self.settings.command(group, step))}")
        return "\n".join(lines)

    @property
    def cores(self) -> int:
        """Number of cores of one island."""
        return self.settings.island.cores or max(1, cores() // self.max_parallel)

    def environment(self, group: Group, slot: int) -> dict[str, str]:
        """Return the environment variables of a step: its submission, threads and GPUs."""
        _, processes, count = self.settings.shape(group)
        variables = {SUBMISSION_VARIABLE: self.submission, "OMP_NUM_THREADS": str(max(1, self.cores // processes))}
        if self.settings.gpus_per_island:
            variable, names = visible_gpus()
            first = slot * self.settings.gpus_per_island % len(names)
            variables[variable] = ",".join(names[first : first + count])
        return variables

    def submit(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> None:
        """Queue the steps; `wait` runs them."""
        del active
        self._groups = list(groups)
        self._left = {group.name: {step.name for step in group.steps} for group in groups}
        file = self.settings.run / layout.LAUNCH_LISTS / f"{self.submission}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        self._list = file.open("w", encoding="utf-8")
        fcntl.flock(self._list, fcntl.LOCK_EX)
        json.dump([step.name for group in groups for step in group.steps], self._list)
        self._list.flush()

    def wait(self, groups: Sequence[Group]) -> None:
        """Run the submitted steps; on SIGINT or SIGTERM, stop after the running steps have saved."""
        del groups
        if self._list is None:
            return

        def request_stop(*_: object) -> None:
            self._stop = True
            say("stopping: waiting for running jobs to save", file=sys.stderr)

        before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        steps = [step for group in self._groups for step in group.steps]
        images = sum(step.images for step in steps)
        done, checked = self._done(steps), time.monotonic()
        try:
            with progress("launch", images or len(steps), done, unit="images" if images else "jobs") as bar:
                while self._running or self._startable():
                    self._start_ready()
                    for running in self._running:
                        if self._stop and not running.stop_sent:
                            running.process.terminate()
                            running.stop_sent = True
                    time.sleep(_PAUSE)
                    self._collect_ended()
                    if time.monotonic() - checked > _PROGRESS_SECONDS:
                        now, checked = self._done(steps), time.monotonic()
                        bar.set_postfix_str(self._running_text(), refresh=False)
                        bar.update(now - done)
                        done = now
                bar.update(self._done(steps) - done)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            Path(self._list.name).unlink(missing_ok=True)
            self._list.close()
        if self._stop:
            raise AtollError("stopped; running jobs have saved their state; run the same command again to resume")

    def _done(self, steps: Sequence[JobStep]) -> int:
        """Return the images that all training jobs have seen; if there are none, the number of finished jobs."""
        if any(step.images for step in steps):
            return sum(images_seen(self.settings.run, step) for step in steps)
        return len(steps) - sum(map(len, self._left.values()))

    def _running_text(self) -> str:
        """Return the names of the running jobs, with loss and learning rate of those that train."""
        lines = {step.name: progress_of(self.settings.run / step.name) for step in (one.step for one in self._running)}
        return ", ".join(f"{name} {line.text}" if line else name for name, line in lines.items())

    def _startable(self) -> list[tuple[Group, JobStep]]:
        """Return the steps whose dependencies are done, the longest training job first; none after a stop signal."""
        # Longest processing time first is the classic heuristic for few slots: a long job that starts last would run
        # alone at the end.
        if self._stop:
            return []
        busy = {running.step.name for running in self._running}
        ready = [
            (group, step)
            for group in self._groups
            if not any(self._left.get(need) for need in group.needs)
            for step in group.steps
            if step.name in self._left[group.name] and step.name not in busy and step.name not in self._failed
        ]
        return sorted(ready, key=lambda one: -one[1].flops)

    def _start_ready(self) -> None:
        free = sorted(set(range(self.max_parallel)) - {running.slot for running in self._running})
        for slot, (group, step) in zip(free, self._startable(), strict=False):
            length = f" for {step.images:,} images" if step.images else ""
            say(f"{step.name}: started{length}, log in {self._log(step)}", file=sys.stderr)
            process = subprocess.Popen(
                self.settings.command(group, step), env={**os.environ, **self.environment(group, slot)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._running.append(Running(process, group, step, slot))

    def _collect_ended(self) -> None:
        """Record finished and failed steps. A step that must be repeated, or was killed, stays in the queue."""
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            if code == 0:
                self._left[running.group.name].discard(running.step.name)
                say(f"{running.step.name}: done", file=sys.stderr)
            elif code != RETRY_CODE and code > 0:
                self._failed.append(running.step.name)
                log = self._log(running.step)
                text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
                lines = [f"{running.step.name}: failed with code {code}", *text.splitlines()[-_LAST_LINES:]]
                say("\n".join(lines), file=sys.stderr)

    def _log(self, step: JobStep) -> Path:
        return self.settings.run / layout.LAUNCH_LOGS / f"{step.name}.log"


def images_seen(run: Path, step: JobStep) -> int:
    """Return the number of images that a training job has seen."""
    line = progress_of(run / step.name)
    return min(line.images, step.images) if line else 0


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class VisibleGPUs(NamedTuple):
    """The GPUs that this process may use, and the environment variable that restricts other processes to some."""

    variable: str
    names: tuple[str, ...]


def visible_gpus() -> VisibleGPUs:
    """Return the GPUs of this machine: those that the environment names already, or all that torch finds."""
    given = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK") if name in os.environ]
    variable = given[0] if len(given) == 1 else _found_gpus().variable
    if variable not in given:
        return _found_gpus()
    # An empty list and the usual -1 mean no GPU.
    names = (name.strip() for name in os.environ[variable].split(","))
    return VisibleGPUs(variable, tuple(name for name in names if name and not name.startswith("-")))


@cache
def _found_gpus() -> VisibleGPUs:
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in ("cuda", "xpu"):
        return VisibleGPUs("CUDA_VISIBLE_DEVICES", ())
    # ROCm's devices are called cuda too. If ROCR_VISIBLE_DEVICES restricts them, HIP_VISIBLE_DEVICES counts the rest.
    cuda = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    variable = cuda if found.type == "cuda" else "ZE_AFFINITY_MASK"
    return VisibleGPUs(variable, tuple(str(number) for number in range(torch.accelerator.device_count())))
