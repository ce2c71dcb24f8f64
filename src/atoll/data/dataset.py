"""The reader for training: batches from shards, in a shuffled order that needs no saved state.

    shards = Shards.open(run, [3])                       # one cluster; several for a router or a dense model
    for batch in shards.stream(batch_size=256, seed=0, start=steps * 256, rank=rank, world_size=world_size):
        x0 = shards.latents(batch, seed=0, position=position)

The image at position p of the stream is `shuffled(p mod n)` of epoch p div n, for n images. Ranks take slices of one
global batch, so the global batches do not depend on the number of processes. Training resumes at any position, since
the position determines everything that follows. Files are memory-mapped: they are read on access, and processes share
the system's page cache.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS, ShardsContent
from atoll.data.chunks import prefetch
from atoll.data.shuffle import shuffled
from atoll.data.stages.latents import MIRRORED, Statistics
from atoll.flow import rng

LATENT_STREAM = 11
"""Random stream for samples of the autoencoder's posterior. Each use of randomness has its own number."""
FLIP_STREAM = 15
"""Random stream of the choice between an image and its mirror image."""
# A network that is trained on several clusters needs one meaning of latents, text and labels for all of them.
_SAME_EVERYWHERE = ("labels", "latents", "statistics", "text", "fingerprint", "flip", "patches")


@dataclass(frozen=True)
class Batch:
    """A batch of N encoded images."""

    index: Tensor
    """Numbers of the images in the shards (N,)."""
    cluster: Tensor
    label: Tensor
    """Class indices (N,); -1 for an image without a label."""
    mean: Tensor
    """Mean of the autoencoder's posterior (N, C, H, W)."""
    std: Tensor | None
    """Standard deviation of the posterior (N, C, H, W); None if the autoencoder has no posterior."""
    text: Tensor | None
    """Token states (N, max_tokens, D), zero in the padding; like `mask` and `pooled`, None in a run without text."""
    mask: Tensor | None
    """Whether each token is real (N, max_tokens)."""
    pooled: Tensor | None
    """Pooled text (N, D')."""
    patches: Tensor | None = None
    """Patch features (N, grid, grid, D), 8-bit integers in the steps of the manifest; None unless requested."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on another device."""
        required = (part.to(device) for part in (self.index, self.cluster, self.label, self.mean))
        parts = (self.std, self.text, self.mask, self.pooled, self.patches)
        optional = (part if part is None else part.to(device) for part in parts)
        return Batch(*required, *optional)


class _File:
    """One memory-mapped shard file."""

    def __init__(self, path: Path, cluster: int) -> None:
        self.path, self.cluster = path, cluster
        self.tensors = load_file(path)
        self.rows = len(self.tensors["label"])

    @cached_property
    def starts(self) -> Tensor:
        """Index of the first token of each caption in `tokens`."""
        lengths = self.tensors["lengths"].long()
        return lengths.cumsum(0) - lengths


