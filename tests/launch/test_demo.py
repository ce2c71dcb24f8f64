"""The demo: what it plans, that it goes on where it was, and, slowly, all of it."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from atoll import cli
from atoll.core.artifacts import Artifact
from atoll.core.config import Config, load
from atoll.core.errors import AtollError
from atoll.data.sources.base import Options
from atoll.data.sources.emoji import EmojiSource
from atoll.launch import demo
from atoll.train.cost import image_cost
from atoll.train.spec import TrainSpec, resolve_job
from train.conftest import merge
from train.workers import TINY


@pytest.fixture
def run(prepared: Path, tmp_path: Path) -> Path:
    """A small prepared run with tiny networks."""
    shutil.copytree(prepared / "data", tmp_path / "run" / "data")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY)
    (tmp_path / "run" / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return tmp_path / "run"


def test_minutes_scale_the_samples() -> None:
    usual, longer = demo.scaled(demo.MINUTES), demo.scaled(2 * demo.MINUTES - demo.AROUND)
    assert longer.train.samples == 2 * usual.train.samples
    assert longer.router.samples == 2 * (usual.router.samples or 0)
    assert longer.train.samples % longer.train.batch == 0
    assert longer.model_copy(update={"train": usual.train, "router": usual.router}) == usual
    with pytest.raises(AtollError, match="no time for training"):
        demo.scaled(demo.AROUND)


def test_the_plan_has_a_ddpm_expert_and_a_monolith_of_equal_flops(tmp_path: Path) -> None:
    config = demo.scaled(demo.MINUTES)
    planned = {job.name: job for job in demo.jobs(config)}
    experts = [name for name in planned if name.startswith("experts/")]
    assert len(experts) == config.clusters.count >= 4
    objectives = [config.objective(number).prediction for number in range(config.clusters.count)]
    assert objectives.count("epsilon") >= 1
    assert objectives.count("velocity") == len(objectives) - objectives.count("epsilon")

    def flops(job: TrainSpec, samples: int) -> int:
        return samples * image_cost(job.network, job.shapes).training_flops(checkpointing=False)

    spent = [
        flops(resolve_job(tmp_path, config, "expert", expert=number), planned[name].samples)
        for number, name in enumerate(experts)
    ]
    assert flops(resolve_job(tmp_path, config, "monolith"), planned["monolith"].samples) == sum(spent)


def test_the_prompts_are_captions_of_the_data_and_three_of_them_unseen() -> None:
    data = demo.scaled(demo.MINUTES).data
    source = EmojiSource(data.source.removeprefix("emoji:"), Options(held_out=data.held_out))
    split = {sample.caption: sample.split for sample in source.samples()}
    assert [split[prompt] for prompt in demo.PROMPTS] == ["train"] * 9 + ["held-out"] * 3


def test_the_last_line_offers_the_studio() -> None:
    assert "atoll serve runs/x " in demo.farewell(Path("runs/x"), Path("report.html"), 60).splitlines()[-1]


def test_settings_that_are_there_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = demo.settle(tmp_path, 10)
    assert first == demo.scaled(10) == load(tmp_path)
    assert demo.settle(tmp_path, 20) == first
    assert "not --minutes 20" in capsys.readouterr().out
    assert cli.main(["demo", "--run", str(tmp_path), "--train.lr", "1"]) == 2


def test_a_half_written_journal_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    job = demo.Job("experts/000", (), 100)
    assert demo.position(tmp_path, job) == 0
    (tmp_path / "experts/000").mkdir(parents=True)
    (tmp_path / "experts/000/metrics.jsonl").write_text(
        json.dumps({"samples": 40, "loss": 1.0, "samples_per_second": 2.0}) + "\n" + '{"samples": 8'
    )
    assert demo.position(tmp_path, job) == 40


def done(run: Path, config: Config) -> list[str]:
    return [job.name for job in demo.jobs(config) if Artifact(run, f"{job.name}/final").manifest()]


def test_training_does_what_is_missing_and_a_failure_tells_its_last_words(run: Path) -> None:
    config = load(run)
    wanted = [job for job in demo.missing(run, config) if job.name in ("experts/001", "router")]
    demo.train(run, wanted)
    assert done(run, config) == ["experts/001", "router"]
    assert [job.name for job in demo.missing(run, config)] == ["monolith", "experts/000", "experts/002"]
    with pytest.raises(AtollError, match="there is no expert 9"):
        demo.train(run, [demo.Job("experts/009", ("--expert", "9"), 100)])


def test_a_stopped_demo_lets_its_networks_save(run: Path) -> None:
    """SIGTERM while an expert trains: it saves, and training goes on from there."""
    config = load(run)
    job = demo.Job("experts/000", ("--expert", "0", "--train.samples", "400000"), 400_000)
    code = f"from pathlib import Path; from atoll.launch import demo; demo.train(Path({str(run)!r}), [demo.{job!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while demo.position(run, job) < 200 and process.poll() is None:
        time.sleep(0.1)
    process.terminate()
    assert "the same command continues" in process.communicate(timeout=60)[1]
    assert "stopped at" in demo.log_of(run, job).read_text()
    assert list((run / "experts/000/checkpoints").iterdir())
    assert "experts/000" in [job.name for job in demo.missing(run, config)]


@pytest.mark.slow
def test_the_whole_demo_at_a_small_scale(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "run"
    assert cli.main(["demo", "--minutes", "4.1", "--run", str(folder)]) == 0
    said = capfd.readouterr()
    assert str(folder / "report.html") in said.out
    assert "atoll sample" in said.out
    assert done(folder, load(folder)) == [job.name for job in demo.jobs(load(folder))]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(f'alt="experts top-2: {prompt}"' in page for prompt in demo.PROMPTS)
    assert cli.main(["demo", "--minutes", "4.1", "--run", str(folder)]) == 0
    assert "training: " not in capfd.readouterr().err
