"""`examples/nano_ddm.py` imports nothing of Atoll, and computes the same."""

import ast
import copy
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from atoll import flow
from atoll.apps.evaluate.distances import kernel_distance
from atoll.apps.evaluate.extractors import open_vision
from atoll.core.manifests import LatentSpec
from atoll.core.networks import DiTConfig
from atoll.data.stages.latents import Statistics
from atoll.ensemble.ensemble import Ensemble
from atoll.experts.expert import Declaration, NetworkReference, OpenRouter
from atoll.experts.validation import velocity_errors

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import nano_ddm

SHAPE = (3, nano_ddm.SIZE, nano_ddm.SIZE)
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def library_objective(name: str) -> flow.Objective:
    return flow.objective(name)


def library_bridge(name: str) -> flow.Bridge:
    """Pixels are between -1 and 1, so that is the bound of x0."""
    return library_objective(name).bridge(x0_bound=1.0)


class Adapter(nn.Module):
    """A network of the example, whose time is in [0, 1], as a network of the library."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, timestep: Tensor, _condition: object = None) -> Tensor:
        return cast(Tensor, self.network(x, (timestep / flow.TIMESTEP_SCALE).expand(len(x))))

    logits = forward


def library_ensemble(experts: list[nano_ddm.Expert], router: nn.Module) -> Ensemble:
    """Return the library's ensemble of the same networks."""
    pixels, latents = Statistics((0.0,) * 3, (1.0,) * 3), LatentSpec(autoencoder="pixels", shape=SHAPE)

    def declaration(name: str, clusters: tuple[int, ...], objective: str) -> Declaration:
        no_network = DiTConfig(patch=1)  # a required field; the networks are those of the example
        bridge = library_bridge(objective)
        return Declaration(name, clusters, no_network, frozenset(), pixels, latents, None, (), bridge)

    references = [
        NetworkReference(declaration(f"expert {k}", (k,), expert.objective), lambda e=expert: Adapter(e.network), 0)  # type: ignore[misc]
        for k, expert in enumerate(experts)
    ]
    known = declaration("router", tuple(range(len(experts))), "flow-matching")
    return Ensemble(references, OpenRouter(known, cast(Any, Adapter(router))))


@pytest.fixture(scope="module")
def mixture() -> nano_ddm.Mixture:
    torch.manual_seed(0)
    experts = [nano_ddm.Expert(nano_ddm.UNet((16, 16, 16)), name).network for name in nano_ddm.OBJECTIVES]
    router = nano_ddm.Router(width=16)
    for network in (*experts, router):
        for parameter in network.parameters():  # blocks begin as the identity; these shall do something
            parameter.data += 0.05 * torch.randn_like(parameter)
    router.last.weight.data *= 5  # so that probabilities differ
    pairs = zip(experts, nano_ddm.OBJECTIVES, strict=True)
    return nano_ddm.Mixture([nano_ddm.Expert(network.eval(), name) for network, name in pairs], router)


@pytest.fixture
def states() -> tuple[Tensor, Tensor]:
    """Return states and times. Closer to the ends, the rounding of float32 exceeds the tolerance."""
    t = torch.linspace(0.05, 0.95, 16)
    images = torch.rand(16, *SHAPE, generator=rng_of(2)) * 2 - 1
    return nano_ddm.noised(images, torch.randn(16, *SHAPE, generator=rng_of(3)), t), t


