"""`atoll launch`: submit all unfinished jobs that are not running yet, with their dependencies."""

import fcntl
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.apps.launch.command import Command
from atoll.apps.launch.launcher import SUBMISSION_VARIABLE, Launcher, LaunchSettings
from atoll.apps.launch.local import Local, visible_gpus
from atoll.apps.launch.ray import Ray
from atoll.apps.launch.slurm import Slurm
from atoll.apps.launch.steps import Group, LaunchRequest, missing_groups, with_flops
from atoll.apps.launch.supervisor import is_dead
from atoll.apps.share.lease_records import list_leases
from atoll.apps.share.store import Store
from atoll.core import layout
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.progress import say

LAUNCHERS: dict[str, Callable[..., Launcher]] = {"local": Local, "slurm": Slurm, "ray": Ray, "command": Command}


@dataclass(frozen=True)
class LaunchState:
    """The state of a run at launch: unfinished groups, and the steps that are running here or elsewhere."""

    groups: list[Group]
    active_here: dict[str, str]
    active_elsewhere: dict[str, str]

    @property
    def running(self) -> dict[str, str]:
        """All queued and running steps, each with its submission or holder."""
        return {**self.active_elsewhere, **self.active_here}

    @property
    def to_submit(self) -> list[Group]:
        """The groups to submit now."""
        found = []
        for group in self.groups:
            steps = tuple(step for step in group.steps if step.name not in self.running)
            if steps and group.name not in self.blocked:
                found.append(replace(group, steps=steps))
        return found

    @property
    def blocked(self) -> dict[str, str]:
        """Groups that cannot be submitted yet, each with the steps it waits for.

        Their dependencies run under another launcher, and no scheduler can wait for the jobs of another one.
        """
        blocked: dict[str, str] = {}
        for group in self.groups:
            for need in self.groups:
                busy = [step.name for step in need.steps if step.name in self.active_elsewhere]
                if need.name in group.needs and (busy or need.name in blocked):
                    blocked[group.name] = ", ".join(busy) or blocked[need.name]
        return blocked

    @property
    def active(self) -> dict[str, list[str]]:
        """The submissions of this launcher that are queued or running, by group."""
        return {
            group.name: sorted({self.active_here[step.name] for step in group.steps if step.name in self.active_here})
            for group in self.groups
        }


def inspect_run(launcher: Launcher, config: Config, request: LaunchRequest) -> LaunchState:
    """Return the unfinished groups, and which steps are in the queue of this launcher or under a lease elsewhere."""
    run = launcher.settings.run
    groups = missing_groups(run, config, request)
    active_here = launcher.active_steps(groups)
    active_elsewhere = {
        job: lease_status.record.holder
        for job, lease_status in list_leases(Store.open(run)).leases.items()
        if job in names_of(groups)
        and job not in active_here
        and lease_status.record.state == "held"
        and not lease_status.expired
        and not is_dead(lease_status)
    }
    # A foreground launcher cannot wait for steps of another process, so they count as running elsewhere.
    if launcher.foreground:
        active_here, active_elsewhere = {}, {**active_elsewhere, **active_here}
    return LaunchState(groups, active_here, active_elsewhere)


def show(launcher: Launcher, config: Config, request: LaunchRequest) -> str:
    """Return the text of what a launch would submit; if the scheduler cannot be reached, assume an empty queue."""
    try:
        found = inspect_run(launcher, config, request)
    except AtollError as error:
        say(f"{error}\nassuming that nothing is queued:", file=sys.stderr)
        found = LaunchState(missing_groups(launcher.settings.run, config, request), {}, {})
    return launcher.show(found.to_submit, found.active)


def submit(launcher: Launcher, config: Config, request: LaunchRequest, *, wait: bool = False) -> LaunchState:
    """Submit all unfinished jobs. A lock makes concurrent launches of one run submit one after another.

    With `wait`, or if the launcher runs in the foreground, return when the jobs have ended, and raise an error if one
    of them is not finished.
    """
    run = launcher.settings.run
    Store.open(run).probe()
    (run / layout.LAUNCH).mkdir(exist_ok=True)
    with (run / layout.LAUNCH / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launch = inspect_run(launcher, config, request)
        if groups := launch.to_submit:
            # Slurm and Ray choose the order themselves; only a launcher that starts the processes can choose it.
            launcher.submit(with_flops(run, config, groups) if launcher.foreground else groups, launch.active)
    # What is not submitted, and why
    lines = [f"{step}: already running ({submission})" for step, submission in launch.running.items()]
    lines += [f"{group}: waits for {what}; launch again when it is done" for group, what in launch.blocked.items()]
    for line in lines or ([] if launch.groups else ["all requested jobs are done"]):
        say(line, file=sys.stderr)
    if not (wait or launcher.foreground):
        return launch
    launcher.wait(launch.groups)
    submitted = {*names_of(groups), *launch.active_here}
    if left := [name for name in names_of(missing_groups(run, config, request)) if name in submitted]:
        raise AtollError(
            f"not finished: {', '.join(left)}; their logs are in {run / layout.LAUNCH_LOGS}; run the same command "
            "again to resume"
        )
    return launch


def prepare_on_all_gpus(run: Path, config: Config, overrides: Mapping[str, str]) -> None:
    """Divide the preparation among one process for each GPU, if there are several."""
    # A job of a launcher has the GPUs that the launcher chose.
    gpus = len(visible_gpus().names)
    if gpus < 2 or SUBMISSION_VARIABLE in os.environ:
        return
    run = run.resolve()
    one_each = config.island.model_copy(update={"gpus": 1, "nodes": 1, "processes": None})
    say(f"{gpus} GPUs: one worker on each; logs are in {run / layout.LAUNCH_LOGS}")
    request = LaunchRequest(("prepare",), prepare_workers=gpus, overrides=overrides)
    submit(Local(LaunchSettings(run, one_each, max_parallel=gpus)), config, request)


def names_of(groups: Sequence[Group]) -> list[str]:
    """Return the names of the steps of some groups."""
    return [step.name for group in groups for step in group.steps]
