"""Density files of a run with several sizes: every size must be there, with the values of the shards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.apps.share.density_files import check_density_file, max_density_bytes
from atoll.apps.share.measured import _check_density
from atoll.apps.share.safetensors_headers import safetensors_header
from atoll.core.artifacts import Artifact
from atoll.core.manifests import SHARDS
from atoll.data.dataset import Shards
from atoll.experts.density import DENSITY_FILE, Density
from atoll.verify.untrusted import Refused

Tensors = dict[str, Tensor]


def check(run: Path, file: Path) -> None:
    content = Artifact(run, "data/shards/cluster_001").read(SHARDS)
    assert file.stat().st_size <= max_density_bytes(content) + 64 * 1024
    check_density_file(content, safetensors_header(file), file)
    _check_density(Density.from_tensors(load_file(file)), Shards.open(run, [1]))


def test_the_density_of_an_expert_is_accepted(sized_run: Path) -> None:
    check(sized_run, sized_run / "experts/001/final" / DENSITY_FILE)


def without(size: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: part for name, part in tensors.items() if not name.startswith(f"{size}.")}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (without("20x12"), "does not hold a density"),
        (lambda tensors: {**tensors, "28x12.mean": torch.zeros(1008)}, "does not hold a density"),
        (lambda tensors: {**tensors, "12x20.mean": torch.zeros(4)}, "does not hold a density"),
        (changed("20x12.count", lambda count: count + 1000), "counts 10.* images as its count"),
        (changed("20x12.rest", lambda rest: -rest), "20x12.rest is not positive"),
        (changed("20x12.mean", lambda mean: mean + 0.5), "not the density of the latents of 20x12"),
        (changed("12x20.variances", lambda values: 3 * values), "not the density of the latents of 12x20"),
    ],
)
def test_a_wrong_density_of_one_size_is_refused(
    sized_run: Path, tmp_path: Path, hostile: Callable[[Tensors], Tensors], reason: str
) -> None:
    file = tmp_path / DENSITY_FILE
    tensors = hostile(load_file(sized_run / "experts/001/final" / DENSITY_FILE))
    save_file({name: part.contiguous() for name, part in tensors.items()}, file)
    with pytest.raises(Refused, match=reason):
        check(sized_run, file)


def test_a_count_that_moves_images_between_sizes_is_refused(sized_run: Path) -> None:
    density = Density.from_tensors(load_file(sized_run / "experts/001/final" / DENSITY_FILE))
    first = next(iter(density.sizes))
    moved = {size: replace(own, count=own.count + (2 if size == first else 0)) for size, own in density.sizes.items()}
    with pytest.raises(Refused, match=f"latents of {first}"):
        _check_density(replace(density, sizes=moved), Shards.open(sized_run, [1]))
