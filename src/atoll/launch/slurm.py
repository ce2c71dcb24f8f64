"""On Slurm: one array of jobs for each group, as plain sbatch scripts.

A script is all that is submitted, so `--print` shows everything. Each job runs its attempt as a step of srun, because
that is what Slurm signals before it preempts or requeues a job in its default configuration. An attempt that asks to be
made again, or that died by a signal, puts its job back into the queue.
"""

import hashlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.launch.base import AGAIN, TICKET, Setting, as_shell
from atoll.launch.plan import Group

_POLL_SECONDS = 2.0


@dataclass
class Slurm:
    """Submits with sbatch and asks squeue; keeps no record of its own."""

    setting: Setting
    stays: bool = False

    def job_name(self, group: Group) -> str:
        """The name by which a later launch knows a group's jobs again."""
        run = hashlib.sha256(str(self.setting.run).encode()).hexdigest()[:10]
        return f"atoll-{run}-{group.name}"

    def observe(self, groups: Sequence[Group]) -> dict[str, str]:
        """The steps in the queue; the number of an array's job is that of its step."""
        steps = {(self.job_name(group), str(step.index)): step.name for group in groups for step in group.steps}
        names = ",".join({name for name, _ in steps})
        found = {}
        for line in _slurm("squeue", "--noheader", "--array", f"--name={names}", "--format=%j|%K|%F").splitlines():
            name, index, job = line.strip().split("|")
            if (name, index) in steps:
                found[steps[name, index]] = job
        return found

    def show(self, groups: Sequence[Group], live: Mapping[str, Sequence[str]]) -> str:
        """The scripts; the numbers of jobs that are not submitted yet are left open."""
        new = {group.name: f"<job of {group.name}>" for group in groups}
        return "\n".join(self.script(group, needed_jobs(group, live, new)) for group in groups)

    def submit(self, groups: Sequence[Group], live: Mapping[str, Sequence[str]]) -> None:
        """One sbatch for each group, in order."""
        (self.setting.run / layout.LAUNCH_SLURM).mkdir(parents=True, exist_ok=True)
        new: dict[str, str] = {}
        for group in groups:
            script = self.script(group, needed_jobs(group, live, new))
            new[group.name] = _slurm("sbatch", "--parsable", given=script).strip().split(";")[0]
            print(f"{group.name}: {len(group.steps)} in job {new[group.name]}", file=sys.stderr, flush=True)

    def wait(self, groups: Sequence[Group]) -> None:
        """Until none of them is in the queue."""
        while self.observe(groups):
            time.sleep(_POLL_SECONDS)

    def script(self, group: Group, needs: Sequence[str]) -> str:
        """The whole script of a group."""
        return "\n".join([*self._header(group, needs), "", *self._body(group)]) + "\n"

    def _header(self, group: Group, needs: Sequence[str]) -> list[str]:
        setting, island = self.setting, self.setting.island
        limit = f"%{setting.at_once}" if setting.at_once else ""
        options = [
            f"--job-name={self.job_name(group)}",
            f"--array={','.join(str(step.index) for step in group.steps)}{limit}",
            f"--output={setting.run}/launch/slurm/{group.name}-%A_%a.out",
            "--open-mode=append",
            "--requeue",
            "--signal=TERM@120",
            f"--nodes={setting.nodes(group)}",
            "--ntasks-per-node=1",
        ]
        options += [f"--cpus-per-task={island.cores}"] if island.cores else []
        options += [f"--gpus-per-node={setting.gpus(group)}"] if setting.gpus(group) else []
        options += [f"--mem={int(island.memory_gb * 1024)}M"] if island.memory_gb else []
        options += [f"--time={int(island.hours * 60)}"] if island.hours else []
        options += [f"--dependency=afterok:{':'.join(needs)}", "--kill-on-invalid-dep=yes"] if needs else []
        return ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*options, *island.sbatch])]

    def _body(self, group: Group) -> list[str]:
        setting = self.setting
        lines = [*setting.island.setup, 'case "$SLURM_ARRAY_TASK_ID" in']
        for step in group.steps:
            lines.append(f"  {step.index}) command=({as_shell(setting.command(group, step))}) ;;")
        lines += [
            "esac",
            f'export {TICKET}="slurm-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"',
            f"cores=${{SLURM_CPUS_PER_TASK:-1}} processes={setting.processes(group)}",
            "export OMP_NUM_THREADS=$(( cores > processes ? cores / processes : 1 ))",
        ]
        if setting.nodes(group) > 1:
            lines += [
                'export PET_RDZV_ENDPOINT="$(hostname):$(( 20000 + SLURM_JOB_ID % 10000 ))" PET_RDZV_ID="$SLURM_JOB_ID"'
            ]
        return [
            *lines,
            'srun --kill-on-bad-exit=1 --cpus-per-task="$cores" "${command[@]}"',
            "code=$?",
            f"if [ $code -eq {AGAIN} ] || [ $code -gt 128 ]; then",
            '  scontrol requeue "$SLURM_JOB_ID" && sleep 300  # until Slurm takes the job away',
            "fi",
            "exit $code",
        ]


def needed_jobs(group: Group, live: Mapping[str, Sequence[str]], new: Mapping[str, str]) -> list[str]:
    """The jobs that a group waits for: those submitted now, and those of its needs that are in the queue already."""
    jobs = [new[need] for need in group.needs if need in new]
    jobs += [job for need in group.needs for job in live.get(need, ())]
    return list(dict.fromkeys(jobs))


def _slurm(*command: str, given: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise AtollError(f"{command[0]} is not here; run this on a machine that can submit to Slurm")
    answer = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise AtollError(f"{shlex.join(command)}: {answer.stderr.strip() or f'code {answer.returncode}'}")
    return answer.stdout
