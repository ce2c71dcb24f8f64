"""`atoll launch`: submit what is missing and not under way, in the order of needs."""

import fcntl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.core import layout
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.islands.leases import list_leases
from atoll.islands.store import Store
from atoll.launch.base import Launcher, Setting, logs_of
from atoll.launch.plan import Group, Wish, missing_groups, with_flops
from atoll.launch.supervisor import is_over

Engine = Literal["local", "slurm", "ray"]


@dataclass(frozen=True)
class Launch:
    """What a launch found: what to submit, what is under way already, and what must wait for another launch."""

    launcher: Launcher
    groups: list[Group]
    here: dict[str, str]
    elsewhere: dict[str, str]

    @property
    def todo(self) -> list[Group]:
        """What to submit now."""
        under_way = {*self.here, *self.elsewhere}
        later = self.later
        found = []
        for group in self.groups:
            names = {step.name for step in group.steps} - under_way
            if names and group.name not in later:
                found.append(group.only(names))
        return found

    @property
    def later(self) -> dict[str, str]:
        """Groups that cannot be submitted yet, each with what it waits for: no scheduler waits for another one."""
        later: dict[str, str] = {}
        for group in self.groups:
            for need in self.groups:
                if need.name not in group.needs:
                    continue
                busy = [step.name for step in need.steps if step.name in self.elsewhere]
                if busy or need.name in later:
                    later[group.name] = ", ".join(busy) or later[need.name]
        return later

    @property
    def live(self) -> dict[str, list[str]]:
        """Tickets of what this launcher has under way, by group."""
        return {
            group.name: sorted({self.here[step.name] for step in group.steps if step.name in self.here})
            for group in self.groups
        }


def open_launcher(engine: Engine, setting: Setting) -> Launcher:
    """The launcher by its name."""
    if engine == "local":
        from atoll.launch.local import Local

        return Local(setting)
    if engine == "slurm":
        from atoll.launch.slurm import Slurm

        return Slurm(setting)
    from atoll.launch.ray import Ray

    return Ray(setting)


def look_around(launcher: Launcher, run: Path, config: Config, *, wish: Wish) -> Launch:
    """What is missing, and what of it is under way: in this launcher's queue, or under a lease that is held."""
    groups = missing_groups(run, config, wish)
    here = launcher.observe(groups)
    elsewhere = {
        job: lease_status.record.holder
        for job, lease_status in list_leases(Store.open(run)).items()
        if job in names_of(groups)
        and job not in here
        and lease_status.record.state == "held"
        and not lease_status.expired
        and not is_over(lease_status)
    }
    if launcher.stays:  # what another process of this machine has before it is nothing that this one could wait for
        here, elsewhere = {}, {**elsewhere, **here}
    return Launch(launcher, groups, here, elsewhere)


def show(launcher: Launcher, run: Path, config: Config, *, wish: Wish) -> str:
    """What a launch would submit now; without a scheduler in reach, what it would submit to an empty one."""
    try:
        found = look_around(launcher, run, config, wish=wish)
    except AtollError as error:
        print(f"{error}\nshown as if nothing were queued:", file=sys.stderr, flush=True)
        found = Launch(launcher, missing_groups(run, config, wish), {}, {})
    return launcher.show(found.todo, found.live)


def submit(launcher: Launcher, run: Path, config: Config, *, wish: Wish, wait: bool = False) -> Launch:
    """Submit what is missing; two launches at the same time do it one after the other.

    With `wait`, or if the jobs need this process, return when they have ended; raise if something is still missing.
    """
    Store.open(run).probe()
    with _alone(run):
        launch = look_around(launcher, run, config, wish=wish)
        if launch.todo:
            # A scheduler has an order of its own; only a launcher that starts the jobs itself can choose one.
            launcher.submit(with_flops(run, config, launch.todo) if launcher.stays else launch.todo, launch.live)
    for line in as_lines(launch):
        print(line, file=sys.stderr, flush=True)
    if not (wait or launcher.stays):
        return launch
    launcher.wait(launch.groups)
    submitted = {*names_of(launch.todo), *launch.here}
    if left := [name for name in names_of(missing_groups(run, config, wish)) if name in submitted]:
        raise AtollError(
            f"not finished: {', '.join(left)}; their logs are in {logs_of(run)}, the same command continues"
        )
    return launch


def as_lines(launch: Launch) -> list[str]:
    """For people: what was found."""
    lines = [f"{step}: under way already ({ticket})" for step, ticket in {**launch.elsewhere, **launch.here}.items()]
    lines += [f"{group}: waits for {what}; launch again when that is done" for group, what in launch.later.items()]
    return lines or ([] if launch.groups else ["nothing is missing"])


def as_dict(launch: Launch) -> dict[str, object]:
    """For programs: what was found, and what was submitted."""
    return {
        "submitted": names_of(launch.todo),
        "under_way": {**launch.elsewhere, **launch.here},
        "later": launch.later,
    }


def names_of(groups: Sequence[Group]) -> list[str]:
    """The steps of some groups."""
    return [step.name for group in groups for step in group.steps]


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    folder = run / layout.LAUNCH
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
