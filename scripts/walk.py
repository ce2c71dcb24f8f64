"""List the functions of src/atoll that run in `atoll prepare`, `train --expert`, `sample` and `join`, in order.

    python scripts/walk.py                     # the four walks, with file and line of every function
    python scripts/walk.py --markdown          # write them into docs/explanation/walks.md
    python scripts/walk.py --against-golden    # compare their lines of code with the golden commit's

The commands run on a few drawn shapes with tiny networks, offline, each in a separate process under `sys.setprofile`.
`join` stops before training. Two walks of the same code are equal. A package may call only itself and those before it
in the dependency order, except for the callbacks in CALLBACKS. The exit code is 1 if a walk has another upward call.
"""

import argparse
import ast
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import yaml
from PIL import Image, ImageDraw

from atoll.core import renamed
from golden import GOLDEN_COMMIT
from walk.functions import Call, Function, Walk, make_walk

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "explanation" / "walks.md"
MARKERS = ("<!-- walks: written by scripts/walk.py --markdown -->", "<!-- end of the walks -->")
WIDTH = 96
"""Characters in a line of the document's lists: as many as fit beside the navigation of the site."""


class Callback(NamedTuple):
    """An allowed call from an earlier package to a later one: the later one passed the function as an argument."""

    caller: str
    callee: str
    reason: str


CALLBACKS = (
    Callback("flow.solvers:*", "ensemble.sampler:*.velocity", "a solver integrates the velocity it is given"),
    Callback("nets.*", "train.cost:_count*", "hooks of torch measure what a forward pass keeps in memory"),
    Callback(
        "experts.validation:*.gather", "train.distributed:DistContext.sum", "the processes that share a validation"
    ),
    Callback("data.chunks:prefetch", "train.tasks:Task.stream.*", "reading threads make the inputs of training"),
    Callback("nets.conditioning:Condition.map", "train.inputs:*", "a function for each part of a condition"),
)
"""All allowed callbacks. A name is module:function; * matches anything."""

SHAPES = 24
"""Images: enough for two clusters with a held-out part and one batch each."""
Settings = dict[str, dict[str, object]]
SETTINGS: Settings = {
    "data": {"source": "images", "resolution": 64, "val_fraction": 0.2, "chunk": 16},
    "features": {"resolution": 64},
    "clusters": {"count": 2},
    "latents": {"autoencoder": "emoji"},
    "text": {"encoder": "minilm", "max_tokens": 12},
    "networks": {"default": {"name": "DiT-XS/2", "width": 32, "depth": 1, "heads": 2}},
    # Two steps, with all that a long training does: a checkpoint, a line of metrics and a preview.
    "train": {
        "total_images": 8,
        "batch_size": 4,
        "save_every": 4,
        "log_every": 4,
        "sample_every": 4,
        "sample_count": 2,
    },
    "router": {"network": {"name": "DiT-XS/2", "width": 32, "depth": 1, "heads": 2}},
}
COMMANDS = (
    ("prepare", "prepare run"),
    ("", "push run file://{folder}/store --key key.pem"),
    ("train", "train run --expert 0"),
    ("", "train run --expert 1"),
    ("", "train run --router"),
    ("sample", "sample run 'a red circle' 'a blue square' --steps 2 --out samples"),
    ("join", "join file://{folder}/store --folder worker --key key.pem --name walk --unsigned"),
)
"""Walks by name and their command lines. A command without a name only prepares the others and is not recorded."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}


# Running the commands


def run_walks(tree: Path, last: str = COMMANDS[-1][0]) -> dict[str, Walk]:
    """Return the walks of the code of a tree by name, up to the walk `last`."""
    count = [name for name, _ in COMMANDS].index(last) + 1
    with tempfile.TemporaryDirectory(prefix="atoll-walk-") as scratch:
        folder = Path(scratch).resolve()
        draw_shapes(folder / "images")
        (folder / "run").mkdir()
        settings = SETTINGS if (tree / "src/atoll/core/renamed.py").is_file() else with_old_keys(SETTINGS)
        (folder / "run" / "atoll.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        commands = [(name, command.format(folder=folder)) for name, command in COMMANDS[:count]]
        (folder / "plan.json").write_text(json.dumps({"tree": str(tree), "commands": commands}), encoding="utf-8")
        path = os.pathsep.join((str(tree / "src"), str(ROOT / "scripts")))
        done = subprocess.run(
            [sys.executable, "-P", "-m", "walk.record", "plan.json"],
            cwd=folder, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path}, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(1)
        recorded = {name: json.loads((folder / f"{name}.json").read_text()) for name, _ in commands if name}
    return {name: make_walk(edges, tree / "src" / "atoll") for name, edges in recorded.items()}


def with_old_keys(settings: Settings) -> Settings:
    """Return the settings with the keys of the golden commit, which is older than their present names."""
    old = {new: key for key, new in renamed.KEYS.items()}

    def old_name(section: str, key: str) -> str:
        return old.get(f"{section}.{key}", f"{section}.{key}").removeprefix(f"{section}.")

    return {
        section: {old_name(section, key): value for key, value in keys.items()} for section, keys in settings.items()
    }


def draw_shapes(folder: Path) -> None:
    """Draw red circles and blue squares, each with its caption."""
    folder.mkdir()
    chance = random.Random(0)
    for number in range(SHAPES):
        image = Image.new("RGB", (64, 64), "white")
        x, y, side = chance.randint(2, 20), chance.randint(2, 20), chance.randint(20, 40)
        box = (x, y, x + side, y + side)
        if number % 2:
            ImageDraw.Draw(image).rectangle(box, fill="blue")
        else:
            ImageDraw.Draw(image).ellipse(box, fill="red")
        image.save(folder / f"{number:02d}.png")
        caption = f"a {('red circle', 'blue square')[number % 2]} of {side} pixels at {x}, {y}"
        (folder / f"{number:02d}.txt").write_text(caption, encoding="utf-8")


def golden_walks() -> dict[str, Walk]:
    """Return the walks of the golden commit."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", GOLDEN_COMMIT, "src"], capture_output=True, check=False
    )
    if archive.returncode:
        raise SystemExit(f"walk: {archive.stderr.decode().strip()} (a shallow clone lacks old commits)")
    with tempfile.TemporaryDirectory(prefix="atoll-golden-") as name:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(name, filter="data")
        return run_walks(Path(name).resolve())


