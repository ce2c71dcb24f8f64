"""Features of real and of generated images, computed once and stored in the run."""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.apps.evaluate.cache import keyed
from atoll.apps.evaluate.distances import Gaussian
from atoll.apps.evaluate.extractors import open_vision, weights_of
from atoll.apps.evaluate.generated import CHUNK, GeneratedSet, rows_by_size
from atoll.apps.evaluate.results import ReferenceSpec
from atoll.core.artifacts import Artifact, ArtifactKind, Content, sha256_of
from atoll.core.config import Config
from atoll.core.errors import AtollError
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

INCEPTION = 2048
"""Dimensions of the Inception features of published statistics."""

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


def _fill(
    artifact: Artifact,
    title: str,
    rows: int,
    *,
    vision: str,
    batches: Callable[[list[int]], Batches],
    gaussian: Gaussian | None = None,
) -> None:
    """Compute the missing chunks of features from batches of images, add mean and covariance, and commit."""
    chunks, network = Chunks(artifact, rows, CHUNK), opened(vision)
    missing = chunks.missing()

    def features() -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        for chunk, images in batches(missing):
            yield chunk, len(images), {"features": rows_by_size(lambda part, _: network(part), images)}

    if rows:
        chunks.write_batches(title, missing, features())
    files = [artifact.path(chunks.file(chunk)) for chunk in range(chunks.count)]
    gaussian = gaussian or Gaussian.of(torch.cat([load_file(file)["features"] for file in files]))
    artifact.write_tensors(_STATISTICS, {"mean": gaussian.mean, "root": gaussian.root})
    artifact.commit(FeatureSetContent(rows=rows, dimensions=len(gaussian.mean), protocol=network.protocol))


@dataclass(frozen=True, eq=False)
class Reference(FeatureSet):
    """Features of real images: of a split of the run, or of a file. `reference_features` computes and stores them."""

    vision: str
    about: ReferenceSpec
    made_from: dict[str, object]
    batches: Callable[[list[int]], Batches]
    """Yields the images of some chunks."""
    file: Path | None = None
    """A file with mean and covariance, which then count instead of those of the images."""

    @classmethod
    def of(cls, run: Path, config: Config, source: str, *, num_real: int, vision: str) -> "Reference":
        """Choose `num_real` images of a split, always the same ones (all if there are fewer), or open an .npz file."""
        if source.endswith(".npz"):
            return cls._of_file(run, Path(source), vision)
        index = Index.open(run)
        chunks = range(len(index.lengths))
        mine = [np.array([s == source for s in index.read(chunk, ["split"])["split"]]) for chunk in chunks]
        rows = np.flatnonzero(np.concatenate(mine))
        if not len(rows):
            raise AtollError(
                f"the {source} split has no images to compare with; set data.val_fraction, or choose the other "
                "--reference"
            )
        # The first images of a fixed shuffle. Ascending order reads the source front to back.
        order = shuffled(np.arange(min(num_real, len(rows)), dtype=np.uint64), len(rows), seed=0, epoch=0)
        rows = np.sort(rows[order.astype(np.int64)])
        about = ReferenceSpec(source=source, num_images=len(rows), resolution=config.data.resolution)
        made_from = {"ingest": index.manifest.digest, **dict(about), "extractor": vision, "weights": weights_of(vision)}
        artifact = keyed(run, "reference", f"{source}-{len(rows)}-{_short(vision)}", made_from=made_from)

        def images(missing: list[int]) -> Iterator[tuple[SourceImage, Size]]:
            wanted = [rows[chunk * CHUNK : (chunk + 1) * CHUNK] for chunk in missing]
            by_chunk = index.by_chunk(np.concatenate(wanted) if wanted else np.array([], dtype=np.int64))
            for chunk, listed in index.source_images(open_configured(config.data), list(by_chunk)):
                sizes = index.sizes(chunk)
                yield from ((listed[row], sizes[row]) for row in by_chunk[chunk])

        def batches(missing: list[int]) -> Batches:
            # Decoded ahead in threads. Batches end at chunk boundaries, so an interrupted job that resumes computes the
            # same batches and the same bits.
            decoded = prefetch(images(missing), lambda pair: _pixels(*pair), config.data.workers)
            for chunk in missing:
                left = len(rows[chunk * CHUNK : (chunk + 1) * CHUNK])
                while left:
                    batch = list(islice(decoded, min(BATCH, left)))
                    left -= len(batch)
                    yield chunk, batch

        return cls(artifact, vision, about, made_from, batches)

    @classmethod
    def _of_file(cls, run: Path, file: Path, vision: str) -> "Reference":
        """Open mean (`mu`) and covariance (`sigma`) in ADM's layout, with images (`arr_0`) if the file has them.

        pytorch-fid and EDM write the same two names without images; KID, precision and recall need the images.
        """
        if not vision.startswith("inception"):
            raise AtollError(f"{file} has statistics of Inception features; use --extractors inception")
        try:
            with np.load(file) as stored:
                shapes = {name: stored[name].shape for name in ("mu", "sigma")}
                images = stored["arr_0"] if "arr_0" in stored.files else np.zeros((0, 1, 1, 3), np.uint8)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise AtollError(f"{file}: not an .npz file with mu and sigma of Inception features: {error}") from error
        if shapes != {"mu": (INCEPTION,), "sigma": (INCEPTION, INCEPTION)} or images.shape[3:] != (3,):
            raise AtollError(f"{file}: expected mu ({INCEPTION},), sigma ({INCEPTION}, {INCEPTION}) and RGB images")
        about = ReferenceSpec(source=str(file), num_images=len(images), resolution=images.shape[1])
        made_from: dict[str, object] = {"file": sha256_of(file), "extractor": vision, "weights": weights_of(vision)}
        artifact = keyed(run, "reference", f"{file.stem}-{_short(vision)}", made_from=made_from)

        def batches(missing: list[int]) -> Batches:
            for chunk in missing:
                for first in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(images)), BATCH):
                    yield chunk, list(images[first : min(first + BATCH, (chunk + 1) * CHUNK)])

        return cls(artifact, vision, about, made_from, batches, file)

    def dimensions(self) -> int:
        """Return the dimensions of the features, from those of a black image if none are stored."""
        if self.artifact.manifest() is not None:
            return self.content().dimensions
        return opened(self.vision)(np.zeros((1, 64, 64, 3), np.uint8)).shape[1]


def reference_features(run: Path, config: Config, source: str, *, num_real: int, vision: str) -> Reference:
    """Return the features of a reference (`Reference.of`), computed now or before."""
    reference = Reference.of(run, config, source, num_real=num_real, vision=vision)
    if reference.artifact.begin(FEATURES, reference.made_from) is None:
        title, gaussian = f"features of real images ({Path(source).name}, {_short(vision)})", None
        if reference.file:
            with np.load(reference.file) as stored:
                gaussian = Gaussian.from_covariance(*(torch.from_numpy(stored[name]) for name in ("mu", "sigma")))
        _fill(
            reference.artifact,
            title,
            reference.about.num_images,
            vision=vision,
            batches=reference.batches,
            gaussian=gaussian,
        )
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
