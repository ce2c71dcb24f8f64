"""Alignment of a middle block with the features network (REPA, Yu et al. 2024), as a burn-in of training.

A projector maps the tokens after one block to the patch features that `atoll prepare` stored with the shards. For the
first images of training the loss is

    objective + weight · alignment,      alignment = -mean over patches of cos(projector(tokens), patch features)

Afterwards training is the ordinary one: the projector no longer runs, and is not part of the result or the EMA.

Tokens (B, rows · columns, width) and patches (B, g, h, D) may have different grids. Along each side the finer one is
averaged to the coarser one by area, since averaging the tokens is cheaper than aligning each of them with an
interpolated patch. Grids may differ from batch to batch, with the sizes of the images.

The projector is REPA's, three linear layers with SiLU, but as wide as the network: it costs about as much as a sixth of
a block. Every process has the full projector, outside of DDP and FSDP2, which therefore wrap the same network before
and after the burn-in. Processes average its gradients themselves, and the clipping of gradients does not include it: so
the norm has one meaning in all of training, and Adam does not depend on the scale of a gradient.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.config_sections import AlignSection
from atoll.core.errors import AtollError
from atoll.core.manifests import ShardsContent
from atoll.core.networks import DiTConfig, NetworkConfig
from atoll.nets.positions import CACHED

LAYERS = 3
Grid = tuple[int, int]
"""Rows and columns."""


@dataclass(frozen=True)
class AlignmentSpec:
    """The alignment of one job, as plain values."""

    weight: float
    block: int
    """Number of blocks before the aligned tokens."""
    images: int
    """Images with alignment, from the start of training; a multiple of the batch size."""
    width: int
    patch: int
    tokens: int
    """Rows and columns of the tokens of a square image, for estimates."""
    grid: int
    """Rows and columns of its patches, for estimates."""
    steps: tuple[float, ...]
    """Value of one integer step in each dimension of the patch features."""

    @classmethod
    def of(
        cls, settings: AlignSection, network: NetworkConfig, data: ShardsContent | None, *, side: int, dimensions: int
    ) -> "AlignmentSpec":
        """Return the alignment of a network on latents of some side, still without images.

        Before the data is prepared (None), as many patches as there are tokens are assumed.
        """
        patches = None if data is None else data.patches
        if data is not None and patches is None:
            raise AtollError(
                "train.align needs patch features, but the shards have none; set features.patch_dimensions: 64 and run "
                "atoll prepare again"
            )
        if not isinstance(network, DiTConfig):
            raise AtollError(
                f"train.align needs a DiT, but the network is a {network.class_name}; set train.align: null"
            )
        # REPA aligns block 8 of 28.
        block = settings.block or max(1, round(network.depth * 8 / 28))
        if block > network.depth:
            raise AtollError(f"train.align.block is {block}, but the network has {network.depth} blocks")
        tokens = side // network.patch
        return cls(
            weight=settings.weight,
            block=block,
            images=0,
            width=network.width,
            patch=network.patch,
            tokens=tokens,
            grid=patches.grid if patches else tokens,
            steps=patches.steps if patches else (1.0,) * dimensions,
        )

    def token_grid(self, height: int, width: int) -> Grid:
        """Return the grid of the tokens of latents of some size."""
        return height // self.patch, width // self.patch

    @property
    def parameters(self) -> int:
        """Number of weights of the projector."""
        return sum(outputs * (self.width + 1) for outputs in self.outputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Widths of the outputs of the projector's layers."""
        return (*(self.width for _ in range(LAYERS - 1)), len(self.steps))

    @property
    def flops(self) -> int:
        """FLOPs of training on one square image."""
        return self.flops_of((self.tokens, self.tokens), (self.grid, self.grid))

    def flops_of(self, tokens: Grid, patches: Grid) -> int:
        """Return the FLOPs of the projector, and of averaging tokens, for training on one image."""
        coarse = _coarser(tokens, patches)
        cells = math.prod(coarse)
        averaging = 2 * cells * math.prod(tokens) * self.width if tokens != coarse else 0
        # Forward, and twice as much backward.
        return 3 * (averaging + 2 * cells * self.width * sum(self.outputs))


class Projector(nn.Module):
    """Maps tokens to patch features, and returns how well they fit."""

    steps: Tensor

    def __init__(self, spec: AlignmentSpec) -> None:
        super().__init__()
        self.spec = spec
        layers: list[nn.Module] = []
        for outputs in spec.outputs:
            layers += [nn.SiLU()] * bool(layers) + [nn.Linear(spec.width, outputs)]
        self.layers = nn.Sequential(*layers)
        self.register_buffer("steps", torch.tensor(spec.steps), persistent=False)

    def forward(self, tokens: Tensor, patches: Tensor, grid: Grid) -> Tensor:
        """Return the alignment loss (B,) of tokens (B, rows · columns, width) of a grid and integers (B, g, h, D)."""
        stored = (patches.shape[1], patches.shape[2])
        coarse, target = _coarser(grid, stored), patches.flatten(1, 2).float() * self.steps
        if stored != coarse:
            target = averaging(stored, coarse, device=target.device) @ target
        if grid != coarse:
            tokens = averaging(grid, coarse, device=tokens.device) @ tokens.float()
        return -functional.cosine_similarity(self.layers(tokens).float(), target.float(), dim=-1).mean(1)


def _coarser(one: Grid, other: Grid) -> Grid:
    return min(one[0], other[0]), min(one[1], other[1])


@lru_cache(maxsize=CACHED)
def averaging(fine: Grid, coarse: Grid, *, device: torch.device) -> Tensor:
    """Return the matrix (cells of `coarse`, cells of `fine`) that averages a grid by area.

    It is computed and copied to the device once, for all steps.
    """

    def line(fine: int, coarse: int) -> Tensor:
        # Overlap of the intervals [i, i + 1] · fine / coarse with [j, j + 1], relative to the length of the former.
        edges = torch.arange(coarse + 1, device="cpu") * (fine / coarse)
        cells = torch.arange(fine, device="cpu")
        overlap = torch.minimum(edges[1:, None], cells + 1) - torch.maximum(edges[:-1, None], cells)
        return overlap.clamp(min=0) * (coarse / fine)

    return torch.kron(line(fine[0], coarse[0]), line(fine[1], coarse[1])).to(device)
