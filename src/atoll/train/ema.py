"""EMAs of the weights: in float32, by name, with several half-lives at once.

Half-lives are counted in images, not steps, so they do not depend on the batch size. After a step of b images the
weight of the past is 0.5 ** (b / h), with h = min(half-life, 0.05 · images seen).

An EMA may end before training does: it then keeps the weights of that moment, as the weak network of autoguidance.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

RAMP = 0.05
"""Limit of the half-life, as a share of the images seen so far: early in training a long EMA would be dominated by the
random initialization. 0.05 is the ramp-up of EDM's training code (Karras et al. 2022)."""


class EMA:
    """Exponential moving averages of a network's parameters, with half-lives in images.

    `ends` are the numbers of images after which an EMA is not updated any more.
    """

    def __init__(
        self, network: nn.Module, half_lives: Mapping[str, float], ends: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.half_lives, self._ends = dict(half_lives), dict(ends)
        self._network = network
        # Kept here, because FSDP2 replaces the sharded parameters of the modules by full ones during a forward pass.
        self.parameters = dict(network.named_parameters())
        self.weights: dict[str, dict[str, Tensor]] = {
            name: {key: value.detach().clone().float() for key, value in self.parameters.items()}
            for name in self.half_lives
        }

    @torch.no_grad()
    def update(self, images: int, batch_size: int) -> None:
        """Add the current weights, after `images` images in total and a step of `batch_size`."""
        current = [value.detach().float() for value in self.parameters.values()]
        for name, half_life in self.half_lives.items():
            if images > self._ends.get(name, images):
                continue
            decay = 0.5 ** (batch_size / max(min(half_life, RAMP * images), 1e-9))
            torch._foreach_lerp_(list(self.weights[name].values()), current, 1 - decay)

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """Evaluate the network with the weights of an EMA in a block, then restore the trained ones exactly."""
        trained = {key: value.detach().clone() for key, value in self.parameters.items()}
        training = self._network.training
        self._set(self.weights[name])
        self._network.eval()
        try:
            yield
        finally:
            self._set(trained)
            self._network.train(training)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for key, value in values.items():
            self.parameters[key].copy_(value)
        # After a pass without gradients FSDP2 keeps the gathered weights of the root module; they are now outdated.
        for module in self._network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
