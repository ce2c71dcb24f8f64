"""Densities of clusters: `atoll prepare` stores them with the shards, and small ones do not reveal their images."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.core.artifacts import Artifact
from atoll.core.manifests import SHARDS
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.density import DENSITY_FILE, MIN_IMAGES, MIN_IMAGES_WITH_DIRECTIONS, fit_density, write_density


class FirstImages(Shards):
    """The first images of a cluster."""

    def __init__(self, artifact: Artifact, count: int) -> None:
        super().__init__([artifact], "train")
        self.count = count

    def __len__(self) -> int:
        return self.count

    def image_counts(self) -> dict[Size, int]:
        return {self.sizes[0]: self.count}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 15, 16, 26])
def test_the_density_of_few_images_has_no_directions_and_of_fewer_there_is_none(prepared: Path, count: int) -> None:
    density = fit_density(FirstImages(Artifact(prepared, "data/shards/cluster_000"), count))
    if count < MIN_IMAGES:
        assert density is None
        return
    assert density is not None
    assert density.caption is not None
    few = count < MIN_IMAGES_WITH_DIRECTIONS
    assert len(density.directions) == (0 if few else count - 1)
    assert len(density.caption.directions) == (0 if few else min(16, count - 1))
    assert density.count.item() == count


def test_the_shards_have_the_density_of_their_images(prepared: Path) -> None:
    """The same bits as a density that is fitted to the finished shards, listed in their manifest."""
    shards = Shards.open(prepared, [1], verify=True)
    expected = fit_density(shards)
    assert expected is not None
    found = load_file(shards.artifacts[0].path(DENSITY_FILE))
    assert found.keys() == expected.tensors().keys()
    assert all(torch.equal(found[name], part) for name, part in expected.tensors().items())
    assert DENSITY_FILE in shards.artifacts[0].open(SHARDS).files


def test_shards_of_very_few_images_have_no_density(prepared: Path, tmp_path: Path) -> None:
    made = Artifact(prepared, "data/shards/cluster_000")
    few = Artifact(tmp_path, made.name)
    few.begin(SHARDS, {})
    for rows in (MIN_IMAGES - 1, MIN_IMAGES):
        tensors = load_file(made.path("train-000000.safetensors"))
        lengths = tensors["lengths"][:rows]
        cut = {name: part[: lengths.sum() if name == "tokens" else rows].clone() for name, part in tensors.items()}
        few.write_tensors("train-000000.safetensors", cut)
        write_density(few, made.read(SHARDS))
        assert few.path(DENSITY_FILE).is_file() == (rows == MIN_IMAGES)
