"""The shape of the code: which package may import which, and what must never get in."""

import ast
import graphlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import atoll

PACKAGE = Path(atoll.__file__).parent
ROOT = PACKAGE.parent.parent
METHOD = ("core", "verify", "flow", "nets", "encoders", "data", "experts", "ensemble", "train")
APPLICATIONS = ("models", "evaluate", "report", "share", "launch", "studio")
PACKAGES = (*METHOD, "apps", *(f"apps.{name}" for name in APPLICATIONS), "api", "cli", "__main__")
"""In dependency order: a package imports only from those before it."""
RUN_PATH = re.compile(
    r"^(experts/|data/|.*/final\b|.*/checkpoints\b|.*\bmetrics\.jsonl|atoll\.yaml|policy\.json|manifest\.json|grids\b|"
    r"evaluation/|launch/|report\.html)|experts/\["
)
"""String constants that spell a path of a run. Only core/layout.py may have them; with a space in it, it is prose."""

Check = Callable[[Path], list[str]]


def modules(package: Path) -> dict[str, ast.Module]:
    """Return the syntax tree of every module by its dotted name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imports(package: Path) -> dict[str, set[str]]:
    """Return the modules of Atoll that each module imports: at the top, inside functions and for type checking."""
    trees, found = modules(package), {}
    for name, tree in trees.items():
        wanted: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted |= {full if full in trees else node.module for full in inside}
        found[name] = {other for other in wanted if other.split(".")[0] == "atoll"} - {name}
    return found


def package_of(module: str) -> str:
    """Return the package of a module: `core` for atoll.core.errors, `apps.share` for atoll.apps.share.leases."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["apps"] else 1])


def package_order(package: Path) -> list[str]:
    """Find imports of a later package, and imports of the facade `atoll`."""
    wrong = []
    for name, wanted in imports(package).items():
        for other in sorted(wanted) if name != "atoll" else ():
            own, place = package_of(name), package_of(other)
            if place not in PACKAGES or own not in PACKAGES or PACKAGES.index(place) > PACKAGES.index(own):
                wrong.append(f"{name} imports {other}")
    return wrong


def module_cycles(package: Path) -> list[str]:
    """Find a cycle of imports between modules."""
    graph = imports(package)
    del graph["atoll"]  # the facade; `package_order` shows that nothing imports it
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def path_literals(package: Path) -> list[str]:
    """Find paths of a run that are spelled outside core/layout.py."""
    return [
        f"{name}:{node.lineno} {node.value!r}"
        for name, tree in modules(package).items()
        if name != "atoll.core.layout"
        for node in constants(tree)
        if isinstance(node.value, str) and RUN_PATH.search(node.value) and " " not in node.value
    ]


def constants(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the constants of a module that are not docstrings."""
    documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in documentation)


def files_in_properties(package: Path) -> list[str]:
    """Find properties that open files: a reader does not expect an attribute to read a disk."""
    wrong = []
    for name, tree in modules(package).items():
        for node in ast.walk(tree):
            decorators = getattr(node, "decorator_list", [])
            if any(getattr(one, "id", None) in ("property", "cached_property") for one in decorators):
                calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
                named = [getattr(call, "attr", getattr(call, "id", "")) for call in calls]
                opens = [call for call in named if re.match(r"_?(open|read|load|manifest|r?glob|iterdir)", call)]
                wrong += [f"{name}:{node.lineno} {node.name} calls {call}" for call in opens]
    return wrong


CHECKS: list[Check] = [package_order, module_cycles, path_literals, files_in_properties]


@pytest.mark.parametrize("check", CHECKS)
def test_the_code_has_its_shape(check: Check) -> None:
    assert check(PACKAGE) == []


def test_the_command_line_files_import_nothing_heavy_at_the_top() -> None:
    files = [
        *(PACKAGE / "cli").glob("*.py"),
        *(file for file in (PACKAGE / "core").glob("*.py") if file.name not in ("device.py", "distributed.py")),
    ]
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        top |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert not {module.split(".")[0] for module in top} & {"torch", "numpy", "diffusers", "transformers"}, file


def test_torchvision_is_neither_installed_nor_required() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / "scripts" / "check_environment.py"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_the_torchvision_check_sees_what_is_required(tmp_path: Path) -> None:
    """Install records of a package that asks for torchvision through another one make the check fail with the chain."""
    for name, requirement in (("innocent", "guilty"), ("guilty", "torchvision>=0.1")):
        record = tmp_path / f"{name}-1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requirement}\n"
        )
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'scripts')!r}]\n"
        "from check_environment import required_by; print(' -> '.join(required_by('innocent')['torchvision']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "innocent -> guilty -> torchvision"


def test_torch_is_the_one_that_constraints_pin() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert importlib.metadata.version("torch").split("+")[0] == pinned["torch"]


def requirements() -> dict[str, list[Requirement]]:
    """Return what each list of pyproject.toml requires: "" is what everybody installs, the others are the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in lists.items()}


@pytest.mark.parametrize(
    ("name", "lists", "too_old"),
    [
        # The checkpoint writer's HuggingFaceStorageWriter(save_distributed=True) works from 2.9 on.
        ("torch", [""], "2.8.0"),
        # CVE-2026-44513 is fixed in 0.38.
        ("diffusers", [""], "0.37.1"),
        # CVE-2025-62727 is fixed in 0.49.1. FastAPI asks for starlette, but permits older ones.
        ("starlette", ["studio", "dev"], "0.49.0"),
    ],
)
def test_releases_that_do_not_work_or_are_not_safe_are_not_installed(name: str, lists: list[str], too_old: str) -> None:
    for extra in lists:
        found = [requirement for requirement in requirements()[extra] if requirement.name == name]
        assert len(found) == 1, f"{name} is not required by {extra or 'dependencies'}"
        assert not found[0].specifier.contains(too_old)


def test_the_pinned_releases_are_among_those_required() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name.lower(): Version(version) for name, version in (line.split("==") for line in lines if "==" in line)}
    for extra, required in requirements().items():
        for requirement in required:
            if version := pinned.get(requirement.name.lower()):
                assert requirement.specifier.contains(version), f"{extra}: {requirement} against {version}"


def test_the_package_is_typed_and_reads_no_pickle() -> None:
    assert (PACKAGE / "py.typed").exists()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
                assert ast.unparse(node.func) == "torch.load", f"{file}: {ast.unparse(node)}"
                assert safe, f"{file}: {ast.unparse(node)}"


def test_no_model_may_bring_code_of_its_own() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                refused = any(
                    word.arg == "trust_remote_code" and ast.unparse(word.value) == "False" for word in node.keywords
                )
                assert refused, f"{file}:{node.lineno}: {ast.unparse(node)}"


def test_every_pinned_release_has_hashes() -> None:
    """`scripts/lock.py` writes them; run it after a change of constraints.txt."""
    locked = (ROOT / "requirements/locked.txt").read_text(encoding="utf-8")
    found = {
        block.split()[0]: re.findall(r"--hash=sha256:([0-9a-f]{64})(?=\s|$)", block)
        for block in re.split(r"\n(?=\S)", locked)
        if "==" in block.split()[0]
    }
    pinned = {line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and line[0] != "#"}
    assert set(found) == pinned
    assert all(found.values())
