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
PACKAGES = (
    "core", "flow", "nets", "convert", "data", "experts", "ensemble", "train", "evaluate", "report", "export",
    "islands", "launch", "studio", "cli",
)  # fmt: skip
"""In dependency order: a package imports only from those before it."""
MAX_LINES = 400
MAX_POSITIONAL = 3
MAX_UNTYPED = 40
"""Places with `dict[str, Any]`: content that is known has a type of its own."""
RUN_PATH = re.compile(
    r"^(experts/|data/|.*/final\b|.*/checkpoints\b|.*\bmetrics\.jsonl|atoll\.yaml|policy\.json|manifest\.json|grids\b|"
    r"evaluation/|launch/|report\.html)|experts/\["
)
"""String constants that spell a path of a run. Only core/layout.py may have them; with a space in it, it is prose."""

UNTYPED = "dict[str, Any]"
PRIVATE_WORDS = re.compile(r"\b(told|deaf|hears|mend(ed|s)?|facts|pictures?)\b", re.IGNORECASE)
"""Words of early versions that no reader of the papers would expect: write conditioning, image, manifest, fix."""
WRITTEN = ("src", "docs", "recipes", "README.md")
TEXT_SUFFIXES = {".py", ".md", ".js", ".html", ".css", ".sh", ".yaml", ".yml", ".json", ".toml"}

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


def package_order(package: Path) -> list[str]:
    """Find imports of a later package, and imports of the facade `atoll`."""
    wrong = []
    for name, wanted in imports(package).items():
        for other in sorted(wanted) if name != "atoll" else ():
            own, place = name.split(".")[1], other.partition(".")[2].split(".")[0]
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


def positional_parameters(package: Path) -> list[str]:
    """Find definitions with more than three positional parameters, self and cls aside; hooks of torch have its own."""
    wrong = []
    for name, tree in modules(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__torch_"):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                if len(names) - (names[:1] in (["self"], ["cls"])) > MAX_POSITIONAL:
                    wrong.append(f"{name}:{node.lineno} {node.name} has {len(names)} positional parameters")
    return wrong


def long_files(package: Path) -> list[str]:
    """Find files of more than 400 lines."""
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in package.rglob("*.py")}
    return [f"{file.relative_to(package)} has {count} lines" for file, count in lengths.items() if count > MAX_LINES]


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


def untyped_dictionaries(package: Path) -> list[str]:
    """List the places of `dict[str, Any]` if there are too many."""
    texts = {file: file.read_text(encoding="utf-8").splitlines() for file in sorted(package.rglob("*.py"))}
    found = [f"{file.name}: {line.strip()}" for file, lines in texts.items() for line in lines if UNTYPED in line]
    return found if len(found) > MAX_UNTYPED else []


CHECKS = [
    package_order,
    module_cycles,
    path_literals,
    positional_parameters,
    long_files,
    files_in_properties,
    untyped_dictionaries,
]


def private_words(root: Path) -> list[str]:
    """Find private words in the texts and file names of a repository. Only the table of old names may have them."""
    found = []
    for top in WRITTEN:
        files = [root / top] if (root / top).is_file() else sorted((root / top).rglob("*"))
        for file in (file for file in files if "__pycache__" not in file.parts):
            name = file.relative_to(root).as_posix()
            if PRIVATE_WORDS.search(name.replace("_", " ")):
                found.append(name)
            if file.suffix in TEXT_SUFFIXES and name != "src/atoll/core/renamed.py":
                lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
                found += [f"{name}:{number} {line.strip()}" for number, line in lines if PRIVATE_WORDS.search(line)]
    return found


def test_the_words_are_those_of_the_field() -> None:
    assert private_words(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("src/atoll/core/errors.py", "# The router is told the caption.\n"),
        ("src/atoll/studio/page/view.js", "/** Draws a Picture. */\n"),
        ("docs/how-to/serve.md", "It hears nothing.\n"),
        ("recipes/bridge/run.sh", "# mends the run\n"),
        ("README.md", "PICTURES are sorted.\n"),
        ("recipes/bridge/pictures.png", ""),
        ("docs/reference/all_facts.md", ""),
    ],
)
def test_a_private_word_is_found(file: str, text: str, tmp_path: Path) -> None:
    for name in ("src/atoll/core/renamed.py", "README.md", "docs/index.md", "recipes/README.md", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Images. Recommended. Untold.\n", encoding="utf-8")
    (tmp_path / "src/atoll/core/renamed.py").write_text('"router.told": "router.conditioning"\n', encoding="utf-8")
    (tmp_path / file).write_text("", encoding="utf-8")
    before = private_words(tmp_path)
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert len(before) == (0 if text else 1)
    assert len(private_words(tmp_path)) == 1


@pytest.mark.parametrize("check", CHECKS)
def test_the_code_has_its_shape(check: Check) -> None:
    assert check(PACKAGE) == []


MINIATURE = {
    "__init__.py": "",
    "core/errors.py": "",
    "core/config.py": "from atoll.core.errors import AtollError",
    "core/layout.py": "FINAL = 'experts/003/final'",
    "flow/rng.py": "",
    "flow/objectives.py": "from atoll.flow import rng",
    "nets/dit.py": '"""Writes experts/003/final."""\nfrom atoll.flow import rng',
    "train/loop.py": "def train(a, b, c, *, d): ...",
    "cli/verb.py": "class Verb:\n    def run(self, a, b, c): ...",
}


@pytest.mark.parametrize(
    ("check", "file", "planted"),
    [
        (package_order, "flow/rng.py", "from atoll.train import loop"),
        (package_order, "core/layout.py", "def later() -> None:\n    import atoll.nets.dit"),
        (package_order, "nets/dit.py", "import atoll"),
        (package_order, "nets/dit.py", "from atoll import load"),
        (module_cycles, "core/errors.py", "if TYPE_CHECKING:\n    import atoll.core.config"),
        (module_cycles, "flow/rng.py", "def lazy() -> None:\n    from atoll.flow import objectives"),
        (path_literals, "train/loop.py", "FOLDER = 'experts/003'"),
        (path_literals, "train/loop.py", "def final(job: str) -> str:\n    return f'{job}/final'"),
        (path_literals, "nets/dit.py", "FILE = 'metrics.jsonl'"),
        (positional_parameters, "cli/verb.py", "def wide(a, b, c, d): ..."),
        (positional_parameters, "cli/verb.py", "class Wide:\n    async def wide(self, a, b, c, d): ..."),
        (long_files, "core/errors.py", "\n" * MAX_LINES),
        (untyped_dictionaries, "nets/dit.py", "a: dict[str, Any]\n" * (MAX_UNTYPED + 1)),
        (files_in_properties, "nets/dit.py", "class A:\n    @property\n    def b(self): return self.c.read_text()"),
        (files_in_properties, "nets/dit.py", "class A:\n    @cached_property\n    def b(self): return load_file(1)"),
    ],
)  # fmt: skip
def test_a_violation_is_found(check: Check, file: str, planted: str, tmp_path: Path) -> None:
    package = tmp_path / "atoll"
    for name, text in MINIATURE.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(f"{text}\n", encoding="utf-8")
    assert check(package) == []
    path = package / file
    path.write_text(f"{path.read_text(encoding='utf-8')}\n{planted}\n", encoding="utf-8")
    assert check(package) != []


def test_the_command_line_files_import_nothing_heavy_at_the_top() -> None:
    files = [
        *(PACKAGE / "cli").glob("*.py"),
        *(file for file in (PACKAGE / "core").glob("*.py") if file.name != "device.py"),
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
