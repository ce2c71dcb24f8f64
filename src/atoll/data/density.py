"""The density of one cluster's latents and captions: the basis of `nearest` routing, which needs no router.

`atoll prepare` fits it to the shards of a cluster and stores it beside them. The expert of the cluster has a copy of
the file, so experts can be added and removed without training a router. The latents of the cluster, flattened to
D = C·H·W values, are modeled as a Gaussian of low rank R plus one variance r for the remaining D - R directions:

    x0 ~ N(m, U diag(l) Uᵀ + r I)      m (D,), U (D, R) with orthonormal columns, l (R,)

On the linear path x_t = (1-t) x0 + t eps, so the noisy latent is Gaussian as well:

    x_t ~ N((1-t) m, U diag((1-t)² l) Uᵀ + ((1-t)² r + t²) I)

The posterior of the clusters at any noise level is then softmax over k of log p_t(x_t | k) + log n_k, where n_k is the
number of images of cluster k. It is the exact router of DDM (the first bracket of the decomposition
u_t = sum_k p_t(k | x_t) u_t^(k)) if the clusters are such Gaussians.

Near t = 1 the noisy latent carries no information about its cluster, but the condition c does. For p(k | x_t, c) the
term log p(c | k) is added: a second Gaussian for the pooled caption, or counted frequencies for a class label.

In a run with several sizes of images, every cluster has one density for each of them, with the number of its images of
that size as n_k. Where a cluster has too few of them, the density is that of all of its images, resized. So the columns
of the softmax always have the same dimension D. A state of another size is resized to the nearest of these sizes; that
is an approximation, because interpolated noise is weaker. The densities of captions and classes are those of all sizes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from atoll.core.artifacts import Artifact
from atoll.core.manifests import ShardsContent
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.nets import Condition
from atoll.nets.conditioning import check_labels

# Orders of magnitude, not tuned: far fewer directions than FIT_IMAGES, so that each variance is well estimated, and a
# file of 0.5 MB for latents of 2,048 values. A caption has fewer informative directions than an image.
RANK, CAPTION_RANK = 64, 16
CAPTION_WEIGHT = 1 / 16
"""Weight of log p(caption | cluster). The values of a pooled caption are far from independent, so their Gaussian is
overconfident. 1/16 was chosen on the validation captions of eight clusters of emoji (docs/explanation/routing.md)."""
FIT_IMAGES = 2048
"""Images that a density is fitted to: 32 for each of the 64 directions, read and decomposed in seconds."""
# Mean and N - 1 directions span the images that they were fitted to. For N = 2 both can be computed from them; for more
# images only up to a rotation of N - 1 dimensions. 4 and 16 are choices: nothing recognizable remains of one image.
MIN_IMAGES, MIN_IMAGES_WITH_DIRECTIONS = 4, 16
"""Fewest images of a density, and of one with principal directions; below, it would reveal the images."""
DENSITY_FILE = "cluster.safetensors"
"""In the folder of the shards, and with the same bytes in that of the expert."""
_FIELDS = ("mean", "directions", "variances", "rest", "count")
_CAPTION = "caption."


@dataclass(frozen=True, eq=False)
class Density:
    """The density of a cluster: mean (D,), directions (R, D), their variances (R,), remaining variance, image count.

    `variances` is what a direction has beyond `rest`. `caption` is the density of the pooled captions, and `classes`
    (classes,) counts the images of each class; both are None if the data has none. `sizes` are the densities of the
    run's other sizes, by height and width of the latents; this one is of the run's default size.
    """

    mean: Tensor
    directions: Tensor
    variances: Tensor
    rest: Tensor
    count: Tensor
    caption: "Density | None" = None
    classes: Tensor | None = None
    sizes: Mapping[Size, "Density"] = field(default_factory=dict)

    @property
    def images(self) -> float:
        """The number of images of all sizes."""
        return sum(float(part.count) for part in (self, *self.sizes.values()))

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
            **{f"{size}.{name}": part for size, own in self.sizes.items() for name, part in own.tensors().items()},
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Density":
        """Return the density of such tensors."""
        nested: dict[str, dict[str, Tensor]] = {}
        for name, part in tensors.items():
            prefix, dot, rest = name.partition(".")
            if dot:
                nested.setdefault(prefix, {})[rest] = part
        caption = nested.pop(_CAPTION.rstrip("."), None)
        return cls(
            **{name: tensors[name] for name in _FIELDS},
            caption=cls.from_tensors(caption) if caption else None,
            classes=tensors.get("classes"),
            sizes={Size.parse(size): cls.from_tensors(part) for size, part in nested.items()},
        )


def _principal(centred: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest variances (count,) and their directions (count, D), from centered rows (N, D)."""
    # N x N and D x D have the same nonzero eigenvalues; the smaller one is decomposed.
    few = len(centred) < centred.shape[1]
    values, vectors = torch.linalg.eigh((centred @ centred.T if few else centred.T @ centred) / len(centred))
    values, vectors = values.flip(0)[:count].clamp(min=1e-12), vectors.flip(1)[:, :count]
    return values, (vectors.T @ centred) / (values * len(centred)).sqrt()[:, None] if few else vectors.T


