import pytest
import torch

from atoll.core.errors import AtollError
from atoll.core.networks import read_network
from atoll.nets import Condition, DiT, DiTConfig, Expert, build, load_network, save_network
from atoll.nets.io import load_initial

SMALL = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8, "in_channels": 4}
DESCRIPTIONS = {
    "PixArtExpert": {**SMALL, "cross_attention_dim": 32, "caption_channels": 10, "out_channels": 8},
    "DiTExpert": {**SMALL, "num_embeds_ada_norm": 6, "out_channels": 8},
    "SD3Expert": {
        **SMALL, "joint_attention_dim": 10, "caption_projection_dim": 32, "pooled_projection_dim": 12,
        "out_channels": 4, "pos_embed_max_size": 8,
    },
    "UNetExpert": {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32), "num_class_embeds": 7,
        "norm_num_groups": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "layers_per_block": 1, "attention_head_dim": 16,
    },
}  # fmt: skip


def condition():
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return Condition(
        torch.randn(2, 3, 10, generator=generator), mask, torch.randn(2, 12, generator=generator), torch.tensor([1, 5])
    )


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_diffusers_models_are_experts(kind, tmp_path):
    torch.manual_seed(0)
    expert = build(read_network({"_class_name": kind, **DESCRIPTIONS[kind]}))
    assert isinstance(expert, Expert)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    expert.train()  # the network has no randomness: training mode changes nothing
    x, timestep = torch.randn(2, 4, 8, 8), torch.tensor([20.0, 900.0])
    output = expert(x, timestep, condition())
    assert output.shape == x.shape
    torch.testing.assert_close(expert(x, timestep, condition()), output)
    null = expert(x, timestep)
    assert not output.allclose(null, atol=1e-4)
    mixed = expert(x, timestep, condition().drop(torch.tensor([True, False])))
    torch.testing.assert_close(mixed[1], output[1], atol=1e-5, rtol=1e-4)
    if kind == "SD3Expert":  # its joint attention depends on the number of null tokens
        three = expert(x, timestep, condition().unconditional())
        torch.testing.assert_close(mixed[0], three[0], atol=1e-5, rtol=1e-4)
    else:
        torch.testing.assert_close(mixed[0], null[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(expert(x, torch.tensor(20.0))[:1], null[:1], atol=1e-5, rtol=1e-4)
    save_network(expert, tmp_path)
    torch.testing.assert_close(load_network(tmp_path)(x, timestep, condition()), output)


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_training_starts_from_a_diffusers_folder_of_a_wrapped_class(kind, tmp_path):
    torch.manual_seed(0)
    expert = build(read_network({"_class_name": kind, **DESCRIPTIONS[kind]}))
    expert.model.save_pretrained(tmp_path, max_shard_size="10KB")  # several files
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = load_initial(tmp_path)
    assert type(found) is type(expert)
    for name, tensor in expert.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], tensor)


@torch.no_grad()
def test_a_missing_text_has_as_many_null_tokens_as_the_texts_of_training(tmp_path):
    description = {"_class_name": "SD3Expert", **DESCRIPTIONS["SD3Expert"]}
    expert = build(read_network({**description, "null_tokens": 3})).eval()
    for parameter in expert.parameters():
        parameter.normal_(std=0.1)
    save_network(expert, tmp_path)
    x, timestep = torch.randn(2, 4, 8, 8), torch.tensor([20.0, 900.0])
    dropped = expert(x, timestep, condition().unconditional())
    torch.testing.assert_close(load_network(tmp_path)(x, timestep), dropped, atol=1e-5, rtol=1e-4)
    assert "null_tokens" not in build(read_network(description)).config.fields


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_the_null_condition_takes_part_in_every_training_step(kind):
    """Distributed training waits for the gradient of every weight, even if nothing is dropped."""
    torch.manual_seed(0)
    expert = build(read_network({"_class_name": kind, **DESCRIPTIONS[kind]})).train()
    expert(torch.randn(2, 4, 8, 8), torch.tensor([20.0, 900.0]), condition()).sum().backward()
    without = [name for name, weight in expert.named_parameters() if weight.grad is None]
    assert not [name for name in without if "null" in name]


@pytest.mark.parametrize("kind", ["DiT", "DiTExpert", "UNetExpert"])
def test_an_image_without_a_label_gets_the_null_class(kind):
    torch.manual_seed(0)
    dit = {"width": 32, "depth": 1, "heads": 2, "size": 8, "num_classes": 6}
    expert = build(read_network({"_class_name": kind, **(dit if kind == "DiT" else DESCRIPTIONS[kind])})).eval()
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
        x, timestep = torch.randn(2, 4, 8, 8), torch.tensor([20.0, 900.0])
        mixed = expert(x, timestep, Condition(label=torch.tensor([-1, 3])))
        null = expert(x, timestep, Condition(label=torch.tensor([1, 3])).drop(torch.tensor([True, False])))
    torch.testing.assert_close(mixed, null)


def test_a_dit_implements_the_expert_protocol():
    assert isinstance(DiT(DiTConfig(width=32, depth=1, heads=2, size=8)), Expert)


def test_unknown_networks_and_missing_weights_are_errors(tmp_path):
    with pytest.raises(AtollError, match="did you mean 'PixArtExpert'"):
        build(read_network({"_class_name": "PixArtExprt"}))
    expert = DiT(DiTConfig(width=32, depth=1, heads=2, size=8))
    save_network(expert, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"depth": 1', '"depth": 2'))
    with pytest.raises(AtollError, match=r"missing blocks\.1\.attention\.qkv\.weight"):
        load_network(tmp_path)
