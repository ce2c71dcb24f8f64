"""Presets of the papers: sizes, FLOPs and the output of a dry run, without any data."""

import json
from pathlib import Path

import pytest

from atoll import cli
from atoll.core import config as configuration
from atoll.core.presets import NOTES, PRESETS, PUBLISHED
from atoll.train.estimate import RunCosts, estimate_run


def costs_of(name: str, gpus: int | None = None) -> RunCosts:
    return estimate_run(Path("nowhere"), configuration.resolve(PRESETS[name]), gpus)


def test_paris_and_hddm_have_the_published_sizes() -> None:
    jobs = costs_of("laion256").jobs
    assert [job.job for job in jobs] == [*(f"experts/{k:03d}" for k in range(8)), "router"]
    assert jobs[0].parameters + 256 * 1152 == pytest.approx(605.97e6, rel=1e-4)  # the release counts positions too
    assert jobs[8].parameters + 256 * 768 == pytest.approx(129.14e6, rel=1e-4)
    objectives = configuration.resolve(PRESETS["laion256"])
    assert [objectives.objective(k).prediction == "epsilon" for k in range(8)] == [k in (0, 3) for k in range(8)]


def test_the_experts_of_24b_have_three_billion_parameters() -> None:
    found = costs_of("ddm24b", gpus=8)
    experts = found.jobs[:8]
    assert experts[0].parameters == pytest.approx(3.0e9, rel=0.01)
    assert sum(job.parameters for job in experts) == pytest.approx(24e9, rel=0.01)
    # HDDM charges DDM with 1176 A100-days; the published time on 64 GPUs is below 448.
    assert found.gpu_days["A100"] == pytest.approx(1176, rel=0.2)
    assert found.gpu_days["H100"] < 448
    assert experts[0].bytes < 80e9
    assert found.faster == [], "limited by the FLOPs of 128 images per GPU; one GPU has too little memory"
    assert costs_of("ddm24b", gpus=1).jobs[0].bytes > 60e9


def test_the_experts_of_imagenet256_divide_the_batch_as_in_ddm() -> None:
    found = costs_of("imagenet256")
    experts = found.jobs[:8]
    assert experts[0].parameters == pytest.approx(675e6, rel=0.01)
    assert sum(job.images for job in experts) == 800_000 * 256
    router, flops = found.jobs[8].flops, sum(job.flops for job in experts)
    assert 0.03 < router / flops < 0.07


def test_imagenet256_on_eight_gpus_is_limited_by_bytes_and_the_dry_run_names_what_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 images per GPU: 10 % of the rate, where one GPU per expert reaches 40 %."""
    found = costs_of("imagenet256", gpus=8)
    assert 12 < found.gpu_days["H100"] < 22
    one, sharded, larger = found.faster
    assert 4 < one.gpu_days["H100"] < 5.5
    assert sharded.gpu_days["H100"] == pytest.approx(found.gpu_days["H100"] / 2, rel=0.2)
    assert sharded.bytes < one.bytes / 4
    assert larger.gpu_days["H100"] < 0.6 * found.gpu_days["H100"]
    cli.main(["init", str(tmp_path / "run"), "--preset", "imagenet256"])
    assert cli.main(["train", str(tmp_path / "run"), "--dry-run", "--gpus", "8"]) == 0
    shown = capsys.readouterr().out
    for change in ("--gpus 1", "--train.parallel fsdp2", "--train.batch_size 64"):
        assert f"faster with {change}" in shown


def test_a_dry_run_says_with_which_settings_a_job_fits_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    own = ("--latents.autoencoder", "pixels", "--data.resolution", "64")
    cli.main(["init", run, "--preset", "images", *own])
    assert cli.main(["train", run, "--dry-run"]) == 0
    assert "fits 24 GB: yes, with --train.activation_checkpointing true" in capsys.readouterr().out
    assert cli.main(["train", run, "--expert", "0", "--dry-run", "--train.total_images", "1280"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "fits 24 GB │ yes, with --train.activation_checkpointing true" in shown


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_dry_run_needs_no_data_and_prints_the_published_costs(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.main(["init", str(run), "--preset", preset]) == 0
    assert "our choice" in (run / "atoll.yaml").read_text()
    capsys.readouterr()
    assert cli.main(["train", str(run), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "experts/000-" in shown
    for words in ("RTX 3090", "RTX 4090", "A100", "fits 24 GB: "):
        assert words in shown
    assert PUBLISHED[preset].source in shown
    assert cli.main(["train", str(run), "--router", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] is None
    assert not (run / "experts").exists()


@pytest.mark.parametrize("preset", NOTES)
def test_notes_refer_to_existing_settings(preset: str) -> None:
    settings = configuration.resolve(PRESETS[preset]).model_dump()
    for key in NOTES[preset]:
        section, _, name = key.partition(".")
        assert section in settings
        assert not name or name in settings[section], key


def test_the_error_of_an_unknown_autoencoder_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["init", str(tmp_path / "run"), "--latents.autoencoder", "someone/some-vae"])
    assert cli.main(["train", str(tmp_path / "run"), "--dry-run"]) == 2
    assert "someone/some-vae" in capsys.readouterr().err
