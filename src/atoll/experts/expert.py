"""A trained network: its declaration, a reference to its weights, and an expert as a velocity field.

    reference = atoll.experts.run.expert_of_run(run, "experts/003")    # reads the manifest
    expert = open_expert(reference, normalization, DeviceOptions())    # reads the weights
    expert.velocity(x, t, condition)

An expert has one class for each thing that it holds:

    Declaration         plain values of the manifest: objective, bridge, conditioning, statistics
    NetworkReference    a declaration, and a function that opens the network (`open` returns a torch.nn.Module)
    OpenExpert          declaration, network, bridge and rescaling: a velocity field (`network` is the module)
    LoadedExpert        an OpenExpert in the cache of an ensemble, with its prepared conditions (`expert_cache.py`)

Experts may differ in objective, noise schedule, network and latent normalization. `OpenExpert.velocity` removes these
differences, so that their velocities can be averaged: a common state x at time t is rescaled to the normalization of
the expert's latents (`Rescaling`), the bridge turns it into the network's input and timestep, and the network's output
goes back over the bridge and the rescaling to a velocity of the common linear path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from atoll import flow
from atoll.core.device import constant
from atoll.core.errors import AtollError
from atoll.core.manifests import BridgeSpec, ExpertContent, LatentSpec, NetworkContent, TextSpec
from atoll.core.networks import NetworkConfig
from atoll.core.sizes import Size
from atoll.data.dataset import Batch
from atoll.data.density import Density
from atoll.encoders.autoencoder import Statistics
from atoll.encoders.encoders import Encoders
from atoll.flow.schedules import broadcast
from atoll.nets import Condition, PreparedCondition, Router
from atoll.nets.blocks import compile_blocks

CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Relative difference of the channels' scales up to which they count as one. Statistics that were written and read as
decimal numbers differ by far less, and those of different data by far more."""


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
    steps: int | None = None
    """Of a few-step student: the number of its sampling steps."""
    calibration: tuple[tuple[float, ...], ...] | None = None
    """Its vote on the temperature of `nearest` routing (`experts/calibration.py`)."""

    @classmethod
    def of(cls, content: NetworkContent) -> "Declaration":
        """Build the declaration of a manifest. A router has no objective: it classifies states of the linear path."""
        statistics = Statistics.of(content.statistics)
        objective, options, steps, calibration = flow.Objective(), BridgeSpec(), None, None
        if isinstance(content, ExpertContent):
            objective, options, steps = flow.Objective.of(content.objective), content.bridge, content.steps
            calibration = content.calibration
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
            steps=steps,
            calibration=calibration,
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
class NetworkReference:
    """A stored expert or router: its declaration, a function that reads its weights, and their size in bytes."""

    declaration: Declaration
    open: Callable[[], nn.Module]
    size: int
    file: Path | None = None
    """The file of the weights, so that the system can read it ahead."""
    density: Density | None = None
    """The density of its cluster's latents, for `nearest` routing."""
    weak: Self | None = None
    """The same network after a part of its training, for autoguidance."""


@dataclass(frozen=True, eq=False)
class ModelReference:
    """References to the networks of a model, after their files were checked."""

    experts: Sequence[NetworkReference]
    router: NetworkReference | None
    encoders: Encoders
    missing: tuple[str, ...] = ()
    """Experts of a run that are not finished."""

    def choose(self, model: str, source: object) -> Self:
        """Keep all experts (`experts`) or one of them (`expert:K`), which needs no router."""
        kind, _, number = model.partition(":")
        if model == "experts":
            return self if len(self.experts) > 1 else replace(self, router=None)
        if kind == "expert" and number.isdecimal() and int(number) < len(self.experts):
            return replace(self, experts=[self.experts[int(number)]], router=None)
        raise AtollError(
            f"there is no model {model!r} in {source}; its models are experts, and expert:0 to "
            f"expert:{len(self.experts) - 1}"
        )


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
    hidden = {"text", "pooled", "label", "arguments"} - conditioning
    if "text" in hidden:
        hidden |= {"text_mask"}
    if "arguments" in hidden:
        hidden |= {"table"}
    kept = replace(condition, **dict.fromkeys(hidden))
    parts = (kept.text, kept.pooled, kept.label, kept.arguments)
    return kept if any(part is not None for part in parts) else Condition()


def condition_of(batch: Batch, use: frozenset[str]) -> Condition:
    """Return the parts of a batch that a network is conditioned on: any of text, pooled, label and arguments."""
    rows = None if batch.table is None else torch.arange(1, len(batch.label) + 1, device=batch.label.device)
    whole = Condition(batch.text, batch.mask, batch.pooled, batch.label, arguments=rows, table=batch.table)
    kept = select_parts(whole, use)
    return kept.map(lambda part: part.float() if part.is_floating_point() else part)


