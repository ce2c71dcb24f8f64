import json

import pytest
import torch

from atoll.apps.models.convert import convert, read_source
from atoll.apps.models.fold import STEPS, FlowMatchingOptions, activated_embeddings, time_table
from atoll.cli import main
from atoll.core.artifacts import sha256_of
from atoll.core.errors import AtollError
from atoll.core.networks import read_network
from atoll.nets import Condition, DiT, DiTConfig, Router, RouterConfig, build, load_network, save_network
from atoll.nets.io import write_weights
from models.dit_release import release_forward, release_state

WIDTH, HEADS, CLASSES = 48, 2, 10


@pytest.fixture
def release(tmp_path):
    """A checkpoint in the original DiT layout with random weights, as a .pt file."""
    state = release_state(width=WIDTH, depth=3, patch=2, grid=8, classes=CLASSES, seed=0)
    file = tmp_path / "DiT-tiny.pt"
    torch.save(state, file)
    (tmp_path / "config.json").write_text(json.dumps({"num_classes": CLASSES}))
    return file, state


def noise(count=3):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 4, 16, 16, generator=generator), torch.tensor([3.0, 444.0, 990.0])[:count]


@torch.no_grad()
def test_a_conversion_without_fold_computes_the_same_as_the_source(release, tmp_path):
    file, state = release
    options = FlowMatchingOptions(fold=False, final="keep", time="same", text_width=12)
    conversion = convert(file, tmp_path / "out", "flow-matching", options=options, heads=HEADS)
    expert = load_network(tmp_path / "out")
    x, time = noise()
    null = torch.full((3,), CLASSES)
    expected = release_forward(state, x, time, null, HEADS)[:, :4]
    text = Condition(text=torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(expert(x, time, text), expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 0.1
    assert conversion.metrics["feature_error"] < 1e-5
    assert conversion.metrics["residual"] == 0


@torch.no_grad()
def test_the_time_table_steps_is_999_t(release, tmp_path):
    file, state = release
    options = FlowMatchingOptions(fold=False, final="keep", time="steps", text_width=0)
    convert(file, tmp_path / "out", "flow-matching", options=options, heads=HEADS)
    expert = load_network(tmp_path / "out")
    x, _ = noise()
    time = torch.tensor([0.0, 500.25, 1000.0])
    expected = release_forward(state, x, 0.999 * time, torch.full((3,), CLASSES), HEADS)[:, :4]
    torch.testing.assert_close(expert(x, time), expected, atol=3e-5, rtol=0)


def test_a_new_final_layer_predicts_zero_and_labels_can_be_kept(release, tmp_path):
    file, _ = release
    options = FlowMatchingOptions(fold=False, keep_labels=True, text_width=0, time="same")
    convert(file, tmp_path / "out", "flow-matching", options=options, heads=HEADS)
    expert = load_network(tmp_path / "out")
    x, time = noise()
    label = torch.tensor([1, 5, CLASSES])
    assert expert(x, time, Condition(label=label)).abs().max() == 0
    source = read_source(file, HEADS).network()
    torch.testing.assert_close(
        expert.features(x, time, Condition(label=label)), source.features(x, time, Condition(label=label))
    )


def test_fold_is_the_least_squares_fit(release, tmp_path):
    file, _ = release
    convert(file, tmp_path / "out", "flow-matching", options=FlowMatchingOptions(text_width=0), heads=HEADS)
    source, folded = read_source(file, HEADS), load_network(tmp_path / "out").state_dict()
    depth, values = source.config.depth, activated_embeddings(folded, DiTConfig(width=WIDTH, heads=HEADS)).double()
    target = torch.stack(
        [
            values @ source.state[f"blocks.{n}.modulation.linear.weight"].double().T
            + source.state[f"blocks.{n}.modulation.linear.bias"].double()
            for n in range(depth)
        ]
    )
    # The reference solution: one regression of all blocks on s(t) and one indicator per block.
    indicators = torch.eye(depth, dtype=torch.float64).repeat_interleave(STEPS, 0)
    design = torch.cat([values.repeat(depth, 1), indicators], dim=1)
    best = torch.linalg.lstsq(design, target.flatten(0, 1), driver="gelsd").solution
    optimum = (design @ best - target.flatten(0, 1)).square().sum()
    shared = values @ folded["shared_modulation.weight"].double().T + folded["shared_modulation.bias"].double()
    ours = torch.stack([shared + folded[f"blocks.{n}.modulation.table"].double().flatten() for n in range(depth)])
    error = (ours - target).square().sum()
    assert error <= optimum * (1 + 1e-4)
    metrics = json.loads((tmp_path / "out" / "conversion.json").read_text())["metrics"]
    assert metrics["residual"] == pytest.approx(float((error / target.square().sum()).sqrt()), rel=1e-3)
    assert 0 < metrics["residual"] < metrics["residual_in_time"] < 1


def test_fold_is_exact_when_blocks_share_their_change_in_time(release, tmp_path):
    file, state = release
    for name in state:
        if name.endswith("adaLN_modulation.1.weight") and name.startswith("blocks."):
            state[name] = state["blocks.0.adaLN_modulation.1.weight"].clone()
    torch.save(state, file)
    options = FlowMatchingOptions(final="keep", time="same", text_width=12)
    conversion = convert(file, tmp_path / "out", "flow-matching", options=options, heads=HEADS)
    assert conversion.metrics["residual"] < 1e-6
    x, time = noise()
    expected = release_forward(state, x, time, torch.full((3,), CLASSES), HEADS)[:, :4]
    torch.testing.assert_close(load_network(tmp_path / "out")(x, time), expected, atol=1e-5, rtol=0)


def test_the_time_table_snr_matches_the_signal_to_noise_ratio():
    table = time_table("snr").double()
    signal = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    for time in (100, 300, 500, 900):
        step = table[time]
        low = int(step)
        ratio = ((1 - signal) / signal).sqrt().log()
        interpolated = ratio[low] + (step - low) * (ratio[low + 1] - ratio[low])
        assert float(interpolated.exp()) == pytest.approx(time / (1000 - time), rel=1e-4)
    assert table[0] == 0
    assert table[1000] == 999
    assert bool((table.diff() >= 0).all())


def test_conversion_json_lists_changes_and_hashes(release, tmp_path, capsys):
    file, _ = release
    out = tmp_path / "out"
    assert main(["convert", str(file), str(out), "--to", "flow-matching", "--heads", str(HEADS)]) == 0
    printed = capsys.readouterr().out
    account = json.loads((out / "conversion.json").read_text())
    assert account["source"] == {"file": file.name, "layout": "dit", "sha256": sha256_of(file)}
    assert account["files"] == {name: sha256_of(out / name) for name in account["files"]}
    actions = {change["item"]: change["action"] for change in account["changes"]}
    assert actions["modulation of the blocks"] == "folded"
    assert actions["final layer"] == actions["text projection"] == actions["cross-attention"] == "new"
    assert "folded" in printed
    total = sum(change["parameters"] for change in account["changes"])
    assert total == sum(tensor.numel() for tensor in load_network(out).state_dict().values())


def test_the_command_converts_to_every_layout_and_back(tmp_path):
    cases = {
        "dit": DiT(DiTConfig(WIDTH, 2, HEADS, size=16, modulation="zero", num_classes=5)),
        "pixart": DiT(DiTConfig(WIDTH, 2, HEADS, size=16, text_width=12, text_projection="mlp", null_tokens=7)),
        "diffusers-dit": DiT(DiTConfig(WIDTH, 2, HEADS, size=16, modulation="zero", num_classes=5, frequency_shift=1)),
        "diffusers-pixart": DiT(DiTConfig(WIDTH, 2, HEADS, size=16, text_width=12, text_projection="mlp")),
        "paris": DiT(DiTConfig(WIDTH, 2, HEADS, size=16, text_width=12, norm_eps=1e-5, mlp_norm_eps=1e-5)),
        "paris-router": Router(RouterConfig(3, WIDTH, 2, HEADS, size=16, norm_eps=1e-5)),
    }
    for name, network in cases.items():
        folder = tmp_path / name
        save_network(network, folder / "native")
        assert main(["convert", str(folder / "native"), str(folder / "there"), "--to", name]) == 0
        assert main(["convert", str(folder / "there"), str(folder / "back")]) == 0
        back = load_network(folder / "back")
        assert back.config == network.config
        for key, tensor in network.state_dict().items():
            assert back.state_dict()[key].equal(tensor) or "null_" in key, f"{name}: {key}"


def test_a_network_that_does_not_fit_a_layout_is_an_error_with_the_reason(release, tmp_path):
    file, _ = release
    with pytest.raises(AtollError, match=r"modulation must be 'single', but is 'zero'|needs text conditioning"):
        convert(file, tmp_path / "out", "paris", heads=HEADS)
    with pytest.raises(AtollError, match="pass it with --heads"):
        convert(file, tmp_path / "out")
    with pytest.raises(AtollError, match="did you mean 'flow-matching'"):
        convert(file, tmp_path / "out", "flow-matchin", heads=HEADS)
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("here")
    with pytest.raises(AtollError, match="--force"):
        convert(file, tmp_path / "full", heads=HEADS)


def test_differences_of_arithmetic_are_listed(release, tmp_path):
    file, _ = release
    conversion = convert(file, tmp_path / "out", "diffusers-dit", heads=HEADS)
    assert [change.item for change in conversion.changes if change.action == "changed"] == ["frequency_shift"]
    assert [change.item for change in conversion.changes if change.action == "omitted"] == ["positions"]


@torch.no_grad()
def test_the_null_condition_of_a_pixart_expert_is_kept(tmp_path):
    torch.manual_seed(0)
    fields = {
        "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2, "sample_size": 16, "in_channels": 4,
        "out_channels": 4, "cross_attention_dim": WIDTH, "caption_channels": 12,
    }  # fmt: skip
    expert = build(read_network({"_class_name": "PixArtExpert", **fields})).eval()
    for parameter in expert.parameters():
        parameter.normal_(std=0.1)
    save_network(expert, tmp_path / "expert")
    convert(tmp_path / "expert", tmp_path / "native")
    x, time = noise()
    torch.testing.assert_close(load_network(tmp_path / "native")(x, time), expert(x, time), atol=1e-5, rtol=0)
    conversion = convert(tmp_path / "expert", tmp_path / "there", "diffusers-pixart")
    assert [change.item for change in conversion.changes if change.action == "omitted"] == ["null_text, positions"]


def test_the_given_file_is_read(tmp_path):
    folder, networks = tmp_path / "network", [DiT(DiTConfig(WIDTH, 1, HEADS, size=16)) for _ in range(2)]
    save_network(networks[0], folder)
    write_weights(networks[1].state_dict(), folder / "other.safetensors")
    convert(folder / "other.safetensors", tmp_path / "out")
    for name, tensor in load_network(tmp_path / "out").state_dict().items():
        assert tensor.equal(networks[1].state_dict()[name]), name
    write_weights(DiT(DiTConfig(WIDTH, 2, HEADS, size=16)).state_dict(), folder / "deeper.safetensors")
    with pytest.raises(AtollError, match=r"unexpected blocks\.1\.attention"):
        convert(folder / "deeper.safetensors", tmp_path / "refused")


def test_no_foreign_layout_has_the_block_of_moderndit(tmp_path):
    tiny = {"width": 32, "depth": 1, "heads": 2}
    reason = "positions must be 'sincos', but is 'rope'; norm must be 'layer', but is 'rms'; mlp must be 'gelu'"
    networks = {
        "paris": DiT(DiTConfig.named("ModernDiT-XS/2", **tiny, text_width=8)),
        "dit": DiT(DiTConfig.named("ModernDiT-XS/2", **tiny, num_classes=3)),
        "paris-router": Router(RouterConfig.named("ModernDiT-XS/2", **tiny)),
    }
    for layout, network in networks.items():
        save_network(network, tmp_path / layout)
        with pytest.raises(AtollError, match=reason):
            convert(tmp_path / layout, tmp_path / "out", layout)
