"""The layers of experts and router. Inside a block, tensors have shape (batch, tokens, width)."""

import math
import platform

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.networks import DiTConfig, NormKind, RouterConfig
from atoll.nets.conditioning import check_labels
from atoll.nets.positions import rotate

# As in DiT and PixArt, whose checkpoints must load.
FREQUENCIES = 256
"""Number of features of the sinusoidal timestep embedding, half of them cosines, half sines."""

TextInput = Tensor | tuple[Tensor, Tensor] | None
"""The text input of a block: tokens, precomputed keys and values, or None."""


def time_features(timestep: Tensor, shift: int = 0) -> Tensor:
    """Return cosines, then sines, of timestep · 10000^(-i / (half - shift)), for timesteps (batch,) from 0 to 1000."""
    half = FREQUENCIES // 2
    # Keep this order of operations: at timestep 1000, a rounding error of the frequency is 1000 times as large in the
    # angle, so another order would not reproduce released checkpoints.
    exponents = -math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=timestep.device) / (half - shift)
    angles = timestep.float()[:, None] * torch.exp(exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def check_input(x: Tensor, timestep: Tensor, channels: int, *, patch: int) -> tuple[int, int]:
    """Check an image batch and its timesteps; return the rows and columns of the token grid."""
    if x.ndim != 4 or x.shape[1] != channels or x.shape[2] % patch or x.shape[3] % patch:
        raise ValueError(
            f"got an image of shape {tuple(x.shape)}, expected (batch, {channels}, height, width) with sides that are "
            f"multiples of the patch, {patch}"
        )
    if timestep.numel() not in (1, len(x)):
        raise ValueError(
            f"got timesteps of shape {tuple(timestep.shape)}, expected ({len(x)},) or one timestep for the batch"
        )
    return x.shape[2] // patch, x.shape[3] // patch


def check_width(name: str, part: Tensor, width: int) -> None:
    """Check the last dimension of a part of the conditioning."""
    if part.shape[-1] != width:
        raise ValueError(f"{name} has width {part.shape[-1]}, expected {width}: it comes from another text encoder")


def patchify(images: Tensor, patch: int) -> Tensor:
    """Reshape (batch, channels, height, width) to (batch, tokens, channels · patch · patch)."""
    # Channels first within a token, as in the weight of a convolution: a patch embedding by convolution then becomes a
    # linear layer by a reshape of its weight.
    batch, channels, height, width = images.shape
    blocks = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def unpatchify(tokens: Tensor, patch: int, rows: int, *, columns: int) -> Tensor:
    """Reshape (batch, tokens, patch · patch · channels) to (batch, channels, height, width); channels come last."""
    batch, _, features = tokens.shape
    channels = features // (patch * patch)
    blocks = tokens.reshape(batch, rows, columns, patch, patch, channels)
    return blocks.permute(0, 5, 1, 3, 2, 4).reshape(batch, channels, rows * patch, columns * patch)


def residual_dtype(weight: Tensor) -> torch.dtype:
    """Return the precision of tokens between blocks: float32 under autocast, else that of the weights.

    Positions that are added have this effect, since they are in float32 too. With RoPE none are added, and the sums of
    all blocks would be rounded to bfloat16.
    """
    mixed = not weight.is_meta and torch.is_autocast_enabled(weight.device.type)
    return torch.float32 if mixed else weight.dtype


class TimeEmbedding(nn.Module):
    """Sinusoidal features of the timestep and a two-layer SiLU perceptron."""

    def __init__(self, width: int, frequency_shift: int = 0) -> None:
        super().__init__()
        self.frequency_shift = frequency_shift
        self.inner = nn.Linear(FREQUENCIES, width)
        self.outer = nn.Linear(width, width)

    def forward(self, timestep: Tensor) -> Tensor:
        """Map (batch,) to (batch, width)."""
        features = time_features(timestep, self.frequency_shift).to(self.inner.weight.dtype)
        embedding: Tensor = self.outer(functional.silu(self.inner(features)))
        return embedding

    def init_weights(self) -> None:
        """Initialize as in DiT: normal weights with standard deviation 0.02, zero biases."""
        for linear in (self.inner, self.outer):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)


