"""Checkpoints of the original releases compared with reference networks: DiT, SiT and PixArt-alpha."""

import json

import pytest
import torch

from atoll import flow
from atoll.apps.models.convert import convert, read_source
from atoll.apps.models.fold import FlowMatchingOptions
from atoll.cli import main
from atoll.core.errors import AtollError
from atoll.experts.batch_conditions import ConditionSlots, replace_rows
from atoll.nets import Condition, DiT, DiTConfig, concatenate, load_network, save_network
from atoll.nets.io import read_weights, write_weights
from models import dit_release, pixart_release
from models.pixart_release import NULL_TOKENS

WIDTH, HEADS, CLASSES, TEXT = 48, 2, 10, 12


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes_state(seed=0):
    """Write a checkpoint with the tensors of DiT and SiT."""
    return dit_release.release_state(width=WIDTH, depth=2, patch=2, grid=4, classes=CLASSES, seed=seed)


# --- SiT ------------------------------------------------------------------------------------------------------------


def sit_velocity(state, x, time, label):
    """Return dx/ds = data - noise at time s of SiT, from noise at 0 to data at 1, without the variance channels."""
    return dit_release.release_forward(state, x, time, label, HEADS)[:, :4]


@torch.no_grad()
def test_the_velocity_of_a_sit_is_negated_and_its_time_reversed(tmp_path):
    state = classes_state()
    torch.save({"ema": state, "model": classes_state(seed=1)}, tmp_path / "SiT-XL-2-256x256.pt")
    source, out = tmp_path / "SiT-XL-2-256x256.pt", tmp_path / "out"
    arguments = ["--heads", str(HEADS), "--num-classes", str(CLASSES)]
    assert main(["convert", str(source), str(out), *arguments]) == 0
    network, bridge = load_network(out), flow.Objective().bridge()
    x, t = random(4, 4, 8, 8), torch.tensor([0.0, 0.25, 0.7004, 1.0])
    for label in (torch.tensor([0, 3, 9, 5]), torch.full((4,), CLASSES)):
        query = bridge.query(x, t)
        output = network(query.state, query.timestep, Condition(label=label))[:, :4]
        expected = -sit_velocity(state, x, 1 - t, label)
        torch.testing.assert_close(bridge.velocity(output, x, t), expected, atol=1e-5, rtol=0)
        assert expected.abs().max() > 0.3
    account = json.loads((out / "conversion.json").read_text())
    assert account["source"]["layout"] == "sit"
    assert "time and sign" in [change["item"] for change in account["changes"]]


def test_a_sit_is_written_unchanged_and_only_in_its_layout(tmp_path):
    state = classes_state()
    torch.save(state, tmp_path / "SiT.pt")
    hints = {"heads": HEADS, "num_classes": CLASSES}
    convert(tmp_path / "SiT.pt", tmp_path / "native", **hints)
    convert(tmp_path / "native", tmp_path / "back", "sit")
    back = read_weights(tmp_path / "back" / "diffusion_pytorch_model.safetensors")
    assert sorted(back) == sorted(state)
    assert all(tensor.equal(state[name]) for name, tensor in back.items())
    assert read_source(tmp_path / "back").layout == "sit"  # by the config.json that was written
    with pytest.raises(AtollError, match="time_table must be False"):
        convert(tmp_path / "native", tmp_path / "dit", "dit")
    with pytest.raises(AtollError, match="already a flow-matching network"):
        convert(tmp_path / "SiT.pt", tmp_path / "flow", "flow-matching", **hints)
    shape = {"width": WIDTH, "depth": 1, "heads": HEADS, "size": 8, "modulation": "zero", "num_classes": 3}
    save_network(DiT(DiTConfig(**shape)), tmp_path / "own")
    with pytest.raises(AtollError, match="embeds the time 1 - t"):
        convert(tmp_path / "own", tmp_path / "refused", "sit")
    save_network(DiT(DiTConfig(**shape, time_table=True)), tmp_path / "clock")
    with pytest.raises(AtollError, match="time table is not that of SiT"):
        convert(tmp_path / "clock", tmp_path / "refused", "sit")


