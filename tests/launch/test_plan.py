"""Which jobs a run consists of, what they wait for, and what would be submitted."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tyro
import yaml

from atoll.cli import VERBS, main
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, Content, Kind
from atoll.core.errors import AtollError
from atoll.islands.leases import Lease
from atoll.islands.store import Store
from atoll.launch.base import Setting
from atoll.launch.launch import open_launcher
from atoll.launch.plan import Group, Wish, missing_groups, with_flops
from shapes import write_run

WORK = ("prepare", "experts", "router", "monolith", "student")


@pytest.fixture
def fresh(shapes: Path, tmp_path: Path) -> Path:
    write_run(tmp_path / "run", shapes)
    return tmp_path / "run"


def groups(run: Path, *overrides: str, **wish: object) -> dict[str, tuple[list[str], tuple[str, ...]]]:
    config = configuration.load(run, dict(zip(overrides[::2], overrides[1::2], strict=True)))
    return {group.name: ([step.name for step in group.steps], group.needs) for group in found(run, config, **wish)}


def found(run: Path, config: configuration.Config, **wish: object) -> list:
    return missing_groups(run, config, Wish(**wish))


def commit(run: Path, name: str) -> None:
    artifact = Artifact(run, name)
    artifact.begin(Kind("test", Content), {})
    artifact.commit({})


def test_a_stage_waits_for_those_before_one_that_is_left_out(fresh: Path) -> None:
    """Random clusters need no features, but they need the images."""
    planned = groups(fresh, "clusters.method", "random", kinds=WORK, shares=2)
    assert "features" not in planned
    assert planned["clusters"][1] == ("ingest",)
    assert planned["shards"][1] == ("clusters", "latents", "text")


def test_a_fresh_run_in_shares(fresh: Path) -> None:
    assert groups(fresh, kinds=WORK, shares=2) == {
        "ingest": (["prepare/ingest-0-of-2", "prepare/ingest-1-of-2"], ()),
        "features": (["prepare/features-0-of-2", "prepare/features-1-of-2"], ("ingest",)),
        "clusters": (["prepare/clusters"], ("features",)),
        "latents": (["prepare/latents-0-of-2", "prepare/latents-1-of-2"], ("ingest",)),
        "text": (["prepare/text-0-of-2", "prepare/text-1-of-2"], ("ingest",)),
        "shards": (["prepare/shards"], ("clusters", "latents", "text")),
        "experts": (["experts/000", "experts/001", "experts/002"], ("shards",)),
        "router": (["router"], ("shards",)),
        "monolith": (["monolith"], ("shards",)),
        "student": (["student"], ("shards", "experts")),
    }


def test_a_fresh_run_in_one_piece(fresh: Path) -> None:
    assert groups(fresh) == {
        "prepare": (["prepare"], ()),
        "experts": (["experts/000", "experts/001", "experts/002"], ("prepare",)),
        "router": (["router"], ("prepare",)),
    }


def test_what_is_there_is_not_done_again(fresh: Path) -> None:
    for name in [layout.shards(0), layout.shards(1), layout.shards(2), "experts/001/final", "router/final"]:
        commit(fresh, name)
    assert [names for names, _ in groups(fresh).values()] == [["experts/000", "experts/002"]]
    for name in ("experts/000/final", "experts/002/final"):
        commit(fresh, name)
    assert groups(fresh) == {}


def test_some_experts_need_only_their_own_shards(fresh: Path) -> None:
    commit(fresh, layout.shards(2))
    assert list(groups(fresh, kinds=("experts",), experts=(2,))) == ["experts"]
    with pytest.raises(AtollError, match="has no shards yet; let them be made too: --jobs prepare experts"):
        groups(fresh, kinds=("experts",))
    with pytest.raises(AtollError, match="no expert 3"):
        groups(fresh, kinds=("experts",), experts=(3,))


def test_a_student_without_its_teachers_is_refused(fresh: Path) -> None:
    with pytest.raises(AtollError, match="0, 2 are neither finished nor asked for"):
        groups(fresh, kinds=("prepare", "experts", "student"), experts=(1,))


def test_every_job_gets_the_overrides_but_those_of_the_island(fresh: Path) -> None:
    overrides = {"train.total_images": "64", "island.gpus": "2"}
    config = configuration.load(fresh, overrides)
    for group in found(fresh, config, kinds=WORK, overrides=overrides):
        for step in group.steps:
            assert step.arguments[-2:] == ("--train.total_images", "64")


def test_a_launch_on_this_machine_starts_the_longest_job_first(fresh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By FLOPs, not by images: expert 2 has the larger network. Here each job only checks the configuration."""
    large, small = ({"name": "DiT-XS/4", "width": width, "depth": 2, "heads": 2} for width in (64, 32))
    overrides = {
        "networks.default": json.dumps(small), "networks.2": json.dumps(large), "router.network": json.dumps(small),
        "train.total_images": "640", "router.total_images": "320", "monolith.total_images": "1280",
    }  # fmt: skip
    config = configuration.load(fresh, overrides)
    kinds = ("prepare", "experts", "router", "monolith")
    planned = with_flops(fresh, config, found(fresh, config, kinds=kinds, experts=(0, 2)))[1:]
    assert [step.images for group in planned for step in group.steps] == [640, 640, 320, 1280]

    def checks_only(group: Group) -> Group:
        return replace(group, steps=tuple(replace(step, arguments=("config", str(fresh))) for step in group.steps))

    launcher = open_launcher("local", Setting(fresh, config.island, at_once=1))
    launcher.submit([checks_only(group) for group in planned], {})
    launcher.wait(planned)
    started = re.findall(r"^(\S+): started", capfd.readouterr().err, re.MULTILINE)
    assert started == ["experts/002", "monolith", "experts/000", "router"]


