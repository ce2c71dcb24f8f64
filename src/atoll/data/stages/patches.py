"""The patch features that `train.align` aligns experts with: a small grid of vectors for each image.

They are those of the features network: its feature map, resampled to a grid and projected on its first principal
components (PCA), as 8-bit integers with one step for each component. Shards contain them, so training needs no features
network.

The network gets the part of an image that its bucket shows, with about as many pixels as in its own square. The
grid of a square image is the largest one that divides the sides of the latents by 2 or more and needs at most `SHARE`
times the bytes of the latents. With 64 components that is 4 x 4 for emoji (0.33 times the bytes), 8 x 8 for pixels of
32 x 32 images (0.67 times), and 16 x 16 for Stable Diffusion's latents of 256 x 256 images (1.00 times).

Components are those of centered features: a mean that all patches have in common says nothing about an image, but would
dominate their cosine similarity. They are fitted to a bounded sample, by the first worker for all workers.

With `data.flip` the features are averaged over an image and its mirror image. A network is not equivariant: on emoji,
the mirrored features of EfficientNet-Lite0 have a cosine similarity of only 0.8 with those of the mirror image. The
averaged ones are exactly mirrored with the image, so the grid is stored once, and mirrored on reading.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.errors import AtollError, first_line
from atoll.core.manifests import PATCHES, PatchesContent
from atoll.core.sizes import Size, nearest_size
from atoll.data.chunks import prefetch
from atoll.data.images import BadImage, fit, image_size, open_image
from atoll.data.sources.base import Source, SourceImage
from atoll.data.stages import features
from atoll.data.stages.base import Encoder, EncoderStage, Job
from atoll.encoders import autoencoder
from atoll.encoders.pretrained import Pixels
from atoll.encoders.vision import Extractor, open_extractor

NAME = layout.PATCHES
FIT_IMAGES = 1024
"""Images that the components are fitted to: at least 16 patches each, so tens of thousands of patches for the
covariance of about a thousand channels. A pass over them takes seconds on a GPU and about a minute on a processor."""
RANGE = 5.0
"""Standard deviations of a component that 8 bits cover; larger values are clipped. A step is then 0.04 standard
deviations, and clipped values are rare: a choice between resolution and outliers."""
SHARE = 1.1
"""Largest number of bytes of the patch features of an image, relative to its latents."""
PROJECTION = "projection.safetensors"


@dataclass(frozen=True)
class Projection:
    """A PCA to 8-bit integers: round((x - mean) directions / step), for features x (…, C)."""

    mean: Tensor
    """Mean of the features (C,)."""
    directions: Tensor
    """Principal directions (C, D), orthonormal columns by decreasing variance."""
    step: Tensor
    """Value of one integer step in each component (D,)."""

    @classmethod
    def fit(cls, parts: Iterable[Tensor], dimensions: int) -> "Projection":
        """Fit the first components to features, given in parts (N, C)."""
        # In float64, on the CPU: sums over many patches would lose digits otherwise.
        count, total, products = 0, torch.zeros(0), torch.zeros(0)
        for part in parts:
            rows = part.double()
            if not count:
                total, products = rows.new_zeros(rows.shape[1]), rows.new_zeros(rows.shape[1], rows.shape[1])
            count, total, products = count + len(rows), total + rows.sum(0), products + rows.T @ rows
        if dimensions > len(total):
            raise AtollError(
                f"features.patch_dimensions is {dimensions}, but the features network has {len(total)} values for each "
                "patch; lower it"
            )
        mean = total / count
        values, vectors = torch.linalg.eigh(products / count - mean[:, None] * mean)
        values, vectors = values.flip(0)[:dimensions].clamp(min=1e-12), vectors.flip(1)[:, :dimensions]
        # The sign of an eigenvector is arbitrary: its largest value shall be positive.
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        step = values.sqrt() * (RANGE / 127)
        return cls(mean.float(), (vectors * largest.sign()).float().contiguous(), step.float())

    def encode(self, patches: Tensor) -> Tensor:
        """Return features (…, C) as 8-bit integers (…, D)."""
        return ((patches - self.mean) @ self.directions / self.step).round().clamp(-127, 127).to(torch.int8)

    def to(self, device: torch.device) -> "Projection":
        """Return the projection on a device."""
        return Projection(*(part.to(device) for part in (self.mean, self.directions, self.step)))


def grid_side(side: int, stored: int, dimensions: int) -> int:
    """Return the side of the grid for latents of a side, of which an image has `stored` bytes."""
    sides = (side // stride for stride in range(2, side + 1) if side % stride == 0)
    return next((grid for grid in sides if grid**2 * dimensions <= SHARE * stored), 1)


def _square(job: Job) -> tuple[int, int]:
    """Return the sides of the latents and of the grid of a square image."""
    config = job.config
    shapes = autoencoder.latent_shapes(config.latents.autoencoder, Size.square(config.data.resolution))
    # Mirrored latents do not count, so that the grid does not depend on data.flip.
    stored = sum(map(math.prod, shapes.values())) * getattr(torch, config.latents.dtype).itemsize
    side = shapes["mean"][-1]
    return side, grid_side(side, stored, config.features.patch_dimensions)


def _grid(job: Job, size: Size) -> tuple[int, int]:
    """Return rows and columns of the patches of an image; patches of all sizes are equally large."""
    side, square = _square(job)
    _, height, width = autoencoder.latent_shapes(job.config.latents.autoencoder, size)["mean"]
    return max(1, round(height * square / side)), max(1, round(width * square / side))


@dataclass(frozen=True)
class _Patches:
    """The features network, from images of a bucket to patch features (N, rows, columns, C) on the device."""

    job: Job
    extractor: Extractor
    multiple: int

    @classmethod
    def open(cls, job: Job, sizes: Sequence[Size]) -> "_Patches":
        """Open the network, and check that it takes the shapes of all sizes."""
        config = job.config.features
        extractor = open_extractor(config.model, config.resolution)
        found = cls(job, extractor, extractor.multiple)
        for size in sizes:
            shape = found.input_size(size)
            # Every network takes its own square. Others are tried here, before hours of work.
            if shape.height == shape.width:
                continue
            try:
                found(np.zeros((1, shape.height, shape.width, 3), dtype=np.uint8), size)
            except (ValueError, RuntimeError) as error:
                raise AtollError(
                    f"features.model {config.model} does not take images of {shape} pixels, which patch features of "
                    f"the size {size} need ({first_line(error)}); use efficientnet-lite0 or DINOv2, or set "
                    "features.patch_dimensions: 0 or data.buckets: off"
                ) from error
        return found

    def input_size(self, size: Size) -> Size:
        """Return the size with about as many pixels as the network's square, and about the ratio of a bucket."""
        side = self.extractor.side
        if size.height == size.width:
            return Size.square(side)
        scale = side / math.sqrt(size.area)
        sides = (self.multiple * max(1, round(length * scale / self.multiple)) for length in (size.height, size.width))
        return Size(*sides)

    def __call__(self, pixels: Pixels, size: Size) -> Tensor:
        extract = self.extractor.symmetric_patches if self.job.config.data.flip else self.extractor.patches
        return extract(pixels, _grid(self.job, size))


