"""A trained network: what it declares, where it is stored, and an expert as a velocity field.

reference = atoll.experts.run.expert_of_run(run, "experts/003")    # reads the manifest
expert = open_expert(reference, space, DeviceOptions(device))      # reads the weights
expert.velocity(x, t, condition)
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll import flow
from atoll.core.errors import AtollError
from atoll.core.manifests import BridgeSpec, ExpertContent, LatentSpec, NetworkContent, TextSpec
from atoll.core.networks import NetworkConfig
from atoll.data.stages.latents import Statistics
from atoll.experts.density import Density
from atoll.experts.rescaling import Rescaling, rescaling
from atoll.nets import Condition, PreparedCondition, Router

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Declaration:
    """What a trained network says of itself: all that whoever uses it needs to know."""

    name: str
    clusters: tuple[int, ...]
    network: NetworkConfig
    conditioning: frozenset[str]
    statistics: Statistics
    latents: LatentSpec
    text: TextSpec | None
    labels: tuple[str, ...]
    bridge: flow.Bridge

    @classmethod
    def of(cls, content: NetworkContent) -> "Declaration":
        """Return what a manifest declares, as objects. A router has no objective: it lives on the linear path."""
        statistics = Statistics.of(content.statistics)
        objective, options = flow.Objective(), BridgeSpec()
        if isinstance(content, ExpertContent):
            objective, options = flow.Objective.of(content.objective), content.bridge
        return cls(
            name=content.job,
            clusters=content.clusters,
            network=content.network,
            conditioning=frozenset(content.conditioning),
            statistics=statistics,
            latents=content.latents,
            text=content.text,
            labels=content.labels,
            bridge=objective.bridge(**options.model_dump(), **statistics.bridge_options),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a latent."""
        return self.latents.shape


@dataclass(frozen=True, eq=False)
class ExpertReference:
    """A stored network, expert or router: what it declares, how to read its weights, and how many bytes they have."""

    declaration: Declaration
    open: Callable[[], nn.Module]
    size: int
    file: Path | None = None
    """Where the weights are, to have them read ahead."""
    density: Density | None = None
    """How its cluster's latents are distributed, for routing without a router."""


@dataclass(frozen=True)
class DeviceOptions:
    """Where and how networks are kept."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    quantize: str | None = None
    compile: bool = False

    def put(self, network: nn.Module) -> nn.Module:
        """Move a network, and prepare it for inference."""
        placed = network.to(self.device, self.dtype).eval().requires_grad_(False)
        if self.compile:
            placed.compile(dynamic=True)
        return placed


def select_parts(condition: Condition, told: frozenset[str]) -> Condition:
    """Return the part of a condition that a network is conditioned on."""
    hidden = {"text", "pooled", "label"} - told
    if "text" in hidden:
        hidden |= {"text_mask"}
    kept = replace(condition, **dict.fromkeys(hidden))
    parts = [getattr(kept, field.name) for field in fields(kept) if field.name != "dropped"]
    return kept if any(part is not None for part in parts) else Condition()


@dataclass(frozen=True, eq=False)
class OpenExpert:
    """An expert's network as a velocity field on the linear path of a common space of latents."""

    declaration: Declaration
    network: nn.Module
    dtype: torch.dtype = torch.float32
    change: Rescaling | None = None
    """From the common space to the expert's own; None if they are the same."""

    @property
    def conditioning(self) -> frozenset[str]:
        """What it is conditioned on."""
        return self.declaration.conditioning

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | PreparedCondition | None = None) -> Tensor:
        """Return the velocity at states x and times t: one for each state, or one for all, which costs less."""
        own, own_t = (x, t) if self.change is None else self.change.state(x, t)
        bridge = self.declaration.bridge
        query = bridge.query(own, own_t)
        time = query.timestep[:1] if t.numel() == 1 else query.timestep
        output: Tensor = self.network(query.state.to(self.dtype), time, condition)
        # A learned variance beside the prediction is not used.
        velocity = bridge.velocity(output[:, : x.shape[1]], own, own_t)
        return velocity if self.change is None else self.change.velocity(velocity, own, t)


def open_expert(reference: ExpertReference, space: Statistics, options: DeviceOptions) -> OpenExpert:
    """Read an expert's weights. Its velocity is that of latents normalized as `space`."""
    declaration = reference.declaration
    change = rescaling(space, declaration.statistics, declaration.name)
    return OpenExpert(declaration, options.put(reference.open()), options.dtype, change)


@dataclass(frozen=True, eq=False)
class OpenRouter:
    """A router with its declaration."""

    declaration: Declaration
    network: Router
    dtype: torch.dtype = torch.float32

    def logits(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Return log-probabilities up to a constant, one column for each cluster of the declaration."""
        told = select_parts(condition, self.declaration.conditioning)
        return self.network.logits(x.to(self.dtype), flow.LINEAR.timestep(t), told)


def open_router(reference: ExpertReference, options: DeviceOptions) -> OpenRouter:
    """Read a router's weights. It is small, so it is never quantized."""
    network = replace(options, quantize=None).put(reference.open())
    if not isinstance(network, Router):
        raise AtollError(f"{reference.declaration.name} is a {type(network).__name__}, not a router")
    return OpenRouter(reference.declaration, network, options.dtype)
