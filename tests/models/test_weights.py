import pytest
import torch
from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel

from atoll.apps.models.convert import convert, read_source
from atoll.apps.models.fold import FlowMatchingOptions
from atoll.core.errors import AtollError
from atoll.nets import Condition, Router, RouterConfig, load_network
from atoll.nets.io import read_weights, write_weights
from atoll.nets.layouts import LAYOUTS, detect, layout
from atoll.nets.positions import is_sincos, sincos_positions
from models.dit_release import positions, release_forward, release_state
from models.paris_release import Paris


def native(state, config=None, heads=None, name=None):
    """Return the native network of foreign tensors, and its configuration."""
    found = detect(state, name)
    translated = found.read_config(state, config or {}, heads)
    network = found.build(translated)
    network.load_state_dict(found.to_native(state, translated))
    return network.eval(), translated


def assert_round_trip(name, network, config, state):
    back = layout(name).from_native(network.state_dict(), config)
    assert sorted(back) == sorted(state)
    for key, tensor in state.items():
        assert back[key].equal(tensor), key


def randomize(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.eval()


def pixart(**changes):
    fields = {
        "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 8, "num_layers": 3,
        "cross_attention_dim": 48, "sample_size": 16, "patch_size": 2, "caption_channels": 20,
    }  # fmt: skip
    return randomize(PixArtTransformer2DModel(**fields | changes))


@pytest.mark.parametrize(("native_size", "size"), [(16, (16, 16)), (16, (24, 24)), (16, (8, 20)), (128, (32, 32))])
@torch.no_grad()
def test_pixart_gives_equal_outputs_and_survives_the_round_trip(native_size, size):
    model = pixart(sample_size=native_size, use_additional_conditions=False)
    network, config = native(model.state_dict(), dict(model.config))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, *size, generator=generator)
    time, text = torch.tensor([0.0, 37.5, 999.0]), torch.randn(3, 9, 20, generator=generator)
    mask = torch.rand(3, 9, generator=generator) > 0.4
    mask[0] = False  # a text without tokens
    mask[1] = True
    theirs = model(x, encoder_hidden_states=text, timestep=time, encoder_attention_mask=mask).sample
    ours = network(x, time, Condition(text, mask))
    torch.testing.assert_close(ours[1:], theirs[1:], atol=1e-5, rtol=0)
    assert bool(ours.isfinite().all())
    assert theirs.abs().max() > 0.3
    assert_round_trip("diffusers-pixart", network, config, model.state_dict())


@pytest.mark.parametrize("tied", [True, False], ids=["one embedder", "an embedder per block"])
@torch.no_grad()
def test_diffusers_dit_gives_equal_outputs_and_survives_the_round_trip(tied):
    model = randomize(
        DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=24, out_channels=8, num_layers=3, sample_size=16,
            num_embeds_ada_norm=10,
        )
    )  # fmt: skip
    if tied:
        for block in model.transformer_blocks:
            block.norm1.emb.load_state_dict(model.transformer_blocks[0].norm1.emb.state_dict())
    network, config = native(model.state_dict(), dict(model.config))
    assert config.embedder_per_block is not tied
    x = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    time, label = torch.tensor([0.0, 37.5, 999.0]), torch.tensor([3, 0, 10])
    theirs = model(x, timestep=time, class_labels=label).sample
    torch.testing.assert_close(network(x, time, Condition(label=label)), theirs, atol=1e-5, rtol=0)
    assert theirs.abs().max() > 0.3
    assert_round_trip("diffusers-dit", network, config, model.state_dict())


@torch.no_grad()
def test_the_original_dit_gives_equal_outputs_and_survives_the_round_trip():
    state = release_state(width=48, depth=3, patch=2, grid=8, classes=10, seed=2)
    network, config = native(state, {"num_classes": 10}, heads=2, name="dit")
    assert config.positions == "sincos"
    x = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    time, label = torch.tensor([0.0, 37.5, 999.0]), torch.tensor([3, 0, 10])
    theirs = release_forward(state, x, time, label, heads=2)
    torch.testing.assert_close(network(x, time, Condition(label=label)), theirs, atol=1e-5, rtol=0)
    assert_round_trip("dit", network, config, state)


