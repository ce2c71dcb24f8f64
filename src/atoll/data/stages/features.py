"""The features that the clustering uses: one unit vector per image, from a frozen vision network."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config_sections import Clusters
from atoll.core.manifests import FEATURES, FeaturesContent
from atoll.core.sizes import Size
from atoll.data.chunks import Chunks, Worker
from atoll.data.stages import ingest
from atoll.data.stages.base import Encoder, Job, Stage
from atoll.data.stages.ingest import Index
from atoll.data.stages.listing import Listing
from atoll.encoders import efficientnet
from atoll.encoders.pretrained import fingerprint, model_folder
from atoll.encoders.vision import open_extractor

NAME = layout.FEATURES


def needed(config: Clusters, classes: int | None) -> bool:
    """Return whether the partition uses features. If the number of classes is unknown (None), return True."""
    if config.count == 1 or config.method == "random":
        return False
    return config.method == "features" or classes is None or classes > config.count


def _unneeded(job: Job) -> str | None:
    # Before the index is done, the classes are those of all listed images, readable or not.
    index, listing = Index.find(job.run), Listing.find(job.run)
    classes = len(index.labels) if index else listing.labels if listing else None
    return None if needed(job.config.clusters, classes) else "the clusters need no features"


def network_inputs(job: Job) -> dict[str, object]:
    """Return the images and the network that features are made from."""
    settings = job.config.features
    weights = efficientnet.weights_file() if settings.model == "efficientnet-lite0" else model_folder(settings.model)
    chosen = settings.model_dump(include={"model", "resolution", "batch_size"})
    return {"ingest": ingest.identity(job), **chosen, "weights": fingerprint(weights)}


def _encoder(job: Job) -> Encoder:
    config = job.config.features
    extractor = open_extractor(config.model, config.resolution)
    return Encoder(
        encode=lambda pixels, _: {"features": extractor.unit(pixels).half()},
        batch_size=config.batch_size,
        input_size=lambda _: Size.square(extractor.side),
        by_size=False,
    )


def _run(job: Job, artifact: Artifact, _: Worker) -> FeaturesContent | None:
    index = Index.open(job.run)
    chunks = index.chunks(artifact)
    if chunks.missing():
        return None
    with safe_open(artifact.path(chunks.first_file()), "pt") as first:
        dimensions = first.get_slice("features").get_shape()[1]
    return FeaturesContent(rows=index.rows, dimensions=dimensions, ingest=index.manifest.digest)


STAGE = Stage(
    name="features",
    kind=FEATURES,
    inputs=(ingest.STAGE,),
    outputs=lambda _: {NAME: {}},
    made_from=network_inputs,
    run=_run,
    uses=lambda config: config.features.model,
    chunks=lambda job: ingest.pass_chunks(job, Artifact(job.run, NAME)),
    encoder=_encoder,
    needs_gpu=True,
    unneeded=_unneeded,
)


def read_chunk(chunks: Chunks, chunk: int) -> Tensor:
    """Return the features (rows, D) of one chunk, as stored (float16)."""
    if not chunks.length(chunk):
        return torch.empty(0, chunks.artifact.read(FEATURES).dimensions, dtype=torch.float16)
    return load_file(chunks.artifact.path(chunks.file(chunk)))["features"]
