"""The density of one cluster's latents and captions: the basis of `nearest` routing, which needs no router.

Each expert fits its density to its own shards and stores it beside its weights, so experts can be added and removed
without training a router. The latents of the cluster, flattened to D = C·H·W values, are modeled as a Gaussian of low
rank R plus one variance r for the remaining D - R directions:

    x0 ~ N(m, U diag(l) Uᵀ + r I)      m (D,), U (D, R) with orthonormal columns, l (R,)

On the linear path x_t = (1-t) x0 + t eps, so the noisy latent is Gaussian as well:

    x_t ~ N((1-t) m, U diag((1-t)² l) Uᵀ + ((1-t)² r + t²) I)

The posterior of the clusters at any noise level is then softmax over k of log p_t(x_t | k) + log n_k, where n_k is the
number of images of cluster k. It is the exact router of DDM (the first bracket of the decomposition
u_t = sum_k p_t(k | x_t) u_t^(k)) if the clusters are such Gaussians.

Near t = 1 the noisy latent carries no information about its cluster, but the condition c does. For p(k | x_t, c) the
term log p(c | k) is added: a second Gaussian for the pooled caption, or counted frequencies for a class label.
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

# Orders of magnitude, not tuned: far fewer directions than FIT_IMAGES, so that each variance is well estimated, and a
# file of 0.5 MB for latents of 2,048 values. A caption has fewer informative directions than an image.
RANK, CAPTION_RANK = 64, 16
CAPTION_WEIGHT = 1 / 16
"""Weight of log p(caption | cluster). The values of a pooled caption are far from independent, so their Gaussian is
overconfident. 1/16 was chosen on the held-out captions of eight clusters of emoji (docs/explanation/routing.md)."""
FIT_IMAGES = 2048
"""Images that a density is fitted to: 32 for each of the 64 directions, read and decomposed in seconds."""
# Mean and N - 1 directions span the images that they were fitted to. For N = 2 both can be computed from them; for more
# images only up to a rotation of N - 1 dimensions. 4 and 16 are choices: nothing recognizable remains of one image.
MIN_IMAGES, MIN_IMAGES_WITH_DIRECTIONS = 4, 16
"""Fewest images of a density, and of one with principal directions; below, it would reveal the images."""
DENSITY_FILE = "cluster.safetensors"
_FIELDS = ("mean", "directions", "variances", "rest", "count")
_CAPTION = "caption."


@dataclass(frozen=True, eq=False)
class Density:
    """The density of a cluster: mean (D,), directions (R, D), their variances (R,), remaining variance, image count.

    `variances` is what a direction has beyond `rest`. `caption` is the density of the pooled captions, and `classes`
    (classes,) counts the images of each class; both are None if the data has none.
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
        """Fit a density to samples x (N, …).

        `noise` (…) is a variance to add, such as that of the autoencoder's posterior; `count` is the number of images
        that the samples stand for.
        """
        rows = x.flatten(1).double()
        mean = rows.mean(0)
        centred = rows - mean
        extra = 0.0 if noise is None else noise.double().mean().item()
        kept = min(rank, len(rows) - 1, rows.shape[1])
        values, directions = _principal(centred, kept)
        left = centred.square().mean(0).sum() - values.sum()
        rest = (left / max(rows.shape[1] - kept, 1)).clamp(min=1e-6) + extra
        # `variances` is the excess over `rest`, as in probabilistic PCA, so that covariance = U diag(l) Uᵀ + r I.
        excess = (values + extra - rest).clamp(min=0)
        number = torch.tensor(float(count or len(rows)))
        return cls(mean.float(), directions.float(), excess.float(), rest.float(), number)

    def log_density(self, x: Tensor, t: Tensor) -> Tensor:
        """Return log p_t(x | cluster) + log n (batch,) for states x (batch, …) at times t (batch or 1,).

        It computes in float64 on the CPU. Log-densities of thousands of dimensions are large numbers, of which only
        the differences between clusters count, and not every accelerator has float64.
        """
        if x.ndim < 2 or x[0].numel() != self.mean.numel() or t.shape not in ((1,), (len(x),)):
            raise ValueError(
                f"got states of shape {tuple(x.shape)} at times of shape {tuple(t.shape)}; the density is of "
                f"{self.mean.numel()} values, and needs one time for each state or one for all"
            )
        # U has orthonormal columns, so the covariance is diagonal in U and its complement: along U each direction has
        # its own variance (`wide`), and everything orthogonal to U has the variance `base`. No D x D matrix is formed.
        alpha, sigma = (1 - t).double(), t.double()
        offset = x.flatten(1).double() - alpha[:, None] * self.mean
        along = offset @ self.directions.T.double()
        base = alpha**2 * self.rest + sigma**2
        wide = base[:, None] + alpha[:, None] ** 2 * self.variances
        squares = (offset.square().sum(1) - along.square().sum(1)) / base + (along.square() / wide).sum(1)
        dimensions = offset.shape[1]
        volume = wide.log().sum(1) + (dimensions - len(self.variances)) * base.log()
        return self.count.double().log() - 0.5 * (squares + volume + dimensions * math.log(2 * math.pi))

    def log_condition(self, condition: Condition) -> Tensor | None:
        """Return log p(condition | cluster) for each row, 0 for the null condition; None if nothing is known of it."""
        if condition.pooled is not None and self.caption is not None:
            pooled = condition.pooled.detach().cpu()
            log_p = CAPTION_WEIGHT * self.caption.log_density(pooled, torch.zeros(len(pooled)))
        elif condition.label is not None and self.classes is not None:
            # Laplace smoothing: a class that was not seen is improbable, not impossible.
            label = condition.label.cpu()
            check_labels(label, len(self.classes))
            null = (label < 0) | (label == len(self.classes))
            log_p = ((self.classes + 1) / (self.classes + 1).sum()).double().log()[label.masked_fill(null, 0)]
            log_p = log_p.masked_fill(null, 0.0)  # the null class is equally probable in every cluster
        else:
            return None
        return log_p if condition.dropped is None else log_p.masked_fill(condition.dropped.cpu(), 0.0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file."""
        caption = {} if self.caption is None else self.caption.tensors()
        return {
            **{name: getattr(self, name) for name in _FIELDS},
            **{_CAPTION + name: tensor for name, tensor in caption.items()},
            **({} if self.classes is None else {"classes": self.classes}),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Density":
        """Return the density of such tensors."""
        caption = {name.removeprefix(_CAPTION): part for name, part in tensors.items() if name.startswith(_CAPTION)}
        return cls(
            **{name: tensors[name] for name in _FIELDS},
            caption=cls.from_tensors(caption) if caption else None,
            classes=tensors.get("classes"),
        )


def _principal(centred: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest variances (count,) and their directions (count, D), from centered rows (N, D)."""
    # N x N and D x D have the same nonzero eigenvalues; the smaller one is decomposed.
    few = len(centred) < centred.shape[1]
    values, vectors = torch.linalg.eigh((centred @ centred.T if few else centred.T @ centred) / len(centred))
    values, vectors = values.flip(0)[:count].clamp(min=1e-12), vectors.flip(1)[:, :count]
    return values, (vectors.T @ centred) / (values * len(centred)).sqrt()[:, None] if few else vectors.T


def fit_density(shards: Shards) -> Density | None:
    """Fit a density to the normalized latents, captions and classes of at most `FIT_IMAGES` evenly spread images.

    Return None for a cluster of so few images that their mean would reveal them.
    """
    if len(shards) < MIN_IMAGES:
        return None
    rows = np.linspace(0, len(shards) - 1, min(len(shards), FIT_IMAGES)).round().astype(np.int64)
    # With data.flip half of the training images are mirrored, so every other one is here.
    batch = shards.read(rows, torch.arange(len(rows)) % 2 == 1 if shards.content.flip else None)
    latents = shards.statistics.normalize(batch.mean.float())
    std = torch.tensor(shards.statistics.std).view(-1, 1, 1)
    noise = None if batch.std is None else (batch.std.float() / std).square()
    rank, caption_rank = (RANK, CAPTION_RANK) if len(rows) >= MIN_IMAGES_WITH_DIRECTIONS else (0, 0)
    caption = None if batch.pooled is None else Density.fit(batch.pooled.float(), count=1, rank=caption_rank)
    known = len(shards.content.labels)
    classes = torch.bincount(batch.label[batch.label >= 0], minlength=known).float() if known else None
    return replace(Density.fit(latents, noise, len(shards), rank=rank), caption=caption, classes=classes)
