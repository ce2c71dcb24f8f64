"""A reference of the original DiT release, with its tensor names and shapes: a checkpoint and a plain forward pass."""

import math

import torch
from torch.nn import functional


def release_state(width, depth, patch, grid, classes, seed, channels=4):
    """Return random weights in the layout of DiT-XL-2-256x256.pt, with twice the channels in the output."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.15

    def linear(name, rows, columns):
        return {f"{name}.weight": random(rows, columns), f"{name}.bias": random(rows)}

    state = {
        "pos_embed": positions(width, grid),
        "x_embedder.proj.weight": random(width, channels, patch, patch),
        "x_embedder.proj.bias": random(width),
        "y_embedder.embedding_table.weight": random(classes + 1, width),
        **linear("t_embedder.mlp.0", width, 256),
        **linear("t_embedder.mlp.2", width, width),
        **linear("final_layer.linear", patch * patch * channels * 2, width),
        **linear("final_layer.adaLN_modulation.1", 2 * width, width),
    }
    for n in range(depth):
        state |= linear(f"blocks.{n}.attn.qkv", 3 * width, width)
        state |= linear(f"blocks.{n}.attn.proj", width, width)
        state |= linear(f"blocks.{n}.mlp.fc1", 4 * width, width)
        state |= linear(f"blocks.{n}.mlp.fc2", width, 4 * width)
        state |= linear(f"blocks.{n}.adaLN_modulation.1", 6 * width, width)
    return state


def positions(width, grid):
    """Return the 2-D sine-cosine table of MAE: sines and cosines of the column, then of the row."""
    table = torch.zeros(1, grid * grid, width, dtype=torch.float64)
    quarter = width // 4
    for row in range(grid):
        for column in range(grid):
            for i in range(quarter):
                omega = 10000 ** (-i / quarter)
                token = table[0, row * grid + column]
                token[i], token[quarter + i] = math.sin(column * omega), math.cos(column * omega)
                token[2 * quarter + i], token[3 * quarter + i] = math.sin(row * omega), math.cos(row * omega)
    return table.float()


def release_forward(state, x, time, label, heads):
    """Return the output of the released network, with explicit convolution and attention."""

    def linear(name, value):
        return functional.linear(value, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(value, shift, scale):
        value = (value - value.mean(-1, keepdim=True)) / (value.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return value * (1 + scale[:, None]) + shift[:, None]

    weight = state["x_embedder.proj.weight"]
    width, _, patch, _ = weight.shape
    tokens = functional.conv2d(x, weight, state["x_embedder.proj.bias"], stride=patch).flatten(2).transpose(1, 2)
    tokens = tokens + state["pos_embed"]
    angles = time[:, None] * torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
    features = torch.cat([angles.cos(), angles.sin()], -1)
    c = linear("t_embedder.mlp.2", functional.silu(linear("t_embedder.mlp.0", features)))
    c = functional.silu(c + state["y_embedder.embedding_table.weight"][label])
    batch, count, _ = tokens.shape
    for n in range(sum(name.endswith("attn.qkv.weight") for name in state)):
        shift, scale, gate, shift2, scale2, gate2 = linear(f"blocks.{n}.adaLN_modulation.1", c).chunk(6, 1)
        qkv = linear(f"blocks.{n}.attn.qkv", norm(tokens, shift, scale)).view(batch, count, 3, heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // heads), -1)
        tokens = tokens + gate[:, None] * linear(f"blocks.{n}.attn.proj", (weights @ v).transpose(1, 2).flatten(2))
        hidden = functional.gelu(linear(f"blocks.{n}.mlp.fc1", norm(tokens, shift2, scale2)), approximate="tanh")
        tokens = tokens + gate2[:, None] * linear(f"blocks.{n}.mlp.fc2", hidden)
    shift, scale = linear("final_layer.adaLN_modulation.1", c).chunk(2, 1)
    pixels = linear("final_layer.linear", norm(tokens, shift, scale))
    grid = math.isqrt(count)
    pixels = pixels.view(batch, grid, grid, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", pixels).reshape(batch, -1, grid * patch, grid * patch)
