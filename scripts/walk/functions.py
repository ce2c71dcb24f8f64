"""Make a walk, the list of functions that ran, from the recorded calls and the source code."""

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from count import code_lines


class Function(NamedTuple):
    """A function of src/atoll: its file there, the line of its definition and its qualified name."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """Return module:name, which does not change when lines are added above."""
        return f"{self.file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}:{self.name}"


Call = tuple[Function, Function]
"""Caller and callee."""


@dataclass
class Walk:
    """The functions of a command in order of first call, the calls between them, and their lines of code."""

    functions: list[Function]
    calls: list[Call]
    lines: int


class Definition(NamedTuple):
    """The lines of a function in a file. The first line is that of its first decorator."""

    name: str
    first: int
    line: int
    last: int


def definitions(text: str) -> list[Definition]:
    """Return the functions of a Python file with their qualified names, outer ones first.

    Lambdas and generators are among them, for those that belong to no function.
    """
    found: list[Definition] = []

    def visit(node: ast.AST, scope: str) -> None:
        inner = scope
        if isinstance(node, ast.ClassDef):
            inner = f"{scope}{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            found.append(Definition(f"{scope}{node.name}", first, node.lineno, node.end_lineno or first))
            inner = f"{scope}{node.name}.<locals>."
        elif isinstance(node, ast.Lambda | ast.GeneratorExp):
            name = f"{scope}{'<lambda>' if isinstance(node, ast.Lambda) else '<genexpr>'}"
            found.append(Definition(name, node.lineno, node.lineno, node.end_lineno or node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse(text), "")
    return found


ANONYMOUS = re.compile(r"\.<locals>(\.<\w+>)+$")
"""Lambdas and comprehensions in a function: they count as that function."""


def find(line: int, name: str, *, among: Sequence[Definition]) -> Definition:
    """Return the definition of what ran: the innermost of its name at its line, or the lambda there."""
    here = [definition for definition in reversed(among) if definition.first <= line <= definition.last]
    plain = ANONYMOUS.sub("", name)
    same = [definition for definition in here if definition.name == plain]
    return (same or [definition for definition in here if definition.name.endswith(">")])[0]


def make_walk(recorded: Iterable[tuple[Sequence[Any] | None, Sequence[Any]]], package: Path) -> Walk:
    """Return the walk of the recorded calls, given as file, line and name of caller and callee.

    Lambdas and comprehensions count as the functions they are in, and every line of code is counted once. The first
    function has no caller.
    """
    texts: dict[str, str] = {}
    found: dict[str, list[Definition]] = {}
    lines: dict[str, set[int]] = {}

    def place(file: str, line: int, name: str) -> Function:
        if file not in texts:
            texts[file] = (package / file).read_text(encoding="utf-8")
            found[file] = definitions(texts[file])
        definition = find(line, name, among=found[file])
        lines.setdefault(file, set()).update(range(definition.first, definition.last + 1))
        return Function(file, definition.line, definition.name)

    placed = [(caller and place(*caller), place(*callee)) for caller, callee in recorded]
    calls = dict.fromkeys((caller, callee) for caller, callee in placed if caller and caller != callee)
    count = sum(len(lines[file] & code_lines(texts[file])) for file in lines)
    return Walk(list(dict.fromkeys(callee for _, callee in placed)), list(calls), count)
