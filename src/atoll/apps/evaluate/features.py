"""Features of real and of generated images, computed once and stored in the run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.apps.evaluate.cache import keyed
from atoll.apps.evaluate.distances import Gaussian
from atoll.apps.evaluate.extractors import BATCH, open_vision, weights_of
from atoll.apps.evaluate.generated import CHUNK, GeneratedSet, rows_by_size
from atoll.apps.evaluate.results import ReferenceSpec, Split, VisionProtocol
from atoll.core.artifacts import Artifact, Content, Kind
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.data.chunks import Chunks, prefetch
from atoll.data.images import BadImage, fit, open_image
from atoll.data.index import Index
from atoll.data.shuffle import shuffled
from atoll.data.sources.base import Source, SourceImage
from atoll.data.stages.ingest import open_configured
from atoll.encoders.pretrained import Pixels
from atoll.encoders.vision import Vision


class FeaturesContent(Content):
    """The manifest of a feature set: its shape, and how the features were computed."""

    rows: int
    dimensions: int
    protocol: VisionProtocol


FEATURES = Kind("evaluation features", FeaturesContent)
_STATISTICS = "statistics.safetensors"

# One feature network serves many sets: open each once.
opened = cache(open_vision)


@dataclass(frozen=True)
class FeatureSet:
    """Stored features of some images from one network."""

    artifact: Artifact
    content: FeaturesContent
    digest: str
    """The digest of the artifact's manifest."""

    def features(self) -> Tensor:
        """Read the features (N, D)."""
        return _features(self.artifact)

    def gaussian(self) -> Gaussian:
        """Read mean and covariance."""
        stored = load_file(self.artifact.path(_STATISTICS))
        return Gaussian(stored["mean"], stored["root"])

    def __len__(self) -> int:
        return self.content.rows


@dataclass(frozen=True)
class Reference(FeatureSet):
    """Features of real images."""

    about: ReferenceSpec


# Four sets: generated and real images in two feature networks. 10,000 Inception features of 2048 float32 are 82 MB.
@lru_cache(maxsize=4)
def _features(artifact: Artifact) -> Tensor:
    files = sorted(file for file in artifact.open(FEATURES).files if file != _STATISTICS)
    return torch.cat([load_file(artifact.path(file))["features"] for file in files])


def generated_features(run: Path, images: GeneratedSet, vision: str) -> FeatureSet:
    """Return the features of generated images, computed now or before."""
    made_from = {"images": images.digest(), "extractor": vision, "weights": weights_of(vision)}
    artifact = keyed(run, "features", f"{images.label}-{_short(vision)}", made_from=made_from)
    if artifact.begin(FEATURES, made_from) is None:
        chunks = Chunks(artifact, len(images), CHUNK)
        missing = chunks.missing()
        todo = set(missing)
        encoded = ((c, len(p), _features_of(opened(vision), p)) for c, p in enumerate(images.chunks()) if c in todo)
        chunks.fill(f"features of {images.label}", missing, encoded)
        _commit(artifact, chunks, opened(vision))
    return FeatureSet(artifact, artifact.read(FEATURES), artifact.open(FEATURES).digest)


@dataclass(frozen=True)
class ReferencePlan:
    """Which real images a reference has, and where its features are stored, before they are computed."""

    vision: str
    index: Index
    rows: "np.ndarray[Any, Any]"
    about: ReferenceSpec
    artifact: Artifact
    made_from: dict[str, object]

    @classmethod
    def of(cls, run: Path, config: Config, split: Split, *, num_real: int, vision: str) -> "ReferencePlan":
        """Choose `num_real` images of a split, always the same ones; all if there are fewer."""
        index = Index.open(run)
        rows = _chosen(index, split, num_real)
        about = ReferenceSpec(split=split, num_images=len(rows), resolution=config.data.resolution)
        made_from = {"ingest": index.manifest.digest, **dict(about), "extractor": vision, "weights": weights_of(vision)}
        artifact = keyed(run, "reference", f"{split}-{len(rows)}-{_short(vision)}", made_from=made_from)
        return cls(vision, index, rows, about, artifact, made_from)

    def dimensions(self) -> int:
        """Return the dimensions of the features, from those of a black image if none are stored."""
        if self.artifact.manifest() is not None:
            return self.artifact.read(FEATURES).dimensions
        return opened(self.vision)(np.zeros((1, 64, 64, 3), np.uint8)).shape[1]


