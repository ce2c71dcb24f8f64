"""Layouts of the original releases of DiT, SiT and PixArt-alpha: one `.pt` or `.pth` file without a config.json.

Such a file does not determine the number of heads and classes, and whether it is a DiT or a SiT. These come from a
config.json beside it, which Atoll writes, or from options of `atoll convert`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.core.networks import ConfigJson, DiTConfig
from atoll.nets.dit import TIME_KNOTS, DiT
from atoll.nets.layouts.pairs import (
    POSITION_SCALES,
    Layout,
    Pair,
    Positions,
    State,
    block_count,
    differences,
    heads_for,
    pairs_of,
    patch_pair,
    positions_of,
)
from atoll.nets.positions import sincos_positions

# --- DiT: DiT-XL-2-256x256.pt ---------------------------------------------------------------------------------------

_CLASS_TABLE = "y_embedder.embedding_table.weight"
_IMAGENET_ROWS = 1001
"""Rows of the class table in the releases of DiT and SiT: the 1000 classes of ImageNet and the null class."""


def _dit_config(state: State, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
    width, channels, patch, _ = state["x_embedder.proj.weight"].shape
    grid = round(state["pos_embed"].shape[1] ** 0.5)
    return DiTConfig(
        width=width,
        depth=block_count(state, "blocks"),
        heads=heads_for(width, heads or given.get("heads")),
        patch=patch,
        channels=channels,
        out_channels=state["final_layer.linear.weight"].shape[0] // patch**2,
        size=grid * patch,
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        modulation="zero",
        num_classes=_class_count(len(state[_CLASS_TABLE]), given.get("num_classes")),
        **positions_of(state["pos_embed"], grid),
    )


def _dit_pairs(config: DiTConfig) -> list[Pair]:
    pairs = [Pair("positions", ("pos_embed",)), *patch_pair(config, "x_embedder.proj")]
    names = {"embedders.0.time.inner": "t_embedder.mlp.0", "embedders.0.time.outer": "t_embedder.mlp.2"}
    pairs.append(Pair("embedders.0.labels.weight", (_CLASS_TABLE,)))
    for n in range(config.depth):
        names |= {
            f"blocks.{n}.modulation.linear": f"blocks.{n}.adaLN_modulation.1",
            f"blocks.{n}.attention.qkv": f"blocks.{n}.attn.qkv",
            f"blocks.{n}.attention.out": f"blocks.{n}.attn.proj",
            f"blocks.{n}.mlp.inner": f"blocks.{n}.mlp.fc1",
            f"blocks.{n}.mlp.outer": f"blocks.{n}.mlp.fc2",
        }
    names |= {"final.modulation.linear": "final_layer.adaLN_modulation.1", "final.linear": "final_layer.linear"}
    return pairs + pairs_of(names)


def _dit_refuses(config: DiTConfig) -> str | None:
    if not config.num_classes:
        return "the network needs class labels"
    return differences(
        config, modulation="zero", final="zero", text_width=0, pooled_width=0, qk_norm=False,
        embedder_per_block=False, time_table=False,
    )  # fmt: skip


def _class_count(rows: int, given: int | None) -> int:
    """Return the number of classes of a table, which has one more row if the network was trained with label dropout."""
    if given is None:
        if rows == _IMAGENET_ROWS:
            return rows - 1
        raise AtollError(
            f"{_CLASS_TABLE} has {rows} rows, which are {rows - 1} classes and the null class, or {rows} classes of a "
            f"network without a null class; pass --num-classes {rows - 1} or --num-classes {rows}"
        )
    if given not in (rows - 1, rows):
        raise AtollError(
            f"{_CLASS_TABLE} has {rows} rows and cannot hold {given} classes; pass --num-classes {rows - 1} if the "
            f"last row is the null class, or --num-classes {rows} if there is none"
        )
    return given


def _null_class(state: State, config: DiTConfig) -> dict[str, tuple[Tensor, str]]:
    """Return the class table with a row for the null class, if the network was trained without one."""
    # The mean of all class embeddings is the least-squares estimate of a row that stands for any class.
    table = state[_CLASS_TABLE]
    if len(table) != config.num_classes:
        return {}
    note = "the file has no null class: the mean of all classes is used until it is trained"
    return {_CLASS_TABLE: (torch.cat([table, table.mean(0, keepdim=True)]), note)}


def _dit_fields(config: DiTConfig) -> ConfigJson:
    return {"layout": "dit", "heads": config.heads, "num_classes": config.num_classes}


# --- SiT: SiT-XL-2-256x256.pt ---------------------------------------------------------------------------------------
#
# The tensors have the names and shapes of DiT, but another meaning. The time s of SiT runs from noise (0) to data (1)
# and is embedded without a factor; the output is the velocity dx/ds = data - noise on the path
#
#     x = s data + (1 - s) noise
#
# In Atoll, t = 1 - s runs from data (0) to noise (1), the timestep is 1000 t, and the velocity dx/dt = noise - data has
# the opposite sign. So reading adds a time table and negates the last layer.


def _sit_time_table() -> Tensor:
    """Return the time s = 1 - t that SiT embeds, for the timesteps 1000 t = 0, 1, …, 1000."""
    return 1 - torch.arange(TIME_KNOTS) / (TIME_KNOTS - 1)


def _sign_reversed(state: State) -> State:
    return state | {name: -state[name] for name in ("final.linear.weight", "final.linear.bias")}


def _from_sit(state: State) -> State:
    return _sign_reversed(state) | {"time_table": _sit_time_table()}


def _to_sit(state: State) -> State:
    if not torch.allclose(state["time_table"], _sit_time_table()):
        raise AtollError("this network cannot be written in the SiT layout: its time table is not that of SiT, 1 - t")
    return _sign_reversed(state)


def _sit_config(state: State, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
    return replace(_dit_config(state, given, heads), time_table=True)


def _sit_refuses(config: DiTConfig) -> str | None:
    if not config.time_table:
        return "SiT embeds the time 1 - t, but this network embeds 1000 t"
    return _dit_refuses(replace(config, time_table=False))


# --- PixArt-alpha: PixArt-XL-2-256x256.pth --------------------------------------------------------------------------

_NULL_CAPTION = "y_embedder.y_embedding"
_NULL_TOKENS = 120
"""Number of tokens of the null caption, fixed in the code of PixArt-alpha."""


def _pixart_config(state: State, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
    if "csize_embedder.mlp.0.weight" in state:
        raise AtollError("this PixArt embeds resolution and aspect ratio (the 1024 px model), which is not supported")
    if _NULL_CAPTION not in state:
        raise AtollError(f"this PixArt has no null caption; copy {_NULL_CAPTION} from the release into the file")
    width, channels, patch, _ = state["x_embedder.proj.weight"].shape
    null = state[_NULL_CAPTION]
    return DiTConfig(
        width=width,
        depth=block_count(state, "blocks"),
        heads=heads_for(width, heads or given.get("heads")),
        patch=patch,
        channels=channels,
        out_channels=state["final_layer.linear.weight"].shape[0] // patch**2,
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        text_width=null.shape[1],
        text_projection="mlp",
        null_tokens=1 if len(null) == _NULL_TOKENS and bool((null == null[:1]).all()) else len(null),
        **_pixart_positions(state, given, patch),
    )


class _SizedPositions(Positions):
    size: int


def _pixart_positions(state: State, given: Mapping[str, Any], patch: int) -> _SizedPositions:
    if "pos_embed" in state:
        grid = round(state["pos_embed"].shape[1] ** 0.5)
        return {"size": grid * patch, **positions_of(state["pos_embed"], grid, POSITION_SCALES)}
    if "size" not in given:
        raise AtollError(
            "this PixArt has no pos_embed, so the size of its latents is unknown; put a config.json "
            'beside it with {"size": 32} for images of 256 px, {"size": 64} for 512 px'
        )
    return {"size": given["size"]}


def _pixart_made(state: State, config: DiTConfig) -> dict[str, tuple[Tensor, str]]:
    if "pos_embed" in state:
        return {}
    made = sincos_positions(config.width, config.grid, config.grid, base=config.grid, scale=config.position_scale)
    return {"pos_embed": (made, "the file has no positions: they are computed with the formula")}


def _pixart_pairs(config: DiTConfig) -> list[Pair]:
    repeats = _NULL_TOKENS if config.null_tokens == 1 else 0
    pairs = [Pair("positions", ("pos_embed",)), *patch_pair(config, "x_embedder.proj")]
    pairs.append(Pair("null_text", (_NULL_CAPTION,), repeats=repeats))
    names = {
        "embedders.0.time.inner": "t_embedder.mlp.0",
        "embedders.0.time.outer": "t_embedder.mlp.2",
        "shared_modulation": "t_block.1",
        "text.inner": "y_embedder.y_proj.fc1",
        "text.outer": "y_embedder.y_proj.fc2",
        "final.linear": "final_layer.linear",
    }
    for n in range(config.depth):
        pairs.append(Pair(f"blocks.{n}.modulation.table", (f"blocks.{n}.scale_shift_table",)))
        names |= {
            f"blocks.{n}.attention.qkv": f"blocks.{n}.attn.qkv",
            f"blocks.{n}.attention.out": f"blocks.{n}.attn.proj",
            f"blocks.{n}.cross.query": f"blocks.{n}.cross_attn.q_linear",
            f"blocks.{n}.cross.key_value": f"blocks.{n}.cross_attn.kv_linear",
            f"blocks.{n}.cross.out": f"blocks.{n}.cross_attn.proj",
            f"blocks.{n}.mlp.inner": f"blocks.{n}.mlp.fc1",
            f"blocks.{n}.mlp.outer": f"blocks.{n}.mlp.fc2",
        }
    pairs.append(Pair("final.modulation.table", ("final_layer.scale_shift_table",)))
    return pairs + pairs_of(names)


def _pixart_refuses(config: DiTConfig) -> str | None:
    if not config.text_width:
        return "the network needs text conditioning"
    return differences(
        config, modulation="single", final="single", text_projection="mlp", num_classes=0, pooled_width=0,
        qk_norm=False, time_table=False,
    )  # fmt: skip


RELEASES = (
    Layout(
        "dit", "original DiT", ("x_embedder.proj.weight", _CLASS_TABLE), _dit_config, _dit_pairs, DiT, _dit_refuses,
        _dit_fields, complete=_null_class,
    ),
    Layout(
        "sit", "SiT", ("x_embedder.proj.weight", _CLASS_TABLE), _sit_config, _dit_pairs, DiT, _sit_refuses,
        lambda config: _dit_fields(config) | {"layout": "sit"}, complete=_null_class,
        after_reading=_from_sit, before_writing=_to_sit,
        convention="SiT's time is 1 - t, and its velocity data - noise has the opposite sign",
    ),
    Layout(
        "pixart", "original PixArt-alpha",
        ("x_embedder.proj.weight", "t_block.1.weight", "y_embedder.y_proj.fc1.weight"),
        _pixart_config, _pixart_pairs, DiT, _pixart_refuses, lambda config: {"layout": "pixart", "heads": config.heads},
        complete=_pixart_made,
    ),
)  # fmt: skip
