"""The shapes of latents, text and classes: of prepared data, or predicted from a configuration.

Latents may have several sizes. FLOPs are those of the mean image, memory is that of the largest one.

A dry run estimates costs before the data is prepared. The shapes then follow from the names of the autoencoder and the
text encoder, or from the config.json of a local folder. No weights are read and nothing is downloaded.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS, DataSpec, ShardsContent
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.encoders.autoencoder import PUBLISHED_LATENTS, latent_shapes
from atoll.encoders.hub import is_hub_name


class TextShape(NamedTuple):
    """The maximal number of tokens of a caption, and the widths of its tokens and of its pooled vector."""

    max_tokens: int
    dimensions: int
    pooled: int


TEXT: dict[str, tuple[int, int]] = {
    "minilm": (384, 384),
    "openai/clip-vit-base-patch32": (512, 512),
    "openai/clip-vit-large-patch14": (768, 768),
    "google/t5-v1_1-large": (1024, 1024),
    "google/t5-v1_1-xl": (2048, 2048),
    "google/t5-v1_1-xxl": (4096, 4096),
}
"""Widths of the tokens and of the pooled vector of text encoders by name, from their published configurations."""


@dataclass(frozen=True)
class DataShapes:
    """The shapes that determine the cost of a network: latents (C, H, W), text, and class names."""

    latents: tuple[int, ...]
    """Shape of the default size."""
    text: TextShape | None
    labels: tuple[str, ...]
    images: tuple[tuple[Size, int], ...] = ()
    """Number of images of each size of the latents; empty if there is one size."""

    @classmethod
    def of(cls, data: DataSpec, images: dict[Size, int] | None = None) -> "DataShapes":
        """Return the shapes of prepared data; without the number of images of each size, all have the default one."""
        text, latents = data.text, data.latents
        shape = None if text is None else TextShape(text.max_tokens, text.dimensions, text.pooled or 0)
        sizes = [Size(*size) for size in latents.sizes or ()]
        counts = {sizes[0]: 1} if images is None and sizes else images or {}
        return cls(latents.shape, shape, data.labels, tuple((size, counts.get(size, 0)) for size in sizes))

    def of_size(self, size: Size) -> "DataShapes":
        """Return the shapes of the images of one size."""
        return replace(self, latents=(self.latents[0], size.height, size.width), images=())

    @property
    def by_size(self) -> tuple[tuple["DataShapes", int], ...]:
        """The shapes of each size, with the number of its images."""
        return tuple((self.of_size(size), count) for size, count in self.images) or ((self, 1),)

    @property
    def largest(self) -> tuple[int, ...]:
        """Channels, height and width of the largest latents."""
        return max((shapes.latents for shapes, _ in self.by_size), key=math.prod)

    @property
    def side(self) -> int:
        """The side of a square with about as many elements as the default size, for a network's positions."""
        # A multiple of what divides both sides, hence of the patch.
        _, height, width = self.latents
        unit = math.gcd(height, width)
        return round(math.sqrt(height * width) / unit) * unit

    @classmethod
    def expected(cls, config: Config) -> "DataShapes":
        """Predict the shapes from a configuration, before the data is prepared."""
        autoencoder, encoder = config.latents.autoencoder, config.text.encoder
        if is_hub_name(autoencoder) and autoencoder not in PUBLISHED_LATENTS:
            raise AtollError(
                f"the latents' shape cannot be predicted, because {autoencoder} is not a folder; prepare the data first"
            )
        latents = latent_shapes(autoencoder, Size.square(config.data.resolution))["mean"]
        widths = TEXT[encoder] if encoder in TEXT else None if encoder == "none" else _widths(Path(encoder))
        # As many classes as the networks of the configuration have.
        fields = [choice for choice in config.networks.values() if isinstance(choice, dict)]
        classes = max((own.get("num_classes", 0) for own in fields), default=0)
        labels = tuple(f"class {number}" for number in range(classes))
        return cls(latents, widths and TextShape(config.text.max_tokens, *widths), labels)


def _widths(encoder: Path) -> tuple[int, int]:
    """Read the widths of tokens and pooled vector from the config.json of a text encoder."""
    file = encoder / "config.json"
    if not file.is_file():
        raise AtollError(
            f"the text's width cannot be predicted, because {encoder} is not a folder with a config.json; prepare "
            "the data first"
        )
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AtollError(f"{file} is not JSON: {error}") from error
    settings = settings.get("text_config", settings)
    # d_model of T5, hidden_size of the others. The pooled vector is a token's state or the mean of all tokens.
    width = settings.get("d_model") or settings.get("hidden_size")
    if not isinstance(width, int):
        raise AtollError(
            f"the config.json of {encoder} does not contain the width of its tokens; prepare the data first"
        )
    return width, width


@dataclass(frozen=True)
class PreparedData:
    """The data of a job, from the manifests of its shards."""

    content: ShardsContent
    images: int
    """Number of training images."""
    digests: tuple[str, ...]
    """Digests of the shards' manifests."""
    by_size: dict[Size, int]
    """Number of training images of each size of the latents; empty if there is one size."""

    @classmethod
    def read(cls, run: Path, clusters: tuple[int, ...]) -> "PreparedData | None":
        """Read the manifests of the shards; return None if the data is not prepared."""
        artifacts = [Artifact(run, layout.shards(cluster)) for cluster in clusters]
        if artifacts[0].manifest() is None:
            return None
        manifests = [artifact.open(SHARDS) for artifact in artifacts]
        contents = [SHARDS.parse(made, own.folder) for own, made in zip(artifacts, manifests, strict=True)]
        images = sum(content.rows["train"] for content in contents)
        # Manifests do not count images by size. The headers of the files do, and only a run with several needs them.
        by_size = Shards(artifacts, "train").image_counts() if contents[0].latents.sizes else {}
        return cls(contents[0], images, tuple(manifest.digest for manifest in manifests), by_size)
