"""The jobs of a run, their dependencies, and what would be submitted."""

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

from atoll.apps.launch.launcher import LaunchSettings
from atoll.apps.launch.local import Local
from atoll.apps.launch.steps import Group, JobStep, LaunchRequest, missing_groups, with_flops
from atoll.apps.share.leases import Lease
from atoll.apps.share.store import Store
from atoll.cli import VERBS, main
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Content
from atoll.core.errors import AtollError
from atoll.core.presets import PRESETS
from shapes import write_run
from waiting import HOUR

ALL_KINDS = ("prepare", "experts", "router", "monolith", "student")


@pytest.fixture
def fresh(shapes: Path, tmp_path: Path) -> Path:
    write_run(tmp_path / "run", shapes)
    return tmp_path / "run"


def groups(run: Path, *overrides: str, **request: object) -> dict[str, tuple[list[str], tuple[str, ...]]]:
    config = configuration.load(run, dict(zip(overrides[::2], overrides[1::2], strict=True)))
    return {
        group.name: ([step.name for step in group.steps], group.needs)
        for group in planned_groups(run, config, **request)
    }


def planned_groups(run: Path, config: configuration.Config, **request: object) -> list:
    return missing_groups(run, config, LaunchRequest(**request))


def commit(run: Path, name: str) -> None:
    artifact = Artifact(run, name)
    artifact.begin(ArtifactKind("test", Content), {})
    artifact.commit({})


def test_a_stage_inherits_the_dependencies_of_a_stage_that_is_left_out(fresh: Path) -> None:
    """Random clusters do not need features, but they need the ingested images."""
    planned = groups(fresh, "clusters.method", "random", kinds=ALL_KINDS, prepare_workers=2)
    assert "features" not in planned
    assert planned["clusters"][1] == ("encode",)
    assert planned["shards"][1] == ("clusters", "encode", "text"), "patches are left out"


def test_the_plan_of_a_new_run_with_two_prepare_workers(fresh: Path) -> None:
    assert groups(fresh, kinds=ALL_KINDS, prepare_workers=2) == {
        "encode": (["prepare/encode-0-of-2", "prepare/encode-1-of-2"], ()),
        "clusters": (["prepare/clusters"], ("encode",)),
        "text": (["prepare/text-0-of-2", "prepare/text-1-of-2"], ("encode",)),
        "shards": (["prepare/shards-0-of-2", "prepare/shards-1-of-2"], ("clusters", "encode", "text")),
        "experts": (["experts/000", "experts/001", "experts/002"], ("shards",)),
        "router": (["router"], ("shards",)),
        "monolith": (["monolith"], ("shards",)),
        "student": (["student"], ("shards", "experts")),
    }


def test_no_worker_of_the_shards_is_without_a_cluster(fresh: Path) -> None:
    shards, _ = groups(fresh, prepare_workers=8)["shards"]
    assert shards == [f"prepare/shards-{worker}-of-3" for worker in range(3)]


def test_the_plan_of_a_new_run_with_one_prepare_worker(fresh: Path) -> None:
    assert groups(fresh) == {
        "prepare": (["prepare"], ()),
        "experts": (["experts/000", "experts/001", "experts/002"], ("prepare",)),
        "router": (["router"], ("prepare",)),
    }


def test_finished_jobs_are_not_planned(fresh: Path) -> None:
    for name in [layout.shards(0), layout.shards(1), layout.shards(2), "experts/001/final", "router/final"]:
        commit(fresh, name)
    assert [names for names, _ in groups(fresh).values()] == [["experts/000", "experts/002"]]
    for name in ("experts/000/final", "experts/002/final"):
        commit(fresh, name)
    assert groups(fresh) == {}


def test_some_experts_need_only_their_own_shards(fresh: Path) -> None:
    commit(fresh, layout.shards(2))
    assert list(groups(fresh, kinds=("experts",), experts=(2,))) == ["experts"]
    with pytest.raises(AtollError, match="has no shards yet; prepare them too with --jobs prepare experts"):
        groups(fresh, kinds=("experts",))
    with pytest.raises(AtollError, match="no expert 3"):
        groups(fresh, kinds=("experts",), experts=(3,))


