"""The patch features that `train.align` aligns experts with: a small grid of vectors for each image.

They are those of the features network: its feature map, resampled to a grid and projected on its first principal
components (PCA), as 8-bit integers with one step for each component. Shards contain them, so training needs no features
network.

The grid is the largest one that divides the sides of the latents by 2 or more and needs at most `SHARE` times the bytes
of the latents. With 64 components that is 4 x 4 for emoji (0.33 times the bytes), 8 x 8 for pixels of 32 x 32 images
(0.67 times), and 16 x 16 for Stable Diffusion's latents of 256 x 256 images (1.00 times).

Components are those of centered features: a mean that all patches have in common says nothing about an image, but would
dominate their cosine similarity. They are fitted to a bounded sample, by the first worker for all workers.

With `data.flip` the features are averaged over an image and its mirror image. A network is not equivariant: on emoji,
the mirrored features of EfficientNet-Lite0 have a cosine similarity of only 0.8 with those of the mirror image. The
averaged ones are exactly mirrored with the image, so the grid is stored once, and mirrored on reading.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.errors import AtollError
from atoll.core.manifests import PATCHES, PatchesContent
from atoll.data.chunks import Worker, prefetch
from atoll.data.sources.base import Source, SourceImage
from atoll.data.stages import features, ingest, latents
from atoll.data.stages.base import Job, Stage
from atoll.data.stages.features import open_extractor
from atoll.data.stages.ingest import Index, Pixels, decode_images, image_batches

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


def _grid(job: Job) -> int:
    chunks = Index.open(job.run).chunks(Artifact(job.run, layout.LATENTS))
    # Mirrored latents do not count, so that the grid does not depend on data.flip.
    stored = load_file(chunks.artifact.path(chunks.file(0)))
    parts = [tensor[0] for name, tensor in stored.items() if latents.MIRRORED not in name]
    return grid_side(parts[0].shape[-1], sum(part.nbytes for part in parts), job.config.features.patch_dimensions)


def unneeded(job: Job) -> str | None:
    """Return why a run has no patch features; None if it has them."""
    return None if job.config.features.patch_dimensions else "features.patch_dimensions is 0"


def _made_from(job: Job) -> Inputs:
    dimensions = job.config.features.patch_dimensions
    flip = {"flip": True} if job.config.data.flip else {}
    return {**features.made_from(job), "dimensions": dimensions, "grid": _grid(job), **flip}


def _open_extract(job: Job, grid: int) -> tuple[Callable[[Pixels], Tensor], int]:
    """Return a function from pixels to patch features (N, grid, grid, C), and the side of its images."""
    extractor = open_extractor(job.config.features.model, job.config.features.resolution)
    extract = extractor.symmetric_patches if job.config.data.flip else extractor.patches
    return partial(extract, grid=grid), extractor.side


def _run(job: Job, artifact: Artifact, worker: Worker) -> PatchesContent | None:
    index, config, grid = Index.open(job.run), job.config.features, _grid(job)
    chunks = index.chunks(artifact)
    if missing := chunks.missing(worker):
        extract, side = _open_extract(job, grid)
        projection = _projection(job, artifact, extract, side=side)
        images = image_batches(
            index, job.source, missing,
            resolution=side, batch_size=config.batch_size, workers=job.config.data.workers,
        )  # fmt: skip
        encoded = ((chunk, len(pixels), {"patches": projection.encode(extract(pixels))}) for chunk, pixels in images)
        chunks.fill("patches", missing, encoded)
    if chunks.missing():
        return None
    made = features.made_from(job)
    steps = load_file(artifact.path(PROJECTION))["step"].tolist()
    return PatchesContent(rows=index.rows, model=config.model, weights=made["weights"], grid=grid, steps=tuple(steps))


def _projection(job: Job, artifact: Artifact, extract: Callable[[Pixels], Tensor], *, side: int) -> Projection:
    """Return the projection of the artifact; fit it if no worker has."""
    if not artifact.path(PROJECTION).is_file():
        config, workers = job.config.features, job.config.data.workers
        sample = _sample(Index.open(job.run), job.source)
        batches = iter(lambda: list(islice(sample, config.batch_size)), [])
        pixels = prefetch(batches, lambda images: decode_images(images, side), workers)
        fitted = Projection.fit((extract(part).flatten(0, 2) for part in pixels), config.patch_dimensions)
        # Several workers may fit it at the same time, on different machines. The first file counts for all of them.
        artifact.create(PROJECTION, save(vars(fitted)))
    return Projection(**load_file(artifact.path(PROJECTION)))


def _sample(index: Index, source: Source) -> Iterator[SourceImage]:
    """Yield at most `FIT_IMAGES` training images, evenly spread."""
    every, seen = -(-index.content.splits["train"] // FIT_IMAGES), 0
    for chunk, images in index.source_images(source, list(range(-(-index.rows // index.chunk)))):
        for image, split in zip(images, index.read(chunk, ["split"])["split"], strict=True):
            if split == "train":
                if seen % every == 0:
                    yield image
                seen += 1


STAGE = Stage(
    name="patches",
    kind=PATCHES,
    inputs=(ingest.STAGE, latents.STAGE),
    outputs=lambda _: {NAME: {}},
    made_from=_made_from,
    run=_run,
    uses=lambda config: f"{config.features.model}, {config.features.patch_dimensions} dimensions",
    chunks=lambda job: Index.open(job.run).chunks(Artifact(job.run, NAME)),
    needs_gpu=True,
    unneeded=unneeded,
)