@torch.no_grad()
def test_paris_experts_give_equal_outputs_and_survive_the_round_trip():
    model = randomize(Paris(48, 2, 3, 8, text_width=20))
    network, config = native(model.state_dict(), heads=2)
    assert config.positions == "learned"
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 4, 16, 16, generator=generator), torch.randn(2, 7, 20, generator=generator)
    time = torch.tensor([37.5, 999.0])
    # A timestep of 999 in float32 is rounded by 6e-5, and so are the phases of its features. Two orders of the same
    # products may differ by that much. Outputs go up to 3, and a wrong tensor changes them by that much.
    torch.testing.assert_close(network(x, time, Condition(text)), model(x, time, text), atol=1e-4, rtol=0)
    assert network(torch.randn(1, 4, 24, 32), torch.tensor(5.0)).shape == (1, 4, 24, 32)
    assert_round_trip("paris", network, config, model.state_dict())


@torch.no_grad()
def test_paris_routers_give_equal_outputs_and_survive_the_round_trip():
    model = randomize(Paris(48, 2, 3, 8, experts=5))
    network, config = native(model.state_dict(), heads=2)
    assert isinstance(network, Router)
    x, time = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([37.5, 999.0])
    torch.testing.assert_close(network.logits(x, time), model(x, time), atol=3e-5, rtol=0)
    assert_round_trip("paris-router", network, config, model.state_dict())


def test_all_tensors_that_do_not_fit_are_listed():
    state = release_state(width=48, depth=2, patch=2, grid=8, classes=10, seed=2)
    del state["blocks.1.attn.qkv.bias"]
    state["blocks.0.mlp.fc2.weight"] = torch.zeros(3, 3)
    state["surplus"] = torch.zeros(1)
    with pytest.raises(AtollError) as error:
        native(state, {"num_classes": 10}, heads=2, name="dit")
    for line in (
        "missing blocks.1.attn.qkv.bias (144,)",
        "unexpected surplus (1,)",
        "blocks.0.mlp.fc2.weight has shape (3, 3), expected (48, 192)",
        "nothing was loaded",
    ):
        assert line in str(error.value)


def test_an_unknown_layout_is_an_error():
    with pytest.raises(AtollError, match="layout of these tensors is not supported"):
        detect({"conv.weight": torch.zeros(1)})
    with pytest.raises(AtollError, match="did you mean 'paris'"):
        layout("pari")
    assert set(LAYOUTS) == {"dit", "sit", "pixart", "diffusers-dit", "diffusers-pixart", "paris", "paris-router"}


