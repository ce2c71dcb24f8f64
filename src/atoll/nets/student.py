"""A student in training: a DiT that is also told the length of its step, its cluster, or both.

Each is a vector that is added to the embedding of the timestep. It begins at zero, so a student that begins with the
weights of an expert computes what the expert computes. After training, every step has the same length, so the vector of
the length is a constant. It is added to the bias of the time embedding (`plain_weights`), as is that of a cluster when
the network is opened for it (`for_cluster`). The result of training is therefore an ordinary DiT.
"""

import torch
from torch import Tensor, nn

from atoll.core.networks import DiTConfig
from atoll.nets.conditioning import Condition
from atoll.nets.dit import DiT
from atoll.nets.layers import TimeEmbedding

LENGTH_SCALE = 10.0
"""Factor of a length in (0, 1] before its sinusoidal features, whose largest frequency is then 10. Timesteps have 1000,
but the target of a few-step student has the derivative with respect to the length, which that would amplify."""
CLUSTERS = "clusters.weight"
"""Name of the vectors of the clusters (clusters, width) among the weights of a student."""
_MODEL, _LENGTH = "model.", "length."


class StudentNetwork(nn.Module):
    """A DiT with an embedding of the length of its step, and with a vector for each cluster."""

    def __init__(self, model: DiT, *, length: bool, clusters: int) -> None:
        super().__init__()
        self.model = model
        self.length = TimeEmbedding(model.config.width) if length else None
        self.clusters = nn.Embedding(clusters, model.config.width) if clusters else None
        if self.length is not None:
            self.length.init_weights()
            nn.init.zeros_(self.length.outer.weight)
        if self.clusters is not None:
            nn.init.zeros_(self.clusters.weight)

    @property
    def config(self) -> DiTConfig:
        """The specification of the DiT."""
        return self.model.config

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        condition: Condition | None = None,
        *,
        length: Tensor | None = None,
        cluster: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction of the DiT for steps of a `length` (batch or 1,) in clusters (batch or 1,)."""
        added: Tensor | None = None
        if self.length is not None:
            assert length is not None
            added = self.length(LENGTH_SCALE * length)
        if self.clusters is not None:
            vector = self.clusters(cluster)
            added = vector if added is None else added + vector
        output = self.model(x, timestep, condition, added=added)
        assert isinstance(output, Tensor)
        return output


@torch.no_grad()
def plain_weights(weights: dict[str, Tensor], length: float | None) -> dict[str, Tensor]:
    """Return the weights of the DiT of a student for steps of this length; those of other networks are unchanged.

    The vectors of the clusters keep their name.
    """
    if not any(name.startswith(_MODEL) for name in weights):
        return weights
    plain = {name.removeprefix(_MODEL): part for name, part in weights.items() if name.startswith(_MODEL)}
    if length is not None:
        parts = {name.removeprefix(_LENGTH): part for name, part in weights.items() if name.startswith(_LENGTH)}
        embedding = TimeEmbedding(len(parts["outer.bias"]))
        embedding.load_state_dict(parts)
        _shift(plain, embedding(torch.tensor([LENGTH_SCALE * length]))[0])
    return plain | {name: part for name, part in weights.items() if name == CLUSTERS}


@torch.no_grad()
def for_cluster(network: nn.Module, vector: Tensor) -> nn.Module:
    """Return a DiT that is told its cluster by the cluster's vector (width,); it shares all other weights."""
    assert isinstance(network, DiT)
    weights = network.state_dict()
    _shift(weights, vector)
    with torch.device("meta"):
        own = DiT(network.config)
    own.load_state_dict(weights, assign=True)
    return own


def _shift(weights: dict[str, Tensor], vector: Tensor) -> None:
    """Add a vector to the output of every time embedding."""
    for name in [name for name in weights if name.startswith("embedders.") and name.endswith(".time.outer.bias")]:
        weights[name] = weights[name] + vector
