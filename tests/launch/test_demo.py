"""The demo: its plan, its resumption, and (slow) a complete run."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from atoll import cli
from atoll.apps.launch import demo
from atoll.apps.launch.launch import names_of
from atoll.apps.launch.local import images_seen
from atoll.apps.launch.steps import JobStep, LaunchRequest, missing_groups
from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Content
from atoll.core.config import load
from atoll.core.errors import AtollError
from atoll.data.sources.emoji import EmojiSource
from atoll.data.sources.source import SourceOptions
from atoll.experts.cost import image_cost
from atoll.train.spec import TrainSpec, resolve_job
from train.conftest import merge
from train.workers import TINY, metrics
from waiting import HOUR


@pytest.fixture
def run(prepared: Path, tmp_path: Path) -> Path:
    """A small prepared run with tiny networks."""
    shutil.copytree(prepared / "data", tmp_path / "run" / "data")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY)
    (tmp_path / "run" / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return tmp_path / "run"


def test_minutes_scale_the_number_of_images() -> None:
    usual, longer = demo.scaled(demo.MINUTES), demo.scaled(2 * demo.MINUTES - demo.OVERHEAD_MINUTES)
    assert longer.train.total_images == 2 * usual.train.total_images
    assert longer.router.total_images == 2 * (usual.router.total_images or 0)
    assert longer.monolith.total_images == 2 * (usual.monolith.total_images or 0)
    assert longer.train.total_images % longer.train.batch_size == 0
    sections = {"train": usual.train, "router": usual.router, "monolith": usual.monolith}
    assert longer.model_copy(update=sections) == usual
    with pytest.raises(AtollError, match="no time for training"):
        demo.scaled(demo.OVERHEAD_MINUTES)


@pytest.mark.parametrize("minutes", [demo.MINUTES, 7.3])
def test_the_plan_has_another_objective_and_a_monolith_of_equal_flops(minutes: float, tmp_path: Path) -> None:
    config = demo.scaled(minutes)
    count = config.clusters.count
    assert count >= 4
    objectives = [config.objective(number).prediction for number in range(count)]
    assert sorted(objectives) == ["velocity", *["x0"] * (count - 1)]

    def flops(job: TrainSpec) -> int:
        return job.settings.total_images * image_cost(job.network, job.shapes).training_flops(job.settings)

    spent = [flops(resolve_job(tmp_path, config, "expert", expert=number)) for number in range(count)]
    assert flops(resolve_job(tmp_path, config, "monolith")) == sum(spent)


def test_the_prompts_are_captions_and_three_of_them_are_validation() -> None:
    data = demo.scaled(demo.MINUTES).data
    source = EmojiSource(data.source.removeprefix("emoji:"), SourceOptions(val_fraction=data.val_fraction))
    split = {image.caption: image.split for image in source.images()}
    assert [split[prompt] for prompt in demo.PROMPTS] == ["train"] * 9 + ["validation"] * 3


def test_the_last_line_offers_the_studio() -> None:
    assert "atoll serve runs/x " in demo.next_steps(Path("runs/x"), Path("report.html"), 60).splitlines()[-1]


def test_existing_settings_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = demo.load_or_write_config(tmp_path, 10)
    assert first == demo.scaled(10) == load(tmp_path)
    assert demo.load_or_write_config(tmp_path, 20) == first
    assert "--minutes is ignored" in capsys.readouterr().out
    assert cli.main(["demo", "--run", str(tmp_path), "--train.lr", "1"]) == 2


def test_partly_written_metrics_are_read_up_to_the_last_complete_line(tmp_path: Path) -> None:
    step = JobStep("experts/000", 0, (), 100)
    assert images_seen(tmp_path, step) == 0
    (tmp_path / "experts/000").mkdir(parents=True)
    (tmp_path / "experts/000/metrics.jsonl").write_text(
        json.dumps({"images": 40, "loss": 1.0, "images_per_second": 2.0}) + "\n" + '{"images": 8'
    )
    assert images_seen(tmp_path, step) == 40


def missing(run: Path) -> list[str]:
    return names_of(missing_groups(run, load(run), LaunchRequest(("experts", "router", "monolith"))))


def finished(run: Path, *jobs: str) -> None:
    for job in jobs:
        Artifact(run, layout.final(job)).begin(ArtifactKind("test", Content), {})
        Artifact(run, layout.final(job)).commit({})


def test_only_unfinished_jobs_are_trained_and_a_failure_prints_the_end_of_its_log(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished(run, "experts/000", "experts/002", "monolith")
    assert missing(run) == ["experts/001", "router"]
    demo.train(run, load(run))
    assert missing(run) == []
    assert metrics(run, "experts/001")[-1]["images"] == metrics(run, "router")[-1]["images"] == 160
    assert not (run / "experts/000/metrics.jsonl").exists()

    shutil.rmtree(run / "experts/002/final")
    next((run / "data/shards/cluster_002").glob("*.safetensors")).unlink()
    with pytest.raises(AtollError, match="not finished: experts/002;"):
        demo.train(run, load(run))
    assert "is missing although the manifest lists it" in capfd.readouterr().err


def test_a_stopped_demo_saves_checkpoints(run: Path) -> None:
    """After SIGTERM during training, the networks save checkpoints."""
    finished(run, "experts/001", "experts/002", "router", "monolith")
    code = "from pathlib import Path; from atoll.core.config import load; from atoll.apps.launch import demo; "
    code += f"run = Path({str(run)!r}); demo.train(run, load(run))"
    file = run / "atoll.yaml"
    file.write_text(yaml.safe_dump(merge(yaml.safe_load(file.read_text()), {"train": {"total_images": 400_000}})))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while images_seen(run, JobStep("experts/000", 0, (), 400_000)) < 200 and process.poll() is None:
        time.sleep(0.1)
    process.terminate()
    assert "run the same command again to resume" in process.communicate(timeout=HOUR)[1]
    assert "interrupted and saved at" in (run / layout.LAUNCH_LOGS / "experts/000.log").read_text()
    assert list((run / "experts/000/checkpoints").iterdir())
    assert missing(run) == ["experts/000"]


@pytest.mark.slow
def test_the_whole_demo_at_a_small_scale(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "run"
    assert cli.main(["demo", "--minutes", "4.1", "--run", str(folder)]) == 0
    output = capfd.readouterr()
    assert str(folder / "report.html") in output.out
    assert "atoll sample" in output.out
    assert missing(folder) == []
    started = re.findall(r"^(\S+): started for ([\d,]+) images", output.err, re.MULTILINE)
    assert started[0][0] == "monolith"
    assert started[-1][0] == "router"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(f'alt="experts top-2: {prompt}"' in page for prompt in demo.PROMPTS)
    assert cli.main(["demo", "--minutes", "4.1", "--run", str(folder)]) == 0
    assert ": started" not in capfd.readouterr().err