def rng_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_example_imports_nothing_of_atoll() -> None:
    tree = ast.parse(Path(nano_ddm.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    used = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert used == {"PIL", "numpy", "torch"}


@pytest.mark.parametrize("name", ["flow-matching", "ddpm"])
@torch.no_grad()
def test_the_bridge_agrees(mixture: nano_ddm.Mixture, name: str) -> None:
    """At all times of a sampler of up to 1000 steps but the first, t = 1."""
    network = copy.deepcopy(mixture.experts[nano_ddm.OBJECTIVES.index(name)].network).double()
    t = torch.linspace(0.001, 0.999, 33, dtype=torch.float64)
    x = torch.randn(33, *SHAPE, generator=rng_of(1), dtype=torch.float64)
    theirs = library_bridge(name).wrap(Adapter(network))(x, t)
    torch.testing.assert_close(nano_ddm.Expert(network, name).velocity(x, t), theirs, **EXACT)


@torch.no_grad()
def test_the_bridge_is_exact_for_an_ideal_network() -> None:
    """All pixels are N(0, 1/16), of which few are beyond the bound of x0."""
    variance = 1 / 16

    class Ideal(nn.Module):
        def forward(self, z: Tensor, s: Tensor) -> Tensor:
            alpha, sigma = (s * math.pi / 2).cos().view(-1, 1, 1, 1), (s * math.pi / 2).sin().view(-1, 1, 1, 1)
            return sigma * z / (alpha**2 * variance + sigma**2)

    t = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    time = t.view(-1, 1, 1, 1)
    x = (
        torch.randn(49, 3, 2, 2, generator=rng_of(0), dtype=torch.float64)
        * ((1 - time) ** 2 * variance + time**2).sqrt()
    )
    gain = (time - (1 - time) * variance) / ((1 - time) ** 2 * variance + time**2)
    torch.testing.assert_close(nano_ddm.Expert(Ideal(), "ddpm").velocity(x, t), gain * x, **EXACT)


@pytest.mark.parametrize("name", ["flow-matching", "ddpm"])
@torch.no_grad()
def test_the_loss_agrees(mixture: nano_ddm.Mixture, name: str) -> None:
    expert = mixture.experts[nano_ddm.OBJECTIVES.index(name)]
    images = torch.rand(8, *SHAPE, generator=rng_of(4)) * 2 - 1
    torch.manual_seed(5)
    mine = expert.loss(images)
    torch.manual_seed(5)
    t, eps = torch.rand(8), torch.randn_like(images)
    objective = library_objective(name)
    target = flow.from_pair(flow.CleanAndNoise(images, eps), t, objective.prediction, schedule=objective.schedule)
    drawn = objective.corrupt(images, seed=0, t=t)
    drawn = drawn._replace(input=objective.schedule.add_noise(images, eps, t), target=target)
    theirs = objective.loss(Adapter(expert.network)(drawn.input, drawn.timestep), drawn).mean()
    torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize(("k", "routing"), [(1, "top-1"), (2, "top-2"), (4, "full")])
@torch.no_grad()
def test_posterior_and_velocity_of_the_mixture_agree(
    mixture: nano_ddm.Mixture, states: tuple[Tensor, Tensor], k: int, routing: str
) -> None:
    ensemble = library_ensemble(list(mixture.experts), mixture.router)
    weights = nano_ddm.top_k(mixture.router(*states).softmax(1), k)
    assert len(weights.argmax(1).unique()) > 1
    torch.testing.assert_close(weights, ensemble.route(*states, routing=routing), **EXACT)
    mine = nano_ddm.Mixture(mixture.experts, mixture.router, k)
    torch.testing.assert_close(mine.velocity(*states), ensemble.velocity(*states, routing=routing), **EXACT)


@torch.no_grad()
def test_sampling_agrees(mixture: nano_ddm.Mixture) -> None:
    """All experts run: with fewer, rounding may choose another one."""
    noise = torch.randn(4, *SHAPE, generator=rng_of(6))
    ensemble = library_ensemble(list(mixture.experts), mixture.router)
    theirs = flow.solve(lambda x, t: ensemble.velocity(x, t, routing="full"), noise, steps=10).clamp(-1, 1)
    mine = nano_ddm.sample(nano_ddm.Mixture(mixture.experts, mixture.router, 4), noise, 10)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_the_validation_error_agrees() -> None:
    images = torch.rand(6, *SHAPE, generator=rng_of(7)) * 2 - 1
    seen: list[tuple[Tensor, Tensor]] = []

    class Zero(nano_ddm.Expert):
        def velocity(self, x: Tensor, t: Tensor) -> Tensor:
            seen.append((x, t))
            return torch.zeros_like(x)

    error = nano_ddm.validation_error(Zero(nn.Identity()), images)
    x, t = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert torch.equal((10 * t).long(), torch.arange(10).repeat_interleave(6))
    target = (x - images.repeat(10, 1, 1, 1)) / t.view(-1, 1, 1, 1)
    assert error == pytest.approx(velocity_errors(torch.zeros_like(x), target, t).mean().item(), rel=1e-5)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grid.png"
    command = f"nano_ddm.py --steps 2 --batch 2 --sampling-steps 2 --samples 16 --out {file}"
    monkeypatch.setattr(sys, "argv", command.split())
    nano_ddm.main()
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert all(len(rows[name]) == nano_ddm.EXPERTS + 1 for name in ("oracle", "top-1", "top-2", "top-4", "dense"))
    assert Image.open(file).width == 16 * 72


@pytest.mark.slow
def test_the_kid_agrees_with_the_library_trained_on_the_same_images() -> None:
    """Equal images, networks and numbers of steps; objectives, bridge, router, solver and KID are the library's."""
    steps, batch, count = 150, 16, 192
    torch.manual_seed(0)
    images = nano_ddm.read_images()
    cluster = nano_ddm.k_means(nano_ddm.principal_components(images), nano_ddm.EXPERTS)
    noise = torch.randn(count, *SHAPE, generator=rng_of(1))

    def trained(by_library: bool) -> nano_ddm.Mixture:
        torch.manual_seed(2)
        experts = [nano_ddm.Expert(nano_ddm.UNet(), name) for name in nano_ddm.OBJECTIVES]
        router = nano_ddm.Router()
        for k, expert in enumerate(experts):
            loss = library_loss(expert, seed=k) if by_library else expert.loss
            nano_ddm.train(expert.network, loss, [images[cluster == k]], steps, batch)
        nano_ddm.train(router, router.loss, [images, cluster], steps, nano_ddm.EXPERTS * batch)
        return nano_ddm.Mixture(experts, router)

    mine = nano_ddm.sample(trained(by_library=False), noise, 20)
    model = trained(by_library=True)
    ensemble = library_ensemble(list(model.experts), model.router)
    with torch.no_grad():
        theirs = flow.solve(lambda x, t: ensemble.velocity(x, t, routing="top-2"), noise, steps=20).clamp(-1, 1)

    vision = open_vision("inception")
    real, *generated = (vision(to_pixels(part)) for part in (images, mine, theirs))
    kids = [kernel_distance(features, real) for features in generated]
    print("KID of the example and of the library:", *(f"{kid.value:.4f} ± {kid.standard_error:.4f}" for kid in kids))
    bound = 2 * math.hypot(*(kid.standard_error for kid in kids))
    assert abs(kids[0].value - kids[1].value) < bound


def library_loss(expert: nano_ddm.Expert, seed: int) -> Callable[[Tensor], Tensor]:
    """Return the library's loss of an expert's network, with the library's times and noise."""
    objective, network, step = library_objective(expert.objective), Adapter(expert.network), itertools.count()

    def loss(x0: Tensor) -> Tensor:
        drawn = objective.corrupt(x0, seed=seed, step=next(step))
        return objective.loss(network(drawn.input, drawn.timestep), drawn).mean()

    return loss


def to_pixels(images: Tensor) -> Any:
    """Return images (N, 3, H, W) from -1 to 1 as bytes (N, H, W, 3)."""
    return ((images + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
