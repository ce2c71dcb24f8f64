"""The code of a pipeline in one file: what some definitions of this package need, and nothing else.

    bundle(["atoll.apps.models.pipeline:AtollPipeline"], omit=[], replace={})

Every top-level definition is an entity, named `module:name`. From the roots on, `_Resolver` finds the entities that a
definition refers to, through imports, re-exports and attributes of modules (`flow.step`). The entities that are reached
are written in dependency order into one namespace. Two of one name get the names of their modules as prefixes.
"""

import ast
import builtins
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from atoll.core.errors import AtollError

PACKAGE = __name__.partition(".")[0]
Entity = tuple[str, str]
"""Module and name. The name of an external import is its statement, and its module is empty."""


def bundle(roots: Iterable[str], *, omit: Collection[str], replace: Mapping[str, str]) -> str:
    """Return the source of the roots with all that they need.

    `omit` names methods to leave out (`module:Class.method`); `replace` has other sources for some definitions.
    """
    changes = {tuple(name.split(":")): text for name, text in replace.items()}
    names: dict[Entity, str] = {}
    found: dict[Entity, tuple[list[ast.stmt], set[Entity]]] = {}
    todo: list[Entity] = [_resolve(*root.split(":")) for root in roots]
    while todo:
        entity = todo.pop()
        if entity in found:
            continue
        statements = _definition(entity, omit, changes.get(entity))
        resolver = _Resolver(entity[0], names)
        found[entity] = ([resolver.visit(statement) for statement in statements], resolver.found)
        todo += resolver.found
    # The first visit finds the entities, the second writes their final names.
    _name(names, found)
    graph = {module: set[str]() for module, _ in found if module}
    for (module, _), (_, needed) in found.items():
        if module:
            graph[module] |= {other for other, _ in needed if other and other != module}
    lines = sorted({entity[1] for entity in found if not entity[0]}, key=lambda text: (text.startswith("from"), text))
    lines = [line if names[("", line)] == _alias(line) else _renamed(line, names[("", line)]) for line in lines]
    for module in TopologicalSorter(graph).static_order():
        lines.append(f"\n# {module}")
        for name in [name for name in _order(module) if (module, name) in found]:
            for statement in _definition((module, name), omit, changes.get((module, name))):
                written = _Resolver(module, names).visit(statement)
                space = "\n" if isinstance(written, ast.ClassDef | ast.FunctionDef) else ""
                lines.append(space + ast.unparse(ast.fix_missing_locations(written)))
    return "\n".join(lines) + "\n"


def _name(names: dict[Entity, str], found: Iterable[Entity]) -> None:
    """Give every entity a name that no other one has, and that is no local variable of a function that refers to it."""
    local = {
        name
        for module in {module for module, _ in found if module}
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        for name in _bound(node)
    }
    wanted = {entity: entity[1] if entity[0] else _alias(entity[1]) for entity in found}
    taken = list(wanted.values())
    for (module, text), name in wanted.items():
        unique = taken.count(name) == 1 and name not in local
        source = module.removeprefix(f"{PACKAGE}.") or text.removeprefix("from ").partition(" import ")[0]
        prefix = source.replace(".", "_")
        names[(module, text)] = name if unique or (not module and taken.count(name) == 1) else f"{prefix}__{name}"


@cache
def _tree(module: str) -> ast.Module:
    found = importlib.util.find_spec(module)
    assert found is not None, module
    assert found.origin is not None, module
    return ast.parse(Path(found.origin).read_text(encoding="utf-8"))


@cache
def _order(module: str) -> dict[str, list[ast.stmt]]:
    """Return the definitions of a module by name, in order, each with the docstring below it."""
    definitions: dict[str, list[ast.stmt]] = {}
    last = ""
    for statement in _tree(module).body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            last = statement.name
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            parts = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            last = parts[0].id
            for part in parts[1:]:  # a, b = …
                definitions[part.id] = definitions.setdefault(last, [])
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and last):
            continue
        definitions.setdefault(last, []).append(statement)
    return definitions


@cache
def _imports(module: str) -> dict[str, Entity]:
    """Return what the imports at the top of a module bind."""
    bound: dict[str, Entity] = {}
    for statement in _tree(module).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            bound |= _bindings(statement)
    return bound


def _bindings(statement: ast.Import | ast.ImportFrom) -> dict[str, Entity]:
    bound: dict[str, Entity] = {}
    for alias in statement.names:
        own = alias.asname or (alias.name if isinstance(statement, ast.ImportFrom) else alias.name.split(".")[0])
        if isinstance(statement, ast.ImportFrom) and f"{statement.module}.".startswith(f"{PACKAGE}."):
            bound[own] = (str(statement.module), alias.name)
        else:
            single = ast.ImportFrom(statement.module, [alias], 0) if isinstance(statement, ast.ImportFrom) else None
            bound[own] = ("", ast.unparse(single or ast.Import([alias])))
    return bound


