import pytest
import torch

from atoll.apps.models.fold import time_table
from atoll.core.errors import AtollError
from atoll.nets import NAMES, Condition, DiT, DiTConfig, concatenate, count_parameters, load_network, save_network
from atoll.nets.layers import patchify, time_features, unpatchify
from atoll.nets.positions import sincos_positions

TINY = {"width": 48, "depth": 3, "heads": 2, "size": 16}


def awake(network, seed=0):
    """Return a network with random weights, because the initialization sets many of them to zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return network


def inputs(batch=3, seed=1, size=16):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(batch, 7, 20, generator=generator)
    mask = torch.arange(7) < torch.tensor([[7], [3], [1]])[:batch]
    x = torch.randn(batch, 4, size, size, generator=generator)
    return x, torch.tensor([3.0, 500.0, 999.0])[:batch], Condition(text, mask, label=torch.tensor([0, 4, 2])[:batch])


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({"text_width": 768}, 605_970_448),
        ({"text_width": 768, "modulation": "zero"}, 823_608_592),
        ({"num_classes": 1000, "modulation": "zero", "out_channels": 8}, 675_129_632),
    ],
    ids=["text, AdaLN-Single", "text, AdaLN-Zero", "the original DiT"],
)
def test_the_number_of_parameters_of_xl2_is_the_published_one(changes, parameters):
    with torch.device("meta"):
        assert count_parameters(DiT(DiTConfig.named("DiT-XL/2", **changes))) == parameters


def test_named_sizes():
    assert {"DiT-XS/2", "DiT-S/4", "DiT-B/8", "DiT-L/2", "DiT-XL/8"} <= set(NAMES)
    with pytest.raises(AtollError, match="did you mean 'DiT-XL/2'"):
        DiTConfig.named("DiT-XL2")
    with pytest.raises(AtollError, match="did you mean 'text_width'"):
        DiTConfig.named("DiT-S/2", text_widht=3)
    config = DiTConfig.named("DiT-S/2", text_width=12)
    assert DiTConfig.from_dict(config.to_dict()) == config


def test_a_new_network_predicts_zero_and_ignores_text():
    x, timestep, condition = inputs()
    network = DiT(DiTConfig(**TINY, text_width=20))
    assert network(x, timestep, condition).abs().max() == 0
    torch.nn.init.normal_(network.final.linear.weight)
    torch.testing.assert_close(network(x, timestep, condition), network(x, timestep))
    zero = DiT(DiTConfig(**TINY, modulation="zero"))
    tokens = zero.patch(patchify(x, 2)) + zero.positions
    torch.testing.assert_close(zero.features(x, timestep), tokens)  # AdaLN-Zero blocks start as the identity


def test_the_mask_hides_tokens_and_the_condition_matters():
    x, timestep, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20, num_classes=5)))
    output = network(x, timestep, condition)
    hidden = torch.where(condition.text_mask[..., None], condition.text, 99.0)
    changed = Condition(hidden, condition.text_mask, label=condition.label)
    torch.testing.assert_close(network(x, timestep, changed), output)
    alone = network(x[1:2], timestep[1:2], Condition(condition.text[1:2, :3], label=condition.label[1:2]))
    torch.testing.assert_close(alone, output[1:2], atol=1e-5, rtol=1e-4)
    assert not network(x, timestep, Condition(condition.text, label=condition.label)).allclose(output, atol=1e-3)
    assert not network(x, timestep, Condition(condition.text, condition.text_mask)).allclose(output, atol=1e-3)


def test_dropped_images_get_the_learned_null_condition():
    x, timestep, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20, num_classes=5, pooled_width=6)))
    condition = Condition(condition.text, condition.text_mask, torch.randn(3, 6), condition.label)
    kept, nothing = network(x, timestep, condition), network(x, timestep)
    some = network(x, timestep, condition.drop(torch.tensor([True, False, True])))
    torch.testing.assert_close(some[1], kept[1])
    torch.testing.assert_close(some[[0, 2]], nothing[[0, 2]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(network(x, timestep, condition.unconditional()), nothing, atol=1e-5, rtol=1e-4)
    nothing.sum().backward()
    assert network.null_text.grad.abs().max() > 0


@pytest.mark.parametrize("tokens", [3, 7, 9])
@torch.no_grad()
def test_a_null_caption_keeps_its_length(tokens):
    """The texts have 7 tokens, some of them masked; a dropped text has all tokens of the null caption."""
    x, timestep, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20, null_tokens=tokens)))
    caption = Condition(network.null_text.expand(3, tokens, 20))
    nothing, dropped = network(x, timestep, caption), torch.tensor([True, False, True])
    torch.testing.assert_close(network(x, timestep), nothing, atol=1e-5, rtol=1e-4)
    for text in (Condition(condition.text, condition.text_mask), Condition(condition.text)):
        expected = torch.where(dropped[:, None, None, None], nothing, network(x, timestep, text))
        torch.testing.assert_close(network(x, timestep, text.drop(dropped)), expected, atol=1e-5, rtol=1e-4)


def test_conditional_and_unconditional_halves_in_one_batch():
    x, timestep, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20)))
    condition = Condition(condition.text, condition.text_mask)
    both = network(
        torch.cat([x, x]), torch.cat([timestep, timestep]), concatenate([condition, condition.unconditional()])
    )
    torch.testing.assert_close(
        both, torch.cat([network(x, timestep, condition), network(x, timestep)]), atol=1e-5, rtol=1e-4
    )
    with pytest.raises(ValueError, match="unconditional"):
        concatenate([condition, Condition()])


@pytest.mark.parametrize("modulation", ["single", "zero"])
def test_a_prepared_condition_and_a_shared_timestep_give_the_same_output(modulation):
    x, _, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20, num_classes=5, modulation=modulation, qk_norm=True)))
    expected = network(x, torch.full((3,), 321.0), condition)
    prepared = network.prepare(condition)
    torch.testing.assert_close(network(x, torch.tensor(321.0), prepared), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(network(x[1:], torch.tensor([321.0]), prepared[1:]), expected[1:], atol=1e-5, rtol=1e-4)
    unlabelled = awake(DiT(DiTConfig(**TINY, text_width=20, modulation=modulation)))
    text = Condition(condition.text, condition.text_mask)
    torch.testing.assert_close(
        unlabelled(x, torch.tensor(321.0), text), unlabelled(x, torch.full((3,), 321.0), text), atol=1e-5, rtol=1e-4
    )


def test_some_images_of_a_prepared_condition_without_labels():
    """The null class is one row for the whole batch, also after indexing."""
    x, _, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20, num_classes=5)))
    prepared, timestep = network.prepare(Condition(condition.text, condition.text_mask)), torch.tensor(321.0)
    expected = network(x, timestep, prepared)
    for some in (slice(1, None), torch.tensor([2, 0])):
        torch.testing.assert_close(network(x[some], timestep, prepared[some]), expected[some], atol=1e-5, rtol=1e-4)
    nothing = network.prepare(None)
    torch.testing.assert_close(network(x[1:], timestep, nothing[1:]), network(x, timestep)[1:], atol=1e-5, rtol=1e-4)


def test_checkpointing_gives_the_same_gradients():
    x, timestep, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20, num_classes=5)))
    gradients = []
    for checkpointing in (False, True):
        network.checkpointing = checkpointing
        network.zero_grad()
        network(x, timestep, condition).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_other_resolutions_stretch_the_positions():
    fine, coarse = sincos_positions(16, 8, 8, base=4), sincos_positions(16, 4, 4, base=4)
    torch.testing.assert_close(fine.view(8, 8, 16)[::2, ::2], coarse.view(4, 4, 16))
    network = awake(DiT(DiTConfig(**TINY)))
    assert network(torch.randn(2, 4, 24, 32), torch.tensor(5.0)).shape == (2, 4, 24, 32)
    with pytest.raises(ValueError, match="multiples of the patch, 2"):
        network(torch.randn(2, 4, 15, 16), torch.tensor(5.0))
    with pytest.raises(ValueError, match=r"expected \(batch, 4,"):
        network(torch.randn(2, 3, 16, 16), torch.tensor(5.0))


def test_unpatchify_inverts_patchify():
    images = torch.randn(2, 3, 8, 12)
    tokens = patchify(images, 4)
    conv = torch.nn.Conv2d(3, 5, 4, 4)
    by_linear = torch.nn.functional.linear(tokens, conv.weight.flatten(1), conv.bias)
    torch.testing.assert_close(by_linear, conv(images).flatten(2).transpose(1, 2))
    channels_last = tokens.view(2, 6, 3, 16).transpose(2, 3).flatten(2)
    assert unpatchify(channels_last, 4, 2, columns=3).equal(images)


def test_time_features_are_cosines_then_sines():
    features = time_features(torch.tensor([2.0]))[0]
    assert features.shape == (256,)
    assert float(features[0]) == pytest.approx(torch.tensor(2.0).cos().item())
    assert float(features[128]) == pytest.approx(torch.tensor(2.0).sin().item())
    assert float(features[129]) == pytest.approx(torch.tensor(2.0 * 10000 ** (-1 / 128)).sin().item(), rel=1e-5)
    last = time_features(torch.tensor([1000.0]), shift=1)[0, 255]
    assert float(last) == pytest.approx(torch.tensor(0.1).sin().item(), rel=1e-5)


def test_the_time_table_maps_timesteps():
    x, _, _ = inputs()
    network = awake(DiT(DiTConfig(**TINY, time_table=True)))
    plain = DiT(DiTConfig(**TINY))
    plain.load_state_dict({key: value for key, value in network.state_dict().items() if key != "time_table"})
    timestep = torch.tensor([0.0, 250.5, 1000.0])
    torch.testing.assert_close(network(x, timestep), plain(x, timestep))
    network.time_table.copy_(torch.arange(1001.0) ** 2 / 1000)
    torch.testing.assert_close(
        network(x, timestep), plain(x, torch.tensor([0.0, (62.5 + 63.001) / 2, 1000.0])), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_the_time_table_stays_exact_in_every_precision(dtype):
    x, timestep, _ = inputs()
    network = awake(DiT(DiTConfig(**TINY, time_table=True)))
    network.time_table.copy_(time_table("snr"))
    clocks = []
    network.embedders[0].register_forward_pre_hook(lambda _, given: clocks.append(given[0]))
    exact = network(x, timestep)
    cast = network.to(dtype)
    assert cast.time_table.equal(time_table("snr"))
    output = cast(x.to(dtype), timestep)
    assert clocks[1].equal(clocks[0])
    assert output.dtype == dtype
    assert float((output.float() - exact).norm() / exact.norm()) < 0.1
    with torch.device("meta"):
        empty = DiT(DiTConfig(**TINY, time_table=True)).to(dtype)
    assert empty.time_table.is_meta
    assert empty.to_empty(device="cpu").time_table.dtype == torch.float32


def test_init_weights_is_complete_after_the_meta_device():
    with torch.device("meta"):
        network = DiT(DiTConfig(**TINY, text_width=20, num_classes=5, pooled_width=6, time_table=True, qk_norm=True))
    network.to_empty(device="cpu")
    for tensor in network.state_dict().values():
        tensor.fill_(float("nan"))
    network.init_weights()
    assert all(bool(tensor.isfinite().all()) for tensor in network.state_dict().values())


def test_save_and_load(tmp_path):
    network = awake(DiT(DiTConfig(**TINY, text_width=20, time_table=True)))
    save_network(network, tmp_path)
    loaded = load_network(tmp_path)
    assert loaded.config == network.config
    assert all(tensor.equal(network.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    with pytest.raises(AtollError, match="no such file"):
        load_network(tmp_path / "absent")


@torch.no_grad()
def test_half_precision_and_autocast_stay_close():
    x, timestep, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20)))
    exact = network(x, timestep, condition)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(x, timestep, condition)
    assert float((mixed.float() - exact).norm() / exact.norm()) < 0.05
    half = network.bfloat16()(x.bfloat16(), timestep, condition)
    assert half.dtype == torch.bfloat16
    assert float((half.float() - exact).norm() / exact.norm()) < 0.1


def test_the_whole_network_compiles_as_one_graph():
    x, timestep, condition = inputs()
    network = awake(DiT(DiTConfig(**TINY, text_width=20, num_classes=5)))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, timestep, condition), network(x, timestep, condition), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_full_size_xl2_runs():
    network = DiT(DiTConfig.named("DiT-XL/2", text_width=768)).eval()
    torch.nn.init.normal_(network.final.linear.weight, std=0.02)
    x = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = network(x, torch.tensor([500.0]), Condition(torch.randn(1, 77, 768)))
    assert output.shape == x.shape
    assert bool(output.isfinite().all())
    assert output.std() > 0.01
