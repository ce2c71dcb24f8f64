"""On Ray: one task for each step, owned by a small actor that outlives the command.

The actor knows what it has submitted, so a later launch finds it by its name and asks. Ray starts a task when its needs
are met, on a node with its resources free, and again elsewhere when the node or the worker dies.
"""

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from atoll.core.errors import AtollError
from atoll.launch.base import AGAIN, NODE, TICKET, Setting, as_shell
from atoll.launch.plan import Group

if TYPE_CHECKING:
    from ray import ObjectRef

_NAMESPACE = "atoll"
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Task:
    """One step as Ray gets it: plain values only."""

    name: str
    group: str
    needs: tuple[str, ...]
    command: list[str]
    environment: dict[str, str]
    nodes: int
    bundle: dict[str, float]
    """Resources on each node, by Ray's names."""


@dataclass
class Ray:
    """Submits to a running Ray cluster: that of `ray start`, or at $RAY_ADDRESS."""

    setting: Setting
    stays: bool = False
    _ray: Any = field(default=None, repr=False)

    @property
    def ray(self) -> Any:
        """The library, connected."""
        if self._ray is None:
            try:
                import ray
            except ImportError as error:
                raise AtollError("--on ray needs Ray: pip install 'atoll[ray]'") from error
            if not ray.is_initialized():
                try:
                    ray.init(address="auto", namespace=_NAMESPACE, log_to_driver=False)
                except ConnectionError as error:
                    raise AtollError("no Ray cluster answers; start one with: ray start --head") from error
            self._ray = ray
        return self._ray

    def _supervisor(self, create: bool) -> Any:
        """The actor of this run, or None."""
        name = f"launch-{hashlib.sha256(str(self.setting.run).encode()).hexdigest()[:10]}"
        if not create:
            try:
                return self.ray.get_actor(name, namespace=_NAMESPACE)
            except ValueError:
                return None
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self.ray.get_runtime_context().get_node_id(), soft=True)
        actor = self.ray.remote(Supervisor).options(
            name=name,
            namespace=_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            scheduling_strategy=here,
        )
        return actor.remote()

    def observe(self, groups: Sequence[Group]) -> dict[str, str]:
        """What the run's actor has not seen the end of."""
        names = {step.name for group in groups for step in group.steps}
        supervisor = self._supervisor(create=False)
        live: dict[str, str] = {} if supervisor is None else self.ray.get(supervisor.live.remote())
        return {name: ticket for name, ticket in live.items() if name in names}

    def show(self, groups: Sequence[Group], live: Mapping[str, Sequence[str]]) -> str:
        """The tasks, with resources and commands."""
        del live
        lines = []
        for task in self.tasks(groups):
            after = f", after {', '.join(task.needs)}" if task.needs else ""
            lines.append(f"# {task.name}: {task.nodes} x {task.bundle}{after}")
            words = " ".join(f"{key}={value}" for key, value in task.environment.items())
            lines.append(f"{words} {as_shell(task.command)}")
        return "\n".join(lines)

    def submit(self, groups: Sequence[Group], live: Mapping[str, Sequence[str]]) -> None:
        """Hand the steps over to the run's actor, which knows those that are live already."""
        del live
        if self.setting.at_once:
            raise AtollError("--max-parallel is for local and slurm; on Ray the resources of the cluster decide")
        self.ray.get(self._supervisor(create=True).submit.remote(self.tasks(groups)))
        for group in groups:
            print(f"{group.name}: {len(group.steps)} tasks", file=sys.stderr, flush=True)

    def tasks(self, groups: Sequence[Group]) -> list[Task]:
        """The steps as tasks."""
        setting, island = self.setting, self.setting.island
        tasks = []
        for group in groups:
            bundle = {"CPU": float(island.cores or 1), **island.resources}
            bundle |= {"GPU": float(setting.gpus(group))} if setting.gpus(group) else {}
            bundle |= {"memory": island.memory_gb * 1024**3} if island.memory_gb else {}
            threads = max(1, (island.cores or 1) // setting.processes(group))
            for step in group.steps:
                told = {TICKET: f"ray-{uuid4().hex[:8]}", "OMP_NUM_THREADS": str(threads)}
                command = setting.command(group, step)
                tasks.append(Task(step.name, group.name, group.needs, command, told, setting.nodes(group), bundle))
        return tasks

    def wait(self, groups: Sequence[Group]) -> None:
        """Until the actor has seen the end of all of them."""
        while self.observe(groups):
            time.sleep(_POLL_SECONDS)


class Supervisor:
    """Runs as an actor: owns a run's tasks and knows which have ended."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._refs: dict[str, ObjectRef] = {}

    def submit(self, tasks: Sequence[Task]) -> None:
        """Submit tasks; Ray holds back those whose needs have not ended, and drops them if a need fails."""
        import ray

        for task in tasks:
            needs = [self._refs[name] for name, other in self._tasks.items() if other.group in task.needs]
            options = {"num_cpus": 0.0} if task.nodes > 1 else as_options(task.bundle)
            work = ray.remote(work_over_nodes if task.nodes > 1 else work_here)
            self._refs[task.name] = work.options(**options, max_retries=-1, name=task.name).remote(task, *needs)
            self._tasks[task.name] = task

    def live(self) -> dict[str, str]:
        """The steps that have not ended, each with its ticket."""
        import ray

        names = list(self._refs)
        _, waiting = ray.wait(list(self._refs.values()), num_returns=len(names), timeout=0) if names else ([], [])
        return {name: self._tasks[name].environment[TICKET] for name in names if self._refs[name] in waiting}


def work_here(task: Task, *needs: None) -> None:
    """A step on one node: attempts until one is the last."""
    del needs
    attempt(task, {})


def attempt(task: Task, more: Mapping[str, str]) -> None:
    """Make attempts at a step until one is the last."""
    while True:
        code = subprocess.run(task.command, env={**os.environ, **task.environment, **more}, check=False).returncode
        if code == 0:
            return
        if code != AGAIN and code > 0:
            raise RuntimeError(f"{task.name} failed with code {code}")
        time.sleep(_POLL_SECONDS)


def work_over_nodes(task: Task, *needs: None) -> None:
    """A step on several nodes: the same command on each of them, with torchrun's rendezvous on the first."""
    del needs
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    while True:
        group = placement_group([task.bundle] * task.nodes, strategy="STRICT_SPREAD")
        try:
            ray.get(group.ready())
            places = [PlacementGroupSchedulingStrategy(group, number) for number in range(task.nodes)]
            options = as_options(task.bundle)
            endpoint = ray.get(ray.remote(free_endpoint).options(**options, scheduling_strategy=places[0]).remote())
            told = {"PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_ID": uuid4().hex}
            once = ray.remote(one_attempt)
            parts = [
                once.options(**options, scheduling_strategy=place, max_retries=0).remote(
                    task, {**told, NODE: str(number)}
                )
                for number, place in enumerate(places)
            ]
            if ray.get(parts[0]):
                return
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError):
                raise
            print(f"{task.name}: a node was lost ({type(error).__name__}); once more", flush=True)
        finally:
            remove_placement_group(group)  # ends what still runs there


def one_attempt(task: Task, more: Mapping[str, str]) -> bool:
    """One attempt on one node of several; whether the step is done."""
    code = subprocess.run(task.command, env={**os.environ, **task.environment, **more}, check=False).returncode
    if code > 0 and code != AGAIN and more[NODE] == "0":
        raise RuntimeError(f"{task.name} failed with code {code}")
    return code == 0


def free_endpoint() -> str:
    """An address of this node where torchrun's processes can meet."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def as_options(bundle: Mapping[str, float]) -> dict[str, float | dict[str, float]]:
    """A bundle of resources as the options of a task."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    known = {named[key]: value for key, value in bundle.items() if key in named}
    return {**known, "resources": {key: value for key, value in bundle.items() if key not in named}}
