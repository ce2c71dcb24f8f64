"""A finished expert: what it declares of itself, and its network as a velocity field. The one way to open an expert."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll import flow
from atoll.data.latents import Statistics
from atoll.nets import Condition, PreparedCondition, load_network
from atoll.run import Artifact
from atoll.train.space import Rescaling, rescaling

EXPERT_KIND = "expert"


@dataclass(frozen=True)
class Declaration:
    """What a trained network says of itself: all that whoever uses it needs to know."""

    name: str
    clusters: tuple[int, ...]
    network: Mapping[str, Any]
    told: frozenset[str]
    statistics: Statistics
    latents: Mapping[str, Any]
    text: Mapping[str, Any] | None
    labels: tuple[str, ...]
    bridge: flow.Bridge

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Declaration":
        """Read a manifest's facts. A router has no objective: it lives on the linear path."""
        # Older manifests have `time_even`, which only changed how training drew its times.
        objective = {key: value for key, value in facts.get("objective", {}).items() if key != "time_even"}
        return cls(
            name=facts["job"],
            clusters=tuple(facts["clusters"]),
            network=facts["network"],
            told=frozenset(facts["told"]),
            statistics=Statistics.from_facts(facts),
            latents=facts["latents"],
            text=facts["text"],
            labels=tuple(facts["labels"] or ()),
            bridge=flow.objective(**objective).bridge(**facts.get("bridge", {})),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a latent."""
        return tuple(self.latents["shape"])


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


def open_expert(run: Path, name: str, space: Statistics, device: torch.device | None = None) -> OpenExpert:
    """Open a finished expert of a run (`experts/003`, `monolith`, `student`) after checking its hashes."""
    artifact = Artifact(run, f"{name}/final")
    declaration = Declaration.from_facts(artifact.open(EXPERT_KIND, verify=True).facts)
    network = load_network(artifact.folder).to(device).eval().requires_grad_(False)
    return OpenExpert(declaration, network, torch.float32, rescaling(space, declaration.statistics, name))
