"""The interface of launchers, and the command line that all of them run."""

import hashlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from atoll.apps.launch.steps import Group, JobStep
from atoll.core.config_sections import IslandSection

# EX_TEMPFAIL of sysexits.h: "the user is invited to retry". `atoll train` also exits with it after a stop signal.
RETRY_CODE = 75
"""Exit code of an attempt that the launcher must repeat."""
SUBMISSION_VARIABLE = "ATOLL_SUBMISSION"
"""Environment variable with the id of a submission. The attempts of one submission run one after another."""
NODE_VARIABLE = "ATOLL_NODE"
"""Environment variable with the rank of a node in its island. Slurm sets SLURM_PROCID instead."""
# Each poll of Slurm is one call of squeue, which loads the controller: not much faster than jobs can start or end.
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of all launchers: the run, the size of an island, and the limits of retries and parallel jobs."""

    run: Path
    island: IslandSection
    retries: int = 3
    max_parallel: int | None = None
    gpus_if_auto: int = 0
    """GPUs on each node of an island with `island.gpus: auto`."""

    @property
    def gpus_per_island(self) -> int:
        """Number of GPUs on each node of an island."""
        return self.gpus_if_auto if self.island.gpus == "auto" else self.island.gpus

    def shape(self, group: Group) -> tuple[int, int, int]:
        """Return the number of nodes, of processes per node and of GPUs per node of one step."""
        gpus = self.gpus_per_island
        if group.device == "island":
            return self.island.nodes, self.island.processes or max(1, gpus), gpus
        return 1, 1, min(1, gpus) if group.device == "gpu" else 0

    def command(self, group: Group, step: JobStep) -> list[str]:
        """Return the command of one attempt at a step.

        With several nodes, each node runs it, with the rendezvous of torchrun in its environment.
        """
        head = [sys.executable, "-m", "atoll.apps.launch.supervisor", "--run", str(self.run), "--step", step.name]
        head += ["--retries", str(self.retries), *(["--images", str(step.images)] if step.images else []), "--"]
        nodes, processes, _ = self.shape(group)
        if nodes * processes == 1:
            return [*head, sys.executable, "-m", "atoll.cli", *step.arguments]
        shape = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *shape, "--nproc-per-node", str(processes)]
        return [*head, *torchrun, "-m", "atoll.cli", *step.arguments]


@dataclass
class Launcher(ABC):
    """The interface of all launchers."""

    settings: LaunchSettings
    foreground: ClassVar[bool] = False
    """Whether the jobs run only as long as the launching process."""

    @property
    def run_id(self) -> str:
        """Short name of the run, by which later launches find its jobs."""
        return hashlib.sha256(str(self.settings.run).encode()).hexdigest()[:10]

    @abstractmethod
    def active_steps(self, groups: Sequence[Group]) -> dict[str, str]:
        """Return the steps that are queued or running in this launcher, each with its submission."""

    @abstractmethod
    def show(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> str:
        """Return the text of everything that `submit` would submit."""

    @abstractmethod
    def submit(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> None:
        """Submit all steps of these groups. Each waits for the groups that it needs, including those in `active`."""

    def wait(self, groups: Sequence[Group]) -> None:
        """Return when no step of these groups is queued or running in this launcher."""
        while self.active_steps(groups):
            time.sleep(POLL_SECONDS)