@pytest.mark.parametrize(
    ("name", "config", "option", "expected"),
    [
        ("DiT-XL-2-256x256.pt", {}, None, "dit"),
        ("my_sit_b2.pt", {}, None, "sit"),
        ("0050000.pt", {}, "sit", "sit"),
        ("0050000.pt", {"layout": "dit"}, None, "dit"),
        ("SiT-XL-2-256.pt", {}, "dit", "dit"),
        ("0050000.pt", {}, None, None),
        ("position.pt", {}, None, None),
        ("DiT-or-SiT.pt", {}, None, None),
    ],
)
def test_dit_and_sit_are_distinguished_by_option_config_or_file_name(name, config, option, expected, tmp_path):
    torch.save(classes_state(), tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"num_classes": CLASSES, "heads": HEADS} | config))
    if expected is None:
        with pytest.raises(AtollError, match="pass --layout dit or sit"):
            read_source(tmp_path / name)
    else:
        source = read_source(tmp_path / name, layout=option)
        assert (source.layout, source.config.time_table) == (expected, expected == "sit")


def test_a_layout_that_does_not_fit_is_an_error(tmp_path):
    torch.save(classes_state(), tmp_path / "file.pt")
    with pytest.raises(AtollError, match="not in the layout pixart; their names are those of dit or sit"):
        read_source(tmp_path / "file.pt", HEADS, "pixart")
    torch.save({key: tensor for key, tensor in classes_state().items() if key != "pos_embed"}, tmp_path / "dit.pt")
    with pytest.raises(AtollError, match="lacks 'pos_embed', which the original DiT layout needs"):
        read_source(tmp_path / "dit.pt", HEADS, num_classes=CLASSES)
    save_network(DiT(DiTConfig(WIDTH, 1, HEADS, size=8)), tmp_path / "own")
    with pytest.raises(AtollError, match="omit --layout"):
        read_source(tmp_path / "own", layout="sit")


# --- The null class of DiT and SiT ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dit", "sit"])
@torch.no_grad()
def test_without_a_null_class_every_class_is_kept(layout, tmp_path):
    state = classes_state()
    table = state["y_embedder.embedding_table.weight"] = random(CLASSES, WIDTH)
    torch.save(state, tmp_path / "network.pt")
    hints = {"heads": HEADS, "layout": layout}
    conversion = convert(tmp_path / "network.pt", tmp_path / "out", **hints, num_classes=CLASSES)
    new = [(change.item, change.parameters) for change in conversion.changes if change.action == "new"]
    assert new == [("y_embedder.embedding_table.weight", WIDTH)]
    network = load_network(tmp_path / "out")
    assert network.config.num_classes == CLASSES
    x, time, last = random(2, 4, 8, 8), torch.tensor([100.0, 900.0]), torch.full((2,), CLASSES - 1)
    theirs, sign = (time, 1) if layout == "dit" else (1 - time / 1000, -1)
    expected = sign * dit_release.release_forward(state, x, theirs, last, HEADS)
    torch.testing.assert_close(network(x, time, Condition(label=last)), expected, atol=1e-5, rtol=0)
    middle = state | {"y_embedder.embedding_table.weight": table.mean(0, keepdim=True)}
    expected = sign * dit_release.release_forward(middle, x, theirs, torch.zeros(2, dtype=torch.long), HEADS)
    torch.testing.assert_close(network(x, time), expected, atol=1e-5, rtol=0)