class _Drawn(NamedTuple):
    """Some images of a cluster: latents and posterior variances (N, C, H, W) by size, pooled captions and labels."""

    latents: list[Tensor]
    noise: list[Tensor]
    pooled: Tensor | None
    label: Tensor

    @classmethod
    def read(cls, shards: Shards, size: Size | None = None) -> "_Drawn":
        """Read at most `FIT_IMAGES` evenly spread images, of one size or of all."""
        count = len(shards) if size is None else shards.image_counts()[size]
        spread = np.linspace(0, count - 1, min(count, FIT_IMAGES)).round().astype(np.int64)
        numbers = spread if size is None else shards.numbers(size, spread)
        # Training with data.flip mirrors half of the images, so every second one is mirrored here.
        mirrored = torch.arange(len(spread)) % 2 == 1 if shards.content.flip else None
        std = torch.tensor(shards.statistics.std).view(-1, 1, 1)
        latents, noise, pooled, label = [], [], [], []
        for part in shards.by_size(numbers).values():
            batch = shards.read(numbers[part], None if mirrored is None else mirrored[torch.from_numpy(part)])
            latents.append(shards.statistics.normalize(batch.mean.float()))
            noise += [] if batch.std is None else [(batch.std.float() / std).square()]
            pooled += [] if batch.pooled is None else [batch.pooled.float()]
            label.append(batch.label)
        return cls(latents, noise, torch.cat(pooled) if pooled else None, torch.cat(label))

    def fit(self, size: Size, count: int, rank: int) -> Density:
        """Fit a density of one size, for which all latents are resized."""
        noise = torch.cat([resized(part, size) for part in self.noise]) if self.noise else None
        return Density.fit(torch.cat([resized(part, size) for part in self.latents]), noise, count, rank=rank)


def resized(x: Tensor, size: Size) -> Tensor:
    """Resize latents or states (N, C, H, W) by bilinear interpolation; return them unchanged if they have the size."""
    same = x.shape[2:] == (size.height, size.width)
    return x if same else functional.interpolate(x, (size.height, size.width), mode="bilinear", align_corners=False)


def fit_density(shards: Shards) -> Density | None:
    """Fit densities to the normalized latents, captions and classes of at most `FIT_IMAGES` evenly spread images each.

    Return None for a cluster of so few images that their mean would reveal them.
    """
    if len(shards) < MIN_IMAGES:
        return None
    drawn = _Drawn.read(shards)
    rank, caption_rank = (RANK, CAPTION_RANK) if len(drawn.label) >= MIN_IMAGES_WITH_DIRECTIONS else (0, 0)
    caption = None if drawn.pooled is None else Density.fit(drawn.pooled, count=1, rank=caption_rank)
    known = len(shards.content.labels)
    classes = torch.bincount(drawn.label[drawn.label >= 0], minlength=known).float() if known else None
    counts = shards.image_counts()
    densities: dict[Size, Density] = {}
    for size in shards.sizes:
        own = counts.get(size, 0)
        enough = MIN_IMAGES_WITH_DIRECTIONS <= own < len(shards)
        # One image at least: the logarithm of the count must be finite.
        densities[size] = (_Drawn.read(shards, size) if enough else drawn).fit(size, max(own, 1), rank)
    default, *others = shards.sizes
    return replace(
        densities[default], caption=caption, classes=classes, sizes={size: densities[size] for size in others}
    )


def write_density(artifact: Artifact, content: ShardsContent) -> None:
    """Fit the density of a cluster whose shards are written, and add it to them before their commit."""
    if density := fit_density(Shards([artifact], "train", content=content)):
        # Another worker may be making the same cluster, on a machine that rounds differently. The first file stays.
        artifact.create(DENSITY_FILE, save({name: part.contiguous() for name, part in density.tensors().items()}))
