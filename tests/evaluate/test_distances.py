"""Distances against scipy, scikit-learn, torchmetrics and exact values."""

import numpy as np
import pytest
import scipy.linalg
import torch
from sklearn.metrics.pairwise import polynomial_kernel
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from atoll.apps.evaluate.distances import Gaussian, frechet, kernel_distance, pairwise_mean, precision_recall
from atoll.apps.evaluate.results import Protocol, Spread


def features(count: int, dimensions: int, seed: int, shift: float = 0.0) -> Tensor:
    """Return correlated features of very different scales, like those of a network."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dimensions, dimensions, generator=torch.Generator().manual_seed(99)) / dimensions**0.5
    scales = torch.logspace(-2, 1, dimensions)
    return (torch.randn(count, dimensions, generator=generator) * scales) @ mixing + shift


def scipy_frechet(a: Tensor, b: Tensor) -> float:
    x, y = a.double().numpy(), b.double().numpy()
    one, two = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = scipy.linalg.sqrtm(one @ two).real
    return float(np.square(x.mean(0) - y.mean(0)).sum() + np.trace(one) + np.trace(two) - 2 * np.trace(root))


@pytest.mark.parametrize("counts", [(400, 500), (100, 90), (40, 300)])
def test_frechet_distance_equals_scipy(counts: tuple[int, int]) -> None:
    a, b = features(counts[0], 64, 0), features(counts[1], 64, 1, shift=0.3)
    # A covariance of fewer images than dimensions is singular, and scipy's matrix square root loses digits.
    precision = 1e-6 if min(counts) > 64 else 1e-4
    assert frechet(Gaussian.of(a), Gaussian.of(b)) == pytest.approx(scipy_frechet(a, b), rel=precision)


def test_frechet_distance_of_known_gaussians() -> None:
    mean, one, two = (
        torch.tensor([1.0, -2.0]).double(),
        torch.tensor([2.0, 3.0]).double(),
        torch.tensor([0.5, 4.0]).double(),
    )
    distance = frechet(Gaussian(torch.zeros(2).double(), one.diag()), Gaussian(mean, two.diag()))
    assert distance == pytest.approx(5 + 1.5**2 + 1.0**2, abs=1e-12)


@pytest.mark.parametrize("count", [30, 1000])
def test_frechet_distance_of_a_set_with_itself_is_zero(count: int) -> None:
    whole = Gaussian.of(features(count, 128, 0))
    assert frechet(whole, whole) < 1e-9 * float(whole.root.square().sum())


def test_two_halves_of_the_data_are_closer_than_data_and_generated_images() -> None:
    data, generated = features(1000, 32, 0), features(500, 32, 1) * 1.3
    halves = frechet(Gaussian.of(data[::2]), Gaussian.of(data[1::2]))
    assert halves < 0.5 * frechet(Gaussian.of(data[::2]), Gaussian.of(generated))
    assert kernel_distance(data[::2], data[1::2]).value < 0.1 * kernel_distance(data[::2], generated).value


def sklearn_mmd(x: Tensor, y: Tensor) -> float:
    how = {"degree": 3, "gamma": 1 / x.shape[1], "coef0": 1}
    a, b = x.double().numpy(), y.double().numpy()
    xx, yy, xy = polynomial_kernel(a, a, **how), polynomial_kernel(b, b, **how), polynomial_kernel(a, b, **how)
    m, n = len(a), len(b)
    own = (xx.sum() - np.trace(xx)) / (m * (m - 1)) + (yy.sum() - np.trace(yy)) / (n * (n - 1))
    return float(own - 2 * xy.mean())


def test_kernel_distance_equals_scikit_learn() -> None:
    x, y = features(300, 48, 0), features(200, 48, 1, shift=0.5)
    found = kernel_distance(x, y, subsets=10, size=100)
    assert found.value == pytest.approx(sklearn_mmd(x, y), rel=1e-6)
    assert found.subsets == 10
    assert found.subset_mean == pytest.approx(found.value, abs=4 * found.subset_std)
    whole = kernel_distance(x[:200], y, size=1000)
    assert (whole.subsets, whole.subset_size, whole.subset_std) == (1, 200, 0.0)
    assert whole.subset_mean == pytest.approx(whole.value, rel=1e-9)


class Identity(nn.Module):
    """A stand-in for Inception: the features are the pixels."""

    num_features = 64

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


@pytest.mark.filterwarnings("ignore:Metric `Kernel Inception Distance`:UserWarning")
def test_both_distances_equal_torchmetrics() -> None:
    a, b = features(400, 64, 0).view(-1, 1, 8, 8), features(400, 64, 1, shift=0.3).view(-1, 1, 8, 8)
    fid = FrechetInceptionDistance(Identity(), input_img_size=(1, 8, 8)).set_dtype(torch.float64)
    kid = KernelInceptionDistance(Identity(), subsets=1, subset_size=400)
    for metric in (fid, kid):
        metric.update(a.double(), real=True)
        metric.update(b.double(), real=False)
    x, y = a.flatten(1), b.flatten(1)
    assert frechet(Gaussian.of(x), Gaussian.of(y)) == pytest.approx(fid.compute().item(), rel=1e-6)
    assert kernel_distance(x, y).value == pytest.approx(kid.compute()[0].item(), rel=1e-6)


def test_kernel_distance_is_unbiased_and_its_standard_error_is_right() -> None:
    """Equal distributions have a mean KID of 0; for different ones, the reported error is the spread over draws."""
    alike = [kernel_distance(features(40, 8, 2 * i), features(40, 8, 2 * i + 1), subsets=1) for i in range(300)]
    values = torch.tensor([found.value for found in alike])
    assert abs(values.mean()) < 3 * values.std() / len(values) ** 0.5
    apart = [kernel_distance(features(80, 8, 2 * i), features(80, 8, 2 * i + 1, 1.0), subsets=1) for i in range(300)]
    spread = torch.tensor([found.value for found in apart]).std().item()
    reported = sum(found.standard_error for found in apart) / len(apart)
    assert reported == pytest.approx(spread, rel=0.15)


def test_precision_and_recall_equal_scikit_learn() -> None:
    real, generated = features(200, 6, 0), features(150, 6, 1, shift=0.8)
    found = precision_recall(real, generated, neighbors=4)
    radii = [
        NearestNeighbors(n_neighbors=5).fit(part.numpy()).kneighbors(part.numpy())[0][:, 4]
        for part in (real, generated)
    ]
    distance = np.linalg.norm(generated.double().numpy()[:, None] - real.double().numpy()[None], axis=2)
    inside = distance <= radii[0][None]
    assert found.precision == pytest.approx(inside.any(1).mean())
    assert found.recall == pytest.approx((distance <= radii[1][:, None]).any(0).mean())
    assert found.density == pytest.approx(inside.sum() / (4 * 150))
    assert found.coverage == pytest.approx(inside.any(0).mean())
    assert 0 < found.precision < 1


def test_precision_and_recall_of_equal_and_of_distant_sets() -> None:
    real = features(100, 4, 0)
    same, far = precision_recall(real, real), precision_recall(real, real + 1000)
    assert (same.precision, same.recall, same.coverage) == (1, 1, 1)
    assert (far.precision, far.recall, far.density, far.coverage) == (0, 0, 0, 0)
    one_mode = precision_recall(real, real[:1] + 1e-3 * features(50, 4, 1))
    assert one_mode.precision > 0.9 > 0.2 > one_mode.recall


def test_pairwise_mean_and_spread() -> None:
    distances = torch.tensor([[[0.0, 1, 2], [1, 0, 3], [2, 3, 0]], [[0, 4, 4], [4, 0, 4], [4, 4, 0]]])
    means = pairwise_mean(distances)
    assert means.tolist() == [2, 4]
    spread = Spread.of(means, Protocol.model_construct())
    assert (spread.mean, spread.items) == (3, 2)
    assert spread.standard_error == pytest.approx(1.0)
    with pytest.raises(ValueError, match="2 seeds"):
        pairwise_mean(torch.zeros(1, 1, 1))
