import pytest
import torch
from oracles import FLOAT, noisy_distribution, random_mixture, score_by_autograd

from atoll import flow

LEVELS = [("linear", 0.3), ("cosine", 0.7), ("ddpm-linear", 0.5), ("edm", 0.4)]


@pytest.mark.parametrize(("name", "time"), LEVELS)
def test_score_and_density_agree_with_torch_distributions(name: str, time: float) -> None:
    mixture, schedule = random_mixture(), flow.schedule(name)
    t = torch.full((64,), time, dtype=FLOAT)
    alpha, sigma = schedule.alpha(t)[0].item(), schedule.sigma(t)[0].item()
    z = 3 * torch.randn(64, 3, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    expected = score_by_autograd(mixture, z, alpha, sigma)
    torch.testing.assert_close(mixture.predict(z, t, "score", schedule=schedule), expected, rtol=1e-9, atol=1e-9)
    density = noisy_distribution(mixture, alpha, sigma).log_prob(z)
    torch.testing.assert_close(mixture.log_density(z, t, schedule).logsumexp(1), density, rtol=1e-10, atol=1e-10)


def test_samples_have_the_mixture_moments() -> None:
    mixture = random_mixture()
    x = mixture.sample(200_000, torch.Generator().manual_seed(2))
    mean = mixture.weights @ mixture.means
    centred = mixture.means - mean
    covariance = torch.einsum(
        "k,kij->ij", mixture.weights, mixture.covariances + centred[:, :, None] * centred[:, None]
    )
    error = (x.mean(0) - mean) / (covariance.diagonal() / len(x)).sqrt()
    assert error.abs().max() < 4.5
    torch.testing.assert_close(torch.cov(x.T), covariance, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("weights", "covariances", "message"),
    [
        (torch.ones(3), torch.eye(2).expand(2, 2, 2), "expected weights"),
        (torch.tensor([1.0, 0.0]), torch.eye(2).expand(2, 2, 2), "weights must be positive"),
        (torch.ones(2), torch.zeros(2, 2, 2), "positive definite"),
    ],
)
def test_invalid_mixtures_are_errors(weights: torch.Tensor, covariances: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flow.GaussianMixture(weights, torch.zeros(2, 2), covariances)