class Embedder(nn.Module):
    """The vector that modulates the blocks: timestep, plus class label and pooled text if the network takes them."""

    def __init__(self, width: int, num_classes: int = 0, pooled_width: int = 0, *, frequency_shift: int = 0) -> None:
        super().__init__()
        self.time = TimeEmbedding(width, frequency_shift)
        # The last row is the null class, as in DiT.
        self.labels = nn.Embedding(num_classes + 1, width) if num_classes else None
        self.pooled = nn.Linear(pooled_width, width) if pooled_width else None
        self.null_pooled = nn.Parameter(torch.empty(pooled_width)) if pooled_width else None

    def condition(self, label: Tensor | None, pooled: Tensor | None, dropped: Tensor | None) -> Tensor | None:
        """Return the sum of label and pooled text embeddings, (batch or 1, width); None if it takes neither."""
        total: Tensor | None = None
        if self.labels is not None:
            null = self.labels.num_embeddings - 1
            if label is None:
                label = torch.full((1,), null, device=self.labels.weight.device)
            else:
                check_labels(label, null)
                label = label if dropped is None else torch.where(dropped, null, label)
            total = self.labels(torch.where(label < 0, null, label))  # images without a label have -1
        if self.pooled is not None and self.null_pooled is not None:
            if pooled is None:
                pooled = self.null_pooled[None]
            else:
                check_width("pooled", pooled, self.pooled.in_features)
                if dropped is not None:
                    pooled = torch.where(dropped[:, None], self.null_pooled.to(pooled.dtype), pooled)
            projected = self.pooled(pooled.to(self.pooled.weight.dtype))
            total = projected if total is None else total + projected
        return total

    def forward(self, timestep: Tensor, condition: Tensor | None) -> Tensor:
        """Return the modulating vector, (batch or 1, width)."""
        embedding: Tensor = self.time(timestep)
        return embedding if condition is None else embedding + condition

    def init_weights(self) -> None:
        """Initialize as in DiT: normal weights with standard deviation 0.02."""
        self.time.init_weights()
        if self.labels is not None:
            nn.init.normal_(self.labels.weight, std=0.02)
        if self.pooled is not None and self.null_pooled is not None:
            nn.init.normal_(self.pooled.weight, std=0.02)
            nn.init.zeros_(self.pooled.bias)
            nn.init.normal_(self.null_pooled, std=0.02)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, *, eps: float, kind: NormKind = "layer") -> Tensor:
    """Return norm(x) · (1 + scale) + shift, with shift and scale of shape (batch or 1, width).

    RMSNorm divides by the root mean square; LayerNorm subtracts the mean before.
    """
    if kind == "rms":
        if shift.shape[0] == 1:
            return functional.rms_norm(x, x.shape[-1:], 1 + scale[0], eps) + shift[0]
        return torch.addcmul(shift[:, None], functional.rms_norm(x, x.shape[-1:], eps=eps), 1 + scale[:, None])
    if shift.shape[0] == 1:  # one timestep for the whole batch: the modulation is the affine map of one fused LayerNorm
        return functional.layer_norm(x, x.shape[-1:], 1 + scale[0], shift[0], eps)
    return torch.addcmul(shift[:, None], functional.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale[:, None])


class TableModulation(nn.Module):
    """AdaLN-Single: a learned table per block, added to the output of one projection that all blocks share."""

    def __init__(self, width: int, vectors: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(vectors, width))

    def forward(self, shared: Tensor) -> Tensor:
        """Map (batch or 1, vectors or 1, width) to (batch or 1, vectors, width)."""
        return shared + self.table

    def init_weights(self) -> None:
        """Initialize as in PixArt-alpha."""
        nn.init.normal_(self.table, std=self.table.shape[-1] ** -0.5)


class LinearModulation(nn.Module):
    """AdaLN-Zero: one projection per block, initialized with zeros so that the block starts as the identity."""

    def __init__(self, width: int, vectors: int) -> None:
        super().__init__()
        self.vectors = vectors
        self.linear = nn.Linear(width, vectors * width)

    def forward(self, activated: Tensor) -> Tensor:
        """Map the SiLU of the embedding, (batch or 1, width), to (batch or 1, vectors, width)."""
        return self.linear(activated).unflatten(-1, (self.vectors, -1))  # type: ignore[no-any-return]

    def init_weights(self) -> None:
        """Initialize with zeros, as in DiT."""
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)


def _emulates_bfloat16() -> bool:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if hasattr(torch.cpu, "get_capabilities"):
        return not torch.cpu.get_capabilities().get("avx512_bf16", False)
    # Older torch, from 2.9 on, has only this private function.
    return not torch.cpu._is_avx512_bf16_supported()


EMULATES_BFLOAT16 = _emulates_bfloat16()
"""True on an x86 processor without bfloat16 instructions."""


def attention(queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None) -> Tensor:
    """Return scaled dot-product attention over (batch, heads, tokens, head width)."""
    if EMULATES_BFLOAT16 and queries.dtype == torch.bfloat16 and queries.is_cpu and torch.is_grad_enabled():
        # Measured: without bfloat16 instructions, the backward pass in bfloat16 takes three to four times as long as
        # in float32 with the casts.
        with torch.autocast("cpu", enabled=False):
            return functional.scaled_dot_product_attention(
                queries.float(), keys.float(), values.float(), attn_mask=mask
            ).to(queries.dtype)
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


