"""The walks list what ran, in order, and find calls from an earlier package to a later one."""

import importlib.util
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

from walk.functions import Function, Walk, make_walk  # noqa: E402
from walk.record import Recorder  # noqa: E402

_spec = importlib.util.spec_from_file_location("walk_tool", SCRIPTS / "walk.py")
assert _spec is not None
assert _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

PACKAGES = ("core", "flow", "train")
SOLVE = Function("flow/solvers.py", 10, "solve")
VELOCITY = Function("train/task.py", 20, "Task.run.<locals>.velocity")
READ = Function("core/files.py", 30, "read")
LOAD = Function("__init__.py", 40, "load")

MODULE = '''"""A module."""
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Thread


def decorate(function):
    return function


@dataclass
class Result:
    """Its generated functions are not listed."""

    count: int = field(default_factory=lambda: 1)

    @property
    def double(self):
        """Twice of it."""

        # A comment and a blank line are no code.
        return 2 * self.count


def slow(number):
    time.sleep(0.02)
    return deep(number)


def fast(number):
    return number


def deep(number):
    return number


def unused():
    return 0


@decorate
def main():
    """Run."""
    thread = Thread(target=slow, args=(1,))
    thread.start()
    thread.join(0)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(job, 1) for job in (slow, fast)]
    numbers = [fast(number) for number in (generate(3) if jobs else ())]

    def nested():
        return sorted(numbers, key=lambda number: -number)

    return nested(), Result().double, thread.join()


def generate(count):
    yield from (number for number in range(count))
'''


def record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """Run `main` of the module in a package `flow`, and return its walk."""
    for owner, name in ((threading.Thread, "start"), (ThreadPoolExecutor, "submit")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undo the recorder's patch
    spec = importlib.util.spec_from_file_location("walked", folder / "flow" / "module.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "walked", module)
    spec.loader.exec_module(module)
    recorder = Recorder(folder)
    result = recorder.continued(module.main)()
    assert result == ([2, 1, 0], 2, None)
    return make_walk(recorder.edges(), folder)


def test_a_walk_has_each_function_once_in_the_order_of_first_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flow").mkdir()
    (tmp_path / "flow" / "module.py").write_text(MODULE)
    walk = record(tmp_path, monkeypatch)
    # `deep` runs late, in a thread that sleeps first, but its position is where the thread was started.
    names = ["main", "slow", "deep", "fast", "generate", "main.<locals>.nested", "Result.<lambda>", "Result.double"]
    assert [function.name for function in walk.functions] == names
    lines = MODULE.splitlines()
    assert all(name.split(".")[-1] in lines[line - 1] for _, line, name in walk.functions[:-2])
    calls = {(caller.name, callee.name) for caller, callee in walk.calls}
    assert calls == {("slow", "deep"), *(("main", name) for name in names[1:] if name != "deep")}
    # main with its decorator 11, slow 3, deep 2, fast 2, generate 2, the lambda's line, the property 3
    assert walk.lines == 11 + 3 + 2 + 2 + 2 + 1 + 3
    monkeypatch.undo()
    assert record(tmp_path, monkeypatch) == walk


def test_a_call_to_a_later_package_is_found() -> None:
    calls = [(VELOCITY, SOLVE), (SOLVE, VELOCITY), (SOLVE, READ), (LOAD, VELOCITY), (SOLVE, SOLVE)]
    assert tool.upward_calls(calls, PACKAGES) == [(SOLVE, VELOCITY)]
    assert tool.upward_calls([(VELOCITY, LOAD)], PACKAGES) == [(VELOCITY, LOAD)]


def test_only_the_callbacks_in_the_list_are_allowed() -> None:
    meant = tool.Callback("flow.solvers:solve", "train.task:*.velocity", "a solver integrates what it is given")
    other = tool.Callback("flow.solvers:solve", "train.task:Task.run", "never called")
    assert tool.split_callbacks([(SOLVE, VELOCITY), (READ, VELOCITY)], [meant, other]) == ([(READ, VELOCITY)], [other])


def test_the_order_of_the_packages_is_that_of_the_imports() -> None:
    assert tool.package_order()[0] == "core"
    assert tool.package_order()[-1] == "cli"


def test_the_document_gets_a_line_for_each_visit_to_a_file(tmp_path: Path) -> None:
    document = tmp_path / "walks.md"
    document.write_text(f"before\n{tool.MARKERS[0]}\nold\n{tool.MARKERS[1]}\nafter\n")
    again = Function("flow/solvers.py", 12, "step")
    walks = {"train": Walk([VELOCITY, SOLVE, again, READ], [], 99)}
    for _ in range(2):
        tool.write_document(walks, document)
    assert document.read_text().splitlines() == [
        "before",
        tool.MARKERS[0],
        "",
        "### atoll train: 4 functions, 99 lines",
        "",
        "```text",
        "train/task.py    Task.run.velocity:20",
        "flow/solvers.py  solve:10  step:12",
        "core/files.py    read:30",
        "```",
        "",
        tool.MARKERS[1],
        "after",
    ]


@pytest.mark.slow
def test_the_commands_call_only_downwards(capsys: pytest.CaptureFixture[str]) -> None:
    code = tool.main([])
    printed = capsys.readouterr().out
    assert code == 0, printed[printed.rindex("walk  ") :]
    assert "not in any walk" not in printed
    walks = dict(part.split(":", 1) for part in printed.split("\natoll ")[1:])
    assert list(walks) == ["prepare", "train", "sample", "join"]
    assert all(walk.splitlines()[2].split()[1:] == walks["join"].splitlines()[2].split()[1:] for walk in walks.values())
    assert " train_job\n" in walks["train"]
    assert " train_job\n" not in walks["join"]
