"""A finished expert: what it declares of itself, and its network as a velocity field. The one way to open an expert."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll import flow
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT, BridgeSpec, ExpertContent, LatentSpec, NetworkContent, TextSpec
from atoll.core.networks import NetworkConfig
from atoll.data.stages.latents import Statistics
from atoll.experts.rescaling import Rescaling, rescaling
from atoll.nets import Condition, PreparedCondition, load_network


@dataclass(frozen=True)
class Declaration:
    """What a trained network says of itself: all that whoever uses it needs to know."""

    name: str
    clusters: tuple[int, ...]
    network: NetworkConfig
    told: frozenset[str]
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
            told=frozenset(content.conditioning),
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


def only(condition: Condition, told: frozenset[str]) -> Condition:
    """The part of a condition that a network knows what to do with."""
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
    dtype: torch.dtype
    change: Rescaling | None = None

    @property
    def told(self) -> frozenset[str]:
        """What it wants to be told."""
        return self.declaration.told

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | PreparedCondition | None = None) -> Tensor:
        """The velocity at states x and times t: one for each sample, or one for the whole batch, which costs less."""
        own, own_t = (x, t) if self.change is None else self.change.state(x, t)
        bridge = self.declaration.bridge
        query = bridge.query(own, own_t)
        time = query.network_time[:1] if t.numel() == 1 else query.network_time
        output: Tensor = self.network(query.state.to(self.dtype), time, condition)
        # A learned variance beside the prediction is not used.
        answer = bridge.velocity(output[:, : x.shape[1]], own, own_t)
        return answer if self.change is None else self.change.velocity(answer, own, t)


def open_expert(run: Path, name: str, space: Statistics, *, device: torch.device | None = None) -> OpenExpert:
    """Open a finished expert of a run (`experts/003`, `monolith`, `student`) after checking its hashes."""
    artifact = Artifact(run, layout.final(name))
    declaration = Declaration.of(artifact.read(EXPERT, verify=True))
    network = load_network(artifact.folder).to(device).eval().requires_grad_(False)
    return OpenExpert(declaration, network, torch.float32, rescaling(space, declaration.statistics, name))
