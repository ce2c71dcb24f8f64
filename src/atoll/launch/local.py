"""On this machine: processes, a set number at a time, each with its share of the cores and GPUs."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.metrics_file import last_line
from atoll.core.progress import progress
from atoll.launch.base import AGAIN, TICKET, Setting, as_shell
from atoll.launch.plan import Group, Step

_PAUSE = 0.1
_PROGRESS_SECONDS = 1.0
"""Between two looks at the metrics of the running jobs; they write a line every few seconds."""
_LAST_LINES = 5
"""Of the log of a failed job: the reason and what led to it."""


@dataclass
class Running:
    """A process, and the share of the machine that it has."""

    process: subprocess.Popen[bytes]
    group: Group
    step: Step
    slot: int
    told: bool = False
    """Whether it was asked to stop."""


@dataclass
class Local:
    """Keeps `at_once` steps going until none is left, and must stay until then; a later one goes on from there."""

    setting: Setting
    stays: bool = True
    ticket: str = field(default_factory=lambda: f"local-{uuid4().hex[:8]}")
    _groups: list[Group] = field(default_factory=list)
    _left: dict[str, set[str]] = field(default_factory=dict)
    _running: list[Running] = field(default_factory=list)
    _failed: list[str] = field(default_factory=list)
    _stop: bool = False

    @property
    def at_once(self) -> int:
        """Steps that run side by side: as many as there are islands' worth of GPUs here, or what was asked for."""
        wanted = self.setting.island.gpus
        if self.setting.island.nodes > 1:
            raise AtollError("--on local has one node; islands of several nodes need --on slurm or --on ray")
        fitting = len(_gpus()) // wanted if wanted else 1
        if wanted and (self.setting.at_once or 1) > fitting:
            raise AtollError(
                f"{self.setting.at_once or 1} islands of {wanted} GPUs do not fit: there are {len(_gpus())}"
            )
        return self.setting.at_once or fitting

    def observe(self, groups: Sequence[Group]) -> dict[str, str]:
        """What other launchers on this machine still have before them: each holds a lock on the list of its steps."""
        del groups
        found: dict[str, str] = {}
        for file in self._lists.glob("*.json"):
            with file.open("r", encoding="utf-8") as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.unlink(missing_ok=True)  # its launcher is gone
                except BlockingIOError:
                    found |= dict.fromkeys(json.load(stream), file.stem)
        return found

    @property
    def _lists(self) -> Path:
        return self.setting.run / layout.LAUNCH_LISTS

    def show(self, groups: Sequence[Group], live: Mapping[str, Sequence[str]]) -> str:
        """The commands, with what is special in their environment."""
        del live
        lines = [f"# {self.at_once} at a time, with {self.cores} cores each"]
        for group in groups:
            lines.append(f"# {group.name}" + (f", after {', '.join(group.needs)}" if group.needs else ""))
            for step in group.steps:
                special = " ".join(f"{key}={value}" for key, value in self.environment(group, 0).items())
                lines.append(f"{special} {as_shell(self.setting.command(group, step))}")
        return "\n".join(lines)

    @property
    def cores(self) -> int:
        """Cores of one island."""
        return self.setting.island.cores or max(1, cores() // self.at_once)

    def environment(self, group: Group, slot: int) -> dict[str, str]:
        """What a step is told about its share."""
        threads = max(1, self.cores // self.setting.processes(group))
        told = {TICKET: self.ticket, "OMP_NUM_THREADS": str(threads)}
        if self.setting.island.gpus:
            first, count = slot * self.setting.island.gpus, self.setting.gpus(group)
            told["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus()[first : first + count])
        return told

    def submit(self, groups: Sequence[Group], live: Mapping[str, Sequence[str]]) -> None:
        """Take the steps on; `wait` does them."""
        del live
        self._groups = list(groups)
        self._left = {group.name: {step.name for step in group.steps} for group in groups}
        self._lists.mkdir(parents=True, exist_ok=True)
        self._list = (self._lists / f"{self.ticket}.json").open("w", encoding="utf-8")
        fcntl.flock(self._list, fcntl.LOCK_EX)
        json.dump([step.name for group in groups for step in group.steps], self._list)
        self._list.flush()

    def wait(self, groups: Sequence[Group]) -> None:
        """Run what was submitted; SIGINT and SIGTERM let running steps save, and end."""
        del groups
        if not self._groups:
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: self._ask_to_stop()) for number in numbers}
        steps = [step for group in self._groups for step in group.steps]
        images = sum(step.images for step in steps)
        done, looked = self._done(steps), time.monotonic()
        try:
            with progress("launch", images or len(steps), done, unit="images" if images else "jobs") as bar:
                while self._running or self._startable():
                    self._fill()
                    self._pass_on()
                    time.sleep(_PAUSE)
                    self._reap()
                    if time.monotonic() - looked > _PROGRESS_SECONDS:
                        now, looked = self._done(steps), time.monotonic()
                        bar.update(now - done)
                        done = now
                bar.update(self._done(steps) - done)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            (self._lists / f"{self.ticket}.json").unlink(missing_ok=True)
            self._list.close()
        if self._stop:
            raise AtollError("stopped; what was running has saved, and the same command continues")

    def _done(self, steps: Sequence[Step]) -> int:
        """Return the images that all jobs have seen; of a preparation alone, the jobs that are done."""
        if any(step.images for step in steps):
            return sum(images_seen(self.setting.run, step) for step in steps)
        return len(steps) - sum(map(len, self._left.values()))

    def _ask_to_stop(self) -> None:
        self._stop = True
        print("stopping: running jobs save first", file=sys.stderr, flush=True)

    def _pass_on(self) -> None:
        """Ask what runs to stop, once."""
        for running in self._running:
            if self._stop and not running.told:
                running.process.terminate()
                running.told = True

    def _startable(self) -> list[tuple[Group, Step]]:
        """Return the steps whose needs are met, the longest training first; none while stopping.

        The longest first is the classic rule for few slots: a long job that starts last would run alone at the end.
        """
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

    def _fill(self) -> None:
        free = sorted(set(range(self.at_once)) - {running.slot for running in self._running})
        for slot, (group, step) in zip(free, self._startable(), strict=False):
            length = f" for {step.images:,} images" if step.images else ""
            print(f"{step.name}: started{length}, log in {self._log(step)}", file=sys.stderr, flush=True)
            process = subprocess.Popen(
                self.setting.command(group, step), env={**os.environ, **self.environment(group, slot)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._running.append(Running(process, group, step, slot))

    def _reap(self) -> None:
        """Note what ended; a job that asks for another attempt, or was killed, is still left."""
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            if code == 0:
                self._left[running.group.name].discard(running.step.name)
                print(f"{running.step.name}: done", file=sys.stderr, flush=True)
            elif code != AGAIN and code > 0:
                self._failed.append(running.step.name)
                log = self._log(running.step)
                text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
                lines = [f"{running.step.name}: failed with code {code}", *text.splitlines()[-_LAST_LINES:]]
                print("\n".join(lines), file=sys.stderr, flush=True)

    def _log(self, step: Step) -> Path:
        return self.setting.logs() / f"{step.name}.log"


def images_seen(run: Path, step: Step) -> int:
    """Return the images that a training job has seen, by its metrics."""
    line = last_line(run / layout.metrics(step.name))
    return min(line.images, step.images) if line else 0


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
