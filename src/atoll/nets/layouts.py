"""Released checkpoints of others: one table of tensor names per layout, read in both directions.

A row is a pair (theirs, ours) of tensor names:

    ("x_embedder.proj.*", "patch.*")                    `*` stands for weight and bias
    ("blocks.{n}.attn.proj.*", "blocks.{n}.attention.out.*")   `{n}` stands for the number of each block
    ("attn1.to_(q|k|v).*", "attention.qkv.*")           several tensors, stacked along the first axis
    ("layers.{n}.time", "time")                         without `{n}` on our side: an equal copy in each of their blocks

The original releases of DiT, SiT and PixArt-alpha are one `.pt` or `.pth` file without a config.json. Such a file does
not determine the number of heads and classes, and whether it is a DiT or a SiT. These come from a config.json beside
it, which Atoll writes, or from options of `atoll convert`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import AtollError, unknown
from atoll.core.networks import CLASS_NAME, STABLE_DIFFUSION, ConfigJson, DiTConfig, LatentScale, RouterConfig
from atoll.nets.dit import TIME_KNOTS, DiT
from atoll.nets.io import check_fit
from atoll.nets.positions import is_sincos, sincos_positions
from atoll.nets.router import Router

__all__ = ["LAYOUTS", "Layout", "detect", "layout"]

StateDict = dict[str, Tensor]
Rows = Sequence[tuple[str, str]]

NULL_TOKENS = 120
"""Number of tokens of the null caption, fixed in the code of PixArt-alpha."""
POSITION_SCALES = (1.0, 0.5, 2.0)
"""Scales of the fixed positions in released checkpoints: DiT, SiT and PixArt up to 512 px have 1; the converters of
diffusers also use 0.5 and 2."""
HEADS = {256: 4, 384: 6, 768: 12, 1024: 16, 1152: 16}
"""Number of heads of the named sizes, by width: shapes of tensors do not determine it."""


class TensorPair(NamedTuple):
    """Tensors of both sides that are equal when each side is stacked along the first axis."""

    theirs: list[str]
    ours: list[str]
    copies: bool
    """Each tensor of theirs is a copy of ours, instead of a part."""


class Layout:
    """A foreign checkpoint layout: how to recognize it, and how to translate it."""

    name: ClassVar[str]
    title: ClassVar[str]
    key_names: ClassVar[tuple[str, ...]]
    """Names of tensors by which the layout is recognized; all of them must exist."""
    table: ClassVar[Rows]
    fields: ClassVar[dict[str, Any]]
    """The foreign config.json: its keys, and for each a field of our configuration or else a constant."""
    build: ClassVar[type[DiT | Router]] = DiT
    """Class of the native network."""
    needs: ClassVar[tuple[str, str] | None] = None
    """A field of the configuration that must not be 0, and what it stands for."""
    requires: ClassVar[Mapping[str, object]]
    """Fields of the configuration that the layout fixes."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Native tensors that this layout lacks. When read, the network initializes them; null conditions are zero."""
    convention: ClassVar[str] = ""
    """Another convention of time or sign, for the report."""
    normalization: ClassVar[LatentScale] = STABLE_DIFFUSION
    """Scale of the latents of the released networks, used for files without a declaration or pipeline."""

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> Any:
        """Return the native configuration for tensors, foreign config.json (may be empty) and number of heads."""
        raise NotImplementedError

    def write_config(self, config: Any) -> ConfigJson:
        """Return the content of the foreign config.json."""
        return {theirs: getattr(config, str(ours), ours) for theirs, ours in self.fields.items()}

    def rows(self, config: Any) -> Rows:  # noqa: ARG002
        """Return the rows of the table that apply to a configuration."""
        return self.table

    def complete(self, state: StateDict, config: Any) -> dict[str, tuple[Tensor, str]]:  # noqa: ARG002
        """Return new tensors, or completed ones, for those that the file lacks; each with a note for the report."""
        return {}

    def matches(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether tensors are in this layout."""
        return all(key_name in state for key_name in self.key_names)

    def refuse(self, config: Any) -> str | None:
        """Return the reason why a native network cannot be written in this layout, or None."""
        if self.needs and not getattr(config, self.needs[0]):
            return f"the network needs {self.needs[1]}"
        # All foreign layouts have the block of the papers, so a ModernDiT fits none of them.
        required = {"norm": "layer", "mlp": "gelu", **self.requires}
        if config.positions == "rope":
            required = {"positions": "sincos", **required}
        wrong = [
            f"{name} must be {value!r}, but is {getattr(config, name)!r}"
            for name, value in required.items()
            if getattr(config, name) != value
        ]
        return "; ".join(wrong) or None

    def pairs(self, config: Any) -> list[TensorPair]:
        """Expand the table for a configuration: every block, weight and bias."""
        found = []
        for theirs, ours in self.rows(config):
            blocks = range(config.depth)
            groups = [[n] for n in blocks] if "{n}" in ours else [list(blocks)] if "{n}" in theirs else [[0]]
            found += [
                TensorPair(
                    [name for n in group for name in _names(theirs, n, part)],
                    _names(ours, group[0], part),
                    copies="{n}" in theirs and "{n}" not in ours,
                )
                for group in groups
                for part in (("weight", "bias") if "*" in ours else ("",))
            ]
        return found

    def to_native(self, state: StateDict, config: Any) -> StateDict:
        """Translate foreign tensors to native ones; raise an error that lists all tensors that do not fit."""
        # The weights stay on the meta device: only the small buffers, such as positions, are allocated and initialized.
        with torch.device("meta"):
            network = self.build(config)
        for name, buffer in list(network.named_buffers()):
            network.register_buffer(name, torch.empty_like(buffer, device="cpu"))
        network.init_weights()
        shapes, buffers = network.state_dict(), dict(network.named_buffers())
        state = state | {name: tensor for name, (tensor, _) in self.complete(state, config).items()}
        check_fit(state, self._foreign(shapes, config), f"the {self.title} layout")
        native: StateDict = {}
        for theirs, ours, copies in self.pairs(config):
            tensors = [state[name] for name in theirs]
            if copies:
                different = [name for name in theirs if not state[name].equal(tensors[0])]
                if different:
                    raise AtollError(f"expected equal copies of {theirs[0]}, but these differ: {', '.join(different)}")
                tensors = tensors[:1]
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            if ours == ["null_text"] and shapes["null_text"].ndim == 1:
                whole = whole[0]
            parts = torch.split(whole, [len(shapes[name]) for name in ours])
            for name, part in zip(ours, parts, strict=True):
                native[name] = part.reshape(shapes[name].shape).contiguous()
        for name in self.unsupported_tensors(shapes, config):
            native[name] = buffers[name] if name in buffers else torch.zeros(shapes[name].shape)
        return native

    def from_native(self, state: StateDict, config: Any) -> StateDict:
        """Translate native tensors to this layout, without those that it lacks."""
        reason = self.refuse(config)
        if reason:
            raise AtollError(f"this network cannot be written in the {self.title} layout: {reason}")
        return self._foreign(state, config)

    def _foreign(self, state: Mapping[str, Tensor], config: Any) -> StateDict:
        foreign: StateDict = {}
        for theirs, ours, copies in self.pairs(config):
            whole = state[ours[0]] if len(ours) == 1 else torch.cat([state[name] for name in ours])
            if ours == ["patch.weight"]:  # a convolution in all foreign layouts, a linear layer here
                whole = whole.reshape(config.width, config.channels, config.patch, config.patch)
            if ours == ["null_text"] and whole.ndim == 1:  # one null token here, as many equal ones there
                whole = whole.expand(NULL_TOKENS, -1)
            parts = [whole.clone() for _ in theirs] if copies else whole.chunk(len(theirs))
            foreign.update({name: part.contiguous() for name, part in zip(theirs, parts, strict=True)})
        return foreign

    def unsupported_tensors(self, state: Mapping[str, Tensor], config: Any) -> list[str]:
        """Return the names of native tensors that this layout lacks."""
        placed = {name for pair in self.pairs(config) for name in pair.ours}
        return [name for name in state if name.endswith(self.optional) and name not in placed]


def _names(pattern: str, block: int, part: str) -> list[str]:
    """Return the names of one side of a row, for one block and either weight or bias."""
    before, _, rest = pattern.replace("*", part).replace("{n}", str(block)).partition("(")
    choices, _, after = rest.partition(")")
    return [before + choice + after for choice in choices.split("|")]


def _shape_fields(state: StateDict, heads: int | None, names: tuple[str, str, str]) -> dict[str, Any]:
    """Return what the shapes of patch projection, blocks and first MLP layer determine, and the number of heads."""
    projection, blocks, mlp = names
    width, channels, patch, _ = state[projection].shape
    if heads is None and width not in HEADS:
        raise AtollError(f"the number of heads of a network of width {width} is unknown; pass it with --heads")
    return {
        "width": width,
        "depth": 1 + max(int(name.split(".")[1]) for name in state if name.startswith(f"{blocks}.")),
        "heads": HEADS[width] if heads is None else heads,
        "patch": patch,
        "channels": channels,
        "mlp_ratio": state[f"{blocks}.0.{mlp}.weight"].shape[0] / width,
    }


def _position_fields(table: Tensor, patch: int, scales: Sequence[float] = (1.0,)) -> dict[str, Any]:
    """Return the size, and `sincos` with its scale if the stored positions equal the formula, else `learned`."""
    grid = round(table.shape[1] ** 0.5)
    for scale in scales:
        if bool(is_sincos(table, grid, scale)):
            return {"size": grid * patch, "positions": "sincos", "position_scale": scale}
    return {"size": grid * patch, "positions": "learned"}


_CLASSES = {"modulation": "zero", "final": "zero", "text_width": 0, "pooled_width": 0, "qk_norm": False}
_TEXT = {
    "modulation": "single", "final": "single", "text_projection": "mlp", "num_classes": 0, "pooled_width": 0,
    "qk_norm": False,
}  # fmt: skip
_NEEDS_LABELS, _NEEDS_TEXT = ("num_classes", "class labels"), ("text_width", "text conditioning")
_TOO_LARGE = "this PixArt embeds resolution and aspect ratio (the 1024 px model), which is not supported"

# --- DiT: DiT-XL-2-256x256.pt ---------------------------------------------------------------------------------------

_CLASS_TABLE = "y_embedder.embedding_table.weight"
_IMAGENET_ROWS = 1001
"""Rows of the class table in the releases of DiT and SiT: the 1000 classes of ImageNet and the null class."""
_RELEASE = ("x_embedder.proj.weight", "blocks", "mlp.fc1")
_RELEASE_TABLE = (
    ("pos_embed", "positions"),
    ("x_embedder.proj.*", "patch.*"),
    ("t_embedder.mlp.0.*", "embedders.0.time.inner.*"),
    ("t_embedder.mlp.2.*", "embedders.0.time.outer.*"),
    ("blocks.{n}.attn.qkv.*", "blocks.{n}.attention.qkv.*"),
    ("blocks.{n}.attn.proj.*", "blocks.{n}.attention.out.*"),
    ("blocks.{n}.mlp.fc1.*", "blocks.{n}.mlp.inner.*"),
    ("blocks.{n}.mlp.fc2.*", "blocks.{n}.mlp.outer.*"),
    ("final_layer.linear.*", "final.linear.*"),
)


class OriginalDiT(Layout):
    """The release of DiT."""

    name, title = "dit", "original DiT"
    key_names = ("x_embedder.proj.weight", _CLASS_TABLE)
    table = (
        *_RELEASE_TABLE,
        (_CLASS_TABLE, "embedders.0.labels.weight"),
        ("blocks.{n}.adaLN_modulation.1.*", "blocks.{n}.modulation.linear.*"),
        ("final_layer.adaLN_modulation.1.*", "final.modulation.linear.*"),
    )
    fields: ClassVar = {"layout": "dit", "heads": "heads", "num_classes": "num_classes"}
    needs = _NEEDS_LABELS
    requires: ClassVar = {**_CLASSES, "embedder_per_block": False, "time_table": False}

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
        """Read shapes; the number of classes is that of the table, less the null class if there is one."""
        positions, patch = state["pos_embed"], state["x_embedder.proj.weight"].shape[-1]
        rows, classes = len(state[_CLASS_TABLE]), given.get("num_classes")
        shapes = _shape_fields(state, heads or given.get("heads"), _RELEASE)
        if classes is None and rows != _IMAGENET_ROWS:
            raise AtollError(
                f"{_CLASS_TABLE} has {rows} rows, which are {rows - 1} classes and the null class, or {rows} classes "
                f"of a network without a null class; pass --num-classes {rows - 1} or --num-classes {rows}"
            )
        if classes not in (None, rows - 1, rows):
            raise AtollError(
                f"{_CLASS_TABLE} has {rows} rows and cannot hold {classes} classes; pass --num-classes {rows - 1} if "
                f"the last row is the null class, or --num-classes {rows} if there is none"
            )
        return DiTConfig(
            out_channels=state["final_layer.linear.weight"].shape[0] // patch**2,
            modulation="zero",
            num_classes=rows - 1 if classes is None else classes,
            **shapes,
            **_position_fields(positions, patch),
        )

    def complete(self, state: StateDict, config: DiTConfig) -> dict[str, tuple[Tensor, str]]:
        """Return the class table with a row for the null class, if the network was trained without one."""
        # The mean of all class embeddings is the least-squares estimate of a row that stands for any class.
        table = state[_CLASS_TABLE]
        if len(table) != config.num_classes:
            return {}
        note = "the file has no null class: the mean of all classes is used until it is trained"
        return {_CLASS_TABLE: (torch.cat([table, table.mean(0, keepdim=True)]), note)}


class SiT(OriginalDiT):
    """The release of SiT: SiT-XL-2-256x256.pt.

    The tensors have the names and shapes of DiT, but another meaning. The time s of SiT runs from noise (0) to data (1)
    and is embedded without a factor; the output is the velocity dx/ds = data - noise on the path

        x = s data + (1 - s) noise

    In Atoll, t = 1 - s runs from data (0) to noise (1), the timestep is 1000 t, and the velocity dx/dt = noise - data
    has the opposite sign. So reading adds a time table and negates the last layer.
    """

    name, title = "sit", "SiT"
    fields: ClassVar = {**OriginalDiT.fields, "layout": "sit"}
    requires: ClassVar = {**OriginalDiT.requires, "time_table": True}
    convention = "SiT's time is 1 - t, and its velocity data - noise has the opposite sign"
    # The time s = 1 - t that SiT embeds, for the timesteps 1000 t = 0, 1, …, 1000.
    times = 1 - torch.arange(TIME_KNOTS, device="cpu") / (TIME_KNOTS - 1)

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
        """Read the configuration of a DiT with a time table."""
        return replace(super().read_config(state, given, heads), time_table=True)

    def refuse(self, config: DiTConfig) -> str | None:
        """Refuse also a network that embeds another time."""
        if not config.time_table:
            return "SiT embeds the time 1 - t, but this network embeds 1000 t"
        return super().refuse(config)

    def to_native(self, state: StateDict, config: DiTConfig) -> StateDict:
        """Negate the last layer, and add the time table."""
        native = super().to_native(state, config)
        reversed_sign = {name: -native[name] for name in ("final.linear.weight", "final.linear.bias")}
        return native | reversed_sign | {"time_table": self.times.clone()}

    def from_native(self, state: StateDict, config: DiTConfig) -> StateDict:
        """Negate the last layer, and check the time table."""
        foreign = super().from_native(state, config)
        if not torch.allclose(state["time_table"], self.times):
            raise AtollError(
                "this network cannot be written in the SiT layout: its time table is not that of SiT, 1 - t"
            )
        return foreign | {name: -foreign[name] for name in ("final_layer.linear.weight", "final_layer.linear.bias")}


# --- PixArt-alpha: PixArt-XL-2-256x256.pth --------------------------------------------------------------------------

_CAPTION = "y_embedder.y_embedding"


class OriginalPixArt(Layout):
    """The release of PixArt-alpha."""

    name, title = "pixart", "original PixArt-alpha"
    key_names = ("x_embedder.proj.weight", "t_block.1.weight", "y_embedder.y_proj.fc1.weight")
    table = (
        *_RELEASE_TABLE,
        (_CAPTION, "null_text"),
        ("y_embedder.y_proj.fc1.*", "text.inner.*"),
        ("y_embedder.y_proj.fc2.*", "text.outer.*"),
        ("t_block.1.*", "shared_modulation.*"),
        ("blocks.{n}.scale_shift_table", "blocks.{n}.modulation.table"),
        ("blocks.{n}.cross_attn.q_linear.*", "blocks.{n}.cross.query.*"),
        ("blocks.{n}.cross_attn.kv_linear.*", "blocks.{n}.cross.key_value.*"),
        ("blocks.{n}.cross_attn.proj.*", "blocks.{n}.cross.out.*"),
        ("final_layer.scale_shift_table", "final.modulation.table"),
    )
    fields: ClassVar = {"layout": "pixart", "heads": "heads"}
    needs = _NEEDS_TEXT
    requires: ClassVar = {**_TEXT, "time_table": False}

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
        """Read shapes; the size is that of the positions, if the file has them."""
        if "csize_embedder.mlp.0.weight" in state:
            raise AtollError(_TOO_LARGE)
        if _CAPTION not in state:
            raise AtollError(f"this PixArt has no null caption; copy {_CAPTION} from the release into the file")
        null, shapes = state[_CAPTION], _shape_fields(state, heads or given.get("heads"), _RELEASE)
        patch, size = shapes["patch"], dict[str, Any](size=given.get("size"))
        if "pos_embed" in state:
            size = _position_fields(state["pos_embed"], patch, POSITION_SCALES)
        elif "size" not in given:
            raise AtollError(
                "this PixArt has no pos_embed, so the size of its latents is unknown; put a config.json "
                'beside it with {"size": 32} for images of 256 px, {"size": 64} for 512 px'
            )
        return DiTConfig(
            out_channels=state["final_layer.linear.weight"].shape[0] // patch**2,
            text_width=null.shape[1],
            text_projection="mlp",
            null_tokens=1 if len(null) == NULL_TOKENS and bool((null == null[:1]).all()) else len(null),
            **shapes,
            **size,
        )

    def complete(self, state: StateDict, config: DiTConfig) -> dict[str, tuple[Tensor, str]]:
        """Return the positions if the file has none."""
        if "pos_embed" in state:
            return {}
        made = sincos_positions(config.width, config.grid, config.grid, base=config.grid, scale=config.position_scale)
        return {"pos_embed": (made, "the file has no positions: they are computed with the formula")}


# --- diffusers DiTTransformer2DModel and PixArtTransformer2DModel ---------------------------------------------------


class _Diffusers(Layout):
    """What the DiT and PixArt of diffusers share."""

    fields: ClassVar = {
        CLASS_NAME: "",  # the first key of the file; each class has its name here
        "num_attention_heads": "heads",
        "attention_head_dim": "head_width",
        "num_layers": "depth",
        "patch_size": "patch",
        "in_channels": "channels",
        "out_channels": "out_channels",
        "sample_size": "size",
        "attention_bias": True,
        "activation_fn": "gelu-approximate",
        "norm_elementwise_affine": False,
    }
    table: ClassVar[Rows] = (
        ("pos_embed.proj.*", "patch.*"),
        ("transformer_blocks.{n}.attn1.to_(q|k|v).*", "blocks.{n}.attention.qkv.*"),
        ("transformer_blocks.{n}.attn1.to_out.0.*", "blocks.{n}.attention.out.*"),
        ("transformer_blocks.{n}.ff.net.0.proj.*", "blocks.{n}.mlp.inner.*"),
        ("transformer_blocks.{n}.ff.net.2.*", "blocks.{n}.mlp.outer.*"),
    )

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> DiTConfig:  # noqa: ARG002
        """Read config.json."""
        if "num_attention_heads" not in given:
            raise AtollError(f"a {self.title} checkpoint needs its config.json; give the folder that holds both")
        given = {**given, "out_channels": given.get("out_channels") or given["in_channels"]}
        ours = {field.name for field in fields(DiTConfig)} - {"width"}
        width = given["num_attention_heads"] * given["attention_head_dim"]
        return DiTConfig(width=width, **{own: given[theirs] for theirs, own in self.fields.items() if own in ours})


class DiffusersDiT(_Diffusers):
    """DiTTransformer2DModel, which stores the embedders of timestep and label in each block."""

    name, title = "diffusers-dit", "diffusers DiT"
    key_names = ("pos_embed.proj.weight", "proj_out_1.weight")
    table = (
        *_Diffusers.table,
        ("transformer_blocks.{n}.norm1.emb.timestep_embedder.linear_1.*", "embedders.{n}.time.inner.*"),
        ("transformer_blocks.{n}.norm1.emb.timestep_embedder.linear_2.*", "embedders.{n}.time.outer.*"),
        ("transformer_blocks.{n}.norm1.emb.class_embedder.embedding_table.weight", "embedders.{n}.labels.weight"),
        ("transformer_blocks.{n}.norm1.linear.*", "blocks.{n}.modulation.linear.*"),
        ("proj_out_1.*", "final.modulation.linear.*"),
        ("proj_out_2.*", "final.linear.*"),
    )
    needs = _NEEDS_LABELS
    requires: ClassVar = {
        **_CLASSES, "positions": "sincos", "position_scale": 1.0, "time_table": False, "mlp_ratio": 4.0,
    }  # fmt: skip
    fields: ClassVar = {
        **_Diffusers.fields,
        CLASS_NAME: "DiTTransformer2DModel",
        "num_embeds_ada_norm": "num_classes",
        "norm_type": "ada_norm_zero",
        "norm_eps": "mlp_norm_eps",
    }
    optional = ("positions",)

    def rows(self, config: DiTConfig) -> Rows:
        """Return the table, with copies of one embedder if the network has only one."""
        if config.embedder_per_block:
            return self.table
        return [(theirs, ours.replace("embedders.{n}", "embedders.0")) for theirs, ours in self.table]

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
        """Read config.json; compare the embedders of all blocks."""
        common = super().read_config(state, {"num_embeds_ada_norm": 1000, "norm_eps": 1e-5, **given}, heads)
        first = "transformer_blocks.0.norm1.emb."
        copies = [(name, name.replace(".0.", f".{n}.", 1)) for name in state for n in range(common.depth)]
        shared = all(
            state[copy].equal(state[name]) for name, copy in copies if name.startswith(first) and copy in state
        )
        return replace(common, modulation="zero", frequency_shift=1, embedder_per_block=not shared)


_DIFFUSERS_CAPTION = "caption_projection.y_embedding"
"""The null caption of the release, which checkpoints of diffusers store and its class ignores."""


class DiffusersPixArt(_Diffusers):
    """PixArtTransformer2DModel."""

    name, title = "diffusers-pixart", "diffusers PixArt"
    key_names = ("pos_embed.proj.weight", "adaln_single.linear.weight")
    table = (
        *_Diffusers.table,
        ("transformer_blocks.{n}.scale_shift_table", "blocks.{n}.modulation.table"),
        ("transformer_blocks.{n}.attn2.to_q.*", "blocks.{n}.cross.query.*"),
        ("transformer_blocks.{n}.attn2.to_(k|v).*", "blocks.{n}.cross.key_value.*"),
        ("transformer_blocks.{n}.attn2.to_out.0.*", "blocks.{n}.cross.out.*"),
        ("scale_shift_table", "final.modulation.table"),
        ("adaln_single.emb.timestep_embedder.linear_1.*", "embedders.0.time.inner.*"),
        ("adaln_single.emb.timestep_embedder.linear_2.*", "embedders.0.time.outer.*"),
        ("adaln_single.linear.*", "shared_modulation.*"),
        ("caption_projection.linear_1.*", "text.inner.*"),
        ("caption_projection.linear_2.*", "text.outer.*"),
        ("proj_out.*", "final.linear.*"),
    )
    needs = _NEEDS_TEXT
    requires: ClassVar = {**_TEXT, "positions": "sincos", "time_table": False, "mlp_ratio": 4.0}
    fields: ClassVar = {
        **_Diffusers.fields,
        CLASS_NAME: "PixArtTransformer2DModel",
        "caption_channels": "text_width",
        "cross_attention_dim": "width",
        "interpolation_scale": "position_scale",
        "use_additional_conditions": False,
        "norm_type": "ada_norm_single",
        "norm_eps": 1e-6,
    }
    optional = ("positions", "null_text")

    def rows(self, config: DiTConfig) -> Rows:
        """Return the table, with the null caption if the network has one."""
        return (*self.table, (_DIFFUSERS_CAPTION, "null_text")) if config.null_tokens > 1 else self.table

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
        """Read config.json, and the length of the null caption."""
        if "adaln_single.emb.resolution_embedder.linear_1.weight" in state:
            raise AtollError(_TOO_LARGE)
        if given.get("norm_eps", 1e-6) != 1e-6:
            raise AtollError(
                f"this PixArt has norm_eps {given['norm_eps']}; only 1e-06, the value of PixArt-alpha, is supported"
            )
        if given.get("caption_channels", 0) is None:
            raise AtollError("this PixArt has no caption projection (caption_channels is null), which is not supported")
        scale = given.get("interpolation_scale") or max(given.get("sample_size", 0) // 64, 1)
        common = super().read_config(state, {**given, "interpolation_scale": scale}, heads)
        null_tokens = len(state[_DIFFUSERS_CAPTION]) if _DIFFUSERS_CAPTION in state else 1
        return replace(common, text_projection="mlp", null_tokens=null_tokens)


# --- Paris: experts and router --------------------------------------------------------------------------------------

_PARIS = ("patch_embed.weight", "layers", "mlp.0")
_PARIS_EPS = 1e-5  # the default of torch.nn.LayerNorm, which Paris uses


class Paris(Layout):
    """An expert of Paris, with the attention of torch.nn.MultiheadAttention."""

    name, title = "paris", "Paris expert"
    key_names = ("t_block.1.weight", "text_proj.weight", "patch_embed.weight")
    shared: ClassVar = (
        ("pos_embed", "positions"),
        ("patch_embed.*", "patch.*"),
        ("layers.{n}.attn.in_proj_*", "blocks.{n}.attention.qkv.*"),
        ("layers.{n}.attn.out_proj.*", "blocks.{n}.attention.out.*"),
        ("layers.{n}.mlp.0.*", "blocks.{n}.mlp.inner.*"),
        ("layers.{n}.mlp.2.*", "blocks.{n}.mlp.outer.*"),
    )
    """Rows of experts and router."""
    table = (
        *shared,
        ("layers.{n}.scale_shift_table", "blocks.{n}.modulation.table"),
        ("layers.{n}.cross_attn.in_proj_*", "blocks.{n}.cross.(query|key_value).*"),
        ("layers.{n}.cross_attn.out_proj.*", "blocks.{n}.cross.out.*"),
        ("final_layer.scale_shift_table", "final.modulation.table"),
        ("time_embed.mlp.0.*", "embedders.0.time.inner.*"),
        ("time_embed.mlp.2.*", "embedders.0.time.outer.*"),
        ("t_block.1.*", "shared_modulation.*"),
        ("text_proj.*", "text.*"),
        ("final_layer.linear.*", "final.linear.*"),
    )
    needs = _NEEDS_TEXT
    requires: ClassVar = {**_TEXT, "text_projection": "linear", "time_table": False}
    fields: ClassVar = {
        "hidden_size": "width",
        "num_layers": "depth",
        "num_heads": "heads",
        "patch_size": "patch",
        "mlp_ratio": "mlp_ratio",
        "in_channels": "channels",
        "out_channels": "out_channels",
        "use_adaln_single": True,
        "text_embed_dim": "text_width",
    }
    optional = ("null_text",)

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> DiTConfig:
        """Read shapes."""
        shapes = _shape_fields(state, heads or given.get("num_heads"), _PARIS)
        return DiTConfig(
            out_channels=state["final_layer.linear.weight"].shape[0] // shapes["patch"] ** 2,
            text_width=state["text_proj.weight"].shape[1],
            norm_eps=_PARIS_EPS,
            mlp_norm_eps=_PARIS_EPS,
            **shapes,
            **_position_fields(state["pos_embed"], shapes["patch"]),
        )


class ParisRouter(Layout):
    """The router of Paris."""

    name, title, build = "paris-router", "Paris router", Router
    key_names = ("cls_token", "head.4.weight", "patch_embed.weight")
    table = (
        *Paris.shared,
        ("cls_token", "cls"),
        ("layers.{n}.adaLN_modulation.1.*", "blocks.{n}.modulation.linear.*"),
        ("time_embed.mlp.0.*", "embedder.time.inner.*"),
        ("time_embed.mlp.2.*", "embedder.time.outer.*"),
        ("head.0.*", "head.inner.*"),
        ("head.2.*", "head.norm.*"),
        ("head.4.*", "head.outer.*"),
    )
    requires: ClassVar = {"qk_norm": False}
    fields: ClassVar = {
        "hidden_size": "width",
        "num_layers": "depth",
        "num_heads": "heads",
        "patch_size": "patch",
        "in_channels": "channels",
        "num_clusters": "experts",
    }
    optional = ("temperature",)

    def read_config(self, state: StateDict, given: Mapping[str, Any], heads: int | None) -> RouterConfig:
        """Read shapes; the positions are stored in any case."""
        shapes = _shape_fields(state, heads or given.get("num_heads"), _PARIS)
        return RouterConfig(
            experts=state["head.4.weight"].shape[0],
            size=round(state["pos_embed"].shape[1] ** 0.5) * shapes["patch"],
            norm_eps=_PARIS_EPS,
            **shapes,
        )

    def refuse(self, config: RouterConfig) -> str | None:
        """Refuse also a conditioned router."""
        if config.num_classes or config.pooled_width:
            return "its router sees neither classes nor text"
        return super().refuse(config)


LAYOUTS: dict[str, Layout] = {
    kind.name: kind() for kind in (OriginalDiT, SiT, OriginalPixArt, DiffusersDiT, DiffusersPixArt, Paris, ParisRouter)
}


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
    names = " or ".join(matching)
    if not matching:
        first = ", ".join(sorted(state)[:5])
        raise AtollError(f"the layout of these tensors is not supported ({', '.join(LAYOUTS)}); the first are: {first}")
    if wanted is not None:
        if layout(wanted).name not in matching:
            raise AtollError(f"these tensors are not in the layout {wanted}; their names are those of {names}")
        return matching[wanted]
    if len(matching) > 1:
        named = [name for name in matching if re.search(f"(?<![a-z]){name}(?![a-z])", file_name.lower())]
        if len(named) != 1:
            raise AtollError(
                f"{file_name or 'this file'} may hold a DiT or a SiT: their tensors have the same names, but different "
                f"conventions of time and sign; pass --layout {names}"
            )
        return matching[named[0]]
    return next(iter(matching.values()))