def test_a_shared_start_precedes_the_experts(fresh: Path) -> None:
    """Experts include it. Router and monolith do not wait for it, and finished experts do not need it."""
    share, jobs = ("shared_start.flops_share", "0.25"), ["experts/000", "experts/001", "experts/002"]
    assert groups(fresh, *share, kinds=("prepare", "experts", "router", "monolith")) == {
        "prepare": (["prepare"], ()),
        "start": (["start"], ("prepare",)),
        "experts": (jobs, ("prepare", "start")),
        "router": (["router"], ("prepare",)),
        "monolith": (["monolith"], ("prepare",)),
    }
    config = configuration.load(fresh, {share[0]: share[1], "train.total_images": "640", "train.batch_size": "8"})
    planned = planned_groups(fresh, config, kinds=("prepare", "experts"))[1:]
    assert [step.images for group in planned for step in group.steps] == [480, 480, 480, 480]
    assert planned[0].steps[0].arguments == ("train", str(fresh), "--start")
    for cluster in range(3):
        commit(fresh, layout.shards(cluster))
    assert list(groups(fresh, *share, kinds=("start",))) == ["start"]
    assert list(groups(fresh, *share, kinds=("experts",), experts=(1,))) == ["start", "experts"]
    commit(fresh, "experts/001/final")
    assert groups(fresh, *share, kinds=("experts",), experts=(1,)) == {}
    commit(fresh, "start/final")
    assert groups(fresh, *share, kinds=("experts",)) == {"experts": (jobs[::2], ("prepare", "start"))}
    with pytest.raises(AtollError, match=r"has no shared start; set shared_start.flops_share"):
        groups(fresh, kinds=("start",))


def test_a_student_without_its_teachers_is_refused(fresh: Path) -> None:
    with pytest.raises(AtollError, match="0, 2 are neither finished nor requested"):
        groups(fresh, kinds=("prepare", "experts", "student"), experts=(1,))
    with pytest.raises(AtollError, match=r"1, 2 are .* requested\. Add them with --jobs experts students"):
        groups(fresh, "student.steps", "4", kinds=("prepare", "students"), experts=(1, 2))


def test_few_step_students_need_their_own_expert_and_shards_only(fresh: Path) -> None:
    few, students = (
        ("student.steps", "4", "student.total_images", "320"),
        ["students/000", "students/001", "students/002"],
    )
    planned = groups(fresh, *few, kinds=("prepare", "experts", "students"))
    assert planned["students"] == (students, ("prepare", "experts"))
    commit(fresh, layout.shards(2))
    commit(fresh, "experts/002/final")
    config = configuration.load(fresh, dict(zip(few[::2], few[1::2], strict=True)))
    (group,) = planned_groups(fresh, config, kinds=("students",), experts=(2,))
    assert [step.name for step in group.steps] == ["students/002"]
    assert group.steps[0].arguments == ("train", str(fresh), "--student", "--expert", "2")
    assert group.steps[0].images == 320
    commit(fresh, "students/002/final")
    assert groups(fresh, *few, kinds=("students",), experts=(2,)) == {}
    with pytest.raises(AtollError, match=r"students have few steps; set student\.steps"):
        groups(fresh, kinds=("students",), experts=(2,))


def test_every_job_gets_all_overrides_except_those_of_the_island(fresh: Path) -> None:
    overrides = {"train.total_images": "64", "island.gpus": "2"}
    config = configuration.load(fresh, overrides)
    for group in planned_groups(fresh, config, kinds=ALL_KINDS, overrides=overrides):
        for step in group.steps:
            assert step.arguments[-2:] == ("--train.total_images", "64")


