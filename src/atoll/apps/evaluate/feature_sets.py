"""Features of real and of generated images, computed once and stored in the run."""

from collections.abc import Callable, Iterator, Sequence
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
from atoll.apps.evaluate.extractors import open_vision, weights_of
from atoll.apps.evaluate.generated import CHUNK, GeneratedSet, rows_by_size
from atoll.apps.evaluate.results import ReferenceSpec
from atoll.core.artifacts import Artifact, ArtifactKind, Content
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.names import Split
from atoll.core.sizes import Size
from atoll.data.chunks import Chunks, prefetch
from atoll.data.images import BadImage, fit, open_image
from atoll.data.index import Index
from atoll.data.shuffle import shuffled
from atoll.data.sources.source import SourceImage
from atoll.data.stages.ingest import open_configured
from atoll.encoders.pretrained import Pixels
from atoll.encoders.vision import BATCH


class FeatureSetContent(Content):
    """The manifest of a feature set: its shape, and how the features were computed."""

    rows: int
    dimensions: int
    protocol: dict[str, str]
    """Name, weights and resize of the network, as in `results.Protocol`."""


FEATURES = ArtifactKind("evaluation features", FeatureSetContent)
_STATISTICS = "statistics.safetensors"

Batches = Iterator[tuple[int, Sequence[Pixels]]]
"""Batches of images, each with the number of its chunk."""

# One feature network serves many sets: open each once.
opened = cache(open_vision)


@dataclass(frozen=True)
class FeatureSet:
    """Stored features of some images from one network."""

    artifact: Artifact

    def content(self) -> FeatureSetContent:
        """Read shape and protocol."""
        return self.artifact.read(FEATURES)

    def digest(self) -> str:
        """Return the digest of the artifact's manifest."""
        return self.artifact.open(FEATURES).digest

    def features(self) -> Tensor:
        """Read the features (N, D)."""
        return _features(self.artifact)

    def gaussian(self) -> Gaussian:
        """Read mean and covariance."""
        stored = load_file(self.artifact.path(_STATISTICS))
        return Gaussian(stored["mean"], stored["root"])

    def __len__(self) -> int:
        return self.content().rows


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

        def batches(missing: list[int]) -> Batches:
            return ((chunk, pixels) for chunk, pixels in enumerate(images.chunks()) if chunk in missing)

        _fill(artifact, f"features of {images.label}", len(images), vision=vision, batches=batches)
    return FeatureSet(artifact)


def _fill(artifact: Artifact, title: str, rows: int, *, vision: str, batches: Callable[[list[int]], Batches]) -> None:
    """Compute the missing chunks of features from batches of images, add mean and covariance, and commit."""
    chunks, network = Chunks(artifact, rows, CHUNK), opened(vision)
    missing = chunks.missing()

    def features() -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        for chunk, images in batches(missing):
            yield chunk, len(images), {"features": rows_by_size(lambda part, _: network(part), images)}

    chunks.write_batches(title, missing, features())
    files = [artifact.path(chunks.file(chunk)) for chunk in range(chunks.count)]
    gaussian = Gaussian.of(torch.cat([load_file(file)["features"] for file in files]))
    artifact.write_tensors(_STATISTICS, {"mean": gaussian.mean, "root": gaussian.root})
    artifact.commit(FeatureSetContent(rows=rows, dimensions=len(gaussian.mean), protocol=network.protocol))


@dataclass(frozen=True, eq=False)
class Reference(FeatureSet):
    """Features of real images. `reference_features` computes and stores them."""

    vision: str
    index: Index
    rows: "np.ndarray[Any, Any]"
    """The chosen images in the index."""
    about: ReferenceSpec
    made_from: dict[str, object]

    @classmethod
    def of(cls, run: Path, config: Config, split: Split, *, num_real: int, vision: str) -> "Reference":
        """Choose `num_real` images of a split, always the same ones; all if there are fewer."""
        index = Index.open(run)
        chunks = range(len(index.lengths))
        mine = [np.array([s == split for s in index.read(chunk, ["split"])["split"]]) for chunk in chunks]
        rows = np.flatnonzero(np.concatenate(mine))
        if not len(rows):
            raise AtollError(
                f"the {split} split has no images to compare with; set data.val_fraction, or choose the other "
                "--reference"
            )
        # The first images of a fixed shuffle. Ascending order reads the source front to back.
        order = shuffled(np.arange(min(num_real, len(rows)), dtype=np.uint64), len(rows), seed=0, epoch=0)
        rows = np.sort(rows[order.astype(np.int64)])
        about = ReferenceSpec(split=split, num_images=len(rows), resolution=config.data.resolution)
        made_from = {"ingest": index.manifest.digest, **dict(about), "extractor": vision, "weights": weights_of(vision)}
        artifact = keyed(run, "reference", f"{split}-{len(rows)}-{_short(vision)}", made_from=made_from)
        return cls(artifact, vision, index, rows, about, made_from)

    def dimensions(self) -> int:
        """Return the dimensions of the features, from those of a black image if none are stored."""
        if self.artifact.manifest() is not None:
            return self.content().dimensions
        return opened(self.vision)(np.zeros((1, 64, 64, 3), np.uint8)).shape[1]


def reference_features(run: Path, config: Config, split: Split, *, num_real: int, vision: str) -> Reference:
    """Return the features of `num_real` images of a split, always the same ones; of all if there are fewer."""
    reference = Reference.of(run, config, split, num_real=num_real, vision=vision)
    artifact, index, rows = reference.artifact, reference.index, reference.rows
    if artifact.begin(FEATURES, reference.made_from) is None:

        def samples(missing: list[int]) -> Iterator[tuple[SourceImage, Size]]:
            wanted = [rows[chunk * CHUNK : (chunk + 1) * CHUNK] for chunk in missing]
            by_chunk = index.by_chunk(np.concatenate(wanted) if wanted else np.array([], dtype=np.int64))
            for chunk, listed in index.source_images(open_configured(config.data), list(by_chunk)):
                sizes = index.sizes(chunk)
                yield from ((listed[row], sizes[row]) for row in by_chunk[chunk])

        def batches(missing: list[int]) -> Batches:
            # Decoded ahead in threads. Batches end at chunk boundaries, so an interrupted job that resumes computes the
            # same batches and the same bits.
            images = prefetch(samples(missing), lambda pair: _pixels(*pair), config.data.workers)
            for chunk in missing:
                left = len(rows[chunk * CHUNK : (chunk + 1) * CHUNK])
                while left:
                    batch = list(islice(images, min(BATCH, left)))
                    left -= len(batch)
                    yield chunk, batch

        title = f"features of real images ({split}, {_short(vision)})"
        _fill(artifact, title, len(rows), vision=vision, batches=batches)
    return reference


def _pixels(sample: SourceImage, size: Size) -> Pixels:
    """Decode an image, fitted to its size in the run."""
    try:
        return np.asarray(fit(open_image(sample.read(), [size]), size))
    except BadImage as bad:
        raise AtollError(
            f"the source changed since ingest: {sample.id!r} was a valid image, now: {bad.reason}"
        ) from bad


def _short(vision: str) -> str:
    return Path(vision.partition(":")[0]).name
