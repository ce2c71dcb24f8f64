import pytest
import torch
from torch.nn import functional

from atoll.core.errors import AtollError
from atoll.nets import Condition, Router, RouterConfig, count_parameters, load_network, save_network
from atoll.nets.io import WEIGHTS_FILE, write_weights
from atoll.nets.positions import sincos_positions

TINY = {"experts": 3, "width": 48, "depth": 2, "heads": 2, "size": 8, "channels": 1}


def test_the_number_of_parameters_of_the_paris_router():
    with torch.device("meta"):
        assert count_parameters(Router(RouterConfig.named("DiT-B/2", experts=8))) == 129_136_904


def train(router, draw, steps=250):
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(router.parameters(), lr=1e-3)
    for _ in range(steps):
        x, cluster, timestep, condition = draw(generator)
        loss = functional.cross_entropy(router(x, timestep, condition), cluster)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return router.eval()


def test_a_trained_router_predicts_the_posterior():
    """Two clusters of one image each overlap at this noise level, and their posterior is known."""
    torch.manual_seed(0)
    images = torch.stack([torch.full((1, 4, 4), 0.25), torch.full((1, 4, 4), -0.25)])
    t, counts = 0.5, [9, 1]

    def draw(generator):
        cluster = (torch.rand(128, generator=generator) < 0.1).long()
        x = (1 - t) * images[cluster] + t * torch.randn(128, 1, 4, 4, generator=generator)
        return x, cluster, torch.full((128,), 1000 * t), None

    router = train(Router(RouterConfig(2, 32, 1, 2, size=4, channels=1)), draw)
    x, *_ = draw(torch.Generator().manual_seed(1))
    log_likelihood = -((x[:, None] - (1 - t) * images).square().sum((2, 3, 4))) / (2 * t**2)
    exact = (log_likelihood + torch.tensor(counts).log()).softmax(-1)[:, 0]
    with torch.no_grad():
        ours = router.logits(x, torch.tensor(1000 * t)).softmax(-1)[:, 0]
    assert float((ours - exact).abs().mean()) < 0.04
    assert float((log_likelihood.softmax(-1)[:, 0] - exact).abs().mean()) > 0.1  # the prior matters here


def test_logits_are_divided_by_the_temperature():
    router = Router(RouterConfig(**TINY))
    x, timestep = torch.randn(2, 1, 8, 8), torch.tensor([5.0, 700.0])
    assert router.logits(x, timestep).equal(router(x, timestep))
    router.temperature.fill_(2.0)
    torch.testing.assert_close(router.logits(x, timestep), router(x, timestep) / 2)


def test_a_router_can_be_conditioned_on_class_and_pooled_text():
    torch.manual_seed(0)
    router = Router(RouterConfig(**TINY, num_classes=4, pooled_width=6))
    for part in router.modules():
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.1)
    x, timestep = torch.randn(2, 1, 8, 8), torch.tensor([5.0, 700.0])
    given = Condition(pooled=torch.randn(2, 6), label=torch.tensor([1, 3]))
    output = router(x, timestep, given)
    assert not output.allclose(router(x, timestep), atol=1e-4)
    assert not output.allclose(router(x, timestep, Condition(pooled=given.pooled)), atol=1e-4)
    torch.testing.assert_close(router(x, timestep, given.unconditional()), router(x, timestep))


@torch.no_grad()
def test_another_size_interpolates_learned_positions_and_stretches_the_formula():
    torch.manual_seed(0)
    router, larger = (Router(RouterConfig(**TINY | {"size": size})) for size in (8, 12))
    for parameter in router.parameters():
        parameter.normal_(std=0.1)
    x, timestep = torch.randn(2, 1, 12, 12), torch.tensor(3.0)
    for dtype in (torch.float32, torch.bfloat16):  # a formula rounded to half precision is still the formula
        router.positions.copy_(sincos_positions(48, 4, 4, base=4).to(dtype))
        larger.load_state_dict(router.state_dict() | {"positions": sincos_positions(48, 6, 6, base=4)})
        assert router(x, timestep).equal(larger(x, timestep))
    router.positions.normal_()
    image = router.positions.view(1, 4, 4, 48).permute(0, 3, 1, 2)
    table = functional.interpolate(image, (6, 6), mode="bicubic").permute(0, 2, 3, 1).reshape(1, 36, 48)
    larger.positions.copy_(table)
    torch.testing.assert_close(router(x, timestep), larger(x, timestep))
    assert router.to("meta")(x.to("meta"), timestep.to("meta")).shape == (2, 3)  # as in the count of FLOPs


def test_save_and_load_keep_the_calibration(tmp_path):
    router = Router(RouterConfig(**TINY))
    router.temperature.fill_(1.5)
    save_network(router, tmp_path)
    loaded = load_network(tmp_path)
    x, timestep = torch.randn(2, 1, 8, 8), torch.tensor(3.0)
    assert loaded.logits(x, timestep).equal(router.logits(x, timestep))
    assert router(torch.randn(2, 1, 12, 12), timestep).shape == (2, 3)


def test_a_surplus_tensor_is_an_error(tmp_path):
    router = Router(RouterConfig(**TINY))
    save_network(router, tmp_path)
    write_weights(router.state_dict() | {"surplus": torch.tensor(False)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(AtollError, match="unexpected surplus"):
        load_network(tmp_path)