def test_a_local_launch_starts_the_longest_job_first(fresh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The order is by FLOPs, not by images: expert 2 has the larger network. Each job only checks the configuration."""
    large, small = ({"name": "DiT-XS/4", "width": width, "depth": 2, "heads": 2} for width in (64, 32))
    overrides = {
        "networks.default": json.dumps(small), "networks.2": json.dumps(large), "router.network": json.dumps(small),
        "train.total_images": "640", "router.total_images": "320", "monolith.total_images": "1280",
    }  # fmt: skip
    config = configuration.load(fresh, overrides)
    kinds = ("prepare", "experts", "router", "monolith")
    planned = with_flops(fresh, config, planned_groups(fresh, config, kinds=kinds, experts=(0, 2)))[1:]
    assert [step.images for group in planned for step in group.steps] == [640, 640, 320, 1280]

    def checks_only(group: Group) -> Group:
        return replace(group, steps=tuple(replace(step, arguments=("config", str(fresh))) for step in group.steps))

    launcher = Local(LaunchSettings(fresh, config.island, max_parallel=1))
    launcher.submit([checks_only(group) for group in planned], {})
    launcher.wait(planned)
    started = re.findall(r"^(\S+): started", capfd.readouterr().err, re.MULTILINE)
    assert started == ["experts/002", "monolith", "experts/000", "router"]


def test_jobs_that_cannot_be_resolved_yet_keep_their_order(fresh: Path) -> None:
    """The shape of the latents of an unknown autoencoder is known only after the preparation."""
    config = configuration.load(fresh, {"latents.autoencoder": "someone/unknown"})
    assert {
        step.flops for group in with_flops(fresh, config, planned_groups(fresh, config)) for step in group.steps
    } == {0}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments, "--print"]) == 0
    return capsys.readouterr().out


def test_overrides_of_the_first_launch_are_written_into_the_settings(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cluster in range(3):
        commit(fresh, layout.shards(cluster))
    kinds = ("--jobs", "experts", "--experts", "1")
    assert main(["launch", str(fresh), *kinds, "--train.total_images", "2048", "--print"]) == 0
    assert configuration.load(fresh).train.total_images != 2048
    commit(fresh, layout.final("experts/001"))  # nothing is left to do
    (fresh / "experts").rename(fresh / "later")
    assert main(["launch", str(fresh), "--jobs", "prepare", "--experts", "1", "--train.total_images", "2048"]) == 0
    assert f"written into {fresh}/atoll.yaml: train.total_images 2048\n" in capsys.readouterr().err
    assert configuration.load(fresh).train.total_images == 2048
    (fresh / "later").rename(fresh / "experts")
    assert main(["launch", str(fresh), *kinds, "--train.total_images", "4096"]) == 0
    assert "for the jobs of this launch only: train.total_images 4096\n" in capsys.readouterr().err
    assert configuration.load(fresh).train.total_images == 2048


def test_print_shows_every_command_and_submits_nothing(fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(fresh.rglob("*"))
    text = printed(capsys, str(fresh), "--on", "local", "--island.processes", "2", "--island.cores", "6")
    assert "torch.distributed.run --standalone --nproc-per-node 2 -m atoll.cli train" in text
    assert text.count(" -m atoll.cli train") == 4
    assert f"atoll.cli prepare {fresh}" in text
    assert text.count("OMP_NUM_THREADS=3") == 4, "each process must get its part of the island's cores"
    assert sorted(fresh.rglob("*")) == before


def test_the_slurm_scripts_are_valid_and_have_the_requested_options(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    island = ("--island.nodes", "2", "--island.gpus", "8", "--island.cores", "64", "--island.hours", "1.5")
    more = ("--island.sbatch", "[--partition=gpu]", "--island.setup", "[module load cuda]", "--island.memory_gb", "2")
    text = printed(capsys, str(fresh), "--on", "slurm", "--prepare-workers", "2", "--max-parallel", "4", *island, *more)
    scripts = ["#!/bin/bash" + part for part in text.split("#!/bin/bash")[1:]]
    assert len(scripts) == 6
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
    encode, clusters = scripts[:2]
    assert "--stage ingest features latents --worker 1/2" in encode
    assert "#SBATCH --gpus-per-node=1" in encode
    assert "#SBATCH --nodes=1" in encode
    assert "--dependency" not in encode
    assert "--stage clusters" in clusters
    assert "--gpus" not in clusters


def test_gpus_are_divided_among_parallel_jobs(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5,6")
    config = configuration.load(fresh, {"island.gpus": "2"})
    launcher = Local(LaunchSettings(fresh, config.island))
    *_, experts, _router = planned_groups(fresh, config)
    assert launcher.max_parallel == 2
    assert [launcher.environment(experts, slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["0,1", "2,5"]
    with pytest.raises(AtollError, match="3 islands of 2 GPUs do not fit: there are 5"):
        _ = Local(LaunchSettings(fresh, config.island, max_parallel=3)).max_parallel
    two_nodes = configuration.load(fresh, {"island.nodes": "2"}).island
    with pytest.raises(AtollError, match="supports one node"):
        _ = Local(LaunchSettings(fresh, two_nodes)).max_parallel


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_by_default_every_gpu_of_the_machine_gets_an_island(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    config = configuration.load(fresh)
    assert config.island.gpus == "auto"
    *_, experts, _router = planned_groups(fresh, config)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, "0,3,5")
    launcher = Local(LaunchSettings(fresh, config.island))
    assert launcher.max_parallel == 3
    assert [launcher.environment(experts, slot)[variable] for slot in range(3)] == ["0", "3", "5"]
    shared = Local(LaunchSettings(fresh, config.island, max_parallel=4))
    assert shared.environment(experts, 3)[variable] == "0", "more jobs than GPUs share them"
    monkeypatch.setenv(variable, "")
    launcher = Local(LaunchSettings(fresh, config.island))
    assert launcher.max_parallel == 1
    assert variable not in launcher.environment(experts, 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_for_gpus_request_one_from_slurm_and_ray(
    preset: str, fresh: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, gpus = str(tmp_path / "other"), int(preset not in ("emoji", "demo"))
    assert main(["init", run, "--preset", preset, "--data.source", configuration.load(fresh).data.source]) == 0
    assert main(["launch", run, "--on", "slurm", "--print"]) == 0
    shown = capsys.readouterr()
    assert f"island.gpus is auto: jobs request {'one' if gpus else 'no'} GPU" in shown.err
    scripts = shown.out.split("#!/bin/bash")[1:]
    assert [script.count("#SBATCH --gpus-per-node=1\n") for script in scripts] == [gpus] * 3  # prepare, experts, router
    assert "torch.distributed.run" not in shown.out
    tasks = re.findall("# .* x ({.*})", printed(capsys, run, "--on", "ray"))
    assert tasks == ["{'CPU': 1.0, 'GPU': 1.0}" if gpus else "{'CPU': 1.0}"] * len(tasks) != []
    assert "gpus-per-node" not in printed(capsys, run, "--on", "slurm", "--island.gpus", "0")


GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
RECORD = """
import json, os, sys, time
from pathlib import Path

folder, name, expected, *variables = sys.argv[1:]
Path(folder, name).write_text(json.dumps([os.environ.get(variable) for variable in variables]))
deadline = time.monotonic() + 3600
while len(os.listdir(folder)) < int(expected):
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""


class Recording(LaunchSettings):
    """Each step writes the GPUs that it got, and ends when all steps of its group have written theirs."""

    def command(self, group: Group, step: JobStep) -> list[str]:
        folder = self.run.parent / "gpus" / group.name
        folder.mkdir(parents=True, exist_ok=True)
        return [sys.executable, "-c", RECORD, str(folder), str(step.index), str(len(group.steps)), *GPU_VARIABLES]


@pytest.mark.parametrize("variable", GPU_VARIABLES)
def test_jobs_that_run_at_the_same_time_have_different_gpus(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in GPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1,4,6")
    config = configuration.load(fresh)
    groups = [group for group in planned_groups(fresh, config) if group.name != "router"]
    launcher = Local(Recording(fresh, config.island))
    launcher.submit(groups, {})
    launcher.wait(groups)
    found = {
        group.name: [json.loads(file.read_text()) for file in sorted((fresh.parent / "gpus" / group.name).iterdir())]
        for group in groups
    }
    chosen = [name == variable for name in GPU_VARIABLES]
    assert found["prepare"] == [["1" if own else None for own in chosen]], "preparation uses one GPU"
    assert found["experts"] == [[gpu if own else None for own in chosen] for gpu in ("1", "4", "6")]


def test_a_machine_whose_gpus_are_hidden_has_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration.load(fresh)
    prepare = planned_groups(fresh, config)[0]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        launcher = Local(LaunchSettings(fresh, config.island))
        assert "CUDA_VISIBLE_DEVICES" not in launcher.environment(prepare, 0)


def documented_task() -> str:
    """Return the SkyPilot task of docs/how-to/train-on-cloud-machines.md."""
    text = (Path(__file__).parents[2] / "docs/how-to/train-on-cloud-machines.md").read_text(encoding="utf-8")
    found = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return found[0]


def test_the_documented_cloud_task_installs_this_checkout_and_joins() -> None:
    task = yaml.safe_load(documented_task())
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as stream:
        extras = tomllib.load(stream)["project"]["optional-dependencies"]
    assert task["workdir"] == "."
    assert task["setup"] == "pip install -e '.[islands]'"
    assert "islands" in extras
    private, join = task["run"].split(" && ")
    assert private == 'chmod 600 "$ATOLL_KEY"', "a key that other users can read is refused"
    program, verb, *options = shlex.split(join.replace("$ATOLL_RUN", task["envs"]["ATOLL_RUN"]))
    assert (program, verb) == ("atoll", "join")
    assert tyro.cli(VERBS[verb], args=options).url == task["envs"]["ATOLL_RUN"]
    assert task["envs"]["ATOLL_RUN"].startswith("s3://bucket/run")


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
    result = subprocess.run([python, "-c", check], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "atoll join" in result.stdout


def test_preparation_with_several_workers_gives_equal_bytes(fresh: Path, prepared: Path) -> None:
    """Two parallel jobs from the pass on; a signal stops them during text, and a second launch resumes."""
    command = [sys.executable, "-m", "atoll.cli", "launch", str(fresh), "--on", "local", "--jobs", "prepare"]
    command += ["--prepare-workers", "2", "--max-parallel", "2", "--island.cores", "1", "--json"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    for line in first.stderr:
        if re.match(r"prepare/text-\d-of-2: started", line):
            first.terminate()
            break
    _, err = first.communicate(timeout=HOUR)
    assert first.returncode == 2, err
    assert "run the same command again to resume" in err
    second = subprocess.run(command, capture_output=True, text=True, timeout=HOUR, check=False)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["submitted"][0].startswith("prepare/")
    for name in ("ingest", "features", "clusters", "latents", "text", *(f"shards/cluster_{k:03d}" for k in range(3))):
        assert Artifact(fresh, f"data/{name}").manifest() == Artifact(prepared, f"data/{name}").manifest(), name


@pytest.mark.slow
def test_prepare_starts_one_worker_for_each_gpu(
    fresh: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher takes the GPUs from the environment; the workers find none, and use the processor."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["prepare", str(fresh)]) == 0
    shown = capfd.readouterr()
    for step in ("encode-0-of-2", "encode-1-of-2", "text-1-of-2", "clusters", "shards-0-of-2", "shards-1-of-2"):
        assert f"prepare/{step}: done" in shown.err
    assert "shards: already done" in shown.out
    for name in ("ingest", "features", "clusters", "latents", "text", *(f"shards/cluster_{k:03d}" for k in range(3))):
        assert Artifact(fresh, f"data/{name}").manifest() == Artifact(prepared, f"data/{name}").manifest(), name
    monkeypatch.setenv("ATOLL_SUBMISSION", "another")
    assert main(["prepare", str(fresh)]) == 0
    assert "one worker on each" not in capfd.readouterr().out


def test_jobs_that_run_elsewhere_are_neither_submitted_nor_waited_for(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = Lease.acquire(Store.open(fresh), "prepare", holder="another island")
    assert lease is not None
    assert main(["launch", str(fresh), "--on", "local", "--json"]) == 0
    result = capsys.readouterr()
    assert json.loads(result.out) == {
        "submitted": [],
        "running": {"prepare": "another island"},
        "blocked": {"experts": "prepare", "router": "prepare"},
    }
    assert "experts: waits for prepare; launch again when it is done" in result.err
    assert not list(fresh.glob("launch/local/*"))
