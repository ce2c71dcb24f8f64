"""Images of several sizes: densities, routing, noise, sampling and the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import multivariate_normal
from torch import Tensor, nn

import atoll
from atoll import cli, flow
from atoll.core.errors import AtollError
from atoll.core.manifests import LatentSpec
from atoll.core.networks import DiTConfig
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.density import MIN_IMAGES_WITH_DIRECTIONS, RANK, Density, fit_density, resized
from atoll.encoders.autoencoder import Statistics
from atoll.encoders.encoders import Encoders
from atoll.ensemble import Ensemble, Sampler
from atoll.experts.expert import Declaration, NetworkReference
from atoll.experts.validation import ValidationSet
from atoll.flow import rng
from ensemble.runs import read_settings
from sized import LABELS, ROWS, SIZES

QUICK = {"num_inference_steps": 3, "guidance_scale": 2.0}


def latents_of(shards: Shards, size: Size | None = None) -> Tensor:
    """Return the normalized latents of one size, or all of them resized to it if it has too few."""
    everything = np.arange(len(shards))
    by_size = {own: shards.statistics.normalize(shards.read(numbers).mean.float())
               for own, numbers in shards.by_size(everything).items()}  # fmt: skip
    own = by_size.get(size)
    if own is not None and len(own) >= MIN_IMAGES_WITH_DIRECTIONS:
        return own
    return torch.cat([resized(part, size) for part in by_size.values()])


def log_normal(density: Density, x: Tensor, t: float) -> np.ndarray:
    """Return log N(x; (1-t) m, (1-t)² C + t² I) + log n by scipy, with the full covariance C."""
    covariance = density.directions.T @ torch.diag(density.variances) @ density.directions
    covariance = (1 - t) ** 2 * (covariance + density.rest * torch.eye(len(covariance))) + t**2 * torch.eye(
        len(covariance)
    )
    mean = ((1 - t) * density.mean).numpy()
    found = multivariate_normal(mean, covariance.double().numpy()).logpdf(x.flatten(1).numpy())
    return found + np.log(density.count.item())


@pytest.mark.parametrize("cluster", [0, 1])
def test_every_size_has_the_density_of_its_images(sized_run: Path, cluster: int) -> None:
    """Of mean, covariance and count by numpy; rare sizes have those of all images, resized."""
    shards = Shards.open(sized_run, [cluster])
    density = fit_density(shards)
    assert density is not None
    assert list(density.sizes) == SIZES[1:]
    for number, (size, found) in enumerate(zip(SIZES, (density, *density.sizes.values()), strict=True)):
        x = latents_of(shards, size).flatten(1).double()
        assert found.count.item() == max(1, ROWS[cluster]["train"][number])
        torch.testing.assert_close(found.mean.double(), x.mean(0), atol=1e-5, rtol=1e-5)
        values = torch.linalg.eigvalsh(torch.cov(x.T, correction=0)).flip(0)
        rank = min(RANK, len(x) - 1)
        assert len(found.variances) == rank
        rest = ((values.sum() - values[:rank].sum()) / (x.shape[1] - rank)).clamp(min=1e-6)
        torch.testing.assert_close(found.rest.double(), rest, atol=1e-6, rtol=1e-3)
        torch.testing.assert_close(found.variances.double(), (values[:rank] - rest).clamp(min=0), atol=1e-4, rtol=1e-3)
    classes = torch.bincount(torch.cat([shards.read(own).label for own in
                                        shards.by_size(np.arange(len(shards))).values()]))  # fmt: skip
    assert density.classes is not None
    assert density.classes.tolist() == classes.tolist()
    assert density.images == sum(max(1, count) for count in ROWS[cluster]["train"])


def test_the_file_of_a_density_has_all_sizes(sized_run: Path) -> None:
    density = atoll.load(sized_run).ensemble.references[1].density
    assert density is not None
    again = Density.from_tensors(density.tensors())
    assert set(again.sizes) == set(SIZES[1:])
    for size in SIZES[1:]:
        for name, part in density.sizes[size].tensors().items():
            assert part.equal(again.sizes[size].tensors()[name])


@pytest.mark.parametrize(
    ("size", "grid"), [*((size, size) for size in SIZES), (Size(8, 12), SIZES[1]), (Size(4, 20), SIZES[3])]
)
def test_nearest_routing_is_the_posterior_by_the_densities_of_the_size(sized_run: Path, size: Size, grid: Size) -> None:
    """A state of another size is resized to the nearest of the run's sizes."""
    ensemble = atoll.load(sized_run).ensemble
    ensemble.temperatures = None  # of the votes; `tests/experts` tests them
    x = torch.randn(4, 3, size.height, size.width, generator=torch.Generator().manual_seed(3))
    expected = []
    for reference in ensemble.references:
        densities = {SIZES[0]: reference.density, **reference.density.sizes}
        expected.append(log_normal(densities[grid], resized(x, grid), 0.4))
    posterior = torch.tensor(np.stack(expected, 1)).softmax(-1)
    weights = ensemble.route(x, 0.4, routing="nearest:full")
    torch.testing.assert_close(weights.double(), posterior, atol=1e-4, rtol=1e-4)


