"""The block of ModernDiT: rotary positions, RMSNorm, QK-norm and SwiGLU, each against its formula."""

import json
import math

import pytest
import torch
from torch.nn import functional

from atoll.core.errors import AtollError
from atoll.core.networks import FAMILIES, SIZES
from atoll.data.shapes import DataShapes
from atoll.experts.cost import image_cost
from atoll.nets import (
    NAMES,
    Condition,
    DiT,
    DiTConfig,
    Router,
    RouterConfig,
    concatenate,
    load_network,
    save_network,
)
from atoll.nets.blocks import transformer_blocks
from atoll.nets.layers import Mlp, SwiGlu, modulated_norm
from atoll.nets.positions import BASE, rotate, rotation
from atoll.nets.quantization import quantize

CPU = torch.device("cpu")
MODERN = {"width": 48, "depth": 3, "heads": 2, "size": 16, **FAMILIES["ModernDiT"]}
TEXT = {**MODERN, "text_width": 20, "num_classes": 5}


def randomized(network, seed=0):
    """Return a network with random weights, because the initialization sets many of them to zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            if name.endswith("_norm.weight"):
                parameter.add_(2)  # attention that is not nearly uniform
    return network


def inputs(rows=16, columns=16):
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(3, 7, 20, generator=generator)
    mask = torch.arange(7) < torch.tensor([[7], [3], [1]])
    x = torch.randn(3, 4, rows, columns, generator=generator)
    return x, torch.tensor([3.0, 500.0, 999.0]), Condition(text, mask, label=torch.tensor([0, 4, 2]))


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_logits_depend_on_the_offset_in_rows_and_columns_only(scale):
    """One query and one key at all places of a grid of 5 x 7: the products follow the formula of the offsets."""
    rows, columns, width = 5, 7, 16
    query, key = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    turned = rotation(rows, columns, width, scale=scale, device=CPU)
    queries, keys = (rotate(part.expand(1, 1, rows * columns, width), turned)[0, 0] for part in (query, key))
    logits = (queries @ keys.T).view(rows, columns, rows, columns)
    q, k = (torch.complex(part[: width // 2].double(), part[width // 2 :].double()) for part in (query, key))
    frequencies = BASE ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    for row in range(rows):
        for column in range(columns):
            down, across = (torch.arange(count).double() for count in (rows, columns))
            turns = torch.cat(
                [
                    ((column - across)[None, :, None] * frequencies).expand(rows, columns, -1),
                    ((row - down)[:, None, None] * frequencies).expand(rows, columns, -1),
                ],
                dim=-1,
            )
            expected = (q * k.conj() * torch.exp(1j * turns / scale)).real.sum(-1)
            torch.testing.assert_close(logits[row, column].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_rotation_keeps_lengths_and_leaves_the_first_tokens():
    x = torch.randn(2, 3, 13, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotation(3, 4, 8, scale=1.0, device=CPU, unrotated=1))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert turned[:, :, :2].equal(x[:, :, :2]), "the CLS token, and the token at (0, 0)"
    assert rotate(x.bfloat16(), rotation(3, 4, 8, scale=1.0, device=CPU, unrotated=1)).dtype == torch.float32


def test_angles_are_computed_once_for_a_grid_and_can_be_trained_with():
    with torch.inference_mode():
        made = rotation(3, 11, 8, scale=1.0, device=CPU)
    assert rotation(3, 11, 8, scale=1.0, device=CPU) is made
    assert not made.is_inference()


def test_swiglu_is_its_formula():
    layer, x = SwiGlu(6, 24, 5), torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    weight, bias = layer.inner.weight, layer.inner.bias
    gate, value = x @ weight[:16].T + bias[:16], x @ weight[16:].T + bias[16:]
    expected = (gate / (1 + torch.exp(-gate)) * value) @ layer.outer.weight.T + layer.outer.bias
    torch.testing.assert_close(layer(x), expected)


def test_gate_and_value_are_initialized_like_two_matrices():
    network = DiT(DiTConfig(**{**MODERN, "width": 256, "heads": 4}))
    bound = math.sqrt(6 / (256 + 680))
    for part in network.blocks[1].mlp.inner.weight.chunk(2):
        assert 0.99 * bound < part.abs().max() <= bound
    assert network.blocks[1].mlp.inner.bias.abs().max() == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_the_modulated_rms_norm_is_its_formula(rows):
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(2, 5, 8, generator=generator)  # with a mean, which LayerNorm would subtract
    shift, scale = torch.randn(2, rows, 8, generator=generator)
    root = (x.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    expected = x / root * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(modulated_norm(x, shift, scale, eps=1e-2, kind="rms"), expected)


def test_attention_of_the_network_has_normalized_and_rotated_queries_and_keys():
    network = randomized(DiT(DiTConfig(**MODERN)))
    attention, x = network.blocks[0].attention, torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(3))
    turned = rotation(2, 3, 24, scale=1.0, device=CPU)
    queries, keys, values = attention.qkv(x).view(2, 6, 3, 2, 24).permute(2, 0, 3, 1, 4)
    queries, keys = (
        rotate(functional.normalize(part, dim=-1) * 24**0.5 * norm.weight, turned)
        for part, norm in ((queries, attention.query_norm), (keys, attention.key_norm))
    )
    weights = (queries @ keys.transpose(-1, -2) / 24**0.5).softmax(-1)
    expected = attention.out((weights @ values).transpose(1, 2).reshape(2, 6, 48))
    torch.testing.assert_close(attention(x, turned), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_a_modern_size_has_the_parameters_and_flops_of_the_papers_size(size):
    shapes = DataShapes((4, 32, 32), None, ())
    papers, modern = (image_cost(DiTConfig.named(f"{family}-{size}/2", text_width=768), shapes) for family in FAMILIES)
    assert modern.parameters == pytest.approx(papers.parameters, rel=0.01)
    assert modern.forward_flops == pytest.approx(papers.forward_flops, rel=0.01)


def test_flops_are_those_of_the_products():
    width, depth, tokens, hidden = 48, 3, 64, 128
    counted = image_cost(DiTConfig(**MODERN), DataShapes((4, 16, 16), None, ())).forward_flops
    block = tokens * width * (4 * width + 3 * hidden) + 2 * tokens**2 * width
    outside = tokens * width * 16 * 2 + 256 * width + width**2 + 6 * width**2
    assert counted == 2 * (depth * block + outside)


def test_the_papers_networks_have_the_tensors_of_the_papers():
    network = DiT(DiTConfig.named("DiT-XS/2"))
    assert isinstance(network.blocks[0].mlp, Mlp)
    assert {name.removeprefix("blocks.0.") for name in network.state_dict() if name.startswith("blocks.0.")} == {
        "modulation.table", "attention.out.weight", "attention.out.bias", "attention.qkv.weight", "attention.qkv.bias",
        "mlp.inner.weight", "mlp.inner.bias", "mlp.outer.weight", "mlp.outer.bias",
    }  # fmt: skip


def test_names_and_fields(tmp_path):
    config = DiTConfig.named("ModernDiT-S/4", text_width=12)
    assert (config.positions, config.norm, config.qk_norm, config.mlp) == ("rope", "rms", True, "swiglu")
    assert DiTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert len(NAMES) == 2 * 5 * 3
    with pytest.raises(AtollError, match="did you mean 'ModernDiT-XL/2'"):
        DiTConfig.named("ModernDit-XL/2")
    with pytest.raises(AtollError, match="multiple of 4; width / heads is 6"):
        DiTConfig.from_dict({**MODERN, "heads": 8})
    network = randomized(DiT(DiTConfig(**TEXT)))
    save_network(network, tmp_path)
    loaded, (x, timestep, condition) = load_network(tmp_path), inputs()
    assert loaded.config == network.config
    assert "positions" not in loaded.state_dict()
    assert loaded(x, timestep, condition).equal(network(x, timestep, condition))


def test_a_new_network_predicts_zero_and_ignores_text():
    x, timestep, condition = inputs()
    network = DiT(DiTConfig(**TEXT))
    assert network(x, timestep, condition).abs().max() == 0
    torch.nn.init.normal_(network.final.linear.weight)
    unread = Condition(label=condition.label)
    torch.testing.assert_close(network(x, timestep, condition), network(x, timestep, unread))


@torch.no_grad()
def test_a_grid_of_any_size_has_the_same_neighbors():
    """In a uniform image all tokens are equal, so the output does not depend on the grid; in others it does."""
    network, timestep = randomized(DiT(DiTConfig(**MODERN))), torch.tensor([400.0])
    color = torch.randn(1, 4, 1, 1, generator=torch.Generator().manual_seed(0))
    patch = network(color.expand(1, 4, 16, 16), timestep)[..., :2, :2]
    wide = network(color.expand(1, 4, 6, 20), timestep)
    torch.testing.assert_close(wide, patch.repeat(1, 1, 3, 10), atol=1e-4, rtol=1e-4)
    x, *_ = inputs(6, 20)
    turned = network(x.roll(2, dims=-1), timestep)
    assert not turned.allclose(network(x, timestep).roll(2, dims=-1), atol=1e-2)
    image = x.roll(2, dims=-2)
    assert not network(image, timestep).allclose(network(x, timestep).roll(2, dims=-2), atol=1e-2)


def test_conditions_that_are_prepared_dropped_and_joined():
    x, _, condition = inputs()
    network, timestep = randomized(DiT(DiTConfig(**TEXT))), torch.full((3,), 321.0)
    expected = network(x, timestep, condition)
    prepared = network.prepare(condition)
    torch.testing.assert_close(network(x, timestep[:1], prepared), expected, atol=1e-5, rtol=1e-4)
    both = concatenate([condition, condition.unconditional()])
    halves = network(torch.cat([x, x]), torch.cat([timestep, timestep]), both)
    torch.testing.assert_close(halves, torch.cat([expected, network(x, timestep)]), atol=1e-5, rtol=1e-4)


def test_checkpointing_gives_the_same_gradients():
    x, timestep, condition = inputs(8, 12)
    network, gradients = randomized(DiT(DiTConfig(**TEXT))), []
    for checkpointing in (False, True):
        network.checkpointing = checkpointing
        network.zero_grad()
        network(x, timestep, condition).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    assert all(plain.equal(again) for plain, again in zip(*gradients, strict=True))


@torch.no_grad()
@pytest.mark.filterwarnings("error")
def test_half_precision_autocast_and_eight_bits_stay_close():
    x, timestep, condition = inputs()
    network = randomized(DiT(DiTConfig(**TEXT)))
    exact = network(x, timestep, condition)

    def error(output):
        return float((output.float() - exact).norm() / exact.norm())

    with torch.autocast("cpu", torch.bfloat16):
        assert network.features(x, timestep, condition).dtype == torch.float32, "the sums of blocks are not rounded"
        assert error(network(x, timestep, condition)) < 0.05
    half = DiT(network.config).bfloat16()
    half.load_state_dict(network.state_dict())
    assert error(half(x.bfloat16(), timestep, condition)) < 0.1
    assert error(quantize(network, "int8")(x, timestep, condition)) < 0.05


def test_blocks_and_the_whole_network_compile():
    x, timestep, condition = inputs()
    network = randomized(DiT(DiTConfig(**TEXT)))
    assert len(transformer_blocks(network)) == 3
    expected = network(x, timestep, condition)
    whole = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x, timestep, condition), expected, atol=1e-5, rtol=1e-4)


def test_init_weights_is_complete_after_the_meta_device():
    with torch.device("meta"):
        network = DiT(DiTConfig(**TEXT))
        router = Router(RouterConfig.named("ModernDiT-XS/2", size=16))
    for one in (network, router):
        one.to_empty(device="cpu")
        for tensor in one.state_dict().values():
            tensor.fill_(float("nan"))
        one.init_weights()
        assert all(bool(tensor.isfinite().all()) for tensor in one.state_dict().values())


@torch.no_grad()
def test_a_router_of_the_family(tmp_path):
    config = RouterConfig.named("ModernDiT-XS/2", width=48, heads=2, depth=2, size=16, experts=3, num_classes=5)
    router = randomized(Router(config))
    x, timestep, condition = inputs(6, 20)
    label = Condition(label=condition.label)
    logits = router(x, timestep, label)
    assert logits.shape == (3, 3)
    assert not router(x.roll(2, dims=-1), timestep, label).allclose(logits, atol=1e-3)
    save_network(router, tmp_path)
    assert load_network(tmp_path).config == config
    assert load_network(tmp_path)(x, timestep, label).equal(logits)