class Patches(EncoderStage):
    """A small grid of vectors per image."""

    name, kind, folder = "patches", PATCHES, NAME

    def uses(self) -> str:
        config = self.job.config.features
        return f"{config.model}, {config.patch_dimensions} dimensions"

    def unneeded(self) -> str | None:
        return None if self.job.config.features.patch_dimensions else "features.patch_dimensions is 0"

    def made_from(self) -> Inputs:
        dimensions = self.job.config.features.patch_dimensions
        flip = {"flip": True} if self.job.config.data.flip else {}
        return {**features.network_inputs(self.job), "dimensions": dimensions, "grid": _square(self.job)[1], **flip}

    def open_encoder(self) -> Encoder:
        sizes = self.job.list_source().buckets
        network = _Patches.open(self.job, sizes)
        projection = self._projection(network, sizes).to(network.extractor.device)
        return Encoder(
            encode=lambda pixels, size: {"patches": projection.encode(network(pixels, size))},
            batch_size=self.job.config.features.batch_size,
            input_size=network.input_size,
            by_size=True,
        )

    def _projection(self, network: _Patches, sizes: tuple[Size, ...]) -> Projection:
        """Return the projection of the artifact; fit it if no worker has.

        Its sample is decoded before the pass, and again in it.
        """
        artifact, config = self.artifact, self.job.config
        # It stays the same if the source changes, because unchanged chunks were made with it.
        if not artifact.path(PROJECTION).is_file():
            sample = _sample(self.job.source, self.job.list_source().train)
            decoded = prefetch(sample, lambda image: _decode(image, sizes, network), config.data.workers)
            waiting: dict[Size, list[Pixels]] = defaultdict(list)

            def parts() -> Iterator[Tensor]:
                for size, pixels in filter(None, decoded):
                    waiting[size].append(pixels)
                    if len(waiting[size]) == config.features.batch_size:
                        yield network(np.stack(waiting.pop(size)), size).flatten(0, 2).cpu()
                for size, rest in waiting.items():
                    yield network(np.stack(rest), size).flatten(0, 2).cpu()

            fitted = Projection.fit(parts(), config.features.patch_dimensions)
            # Several workers may fit it at the same time, on different machines. The first file counts for all of them.
            artifact.create(PROJECTION, save(vars(fitted)))
        return Projection(**load_file(artifact.path(PROJECTION)))

    def make(self, artifact: Artifact) -> PatchesContent:
        index = self.job.open_index()
        index.chunks(artifact).remove_others(keep=[PROJECTION])
        return PatchesContent(
            rows=index.rows,
            model=self.job.config.features.model,
            weights=str(features.network_inputs(self.job)["weights"]),
            grid=_square(self.job)[1],
            steps=tuple(load_file(artifact.path(PROJECTION))["step"].tolist()),
            ingest=index.manifest.digest,
        )


def _decode(image: SourceImage, sizes: tuple[Size, ...], network: _Patches) -> tuple[Size, Pixels] | None:
    """Return the bucket of an image, and the pixels that the network takes; None if it is unreadable."""
    try:
        data = image.read()
        size = nearest_size(sizes, *image_size(data))
        shape = network.input_size(size)
        return size, np.asarray(fit(open_image(data, [shape]), shape, size))
    except BadImage:
        return None


def _sample(source: Source, train: int) -> Iterator[SourceImage]:
    """Yield at most `FIT_IMAGES` training images, evenly spread."""
    # Evenly, because sources are often sorted: the first thousand images may show one class.
    every = -(-train // FIT_IMAGES)
    return islice((image for image in source.images() if image.split == "train"), 0, None, every)
