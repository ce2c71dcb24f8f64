"""The MLP of a block: the papers' two layers with GELU, or SwiGLU with as many parameters."""

from torch import Tensor, nn
from torch.nn import functional

from atoll.core.networks import MlpKind


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


MLPS: dict[MlpKind, type[Mlp | SwiGlu]] = {"gelu": Mlp, "swiglu": SwiGlu}
