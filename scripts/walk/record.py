"""Record the calls in command lines of one tree of Atoll: python -m walk.record PLAN.

PYTHONPATH holds the tree's src and the folder of the scripts. PLAN is a JSON file in the folder to work in: the tree,
and the name and command line of each walk. A command without a name only prepares the others. The calls of NAME are
written to NAME.json.
"""

import gc
import inspect
import json
import multiprocessing
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from golden.driver import import_everything
from walk.functions import Function

Edge = tuple[Function | None, Function]
"""Caller and callee; nothing of src/atoll calls the first function."""
TRAINING = ("train_job", "run_job")
"""The function before which `join` ends: its names here and at the golden commit."""
LOG = Path("log.txt")
SHOWN_LINES = 12
"""The last lines of a failed command's output that are printed: the error and where it was raised."""


@dataclass
class Task:
    """One sequence of calls in one thread: the command itself, a thread, or a job of a thread pool.

    Its position is where it was started: the positions of the enclosing tasks and the number of the start in the
    innermost of them. So the order of calls does not depend on the speed of threads.
    """

    position: tuple[int, ...] = ()
    caller: Function | None = None
    """The function that started it."""
    calls: dict[Edge, int] = field(default_factory=dict)
    """The number of the first call."""
    count: int = 0

    def number(self) -> int:
        """Return the next number."""
        self.count += 1
        return self.count


class Recorder:
    """The calls between functions below a folder, in all threads that start after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}{os.sep}"
        self.tasks: list[Task] = []
        self.futures: list[Future[Any]] = []
        self.on = True
        self.local = threading.local()
        self._follow_threads()

    def _follow_threads(self) -> None:
        """Make threads and jobs of thread pools continue the task that starts them."""
        start, submit = threading.Thread.start, ThreadPoolExecutor.submit

        def start_followed(thread: threading.Thread) -> None:
            thread.run = self.continued(thread.run)  # type: ignore[method-assign]
            start(thread)

        def submit_followed(
            pool: ThreadPoolExecutor, job: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Future[Any]:
            self.futures.append(submit(pool, self.continued(job), *args, **kwargs))
            return self.futures[-1]

        threading.Thread.start = start_followed  # type: ignore[assignment,method-assign]
        ThreadPoolExecutor.submit = submit_followed  # type: ignore[assignment,method-assign]

    def continued(self, job: Callable[..., Any]) -> Callable[..., Any]:
        """Return the job as a separate task, positioned where this is called."""
        outer: Task | None = getattr(self.local, "task", None)
        task = Task()
        if outer is not None:
            task = Task((*outer.position, outer.number()), self._nearest(sys._getframe(1)) or outer.caller)
        self.tasks.append(task)

        def run(*args: Any, **kwargs: Any) -> Any:
            before = getattr(self.local, "task", None)
            self.local.task = task
            sys.setprofile(self._profile)
            try:
                return job(*args, **kwargs)
            finally:
                sys.setprofile(self._profile if before else None)
                self.local.task = before

        return run

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self.on and (callee := self._function(frame)):
            task: Task = self.local.task
            edge = (self._nearest(frame.f_back) or task.caller, callee)
            if edge not in task.calls:
                task.calls[edge] = task.number()

    def _nearest(self, frame: FrameType | None) -> Function | None:
        """Return the innermost function of the folder on a stack."""
        while frame is not None:
            if found := self._function(frame):
                return found
            frame = frame.f_back
        return None

    def _function(self, frame: FrameType) -> Function | None:
        code = frame.f_code
        # Bodies of modules and classes are not functions: their variables are not optimized.
        if not code.co_filename.startswith(self.folder) or not code.co_flags & inspect.CO_OPTIMIZED:
            return None
        return Function(code.co_filename.removeprefix(self.folder), code.co_firstlineno, code.co_qualname)

    def edges(self) -> list[Edge]:
        """Return the distinct calls in their order."""
        first: dict[Edge, tuple[int, ...]] = {}
        for task in self.tasks:
            for edge, number in dict(task.calls).items():
                position = (*task.position, number)
                first[edge] = min(position, first.get(edge, position))
        return sorted(first, key=first.__getitem__)


def trace(command: list[str], package: Path, *, until_training: bool) -> list[Edge]:
    """Run a command line of Atoll and return the calls between its functions."""
    from atoll.cli import main

    gc.disable()  # otherwise finalizers run at any moment
    recorder = Recorder(package)
    if until_training:

        def end(*_: object, **__: object) -> None:
            recorder.on = False
            raise SystemExit(0)

        replace_training(end)
    try:
        if code := recorder.continued(main)(command):
            raise RuntimeError(f"exit code {code}")
    except SystemExit as stop:
        if stop.code:
            raise
    if until_training and recorder.on:
        raise RuntimeError(f"{TRAINING[0]} was not called")
    if recorder.on:
        wait(recorder.futures)
        recorder.on = False
    return recorder.edges()


def replace_training(end: Callable[..., None]) -> None:
    """Replace the function that trains, in all modules that have it."""
    for name, module in list(sys.modules.items()):
        for training in TRAINING:
            if name.startswith("atoll.") and hasattr(module, training):
                setattr(module, training, end)


def run_in_process(name: str, command: str, package: Path) -> None:
    """Run one command in this process, which ends with it; write its calls to NAME.json."""
    with LOG.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    code = 1
    try:
        edges = trace(shlex.split(command), package, until_training=name == "join")
        if name:
            Path(f"{name}.json").write_text(json.dumps(edges), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """Run the plan up to the first command that fails.

    All modules are imported first, so that imports are not part of a walk. Each command runs in a fork.
    """
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tree = Path(plan["tree"])
    import_everything(tree)
    for name, command in plan["commands"]:
        process = multiprocessing.get_context("fork").Process(
            target=run_in_process, args=(name, command, tree / "src" / "atoll")
        )
        process.start()
        process.join()
        if process.exitcode:
            output = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
            print(f"walk: atoll {command} failed in {tree}", *output, sep="\n    ", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
