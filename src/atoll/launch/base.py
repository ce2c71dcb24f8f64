"""What a launcher is, and the command line that all of them run."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.core import layout
from atoll.core.config_sections import Island
from atoll.launch.plan import Group, Step

AGAIN = 75
"""Exit code of an attempt that shall be made again (EX_TEMPFAIL), as of a training job that was told to stop."""
TICKET = "ATOLL_TICKET"
"""Environment variable with the name of a submission. Attempts under one ticket succeed one another."""
NODE = "ATOLL_NODE"
"""Environment variable with the number of a node in its island, where Slurm does not tell it."""


class Launcher(Protocol):
    """Something that runs jobs."""

    stays: bool
    """Whether the jobs need the launching process, so that it must stay."""

    def observe(self, groups: Sequence[Group]) -> dict[str, str]:
        """The steps that are queued or running here, each with its ticket."""

    def show(self, groups: Sequence[Group], live: Mapping[str, Sequence[str]]) -> str:
        """What `submit` would submit, as text."""

    def submit(self, groups: Sequence[Group], live: Mapping[str, Sequence[str]]) -> None:
        """Submit all steps of these groups; each waits for the groups it needs, also for their tickets in `live`."""

    def wait(self, groups: Sequence[Group]) -> None:
        """Return when no step of these groups is queued or running here."""


@dataclass(frozen=True)
class Setting:
    """What all launchers know: the run, the size of an island, and how often a job may fail without getting further."""

    run: Path
    island: Island
    retries: int = 3
    at_once: int | None = None

    def processes(self, group: Group) -> int:
        """Processes on each node."""
        return self.island.processes or max(1, self.island.gpus) if group.device == "island" else 1

    def nodes(self, group: Group) -> int:
        """Nodes of one step."""
        return self.island.nodes if group.device == "island" else 1

    def gpus(self, group: Group) -> int:
        """GPUs on each node."""
        return {"cpu": 0, "gpu": min(1, self.island.gpus), "island": self.island.gpus}[group.device]

    def command(self, group: Group, step: Step) -> list[str]:
        """One attempt at a step. Over several nodes, every node runs it with the rendezvous in its environment."""
        head = [sys.executable, "-m", "atoll.launch.supervisor", "--run", str(self.run), "--step", step.name]
        head += ["--retries", str(self.retries), *(["--images", str(step.images)] if step.images else []), "--"]
        nodes, processes = self.nodes(group), self.processes(group)
        if nodes * processes == 1:
            return [*head, sys.executable, "-m", "atoll.cli", *step.arguments]
        shape = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *shape, "--nproc-per-node", str(processes)]
        return [*head, *torchrun, "-m", "atoll.cli", *step.arguments]

    def logs(self) -> Path:
        """Folder of the logs."""
        return logs_of(self.run)


def logs_of(run: Path) -> Path:
    """Where every attempt at a step appends what it says: `STEP.log` in this folder."""
    return run / layout.LAUNCH_LOGS


def as_shell(command: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(command)
