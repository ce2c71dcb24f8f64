"""A router of a run, an export or a release, ready to be evaluated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.experts.expert import Declaration, only
from atoll.flow import LINEAR
from atoll.nets import Condition, Router


@dataclass(frozen=True, eq=False)
class OpenRouter:
    """A router with its declaration."""

    declaration: Declaration
    network: Router
    dtype: torch.dtype = torch.float32

    def logits(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Log-probabilities up to a constant, one column for each cluster of the declaration."""
        told = only(condition, self.declaration.told)
        return self.network.logits(x.to(self.dtype), LINEAR.network_time(t), told)
