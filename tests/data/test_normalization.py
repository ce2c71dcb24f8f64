"""`latents.normalization`: per channel, or by the autoencoder's own scaling and shift factor."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file

from atoll import cli
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import LATENTS, SHARDS, ChannelStatistics
from atoll.core.networks import AUTOENCODER_SCALES, LatentScale
from atoll.data.dataset import Shards
from atoll.data.prepare import prepare
from atoll.encoders.autoencoder import Statistics, scale_of
from atoll.encoders.pretrained import fingerprint
from autoencoders import write_autoencoder
from shapes import chunk_files, write_run

ONE_CLUSTER: dict[str, Any] = {"clusters": {"count": 1}, "text": {"encoder": "none"}}


def declared_by_shards(run: Path) -> dict[str, Any]:
    return dict(Artifact(run, "data/shards/cluster_000").open(SHARDS).content)


def change_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    fingerprint.cache_clear()


def test_scale_is_the_factor_of_the_autoencoder_and_the_data_keeps_its_moments(tmp_path: Path, shapes: Path) -> None:
    network = write_autoencoder(tmp_path / "vae", scaling_factor=0.36, shift_factor=0.12)
    run = tmp_path / "run"
    prepare(run, write_run(run, shapes, **ONE_CLUSTER, latents={"autoencoder": str(network), "normalization": "scale"}))
    statistics = declared_by_shards(run)["statistics"]
    assert statistics["mean"] == [0.12] * 4
    assert statistics["std"] == [1 / 0.36] * 4
    parts = [load_file(file) for file in chunk_files(run, "latents")]
    mean, std = (torch.cat([part[name] for part in parts]).double() for name in ("mean", "std"))
    splits = pq.read_table(run / "data/ingest/images.parquet")["split"].to_pylist()
    train = torch.tensor([split == "train" for split in splits])
    x0 = (mean[train] - 0.12) * 0.36
    assert_allclose(statistics["data_mean"], x0.mean((0, 2, 3)), rtol=1e-9)
    variance = x0.var((0, 2, 3), correction=0) + (0.36 * std[train]).square().mean((0, 2, 3))
    assert_allclose(statistics["data_std"], variance.sqrt(), rtol=1e-9)
    shards = Shards.open(run, [0])
    batch = shards.read(np.arange(5))
    assert_allclose(shards.statistics.normalize(batch.mean.float()), (batch.mean.float() - 0.12) * 0.36, atol=1e-6)
    assert shards.statistics.bridge_options == {name: tuple(statistics[name]) for name in ("data_mean", "data_std")}


def test_the_normalization_is_an_input_of_shards_alone(prepared: Path) -> None:
    latents = Artifact(prepared, "data/latents").open(LATENTS)
    shards = Artifact(prepared, "data/shards/cluster_000").open(SHARDS)
    assert set(latents.made_from) == {"ingest", "resolution", "autoencoder", "batch_size", "dtype", "flip", "weights"}
    assert shards.made_from["normalization"] == "per-channel"
    assert shards.content["statistics"] == latents.content["statistics"]
    assert shards.content["statistics"]["data_mean"] is None


def test_another_normalization_needs_new_shards_and_no_new_latents(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    prepare(run, write_run(run, shapes, **ONE_CLUSTER))
    by_scale = configuration.load(run, {"latents.normalization": "scale"})
    with pytest.raises(AtollError, match="data/shards/cluster_000 is stale: normalization was per-channel, now scale"):
        prepare(run, by_scale)
    shutil.rmtree(run / "data/shards")
    capsys.readouterr()
    prepare(run, by_scale)
    assert "latents: already done" in capsys.readouterr().out
    assert declared_by_shards(run)["statistics"]["std"] == [1.0] * 3


def test_the_factors_are_those_of_the_autoencoders_config(tmp_path: Path) -> None:
    assert scale_of("emoji") == LatentScale(0.8372, -0.2232)
    assert scale_of("pixels") == LatentScale(1.0, 0.0)
    network = write_autoencoder(tmp_path / "vae")
    assert scale_of(str(network)) == LatentScale(0.18215, 0.0)  # its shift_factor is null
    change_config(network, scaling_factor=...)  # as in stabilityai/sd-vae-ft-mse, which is older than the field
    assert scale_of(str(network)) == LatentScale(0.18215, 0.0)
    for name, factor in AUTOENCODER_SCALES.items():
        known = inspect.signature(getattr(diffusers, name).__init__).parameters
        assert known["scaling_factor"].default == factor


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (None, "config.json has no scaling_factor.*set latents.normalization: per-channel"),
        (0.0, "config.json: scaling_factor: Input should be greater than 0"),
        ("much", "config.json: scaling_factor: Input should be a valid number"),
    ],
)
def test_an_autoencoder_without_a_scaling_factor_is_an_error_before_encoding(
    factor: object, words: str, tmp_path: Path, shapes: Path
) -> None:
    network = write_autoencoder(tmp_path / "vae")
    change_config(network, scaling_factor=factor)
    run = tmp_path / "run"
    config = write_run(run, shapes, **ONE_CLUSTER, latents={"autoencoder": str(network), "normalization": "scale"})
    with pytest.raises(AtollError, match=words):
        prepare(run, config)
    assert not (run / "data/latents").exists()


def test_an_unknown_normalization_is_an_error_of_the_configuration(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", shapes)
    assert cli.main(["prepare", str(tmp_path / "run"), "--latents.normalization", "scaled"]) == 2
    assert "'per-channel' or 'scale'" in capsys.readouterr().err


def test_statistics_are_equal_if_they_normalize_equally() -> None:
    scale = LatentScale(0.5, 0.1)
    one, two = (Statistics((mean, 0.0), (2.0, 3.0)).under(scale) for mean in (0.0, 5.0))
    assert one == two == Statistics.of_scale(scale, 2)
    assert one.data_mean != two.data_mean
    back = Statistics.of(ChannelStatistics(**json.loads(two.declared().model_dump_json())))
    assert (back, back.data_mean, back.data_std) == (two, two.data_mean, two.data_std)
