"""Overrides that prepared data does not allow are errors of `atoll train`."""

import shutil
from pathlib import Path

import pytest

from atoll import cli
from atoll.core import config, layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import INGEST
from atoll.core.prepared import check_overrides
from atoll.data.prepare import open_preparation
from atoll.data.stages import ingest
from shapes import write_run

CHANGED = {
    "data.resolution": "48", "data.chunk": "8", "data.buckets": "auto", "data.flip": "true", "data.shard_rows": "99",
    "features.model": "other", "clusters.count": "4", "clusters.seed": "1", "latents.dtype": "float32",
    "latents.normalization": "scale", "text.max_tokens": "13", "data.caption_lines": "true",
    "features.patch_dimensions": "16",
}  # fmt: skip
SAME = {
    "data.resolution": "32", "data.flip": "false", "data.buckets": "off", "clusters.count": "3",
    "text.encoder": "minilm", "latents.normalization": "per-channel", "data.workers": "7",
    "data.source": "moved", "train.lr": "0.5", "data.caption_lines": "false", "features.patch_dimensions": "0",
}  # fmt: skip


def check(run: Path, **overrides: str) -> None:
    check_overrides(run, config.load(run, overrides), overrides)


@pytest.fixture(params=["prepared here", "copied shards"])
def some_run(request: pytest.FixtureRequest, prepared: Path, tmp_path: Path) -> Path:
    if request.param == "prepared here":
        return prepared
    shutil.copytree(prepared / layout.shards(1), tmp_path / layout.shards(1))
    shutil.copy(prepared / "atoll.yaml", tmp_path)
    return tmp_path


def test_settings_that_the_prepared_data_fixes_cannot_be_overridden(some_run: Path) -> None:
    for key, value in CHANGED.items():
        with pytest.raises(AtollError, match=f"--{key}: the data of .* was prepared with"):
            check(some_run, **{key: value})
    check(some_run, **SAME)


def test_recorded_values_of_other_preparations_are_compared(shapes: Path, tmp_path: Path, with_patches: Path) -> None:
    check(with_patches, **{"features.patch_dimensions": "64"})
    for value in ("0", "32"):
        with pytest.raises(AtollError, match=f"prepared with 64, so training cannot use {value}"):
            check(with_patches, **{"features.patch_dimensions": value})
    data = {"buckets": ["32x32", "32x48"], "max_upscale": 3.0, "caption_lines": True}
    run = tmp_path / "run"
    job = open_preparation(run, write_run(run, shapes, data=data))
    index = Artifact(run, layout.INGEST)
    index.begin(INGEST, ingest.made_from(job))
    index.commit({})
    (run / layout.shards(0)).mkdir(parents=True)
    check(run, **{"data.max_upscale": "3", "data.caption_lines": "true"})
    for key, value in {"data.max_upscale": "2", "data.caption_lines": "false"}.items():
        with pytest.raises(AtollError, match=f"--{key}: the data of .* was prepared with"):
            check(run, **{key: value})


def test_overrides_of_the_preparation_are_allowed_after_it(prepared: Path, tmp_path: Path) -> None:
    """`atoll launch` passes the overrides of the preparation to the training jobs; atoll.yaml does not have them."""
    shutil.copytree(prepared / "data", tmp_path / "data")
    (tmp_path / "atoll.yaml").write_text("clusters: {count: 3}\n")
    with pytest.raises(AtollError, match=r"prepared with 32, so training cannot use 64"):
        check(tmp_path, **{"data.resolution": "64"})
    check(tmp_path, **{"data.resolution": "32"})


def test_train_refuses_an_override_without_effect(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(prepared), "--expert", "1", "--data.resolution", "48", "--dry-run"]) == 2
    assert "--data.resolution" in capsys.readouterr().err