def test_the_number_of_classes_is_never_guessed(tmp_path):
    state = classes_state()
    torch.save(state, tmp_path / "DiT.pt")
    with pytest.raises(AtollError, match=r"11 rows, which are 10 classes and the null class, or 11 classes"):
        read_source(tmp_path / "DiT.pt", HEADS)
    with pytest.raises(AtollError, match="cannot hold 12 classes"):
        read_source(tmp_path / "DiT.pt", HEADS, num_classes=12)
    assert read_source(tmp_path / "DiT.pt", HEADS, num_classes=11).config.num_classes == 11
    convert(tmp_path / "DiT.pt", tmp_path / "out", "dit", heads=HEADS, num_classes=10)
    assert read_source(tmp_path / "out").config.num_classes == 10  # by the config.json that was written
    state["y_embedder.embedding_table.weight"] = random(1001, WIDTH)
    torch.save(state, tmp_path / "DiT.pt")
    assert read_source(tmp_path / "DiT.pt", HEADS).config.num_classes == 1000  # the table of the releases


# --- PixArt-alpha ---------------------------------------------------------------------------------------------------


def pixart_state(seed=0):
    return pixart_release.release_state(width=WIDTH, depth=2, patch=2, grid=4, text_width=TEXT, seed=seed)


@pytest.fixture(scope="module")
def pixart(tmp_path_factory):
    """A checkpoint of PixArt-alpha, and the folder that `atoll convert` writes."""
    folder, state = tmp_path_factory.mktemp("pixart"), pixart_state()
    file = folder / "PixArt-XL-2-256x256.pth"
    torch.save({"state_dict": pixart_state(seed=1), "state_dict_ema": state, "epoch": 3}, file)
    assert main(["convert", str(file), str(folder / "out"), "--heads", str(HEADS)]) == 0
    return state, folder / "out"


def captions(length):
    """Return three texts of 1, 5 and `length` tokens, with their mask."""
    mask = torch.arange(length) < torch.tensor([[1], [5], [length]])
    return random(3, length, TEXT, seed=3), mask


X, TIME = random(3, 4, 8, 8), torch.tensor([0.0, 37.5, 999.0])


