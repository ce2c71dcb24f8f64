"""Validation: the held-out images, their order, and independence of batches, processes and other clusters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.data.dataset import Shards
from atoll.experts import validation
from atoll.experts.validation import TIME_BINS, Summary, ValidationSet, validate
from atoll.nets import Condition
from train.posterior import give_posterior

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """One of several processes; the test adds their rows."""

    rank: int
    size: int

    def sum(self, rows: Tensor) -> Tensor:
        return rows


def held_out(run: Path, *clusters: int) -> Shards:
    return Shards.open(run, list(clusters), "held-out")


def velocity(x: Tensor, t: Tensor, condition: Condition | None = None) -> Tensor:
    return x * (1 + t[:, None, None, None])


def measured(shards: Shards, **options: Any) -> Summary:
    return validate(velocity, shards, seed=3, conditioning=frozenset(), **options)


def test_every_image_is_noised_once_in_every_time_bin(prepared: Path) -> None:
    shards = held_out(prepared, 0, 1, 2)
    parts = list(ValidationSet(shards, 3).batches(CPU))
    t, index = torch.cat([part.noised.t for part in parts]), torch.cat([part.batch.index for part in parts])
    pairs = {(int(image), int(time * TIME_BINS)) for image, time in zip(index, t, strict=True)}
    assert len(pairs) == len(t) == TIME_BINS * len(shards) == len(ValidationSet(shards, 3))


def test_x0_is_a_posterior_sample_with_noise_that_training_does_not_use(prepared: Path, tmp_path: Path) -> None:
    """Written out: the seed draws the posterior sample, seed + 1 the noise, both by position in the cluster."""
    give_posterior(prepared, tmp_path)
    shards = held_out(tmp_path, 1)
    part = list(ValidationSet(shards, 3).batches(CPU))[-1]
    position = part.first
    assert part.batch.std is not None
    x0 = shards.latents(part.batch, seed=3, position=position)
    assert not torch.equal(x0, shards.statistics.normalize(part.batch.mean.float()))
    noised = validation.flow.Objective().corrupt(x0, seed=4, position=position, t=part.noised.t)
    assert torch.equal(part.noised.input, noised.input)
    assert torch.equal(part.noised.target, noised.target)


def test_the_error_of_a_cluster_does_not_depend_on_the_others(prepared: Path) -> None:
    alone = measured(held_out(prepared, 1)).mean
    together = ValidationSet(held_out(prepared, 0, 1, 2), 3)
    own = [part for part in together.batches(CPU) if (part.batch.cluster == 1).all()]
    errors = [validation.velocity_errors(velocity(p.noised.input, p.noised.t), p.noised.target) for p in own]
    assert torch.cat(errors).double().mean().item() == pytest.approx(alone, rel=1e-6)


def test_the_error_does_not_depend_on_batches_or_processes(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = held_out(prepared, 0, 1, 2)
    whole = measured(shards)
    monkeypatch.setattr(validation, "BATCH", 3)
    again = measured(shards)
    assert again.mean == pytest.approx(whole.mean, rel=1e-6)
    assert again.by_time == pytest.approx(whole.by_time, rel=1e-6)
    images = ValidationSet(shards, 3)
    mine = [[(part, part.noised.t) for part in images.batches(CPU, Part(rank, 3))] for rank in range(3)]
    rows = sum(images.gather(parts, Part(rank, 3)) for rank, parts in enumerate(mine))
    assert isinstance(rows, Tensor)
    assert torch.equal(rows, images.gather((part, part.noised.t) for part in images.batches(CPU)))
    counts = [sum(len(t) for _, t in parts) for parts in mine]
    assert sum(counts) == len(images)
    assert max(counts) - min(counts) <= 3, "about a third for each"


def test_the_limit_applies_to_each_cluster(prepared: Path) -> None:
    images = ValidationSet(held_out(prepared, 0, 1, 2), 3, limit=2)
    assert images.images == 6
    clusters = torch.cat([part.batch.cluster for part in images.batches(CPU)])
    assert torch.bincount(clusters).tolist() == [20, 20, 20]


def test_without_held_out_images_there_is_no_error(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shards, "cluster_ranges", lambda _: {})
    assert measured(held_out(prepared, 0)) == Summary(None)