def test_pt_files_are_read_without_executing_code(tmp_path):
    state = {"a": torch.arange(3.0)}
    torch.save({"ema": state, "model": {"a": torch.zeros(3)}}, tmp_path / "trained.pt")
    assert read_weights(tmp_path / "trained.pt")["a"].equal(state["a"])
    torch.save({"model": state, "args": Router}, tmp_path / "code.pt")
    with pytest.raises(AtollError, match="could execute code"):
        read_weights(tmp_path / "code.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(AtollError, match="not a safetensors file"):
        read_weights(tmp_path / "broken.safetensors")
    with pytest.raises(AtollError, match="no such file"):
        read_weights(tmp_path / "absent.pt")


@torch.no_grad()
def test_a_diffusers_folder_is_read_with_its_configuration(tmp_path):
    model = pixart(use_additional_conditions=False)
    model.save_pretrained(tmp_path)
    source = read_source(tmp_path)
    assert source.layout == "diffusers-pixart"
    x, time, text = torch.randn(1, 4, 16, 16), torch.tensor([5.0]), torch.randn(1, 3, 20)
    theirs = model(x, encoder_hidden_states=text, timestep=time).sample
    torch.testing.assert_close(source.network()(x, time, Condition(text)), theirs, atol=1e-5, rtol=0)
    with pytest.raises(AtollError, match="resolution and aspect ratio"):
        native(pixart(use_additional_conditions=True).state_dict(), dict(model.config))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_is_read_as_float32(dtype, tmp_path):
    state = release_state(width=48, depth=2, patch=2, grid=8, classes=10, seed=2)
    half = {name: tensor.to(dtype) for name, tensor in state.items()}
    torch.save(half, tmp_path / "half-dit.pt")
    source = read_source(tmp_path / "half-dit.pt", 2, num_classes=10)
    assert source.config.positions == "sincos"
    assert {tensor.dtype for tensor in source.state.values()} == {torch.float32}
    x = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    time, label = torch.tensor([37.5, 999.0]), torch.tensor([3, 10])
    theirs = release_forward({name: tensor.float() for name, tensor in half.items()}, x, time, label, heads=2)
    torch.testing.assert_close(source.network()(x, time, Condition(label=label)), theirs, atol=1e-5, rtol=0)
    options = FlowMatchingOptions(final="keep")
    conversion = convert(
        tmp_path / "half-dit.pt", tmp_path / "out", "flow-matching", options=options, heads=2, num_classes=10
    )
    assert conversion.metrics["residual"] > 0
    paris = randomize(Paris(48, 2, 1, 8, text_width=20)).to(dtype)  # the file has no null condition
    torch.save(paris.state_dict(), tmp_path / "paris.pt")
    assert read_source(tmp_path / "paris.pt", 2).network()(x, time, Condition()).dtype == torch.float32


def test_full_precision_distinguishes_learned_positions_from_rounded_ones():
    table = positions(48, 8)
    assert [bool(is_sincos(kind, 8)) for kind in (table, table.half(), table.bfloat16())] == [True] * 3
    assert not is_sincos(table * 1.001, 8)
    assert not is_sincos((table * 1.02).bfloat16(), 8)


@torch.no_grad()
def test_the_null_caption_of_a_released_pixart_is_kept(tmp_path):
    model, caption = pixart(use_additional_conditions=False), torch.randn(120, 20)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "diffusion_pytorch_model.safetensors"
    write_weights(read_weights(file) | {"caption_projection.y_embedding": caption}, file)
    conversion = convert(tmp_path / "model", tmp_path / "out")
    assert [change.action for change in conversion.changes] == ["renamed"]
    x, time, text = torch.randn(2, 4, 16, 16), torch.tensor([5.0, 700.0]), torch.randn(2, 3, 20)
    network = load_network(tmp_path / "out")
    theirs = model(x, encoder_hidden_states=text, timestep=time).sample
    torch.testing.assert_close(network(x, time, Condition(text)), theirs, atol=1e-5, rtol=0)
    theirs[1] = model(x[1:], encoder_hidden_states=caption[None], timestep=time[1:]).sample
    dropped = Condition(text).drop(torch.tensor([False, True]))
    torch.testing.assert_close(network(x, time, dropped), theirs, atol=1e-5, rtol=0)
    convert(tmp_path / "out", tmp_path / "back", "diffusers-pixart")
    back = PixArtTransformer2DModel.from_pretrained(tmp_path / "back")  # it ignores the caption
    torch.testing.assert_close(back(x[1:], encoder_hidden_states=caption[None], timestep=time[1:]).sample, theirs[1:])


def test_positions_equal_those_of_mae():
    torch.testing.assert_close(sincos_positions(32, 5, 5, base=5), positions(32, 5), atol=1e-6, rtol=0)


def test_router_config_is_read_from_shapes():
    router = Router(RouterConfig(experts=3, width=48, depth=2, heads=2, size=8, norm_eps=1e-5))
    foreign = layout("paris-router").from_native(router.state_dict(), router.config)
    assert layout("paris-router").read_config(foreign, {}, 2) == router.config
