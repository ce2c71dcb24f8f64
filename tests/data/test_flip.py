"""Horizontal flips: which latents are stored, and which ones training reads."""

import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image
from safetensors.torch import load_file

from atoll.core.errors import AtollError
from atoll.data.dataset import Shards
from atoll.encoders.autoencoder import open_codec
from atoll.flow import rng
from autoencoders import write_autoencoder
from shapes import rewrite
from streams import stream

ALL = [0, 1, 2]
FLIP = {"data": {"flip": True}}


@pytest.fixture(scope="module")
def flipped(prepared: Path, tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run in pixel space with flips."""
    run = tmp_path_factory.mktemp("flipped") / "run"
    return rewrite(prepared, run, shapes, stages=("ingest", "features", "clusters", "latents", "text"), **FLIP)


@pytest.fixture(scope="module")
def encoded(prepared: Path, tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run with flips and an autoencoder."""
    folder = tmp_path_factory.mktemp("encoded")
    latents = {"autoencoder": str(write_autoencoder(folder / "vae")), "dtype": "float32"}
    stages = ("ingest", "features", "clusters", "text")
    return rewrite(prepared, folder / "run", shapes, stages=stages, latents=latents, **FLIP)


def test_mirrored_pixels_are_those_of_the_mirror_image(flipped: Path, prepared: Path, shapes: Path) -> None:
    """The expected values come from the files of the source; the shards have the same tensors as without flips."""
    shards, rows = Shards.open(flipped, ALL), np.array([3, 41, 0])
    batch = shards.read(rows, torch.tensor([True, False, True]))
    for row, (id, mirrored) in enumerate(zip(shards.ids(rows.tolist()), (True, False, True), strict=True)):
        image = Image.open(shapes / f"{id}.png").resize((32, 32), Image.Resampling.LANCZOS)
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image
        pixels = open_codec("pixels").encode(np.array(image)[None])["mean"][0]
        assert torch.equal(batch.mean[row], pixels.half())
    for file in (prepared / "data/shards").rglob("*-*.safetensors"):
        assert file.read_bytes() == (flipped / file.relative_to(prepared)).read_bytes()


def test_latents_of_mirror_images_are_encoded_from_them(encoded: Path, shapes: Path) -> None:
    shards, rows = Shards.open(encoded, ALL), np.array([5, 60])
    plain, mirrored = shards.read(rows), shards.read(rows, torch.tensor([True, True]))
    codec = open_codec(str(encoded.parent / "vae"))
    for row, id in enumerate(shards.ids(rows.tolist())):
        image = Image.open(shapes / f"{id}.png").resize((32, 32), Image.Resampling.LANCZOS)
        expected = codec.encode(np.array(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))[None])
        assert_allclose(mirrored.mean[row], expected["mean"][0], atol=1e-3)  # rounding depends on the batch size
        assert mirrored.std is not None
        assert_allclose(mirrored.std[row], expected["std"][0], rtol=1e-4)
    assert (mirrored.mean - plain.mean.flip(-1)).abs().max() > 0.01, "an autoencoder is not equivariant"


def test_only_training_images_have_mirrored_latents_and_the_statistics_are_of_both(encoded: Path) -> None:
    files = sorted((encoded / "data/shards").rglob("*-*.safetensors"))
    stored = {file.name.startswith("train"): set(load_file(file)) for file in files}
    assert stored[True] - stored[False] == {"mean_mirrored", "std_mirrored"}
    tensors = [load_file(file) for file in files if file.name.startswith("train")]
    both = [part[f"mean{suffix}"].double() for part in tensors for suffix in ("", "_mirrored")]
    variance = [part[f"std{suffix}"].double().square() for part in tensors for suffix in ("", "_mirrored")]
    mean = torch.cat(both).mean((0, 2, 3))
    second = (torch.cat(both).square() + torch.cat(variance)).mean((0, 2, 3))
    found = Shards.open(encoded, [0]).content.statistics
    assert_allclose(found.mean, mean, rtol=1e-9)
    assert_allclose(found.std, (second - mean.square()).sqrt(), rtol=1e-9)


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_draws_flips_by_position(flipped: Path, world_size: int) -> None:
    shards = Shards.open(flipped, ALL)
    streams = [stream(shards, 12, 7, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [torch.cat([next(each).mean for each in streams]) for _ in range(4)]
    for each in streams:
        each.close()  # type: ignore[attr-defined]
    positions = np.arange(48, dtype=np.uint64)
    draws = rng.uniform(48, seed=7, stream=rng.Stream.FLIP, first=0) < 0.5
    expected = shards.read(shards.order(positions, 7)).mean
    expected = torch.where(draws[:, None, None, None], expected.flip(-1), expected)
    assert torch.equal(torch.cat(batches), expected)
    assert 0 < int(draws.sum()) < 48


def test_half_of_the_images_are_mirrored() -> None:
    draws = rng.uniform(10_000, seed=3, stream=rng.Stream.FLIP, first=0) < 0.5
    # Four standard deviations of a binomial distribution.
    assert abs(int(draws.sum()) - 5_000) < 4 * 50


def test_shards_without_flips_draw_none(prepared: Path) -> None:
    shards = Shards.open(prepared, ALL)
    batch = next(islice(stream(shards, 12, 7), 1))
    assert torch.equal(batch.mean, shards.read(batch.index.numpy()).mean)
    assert shards.content.flip is False


def test_clusters_with_and_without_flips_do_not_mix(prepared: Path, flipped: Path, tmp_path: Path) -> None:
    shutil.copytree(flipped / "data/shards", tmp_path / "data/shards")
    shutil.rmtree(tmp_path / "data/shards/cluster_001")
    shutil.copytree(prepared / "data/shards/cluster_001", tmp_path / "data/shards/cluster_001")
    with pytest.raises(AtollError, match="differ in flip; prepare them together"):
        Shards.open(tmp_path, ALL)
