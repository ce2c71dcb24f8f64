"""Run command lines of one tree of Atoll, two at a time: python driver.py PLAN, with PYTHONPATH at the tree's src.

PLAN is a JSON file in the folder to work in: the tree, and phases of commands by name. The driver imports everything
once and forks for every command, so that each has a fresh process without the seconds that the imports take.
"""

import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import shlex
import sys
import traceback
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

LANES = 2
"""Commands at a time. Two cores are what continuous integration has."""
SHOWN_LINES = 8
"""The last lines of a failed command's output that are printed: the error and where it was raised."""


def import_everything(tree: Path) -> None:
    """Import all modules of Atoll, whatever their names, and check that they are the tree's."""
    import atoll

    assert Path(atoll.__file__).is_relative_to(tree), f"{atoll.__file__} is not in {tree}"
    for module in pkgutil.walk_packages(atoll.__path__, "atoll."):
        with suppress(ImportError):  # of an optional requirement; a command that needs it fails by itself
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def run_command(command: str | dict[str, str], log: Path) -> None:
    """Run one command line, or Python code, with its output in a file; the exit code is that of the process."""
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    code = 1
    try:
        if isinstance(command, dict):
            exec(command["python"], {})
            code = 0
        else:
            from atoll.cli import main

            code = main(shlex.split(command))
    except SystemExit as stop:  # wrong options; the message is printed
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_phase(phase: dict[str, str | dict[str, str]], logs: Path) -> list[str]:
    """Run all commands of a phase; return the names of those that failed."""
    fork = multiprocessing.get_context("fork")
    waiting = list(phase)
    running: dict[str, BaseProcess] = {}
    failed = []
    while waiting or running:
        while waiting and len(running) < LANES:
            name = waiting.pop(0)
            running[name] = fork.Process(target=run_command, args=(phase[name], logs / f"{name}.txt"))
            running[name].start()
        multiprocessing.connection.wait([process.sentinel for process in running.values()])
        for name in [name for name, process in running.items() if process.exitcode is not None]:
            failed += [name] if running.pop(name).exitcode else []
    return failed


def main() -> int:
    """Run the plan up to the first phase that fails."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import_everything(Path(plan["tree"]))
    logs = Path("logs")
    logs.mkdir()
    for phase in plan["phases"]:
        failed = run_phase(phase, logs)
        for name in failed:
            lines = (logs / f"{name}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            print(f"{name} failed: {phase[name]}", *lines[-SHOWN_LINES:], sep="\n    ", file=sys.stderr)
        if failed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
