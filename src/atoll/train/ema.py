"""EMA of the weights over training: in float32, by name, several lengths at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

RAMP = 0.05
"""An average never reaches back over more than this share of the training so far, so early ones are not stale."""


class EMA:
    """Exponential averages of a network's parameters with half-lives counted in images."""

    def __init__(self, network: nn.Module, half_lives: Mapping[str, float]) -> None:
        self.half_lives = dict(half_lives)
        self._network = network
        # As they are between steps: FSDP2 puts whole ones in their place while the network runs.
        self.parameters = dict(network.named_parameters())
        self.weights: dict[str, dict[str, Tensor]] = {
            name: {key: value.detach().clone().float() for key, value in self.parameters.items()}
            for name in self.half_lives
        }

    @torch.no_grad()
    def update(self, images: int, batch: int) -> None:
        """Take in the weights after `images` images, the last `batch` of which made this step."""
        current = [value.detach().float() for value in self.parameters.values()]
        for name, half_life in self.half_lives.items():
            decay = 0.5 ** (batch / max(min(half_life, RAMP * images), 1e-9))
            torch._foreach_lerp_(list(self.weights[name].values()), current, 1 - decay)

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """The network with averaged weights, for a while; the trained ones come back bit for bit."""
        kept = {key: value.detach().clone() for key, value in self.parameters.items()}
        self._set(self.weights[name])
        try:
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for key, value in values.items():
            self.parameters[key].copy_(value)
        # FSDP2 keeps the root's whole weights after a pass without gradients: it must gather the new ones.
        for module in self._network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
