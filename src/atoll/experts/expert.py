"""A trained network: its declaration, a reference to its weights, and an expert as a velocity field.

    reference = atoll.experts.run.expert_of_run(run, "experts/003")    # reads the manifest
    expert = open_expert(reference, space, DeviceOptions(device))      # reads the weights
    expert.velocity(x, t, condition)

Experts may differ in objective, noise schedule, network and latent normalization. `OpenExpert.velocity` removes these
differences, so that their velocities can be averaged: a common state x at time t is rescaled to the normalization of
the expert's latents (`rescaling`), the bridge turns it into the network's input and timestep, and the network's output
goes back over the bridge and the rescaling to a velocity of the common linear path.
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
from atoll.core.sizes import Size
from atoll.encoders.autoencoder import Statistics
from atoll.experts.density import Density
from atoll.experts.rescaling import Rescaling, rescaling
from atoll.nets import Condition, PreparedCondition, Router
from atoll.nets.blocks import compile_blocks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Declaration:
    """Everything about a trained network, except its weights, that its use requires."""

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
        """Build the declaration of a manifest. A router has no objective: it classifies states of the linear path."""
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
        """Channels, height and width of a latent of the default size."""
        return self.latents.shape

    @property
    def size(self) -> Size:
        """Height and width of a latent of the default size."""
        return Size(*self.latents.shape[1:])

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Heights and widths of the latents of all sizes of its run, the default first."""
        return tuple(Size(*size) for size in self.latents.sizes or ()) or (self.size,)


@dataclass(frozen=True, eq=False)
class ExpertReference:
    """A stored expert or router: its declaration, a function that reads its weights, and their size in bytes."""

    declaration: Declaration
    open: Callable[[], nn.Module]
    size: int
    file: Path | None = None
    """The file of the weights, so that the system can read it ahead."""
    density: Density | None = None
    """The density of its cluster's latents, for `nearest` routing."""


@dataclass(frozen=True)
class DeviceOptions:
    """Device, precision, quantization and compilation of networks."""

    device: torch.device = CPU
    """The device of states, router and encoders, and of all experts unless `devices` has more."""
    dtype: torch.dtype = torch.float32
    quantize: str | None = None
    compile: bool = False
    devices: tuple[torch.device, ...] = ()
    """Devices to spread the experts over; empty means `device`."""

    def put(self, network: nn.Module) -> nn.Module:
        """Move a network to the device and prepare it for inference."""
        return self.prepare(network).to(self.device)

    def prepare(self, network: nn.Module) -> nn.Module:
        """Prepare a network for inference where it is: precision, compilation, no gradients."""
        prepared = network.to(self.dtype).eval().requires_grad_(False)
        if self.compile:
            # Batch sizes change from step to step with the routing; static shapes would recompile for each.
            compile_blocks(prepared, dynamic=True)
        return prepared


def select_parts(condition: Condition, conditioning: frozenset[str]) -> Condition:
    """Return the parts of a condition that a network is conditioned on."""
    hidden = {"text", "pooled", "label"} - conditioning
    if "text" in hidden:
        hidden |= {"text_mask"}
    kept = replace(condition, **dict.fromkeys(hidden))
    parts = [getattr(kept, field.name) for field in fields(kept) if field.name != "dropped"]
    return kept if any(part is not None for part in parts) else Condition()


@dataclass(frozen=True, eq=False)
class OpenExpert:
    """An expert's network as a velocity field on the linear path, for latents in a common normalization."""

    declaration: Declaration
    network: nn.Module
    dtype: torch.dtype = torch.float32
    change: Rescaling | None = None
    """From the common normalization of latents to the expert's; None if they are equal."""

    @property
    def conditioning(self) -> frozenset[str]:
        """What the network is conditioned on: any of text, pooled and label."""
        return self.declaration.conditioning

    @property
    def device(self) -> torch.device:
        """The device of its network."""
        return next((parameter.device for parameter in self.network.parameters()), CPU)

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | PreparedCondition | None = None) -> Tensor:
        """Return the velocity (batch, C, H, W) at states x (batch, C, H, W) and times t (batch or 1,)."""
        own, own_t = (x, t) if self.change is None else self.change.state(x, t)
        bridge = self.declaration.bridge
        query = bridge.query(own, own_t)
        # With one timestep for the batch the network computes its modulation once, not once per image.
        time = query.timestep[:1] if t.numel() == 1 else query.timestep
        output: Tensor = self.network(query.state.to(self.dtype), time, condition)
        # A network with a learned variance has 2 C output channels; the prediction is the first C.
        velocity = bridge.velocity(output[:, : x.shape[1]], own, own_t)
        return velocity if self.change is None else self.change.velocity(velocity, own, t)


def open_expert(reference: ExpertReference, space: Statistics, options: DeviceOptions) -> OpenExpert:
    """Read an expert's weights. Its velocity field is defined on latents normalized by `space`."""
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
        """Return log-probabilities up to a constant (batch, clusters), in the order of the declaration's clusters."""
        parts = select_parts(condition, self.declaration.conditioning)
        return self.network.logits(x.to(self.dtype), flow.LINEAR.timestep(t), parts)


def open_router(reference: ExpertReference, options: DeviceOptions) -> OpenRouter:
    """Read a router's weights. A router is small, so it is not quantized."""
    network = replace(options, quantize=None).put(reference.open())
    if not isinstance(network, Router):
        raise AtollError(f"{reference.declaration.name} is a {type(network).__name__}, not a router")
    return OpenRouter(reference.declaration, network, options.dtype)