@cache
def _resolve(module: str, name: str) -> Entity:
    """Return the entity of a name in a module, through re-exports; for a module of the package, (its name, "")."""
    if not module or name in _order(module):
        return module, name
    if name in _imports(module):
        return _resolve(*_imports(module)[name])
    if importlib.util.find_spec(f"{module}.{name}") is not None:
        return f"{module}.{name}", ""
    raise AtollError(f"{module} has no {name}")


def _definition(entity: Entity, omit: Collection[str], replacement: str | None) -> list[ast.stmt]:
    """Return the statements of an entity, new for each call; none for an external import."""
    module, name = entity
    if not module:
        return []
    if replacement is not None:
        return ast.parse(replacement).body
    copied = ast.parse(ast.unparse(ast.Module(_order(module)[name], [])))
    for statement in copied.body:
        if isinstance(statement, ast.ClassDef):
            kept = [part for part in statement.body if f"{module}:{name}.{getattr(part, 'name', '')}" not in omit]
            statement.body = kept or [ast.Pass()]
    return copied.body


def _alias(line: str) -> str:
    return line.rpartition(" as ")[2] if " as " in line else line.rpartition("import ")[2].split(".")[0]


def _renamed(line: str, name: str) -> str:
    return f"{line.partition(' as ')[0]} as {name}"


def _bound(function: ast.AST) -> set[str]:
    """Return the names that a function, a lambda or a comprehension binds itself."""
    bound: set[str] = set()
    todo = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {name for name, (module, _) in _bindings(node).items() if not module}
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            bound |= {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
        elif not isinstance(node, ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return bound


class _Resolver(ast.NodeTransformer):
    """Finds the entities that a statement refers to, and writes their names once these are given."""

    def __init__(self, module: str, names: Mapping[Entity, str]) -> None:
        self.module, self.names = module, names
        self.found: set[Entity] = set()
        self.scopes: list[tuple[set[str], dict[str, Entity], bool]] = []
        """Names that are bound, what is imported, and whether the scopes inside see them: they do not see a class."""

    def _entity(self, name: str) -> Entity | None:
        """Return the entity of a name in the current scope; None for a local or built-in one."""
        for depth, (bound, imported, seen) in enumerate(reversed(self.scopes)):
            if depth and not seen:
                continue
            if name in imported:
                return _resolve(*imported[name])
            if name in bound:
                return None
        if name in _order(self.module) or name in _imports(self.module):
            return _resolve(self.module, name)
        if not hasattr(builtins, name) and not name.startswith("__"):
            raise AtollError(f"{self.module}: {name} is not defined")
        return None

    def _use(self, entity: Entity, node: ast.expr) -> ast.expr:
        self.found.add(entity)
        return ast.Name(self.names.get(entity, "_"), getattr(node, "ctx", ast.Load()))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if (entity := self._entity(node.id)) is None:
            return node
        if not entity[1]:
            raise AtollError(f"{self.module}: the module {entity[0]} is used as a value")
        return self._use(entity, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and (entity := self._entity(node.value.id)) and not entity[1]:
            return self._use(_resolve(entity[0], node.attr), node)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        # The annotations of the command line, Annotated[T, arg(…)], become T.
        name, parts = getattr(node.value, "id", ""), getattr(node.slice, "elts", [])
        if name == "Annotated" and any(getattr(getattr(part, "func", None), "id", "") == "arg" for part in parts):
            return self.visit(parts[0])  # type: ignore[no-any-return]
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if not f"{node.module}.".startswith(f"{PACKAGE}."):
            return node
        self.scopes[-1][1].update(_bindings(node))  # from here on, the names are those of the bundle
        return ast.Pass()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Decorators, defaults and annotations are evaluated in the scope around the function.
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        node.args = self.visit(node.args)
        node.returns = self.visit(node.returns) if node.returns else None
        self.scopes.append((_bound(ast.Module(node.body, [])) | _bound(node.args), {}, True))
        node.body = [self.visit(part) for part in node.body]
        self.scopes.pop()
        if not self.scopes and self.module:
            node.name = self.names.get((self.module, node.name), node.name)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        node.bases = [self.visit(part) for part in node.bases]
        node.keywords = [self.visit(part) for part in node.keywords]
        self.scopes.append((_bound(ast.Module(node.body, [])), {}, False))
        node.body = [self.visit(part) for part in node.body]
        self.scopes.pop()
        if not self.scopes:
            node.name = self.names.get((self.module, node.name), node.name)
        return node

    def _scoped(self, node: ast.AST) -> ast.AST:
        self.scopes.append((_bound(node), {}, True))
        node = self.generic_visit(node)
        self.scopes.pop()
        return node

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _scoped
