"""A reference of the experts and router of the Paris release, with the attention of torch."""

import torch
from torch import nn
from torch.nn import functional


class ParisBlock(nn.Module):
    """One block of a Paris expert or router."""

    def __init__(self, width, heads, single):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        if single:
            self.scale_shift_table = nn.Parameter(torch.zeros(6, width))
            self.cross_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        else:
            self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x, time, text):
        vectors = self.scale_shift_table + time if text is not None else self.adaLN_modulation(time).view(len(x), 6, -1)
        shift, scale, gate, shift2, scale2, gate2 = vectors.split(1, dim=1)
        y = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        x = x + gate * self.attn(y, y, y)[0]
        if text is not None:
            x = x + self.cross_attn(x, text, text)[0]
        return x + gate2 * self.mlp(functional.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2)


class Paris(nn.Module):
    """A Paris expert (text given) or router, with the tensor names of the release."""

    def __init__(self, width, heads, depth, grid, text_width=None, experts=None):
        super().__init__()
        self.patch_embed = nn.Conv2d(4, width, 2, 2)
        self.pos_embed = nn.Parameter(torch.zeros(1, grid * grid, width))
        self.time_embed = nn.Module()
        self.time_embed.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(ParisBlock(width, heads, bool(text_width)) for _ in range(depth))
        if text_width:
            self.text_proj = nn.Linear(text_width, width)
            self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
            self.final_layer = nn.Module()
            self.final_layer.linear = nn.Linear(width, 16)
            self.final_layer.scale_shift_table = nn.Parameter(torch.zeros(2, width))
        else:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            tail = (nn.GELU("tanh"), nn.LayerNorm(width), nn.GELU("tanh"), nn.Linear(width, experts))
            self.head = nn.Sequential(nn.Linear(width, width), *tail)

    def forward(self, x, time, text=None):
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        angles = time[:, None] * 10000 ** (-torch.arange(128) / 128)
        c = self.time_embed.mlp(torch.cat([angles.cos(), angles.sin()], -1))
        if text is None:
            tokens = torch.cat([self.cls_token.expand(len(x), 1, -1), tokens], dim=1)
            for layer in self.layers:
                tokens = layer(tokens, c, None)
            return self.head(tokens[:, 0])
        shared, text = self.t_block(c).view(len(x), 6, -1), self.text_proj(text)
        for layer in self.layers:
            tokens = layer(tokens, shared, text)
        shift, scale = (self.final_layer.scale_shift_table + c[:, None]).chunk(2, 1)
        pixels = self.final_layer.linear(functional.layer_norm(tokens, tokens.shape[-1:]) * (1 + scale) + shift)
        grid = x.shape[-1] // 2
        return pixels.view(len(x), grid, grid, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)
