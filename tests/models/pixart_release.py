"""A reference of the PixArt-alpha release, with its tensor names and shapes: a checkpoint and a plain forward pass."""

import math

import torch
from torch.nn import functional

from models.dit_release import positions

NULL_TOKENS = 120


def release_state(width, depth, patch, grid, text_width, seed, channels=4):
    """Return random weights in the layout of PixArt-XL-2-256x256.pth, with twice the channels in the output."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.15

    def linear(name, rows, columns):
        return {f"{name}.weight": random(rows, columns), f"{name}.bias": random(rows)}

    state = {
        "pos_embed": positions(width, grid),
        "x_embedder.proj.weight": random(width, channels, patch, patch),
        "x_embedder.proj.bias": random(width),
        "y_embedder.y_embedding": random(NULL_TOKENS, text_width) * 10,
        "final_layer.scale_shift_table": random(2, width),
        **linear("y_embedder.y_proj.fc1", width, text_width),
        **linear("y_embedder.y_proj.fc2", width, width),
        **linear("t_embedder.mlp.0", width, 256),
        **linear("t_embedder.mlp.2", width, width),
        **linear("t_block.1", 6 * width, width),
        **linear("final_layer.linear", patch * patch * channels * 2, width),
    }
    for n in range(depth):
        state[f"blocks.{n}.scale_shift_table"] = random(6, width)
        state |= linear(f"blocks.{n}.attn.qkv", 3 * width, width)
        state |= linear(f"blocks.{n}.attn.proj", width, width)
        state |= linear(f"blocks.{n}.cross_attn.q_linear", width, width)
        state |= linear(f"blocks.{n}.cross_attn.kv_linear", 2 * width, width)
        state |= linear(f"blocks.{n}.cross_attn.proj", width, width)
        state |= linear(f"blocks.{n}.mlp.fc1", 4 * width, width)
        state |= linear(f"blocks.{n}.mlp.fc2", width, 4 * width)
    return state


def release_forward(state, x, time, captions, heads):
    """Return the output of the released network for images (batch, …), timesteps (batch,) and one caption for each."""
    return torch.cat(
        [_one(state, *parts, heads) for parts in zip(x.split(1), time.split(1), captions, strict=True)],
    )


def _one(state, x, time, caption, heads):
    """Return the output for one image, with explicit convolution and attention over all tokens of its caption."""

    def linear(name, value):
        return functional.linear(value, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(value, shift, scale):
        value = (value - value.mean(-1, keepdim=True)) / (value.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return value * (1 + scale) + shift

    def attend(q, k, v):
        q, k, v = (part.view(len(part), heads, -1).transpose(0, 1) for part in (q, k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        return (weights @ v).transpose(0, 1).flatten(1)

    weight = state["x_embedder.proj.weight"]
    patch = weight.shape[-1]
    tokens = functional.conv2d(x, weight, state["x_embedder.proj.bias"], stride=patch)[0].flatten(1).T
    tokens = tokens + state["pos_embed"][0]
    angles = time * torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
    t = linear("t_embedder.mlp.2", functional.silu(linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()]))))
    shared = linear("t_block.1", functional.silu(t)).view(6, -1)
    hidden = functional.gelu(linear("y_embedder.y_proj.fc1", caption), approximate="tanh")
    text = linear("y_embedder.y_proj.fc2", hidden)
    for n in range(sum(name.endswith("attn.qkv.weight") for name in state)):
        name = f"blocks.{n}"
        shift, scale, gate, shift2, scale2, gate2 = state[f"{name}.scale_shift_table"] + shared
        mixed = attend(*linear(f"{name}.attn.qkv", norm(tokens, shift, scale)).chunk(3, -1))
        tokens = tokens + gate * linear(f"{name}.attn.proj", mixed)
        keys, values = linear(f"{name}.cross_attn.kv_linear", text).chunk(2, -1)
        crossed = attend(linear(f"{name}.cross_attn.q_linear", tokens), keys, values)
        tokens = tokens + linear(f"{name}.cross_attn.proj", crossed)
        hidden = functional.gelu(linear(f"{name}.mlp.fc1", norm(tokens, shift2, scale2)), approximate="tanh")
        tokens = tokens + gate2 * linear(f"{name}.mlp.fc2", hidden)
    shift, scale = state["final_layer.scale_shift_table"] + t
    pixels = linear("final_layer.linear", norm(tokens, shift, scale))
    grid = math.isqrt(len(tokens))
    pixels = pixels.view(1, grid, grid, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", pixels).reshape(1, -1, grid * patch, grid * patch)
