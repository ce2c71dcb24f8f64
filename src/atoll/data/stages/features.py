"""What the clustering sees: one unit vector for each picture, from a vision network that stays as it is.

`efficientnet-lite0` comes by pip. For photographs use DINOv2 (`features.model: facebook/dinov2-base`) or any other
vision model of transformers, by its name or as a folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.config_sections import Clusters
from atoll.core.device import device
from atoll.core.errors import AtollError
from atoll.core.manifests import FEATURES, FeaturesContent
from atoll.data.chunks import Chunks, Share
from atoll.data.pretrained import fingerprint, folder_of, load_pretrained, repeatable
from atoll.data.stages import ingest
from atoll.data.stages.base import Job, Stage
from atoll.data.stages.ingest import Index, Pixels, image_batches
from atoll.data.vision import efficientnet

NAME = layout.FEATURES


@dataclass(frozen=True)
class Preprocessing:
    """How a network wants its pictures: the side in pixels, and (pixel - mean) / std with pixels from 0 to 255."""

    side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Extractor:
    """A vision network with its preprocessing: pictures of eight bits in, unit vectors out."""

    def __init__(self, network: nn.Module, preprocessing: Preprocessing) -> None:
        self.device = device()
        self.network = network.to(self.device)
        self.side = preprocessing.side
        self._mean = torch.tensor(preprocessing.mean, device=self.device).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(preprocessing.std, device=self.device).view(1, 3, 1, 1)

    def __call__(self, pixels: Pixels) -> Tensor:
        """Features (N, D) on the processor, of pictures (N, side, side, 3)."""
        # A transposed view of channels-last pixels is what convolutions like best; no copy is made.
        x = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2).float()
        return nn.functional.normalize(self.raw(x), dim=1).cpu()

    def raw(self, x: Tensor) -> Tensor:
        """Features (N, D) as the network gives them, of pixels from 0 to 255 (N, 3, side, side), which are used up."""
        x = x.sub_(self._mean).mul_(self._scale)
        with repeatable():
            features: Tensor = self.network(x)
        return features.float()


def open_extractor(model: str, resolution: int | None = None) -> Extractor:
    """The extractor by its name in the configuration."""
    if model == "efficientnet-lite0":
        same = (127.0,) * 3, (128.0,) * 3
        return Extractor(efficientnet.load(), Preprocessing(resolution or efficientnet.SIDE, *same))
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = folder_of(model)
    network = load_pretrained(AutoModel, folder, use_safetensors=True).eval()
    return Extractor(_Pooled(network), _preprocessing(folder, network.config, resolution))


class _Pooled(nn.Module):
    """One vector from a transformers vision model: what the model itself offers, else its first token."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        answer = self.network.get_image_features(x) if hasattr(self.network, "get_image_features") else self.network(x)
        if isinstance(answer, Tensor):
            return answer
        pooled: Tensor | None = answer.pooler_output
        first: Tensor = answer.last_hidden_state[:, 0]
        return first if pooled is None else pooled.flatten(1)


def _preprocessing(folder: Path, config: Any, resolution: int | None) -> Preprocessing:
    """Read the model's own settings; the picture is cut and resized by Atoll, in one step."""
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        raise AtollError(f"{folder} has no preprocessor_config.json, so mean and std of its pictures are unknown")
    settings = json.loads(file.read_text(encoding="utf-8"))
    size = settings.get("crop_size") or settings.get("size")
    own = size if isinstance(size, int) else (size or {}).get("height") or (size or {}).get("shortest_edge")
    side = resolution or own or getattr(config, "image_size", None)
    if not isinstance(side, int):
        raise AtollError(f"{file} names no size; set features.resolution")
    half = [0.5, 0.5, 0.5]
    mean, std = settings.get("image_mean") or half, settings.get("image_std") or half
    scale = 1 / settings.get("rescale_factor", 1 / 255)
    return Preprocessing(side, _three(mean, scale), _three(std, scale))


def _three(values: list[float], scale: float) -> tuple[float, float, float]:
    red, green, blue = values
    return red * scale, green * scale, blue * scale


def needed(config: Clusters, index: Index | None) -> bool:
    """Return whether a partition uses features at all. Without the index, say yes where it matters."""
    if config.count == 1 or config.method == "random":
        return False
    return config.method == "features" or index is None or len(index.labels) > config.count


def _unneeded(job: Job) -> str | None:
    return None if needed(job.config.clusters, Index.find(job.run)) else "the clusters need no features"


def _made_from(job: Job) -> Inputs:
    settings = job.config.features
    weights = efficientnet.weights_file() if settings.model == "efficientnet-lite0" else folder_of(settings.model)
    chosen = settings.model_dump(include={"model", "resolution", "batch_size"})
    return {"ingest": Index.open(job.run).manifest.digest, **chosen, "weights": fingerprint(weights)}


def _run(job: Job, artifact: Artifact, share: Share) -> FeaturesContent | None:
    index, config = Index.open(job.run), job.config.features
    chunks = index.chunks(artifact)
    if missing := chunks.missing(share):
        extractor = open_extractor(config.model, config.resolution)
        workers = job.config.data.workers
        images = image_batches(
            index, job.source, missing, resolution=extractor.side, batch=config.batch_size, workers=workers
        )
        encoded = ((chunk, len(pixels), {"features": extractor(pixels).half()}) for chunk, pixels in images)
        chunks.fill("features", missing, encoded)
    if chunks.missing():
        return None
    return FeaturesContent(rows=index.rows, dimensions=read_chunk(chunks, 0).shape[1])


STAGE = Stage(
    name="features",
    kind=FEATURES,
    inputs=(ingest.STAGE,),
    outputs=lambda _: {NAME: {}},
    made_from=_made_from,
    run=_run,
    uses=lambda config: config.features.model,
    chunks=lambda job: Index.open(job.run).chunks(Artifact(job.run, NAME)),
    needs_gpu=True,
    unneeded=_unneeded,
)


def read_chunk(chunks: Chunks, chunk: int) -> Tensor:
    """The features of one chunk, as stored (float16)."""
    from safetensors.torch import load_file

    return load_file(chunks.artifact.path(chunks.file(chunk)))["features"]
