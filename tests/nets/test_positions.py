"""Positions of grids of any shape: computed once for each grid, not at every step."""

import pytest
import torch

from atoll.core.networks import DiTConfig, RouterConfig
from atoll.nets import DiT, Router, positions

GRIDS = [(16, 16), (12, 20), (20, 12), (8, 24), (24, 8)]
"""Latent heights and widths; the first one is the network's own."""
COMMON = {"size": 16, "patch": 2, "channels": 4, "width": 48, "depth": 1, "heads": 2}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The grids that are computed, with empty caches at the start."""
    grids: list[tuple[int, int]] = []
    formula = positions.sincos_positions

    def counted(width: int, rows: int, columns: int, **options: float) -> torch.Tensor:
        grids.append((rows, columns))
        return formula(width, rows, columns, **options)

    monkeypatch.setattr(positions, "sincos_positions", counted)
    positions.sincos_on.cache_clear()
    positions.rotation.cache_clear()
    return grids


@pytest.mark.parametrize("make", [DiT, Router])
def test_steps_compute_the_sincos_positions_of_a_grid_once(make: type, computed: list[tuple[int, int]]) -> None:
    config = (DiTConfig if make is DiT else RouterConfig)(**COMMON, **({} if make is DiT else {"experts": 3}))
    network = make(config)
    for step in range(3):
        for height, width in GRIDS:
            x = torch.randn(2, 4, height, width, generator=torch.Generator().manual_seed(step))
            network(x, torch.tensor([3.0, 700.0])).sum().backward()
    # The router also compares its stored table with the formula for its own grid.
    own = [] if make is DiT else [(8, 8)]
    assert sorted(computed) == sorted(own + [(height // 2, width // 2) for height, width in GRIDS[1:]])


def test_steps_compute_the_rotations_of_a_grid_once() -> None:
    network = DiT(DiTConfig(**COMMON, positions="rope"))
    positions.rotation.cache_clear()
    for _ in range(3):
        for height, width in GRIDS:
            network(torch.randn(2, 4, height, width), torch.tensor(3.0)).sum().backward()
    assert positions.rotation.cache_info().misses == len(GRIDS)


def test_cached_positions_are_the_formula_in_the_dtype_of_the_network() -> None:
    made = positions.sincos_on(48, 6, 10, base=8, device=torch.device("cpu"), dtype=torch.bfloat16, scale=2.0)
    assert made.equal(positions.sincos_positions(48, 6, 10, base=8, scale=2.0).bfloat16())
    network, x = DiT(DiTConfig(**COMMON)), torch.randn(2, 4, 12, 20)
    torch.manual_seed(0)
    torch.nn.init.normal_(network.final.linear.weight)
    expected = network(x, torch.tensor(5.0))
    assert network.bfloat16()(x, torch.tensor(5.0)).dtype == torch.bfloat16
    torch.testing.assert_close(network.float()(x, torch.tensor(5.0)), expected, atol=0.1, rtol=0.1)


def test_positions_that_sampling_made_can_be_trained_with() -> None:
    positions.sincos_on.cache_clear()
    network, x = DiT(DiTConfig(**COMMON)), torch.randn(2, 4, 12, 20)
    with torch.inference_mode():
        network(x, torch.tensor(5.0))
    network(x, torch.tensor(5.0)).square().sum().backward()
    assert network.final.linear.weight.grad is not None


def test_the_state_dict_has_no_cached_positions() -> None:
    network = DiT(DiTConfig(**COMMON))
    names = set(network.state_dict())
    network(torch.randn(1, 4, 12, 20), torch.tensor(5.0))
    assert set(network.state_dict()) == names
