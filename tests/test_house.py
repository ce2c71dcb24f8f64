"""The shape of the house: which room may know which, and what must never get in."""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import atoll

PACKAGE = Path(atoll.__file__).parent
ROOT = PACKAGE.parent.parent
ROOMS = ["flow", "nets", "data", "train", "ensemble", "evaluate", "islands", "studio"]
SHARED = {"errors", "networks", "vocabulary", "__version__"}
STANDS_ALONE = {"flow": {"flow", *SHARED}, "nets": {"nets", *SHARED}}


def imports(file: Path) -> set[str]:
    """First part below `atoll` of every import of the package in a file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "atoll" else [f"atoll.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("atoll.")}
    return found


def test_imports_point_one_way() -> None:
    for position, room in enumerate(ROOMS):
        later = set(ROOMS[position + 1 :]) | {"cli"}
        for file in (PACKAGE / room).rglob("*.py"):
            assert not imports(file) & later, f"{file.relative_to(PACKAGE)} imports {imports(file) & later}"


def test_the_mathematics_and_the_networks_stand_alone() -> None:
    for room, allowed in STANDS_ALONE.items():
        for file in (PACKAGE / room).rglob("*.py"):
            assert imports(file) <= allowed, f"{file.relative_to(PACKAGE)} imports {imports(file) - allowed}"


def test_the_command_line_files_import_nothing_heavy_at_the_top() -> None:
    files = [
        *(PACKAGE / "cli").glob("*.py"),
        *(PACKAGE / f"{name}.py" for name in ("config", "errors", "networks", "vocabulary")),
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
