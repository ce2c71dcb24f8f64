"""Launcher for Ray: one task per step, owned by a small detached actor that outlives the command.

Later launches find the actor by its name and query the tasks that it has submitted. Ray starts a task when its
dependencies are done and a node has the resources, and restarts it elsewhere when the node or worker dies.
"""

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from atoll.apps.launch.launcher import NODE_VARIABLE, RETRY_CODE, SUBMISSION_VARIABLE, Launcher
from atoll.apps.launch.steps import Group
from atoll.core.errors import AtollError
from atoll.core.progress import say

if TYPE_CHECKING:
    from ray import ObjectRef

_NAMESPACE = "atoll"
_PAUSE = 1.0
"""Seconds between two attempts; short compared with the start of a job."""


@dataclass(frozen=True)
class RayTask:
    """One step in plain values, which Ray can serialize."""

    name: str
    group: str
    needs: tuple[str, ...]
    command: list[str]
    environment: dict[str, str]
    nodes: int
    bundle: dict[str, float]
    """Resources on each node, by their names in Ray."""


@dataclass
class Ray(Launcher):
    """Submits to a running Ray cluster: the local one of `ray start`, or that at $RAY_ADDRESS."""

    @cached_property
    def ray(self) -> Any:
        """The module `ray`, connected to the cluster."""
        return connected()

    def _owner(self, create: bool) -> Any:
        """Return the actor of this run; if it does not exist, create it or return None."""
        name = f"launch-{self.run_id}"
        if not create:
            try:
                return self.ray.get_actor(name, namespace=_NAMESPACE)
            except ValueError:
                return None
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        this_node = NodeAffinitySchedulingStrategy(self.ray.get_runtime_context().get_node_id(), soft=True)
        actor = self.ray.remote(TaskOwner).options(
            name=name,
            namespace=_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            scheduling_strategy=this_node,
        )
        return actor.remote()

    def active_steps(self, groups: Sequence[Group]) -> dict[str, str]:
        """Return the steps that have not ended, from the actor of the run."""
        names = {step.name for group in groups for step in group.steps}
        owner = self._owner(create=False)
        active: dict[str, str] = {} if owner is None else self.ray.get(owner.active.remote())
        return {name: submission for name, submission in active.items() if name in names}

    def show(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> str:
        """Return the tasks with their resources and commands."""
        del active
        lines = []
        for task in self.tasks(groups):
            after = f", after {', '.join(task.needs)}" if task.needs else ""
            lines.append(f"# {task.name}: {task.nodes} x {task.bundle}{after}")
            variables = " ".join(f"{key}={value}" for key, value in task.environment.items())
            lines.append(f"{variables} {shlex.join(task.command)}")
        return "\n".join(lines)

    def submit(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> None:
        """Submit the steps through the actor of the run, which has the references of those already active."""
        del active
        if self.settings.max_parallel:
            raise AtollError("--max-parallel is for local and slurm; on Ray the resources of the cluster decide")
        self.ray.get(self._owner(create=True).submit.remote(self.tasks(groups)))
        for group in groups:
            say(f"{group.name}: {len(group.steps)} tasks", file=sys.stderr)

    def tasks(self, groups: Sequence[Group]) -> list[RayTask]:
        """Return the steps as tasks."""
        island, tasks = self.settings.island, []
        for group in groups:
            nodes, processes, gpus = self.settings.shape(group)
            bundle = {"CPU": float(island.cores or 1), **island.resources}
            bundle |= {"GPU": float(gpus)} if gpus else {}
            bundle |= {"memory": island.memory_gb * 1024**3} if island.memory_gb else {}
            threads = max(1, (island.cores or 1) // processes)
            for step in group.steps:
                variables = {SUBMISSION_VARIABLE: f"ray-{uuid4().hex[:8]}", "OMP_NUM_THREADS": str(threads)}
                command = self.settings.command(group, step)
                tasks.append(RayTask(step.name, group.name, group.needs, command, variables, nodes, bundle))
        return tasks


class TaskOwner:
    """The actor of a run: owns its tasks and reports which have ended."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[RayTask, ObjectRef]] = {}

    def submit(self, tasks: Sequence[RayTask]) -> None:
        """Submit tasks. Ray starts each after its dependencies, and cancels it if one of them fails."""
        import ray

        for task in tasks:
            needs = [reference for other, reference in self._tasks.values() if other.group in task.needs]
            options = {"num_cpus": 0.0} if task.nodes > 1 else as_options(task.bundle)
            work = ray.remote(run_on_nodes if task.nodes > 1 else run_on_one_node)
            # max_retries=-1: Ray restarts a task after any number of lost nodes. Failures of the command itself are
            # counted by the supervisor.
            reference = work.options(**options, max_retries=-1, name=task.name).remote(task, *needs)
            self._tasks[task.name] = task, reference

    def active(self) -> dict[str, str]:
        """Return the steps that have not ended, each with its submission."""
        import ray

        references = [reference for _, reference in self._tasks.values()]
        _, waiting = ray.wait(references, num_returns=len(references), timeout=0) if references else ([], [])
        return {
            name: task.environment[SUBMISSION_VARIABLE]
            for name, (task, reference) in self._tasks.items()
            if reference in waiting
        }


def connected() -> Any:
    """Return the module `ray`, connected to the cluster."""
    try:
        import ray

        if not ray.is_initialized():
            ray.init(address="auto", namespace=_NAMESPACE, log_to_driver=False)
    except ImportError as error:
        raise AtollError("--on ray needs Ray: pip install 'atoll[ray]'") from error
    except ConnectionError as error:
        raise AtollError("no Ray cluster was found; start one with: ray start --head") from error
    return ray


def attempt(task: RayTask, extra: Mapping[str, str]) -> bool:
    """Run one attempt at a step; return whether the step is done. Raise an error if it failed permanently."""
    code = subprocess.run(task.command, env={**os.environ, **task.environment, **extra}, check=False).returncode
    # Of several nodes, the first one holds the lease and decides.
    if code > 0 and code != RETRY_CODE and extra.get(NODE_VARIABLE, "0") == "0":
        raise RuntimeError(f"{task.name} failed with code {code}")
    return code == 0


def run_on_one_node(task: RayTask, *needs: None) -> None:
    """Run a step on one node; the unused arguments make Ray wait for its dependencies."""
    del needs
    while not attempt(task, {}):
        time.sleep(_PAUSE)


def run_on_nodes(task: RayTask, *needs: None) -> None:
    """Run a step on several nodes: the same command on each, with the rendezvous of torchrun on the first."""
    del needs
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    while True:
        group = placement_group([task.bundle] * task.nodes, strategy="STRICT_SPREAD")
        try:
            ray.get(group.ready())
            strategies = [PlacementGroupSchedulingStrategy(group, number) for number in range(task.nodes)]
            options = as_options(task.bundle)
            endpoint = ray.get(ray.remote(free_endpoint).options(**options, scheduling_strategy=strategies[0]).remote())
            variables = {"PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_ID": uuid4().hex}
            parts = [
                ray.remote(attempt)
                .options(**options, scheduling_strategy=strategy, max_retries=0)
                .remote(task, {**variables, NODE_VARIABLE: str(number)})
                for number, strategy in enumerate(strategies)
            ]
            if ray.get(parts[0]):
                return
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError):
                raise
            say(f"{task.name}: a node was lost ({type(error).__name__}); starting again")
        finally:
            remove_placement_group(group)  # also kills the processes that still run on these nodes


def free_endpoint() -> str:
    """Return an address of this node with a free port, for the rendezvous of torchrun."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def as_options(bundle: Mapping[str, float]) -> dict[str, float | dict[str, float]]:
    """Return a bundle of resources as options of a Ray task."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    known = {named[key]: value for key, value in bundle.items() if key in named}
    return {**known, "resources": {key: value for key, value in bundle.items() if key not in named}}
