"""Muon: orthogonalized momentum for the hidden matrices of a transformer, AdamW for all other weights.

The update of a matrix W (rows, columns) with gradient G, after Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon):

    M <- 0.95 M + 0.05 G,   N = 0.95 M + 0.05 G                 Nesterov momentum
    O  = Newton-Schulz(N)                                       near U V^T, where N = U S V^T
    W <- (1 - lr·decay) W - lr · 0.2 sqrt(max(rows, columns)) · O

All singular values of O are near 1, so its RMS is near 1 / sqrt(max(rows, columns)). The last factor makes the RMS of
the update 0.2, about that of AdamW, so that both share one learning rate and weight decay ("Muon is Scalable for LLM
Training", Liu et al. 2025, arXiv 2502.16982; `match_rms_adamw` in torch.optim.Muon).

Hidden matrices are the weights of linear layers inside the transformer blocks. AdamW trains the rest: embeddings, the
final layer, tables, biases and norms, and the modulation of a block, whose input is the timestep and not a token.
Queries, keys and values that share one layer are orthogonalized separately, as Jordan et al. recommend, and so are gate
and value of a SwiGLU, which are initialized separately too.

Matrices of equal shape are stacked (n, rows, columns), so that one batched product serves all of them. The momentum is
stored in stacks too; the state of a parameter is a view. A step that is not finite is skipped on the device, as by
fused AdamW (`found_inf`), so the host does not wait.

Under DDP, each process runs Newton-Schulz for its share of the matrices and sends O to the others. The rest of the
update, which has no matrix products, is the same on all processes: they have the same gradients after the exchange.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.core.device import compute_dtype
from atoll.core.distributed import DistContext
from atoll.nets.blocks import NEWTON_SCHULZ_STEPS, HiddenMatrix, hidden_matrices

MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Momentum, and coefficients of the polynomial of Newton-Schulz, as published. After five steps singular
values between 0.002 and 1 become values between 0.68 and 1.14, which trains as well as exact ones."""
RMS = 0.2
"""RMS of an update with learning rate 1, measured for AdamW by Liu et al. 2025."""
SMALLEST = 1e-7
"""Smallest norm that a matrix is divided by, as in torch.optim.Muon: a gradient of zero gives no update."""
MOMENTUM_BUFFER = "momentum_buffer"
"""The name of the momentum in the optimizer's state, as in torch.optim.Muon."""
STACK_BYTES = 128 << 20
"""Largest stack in float32. A step needs a few copies of a stack. 128 MiB are 100 matrices of width 576 (DiT-S has
384), or 24 of DiT-XL's 1152: enough to occupy a GPU, and small beside the activations of training."""