def test_validation_batches_have_one_size_and_contain_every_image(sized_run: Path) -> None:
    shards = Shards.open(sized_run, [0, 1], "validation")
    validation = ValidationSet(shards, 3)
    parts = list(validation.batches(torch.device("cpu")))
    seen = torch.cat([part.batch.index for part in parts])
    assert len(validation) == len(seen) == 10 * sum(sum(rows["validation"]) for rows in ROWS.values())
    assert sorted(seen.tolist()) == sorted(10 * list(range(len(shards))))
    parts.sort(key=lambda part: part.first)
    ends = np.cumsum([len(part.batch.index) for part in parts]).tolist()
    assert [part.first for part in parts] == [0, *ends[:-1]]


def test_noise_of_other_sizes_at_other_positions_does_not_overlap() -> None:
    """No value of a position occurs at another one, whatever the sizes."""
    values: list[float] = []
    for position in range(50):
        size = SIZES[position % 5]
        noise = rng.normal((1, 3, size.height, size.width), seed=7, stream=21, first=position)
        values += noise.double().flatten().tolist()
    # Equal float32 numbers occur by chance; a stream that continued into the next position would repeat hundreds.
    assert len(set(values)) > 0.999 * len(values)


def test_the_noise_of_a_size_is_a_function_of_seed_and_position(sized_run: Path) -> None:
    sampler, size = atoll.load(sized_run), SIZES[1]
    whole = sampler.noise(5, 3, size=size)
    assert whole.shape == (5, 3, 12, 20)
    assert torch.equal(whole[2:], sampler.noise(3, 3, 2, size=size))


