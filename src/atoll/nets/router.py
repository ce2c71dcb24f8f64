"""The router: a DiT with a CLS token that predicts which cluster a noisy image came from."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.networks import RouterConfig
from atoll.nets.conditioning import Condition, check_rows
from atoll.nets.layers import (
    Block,
    Embedder,
    LinearModulation,
    check_input,
    init_linears,
    patchify,
    residual_dtype,
)
from atoll.nets.positions import is_sincos, resized_positions, rotation, sincos_on, sincos_positions


class Head(nn.Module):
    """Linear, GELU, LayerNorm, GELU, and Linear to one logit per expert."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.outer = nn.Linear(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to (batch, experts)."""
        hidden = self.norm(functional.gelu(self.inner(x), approximate="tanh"))
        return self.outer(functional.gelu(hidden, approximate="tanh"))  # type: ignore[no-any-return]


class Router(nn.Module):
    """Classifier of noisy images (batch, channels, height, width) into clusters.

    The loss uses `forward`; the ensemble uses `logits`, the same divided by a calibrated temperature. Training batches
    hold the clusters in their natural frequencies, so the logits include the prior p(k) of each cluster.
    """

    positions: Tensor
    temperature: Tensor

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        width, grid = config.width, config.size // config.patch
        self.patch = nn.Linear(config.channels * config.patch**2, width)
        if config.positions == "sincos":
            self.register_buffer("positions", torch.empty(1, grid**2, width))
        self.cls = nn.Parameter(torch.empty(1, 1, width))
        self.embedder = Embedder(width, config.num_classes, config.pooled_width)
        self.blocks = nn.ModuleList(
            Block(config, LinearModulation(width, 6), text=False, mlp_norm_eps=config.norm_eps)
            for _ in range(config.depth)
        )
        self.head = Head(width, config.experts)
        self.register_buffer("temperature", torch.empty(()))
        self.init_weights()

    def forward(self, x: Tensor, timestep: Tensor, condition: Condition | None = None) -> Tensor:
        """Return uncalibrated logits (batch, experts); the timesteps are as for experts."""
        condition = condition or Condition()
        rows, columns = check_input(x, timestep, self.config.channels, patch=self.config.patch)
        check_rows(condition, len(x))
        # In training, the null condition takes part in every step: see `Condition.marked`.
        if self.training:
            condition = condition.marked()
        tokens = self.patch(patchify(x, self.config.patch).to(self.patch.weight.dtype))
        turned = None
        if self.config.positions == "rope":
            tokens = tokens.to(residual_dtype(self.patch.weight))
            head_width = self.config.width // self.config.heads
            turned = rotation(rows, columns, head_width, scale=1.0, device=x.device, unrotated=1)  # CLS
        else:
            tokens = tokens + self._positions_for(rows, columns)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1).to(tokens.dtype), tokens], dim=1)
        added = self.embedder.condition(condition.label, condition.pooled, condition.dropped)
        activated = functional.silu(self.embedder(timestep.reshape(-1).float(), added))
        for block in self.blocks:
            tokens = block(tokens, activated, None, mask=None, rotation=turned)
        return self.head(tokens[:, 0])  # type: ignore[no-any-return]

    def logits(self, x: Tensor, timestep: Tensor, condition: Condition | None = None) -> Tensor:
        """Return the log posterior of the clusters up to a constant: log p(x | k) + log p(k)."""
        logits: Tensor = self(x, timestep, condition).float() / self.temperature
        return logits

    def _positions_for(self, rows: int, columns: int) -> Tensor:
        """Return positions for a grid; for another size, stretch the formula or interpolate a learned table."""
        grid = self.config.size // self.config.patch
        if (rows, columns) == (grid, grid):
            return self.positions
        # Converted routers may store a learned table in the buffer. Both variants are computed and `where` chooses, so
        # that the graph has no branch on values.
        made = sincos_on(
            self.config.width, rows, columns, base=grid, device=self.positions.device, dtype=self.positions.dtype
        )
        return torch.where(
            is_sincos(self.positions, grid), made, resized_positions(self.positions, grid, rows, columns=columns)
        )

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize as in DiT; also after `to_empty` on a router that was built on the meta device."""
        init_linears(self)
        grid = self.config.size // self.config.patch
        if self.config.positions == "sincos":
            self.positions.copy_(sincos_positions(self.config.width, grid, grid, base=grid))
        self.embedder.init_weights()
        for part in self.modules():
            if isinstance(part, LinearModulation):
                part.init_weights()
        nn.init.normal_(self.cls, std=0.02)
        nn.init.normal_(self.head.outer.weight, std=0.02)
        self.temperature.fill_(1.0)
