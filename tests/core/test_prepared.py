"""Overrides that prepared data does not allow are errors of `atoll train`."""

import shutil
from pathlib import Path

import pytest

from atoll import cli
from atoll.core import config, layout
from atoll.core.errors import AtollError
from atoll.core.prepared import check_overrides

CHANGED = {
    "data.resolution": "48", "data.chunk": "8", "data.buckets": "auto", "data.flip": "true", "data.shard_rows": "99",
    "features.model": "other", "clusters.count": "4", "clusters.seed": "1", "latents.dtype": "float32",
    "latents.normalization": "scale", "text.max_tokens": "13",
}  # fmt: skip
SAME = {
    "data.resolution": "32", "data.flip": "false", "data.buckets": "off", "clusters.count": "3",
    "text.encoder": "minilm", "latents.normalization": "per-channel", "data.workers": "7",
    "data.source": "moved", "train.lr": "0.5",
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