class _Attention(nn.Module):
    """Base of both attentions: heads, output projection, and the optional norm of queries and keys."""

    def __init__(self, width: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.out = nn.Linear(width, width)
        self.query_norm = nn.RMSNorm(width // heads, eps=1e-6) if qk_norm else None
        self.key_norm = nn.RMSNorm(width // heads, eps=1e-6) if qk_norm else None

    def encode(self, x: Tensor, norm: nn.RMSNorm | None, rotation: Tensor | None = None) -> Tensor:
        """Return queries or keys, normalized and rotated if the network does so, in their own precision.

        The norm computes in the precision of its weight: autocast sees to that on GPUs, but not on CPUs.
        """
        encoded = x if norm is None else norm(x.to(norm.weight.dtype))
        return (encoded if rotation is None else rotate(encoded, rotation)).to(x.dtype)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Apply attention over (batch, heads, tokens, head width), join the heads, and project."""
        joined = attention(queries, keys, values, mask=mask)
        return self.out(joined.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SelfAttention(_Attention):
    """Attention among the image tokens, with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, qk_norm: bool = False) -> None:
        super().__init__(width, heads, qk_norm)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """Map (batch, tokens, width) to the same shape; `rotation` rotates queries and keys (`nets.positions`)."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        queries, keys, values = (part.transpose(1, 2) for part in parts)
        queries = self.encode(queries, self.query_norm, rotation)
        return self.attend(queries, self.encode(keys, self.key_norm, rotation), values)


class CrossAttention(_Attention):
    """Attention of the image tokens to the text, with one matrix for keys and values."""

    def __init__(self, width: int, heads: int, qk_norm: bool = False) -> None:
        super().__init__(width, heads, qk_norm)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)

    def keys_values(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of text tokens, each (batch, heads, length, head width)."""
        parts = self.key_value(text).unflatten(-1, (2, self.heads, -1)).unbind(2)
        keys, values = (part.transpose(1, 2) for part in parts)
        return self.encode(keys, self.key_norm), values

    def forward(self, x: Tensor, text: Tensor | tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        queries = self.encode(self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2), self.query_norm)
        keys, values = self.keys_values(text) if isinstance(text, Tensor) else text
        return self.attend(queries, keys, values, mask=mask)


class Mlp(nn.Module):
    """Two layers with tanh-approximated GELU."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, width) to (…, out)."""
        return self.outer(functional.gelu(self.inner(x), approximate="tanh"))  # type: ignore[no-any-return]


SWIGLU_MULTIPLE = 8
"""The hidden width of a SwiGLU is a multiple of this: rows of 16 bytes in bfloat16, which tensor cores need. A multiple
of 64 would miss the parameters of width 256 by 3 %."""


class SwiGlu(nn.Module):
    """Two layers with a gate: outer(SiLU(gate) · value), with one matrix for gate and value (Shazeer 2020).

    It has three matrices instead of two, so two thirds of `hidden` give it the parameters of an `Mlp`.
    """

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        gated = max(1, round(hidden * 2 / 3 / SWIGLU_MULTIPLE)) * SWIGLU_MULTIPLE
        self.inner = nn.Linear(width, 2 * gated)
        self.outer = nn.Linear(gated, out)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, width) to (…, out)."""
        gate, value = self.inner(x).chunk(2, dim=-1)
        return self.outer(functional.silu(gate) * value)  # type: ignore[no-any-return]

    def init_weights(self) -> None:
        """Initialize gate and value as two matrices; Xavier would give a joint one three quarters of their range."""
        for part in self.inner.weight.chunk(2):
            nn.init.xavier_uniform_(part)


class Block(nn.Module):
    """Modulated self-attention, cross-attention without norm and gate (as in PixArt and Paris), modulated MLP."""

    def __init__(
        self, config: DiTConfig | RouterConfig, modulation: nn.Module, *, text: bool, mlp_norm_eps: float
    ) -> None:
        super().__init__()
        width = config.width
        self.norm = config.norm
        self.norm_eps = (config.norm_eps, mlp_norm_eps)
        self.modulation = modulation
        self.attention = SelfAttention(width, config.heads, config.qk_norm)
        self.cross = CrossAttention(width, config.heads, config.qk_norm) if text else None
        self.mlp = (Mlp if config.mlp == "gelu" else SwiGlu)(width, int(width * config.mlp_ratio), width)

    def forward(
        self,
        x: Tensor,
        conditioning: Tensor,
        text: TextInput,
        *,
        mask: Tensor | None,
        rotation: Tensor | None,
    ) -> Tensor:
        """Map tokens x (batch, tokens, width) to the same shape.

        `conditioning` is the input of the modulation of this block: the shared vectors, or SiLU of the embedding.
        `mask` hides text tokens, and `rotation` are the positions of the tokens, if the network has RoPE.
        """
        vectors = self.modulation(conditioning).to(x.dtype)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = vectors.unbind(1)
        normed = modulated_norm(x, shift, scale, eps=self.norm_eps[0], kind=self.norm)
        x = torch.addcmul(x, gate[:, None], self.attention(normed, rotation))
        if self.cross is not None and text is not None:
            x = x + self.cross(x, text, mask)
        normed = modulated_norm(x, mlp_shift, mlp_scale, eps=self.norm_eps[1], kind=self.norm)
        return torch.addcmul(x, mlp_gate[:, None], self.mlp(normed))


def init_linears(module: nn.Module) -> None:
    """Initialize linear layers with Xavier-uniform weights and zero biases, and norms with ones, as DiT does first."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.RMSNorm | nn.LayerNorm):
            part.reset_parameters()
    for part in module.modules():
        if isinstance(part, SwiGlu):
            part.init_weights()