@dataclass(frozen=True)
class Rescaling:
    """The conversion between experts that normalize their latents differently, exact on the linear path.

    Let x0' = a x0 + b be the latents of the expert, with one scale a and a shift b for each channel. The common state
    x = (1-t) x0 + t eps and the expert's state x' = (1-t') x0' + t' eps carry the same information if they have the
    same signal-to-noise ratio, t'/(1-t') = a t/(1-t). With n = 1 - t + a t:

        t' = a t / n,      x' = (a x + (1-t) b) / n,      v = v'/n + (1 - 1/a) x' + b/a.

    eps is the same on both sides, so noise is N(0, I) in both. If a differs between channels, there is no such t': each
    channel would need a different time, and the networks were trained with one time for all channels.
    """

    scale: float
    shift: tuple[float, ...]

    @classmethod
    def between(cls, common: Statistics, own: Statistics, name: str) -> "Rescaling | None":
        """Return the conversion from the common normalization to an expert's; None if they are equal."""
        if common == own:
            return None
        if len(common.mean) != len(own.mean):
            raise AtollError(f"{name} has latents of {len(own.mean)} channels, the others of {len(common.mean)}")
        scales = [ours / theirs for ours, theirs in zip(common.std, own.std, strict=True)]
        if max(scales) > (1 + TOLERANCE) * min(scales):
            raise AtollError(
                f"{name} scales its latent channels {min(scales):.4g} to {max(scales):.4g} times as the others do. A "
                "single factor for all channels could be converted exactly; different factors cannot, because the "
                "noise would have a different strength in each channel. Train it with the latent statistics of the "
                "others"
            )
        scale = sum(scales) / len(scales)
        # x0' = (z - m')/s' with z = s x0 + m, so a = s/s' and b = (m - m')/s'.
        pairs = zip(common.mean, own.mean, own.std, strict=True)
        return cls(scale, tuple((ours - theirs) / std for ours, theirs, std in pairs))

    def state(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return x' and t' for states x (batch, channels, …) at times t (batch or 1,)."""
        n = 1 - t + self.scale * t
        own = (self.scale * x + broadcast(1 - t, x) * self._channels(x)) / broadcast(n, x)
        return own, self.scale * t / n

    def velocity(self, own: Tensor, own_state: Tensor, t: Tensor) -> Tensor:
        """Return the common velocity from the expert's velocity v' and its state x', both shaped as x."""
        n = broadcast(1 - t + self.scale * t, own)
        return own / n + (1 - 1 / self.scale) * own_state + self._channels(own) / self.scale

    def log_volume(self, t: Tensor, dimensions: int) -> Tensor:
        """Return log |det dx'/dx|, which turns a log-density of x' into one of x."""
        return dimensions * torch.log(self.scale / (1 - t + self.scale * t))

    def _channels(self, x: Tensor) -> Tensor:
        return constant(self.shift, x).view(-1, *[1] * (x.ndim - 2))


@dataclass(frozen=True, eq=False)
class OpenExpert:
    """An expert's network as a velocity field on the linear path, for latents in a common normalization."""

    declaration: Declaration
    network: nn.Module
    dtype: torch.dtype = torch.float32
    rescaling: Rescaling | None = None
    """From the common normalization of latents to the expert's; None if they are equal."""

    @classmethod
    def of(
        cls, declaration: Declaration, network: nn.Module, normalization: Statistics, dtype: torch.dtype
    ) -> "OpenExpert":
        """Return the velocity field of a network on latents with a common normalization."""
        rescaling = Rescaling.between(normalization, declaration.statistics, declaration.name)
        return cls(declaration, network, dtype, rescaling)

    @property
    def conditioning(self) -> frozenset[str]:
        """What the network is conditioned on: any of text, pooled, label and arguments."""
        return self.declaration.conditioning

    @property
    def device(self) -> torch.device:
        """The device of its network."""
        return next((parameter.device for parameter in self.network.parameters()), CPU)

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | PreparedCondition | None = None) -> Tensor:
        """Return the velocity (batch, C, H, W) at states x (batch, C, H, W) and times t (batch or 1,)."""
        own, own_t = (x, t) if self.rescaling is None else self.rescaling.state(x, t)
        bridge = self.declaration.bridge
        query = bridge.query(own, own_t)
        # With one timestep for the batch the network computes its modulation once, not once per image.
        time = query.timestep[:1] if t.numel() == 1 else query.timestep
        output: Tensor = self.network(query.state.to(self.dtype), time, condition)
        # A network with a learned variance has 2 C output channels; the prediction is the first C.
        velocity = bridge.velocity(output[:, : x.shape[1]], own, own_t)
        return velocity if self.rescaling is None else self.rescaling.velocity(velocity, own, t)


def open_expert(reference: NetworkReference, normalization: Statistics, options: DeviceOptions) -> OpenExpert:
    """Read an expert's weights. Its velocity field is defined on latents with this normalization."""
    return OpenExpert.of(reference.declaration, options.put(reference.open()), normalization, options.dtype)


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


def open_router(reference: NetworkReference, options: DeviceOptions) -> OpenRouter:
    """Read a router's weights. A router is small, so it is not quantized."""
    network = replace(options, quantize=None).put(reference.open())
    if not isinstance(network, Router):
        raise AtollError(f"{reference.declaration.name} is a {type(network).__name__}, not a router")
    return OpenRouter(reference.declaration, network, options.dtype)
