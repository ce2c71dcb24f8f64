"""Densities of small clusters do not reveal their images."""

from pathlib import Path

import pytest

from atoll.core.artifacts import Artifact
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.experts.density import MIN_IMAGES, MIN_IMAGES_WITH_DIRECTIONS, fit_density


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
