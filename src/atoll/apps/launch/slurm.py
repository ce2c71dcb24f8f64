"""Launcher for Slurm: one job array per group, submitted as a plain sbatch script.

`--print` shows these scripts completely. Each job runs its attempt with srun, because by default Slurm signals the
steps of srun, not the batch script, before it preempts or requeues a job. If the attempt must be repeated (exit code
75) or was killed by a signal, the script requeues its job.
"""

import hashlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.apps.launch.base import RETRY_CODE, SUBMISSION_VARIABLE, LaunchSettings, as_shell
from atoll.apps.launch.plan import Group
from atoll.core import layout
from atoll.core.errors import AtollError

# Each poll is one call of squeue, which loads the controller: not much faster than jobs can start or end.
_POLL_SECONDS = 2.0


@dataclass
class Slurm:
    """Submits with sbatch and finds its jobs with squeue; it keeps no state."""

    settings: LaunchSettings
    foreground: bool = False

    def job_name(self, group: Group) -> str:
        """Return the name of a group's job array, by which later launches find it."""
        run = hashlib.sha256(str(self.settings.run).encode()).hexdigest()[:10]
        return f"atoll-{run}-{group.name}"

    def active_steps(self, groups: Sequence[Group]) -> dict[str, str]:
        """Return the queued and running steps. The index in the job array is that of the step."""
        steps = {(self.job_name(group), str(step.index)): step.name for group in groups for step in group.steps}
        names = ",".join({name for name, _ in steps})
        found = {}
        for line in _slurm("squeue", "--noheader", "--array", f"--name={names}", "--format=%j|%K|%F").splitlines():
            name, index, job = line.strip().split("|")
            if (name, index) in steps:
                found[steps[name, index]] = job
        return found

    def show(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> str:
        """Return the scripts, with placeholders for the ids of jobs that are not submitted yet."""
        new = {group.name: f"<job of {group.name}>" for group in groups}
        return "\n".join(self.script(group, needed_jobs(group, active, new)) for group in groups)

    def submit(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> None:
        """Submit one job array per group, in order of dependency."""
        (self.settings.run / layout.LAUNCH_SLURM).mkdir(parents=True, exist_ok=True)
        new: dict[str, str] = {}
        for group in groups:
            script = self.script(group, needed_jobs(group, active, new))
            new[group.name] = _slurm("sbatch", "--parsable", stdin=script).strip().split(";")[0]
            print(f"{group.name}: {len(group.steps)} in job {new[group.name]}", file=sys.stderr, flush=True)

    def wait(self, groups: Sequence[Group]) -> None:
        """Wait until none of the steps is in the queue."""
        while self.active_steps(groups):
            time.sleep(_POLL_SECONDS)

    def script(self, group: Group, needs: Sequence[str]) -> str:
        """Return the sbatch script of a group."""
        return "\n".join([*self._header(group, needs), "", *self._body(group)]) + "\n"

    def _header(self, group: Group, needs: Sequence[str]) -> list[str]:
        settings, island = self.settings, self.settings.island
        limit = f"%{settings.max_parallel}" if settings.max_parallel else ""
        # TERM@120: two minutes before the time limit, training receives SIGTERM and saves a checkpoint.
        options = [
            f"--job-name={self.job_name(group)}",
            f"--array={','.join(str(step.index) for step in group.steps)}{limit}",
            f"--output={settings.run}/{layout.LAUNCH_SLURM}/{group.name}-%A_%a.out",
            "--open-mode=append",
            "--requeue",
            "--signal=TERM@120",
            f"--nodes={settings.nodes(group)}",
            "--ntasks-per-node=1",
        ]
        options += [f"--cpus-per-task={island.cores}"] if island.cores else []
        options += [f"--gpus-per-node={settings.gpus(group)}"] if settings.gpus(group) else []
        options += [f"--mem={int(island.memory_gb * 1024)}M"] if island.memory_gb else []
        options += [f"--time={int(island.hours * 60)}"] if island.hours else []
        options += [f"--dependency=afterok:{':'.join(needs)}", "--kill-on-invalid-dep=yes"] if needs else []
        return ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*options, *island.sbatch])]

    def _body(self, group: Group) -> list[str]:
        settings = self.settings
        lines = [*settings.island.setup, 'case "$SLURM_ARRAY_TASK_ID" in']
        for step in group.steps:
            lines.append(f"  {step.index}) command=({as_shell(settings.command(group, step))}) ;;")
        lines += [
            "esac",
            f'export {SUBMISSION_VARIABLE}="slurm-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"',
            f"cores=${{SLURM_CPUS_PER_TASK:-1}} processes={settings.processes(group)}",
            "export OMP_NUM_THREADS=$(( cores > processes ? cores / processes : 1 ))",
        ]
        if settings.nodes(group) > 1:
            # torchrun reads its options from PET_*. Ports 20000 to 29999 lie below the ephemeral range of Linux; the
            # job id makes a collision of two jobs on one node unlikely.
            lines += [
                'export PET_RDZV_ENDPOINT="$(hostname):$(( 20000 + SLURM_JOB_ID % 10000 ))" PET_RDZV_ID="$SLURM_JOB_ID"'
            ]
        return [
            *lines,
            'srun --kill-on-bad-exit=1 --cpus-per-task="$cores" "${command[@]}"',
            "code=$?",
            f"if [ $code -eq {RETRY_CODE} ] || [ $code -gt 128 ]; then",
            '  scontrol requeue "$SLURM_JOB_ID" && sleep 300  # until Slurm ends the job',
            "fi",
            "exit $code",
        ]


def needed_jobs(group: Group, active: Mapping[str, Sequence[str]], new: Mapping[str, str]) -> list[str]:
    """Return the ids of the jobs that a group depends on: those submitted now, and those already in the queue."""
    jobs = [new[need] for need in group.needs if need in new]
    jobs += [job for need in group.needs for job in active.get(need, ())]
    return list(dict.fromkeys(jobs))


def _slurm(*command: str, stdin: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise AtollError(f"{command[0]} is not installed; run this on a machine that can submit to Slurm")
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AtollError(f"{shlex.join(command)}: {result.stderr.strip() or f'code {result.returncode}'}")
    return result.stdout
