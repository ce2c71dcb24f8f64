"""Compare the results of the present code with those of the golden commit, bit for bit.

    python scripts/golden.py                    # both sides on this machine; the golden side runs once and is cached
    python scripts/golden.py --other-machine    # the present side with the committed results, within tolerances
    python scripts/golden.py --commit-results   # write the committed results, after GOLDEN_COMMIT was changed

Each side prepares some emoji, trains small networks, samples with every routing and exports, through the command line.
`golden/golden.yaml` lists the commands and result files of the golden commit and never changes. `golden/present.yaml`
does the same for the present code; edit it when you rename a setting, an option or a file. Manifests, previews and
metrics are not compared. The exit code is 1 if anything differs or fails.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from golden import GOLDEN_COMMIT
from golden.compare import (
    Results,
    Rows,
    Tensors,
    bit_differences,
    compare,
    image_differences,
    report,
    update_differences,
)
from golden.source import write_source

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "scripts" / "golden"
UPDATES = TABLES / "updates.safetensors"
IMAGES = TABLES / "images"
WORK = ROOT / "build" / "golden"

ENVIRONMENT = {
    # One thread for each of the two parallel commands: the order of sums is fixed, and no core is idle.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    # By default MKL's sums depend on a tensor's address, which even a longer name in a file's header can change.
    "MKL_CBWR": os.environ.get("MKL_CBWR", "AUTO"),
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class GoldenError(Exception):
    """A side failed, or results are missing."""


# One side, golden or present


def read_table(side: str) -> dict[str, Any]:
    """Return a side's settings, command lines and files."""
    table: dict[str, Any] = yaml.safe_load((TABLES / f"{side}.yaml").read_text(encoding="utf-8"))
    return table


def sample_commands(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the command lines that sample, by name."""
    prompted = f"{table['sample']} {table['prompts']}"
    commands = {
        f"{routing} {guidance}": f"{prompted} {options} {more}"
        for routing, options in table["routings"].items()
        for guidance, more in table["guidances"].items()
    }
    commands |= {name: f"{prompted} {options}" for name, options in table["others"].items()}
    commands |= {name: f"{table['sample']} {options}" for name, options in table["unprompted"].items()}
    return {name: f"{command} --out 'samples/{name}'" for name, command in commands.items()}


def phases_of(table: Mapping[str, Any], *, initial: bool = False) -> list[dict[str, Any]]:
    """Return all commands of a side by phase and name; with `initial`, those that give the initial weights."""
    *phases, last = table["phases"]
    if not initial:
        return [*phases, {**last, **{f"sample {name}": line for name, line in sample_commands(table).items()}}]
    added = {"prepare": "", "train": f" {table['initial']}"}
    return [
        {name: line + added[verb] for name, line in phase.items() if (verb := line.split()[0]) in added}
        for phase in phases
    ]


def run_side(side: str, tree: Path, *, initial: bool = False) -> None:
    """Run a side's commands with the code of a tree and write its files to WORK/SIDE or WORK/SIDE-initial."""
    table = read_table(side)
    folder = WORK / (f"{side}-initial" if initial else side)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "atoll.yaml").write_text(yaml.safe_dump(table["settings"]), encoding="utf-8")
    plan = {"tree": str(tree), "phases": phases_of(table, initial=initial)}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    start = time.monotonic()
    command = [sys.executable, "-P", str(TABLES / "driver.py"), "plan.json"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree / "src")}
    if subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
        raise GoldenError(f"the {folder.name} side failed; its files are in {folder}")
    print(f"{folder.name} side: {time.monotonic() - start:.0f} s", flush=True)


def read_results(side: str) -> Results:
    """Read the results that are compared on one machine."""
    table = read_table(side)
    images = {f"sample {name}": f"samples/{name}/[0-9]*.png" for name in sample_commands(table)}
    return collect(WORK / side, {**table["files"], **images}, table["renamed"])


def read_portable_results(side: str) -> tuple[Results, Results]:
    """Read the results that are compared between machines: weight updates, and the first image of every sampling."""
    table = read_table(side)
    final, initial = (collect(WORK / name, table["updates"], table["renamed"]) for name in (side, f"{side}-initial"))
    updates = {
        job: {name: tensor.astype(np.float32) - initial[job][name] for name, tensor in tensors.items()}
        for job, tensors in final.items()
    }
    images = {f"sample {name}": f"samples/{name}/000.png" for name in sample_commands(table)}
    return updates, collect(WORK / side, images, table["renamed"])


def collect(folder: Path, files: Mapping[str, str], renamed: Mapping[str, str]) -> Results:
    """Read the tensors and images of each group's files; `renamed` maps parts of names to the golden side's."""
    results: dict[str, dict[str, NDArray[Any]]] = {}
    for group, pattern in files.items():
        fixed = pattern.partition("*")[0].partition("[")[0].rpartition("/")[0]
        found = results.setdefault(group, {})
        for file in sorted(folder.glob(pattern)):
            tensors = {"": _pixels(file)} if file.suffix == ".png" else load_file(file)
            for key, tensor in tensors.items():
                name = f"{file.relative_to(folder / fixed).as_posix()}:{key}".removesuffix(":")
                for present, golden in renamed.items():
                    name = name.replace(present, golden)
                found[name] = tensor
        if not found:
            raise GoldenError(f"there is no file of {group!r}: {folder / pattern}")
    return results