def reference_features(run: Path, config: Config, split: Split, *, num_real: int, vision: str) -> Reference:
    """Return the features of `num_real` images of a split, always the same ones; of all if there are fewer."""
    plan = ReferencePlan.of(run, config, split, num_real=num_real, vision=vision)
    artifact, rows = plan.artifact, plan.rows
    if artifact.begin(FEATURES, plan.made_from) is None:
        chunks = Chunks(artifact, len(rows), CHUNK)
        missing = chunks.missing()
        source = open_configured(config.data)
        images = _read(plan.index, source, [rows[c * CHUNK : (c + 1) * CHUNK] for c in missing], config=config)
        encoded = _encoded(images, opened(vision), chunks, missing=missing)
        chunks.fill(f"features of real images ({split}, {_short(vision)})", missing, encoded)
        _commit(artifact, chunks, opened(vision))
    return Reference(artifact, artifact.read(FEATURES), artifact.open(FEATURES).digest, plan.about)


def _commit(artifact: Artifact, chunks: Chunks, vision: Vision) -> None:
    """Add mean and covariance, and commit."""
    files = [artifact.path(chunks.file(chunk)) for chunk in range(chunks.count)]
    gaussian = Gaussian.of(torch.cat([load_file(file)["features"] for file in files]))
    artifact.write_tensors(_STATISTICS, {"mean": gaussian.mean, "root": gaussian.root})
    protocol = VisionProtocol(**vision.protocol)
    artifact.commit(FeaturesContent(rows=chunks.rows, dimensions=len(gaussian.mean), protocol=protocol))


def _chosen(index: Index, split: Split, count: int) -> "np.ndarray[Any, Any]":
    """Return the rows of the chosen images in the index: the first of a fixed shuffle, in ascending order."""
    chunks = range(len(index.lengths))
    mine = [np.array([s == split for s in index.read(chunk, ["split"])["split"]]) for chunk in chunks]
    rows = np.flatnonzero(np.concatenate(mine))
    if not len(rows):
        raise AtollError(
            f"the {split} split has no images to compare with; set data.val_fraction, or choose the other --reference"
        )
    order = shuffled(np.arange(min(count, len(rows)), dtype=np.uint64), len(rows), seed=0, epoch=0)
    # Ascending order reads the source front to back.
    return np.sort(rows[order.astype(np.int64)])


def _read(index: Index, source: Source, wanted: "list[np.ndarray[Any, Any]]", *, config: Config) -> Iterator[Pixels]:
    """Yield the wanted images in order, fitted to their sizes in the run and decoded ahead in threads."""
    rows = np.concatenate(wanted) if wanted else np.array([], dtype=np.int64)
    by_chunk = index.by_chunk(rows)

    def samples() -> Iterator[tuple[SourceImage, Size]]:
        for chunk, listed in index.source_images(source, list(by_chunk)):
            sizes = index.sizes(chunk)
            yield from ((listed[row], sizes[row]) for row in by_chunk[chunk])

    return prefetch(samples(), lambda pair: _pixels(*pair), config.data.workers)


def _pixels(sample: SourceImage, size: Size) -> Pixels:
    try:
        return np.asarray(fit(open_image(sample.read(), [size]), size))
    except BadImage as bad:
        raise AtollError(
            f"the source changed since ingest: {sample.id!r} was a valid image, now: {bad.reason}"
        ) from bad


def _encoded(
    images: Iterator[Pixels], vision: Vision, chunks: Chunks, *, missing: list[int]
) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    # Batches end at chunk boundaries, so an interrupted job that resumes computes the same batches and the same bits.
    for chunk in missing:
        left = chunks.length(chunk)
        while left:
            batch = list(islice(images, min(BATCH, left)))
            left -= len(batch)
            yield chunk, len(batch), _features_of(vision, batch)


def _features_of(vision: Vision, images: Sequence[Pixels]) -> dict[str, Tensor]:
    return {"features": rows_by_size(lambda part, _: vision(part), images)}


def _short(vision: str) -> str:
    return Path(vision.partition(":")[0]).name