@torch.no_grad()
def test_a_released_pixart_equals_the_reference(pixart):
    state, folder = pixart
    network = load_network(folder)
    assert network.config.null_tokens == NULL_TOKENS
    assert network.config.positions == "sincos"
    text, mask = captions(9)
    expected = pixart_release.release_forward(
        state, X, TIME, [row[keep] for row, keep in zip(text, mask, strict=True)], HEADS
    )
    torch.testing.assert_close(network(X, TIME, Condition(text, mask)), expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 0.3
    null = pixart_release.release_forward(state, X, TIME, [state["y_embedder.y_embedding"]] * 3, HEADS)
    torch.testing.assert_close(network(X, TIME), null, atol=1e-5, rtol=0)
    assert (null - expected).abs().max() > 0.1


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [9, NULL_TOKENS, 130])
@torch.no_grad()
def test_a_null_caption_shares_a_batch_with_texts_of_any_length(length, masked, pixart):
    state, folder = pixart
    network, (text, mask) = load_network(folder), captions(length)
    mask = mask if masked else torch.ones_like(mask)
    condition = Condition(text, mask if masked else None)
    own = [row[keep] for row, keep in zip(text, mask, strict=True)]
    null = state["y_embedder.y_embedding"]
    both = concatenate([condition, condition.unconditional()])
    x, time = torch.cat([X, X]), torch.cat([TIME, TIME])
    expected = pixart_release.release_forward(state, x, time, [*own, null, null, null], HEADS)
    torch.testing.assert_close(network(x, time, both), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(network(x, time, network.prepare(both)), expected, atol=1e-5, rtol=0)
    some = condition.drop(torch.tensor([False, True, False]))
    expected = torch.stack([expected[0], expected[4], expected[2]])
    torch.testing.assert_close(network(X, TIME, some), expected, atol=1e-5, rtol=0)
    network.train()  # in training mode the null condition is part of every batch
    torch.testing.assert_close(network(X, TIME, some), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_null_caption_is_kept_when_prepared_texts_are_replaced(pixart):
    """A server prepares conditions in this way: rows hold the null caption, and texts replace some of them."""
    state, folder = pixart
    network, (text, mask) = load_network(folder), captions(9)
    places = ConditionSlots(Condition(text[:1], mask[:1]), 2)
    prepared = network.prepare(places.distinct)
    places.put(1, Condition(text[1:2], mask[1:2]))
    rows = torch.tensor([1])
    replace_rows(prepared, rows, network.prepare(places.distinct[rows]))
    null = state["y_embedder.y_embedding"]
    expected = pixart_release.release_forward(state, X, TIME, [null, text[1, mask[1]], null], HEADS)
    torch.testing.assert_close(network(X, TIME, prepared), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_null_caption_survives_every_layout_that_has_one(pixart, tmp_path):
    state, folder = pixart
    for name in ("pixart", "diffusers-pixart"):
        convert(folder, tmp_path / name, name)
        assert read_source(tmp_path / name).layout == name
        network = read_source(tmp_path / name).network()
        for key, tensor in load_network(folder).state_dict().items():
            assert tensor.equal(network.state_dict()[key]), f"{name}: {key}"
    written = read_weights(tmp_path / "pixart" / "diffusion_pytorch_model.safetensors")
    assert all(tensor.equal(state[key]) for key, tensor in written.items())
    assert sorted(written) == sorted(state)


@torch.no_grad()
def test_one_learned_null_token_is_written_as_a_caption_of_equal_tokens(tmp_path):
    network = DiT(DiTConfig(WIDTH, 1, HEADS, size=8, text_width=TEXT, text_projection="mlp"))
    save_network(network, tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "there", "pixart")
    written = read_weights(tmp_path / "there" / "diffusion_pytorch_model.safetensors")["y_embedder.y_embedding"]
    assert written.equal(network.null_text.expand(NULL_TOKENS, TEXT))
    convert(tmp_path / "there", tmp_path / "back")
    back = load_network(tmp_path / "back")
    assert back.config == network.config
    assert back.null_text.equal(network.null_text)


@torch.no_grad()
def test_positions_of_a_pixart_are_read_or_computed(tmp_path):
    state = pixart_state()
    wide = dit_release.positions(WIDTH, 8).view(8, 8, WIDTH)[::2, ::2].reshape(1, 16, WIDTH)
    torch.save(
        state | {"pos_embed": wide}, tmp_path / "wide.pth"
    )  # scale 0.5: every other position of a grid with twice the side
    config = read_source(tmp_path / "wide.pth", HEADS).config
    assert (config.positions, config.position_scale, config.size) == ("sincos", 0.5, 8)
    torch.save({name: tensor for name, tensor in state.items() if name != "pos_embed"}, tmp_path / "bare.pth")
    with pytest.raises(AtollError, match="has no pos_embed"):
        read_source(tmp_path / "bare.pth", HEADS)
    (tmp_path / "config.json").write_text('{"size": 8}')
    source = read_source(tmp_path / "bare.pth", HEADS)
    assert [(change.item, change.action) for change in source.changes] == [("pos_embed", "new")]
    torch.testing.assert_close(source.state["positions"], state["pos_embed"], atol=1e-6, rtol=0)


def test_an_unsupported_pixart_is_an_error(tmp_path):
    state = pixart_state()
    torch.save(state | {"csize_embedder.mlp.0.weight": torch.zeros(16, 256)}, tmp_path / "ms.pth")
    with pytest.raises(AtollError, match="resolution and aspect ratio"):
        read_source(tmp_path / "ms.pth", HEADS)
    del state["y_embedder.y_embedding"]
    write_weights(state, tmp_path / "without.safetensors")
    with pytest.raises(AtollError, match="no null caption"):
        read_source(tmp_path / "without.safetensors", HEADS)
    torch.save(pixart_state(), tmp_path / "pixart.pth")
    with pytest.raises(AtollError, match="needs a network without text"):
        convert(tmp_path / "pixart.pth", tmp_path / "out", "flow-matching", options=FlowMatchingOptions(), heads=HEADS)