def _pixels(file: Path) -> NDArray[Any]:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


# The golden side's results: computed in a worktree and cached


@contextmanager
def golden_tree(*, keep: bool) -> Iterator[Path]:
    """Check the golden commit out into a worktree."""
    tree = WORK / "tree"
    _git("worktree", "remove", "--force", str(tree), check=False)
    shutil.rmtree(tree, ignore_errors=True)
    _git("worktree", "add", "--force", "--detach", str(tree), GOLDEN_COMMIT)
    try:
        yield tree
    finally:
        if not keep:
            _git("worktree", "remove", "--force", str(tree), check=False)


def _git(*arguments: str, check: bool = True) -> None:
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if check and result.returncode:
        raise GoldenError(f"git {' '.join(arguments)}: {result.stderr.strip()} (a shallow clone lacks old commits)")


def cache_file(source: str) -> Path:
    """Return the cache file of the golden side's results, named by a hash of all they depend on."""
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    kernels = ("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "TORCH", "PYTORCH_")
    parts = [
        *(GOLDEN_COMMIT, source, platform.platform(), sys.version),
        sorted({line for line in processor.splitlines() if line.startswith(("model name", "flags", "Features"))}),
        sorted(f"{part.name} {part.version}" for part in metadata.distributions()),
        sorted(f"{key}={value}" for key, value in {**os.environ, **ENVIRONMENT}.items() if key.startswith(kernels)),
        *(file.read_text(encoding="utf-8") for file in (TABLES / "golden.yaml", TABLES / "driver.py")),
    ]
    return WORK / f"golden-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.safetensors"


def golden_results(source: str, *, refresh: bool, keep: bool) -> Results:
    """Return the golden side's results; compute them if they are not cached."""
    cached = cache_file(source)
    if refresh or not cached.is_file():
        with golden_tree(keep=keep) as tree:
            run_side("golden", tree)
        for old in WORK.glob("golden-*.safetensors"):
            old.unlink()
        save_file(_flat(read_results("golden")), WORK / "new")
        (WORK / "new").replace(cached)
    return _nested(load_file(cached))


def _flat(results: Results) -> dict[str, NDArray[Any]]:
    """Return one dictionary with names GROUP/NAME, for a safetensors file."""
    return {f"{group}/{name}": tensor for group, tensors in results.items() for name, tensor in tensors.items()}


def _nested(flat: Tensors) -> Results:
    results: dict[str, dict[str, NDArray[Any]]] = {}
    for key, tensor in flat.items():
        group, _, name = key.partition("/")
        results.setdefault(group, {})[name] = tensor
    return results


# Committed results, for other machines


def write_committed(source: str, *, keep: bool) -> None:
    """Run the golden side and write the results for other machines, small: half precision and single images."""
    with golden_tree(keep=keep) as tree:
        run_side("golden", tree)
        run_side("golden", tree, initial=True)
    updates, images = read_portable_results("golden")
    half = {name: np.asarray(tensor, np.float16) for name, tensor in _flat(updates).items()}
    save_file(half, UPDATES, metadata={"commit": GOLDEN_COMMIT, "source": source})
    shutil.rmtree(IMAGES, ignore_errors=True)
    IMAGES.mkdir()
    for group, pixels in images.items():
        Image.fromarray(pixels["000.png"]).save(IMAGES / f"{group.removeprefix('sample ')}.png", optimize=True)
    print(f"written: {UPDATES.relative_to(ROOT)} and {IMAGES.relative_to(ROOT)}/")


def committed_origin() -> dict[str, str]:
    """Return the commit and the hash of the data that the committed results were made with."""
    with safe_open(UPDATES, "numpy") as file:
        return dict(file.metadata())


def compare_with_committed(source: str) -> Rows:
    """Run the present side and compare it with the committed results."""
    origin = committed_origin()
    if origin["commit"] != GOLDEN_COMMIT:
        raise GoldenError(f"the committed results are of {origin['commit']}; write them anew with --commit-results")
    if origin["source"] != source:
        print("note: the emoji drawn here are not bit for bit those of the committed results")
    run_side("present", ROOT)
    run_side("present", ROOT, initial=True)
    updates, images = read_portable_results("present")
    committed = {f"sample {file.stem}": {"000.png": _pixels(file)} for file in sorted(IMAGES.glob("*.png"))}
    rows = compare(_nested(load_file(UPDATES)), updates, update_differences)
    return {**rows, **compare(committed, images, image_differences)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison that the options select; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refresh", action="store_true", help="run the golden side even if its results are cached")
    parser.add_argument(
        "--commit-results", action="store_true", help="write the committed results from the golden side"
    )
    parser.add_argument("--other-machine", action="store_true", help="compare with the committed results")
    parser.add_argument("--keep", action="store_true", help=f"keep all files in {WORK.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    code = 0
    try:
        source = write_source(WORK / "source")
        if options.commit_results:
            write_committed(source, keep=options.keep)
        elif options.other_machine:
            code = report(compare_with_committed(source), same="within tolerance")
        else:
            golden = golden_results(source, refresh=options.refresh, keep=options.keep)
            run_side("present", ROOT)
            code = report(compare(golden, read_results("present"), bit_differences))
    except GoldenError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 1
    if not options.keep:
        for name in ("golden", "golden-initial", "present", "present-initial"):
            shutil.rmtree(WORK / name, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
