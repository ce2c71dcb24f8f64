"""Validation: the validation images, their order, and independence of batches, processes and other clusters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll import flow
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


def validation_shards(run: Path, *clusters: int) -> Shards:
    return Shards.open(run, list(clusters), "validation")


def velocity(x: Tensor, t: Tensor, condition: Condition | None = None) -> Tensor:
    return x * (1 + t[:, None, None, None])


def measured(shards: Shards, **options: Any) -> Summary:
    return validate(velocity, shards, seed=3, conditioning=frozenset(), **options)


def test_every_image_is_noised_once_in_every_time_bin(prepared: Path) -> None:
    shards = validation_shards(prepared, 0, 1, 2)
    parts = list(ValidationSet(shards, 3).batches(CPU))
    t, index = torch.cat([part.noised.t for part in parts]), torch.cat([part.batch.index for part in parts])
    pairs = {(int(image), int(time * TIME_BINS)) for image, time in zip(index, t, strict=True)}
    assert len(pairs) == len(t) == TIME_BINS * len(shards) == len(ValidationSet(shards, 3))


def test_x0_is_a_posterior_sample_with_noise_that_training_does_not_use(prepared: Path, tmp_path: Path) -> None:
    """Written out: the seed draws the posterior sample, seed + 1 the noise, both by position in the cluster."""
    give_posterior(prepared, tmp_path)
    shards = validation_shards(tmp_path, 1)
    part = list(ValidationSet(shards, 3).batches(CPU))[-1]
    position = part.first
    assert part.batch.std is not None
    x0 = shards.latents(part.batch, seed=3, position=position)
    assert not torch.equal(x0, shards.statistics.normalize(part.batch.mean.float()))
    noised = validation.flow.Objective().corrupt(x0, seed=4, position=position, t=part.noised.t)
    assert torch.equal(part.noised.input, noised.input)
    assert torch.equal(part.noised.target, noised.target)


def test_the_error_of_a_cluster_does_not_depend_on_the_others(prepared: Path) -> None:
    alone = measured(validation_shards(prepared, 1)).mean
    together = ValidationSet(validation_shards(prepared, 0, 1, 2), 3)
    own = [part for part in together.batches(CPU) if (part.batch.cluster == 1).all()]
    noised = [part.noised for part in own]
    errors = [validation.velocity_errors(velocity(one.input, one.t), one.target, one.t) for one in noised]
    assert torch.cat(errors).double().mean().item() == pytest.approx(alone, rel=1e-6)


def test_the_error_does_not_depend_on_batches_or_processes(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = validation_shards(prepared, 0, 1, 2)
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
    images = ValidationSet(validation_shards(prepared, 0, 1, 2), 3, limit=2)
    assert images.images == 6
    clusters = torch.cat([part.batch.cluster for part in images.batches(CPU)])
    assert torch.bincount(clusters).tolist() == [20, 20, 20]


def test_without_validation_images_there_is_no_error(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shards, "cluster_ranges", lambda _: {})
    assert measured(validation_shards(prepared, 0)) == Summary(None)


def test_the_error_of_an_x0_network_has_its_closed_form() -> None:
    """An x0 error e is a velocity error e/t; with the weight its mean square over all times is e² (2/LAST_TIME - 1)."""
    t, target = (torch.arange(100_000) + 0.5) / 100_000, torch.zeros(100_000, 1, 1, 1)
    errors = validation.velocity_errors(0.3 / t.view(-1, 1, 1, 1), target, t)
    assert errors.double().mean().item() == pytest.approx(0.09 * (2 / validation.LAST_TIME - 1), rel=1e-4)
    assert errors.max().item() == pytest.approx(0.09 / validation.LAST_TIME**2, rel=1e-4)


@pytest.mark.parametrize("steps", [20, 50])
def test_the_error_orders_x0_experts_as_their_samples_do(steps: int) -> None:
    """Exact experts, one of them with x0 errors where no solver looks, the other with smaller ones where all do."""
    means = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    mixture = flow.GaussianMixture(
        torch.ones(3, dtype=torch.float64), means, 0.04 * torch.eye(2).double().expand(3, 2, 2)
    )
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(500, 2, generator=generator, dtype=torch.float64)
    x0, t = mixture.sample(500, generator), (torch.arange(500, dtype=torch.float64) + 0.5) / 500

    def expert(size: float, below: float) -> Any:
        def velocity(x: Tensor, times: Tensor) -> Tensor:
            times = times.to(x.dtype).expand(len(x))
            wrong = size * torch.sin(3 * x) * (times < below)[:, None]
            return mixture.velocity(x, times) - wrong / times.clamp(min=1e-4)[:, None]

        return velocity

    ideal = flow.solve(mixture.velocity, noise, steps=steps)
    x, target = (1 - t[:, None]) * x0 + t[:, None] * noise, noise - x0
    found = []
    for velocity in (expert(0.3, 0.01), expert(0.1, 0.5)):
        distance = (flow.solve(velocity, noise, steps=steps) - ideal).square().mean().item()
        shape = (500, 1, 1, 2)
        error = validation.velocity_errors(velocity(x, t).view(shape), target.view(shape), t).mean().item()
        unweighted = (velocity(x, t) - target).square().mean().item()
        found.append((distance, error, unweighted))
    (harmless, low, spike), (harmful, high, plain) = found
    assert harmless < 1e-20 < harmful
    assert low < high
    assert spike > plain, "without the weight, the harmless errors decide"
