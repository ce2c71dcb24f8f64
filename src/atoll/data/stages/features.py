"""The features that the clustering uses: one unit vector per image, from a frozen vision network."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.config_sections import ClustersSection
from atoll.core.manifests import FEATURES, FeaturesContent
from atoll.core.sizes import Size
from atoll.data.chunks import Chunks
from atoll.data.stages import ingest
from atoll.data.stages.stage import EncoderStage, PassEncoder, Preparation
from atoll.encoders import efficientnet
from atoll.encoders.pretrained import fingerprint, model_folder
from atoll.encoders.vision import open_extractor

NAME = layout.FEATURES


def needed(config: ClustersSection, classes: int | None) -> bool:
    """Return whether the partition uses features. If the number of classes is unknown (None), return True."""
    if config.count == 1 or config.method == "random":
        return False
    return config.method == "features" or classes is None or classes > config.count


def network_inputs(preparation: Preparation) -> dict[str, object]:
    """Return the images and the network that features are made from."""
    settings = preparation.config.features
    weights = efficientnet.weights_file() if settings.model == "efficientnet-lite0" else model_folder(settings.model)
    chosen = settings.model_dump(include={"model", "resolution", "batch_size"})
    return {"ingest": ingest.identity(preparation), **chosen, "weights": fingerprint(weights)}


class FeaturesStage(EncoderStage):
    """One unit vector per image."""

    name, kind, folder = "features", FEATURES, NAME

    def uses(self) -> str:
        return self.preparation.config.features.model

    def unneeded(self) -> bool:
        index, listing = self.preparation.index, self.preparation.listing
        # Before the index is done, the classes are those of all listed images, readable or not.
        classes = len(index.labels) if index else listing.labels if listing else None
        return not needed(self.preparation.config.clusters, classes)

    def made_from(self) -> Inputs:
        return network_inputs(self.preparation)

    def open_encoder(self) -> PassEncoder:
        config = self.preparation.config.features
        extractor = open_extractor(config.model, config.resolution)
        return PassEncoder(
            encode=lambda pixels, _: {"features": extractor(pixels).half()},
            batch_size=config.batch_size,
            input_size=lambda _: Size.square(extractor.side),
            by_size=False,
        )

    def make(self, artifact: Artifact) -> FeaturesContent:
        index = self.preparation.open_index()
        chunks = index.chunks(artifact)
        chunks.remove_others()
        with safe_open(artifact.path(chunks.first_file()), "pt") as first:
            dimensions = first.get_slice("features").get_shape()[1]
        return FeaturesContent(rows=index.rows, dimensions=dimensions, ingest=index.manifest.digest)


def read_chunk(chunks: Chunks, chunk: int) -> Tensor:
    """Return the features (rows, D) of one chunk, as stored (float16)."""
    if not chunks.length(chunk):
        return torch.empty(0, chunks.artifact.read(FEATURES).dimensions, dtype=torch.float16)
    return load_file(chunks.artifact.path(chunks.file(chunk)))["features"]
