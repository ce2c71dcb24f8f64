"""The temperature of nearest routing, against Gaussian clusters whose posterior is known."""

from dataclasses import replace

import pytest
import torch
from ideal_ensemble import ideal_ensemble
from oracles import random_mixture
from pydantic import TypeAdapter, ValidationError

from atoll.core.manifests import Curve
from atoll.data.density import Density
from atoll.ensemble import Ensemble
from atoll.experts.calibration import GRID, log_posterior, measure, temperature_at, temperatures
from atoll.experts.validation import TIME_BINS
from atoll.nets import Condition

MIXTURE = random_mixture()
IMAGES, K = 2000, 6


def noisy(cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return validation images of a cluster at times in all bins: states (rows, 3, 1, 1) and times (rows,)."""
    generator = torch.Generator().manual_seed(100 + cluster)
    t = (torch.arange(IMAGES) % TIME_BINS + torch.rand(IMAGES, generator=generator)) / TIME_BINS
    x0 = MIXTURE.part([cluster]).sample(IMAGES, generator).float()
    x = (1 - t[:, None]) * x0 + t[:, None] * torch.randn(x0.shape, generator=generator)
    return x.view(-1, 3, 1, 1), t


def ensemble_of(change: dict[int, float], *, calibrated: bool) -> Ensemble:
    """Return ideal experts whose densities have the right means, and covariances that are wrong by these factors."""
    ideal, described = ideal_ensemble(MIXTURE, [[k] for k in range(K)]), []
    densities = []
    for k, reference in enumerate(ideal.references):
        values, vectors = torch.linalg.eigh(change.get(k, 1.0) * MIXTURE.covariances[k])
        parts = (MIXTURE.means[k], vectors[:, 1:].T, values[1:] - values[0], values[0])
        densities.append(Density(*(part.float() for part in parts), count=reference.density.count))
    for k, reference in enumerate(ideal.references):
        curve = measure(densities, k, [(*noisy(k), Condition())]) if calibrated else None
        declaration = replace(reference.declaration, calibration=curve)
        described.append(replace(reference, density=densities[k], declaration=declaration))
    return Ensemble(described, ideal.router)


def distance(ensemble: Ensemble) -> float:
    """Return the mean Kullback-Leibler divergence of nearest routing from the exact posterior, on noisy data."""
    generator = torch.Generator().manual_seed(7)
    x0, t = MIXTURE.sample(4000, generator), torch.rand(4000, generator=generator, dtype=torch.float64)
    x = (1 - t[:, None]) * x0 + t[:, None] * torch.randn(x0.shape, generator=generator, dtype=torch.float64)
    right = MIXTURE.posterior(x, t)
    found = ensemble.route(x.float().view(-1, 3, 1, 1), t.float(), routing="nearest:full").double()
    return float((right * (right.clamp(min=1e-30).log() - found.clamp(min=1e-30).log())).sum(1).mean())


def test_exact_densities_have_temperature_one() -> None:
    """Within 25 %: 1,200 rows in each bin, of which few are near the border between clusters."""
    ensemble = ensemble_of({}, calibrated=True)
    assert ensemble.temperatures is not None
    torch.testing.assert_close(ensemble.temperatures.log().exp(), torch.ones(TIME_BINS).double(), atol=0.25, rtol=0)
    assert distance(ensemble) < distance(ensemble_of({}, calibrated=False)) + 2e-3


@pytest.mark.parametrize("change", [{0: 0.1}, {2: 0.1, 3: 0.2}, dict.fromkeys(range(K), 0.2)])
def test_calibration_brings_wrong_densities_closer_to_the_exact_posterior(change: dict[int, float]) -> None:
    before, after = (distance(ensemble_of(change, calibrated=calibrated)) for calibrated in (False, True))
    assert after < 0.7 * before


def test_densities_without_calibration_have_temperature_one_and_do_not_vote() -> None:
    ensemble = ensemble_of({0: 0.1}, calibrated=True)
    x, t = noisy(1)
    plain = ensemble_of({0: 0.1}, calibrated=False)
    assert plain.temperatures is None
    evidence = torch.stack([r.density.log_density(x, t) for r in plain.references], 1)
    expected = evidence.softmax(-1).float()
    torch.testing.assert_close(plain.route(x, t, routing="nearest:full"), expected, atol=1e-6, rtol=0)
    some = [one.calibration if k < 2 else None for k, one in enumerate(ensemble.declarations)]
    weights = [reference.density.images for reference in ensemble.references]
    assert torch.equal(temperatures(some, weights), temperatures(some[:2], weights[:2]))


def test_the_vote_of_one_expert_is_bounded() -> None:
    """One with huge numbers changes nothing where many others have a preference; near t = 1 they have none."""
    ensemble = ensemble_of({}, calibrated=True)
    curves = [one.calibration for one in ensemble.declarations]
    hostile = (tuple(1e9 if one < 100 else 0.0 for one in GRID.tolist()),) * TIME_BINS
    found = temperatures([*curves * 20, hostile], [1000.0] * 20 * K + [1000.0])
    expected = temperatures(curves, [1000.0] * K)
    torch.testing.assert_close(found[:8], expected[:8], atol=0.1, rtol=0)


def test_temperatures_are_interpolated_between_the_centers_of_the_bins() -> None:
    found = 2.0 ** torch.arange(TIME_BINS, dtype=torch.float64)
    t = torch.tensor([0.0, 0.05, 0.1, 0.15, 0.5, 0.95, 1.0])
    expected = 2.0 ** torch.tensor([0.0, 0.0, 0.5, 1.0, 4.5, 9.0, 9.0], dtype=torch.float64)
    torch.testing.assert_close(temperature_at(found, t), expected, rtol=1e-6, atol=0)


def test_counts_are_not_divided_by_the_temperature() -> None:
    """Without evidence the posterior is the prior, at any temperature."""
    images = torch.tensor([1.0, 3.0])
    for temperature in (0.5, 1.0, 100.0):
        found = log_posterior(torch.zeros(1, 2).double(), images, temperature).exp()
        torch.testing.assert_close(found, torch.tensor([[0.25, 0.75]]).double())


@pytest.mark.parametrize("curve", [((0.5,) * 20,) * 10, ((0.5,) * 21,) * 9, ((float("nan"),) * 21,) * 10])
def test_a_manifest_refuses_curves_of_another_form(curve: object) -> None:
    adapter = TypeAdapter(Curve)
    assert adapter.validate_python(((0.5,) * len(GRID),) * TIME_BINS)
    with pytest.raises(ValidationError):
        adapter.validate_python(curve)
