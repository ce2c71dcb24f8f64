"""The shell functions that the recipes share, and the tables they print."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.artifacts import Artifact
from atoll.core.config import load
from atoll.core.config_sections import MonolithSection
from atoll.core.manifests import EXPERT
from atoll.train.spec import resolve_job

RECIPES = Path(__file__).parent.parent / "recipes"


def shell(root: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run shell code with the functions of recipes/common/lib.sh."""
    command = ["bash", "-euo", "pipefail", "-c", f"source recipes/common/lib.sh; {code}"]
    environment = {**os.environ, "ROOT": str(root), "SEED": "0", "ATOLL": f"{sys.executable} -m atoll.cli"}
    environment |= variables
    return subprocess.run(
        command, cwd=RECIPES.parent, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip


@pytest.mark.parametrize("script", sorted(RECIPES.rglob("*.sh")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_script_is_valid_bash(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_an_interrupted_link_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    for name in ("a", "b"):
        (tmp_path / "from" / name).write_text(name)
    (tmp_path / "to.part").mkdir()
    (tmp_path / "to.part" / "a").write_text("half")
    result = shell(tmp_path, 'link "$ROOT/from" "$ROOT/to"')
    assert result.returncode == 0, result.stderr
    assert {path.name: path.read_text() for path in (tmp_path / "to").iterdir()} == {"a": "a", "b": "b"}
    assert (tmp_path / "to" / "a").samefile(tmp_path / "from" / "a")


def test_unfinished_experts_are_not_reused(tmp_path: Path) -> None:
    for expert in ("000", "001"):
        (tmp_path / "seed0/one/experts" / expert / "final").mkdir(parents=True)
    (tmp_path / "seed0/one/experts/000/final/manifest.json").write_text("{}")
    assert shell(tmp_path, "reuse one other 0").returncode == 0
    refused = shell(tmp_path, "reuse one other 0 1")
    assert refused.returncode != 0
    assert "experts/001 is not finished" in refused.stderr
    assert [path.name for path in (tmp_path / "seed0/other/experts").iterdir()] == ["000"]


def test_an_arm_trains_its_monolith_with_separate_settings(prepared: Path, tmp_path: Path) -> None:
    """The monolith has the total batch size and the images of all experts; a second run trains nothing."""
    run = tmp_path / "seed0/small"
    shutil.copytree(prepared / "data", run / "data")
    size = {"STEPS": "20", "TOTAL": "24", "NETWORK": "{name: DiT-XS/8, width: 32, depth: 2, heads: 2}"}
    train = "make_arm small 3 features; train small --jobs monolith"
    first = shell(tmp_path, train, **size)
    assert first.returncode == 0, first.stderr
    assert "monolith: started for 480 images" in first.stderr

    options = {"batch_size": "24", "total_images": "480", "warmup_images": "24", "save_every": "120"}
    options |= {"log_every": "12", "ema.ema": "12"}
    plain = load(run, {f"train.{key}": value for key, value in options.items()})
    expected = resolve_job(run, plain.model_copy(update={"monolith": MonolithSection()}), "monolith")
    assert resolve_job(run, load(run), "monolith") == expected
    assert expected.settings.lr == 4e-3
    assert load(run).train.batch_size == 8
    compute = Artifact(run, "monolith/final").read(EXPERT).compute
    assert compute is not None
    assert compute.images == 480

    again = shell(tmp_path, train, **size)
    assert (again.returncode, again.stderr.strip()) == (0, "all requested jobs are done")


def write_evaluation(root: Path, seed: int, kid: float, diversity: float | None) -> None:
    """Write the evaluation of an arm with one model, as `evaluate` does."""
    model = {
        "label": "experts top-1", "model": "experts", "routing": "top-1",
        "metrics": {"inception": {"frechet": 100.0, "kid": {"value": kid, "standard_error": 0.002}}},
        **({} if diversity is None else {"diversity": {"mean": diversity}}),
    }  # fmt: skip
    folder = root / f"seed{seed}/k8/evaluation"
    folder.mkdir(parents=True)
    (folder / "claim.json").write_text(json.dumps({"models": [model]}))


def table(root: Path) -> list[list[str]]:
    """Return the cells of the table, row by row."""
    command = [sys.executable, RECIPES / "common/table.py", root, "claim", "k8"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines()]


def test_the_table_of_one_seed_gives_the_standard_error_of_kid(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, 0.1, None)
    head, _, row = table(tmp_path)
    assert head == ["arm", "model", "seeds", "FID", "KID x1000"]
    assert row == ["k8", "experts top-1", "1", "100.0", "100.0 ± 2.0"]


def test_the_table_of_several_seeds_gives_their_spread_and_marks_missing_ones(tmp_path: Path) -> None:
    for seed, (kid, diversity) in enumerate(((0.1, 0.6), (0.2, 0.8), (0.3, None))):
        write_evaluation(tmp_path, seed, kid, diversity)
    head, _, row = table(tmp_path)
    assert head == ["arm", "model", "seeds", "FID", "KID x1000", "diversity"]
    assert row == ["k8", "experts top-1", "3", "100.0 ± 0.0", "200.0 ± 100.0", "0.700 ± 0.141 (2)"]


def test_the_queue_of_cifar10_knows_what_is_measured(tmp_path: Path) -> None:
    """The rows of results.jsonl are done on every machine, without any folder; all others are left."""
    script = RECIPES / "regime/run.py"
    shutil.copy(script, tmp_path)
    rows = (script.with_name("results.jsonl")).read_text().splitlines(keepends=True)
    grid = [row for row in rows if json.loads(row)["arm"].startswith("grid-")]
    for kept in (9, 8):
        (tmp_path / "results.jsonl").write_text("".join(grid[:kept]))
        command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "root"), "--list"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [line.split()[0] for line in listed].count("done") == kept
        assert sum("heterogeneous" in line and "left" in line for line in listed) == 12