class Stack:
    """Matrices of one shape (rows, columns), updated together, with their momentum (n, rows, columns)."""

    def __init__(self, matrices: list[HiddenMatrix]) -> None:
        self._matrices, (self._rows, self._columns) = matrices, matrices[0].shape
        self._weights = [matrix.weight for matrix in matrices]
        count = sum(matrix.count for matrix in matrices)
        self.momentum = torch.zeros(count, self._rows, self._columns, device=matrices[0].weight.device)

    def views(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every weight with the part of the momentum that belongs to it, in its shape."""
        sizes = [matrix.count for matrix in self._matrices]
        for matrix, part in zip(self._matrices, self.momentum.split_with_sizes(sizes), strict=True):
            yield matrix.weight, part.view_as(matrix.weight)

    def begin(self, dtype: torch.dtype, found_inf: Tensor | None, *, own: bool) -> Tensor:
        """Update the momentum; return the orthogonalized matrices, or room for them if another process has them.

        They are (n, smaller side, larger side), without gaps in memory, so that they can be sent.
        """
        if not own:
            self._add_gradients(found_inf)
            return torch.empty_like(self._wide(self.momentum), dtype=dtype, memory_format=torch.contiguous_format)
        return self._wide(newton_schulz(self._add_gradients(found_inf).lerp_(self.momentum, MOMENTUM), dtype))

    def _add_gradients(self, found_inf: Tensor | None) -> Tensor:
        """Update the momentum; return the gradients (n, rows, columns), a tensor without other references."""
        gradients = (torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self._weights)
        gradient = torch.cat([self._split(part) for part in gradients])
        if found_inf is not None:
            gradient.masked_fill_(found_inf.bool(), 0.0)  # 0 times a value that is not finite would not be 0
        self.momentum.lerp_(gradient, (1 - MOMENTUM) * _keep(found_inf))
        return gradient

    def finish(self, orthogonal: Tensor, lr: float, weight_decay: float, *, found_inf: Tensor | None) -> None:
        """Update the weights with the result of `begin`."""
        keep = _keep(found_inf)
        # In float32 before it is scaled: a sum of two dtypes would be one kernel for every weight.
        scale = -lr * RMS * math.sqrt(max(self._rows, self._columns)) * keep
        update = self._wide(orthogonal.float().mul_(scale))
        if weight_decay:
            torch._foreach_mul_(self._weights, 1 - lr * weight_decay * keep)
        torch._foreach_add_([part for weight in self._weights for part in self._split(weight)], list(update))

    def _wide(self, matrices: Tensor) -> Tensor:
        """Transpose matrices that have more rows than columns; the second time, transpose them back."""
        return matrices.mT if self._rows > self._columns else matrices

    def _split(self, weight: Tensor) -> Tensor:
        return weight.view(-1, self._rows, self._columns)


def _keep(found_inf: Tensor | None) -> Tensor | float:
    # Without a branch on a value of the device: a bad step adds 0 to momentum and weights.
    return 1.0 if found_inf is None else 1.0 - found_inf


def stacks_of(matrices: Iterable[HiddenMatrix]) -> list[Stack]:
    """Return matrices in stacks of equal shape and at most `STACK_BYTES`, but one weight."""
    by_shape: dict[tuple[int, int], list[list[HiddenMatrix]]] = {}
    for matrix in matrices:
        stacks = by_shape.setdefault(matrix.shape, [[]])
        if sum(other.weight.nbytes for other in stacks[-1]) + matrix.weight.nbytes > STACK_BYTES and stacks[-1]:
            stacks.append([])
        stacks[-1].append(matrix)
    return [Stack(stack) for stacks in by_shape.values() for stack in stacks]


def shares_of(network: nn.Module, processes: int) -> list[list[Stack]]:
    """Divide the hidden matrices between processes, with about the same FLOPs for each; return each one's stacks."""
    shares: list[list[HiddenMatrix]] = [[] for _ in range(processes)]
    # The largest first, each to the process that has the least.
    for matrix in sorted(hidden_matrices(network), key=lambda matrix: -matrix.flops):
        min(shares, key=lambda share: sum(other.flops for other in share)).append(matrix)
    return [stacks_of(share) for share in shares]


def newton_schulz(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return nearly orthogonal matrices (n, rows, columns) with the singular vectors of the given ones.

    With X = U S V^T, the step a X + b (X X^T) X + c (X X^T)² X applies the polynomial a s + b s³ + c s⁵ to every
    singular value s. Its slope at 0 is large, so that small values grow fast. The given matrices are overwritten.
    """
    a, b, c = COEFFICIENTS
    # The norm of all entries is at least the largest singular value, which must be at most 1.
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp_(min=SMALLEST)
    x = matrices.div_(norm).to(dtype)
    del matrices
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT  # X X^T has the smaller side
    for _ in range(NEWTON_SCHULZ_STEPS):
        factor = x @ x.mT
        factor = torch.baddbmm(factor, factor, factor, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Muon for the hidden matrices and fused AdamW for the rest of a network, as one optimizer."""

    found_inf: Tensor | None = None
    """1 on the device if the next step must be skipped, else 0."""

    def __init__(self, network: nn.Module, processes: DistContext, precision: str, **options: Any) -> None:
        """Take the precision of training, and the options of AdamW; both share learning rate and weight decay."""
        self._shares, self._processes = shares_of(network, processes.size), processes
        # Without bfloat16 instructions, Newton-Schulz takes about 20 times as long in bfloat16 as in float32.
        cpu = processes.device.type == "cpu"
        self._dtype = torch.float32 if cpu else compute_dtype(processes.device, precision)
        momenta = {weight: view for share in self._shares for stack in share for weight, view in stack.views()}
        super().__init__(list(momenta), {key: options[key] for key in ("lr", "weight_decay")})
        # One optimizer for the loop: AdamW keeps its moments in the common state, from which checkpoints are written,
        # and its group is among the groups whose learning rate the loop sets.
        rest = [weight for weight in network.parameters() if weight not in momenta]
        self._adamw = torch.optim.AdamW(rest, **options)
        self._adamw.state = self.state
        self.param_groups += self._adamw.param_groups
        for weight, view in momenta.items():
            self.state[weight][MOMENTUM_BUFFER] = view

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights, unless `found_inf` is 1.

        For the matrices, processes take turns, one stack of each. Two turns may be under way: the results of one are
        sent while the next is computed.
        """
        assert closure is None
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        lr, weight_decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        ahead = 2 * (len(self._shares) - 1)  # none with a single process, which has nothing to wait for
        begun: deque[tuple[Stack, Tensor, dist.Work | None]] = deque()

        def finish_oldest() -> None:
            stack, orthogonal, sent = begun.popleft()
            if sent is not None:
                sent.wait()  # on a GPU, its stream waits and not the host
            stack.finish(orthogonal, lr, weight_decay, found_inf=self.found_inf)

        for turn in zip_longest(*self._shares):
            for owner, stack in enumerate(turn):
                if stack is not None:
                    orthogonal = stack.begin(self._dtype, self.found_inf, own=owner == self._processes.rank)
                    begun.append((stack, orthogonal, self._processes.broadcast(orthogonal, owner)))
                if len(begun) > ahead:
                    finish_oldest()
        while begun:
            finish_oldest()
