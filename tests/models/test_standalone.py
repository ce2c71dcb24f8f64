"""A folder with its own code: diffusers opens it where Atoll cannot be imported, and gives the same images."""

import ast
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import atoll
from atoll import cli, flow
from atoll.apps.models.bundle import bundle
from atoll.apps.models.export import export
from atoll.apps.models.pipeline import AtollPipeline
from atoll.core.errors import AtollError

HOW: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 3.0, "seed": 5}
LABELS: dict[str, Any] = {"label": ["circle", 2]}
PROMPTS: dict[str, Any] = {"prompt": ["a red circle", "nothing"]}
ROUTINGS = ("top-1", "full", "nearest:top-2", "drawn", "sample-1", "top-2@0.5,top-1")
WITHOUT_ATOLL = """
import json, sys
sys.modules["atoll"] = None  # importing it is an error
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
torch.set_num_threads(1)
folders, inputs, how, routings, output = json.loads(sys.argv[1])
# All folders are opened before the first is used: each keeps its own code.
pipes = [DiffusionPipeline.from_pretrained(folder, trust_remote_code=True) for folder in folders]
assert not [name for name in sys.modules if name.startswith("atoll.")]
save_file({
    f"{number}/{routing}": pipe(**given, routing=routing, output_type="latent", **how).images
    for number, (pipe, given) in enumerate(zip(pipes, inputs)) for routing in routings
}, output)
"""


@pytest.fixture(scope="module")
def standalone(conditioned_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standalone") / "model"
    export(conditioned_run, folder, standalone=True)
    return folder


def check_without_atoll(sources: list[tuple[Path, Path, dict[str, Any]]], tmp_path: Path) -> None:
    """Compare the latents of folders (run, its export, inputs) in one process without Atoll with those of the runs."""
    output = tmp_path / "found.safetensors"
    arguments = [
        [str(folder) for _, folder, _ in sources],
        [given for *_, given in sources],
        HOW,
        ROUTINGS,
        str(output),
    ]
    environment = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    command = [sys.executable, "-c", WITHOUT_ATOLL, json.dumps(arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    found = load_file(output)
    assert len(found) == len(sources) * len(ROUTINGS)
    for number, (source, _, given) in enumerate(sources):
        for routing in ROUTINGS:
            expected = atoll.load(source).generate(**given, routing=routing, **HOW).latents
            assert torch.equal(found[f"{number}/{routing}"], expected), routing
    # What diffusers executed is what the card lists: its cache has copies of these files and no others.
    cached = {file.read_bytes() for file in (tmp_path / "hub").rglob("diffusers_modules/**/*.py")} - {b""}
    listed = "".join((folder / "README.md").read_text() for _, folder, _ in sources)
    assert len(cached) == 3  # pipeline, bundle, network; diffusers replaces the pipeline of the folder before
    assert all(sha256(code).hexdigest() in listed for code in cached)


def test_a_process_without_atoll_gives_the_same_latents(
    conditioned_run: Path, standalone: Path, tmp_path: Path
) -> None:
    """Bit for bit: mixed objectives and sizes, every kind of routing."""
    check_without_atoll([(conditioned_run, standalone, LABELS)], tmp_path)


@pytest.mark.slow
def test_two_folders_in_one_process_without_atoll(
    run: Path, conditioned_run: Path, standalone: Path, tmp_path: Path
) -> None:
    """One of prompts, one of classes."""
    assert cli.main(["export", str(run), str(tmp_path / "text"), "--standalone"]) == 0
    check_without_atoll([(run, tmp_path / "text", PROMPTS), (conditioned_run, standalone, LABELS)], tmp_path)


def test_the_card_lists_exactly_the_code_of_the_folder(standalone: Path) -> None:
    card = (standalone / "README.md").read_text()
    code = sorted(standalone.rglob("*.py"))
    assert {file.parent.name for file in code} == {"model", "expert_0", "expert_1", "expert_2", "router"}
    rows = {f"| {file.relative_to(standalone)} | {sha256(file.read_bytes()).hexdigest()} |" for file in code}
    assert rows == {line for line in card.splitlines() if ".py | " in line}
    assert "trust_remote_code=True" in card


def test_atoll_opens_the_folder_and_runs_none_of_its_code(standalone: Path, conditioned_run: Path) -> None:
    before = set(sys.modules)
    found, expected = (atoll.load(folder).generate(label=["circle"], **HOW) for folder in (standalone, conditioned_run))
    assert torch.equal(found.latents, expected.latents)
    assert not [name for name in set(sys.modules) - before if "diffusers_modules" in name]
    with pytest.raises(AtollError, match="own code, which Atoll does not run"):
        AtollPipeline.from_pretrained(standalone)
    with pytest.raises(ValueError, match="trust_remote_code"):
        atoll.apps.models.pipeline.DiffusionPipeline.from_pretrained(standalone)
    # Code that is not that of the manifest is refused, though it would not run.
    file = next(standalone.glob("atoll_*.py"))
    own = file.read_bytes()
    try:
        file.write_bytes(own + b"# changed\n")
        with pytest.raises(AtollError, match=r"atoll_\w+\.py has .* but the manifest lists"):
            atoll.load(standalone)
    finally:
        file.write_bytes(own)


def test_a_standalone_export_is_not_mistaken_for_another(standalone: Path, conditioned_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in standalone.rglob("*")}
    export(conditioned_run, standalone, standalone=True)
    assert {path: path.stat().st_mtime_ns for path in standalone.rglob("*")} == before
    with pytest.raises(AtollError, match="standalone"):
        export(conditioned_run, standalone)
    with pytest.raises(AtollError, match="without code; choose one option"):
        export(conditioned_run, standalone, merge=True, standalone=True)


def test_the_bundle_has_what_is_reached_and_computes_the_same() -> None:
    code = bundle(["atoll.flow.solvers:solve"], omit=[], replace={})
    assert "# atoll.flow.schedules" in code
    assert "class CosineSchedule" not in code  # `solve` does not need it
    names: dict[str, Any] = {}
    exec(compile(code, "bundle", "exec"), names)

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * t

    found, expected = (
        solve(velocity, torch.ones(1, 1), steps=4, solver="heun") for solve in (names["solve"], flow.solve)
    )
    assert torch.equal(found, expected)
    defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(defined) == len(set(defined))
