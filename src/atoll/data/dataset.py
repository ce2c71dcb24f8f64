"""The reader that training uses: batches out of shards, in an order that needs no state.

    shards = Shards.open(run, [3])                       # one cluster; several for a router or a dense model
    for batch in shards.stream(batch=256, seed=0, start=steps_done * 256, rank=rank, world=world):
        x0 = shards.latents(batch, seed=0, position=position)

Position p of the stream is sample `shuffled(p mod n)` of epoch p div n. Ranks take slices of one global batch, so any
number of processes sees the same batches, and a run that stopped after any number of samples goes on with the next.
Files are mapped into memory: they are read as they are needed, and share the system's cache between processes.
"""

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

from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS, ShardsContent
from atoll.data.chunks import ahead
from atoll.data.shuffle import shuffled
from atoll.data.stages import shards
from atoll.data.stages.latents import Statistics
from atoll.flow import rng

LATENT_STREAM = 11
"""The stream of random numbers for samples of the autoencoder's posterior; each use of randomness has its own."""
_SAME_EVERYWHERE = ("labels", "latents", "statistics", "text", "fingerprint")


@dataclass(frozen=True)
class Batch:
    """Some samples. Text is None in a run without captions; `label` is -1 where a sample has none."""

    index: Tensor
    cluster: Tensor
    label: Tensor
    mean: Tensor
    std: Tensor | None
    text: Tensor | None
    mask: Tensor | None
    pooled: Tensor | None

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        required = (part.to(device) for part in (self.index, self.cluster, self.label, self.mean))
        optional = (part if part is None else part.to(device) for part in (self.std, self.text, self.mask, self.pooled))
        return Batch(*required, *optional)


class _File:
    """One shard file, mapped into memory."""

    def __init__(self, path: Path, cluster: int) -> None:
        self.path, self.cluster = path, cluster
        self.tensors = load_file(path)
        self.rows = len(self.tensors["label"])

    @cached_property
    def starts(self) -> Tensor:
        """Where each caption starts in `tokens`."""
        lengths = self.tensors["lengths"].long()
        return lengths.cumsum(0) - lengths


class Shards:
    """The samples of one or more clusters, numbered from 0 in the order of clusters, files and rows."""

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
        """The shards of some clusters of a run."""
        return cls([Artifact(Path(run), shards.name(cluster)) for cluster in clusters], split, verify)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def cluster_sizes(self) -> list[int]:
        """Samples of each cluster that is open here, in the order of the clusters."""
        sizes: dict[int, int] = {}
        for file in self._files:
            sizes[file.cluster] = sizes.get(file.cluster, 0) + file.rows
        return [sizes[cluster] for cluster in sorted(sizes)]

    def cluster_ranges(self) -> dict[int, range]:
        """Return the numbers of each cluster's images; they are consecutive. A cluster without images is left out."""
        found: dict[int, range] = {}
        for file, end in zip(self._files, self._ends.tolist(), strict=True):
            if file.rows:
                first = found[file.cluster].start if file.cluster in found else end - file.rows
                found[file.cluster] = range(first, end)
        return found

    def latents(self, batch: Batch, *, seed: int, position: int) -> Tensor:
        """Return x0 (batch, C, H, W): a sample of the autoencoder's posterior, normalised.

        The sample is a function of (seed, position of the image), so it does not depend on how images are batched;
        `position` is that of the first.
        """
        latents = batch.mean.float()
        if batch.std is not None:
            noise = rng.normal(tuple(latents.shape), seed=seed, stream=LATENT_STREAM, first=position)
            latents = latents + batch.std.float() * noise.to(latents.device)
        return self.statistics.normalise(latents)

    def read(self, indices: np.ndarray[Any, Any]) -> Batch:
        """The samples with these numbers, in this order."""
        wanted = torch.from_numpy(np.asarray(indices).astype(np.int64))
        owner = np.searchsorted(self._ends, wanted.numpy(), side="right")
        places, parts = [], []
        for number in np.unique(owner):
            file = self._files[number]
            mine = torch.from_numpy(np.flatnonzero(owner == number))
            rows = wanted[mine] - int(self._ends[number]) + file.rows
            places.append(mine)
            parts.append(self._rows(file, rows))
        back = torch.cat(places).argsort()
        joined = {key: torch.cat([part[key] for part in parts])[back] for key in parts[0]}
        optional = {key: joined.get(key) for key in ("std", "text", "mask", "pooled")}
        return Batch(wanted, joined["cluster"], joined["label"], joined["mean"], **optional)

    def _rows(self, file: _File, rows: Tensor) -> dict[str, Tensor]:
        stored = [key for key in file.tensors if key in ("mean", "std", "pooled")]
        part = {key: file.tensors[key][rows] for key in stored}
        part["label"] = file.tensors["label"][rows].long()
        part["cluster"] = torch.full((len(rows),), file.cluster)
        if "tokens" in file.tensors:
            lengths = file.tensors["lengths"][rows].long()
            assert self.content.text is not None
            slots = torch.arange(self.content.text.max_tokens)
            part["mask"] = slots < lengths[:, None]
            # Padding reads the first token of the caption and is then set to zero.
            at = file.starts[rows][:, None] + slots * part["mask"]
            part["text"] = file.tensors["tokens"][at] * part["mask"][..., None]
        return part

    def stream(
        self, batch: int, seed: int, start: int = 0, *, rank: int = 0, world: int = 1, workers: int = 1
    ) -> Iterator[Batch]:
        """Batches without end, from position `start` on: this rank's share of every global batch of `batch` samples."""
        if batch % world or not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} cannot take its share of a batch of {batch}")
        if not len(self):
            raise AtollError(f"{self.artifacts[0].folder}: there is no sample in this split")
        share = batch // world

        def positions() -> Iterator[np.ndarray[Any, Any]]:
            first = start + rank * share
            while True:
                yield np.arange(first, first + share, dtype=np.uint64)
                first += batch

        return ahead(positions(), lambda places: self.read(self.order(places, seed)), workers)

    def order(self, positions: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
        """The number of the sample at each position of the stream."""
        count = np.uint64(len(self))
        epochs, places = positions // count, positions % count
        result = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = shuffled(places[here], len(self), seed, epoch=int(epoch))
        return result

    def ids(self, indices: list[int] | None = None) -> list[str]:
        """Ids of the samples with these numbers; of all of them if none are given."""
        return self._column("id", indices)

    def captions(self, indices: list[int] | None = None) -> list[str]:
        """Captions of the samples with these numbers; of all of them if none are given."""
        return self._column("caption", indices)

    def _column(self, name: str, indices: list[int] | None) -> list[str]:
        tables = [pq.read_table(file.path.with_suffix(".parquet"), columns=[name])[name] for file in self._files]
        values = [value for table in tables for value in table.to_pylist()]
        return values if indices is None else [values[index] for index in indices]


def _check_alike(artifacts: list[Artifact], contents: list[ShardsContent]) -> None:
    """Check that clusters which are read together come from one preparation."""
    for artifact, content in zip(artifacts, contents, strict=True):
        for key in _SAME_EVERYWHERE:
            if getattr(content, key) != getattr(contents[0], key):
                raise AtollError(f"{artifact.folder} and {artifacts[0].folder} differ in {key}; prepare them together")
