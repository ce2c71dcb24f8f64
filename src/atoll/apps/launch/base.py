"""The interface of launchers, and the command line that all of them run."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.apps.launch.plan import Group, Step
from atoll.core import layout
from atoll.core.config import Config
from atoll.core.config_sections import Island

# EX_TEMPFAIL of sysexits.h: "the user is invited to retry". `atoll train` also exits with it after a stop signal.
RETRY_CODE = 75
"""Exit code of an attempt that the launcher must repeat."""
SUBMISSION_VARIABLE = "ATOLL_SUBMISSION"
"""Environment variable with the id of a submission. The attempts of one submission run one after another."""
NODE_VARIABLE = "ATOLL_NODE"
"""Environment variable with the rank of a node in its island. Slurm sets SLURM_PROCID instead."""


class Launcher(Protocol):
    """The interface of all launchers."""

    foreground: bool
    """Whether the jobs run only as long as the launching process."""

    def active_steps(self, groups: Sequence[Group]) -> dict[str, str]:
        """Return the steps that are queued or running in this launcher, each with its submission."""

    def show(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> str:
        """Return the text of everything that `submit` would submit."""

    def submit(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> None:
        """Submit all steps of these groups. Each waits for the groups that it needs, including those in `active`."""

    def wait(self, groups: Sequence[Group]) -> None:
        """Return when no step of these groups is queued or running in this launcher."""


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of all launchers: the run, the size of an island, and the limits of retries and parallel jobs."""

    run: Path
    island: Island
    retries: int = 3
    max_parallel: int | None = None
    gpus_if_auto: int = 0
    """GPUs on each node of an island with `island.gpus: auto`."""

    @property
    def gpus_per_island(self) -> int:
        """Number of GPUs on each node of an island."""
        return self.gpus_if_auto if self.island.gpus == "auto" else self.island.gpus

    def processes(self, group: Group) -> int:
        """Return the number of processes on each node."""
        return self.island.processes or max(1, self.gpus_per_island) if group.device == "island" else 1

    def nodes(self, group: Group) -> int:
        """Return the number of nodes of one step."""
        return self.island.nodes if group.device == "island" else 1

    def gpus(self, group: Group) -> int:
        """Return the number of GPUs on each node."""
        return {"cpu": 0, "gpu": min(1, self.gpus_per_island), "island": self.gpus_per_island}[group.device]

    def command(self, group: Group, step: Step) -> list[str]:
        """Return the command of one attempt at a step.

        With several nodes, each node runs it, with the rendezvous of torchrun in its environment.
        """
        head = [sys.executable, "-m", "atoll.apps.launch.supervisor", "--run", str(self.run), "--step", step.name]
        head += ["--retries", str(self.retries), *(["--images", str(step.images)] if step.images else []), "--"]
        nodes, processes = self.nodes(group), self.processes(group)
        if nodes * processes == 1:
            return [*head, sys.executable, "-m", "atoll.cli", *step.arguments]
        shape = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *shape, "--nproc-per-node", str(processes)]
        return [*head, *torchrun, "-m", "atoll.cli", *step.arguments]

    def logs(self) -> Path:
        """Return the folder of the logs."""
        return logs_of(self.run)


def scheduler_gpus(config: Config) -> int:
    """Return the GPUs per node that `island.gpus: auto` requests from Slurm and Ray.

    The machine that submits may have none. So the run decides: nobody chooses bfloat16 to train on CPUs.
    """
    return int(config.train.precision == "bfloat16")


def logs_of(run: Path) -> Path:
    """Return the folder of the logs; all attempts at a step append their output to `STEP.log` in it."""
    return run / layout.LAUNCH_LOGS


def as_shell(command: Sequence[str]) -> str:
    """Return a command as a quoted shell line."""
    return shlex.join(command)
