"""Launcher for Slurm: one job array per group, submitted as a plain sbatch script.

`--print` shows these scripts completely. Each job runs its attempt with srun, because by default Slurm signals the
steps of srun, not the batch script, before it preempts or requeues a job. If the attempt must be repeated (exit code
75) or was killed by a signal, the script requeues its job.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.apps.launch.launcher import RETRY_CODE, SUBMISSION_VARIABLE, Launcher
from atoll.apps.launch.steps import Group
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.progress import say


@dataclass
class Slurm(Launcher):
    """Submits with sbatch and finds its jobs with squeue; it keeps no state."""

    def active_steps(self, groups: Sequence[Group]) -> dict[str, str]:
        """Return the queued and running steps. The index in the job array is that of the step."""
        steps = {(self._job_name(group), str(step.index)): step.name for group in groups for step in group.steps}
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
        return "\n".join(self._script(group, active, new) for group in groups)

    def submit(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> None:
        """Submit one job array per group, in order of dependency."""
        (self.settings.run / layout.LAUNCH_SLURM).mkdir(parents=True, exist_ok=True)
        new: dict[str, str] = {}
        for group in groups:
            script = self._script(group, active, new)
            new[group.name] = _slurm("sbatch", "--parsable", stdin=script).strip().split(";")[0]
            say(f"{group.name}: {len(group.steps)} in job {new[group.name]}", file=sys.stderr)

    def _job_name(self, group: Group) -> str:
        return f"atoll-{self.run_id}-{group.name}"

    def _script(self, group: Group, active: Mapping[str, Sequence[str]], new: Mapping[str, str]) -> str:
        """Return the sbatch script of a group, which waits for jobs that are active already or submitted now."""
        settings, island = self.settings, self.settings.island
        nodes, processes, gpus = settings.shape(group)
        # Header. TERM@120: two minutes before the time limit, training receives SIGTERM and saves a checkpoint.
        limit = f"%{settings.max_parallel}" if settings.max_parallel else ""
        options = [
            f"--job-name={self._job_name(group)}",
            f"--array={','.join(str(step.index) for step in group.steps)}{limit}",
            f"--output={settings.run}/{layout.LAUNCH_SLURM}/{group.name}-%A_%a.out",
            "--open-mode=append",
            "--requeue",
            "--signal=TERM@120",
            f"--nodes={nodes}",
            "--ntasks-per-node=1",
        ]
        options += [f"--cpus-per-task={island.cores}"] if island.cores else []
        options += [f"--gpus-per-node={gpus}"] if gpus else []
        options += [f"--mem={int(island.memory_gb * 1024)}M"] if island.memory_gb else []
        options += [f"--time={int(island.hours * 60)}"] if island.hours else []
        needs = [new[need] for need in group.needs if need in new]
        needs += [job for need in group.needs for job in active.get(need, ())]
        if needs:
            options += [f"--dependency=afterok:{':'.join(dict.fromkeys(needs))}", "--kill-on-invalid-dep=yes"]
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*options, *island.sbatch]), ""]
        # Command of each array index, and its environment
        lines += [*island.setup, 'case "$SLURM_ARRAY_TASK_ID" in']
        lines += [f"  {step.index}) command=({shlex.join(settings.command(group, step))}) ;;" for step in group.steps]
        lines += [
            "esac",
            f'export {SUBMISSION_VARIABLE}="slurm-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"',
            f"cores=${{SLURM_CPUS_PER_TASK:-1}} processes={processes}",
            "export OMP_NUM_THREADS=$(( cores > processes ? cores / processes : 1 ))",
        ]
        if nodes > 1:
            # torchrun reads its options from PET_*. Ports 20000 to 29999 lie below the ephemeral range of Linux; the
            # job id makes a collision of two jobs on one node unlikely.
            lines += [
                'export PET_RDZV_ENDPOINT="$(hostname):$(( 20000 + SLURM_JOB_ID % 10000 ))" PET_RDZV_ID="$SLURM_JOB_ID"'
            ]
        # The attempt
        lines += [
            'srun --kill-on-bad-exit=1 --cpus-per-task="$cores" "${command[@]}"',
            "code=$?",
            f"if [ $code -eq {RETRY_CODE} ] || [ $code -gt 128 ]; then",
            '  scontrol requeue "$SLURM_JOB_ID" && sleep 300  # until Slurm ends the job',
            "fi",
            "exit $code",
        ]
        return "\n".join(lines) + "\n"


def _slurm(*command: str, stdin: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise AtollError(f"{command[0]} is not installed; run this on a machine that can submit to Slurm")
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AtollError(f"{shlex.join(command)}: {result.stderr.strip() or f'code {result.returncode}'}")
    return result.stdout
