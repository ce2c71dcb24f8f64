"""All supported layouts: DiT and PixArt-alpha of diffusers, Paris, and the original releases."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from atoll.core.errors import AtollError, unknown
from atoll.core.networks import CLASS_NAME, ConfigJson, DiTConfig, RouterConfig
from atoll.nets.dit import DiT
from atoll.nets.layouts.pairs import (
    Layout,
    Pair,
    State,
    block_count,
    differences,
    heads_for,
    pairs_of,
    parts_of,
    patch_pair,
    positions_of,
)
from atoll.nets.layouts.releases import RELEASES
from atoll.nets.router import Router

# --- diffusers DiTTransformer2DModel --------------------------------------------------------------------------------


def _diffusers_common(given: Mapping[str, Any], what: str) -> DiTConfig:
    """Read the fields that the DiT and PixArt configurations of diffusers share."""
    if "num_attention_heads" not in given:
        raise AtollError(f"a {what} checkpoint needs its config.json; give the folder that holds both")
    heads = given["num_attention_heads"]
    return DiTConfig(
        width=heads * given["attention_head_dim"],
        depth=given["num_layers"],
        heads=heads,
        patch=given["patch_size"],
        channels=given["in_channels"],
        out_channels=given.get("out_channels") or given["in_channels"],
        size=given["sample_size"],
    )


def _diffusers_fields(config: DiTConfig, class_name: str) -> ConfigJson:
    return {
        CLASS_NAME: class_name,
        "num_attention_heads": config.heads,
        "attention_head_dim": config.width // config.heads,
        "num_layers": config.depth,
        "patch_size": config.patch,
        "in_channels": config.channels,
        "out_channels": config.out_channels,
        "sample_size": config.size,
        "attention_bias": True,
        "activation_fn": "gelu-approximate",
        "norm_elementwise_affine": False,
    }


def _diffusers_dit_config(state: State, given: Mapping[str, Any], _: int | None) -> DiTConfig:
    common = _diffusers_common(given, "diffusers DiT")
    embedder = "transformer_blocks.{}.norm1.emb."
    names = [key.removeprefix(embedder.format(0)) for key in state if key.startswith(embedder.format(0))]
    shared = all(
        state[embedder.format(n) + name].equal(state[embedder.format(0) + name])
        for n in range(common.depth)
        for name in names
        if embedder.format(n) + name in state
    )
    return replace(
        common,
        modulation="zero",
        num_classes=given.get("num_embeds_ada_norm", 1000),
        frequency_shift=1,
        embedder_per_block=not shared,
        mlp_norm_eps=given.get("norm_eps", 1e-5),
    )


def _diffusers_block(n: int, text: bool) -> list[Pair]:
    """Return the pairs that DiT and PixArt blocks of diffusers share: attention and feed-forward."""
    native, foreign = f"blocks.{n}", f"transformer_blocks.{n}"
    pairs = parts_of(f"{native}.attention.qkv", *(f"{foreign}.attn1.to_{part}" for part in "qkv"))
    names = {
        f"{native}.attention.out": f"{foreign}.attn1.to_out.0",
        f"{native}.mlp.inner": f"{foreign}.ff.net.0.proj",
        f"{native}.mlp.outer": f"{foreign}.ff.net.2",
    }
    if text:
        pairs += parts_of(f"{native}.cross.key_value", f"{foreign}.attn2.to_k", f"{foreign}.attn2.to_v")
        names |= {f"{native}.cross.query": f"{foreign}.attn2.to_q", f"{native}.cross.out": f"{foreign}.attn2.to_out.0"}
    return pairs + pairs_of(names)


def _diffusers_dit_pairs(config: DiTConfig) -> list[Pair]:
    pairs = patch_pair(config, "pos_embed.proj")
    embedder = {
        "time.inner.weight": "timestep_embedder.linear_1.weight",
        "time.inner.bias": "timestep_embedder.linear_1.bias",
        "time.outer.weight": "timestep_embedder.linear_2.weight",
        "time.outer.bias": "timestep_embedder.linear_2.bias",
        "labels.weight": "class_embedder.embedding_table.weight",
    }
    for native, foreign in embedder.items():
        everywhere = tuple(f"transformer_blocks.{n}.norm1.emb.{foreign}" for n in range(config.depth))
        if config.embedder_per_block:
            pairs += [Pair(f"embedders.{n}.{native}", (name,)) for n, name in enumerate(everywhere)]
        else:
            pairs.append(Pair(f"embedders.0.{native}", everywhere, copies=True))
    for n in range(config.depth):
        pairs += _diffusers_block(n, text=False)
        pairs += pairs_of({f"blocks.{n}.modulation.linear": f"transformer_blocks.{n}.norm1.linear"})
    return pairs + pairs_of({"final.modulation.linear": "proj_out_1", "final.linear": "proj_out_2"})


def _diffusers_dit_refuses(config: DiTConfig) -> str | None:
    if not config.num_classes:
        return "the network needs class labels"
    return differences(
        config, modulation="zero", final="zero", text_width=0, pooled_width=0, qk_norm=False, positions="sincos",
        position_scale=1.0, time_table=False, mlp_ratio=4.0,
    )  # fmt: skip


def _diffusers_dit_fields(config: DiTConfig) -> ConfigJson:
    fields = _diffusers_fields(config, "DiTTransformer2DModel")
    return fields | {
        "num_embeds_ada_norm": config.num_classes,
        "norm_type": "ada_norm_zero",
        "norm_eps": config.mlp_norm_eps,
    }


# --- diffusers PixArtTransformer2DModel -----------------------------------------------------------------------------


_NULL_CAPTION = "caption_projection.y_embedding"
"""The null caption of the release, which checkpoints of diffusers store and its class ignores."""


def _pixart_config(state: State, given: Mapping[str, Any], _: int | None) -> DiTConfig:
    common = _diffusers_common(given, "diffusers PixArt")
    if "adaln_single.emb.resolution_embedder.linear_1.weight" in state:
        raise AtollError("this PixArt embeds resolution and aspect ratio (the 1024 px model), which is not supported")
    if given.get("norm_eps", 1e-6) != 1e-6:
        raise AtollError(
            f"this PixArt has norm_eps {given['norm_eps']}; only 1e-06, the value of PixArt-alpha, is supported"
        )
    if given.get("caption_channels") is None:
        raise AtollError("this PixArt has no caption projection (caption_channels is null), which is not supported")
    return replace(
        common,
        text_width=given["caption_channels"],
        text_projection="mlp",
        null_tokens=len(state[_NULL_CAPTION]) if _NULL_CAPTION in state else 1,
        position_scale=given.get("interpolation_scale") or max(given["sample_size"] // 64, 1),
    )


def _pixart_pairs(config: DiTConfig) -> list[Pair]:
    pairs = patch_pair(config, "pos_embed.proj")
    if config.null_tokens > 1:
        pairs.append(Pair("null_text", (_NULL_CAPTION,)))
    for n in range(config.depth):
        pairs.append(Pair(f"blocks.{n}.modulation.table", (f"transformer_blocks.{n}.scale_shift_table",)))
        pairs += _diffusers_block(n, text=True)
    pairs.append(Pair("final.modulation.table", ("scale_shift_table",)))
    return pairs + pairs_of(
        {
            "embedders.0.time.inner": "adaln_single.emb.timestep_embedder.linear_1",
            "embedders.0.time.outer": "adaln_single.emb.timestep_embedder.linear_2",
            "shared_modulation": "adaln_single.linear",
            "text.inner": "caption_projection.linear_1",
            "text.outer": "caption_projection.linear_2",
            "final.linear": "proj_out",
        }
    )


def _pixart_refuses(config: DiTConfig) -> str | None:
    if not config.text_width:
        return "the network needs text conditioning"
    return differences(
        config, modulation="single", final="single", text_projection="mlp", num_classes=0, pooled_width=0,
        qk_norm=False, positions="sincos", time_table=False, mlp_ratio=4.0,
    )  # fmt: skip


def _pixart_fields(config: DiTConfig) -> ConfigJson:
    return _diffusers_fields(config, "PixArtTransformer2DModel") | {
        "caption_channels": config.text_width,
        "cross_attention_dim": config.width,
        "interpolation_scale": config.position_scale,
        "use_additional_conditions": False,
        "norm_type": "ada_norm_single",
        "norm_eps": 1e-6,
    }


# --- Paris: experts and router --------------------------------------------------------------------------------------

_PARIS_EPS = 1e-5  # the default of torch.nn.LayerNorm, which Paris uses


def _paris_config(state: State, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
    width, channels, patch, _ = state["patch_embed.weight"].shape
    grid = round(state["pos_embed"].shape[1] ** 0.5)
    return DiTConfig(
        width=width,
        depth=block_count(state, "layers"),
        heads=heads_for(width, heads or given.get("num_heads")),
        patch=patch,
        channels=channels,
        out_channels=state["final_layer.linear.weight"].shape[0] // patch**2,
        size=grid * patch,
        mlp_ratio=state["layers.0.mlp.0.weight"].shape[0] / width,
        text_width=state["text_proj.weight"].shape[1],
        norm_eps=_PARIS_EPS,
        mlp_norm_eps=_PARIS_EPS,
        **positions_of(state["pos_embed"], grid),
    )


def _torch_attention(native: str, foreign: str) -> list[Pair]:
    """Return the pairs of output and fused input projection, as torch.nn.MultiheadAttention names them."""
    pairs = [Pair(f"{native}.qkv.{part}", (f"{foreign}.in_proj_{part}",)) for part in ("weight", "bias")]
    return pairs + pairs_of({f"{native}.out": f"{foreign}.out_proj"})


def _paris_pairs(config: DiTConfig) -> list[Pair]:
    pairs = [Pair("positions", ("pos_embed",)), *patch_pair(config, "patch_embed")]
    for n in range(config.depth):
        native, foreign = f"blocks.{n}", f"layers.{n}"
        pairs.append(Pair(f"{native}.modulation.table", (f"{foreign}.scale_shift_table",)))
        pairs += _torch_attention(f"{native}.attention", f"{foreign}.attn")
        for part in ("weight", "bias"):
            joined = (f"{native}.cross.query.{part}", f"{native}.cross.key_value.{part}")
            pairs.append(Pair(joined[0], (f"{foreign}.cross_attn.in_proj_{part}",), joined=joined))
        pairs += pairs_of(
            {
                f"{native}.cross.out": f"{foreign}.cross_attn.out_proj",
                f"{native}.mlp.inner": f"{foreign}.mlp.0",
                f"{native}.mlp.outer": f"{foreign}.mlp.2",
            }
        )
    pairs.append(Pair("final.modulation.table", ("final_layer.scale_shift_table",)))
    return pairs + pairs_of(
        {
            "embedders.0.time.inner": "time_embed.mlp.0",
            "embedders.0.time.outer": "time_embed.mlp.2",
            "shared_modulation": "t_block.1",
            "text": "text_proj",
            "final.linear": "final_layer.linear",
        }
    )


def _paris_refuses(config: DiTConfig) -> str | None:
    if not config.text_width:
        return "the network needs text conditioning"
    return differences(
        config, modulation="single", final="single", text_projection="linear", num_classes=0, pooled_width=0,
        qk_norm=False, time_table=False,
    )  # fmt: skip


def _paris_fields(config: DiTConfig) -> ConfigJson:
    return {
        "hidden_size": config.width,
        "num_layers": config.depth,
        "num_heads": config.heads,
        "patch_size": config.patch,
        "mlp_ratio": config.mlp_ratio,
        "in_channels": config.channels,
        "out_channels": config.out_channels,
        "use_adaln_single": True,
        "text_embed_dim": config.text_width,
    }


def _paris_router_config(state: State, given: Mapping[str, Any], heads: int | None) -> RouterConfig:
    width, channels, patch, _ = state["patch_embed.weight"].shape
    return RouterConfig(
        experts=state["head.4.weight"].shape[0],
        width=width,
        depth=block_count(state, "layers"),
        heads=heads_for(width, heads or given.get("num_heads")),
        patch=patch,
        channels=channels,
        size=round(state["pos_embed"].shape[1] ** 0.5) * patch,
        mlp_ratio=state["layers.0.mlp.0.weight"].shape[0] / width,
        norm_eps=_PARIS_EPS,
    )


def _paris_router_pairs(config: RouterConfig) -> list[Pair]:
    pairs = [Pair("positions", ("pos_embed",)), Pair("cls", ("cls_token",)), *patch_pair(config, "patch_embed")]
    names = {
        "embedder.time.inner": "time_embed.mlp.0",
        "embedder.time.outer": "time_embed.mlp.2",
        "head.inner": "head.0",
        "head.norm": "head.2",
        "head.outer": "head.4",
    }
    for n in range(config.depth):
        pairs += _torch_attention(f"blocks.{n}.attention", f"layers.{n}.attn")
        names |= {
            f"blocks.{n}.modulation.linear": f"layers.{n}.adaLN_modulation.1",
            f"blocks.{n}.mlp.inner": f"layers.{n}.mlp.0",
            f"blocks.{n}.mlp.outer": f"layers.{n}.mlp.2",
        }
    return pairs + pairs_of(names)


def _paris_router_refuses(config: RouterConfig) -> str | None:
    if config.num_classes or config.pooled_width:
        return "its router sees neither classes nor text"
    return differences(config, qk_norm=False)


def _paris_router_fields(config: RouterConfig) -> ConfigJson:
    return {
        "hidden_size": config.width,
        "num_layers": config.depth,
        "num_heads": config.heads,
        "patch_size": config.patch,
        "in_channels": config.channels,
        "num_clusters": config.experts,
    }


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        *RELEASES,
        Layout(
            "diffusers-dit", "diffusers DiT", ("pos_embed.proj.weight", "proj_out_1.weight"),
            _diffusers_dit_config, _diffusers_dit_pairs, DiT, _diffusers_dit_refuses, _diffusers_dit_fields,
            optional=("positions",),
        ),
        Layout(
            "diffusers-pixart", "diffusers PixArt", ("pos_embed.proj.weight", "adaln_single.linear.weight"),
            _pixart_config, _pixart_pairs, DiT, _pixart_refuses, _pixart_fields,
            optional=("positions", "null_text"),
        ),
        Layout(
            "paris", "Paris expert", ("t_block.1.weight", "text_proj.weight", "patch_embed.weight"),
            _paris_config, _paris_pairs, DiT, _paris_refuses, _paris_fields, optional=("null_text",),
        ),
        Layout(
            "paris-router", "Paris router", ("cls_token", "head.4.weight", "patch_embed.weight"),
            _paris_router_config, _paris_router_pairs, Router, _paris_router_refuses, _paris_router_fields,
            optional=("temperature",),
        ),
    )
}  # fmt: skip


def layout(name: str) -> Layout:
    """Return a layout by name."""
    if name not in LAYOUTS:
        raise AtollError(unknown("weight layout", name, LAYOUTS))
    return LAYOUTS[name]


def detect(state: Mapping[str, Tensor], wanted: str | None = None, file_name: str = "") -> Layout:
    """Return the layout of tensors.

    The names of the tensors decide. DiT and SiT have the same names; there `wanted` decides (an option or config.json),
    else the name of the file, as in DiT-XL-2-256x256.pt and SiT-XL-2-256x256.pt.
    """
    matching = {candidate.name: candidate for candidate in LAYOUTS.values() if candidate.matches(state)}
    if not matching:
        first = ", ".join(sorted(state)[:5])
        raise AtollError(f"the layout of these tensors is not supported ({', '.join(LAYOUTS)}); the first are: {first}")
    if wanted is not None:
        if layout(wanted).name not in matching:
            raise AtollError(f"these tensors are not in the layout {wanted}; their names are those of {_or(matching)}")
        return matching[wanted]
    if len(matching) > 1:
        named = [name for name in matching if re.search(f"(?<![a-z]){name}(?![a-z])", file_name.lower())]
        matching = {name: matching[name] for name in named} if len(named) == 1 else matching
    if len(matching) > 1:
        raise AtollError(
            f"{file_name or 'this file'} may hold a DiT or a SiT: their tensors have the same names, but different "
            f"conventions of time and sign; pass --layout {_or(matching)}"
        )
    return next(iter(matching.values()))


def _or(names: Iterable[str]) -> str:
    return " or ".join(names)
