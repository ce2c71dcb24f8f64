"""The diffusion transformer of experts.

It maps (noisy image, timestep, condition) to a prediction of the same size, independent of schedules, objectives and
parallelism.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from atoll.core.networks import DiTConfig
from atoll.nets.conditioning import Condition, PreparedCondition, check_rows
from atoll.nets.layers import (
    Block,
    Embedder,
    LinearModulation,
    Mlp,
    TableModulation,
    TextInput,
    check_input,
    check_width,
    init_linears,
    modulated_norm,
    patchify,
    residual_dtype,
    unpatchify,
)
from atoll.nets.positions import resized_positions, rotation, sincos_on, sincos_positions

TIME_KNOTS = 1001
"""Number of entries of the optional time table, for the timesteps 0, 1, …, 1000."""


class FinalLayer(nn.Module):
    """Modulated norm and projection to the pixels of a patch."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm, self.norm_eps = config.norm, config.norm_eps
        self.single = config.final == "single"
        self.modulation = (TableModulation if self.single else LinearModulation)(config.width, 2)
        self.linear = nn.Linear(config.width, config.patch * config.patch * config.out_channels)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Map (batch, tokens, width) to (batch, tokens, patch · patch · channels).

        AdaLN-Single adds its table to the raw embedding; AdaLN-Zero projects the activated one.
        """
        vectors = self.modulation(embedding[:, None] if self.single else functional.silu(embedding)).to(x.dtype)
        shift, scale = vectors.unbind(1)
        return self.linear(modulated_norm(x, shift, scale, eps=self.norm_eps, kind=self.norm))  # type: ignore[no-any-return]


class DiT(nn.Module):
    """A diffusion transformer, conditioned on any of text tokens, pooled text and class label, or unconditioned."""

    positions: Tensor
    time_table: Tensor

    def __init__(self, config: DiTConfig, checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = checkpointing
        width = config.width
        single = config.modulation == "single"
        self.patch = nn.Linear(config.channels * config.patch**2, width)
        positions = torch.empty(1, config.grid**2, width)
        if config.positions == "learned":
            self.positions = nn.Parameter(positions)
        elif config.positions == "sincos":
            self.register_buffer("positions", positions)
        if config.time_table:
            self.register_buffer("time_table", torch.empty(TIME_KNOTS))
        self.embedders = nn.ModuleList(
            Embedder(width, config.num_classes, config.pooled_width, frequency_shift=config.frequency_shift)
            for _ in range(config.depth if config.embedder_per_block else 1)
        )
        self.shared_modulation = nn.Linear(width, 6 * width) if single else None
        self.text: nn.Module | None = None
        self.null_text: nn.Parameter | None = None
        if config.text_width:
            linear = config.text_projection == "linear"
            self.text = nn.Linear(config.text_width, width) if linear else Mlp(config.text_width, width, width)
            shape = (config.text_width,) if config.null_tokens == 1 else (config.null_tokens, config.text_width)
            self.null_text = nn.Parameter(torch.empty(shape))
        self.blocks = nn.ModuleList(
            Block(
                config,
                (TableModulation if single else LinearModulation)(width, 6),
                text=config.text_width > 0,
                mlp_norm_eps=config.mlp_norm_eps,
            )
            for _ in range(config.depth)
        )
        self.final = FinalLayer(config)
        self.init_weights()

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        condition: Condition | PreparedCondition | None = None,
        *,
        tap: int | None = None,
        added: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the prediction for noisy images x (batch, channels, height, width).

        `timestep` is from 0 to 1000: (batch,), or one value for the whole batch (shape () or (1,)), which is cheaper.
        With `tap`, return also the tokens (batch, tokens, width) after that number of blocks. `added` (batch or 1,
        width) is added to the embedding of the timestep.
        """
        tokens, embedding, tapped = self._trunk(x, timestep, condition, tap=tap, added=added)
        rows, columns = (side // self.config.patch for side in x.shape[2:])
        output = unpatchify(self.final(tokens, embedding), self.config.patch, rows, columns=columns)
        return output if tapped is None else (output, tapped)

    def features(self, x: Tensor, timestep: Tensor, condition: Condition | PreparedCondition | None = None) -> Tensor:
        """Return the input tokens of the final layer, (batch, tokens, width)."""
        return self._trunk(x, timestep, condition)[0]

    def prepare(self, condition: Condition | None) -> PreparedCondition:
        """Precompute what is the same in all sampling steps: keys and values of the text, label embeddings."""
        condition = condition or Condition()
        text, mask = self._text_tokens(condition)
        pairs = () if text is None else tuple(block.cross.keys_values(text) for block in self.blocks)  # type: ignore[union-attr,operator]
        return PreparedCondition(self._condition_embeddings(condition), pairs, mask)

    def _trunk(
        self,
        x: Tensor,
        timestep: Tensor,
        condition: Condition | PreparedCondition | None,
        *,
        tap: int | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the input tokens of the final layer, the embedding that modulates it, and the tokens at the tap."""
        # The image: tokens with their positions.
        rows, columns = check_input(x, timestep, self.config.channels, patch=self.config.patch)
        tokens = self.patch(patchify(x, self.config.patch).to(self.patch.weight.dtype))
        turned = None
        if self.config.positions == "rope":
            tokens = tokens.to(residual_dtype(self.patch.weight))
            turned = rotation(
                rows, columns, self.config.head_width, scale=self.config.position_scale, device=tokens.device
            )
        else:
            tokens = tokens + self._positions_for(rows, columns)
        # The condition: a vector for each embedder, the text for all blocks (one entry) or each block, and its mask.
        texts: Sequence[TextInput]
        if isinstance(condition, PreparedCondition):
            described, texts, mask = condition.embeddings, condition.keys_values or (None,), condition.mask
        else:
            condition = condition or Condition()
            check_rows(condition, len(x))
            condition = condition.marked() if self.training else condition
            text, mask = self._text_tokens(condition)
            described, texts = self._condition_embeddings(condition), (text,)
            if text is not None and len(text) == 1:
                texts = (text.expand(len(x), -1, -1),)
        # The time, or its interpolated value in the time table. The table serves converted networks whose embedding
        # expects another scale of time (`atoll.apps.models.fold`).
        embedded = timestep.reshape(-1).float()
        if self.config.time_table:
            below = embedded.floor().clamp(0, TIME_KNOTS - 2)
            start, table = below.long(), self.time_table.float()
            embedded = torch.lerp(table[start], table[start + 1], embedded - below)
        embeddings = [embedder(embedded, extra) for embedder, extra in zip(self.embedders, described, strict=True)]
        if added is not None:
            embeddings = [embedding + added for embedding in embeddings]
        conditioning = [functional.silu(embedding) for embedding in embeddings]
        if self.shared_modulation is not None:
            conditioning = [self.shared_modulation(conditioning[0]).unflatten(-1, (6, -1))]
        # The blocks.
        tapped: Tensor | None = None
        for index, block in enumerate(self.blocks):
            inputs = (tokens, conditioning[index % len(conditioning)], texts[index % len(texts)])
            if self.checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, *inputs, mask=mask, rotation=turned, use_reentrant=False)
            else:
                tokens = block(*inputs, mask=mask, rotation=turned)
            if index + 1 == tap:
                tapped = tokens
        return tokens, embeddings[0], tapped

    def _positions_for(self, rows: int, columns: int) -> Tensor:
        """Return positions for a grid; a grid of another size is stretched over the same range of coordinates."""
        grid = self.config.grid
        if (rows, columns) == (grid, grid):
            return self.positions
        if self.config.positions == "sincos":
            return sincos_on(
                self.config.width, rows, columns, base=grid, device=self.positions.device, dtype=self.positions.dtype,
                scale=self.config.position_scale,
            )  # fmt: skip
        return resized_positions(self.positions, grid, rows, columns=columns)

    def _condition_embeddings(self, condition: Condition) -> tuple[Tensor | None, ...]:
        return tuple(
            embedder.condition(condition.label, condition.pooled, condition.dropped)  # type: ignore[operator]
            for embedder in self.embedders
        )

    def _text_tokens(self, condition: Condition) -> tuple[Tensor | None, Tensor | None]:
        """Return projected text with null conditions inserted, (batch or 1, length, width), and the attention mask."""
        if self.text is None or self.null_text is None:
            return None, None
        null = self.text(self.null_text.view(1, -1, self.null_text.shape[-1]))
        if condition.text is None:
            return null, None
        check_width("text", condition.text, self.config.text_width)
        text, mask = self.text(condition.text.to(self.null_text.dtype)), condition.text_mask
        if condition.dropped is not None:
            text, mask = _with_null(text, mask, null, dropped=condition.dropped)
        return text, None if mask is None else mask[:, None, None, :]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move the network, but keep the time table in float32: bfloat16 would round 1000 to multiples of 4."""
        table = self.time_table if self.config.time_table else None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if table is not None and self.time_table.dtype != torch.float32:
            self.time_table = table.to(self.time_table.device, torch.float32)
        return self

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize as in the papers; also after `to_empty` on a network that was built on the meta device."""
        init_linears(self)
        if self.config.positions != "rope":
            grid, scale = self.config.grid, self.config.position_scale
            self.positions.copy_(sincos_positions(self.config.width, grid, grid, base=grid, scale=scale))
        if self.config.time_table:
            self.time_table.copy_(torch.arange(TIME_KNOTS))
        for part in self.modules():
            if isinstance(part, Embedder | TableModulation | LinearModulation):
                part.init_weights()
        if self.shared_modulation is not None:
            nn.init.normal_(self.shared_modulation.weight, std=0.02)
        if self.text is not None and self.null_text is not None:
            for part in self.text.modules():
                if isinstance(part, nn.Linear):
                    nn.init.normal_(part.weight, std=0.02)
            nn.init.normal_(self.null_text, std=0.02)
            for block in self.blocks:  # text has no effect at the start, as in PixArt-alpha
                nn.init.zeros_(block.cross.out.weight)  # type: ignore[union-attr,arg-type]
        nn.init.zeros_(self.final.linear.weight)


def _with_null(text: Tensor, mask: Tensor | None, null: Tensor, *, dropped: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replace dropped texts by the null condition; return the projected tokens and their mask.

    Projected tokens are replaced, so that no gradient is computed with respect to the text itself. A single null token
    is repeated over the length of the texts: attention to equal tokens does not depend on their number. A null caption
    of several tokens keeps its length: the shorter of it and the texts is padded, and the mask hides the padding.

    Shapes: text (batch, length, width), mask (batch, length), null (1, null tokens, width), dropped (batch,).
    """
    length, tokens = text.shape[1], null.shape[1]
    if tokens == 1:
        return torch.where(dropped[:, None, None], null, text), None if mask is None else mask | dropped[:, None]
    longest = max(length, tokens)
    if mask is None and length != tokens:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    text, null = (functional.pad(part, (0, 0, 0, longest - part.shape[1])) for part in (text, null))
    if mask is not None:
        null_mask = torch.arange(longest, device=text.device) < tokens
        mask = torch.where(dropped[:, None], null_mask, functional.pad(mask, (0, longest - length)))
    return torch.where(dropped[:, None, None], null, text), mask


def count_parameters(network: nn.Module) -> int:
    """Count the weights of a network and its stored positions, without the learned null condition."""
    # Counted this way, DiT-XL/2 has the published number of parameters.
    total = sum(parameter.numel() for name, parameter in network.named_parameters() if "null_" not in name)
    positions = network.get_buffer("positions") if "positions" in dict(network.named_buffers()) else None
    return total + (0 if positions is None else positions.numel())
