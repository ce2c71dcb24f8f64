"""`atoll init --base`: what it prints and writes, and that a refused base leaves nothing behind."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_base import tiny_base

from atoll import cli
from atoll.core import config as configuration
from atoll.encoders import base_pipeline
from base.tiny import OPTIONS, hidream


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-base")
    tiny_base().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base_pipeline.open_base.cache_clear()


def test_a_base_is_described_and_the_run_has_its_default_size(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.main(["init", str(run), "--base", str(base), "--networks.default.lora.rank", "4"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["pipeline"] == "FluxPipeline"
    assert shown["network"] == "FluxTransformer2DModel, 78,544 parameters"
    assert (shown["state"], shown["time"], shown["sign"]) == (
        "hidden_states, tokens",
        "timestep = 1 · sigma",
        "velocity = output",
    )
    assert shown["latents"] == "16 x 64 x 64 for images of 256 x 256 pixels"
    config = configuration.load(run)
    assert config.networks["default"] == {"base": str(base), "lora": {"rank": 4, "alpha": 16}}
    assert (config.data.resolution, config.clusters.count) == (256, 4)
    assert (config.train.lr, config.train.batch_size, config.train.activation_checkpointing) == (1e-4, 4, True)
    assert config.latents.autoencoder == config.text.encoder == f"base:{base}"


def test_a_resolution_on_the_command_line_is_kept(base: Path, tmp_path: Path) -> None:
    assert cli.main(["init", str(tmp_path / "run"), "--base", str(base), "--data.resolution", "64"]) == 0
    assert configuration.load(tmp_path / "run").data.resolution == 64


def test_a_refused_base_leaves_nothing_behind(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    other.mkdir()
    for part in base.iterdir():
        (other / part.name).symlink_to(part)
    (other / "scheduler").unlink()
    (other / "scheduler").mkdir()
    settings = {"_class_name": "EulerDiscreteScheduler", "rescale_betas_zero_snr": True}
    (other / "scheduler/scheduler_config.json").write_text(json.dumps(settings))
    index = json.loads((base / "model_index.json").read_text())
    (other / "model_index.json").unlink()
    (other / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", "EulerDiscreteScheduler"]}))
    assert cli.main(["init", str(run), "--base", str(other)]) == 2
    assert "EulerDiscreteScheduler has rescale_betas_zero_snr" in capsys.readouterr().err
    assert not run.exists()


def test_a_pipeline_that_scales_images_has_its_own_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for 64 pixels, it makes 256."""
    base, options = tmp_path / "base", f"--networks.default.options={json.dumps(OPTIONS['hidream'])}"
    hidream(128).save_pretrained(base)
    assert cli.main(["init", str(tmp_path / "run"), "--base", str(base), options]) == 0
    config = configuration.load(tmp_path / "run")
    assert config.data.resolution == 256
    opened = base_pipeline.open_base(config.latents.autoencoder)
    assert opened.encode(np.zeros((1, 256, 256, 3), np.uint8))["mean"].shape == (1, 4, 128, 128)
    assert cli.main(["init", str(tmp_path / "other"), "--base", str(base), options, "--data.resolution", "64"]) == 2
    error = capsys.readouterr().err
    assert "asked for an image of 64x64 pixels, the pipeline makes one of 256x256; set data.resolution to 256" in error


def test_a_pipeline_that_cannot_decode_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(base, tmp_path / "broken"))
    values = json.loads((broken / "vae/config.json").read_text())
    (broken / "vae/config.json").write_text(json.dumps({**values, "scaling_factor": None}))
    assert cli.main(["init", str(tmp_path / "run"), "--base", str(broken)]) == 2
    assert "the pipeline fails when it decodes 64x64 pixels: unsupported operand" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "emoji"], "omit --preset or --base"),
        (["--networks.default", "DiT-S/2"], "name different networks"),
        (["--networks.default.lora.rank", "0"], "rank"),
    ],
)
def test_options_that_contradict_a_base_are_errors(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", str(tmp_path / "run"), "--base", "./nowhere", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_peft_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("atoll.cli.start.find_spec", lambda _: None)
    assert cli.main(["init", str(tmp_path / "run"), "--base", "./nowhere"]) == 2
    assert "pip install 'atoll[base]'" in capsys.readouterr().err