class Shards:
    """The images of one or more clusters, numbered from 0 in the order of clusters, files and rows."""

    def __init__(self, artifacts: list[Artifact], split: Literal["train", "held-out"], verify: bool = False) -> None:
        manifests = [artifact.open(SHARDS, verify=verify) for artifact in artifacts]
        contents = [SHARDS.parse(made, own.folder) for own, made in zip(artifacts, manifests, strict=True)]
        _check_alike(artifacts, contents)
        self.content = contents[0]
        self.statistics = Statistics.of(self.content.statistics)
        self.artifacts = artifacts
        self._files = [
            _File(artifact.path(file), content.cluster)
            for artifact, manifest, content in zip(artifacts, manifests, contents, strict=True)
            for file in sorted(manifest.files)
            if file.startswith(f"{split}-") and file.endswith(".safetensors")
        ]
        self._ends = np.cumsum([file.rows for file in self._files], dtype=np.int64)

    @classmethod
    def open(
        cls,
        run: Path | str,
        clusters: list[int],
        split: Literal["train", "held-out"] = "train",
        *,
        verify: bool = False,
    ) -> "Shards":
        """Open the shards of some clusters of a run; with `verify`, check the SHA-256 of every file."""
        return cls([Artifact(Path(run), layout.shards(cluster)) for cluster in clusters], split, verify)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def cluster_sizes(self) -> list[int]:
        """Return the number of images of each open cluster, by cluster index."""
        sizes: dict[int, int] = {}
        for file in self._files:
            sizes[file.cluster] = sizes.get(file.cluster, 0) + file.rows
        return [sizes[cluster] for cluster in sorted(sizes)]

    def cluster_ranges(self) -> dict[int, range]:
        """Return the image numbers of each cluster, which are consecutive. Clusters without images are omitted."""
        found: dict[int, range] = {}
        for file, end in zip(self._files, self._ends.tolist(), strict=True):
            if file.rows:
                first = found[file.cluster].start if file.cluster in found else end - file.rows
                found[file.cluster] = range(first, end)
        return found

    def latents(self, batch: Batch, *, seed: int, position: rng.Positions) -> Tensor:
        """Return x0 (N, C, H, W): normalized samples of the autoencoder's posterior.

        Each sample is a function of the seed and the position of its image in the stream, so it does not depend on the
        batch size. `position` is that of the first image of the batch, or an array (N,) of all positions.
        """
        latents = batch.mean.float()
        if batch.std is not None:
            noise = rng.normal(tuple(latents.shape), seed=seed, stream=LATENT_STREAM, first=position)
            latents = latents + batch.std.float() * noise.to(latents.device)
        return self.statistics.normalize(latents)

    def draw(self, positions: np.ndarray[Any, Any], seed: int, *, patches: bool = False) -> Batch:
        """Return the images at some positions of the training stream; with `data.flip`, half of them mirrored.

        Whether an image is mirrored is a function of the seed and its position in the stream.
        """
        mirrored = None
        if self.content.flip:
            mirrored = rng.uniform(len(positions), seed=seed, stream=FLIP_STREAM, first=positions) < 0.5
        return self.read(self.order(positions, seed), mirrored, patches=patches)

    def read(self, indices: np.ndarray[Any, Any], mirrored: Tensor | None = None, *, patches: bool = False) -> Batch:
        """Return the images with these numbers, in this order; mirrored where `mirrored` (N,) is true."""
        # Images are read file by file, and then brought back into the requested order by `restore`.
        wanted = torch.from_numpy(np.asarray(indices).astype(np.int64))
        owner = np.searchsorted(self._ends, wanted.numpy(), side="right")
        slots, parts = [], []
        for number in np.unique(owner):
            file = self._files[number]
            mine = torch.from_numpy(np.flatnonzero(owner == number))
            rows = wanted[mine] - int(self._ends[number]) + file.rows
            slots.append(mine)
            parts.append(self._rows(file, rows, None if mirrored is None else mirrored[mine], patches=patches))
        restore = torch.cat(slots).argsort()
        joined = {key: torch.cat([part[key] for part in parts])[restore] for key in parts[0]}
        optional = {key: joined.get(key) for key in ("std", "text", "mask", "pooled", "patches")}
        return Batch(wanted, joined["cluster"], joined["label"], joined["mean"], **optional)

    def _rows(self, file: _File, rows: Tensor, mirrored: Tensor | None, *, patches: bool) -> dict[str, Tensor]:
        wanted = ("mean", "std", "pooled", *(("patches",) if patches else ()))
        part = {key: file.tensors[key][rows] for key in file.tensors if key in wanted}
        if "patches" in part and mirrored is not None:
            # Exact: with data.flip the stored features are those of a symmetric extractor.
            part["patches"][mirrored] = part["patches"][mirrored].flip(2)
        for key in [] if mirrored is None else {"mean", "std"} & part.keys():
            latents = file.tensors.get(f"{key}{MIRRORED}")
            # Pixels of the mirror image are not stored: they are the mirrored pixels.
            part[key][mirrored] = part[key][mirrored].flip(-1) if latents is None else latents[rows[mirrored]]
        part["label"] = file.tensors["label"][rows].long()
        part["cluster"] = torch.full((len(rows),), file.cluster)
        if "tokens" in file.tensors:
            # Shards store the real tokens of all captions in sequence, without padding (tokens, D). The batch gets
            # them as (N, max_tokens, D).
            lengths = file.tensors["lengths"][rows].long()
            assert self.content.text is not None
            slots = torch.arange(self.content.text.max_tokens)
            part["mask"] = slots < lengths[:, None]
            # Padding reads the first token of the caption, so that no index is out of range, and is then set to zero.
            at = file.starts[rows][:, None] + slots * part["mask"]
            part["text"] = file.tensors["tokens"][at] * part["mask"][..., None]
        return part

    def stream(
        self, batch_size: int, seed: int, start: int = 0, *, rank: int = 0, world_size: int = 1, workers: int = 1
    ) -> Iterator[Batch]:
        """Yield batches without end, from position `start` on: this rank's slice of each global batch of `batch_size`.

        `workers` threads read ahead of the consumer.
        """
        slices = self.positions(batch_size, start, rank=rank, world_size=world_size)
        return prefetch(slices, lambda part: self.draw(part, seed), workers)

    def positions(
        self, batch_size: int, start: int = 0, *, rank: int = 0, world_size: int = 1
    ) -> Iterator[np.ndarray[Any, Any]]:
        """Return the positions of the batches of `stream`, without end."""
        if batch_size % world_size or not 0 <= rank < world_size:
            raise ValueError(f"a batch of {batch_size} cannot be divided: rank {rank}, world size {world_size}")
        if not len(self):
            raise AtollError(f"{self.artifacts[0].folder} has no image in this split; change data.val_fraction")
        size = batch_size // world_size

        starts = itertools.count(start + rank * size, batch_size)
        return (np.arange(first, first + size, dtype=np.uint64) for first in starts)

    def order(self, positions: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
        """Return the number of the image at each position of the stream."""
        # A batch may cross the end of an epoch; each epoch has its own shuffle.
        count = np.uint64(len(self))
        epochs, within = positions // count, positions % count
        result = np.empty_like(within)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = shuffled(within[here], len(self), seed, epoch=int(epoch))
        return result

    def ids(self, indices: list[int] | None = None) -> list[str]:
        """Return the ids of the images with these numbers, or of all images."""
        return self._column("id", indices)

    def captions(self, indices: list[int] | None = None) -> list[str]:
        """Return the captions of the images with these numbers, or of all images."""
        return self._column("caption", indices)

    def _column(self, name: str, indices: list[int] | None) -> list[str]:
        tables = [pq.read_table(file.path.with_suffix(".parquet"), columns=[name])[name] for file in self._files]
        values = [value for table in tables for value in table.to_pylist()]
        return values if indices is None else [values[index] for index in indices]


def _check_alike(artifacts: list[Artifact], contents: list[ShardsContent]) -> None:
    """Raise `AtollError` unless all clusters come from the same preparation."""
    for artifact, content in zip(artifacts, contents, strict=True):
        for key in _SAME_EVERYWHERE:
            if getattr(content, key) != getattr(contents[0], key):
                raise AtollError(f"{artifact.folder} and {artifacts[0].folder} differ in {key}; prepare them together")
