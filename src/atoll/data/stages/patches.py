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
from atoll.core.config import Config
from atoll.core.errors import AtollError, first_line
from atoll.core.manifests import PATCHES, PatchesContent
from atoll.core.sizes import Size, nearest_size
from atoll.data.chunks import prefetch
from atoll.data.images import BadImage, fit, image_size, open_image
from atoll.data.sources.source import SourceImage
from atoll.data.stages import features
from atoll.data.stages.stage import EncoderStage, PassEncoder
from atoll.encoders import autoencoder
from atoll.encoders.pretrained import Pixels
from atoll.encoders.vision import open_extractor

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


def grid_side(side: int, stored: int, dimensions: int) -> int:
    """Return the side of the grid for latents of a side, of which an image has `stored` bytes."""
    sides = (side // stride for stride in range(2, side + 1) if side % stride == 0)
    return next((grid for grid in sides if grid**2 * dimensions <= SHARE * stored), 1)


def _square(config: Config) -> tuple[int, int]:
    """Return the sides of the latents and of the grid of a square image."""
    shapes = autoencoder.latent_shapes(config.latents.autoencoder, Size.square(config.data.resolution))
    # Mirrored latents do not count, so that the grid does not depend on data.flip.
    stored = sum(map(math.prod, shapes.values())) * getattr(torch, config.latents.dtype).itemsize
    side = shapes["mean"][-1]
    return side, grid_side(side, stored, config.features.patch_dimensions)


class _Patches:
    """The features network, from images of a bucket to patch features (N, rows, columns, C) on the device."""

    def __init__(self, config: Config, sizes: Sequence[Size]) -> None:
        """Open the network, and check that it takes the shapes of all sizes."""
        self.config = config
        self.extractor = open_extractor(config.features.model, config.features.resolution)
        self.multiple = self.extractor.multiple
        for size in sizes:
            shape = self.input_size(size)
            # Every network takes its own square. Others are tried here, before hours of work.
            if shape.height == shape.width:
                continue
            try:
                self(np.zeros((1, shape.height, shape.width, 3), dtype=np.uint8), size)
            except (ValueError, RuntimeError) as error:
                raise AtollError(
                    f"features.model {config.features.model} does not take images of {shape} pixels, which patch "
                    f"features of the size {size} need ({first_line(error)}); use efficientnet-lite0 or DINOv2, or set "
                    "features.patch_dimensions: 0 or data.buckets: off"
                ) from error

    def input_size(self, size: Size) -> Size:
        """Return the size with about as many pixels as the network's square, and about the ratio of a bucket."""
        side = self.extractor.side
        if size.height == size.width:
            return Size.square(side)
        scale = side / math.sqrt(size.area)
        sides = (self.multiple * max(1, round(length * scale / self.multiple)) for length in (size.height, size.width))
        return Size(*sides)

    def __call__(self, pixels: Pixels, size: Size) -> Tensor:
        # Rows and columns of the grid: patches of all sizes are equally large.
        side, square = _square(self.config)
        _, height, width = autoencoder.latent_shapes(self.config.latents.autoencoder, size)["mean"]
        grid = max(1, round(height * square / side)), max(1, round(width * square / side))
        extract = self.extractor.symmetric_patches if self.config.data.flip else self.extractor.patches
        return extract(pixels, grid)


class PatchesStage(EncoderStage):
    """A small grid of vectors per image."""

    name, kind, folder = "patches", PATCHES, NAME

    def uses(self) -> str:
        config = self.preparation.config.features
        return f"{config.model}, {config.patch_dimensions} dimensions"

    def unneeded(self) -> bool:
        return not self.preparation.config.features.patch_dimensions

    def made_from(self) -> Inputs:
        config = self.preparation.config
        made = {"dimensions": config.features.patch_dimensions, "grid": _square(config)[1]}
        return {**features.network_inputs(self.preparation), **made, **({"flip": True} if config.data.flip else {})}

    def open_encoder(self) -> PassEncoder:
        sizes = self.preparation.list_source().buckets
        network = _Patches(self.preparation.config, sizes)
        projection = self._projection(network, sizes)
        return PassEncoder(
            encode=lambda pixels, size: {"patches": projection.encode(network(pixels, size))},
            batch_size=self.preparation.config.features.batch_size,
            input_size=network.input_size,
            by_size=True,
        )

    def _projection(self, network: _Patches, sizes: tuple[Size, ...]) -> Projection:
        """Return the projection of the artifact; fit it if no worker has.

        Its sample is decoded before the pass, and again in it.
        """
        artifact, config = self.artifact, self.preparation.config
        # It stays the same if the source changes, because unchanged chunks were made with it.
        if not artifact.path(PROJECTION).is_file():
            train = (image for image in self.preparation.source.images() if image.split == "train")
            # Evenly spread, because sources are often sorted: the first thousand images may show one class.
            sample = islice(train, 0, None, -(-self.preparation.list_source().train // FIT_IMAGES))
            waiting: dict[Size, list[Pixels]] = defaultdict(list)

            def decode(image: SourceImage) -> tuple[Size, Pixels] | None:
                """Return the bucket of an image, and the pixels that the network takes; None if it is unreadable."""
                try:
                    data = image.read()
                    size = nearest_size(sizes, *image_size(data))
                    shape = network.input_size(size)
                    return size, np.asarray(fit(open_image(data, [shape]), shape, size))
                except BadImage:
                    return None

            def parts() -> Iterator[Tensor]:
                for size, pixels in filter(None, prefetch(sample, decode, config.data.workers)):
                    waiting[size].append(pixels)
                    if len(waiting[size]) == config.features.batch_size:
                        yield network(np.stack(waiting.pop(size)), size).flatten(0, 2).cpu()
                for size, rest in waiting.items():
                    yield network(np.stack(rest), size).flatten(0, 2).cpu()

            fitted = Projection.fit(parts(), config.features.patch_dimensions)
            # Several workers may fit it at the same time, on different machines. The first file counts for all of them.
            artifact.create(PROJECTION, save(vars(fitted)))
        tensors = load_file(artifact.path(PROJECTION))
        return Projection(**{name: part.to(network.extractor.device) for name, part in tensors.items()})

    def make(self, artifact: Artifact) -> PatchesContent:
        index = self.preparation.open_index()
        index.chunks(artifact).remove_others(keep=[PROJECTION])
        return PatchesContent(
            rows=index.rows,
            model=self.preparation.config.features.model,
            weights=str(features.network_inputs(self.preparation)["weights"]),
            grid=_square(self.preparation.config)[1],
            steps=tuple(load_file(artifact.path(PROJECTION))["step"].tolist()),
            ingest=index.manifest.digest,
        )