class GaussianVelocity(nn.Module):
    """The exact velocity E[eps - x0 | x_t] of independent pixels x0 ~ N(mean of the channel, 0.5²)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.tensor([0.3, -0.2, 0.5]).view(3, 1, 1), requires_grad=False)

    def forward(self, x: Tensor, timestep: Tensor, _condition: object = None) -> Tensor:
        t = (timestep / 1000).view(-1, 1, 1, 1)
        variance = (1 - t) ** 2 * 0.25 + t**2
        offset = x - (1 - t) * self.mean
        return t / variance * offset - (self.mean + (1 - t) * 0.25 / variance * offset)


def test_an_analytic_expert_samples_a_size_that_is_not_square() -> None:
    """The flow maps noise to mean + 0.5 · noise, whatever the size."""
    latents = LatentSpec(autoencoder="pixels", resolution=16, shape=(3, 16, 16), sizes=((16, 16), (12, 20)))
    network, plain = (
        DiTConfig(32, 1, 2, size=16, patch=4, channels=3, out_channels=3),
        Statistics((0.0,) * 3, (1.0,) * 3),
    )
    declaration = Declaration("expert", (0,), network, frozenset(), plain, latents, None, (), flow.Objective().bridge())
    ensemble = Ensemble([NetworkReference(declaration, GaussianVelocity, 0)])
    sampler = Sampler(ensemble, Encoders.of(latents, None))
    for size in (Size(12, 20), Size(16, 16)):
        made = sampler.generate(
            num_images=3, **vars(size), num_inference_steps=200, solver="heun", guidance_scale=1.0, seed=5
        )
        mean = torch.tensor([0.3, -0.2, 0.5]).view(3, 1, 1)
        torch.testing.assert_close(made.latents, mean + 0.5 * sampler.noise(3, 5, size=size), atol=2e-3, rtol=2e-3)
        assert {image.size for image in made.images} == {(size.width, size.height)}


@pytest.mark.parametrize("routing", ["top-1", "full", "nearest", "drawn"])
def test_every_routing_samples_every_size(sized_run: Path, routing: str) -> None:
    sampler = atoll.load(sized_run)
    assert sampler.sizes == tuple(SIZES)
    for size in SIZES:
        made = sampler.generate(label=LABELS, **vars(size), routing=routing, **QUICK)
        assert [image.size for image in made.images] == 3 * [(size.width, size.height)]
    default = sampler.generate(label=LABELS, routing=routing, **QUICK)
    assert torch.equal(
        default.latents, sampler.generate(label=LABELS, width=16, height=16, routing=routing, **QUICK).latents
    )


def test_a_size_gives_the_same_images_at_any_batch_size(sized_run: Path) -> None:
    sampler = atoll.load(sized_run)
    whole = sampler.generate(label=LABELS, num_images=5, width=20, height=12, **QUICK)
    parts = sampler.generate(label=LABELS, num_images=5, width=20, height=12, batch_size=2, **QUICK)
    torch.testing.assert_close(parts.latents, whole.latents, atol=1e-3, rtol=1e-3)


def test_the_command_writes_images_of_a_size_with_their_settings(sized_run: Path, tmp_path: Path, capsys) -> None:
    arguments = ["sample", str(sized_run), "--labels", "dots", "--steps", "2", "--out", str(tmp_path), "--json"]
    assert cli.main([*arguments, "--size", "20x12"]) == 0
    assert json.loads(capsys.readouterr().out)["size"] == "20x12"
    with Image.open(tmp_path / "000.png") as image:
        assert image.size == (20, 12)
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.width - grid.height == 20 - 12, "the cell of the grid has the size of the image"
    assert read_settings(tmp_path / "000.png")["size"] == "20x12"
    assert cli.main([*arguments, "--size", "28x12"]) == 0
    assert "images of 28x12 may be worse" in capsys.readouterr().err
    assert cli.main([*arguments, "--plan", "--size", "20x12"]) == 0


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("20", "'20' is not a size WIDTHxHEIGHT"),
        ("20x", "'20x' is not a size WIDTHxHEIGHT"),
        ("0x12", "'0x12' is not a size"),
        ("-8x8", "not a size"),
        ("18x12", "no size 18x12; it was trained on 16x16, 20x12, 12x20, 24x8, 8x24. The sides of other sizes must be "
         "multiples of 4"),
    ],
)  # fmt: skip
def test_a_wrong_size_is_an_error(sized_run: Path, size: str, message: str, capsys) -> None:
    assert cli.main(["sample", str(sized_run), f"--size={size}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error


def test_a_wrong_size_is_an_error_of_the_library(sized_run: Path) -> None:
    for size in (Size(10, 16), Size(0, 16), Size(16, -4)):
        with pytest.raises(AtollError, match="multiples of 4"):
            atoll.load(sized_run).sample(**vars(size))
