"""`atoll launch`: submit all unfinished jobs that are not running yet, with their dependencies."""

import fcntl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.apps.launch.base import Launcher, LaunchSettings, logs_of
from atoll.apps.launch.plan import Group, LaunchRequest, missing_groups, with_flops
from atoll.apps.launch.supervisor import is_dead
from atoll.apps.share.lease_records import list_leases
from atoll.apps.share.store import Store
from atoll.core import layout
from atoll.core.config import Config
from atoll.core.errors import AtollError

Engine = Literal["local", "slurm", "ray"]


@dataclass(frozen=True)
class Launch:
    """The state of a run at launch: unfinished groups, and the steps that are running here or elsewhere."""

    launcher: Launcher
    groups: list[Group]
    active_here: dict[str, str]
    active_elsewhere: dict[str, str]

    @property
    def to_submit(self) -> list[Group]:
        """The groups to submit now."""
        running = {*self.active_here, *self.active_elsewhere}
        blocked = self.blocked
        found = []
        for group in self.groups:
            names = {step.name for step in group.steps} - running
            if names and group.name not in blocked:
                found.append(group.only(names))
        return found

    @property
    def blocked(self) -> dict[str, str]:
        """Groups that cannot be submitted yet, each with the steps it waits for.

        Their dependencies run under another launcher, and no scheduler can wait for the jobs of another one.
        """
        blocked: dict[str, str] = {}
        for group in self.groups:
            for need in self.groups:
                if need.name not in group.needs:
                    continue
                busy = [step.name for step in need.steps if step.name in self.active_elsewhere]
                if busy or need.name in blocked:
                    blocked[group.name] = ", ".join(busy) or blocked[need.name]
        return blocked

    @property
    def active(self) -> dict[str, list[str]]:
        """The submissions of this launcher that are queued or running, by group."""
        return {
            group.name: sorted({self.active_here[step.name] for step in group.steps if step.name in self.active_here})
            for group in self.groups
        }


def open_launcher(engine: Engine, settings: LaunchSettings) -> Launcher:
    """Return a launcher by name."""
    if engine == "local":
        from atoll.apps.launch.local import Local

        return Local(settings)
    if engine == "slurm":
        from atoll.apps.launch.slurm import Slurm

        return Slurm(settings)
    from atoll.apps.launch.ray import Ray

    return Ray(settings)


def inspect_run(launcher: Launcher, run: Path, config: Config, *, request: LaunchRequest) -> Launch:
    """Return the unfinished groups, and which steps are in the queue of this launcher or under a lease elsewhere."""
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
    return Launch(launcher, groups, active_here, active_elsewhere)


def show(launcher: Launcher, run: Path, config: Config, *, request: LaunchRequest) -> str:
    """Return the text of what a launch would submit; if the scheduler cannot be reached, assume an empty queue."""
    try:
        found = inspect_run(launcher, run, config, request=request)
    except AtollError as error:
        print(f"{error}\nassuming that nothing is queued:", file=sys.stderr, flush=True)
        found = Launch(launcher, missing_groups(run, config, request), {}, {})
    return launcher.show(found.to_submit, found.active)


def submit(launcher: Launcher, run: Path, config: Config, *, request: LaunchRequest, wait: bool = False) -> Launch:
    """Submit all unfinished jobs. A lock makes concurrent launches of one run submit one after another.

    With `wait`, or if the launcher runs in the foreground, return when the jobs have ended, and raise an error if one
    of them is not finished.
    """
    Store.open(run).probe()
    with _alone(run):
        launch = inspect_run(launcher, run, config, request=request)
        if launch.to_submit:
            # Slurm and Ray choose the order themselves; only a launcher that starts the processes can choose it.
            launcher.submit(
                with_flops(run, config, launch.to_submit) if launcher.foreground else launch.to_submit, launch.active
            )
    for line in as_lines(launch):
        print(line, file=sys.stderr, flush=True)
    if not (wait or launcher.foreground):
        return launch
    launcher.wait(launch.groups)
    submitted = {*names_of(launch.to_submit), *launch.active_here}
    if left := [name for name in names_of(missing_groups(run, config, request)) if name in submitted]:
        raise AtollError(
            f"not finished: {', '.join(left)}; their logs are in {logs_of(run)}; run the same command again to resume"
        )
    return launch


def as_lines(launch: Launch) -> list[str]:
    """Return lines for the terminal about running and blocked steps."""
    lines = [
        f"{step}: already running ({submission})"
        for step, submission in {**launch.active_elsewhere, **launch.active_here}.items()
    ]
    lines += [f"{group}: waits for {what}; launch again when it is done" for group, what in launch.blocked.items()]
    return lines or ([] if launch.groups else ["all requested jobs are done"])


def as_dict(launch: Launch) -> dict[str, object]:
    """Return submitted, running and blocked steps for JSON."""
    return {
        "submitted": names_of(launch.to_submit),
        "running": {**launch.active_elsewhere, **launch.active_here},
        "blocked": launch.blocked,
    }


def names_of(groups: Sequence[Group]) -> list[str]:
    """Return the names of the steps of some groups."""
    return [step.name for group in groups for step in group.steps]


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Hold the launch lock of a run."""
    folder = run / layout.LAUNCH
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