def test_jobs_that_cannot_be_resolved_yet_keep_their_order(fresh: Path) -> None:
    """The shape of the latents of an unknown autoencoder is known only after the preparation."""
    config = configuration.load(fresh, {"latents.autoencoder": "someone/unknown"})
    assert {step.flops for group in with_flops(fresh, config, found(fresh, config)) for step in group.steps} == {0}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments, "--print"]) == 0
    return capsys.readouterr().out


def test_print_shows_every_command_and_submits_nothing(fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(fresh.rglob("*"))
    text = printed(capsys, str(fresh), "--on", "local", "--island.processes", "2", "--island.cores", "6")
    assert "torch.distributed.run --standalone --nproc-per-node 2 -m atoll.cli train" in text
    assert text.count(" -m atoll.cli train") == 4
    assert f"atoll.cli prepare {fresh}" in text
    assert text.count("OMP_NUM_THREADS=3") == 4, "each process has its part of the island's cores"
    assert sorted(fresh.rglob("*")) == before


def test_the_scripts_for_slurm_are_valid_and_say_what_was_asked(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    island = ("--island.nodes", "2", "--island.gpus", "8", "--island.cores", "64", "--island.hours", "1.5")
    more = ("--island.sbatch", "[--partition=gpu]", "--island.setup", "[module load cuda]", "--island.memory_gb", "2")
    text = printed(capsys, str(fresh), "--on", "slurm", "--prepare-workers", "2", "--max-parallel", "4", *island, *more)
    scripts = ["#!/bin/bash" + part for part in text.split("#!/bin/bash")[1:]]
    assert len(scripts) == 8
    for script in scripts:
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        assert "#SBATCH --partition=gpu" in script
        assert "#SBATCH --time=90" in script
        assert "#SBATCH --mem=2048M" in script
        assert script.index("module load cuda") < script.index("srun")
    experts = next(script for script in scripts if "train" in script and "--expert 0" in script)
    assert "#SBATCH --array=0,1,2%4" in experts
    assert "#SBATCH --nodes=2" in experts
    assert "#SBATCH --gpus-per-node=8" in experts
    assert "#SBATCH --dependency=afterok:<job of shards>" in experts
    assert "--nnodes 2 --rdzv-backend c10d --nproc-per-node 8" in experts
    ingest = scripts[0]
    assert "--gpus" not in ingest
    assert "#SBATCH --nodes=1" in ingest
    assert "--dependency" not in ingest


def test_gpus_are_shared_out_on_one_machine(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5,6")
    config = configuration.load(fresh, {"island.gpus": "2"})
    launcher = open_launcher("local", Setting(fresh, config.island))
    *_, experts, _router = found(fresh, config)
    assert launcher.at_once == 2
    assert [launcher.environment(experts, slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["0,1", "2,5"]
    with pytest.raises(AtollError, match="3 islands of 2 GPUs do not fit: there are 5"):
        _ = open_launcher("local", Setting(fresh, config.island, at_once=3)).at_once
    two_nodes = configuration.load(fresh, {"island.nodes": "2"}).island
    with pytest.raises(AtollError, match="has one node"):
        _ = open_launcher("local", Setting(fresh, two_nodes)).at_once


def documented_task() -> str:
    """Return the SkyPilot task of docs/how-to/train-on-cloud-machines.md."""
    text = (Path(__file__).parents[2] / "docs/how-to/train-on-cloud-machines.md").read_text(encoding="utf-8")
    found = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return found[0]


def test_the_documented_task_for_clouds_installs_this_checkout_and_joins() -> None:
    task = yaml.safe_load(documented_task())
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as stream:
        extras = tomllib.load(stream)["project"]["optional-dependencies"]
    assert task["workdir"] == "."
    assert task["setup"] == "pip install -e '.[islands]'"
    assert "islands" in extras
    program, verb, *options = shlex.split(task["run"].replace("$ATOLL_RUN", task["envs"]["ATOLL_RUN"]))
    assert (program, verb) == ("atoll", "join")
    assert tyro.cli(VERBS[verb], args=options).url == "s3://bucket/run"


@pytest.mark.slow
def test_skypilot_accepts_the_documented_task(tmp_path: Path) -> None:
    sky = shutil.which("sky")
    if sky is None:
        pytest.skip("SKYPILOT IS NOT TESTED: sky is not installed")
    file = tmp_path / "task.yaml"
    file.write_text(documented_task())
    python = Path(sky).parent / "python"
    check = f"import sky; print(sky.Task.from_yaml({str(file)!r}).run)"
    environment = {**os.environ, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    answer = subprocess.run([python, "-c", check], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "atoll join" in answer.stdout


def test_preparation_in_shares_gives_the_same_bytes(fresh: Path, prepared: Path) -> None:
    """Stopped in the middle of features by a signal and launched again; two jobs side by side, from ingest on."""
    command = [sys.executable, "-m", "atoll.cli", "launch", str(fresh), "--on", "local", "--jobs", "prepare"]
    command += ["--prepare-workers", "2", "--max-parallel", "2", "--island.cores", "1", "--json"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    for line in first.stderr:
        if re.match(r"prepare/features-\d-of-2: started", line):
            first.terminate()
            break
    _, err = first.communicate(timeout=240)
    assert first.returncode == 2, err
    assert "the same command continues" in err
    second = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["submitted"][0].startswith("prepare/features-")
    for name in ("ingest", "features", "clusters", "latents", "text", *(f"shards/cluster_{k:03d}" for k in range(3))):
        assert Artifact(fresh, f"data/{name}").manifest() == Artifact(prepared, f"data/{name}").manifest(), name


def test_what_someone_else_works_on_is_neither_submitted_nor_waited_for(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = Lease.take(Store.open(fresh), "prepare", holder="another island")
    assert lease is not None
    assert main(["launch", str(fresh), "--on", "local", "--json"]) == 0
    answer = capsys.readouterr()
    assert json.loads(answer.out) == {
        "submitted": [],
        "under_way": {"prepare": "another island"},
        "later": {"experts": "prepare", "router": "prepare"},
    }
    assert "experts: waits for prepare; launch again when that is done" in answer.err
    assert not list(fresh.glob("launch/local/*"))