# The order of the packages


def package_order() -> tuple[str, ...]:
    """Read the packages in dependency order from tests/test_architecture.py, which checks the imports."""
    for node in ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            packages: tuple[str, ...] = ast.literal_eval(node.value)
            return packages
    raise LookupError("tests/test_architecture.py has no list PACKAGES")


def upward_calls(calls: Iterable[Call], packages: Sequence[str]) -> list[Call]:
    """Return the calls from an earlier package to a later one."""

    def level(function: Function) -> int:
        package, slash, _ = function.file.partition("/")
        return packages.index(package) if slash else len(packages)  # atoll/__init__.py is above all

    return [(caller, callee) for caller, callee in calls if level(caller) < level(callee)]


def split_callbacks(calls: Iterable[Call], callbacks: Sequence[Callback]) -> tuple[list[Call], list[Callback]]:
    """Return the calls that no callback in the list allows, and the callbacks that allow none of the calls."""
    others, unused = [], list(callbacks)
    for caller, callee in calls:
        found = [
            callback
            for callback in callbacks
            if fnmatchcase(str(caller), callback.caller) and fnmatchcase(str(callee), callback.callee)
        ]
        others += [] if found else [(caller, callee)]
        unused = [callback for callback in unused if callback not in found]
    return others, unused


# The output


def as_text(name: str, walk: Walk) -> Iterator[str]:
    """Yield the lines of a walk for the terminal."""
    yield f"\natoll {name}: {len(walk.functions)} functions, {walk.lines} lines of code\n"
    for number, function in enumerate(walk.functions, 1):
        yield f"{number:4}  {f'{function.file}:{function.line}':<40} {function.name}"


def as_markdown(walks: dict[str, Walk]) -> str:
    """Return the walks for the document: a line for each visit to a file, with the functions that run first there."""
    parts = []
    for name, walk in walks.items():
        parts += [f"### atoll {name}: {len(walk.functions)} functions, {walk.lines} lines", "", "```text"]
        visits: list[tuple[str, list[str]]] = []
        for function in walk.functions:
            if not visits or visits[-1][0] != function.file:
                visits.append((function.file, []))
            visits[-1][1].append(f"{function.name.replace('.<locals>', '')}:{function.line}")
        margin = max(len(file) for file, _ in visits) + 2
        for file, names in visits:
            wrap = textwrap.TextWrapper(
                WIDTH, initial_indent=file.ljust(margin), subsequent_indent=" " * margin, break_on_hyphens=False
            )
            parts += wrap.wrap("  ".join(names))
        parts += ["```", ""]
    return "\n".join(parts)


def write_document(walks: dict[str, Walk], document: Path = DOCUMENT) -> None:
    """Replace the text between the markers."""
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not begin or not end:
        raise SystemExit(f"walk: {document} lacks the lines {MARKERS[0]} and {MARKERS[1]}")
    document.write_text(f"{before}{begin}\n\n{as_markdown(walks)}\n{end}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the walks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="write the walks into docs/explanation/walks.md")
    parser.add_argument("--against-golden", action="store_true", help="compare with the golden commit's lines of code")
    options = parser.parse_args(arguments)
    walks = run_walks(ROOT)
    if options.markdown:
        write_document(walks)
    elif not options.against_golden:
        for name, walk in walks.items():
            print(*as_text(name, walk), sep="\n")
    golden = golden_walks() if options.against_golden else {}
    print(f"\n{'walk':<10}{'functions':>10}{'lines':>8}" + f"{'golden':>8}{'ratio':>8}" * bool(golden))
    for name, walk in walks.items():
        row = f"{name:<10}{len(walk.functions):>10}{walk.lines:>8}"
        print(row + (f"{golden[name].lines:>8}{walk.lines / golden[name].lines:>8.3f}" if golden else ""))
    calls = dict.fromkeys(call for walk in walks.values() for call in walk.calls)
    wrong, unused = split_callbacks(upward_calls(calls, package_order()), CALLBACKS)
    for callback in unused:
        print(f"not in any walk: the callback {callback.caller} -> {callback.callee}")
    for caller, callee in wrong:
        print(f"upwards: {caller} (line {caller.line}) -> {callee} (line {callee.line})")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
