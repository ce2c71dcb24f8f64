"""The density of one cluster's latents and captions: what `nearest` routing asks instead of a router.

Each expert measures it from its own shards alone and keeps it beside its weights, so experts can come and go. The
cluster is taken as a Gaussian, x0 ~ N(m, U diag(l) Uᵀ + r I): the directions of most variance, and one variance for the
rest.
Its noisy version on the linear path is Gaussian too,

    x_t ~ N((1-t) m, U diag((1-t)² l) Uᵀ + ((1-t)² r + t²) I),

so log p_t(x | k) + log n_k, normalised over the clusters, is their posterior at every noise level: exact if the
clusters are such Gaussians. Near noise the latent tells nothing, but what is asked for does: log p(c | k) of the pooled
caption, by a Gaussian too, or of the class, by counting, is added to it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atoll.data.dataset import Shards
from atoll.nets import Condition
from atoll.nets.conditioning import check_labels

RANK, CAPTION_RANK = 64, 16
CAPTION_WEIGHT = 1 / 16
"""The numbers of a pooled caption are far from independent, so their Gaussian is much too sure; this is what the
held-out captions of eight clusters of emoji liked best (docs/explanation/routing.md)."""
SAMPLES = 2048
FILE = "cluster.safetensors"
_FIELDS = ("mean", "directions", "variances", "rest", "count")
_CAPTION = "caption."


@dataclass(frozen=True, eq=False)
class Density:
    """Mean (D,), directions (R, D) with their variances (R,), variance of the rest, number of samples.

    `caption` is that of the pooled captions, `classes` (C,) the number of samples of each class, if there are any.
    """

    mean: Tensor
    directions: Tensor
    variances: Tensor
    rest: Tensor
    count: Tensor
    caption: "Density | None" = None
    classes: Tensor | None = None

    @classmethod
    def fit(cls, x: Tensor, noise: Tensor | None = None, count: int | None = None, *, rank: int = RANK) -> "Density":
        """From samples x (N, …), of which `noise` (…) is extra variance, as of an autoencoder's posterior."""
        rows = x.flatten(1).double()
        mean = rows.mean(0)
        centred = rows - mean
        extra = 0.0 if noise is None else noise.double().mean().item()
        kept = min(rank, len(rows) - 1, rows.shape[1])
        values, directions = _principal(centred, kept)
        left = centred.square().mean(0).sum() - values.sum()
        rest = (left / max(rows.shape[1] - kept, 1)).clamp(min=1e-6) + extra
        # In directions of more than the rest's variance only: below it a direction says nothing.
        excess = (values + extra - rest).clamp(min=0)
        number = torch.tensor(float(count or len(rows)))
        return cls(mean.float(), directions.float(), excess.float(), rest.float(), number)

    def log_density(self, x: Tensor, t: Tensor) -> Tensor:
        """log p_t(x | cluster) + log of the number of its samples: shape (batch,). On the CPU, in double precision."""
        if x.ndim < 2 or x[0].numel() != self.mean.numel() or t.shape not in ((1,), (len(x),)):
            raise ValueError(
                f"got states of shape {tuple(x.shape)} at times of shape {tuple(t.shape)}; the density is of "
                f"{self.mean.numel()} values, and needs one time for each state or one for all"
            )
        alpha, sigma = (1 - t).double(), t.double()
        offset = x.flatten(1).double() - alpha[:, None] * self.mean
        along = offset @ self.directions.T.double()
        base = alpha**2 * self.rest + sigma**2
        wide = base[:, None] + alpha[:, None] ** 2 * self.variances
        squares = (offset.square().sum(1) - along.square().sum(1)) / base + (along.square() / wide).sum(1)
        dimensions = offset.shape[1]
        volume = wide.log().sum(1) + (dimensions - len(self.variances)) * base.log()
        return self.count.double().log() - 0.5 * (squares + volume + dimensions * math.log(2 * math.pi))

    def log_told(self, condition: Condition) -> Tensor | None:
        """log p(condition | cluster) for each row, 0 where it is dropped; None if the cluster knows no such thing."""
        if condition.pooled is not None and self.caption is not None:
            pooled = condition.pooled.detach().cpu()
            told = CAPTION_WEIGHT * self.caption.log_density(pooled, torch.zeros(len(pooled)))
        elif condition.label is not None and self.classes is not None:
            # Each class once more than it was seen: one that was not is improbable, not impossible.
            label = condition.label.cpu()
            check_labels(label, len(self.classes))
            null = (label < 0) | (label == len(self.classes))
            told = ((self.classes + 1) / (self.classes + 1).sum()).double().log()[label.masked_fill(null, 0)]
            told = told.masked_fill(null, 0.0)  # the null class is equally probable in every cluster
        else:
            return None
        return told if condition.dropped is None else told.masked_fill(condition.dropped.cpu(), 0.0)

    def tensors(self) -> dict[str, Tensor]:
        """For a safetensors file."""
        caption = {} if self.caption is None else self.caption.tensors()
        return {
            **{name: getattr(self, name) for name in _FIELDS},
            **{_CAPTION + name: tensor for name, tensor in caption.items()},
            **({} if self.classes is None else {"classes": self.classes}),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Density":
        """Read what `tensors` gave."""
        caption = {name.removeprefix(_CAPTION): part for name, part in tensors.items() if name.startswith(_CAPTION)}
        return cls(
            **{name: tensors[name] for name in _FIELDS},
            caption=cls.from_tensors(caption) if caption else None,
            classes=tensors.get("classes"),
        )


def _principal(centred: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest variances and their directions (count, D), from whichever of N × N and D × D is smaller."""
    few = len(centred) < centred.shape[1]
    values, vectors = torch.linalg.eigh((centred @ centred.T if few else centred.T @ centred) / len(centred))
    values, vectors = values.flip(0)[:count].clamp(min=1e-12), vectors.flip(1)[:, :count]
    return values, (vectors.T @ centred) / (values * len(centred)).sqrt()[:, None] if few else vectors.T


def of_shards(shards: Shards) -> Density:
    """The density of some clusters' normalised latents, captions and classes, from at most `SAMPLES` of them."""
    rows = np.linspace(0, len(shards) - 1, min(len(shards), SAMPLES)).round().astype(np.int64)
    batch = shards.read(rows)
    latents = shards.statistics.normalize(batch.mean.float())
    std = torch.tensor(shards.statistics.std).view(-1, 1, 1)
    noise = None if batch.std is None else (batch.std.float() / std).square()
    caption = None if batch.pooled is None else Density.fit(batch.pooled.float(), count=1, rank=CAPTION_RANK)
    known = len(shards.content.labels)
    classes = torch.bincount(batch.label[batch.label >= 0], minlength=known).float() if known else None
    return replace(Density.fit(latents, noise, len(shards)), caption=caption, classes=classes)
