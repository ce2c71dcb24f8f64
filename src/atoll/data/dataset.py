"""The reader for training: batches from shards, in a shuffled order that needs no saved state.

    shards = Shards.open(run, [3])                       # one cluster; several for a router or a dense model
    for positions in shards.positions(256, start=steps * 256, rank=rank, world_size=world_size):
        batch = shards.draw(positions, seed=0, batch_size=256)
        x0 = shards.latents(batch, seed=0, position=positions)

The image at position p of the stream is `shuffled(p mod n)` of epoch p div n, for n images. If the images have several
sizes, each size has such a stream of its own, and a batch takes the next images of one size (`shuffle.py`). Ranks
take slices of one global batch, so the global batches do not depend on the number of processes. Training resumes at any
position, since the position determines everything that follows. Files are memory-mapped: they are read on access, and
processes share the system's page cache.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError, first_line
from atoll.core.manifests import SHARDS, ShardsContent
from atoll.core.networks import BaseConfig
from atoll.core.sizes import Size
from atoll.data.chunks import MIRRORED
from atoll.data.shuffle import BatchOrder, Indices, shuffled
from atoll.encoders.autoencoder import Statistics
from atoll.flow import rng
from atoll.nets.arguments import ARGUMENT, SHAPE, SHARED, STRUCTURE, ArgumentTable, unflatten

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
    table: ArgumentTable | None = None
    """The arguments of a base network: row 0 is the null condition, row n + 1 the caption of image n."""
    patches: Tensor | None = None
    """Patch features (N, rows, columns, D), 8-bit integers in the steps of the manifest; None unless requested."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on another device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(self, **moved)


class _File:
    """One memory-mapped shard file."""

    def __init__(self, path: Path, cluster: int) -> None:
        self.path, self.cluster = path, cluster
        try:
            self.tensors = load_file(path)
            self.rows = len(self.tensors["label"])
            self.size = Size(*self.tensors["mean"].shape[2:])
        except (SafetensorError, KeyError, TypeError) as error:
            raise AtollError(f"{path} is not a shard: {first_line(error)}; prepare or download it again") from error

    @cached_property
    def starts(self) -> Tensor:
        """Index of the first token of each caption in `tokens`."""
        lengths = self.tensors["lengths"].long()
        return lengths.cumsum(0) - lengths

    @cached_property
    def _arguments(self) -> dict[str, tuple[Tensor, ...]]:
        """The arguments of a base network for each caption, by path, flat."""
        shapes = {name: part for name, part in self.tensors.items() if name.startswith(SHAPE)}
        paths = {name.removeprefix(SHAPE): part.prod(1).tolist() for name, part in shapes.items()}
        return {path: torch.split(self.tensors[ARGUMENT + path], sizes) for path, sizes in paths.items()}

    def arguments(self, caption: int) -> dict[str, Tensor]:
        """Return the arguments of one caption by path."""
        return {
            path: parts[caption].reshape(self.tensors[SHAPE + path][caption].tolist())
            for path, parts in self._arguments.items()
        }

    @cached_property
    def last_captions(self) -> Tensor:
        """Index of the last caption of each image."""
        return self.tensors["captions"].long().cumsum(0) - 1

    @cached_property
    def weights(self) -> Tensor:
        """Sum of the weights of all captions up to each one."""
        return self.tensors["weights"].double().cumsum(0)

    def captions(self, rows: Tensor, draws: Tensor | None) -> Tensor:
        """Return the index of one caption of each of these images: by a draw from [0, 1) for each, or the first."""
        if "captions" not in self.tensors:
            return rows
        last = self.last_captions[rows]
        first = last - self.tensors["captions"][rows].long() + 1
        if draws is None:
            return first
        # The inverse of the cumulative distribution of the image's captions, a part of that of the whole file.
        below = self.weights[first] - self.tensors["weights"][first].double()
        wanted = below + draws.double() * (self.weights[last] - below)
        # The bounds matter only for a draw that rounding moves into the neighbor's part.
        return torch.searchsorted(self.weights, wanted, right=True).clamp(first, last)


class Shards:
    """The images of one or more clusters, numbered from 0 in the order of clusters, files and rows."""

    def __init__(
        self,
        artifacts: list[Artifact],
        split: Literal["train", "validation"],
        verify: bool = False,
        *,
        content: ShardsContent | None = None,
    ) -> None:
        """Open committed artifacts; with `content`, open one whose files are written but not yet committed."""
        if content is None:
            manifests = [artifact.open(SHARDS, verify=verify) for artifact in artifacts]
            contents = [SHARDS.parse(made, own.folder) for own, made in zip(artifacts, manifests, strict=True)]
            files = [sorted(manifest.files) for manifest in manifests]
        else:
            contents, files = [content], [sorted(path.name for path in artifacts[0].folder.iterdir())]
        _check_alike(artifacts, contents)
        self.content = contents[0]
        found = self.content.text and self.content.text.base
        self.base = found if isinstance(found, BaseConfig) else None
        """The base network that the captions are arguments of; None if they are tokens."""
        self._shared: dict[Size, tuple[dict[str, Tensor], Any]] = {}
        self.statistics = Statistics.of(self.content.statistics)
        self.artifacts = artifacts
        self._files = [
            _File(artifact.path(file), content.cluster)
            for artifact, content, names in zip(artifacts, contents, files, strict=True)
            for file in names
            if file.startswith(f"{split}-") and file.endswith(".safetensors")
        ]
        self._ends = np.cumsum([file.rows for file in self._files], dtype=np.int64)
        latents = self.content.latents
        self.sizes = tuple(Size(*size) for size in latents.sizes or (latents.shape[1:],))
        """Heights and widths of the latents of all sizes of the run, the default first."""
        for file in self._files:
            if file.size not in self.sizes:
                raise AtollError(f"{file.path} has latents of {file.size}, which its manifest does not declare")

    @classmethod
    def open(
        cls,
        run: Path | str,
        clusters: list[int],
        split: Literal["train", "validation"] = "train",
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

    @cached_property
    def _files_by_size(self) -> dict[Size, tuple[Indices, Indices]]:
        """For each size that some image has: its files, and the number of its images up to the end of each file."""
        found: dict[Size, list[int]] = {size: [] for size in self.sizes}
        for number, file in enumerate(self._files):
            found[file.size] += [number] if file.rows else []
        return {
            size: (np.array(files), np.cumsum([self._files[number].rows for number in files]))
            for size, files in found.items()
            if files
        }

    def image_counts(self) -> dict[Size, int]:
        """Return the number of images of each size that some image has, in the order of `sizes`."""
        return {size: int(ends[-1]) for size, (_, ends) in self._files_by_size.items()}

    def numbers(self, size: Size, own: np.ndarray[Any, Any]) -> Indices:
        """Return the numbers of images that are counted from 0 among those of one size."""
        files, ends = self._files_by_size[size]
        own = own.astype(np.int64)
        file = np.searchsorted(ends, own, side="right")
        found: Indices = own + self._ends[files[file]] - ends[file]
        return found

    def by_size(self, numbers: np.ndarray[Any, Any]) -> dict[Size, np.ndarray[Any, Any]]:
        """Return, for each size that some of these images have, the indices of these images in `numbers`."""
        owner = np.searchsorted(self._ends, numbers.astype(np.int64), side="right")
        known = np.array([self.sizes.index(file.size) for file in self._files])[owner]
        return {size: found for i, size in enumerate(self.sizes) if len(found := np.flatnonzero(known == i))}

    def latents(self, batch: Batch, *, seed: int, position: rng.Positions) -> Tensor:
        """Return x0 (N, C, H, W): normalized samples of the autoencoder's posterior.

        Each sample is a function of the seed and the position of its image in the stream, so it does not depend on the
        batch size. `position` is that of the first image of the batch, or an array (N,) of all positions.
        """
        latents = batch.mean.float()
        if batch.std is not None:
            noise = rng.normal(tuple(latents.shape), seed=seed, stream=rng.Stream.POSTERIOR, first=position)
            latents = latents + batch.std.float() * noise.to(latents.device)
        return self.statistics.normalize(latents)

    def draw(
        self, positions: np.ndarray[Any, Any], seed: int, *, batch_size: int | None = None, patches: bool = False
    ) -> Batch:
        """Return the images at some positions of the training stream, which must have one size.

        The caption of an image and, with `data.flip`, whether it is mirrored are functions of the seed and its position
        in the stream. `batch_size` is needed if there are several sizes.
        """
        mirrored = captions = None
        if self.content.flip:
            mirrored = rng.uniform(len(positions), seed=seed, stream=rng.Stream.FLIP, first=positions) < 0.5
        if self.content.text is not None and self.content.text.captions:
            captions = rng.uniform(len(positions), seed=seed, stream=rng.Stream.CAPTION, first=positions)
        return self.read(self.order(positions, seed, batch_size), mirrored, captions=captions, patches=patches)

    def read(
        self,
        indices: np.ndarray[Any, Any],
        mirrored: Tensor | None = None,
        *,
        captions: Tensor | None = None,
        patches: bool = False,
    ) -> Batch:
        """Return the images with these numbers, in this order; mirrored where `mirrored` (N,) is true.

        All of them must have one size. Each has its first caption, or the one that its draw from [0, 1) in `captions`
        (N,) chooses.
        """
        # Images are read file by file, and then brought back into the requested order by `restore`.
        wanted = torch.from_numpy(np.asarray(indices).astype(np.int64))
        owner = np.searchsorted(self._ends, wanted.numpy(), side="right")
        slots, parts, arguments = [], [], []
        if len(sizes := {self._files[number].size for number in np.unique(owner)}) > 1:
            raise ValueError(f"a batch has images of one size; got {', '.join(map(str, sorted(sizes)))} (latents)")
        for number in np.unique(owner):
            file = self._files[number]
            mine = torch.from_numpy(np.flatnonzero(owner == number))
            rows = wanted[mine] - int(self._ends[number]) + file.rows
            slots.append(mine)
            part = self._rows(file, rows, None if mirrored is None else mirrored[mine], patches=patches)
            chosen = file.captions(rows, None if captions is None else captions[mine])
            parts.append(part | self._text(file, chosen))
            if self.base is not None:
                arguments += [file.arguments(int(caption)) for caption in chosen]
        restore = torch.cat(slots).argsort()
        joined = {key: torch.cat([part[key] for part in parts])[restore] for key in parts[0]}
        optional = {key: joined.get(key) for key in ("std", "text", "mask", "pooled", "patches")}
        table = None
        if self.base is not None:
            table = self._table([arguments[place] for place in restore], sizes.pop())
        return Batch(wanted, joined["cluster"], joined["label"], joined["mean"], **optional, table=table)

    def _table(self, captions: list[dict[str, Tensor]], size: Size) -> ArgumentTable:
        """Return the arguments of a base network for some captions: theirs, and those that the size determines."""
        assert self.base is not None
        if size not in self._shared:
            tensors = load_file(self.artifacts[0].path(SHARED.format(size)))
            self._shared[size] = tensors, json.loads(tensors.pop(STRUCTURE).numpy().tobytes())
        tensors, structure = self._shared[size]
        rows = [unflatten({**tensors, **own}, structure) for own in ({}, *captions)]
        return ArgumentTable(rows, self.base.trace.batching)

    def _rows(self, file: _File, rows: Tensor, mirrored: Tensor | None, *, patches: bool) -> dict[str, Tensor]:
        wanted = ("mean", "std", *(("patches",) if patches else ()))
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
        return part

    def _text(self, file: _File, captions: Tensor) -> dict[str, Tensor]:
        """Return the embeddings of the captions with these indices in the file."""
        if self.content.text is None:
            return {}
        if self.base is not None:
            return {"pooled": file.tensors["pooled"][captions]}
        # Shards store the real tokens of all captions in sequence, without padding (tokens, D). The batch gets them as
        # (N, max_tokens, D).
        lengths = file.tensors["lengths"][captions].long()
        slots = torch.arange(self.content.text.max_tokens)
        mask = slots < lengths[:, None]
        # Padding reads the first token of the caption, so that no index is out of range, and is then set to zero.
        at = file.starts[captions][:, None] + slots * mask
        text = file.tensors["tokens"][at] * mask[..., None]
        return {"mask": mask, "text": text, "pooled": file.tensors["pooled"][captions]}

    def positions(
        self, batch_size: int, start: int = 0, *, rank: int = 0, world_size: int = 1
    ) -> Iterator[np.ndarray[Any, Any]]:
        """Yield positions without end, from `start` on: this rank's slice of each global batch of `batch_size`."""
        if batch_size % world_size or not 0 <= rank < world_size:
            raise ValueError(f"a batch of {batch_size} cannot be divided: rank {rank}, world size {world_size}")
        if not len(self):
            raise AtollError(f"{self.artifacts[0].folder} has no image in this split; change data.val_fraction")
        size = batch_size // world_size

        starts = itertools.count(start + rank * size, batch_size)
        return (np.arange(first, first + size, dtype=np.uint64) for first in starts)

    def order(self, positions: np.ndarray[Any, Any], seed: int, batch_size: int | None = None) -> np.ndarray[Any, Any]:
        """Return the number of the image at each position of the stream, a stream of batches of `batch_size`."""
        counts = self.image_counts()
        if len(counts) == 1:
            return _order(positions, len(self), seed)
        if batch_size is None:
            raise ValueError("the order of images of several sizes depends on the batch size")
        batches = BatchOrder(tuple(counts.values()), batch_size, seed)
        steps, within = positions // np.uint64(batch_size), positions % np.uint64(batch_size)
        result = np.empty_like(positions)
        for step in np.unique(steps):
            here = steps == step
            size, batch = batches.locate(int(step))
            own = _order(within[here] + np.uint64(batch * batch_size), list(counts.values())[size], seed)
            result[here] = self.numbers(list(counts)[size], own)
        return result

    def size_counts(self, images: int, seed: int, *, batch_size: int) -> dict[Size, int]:
        """Return how many of the first images of the stream have each size; `images` is a number of whole batches."""
        counts = self.image_counts()
        if len(counts) == 1:
            return {next(iter(counts)): images}
        order = BatchOrder(tuple(counts.values()), batch_size, seed)
        return dict(zip(counts, order.images(images // batch_size), strict=True))

    def ids(self, indices: list[int] | None = None) -> list[str]:
        """Return the ids of the images with these numbers, or of all images."""
        return self._column("id", indices)

    def captions(self, indices: list[int] | None = None) -> list[str]:
        """Return the captions of the images with these numbers, or of all images."""
        return self._column("caption", indices)

    def _column(self, name: str, indices: list[int] | None) -> list[str]:
        wanted = np.arange(len(self)) if indices is None else np.array(indices, dtype=np.int64)
        owner = np.searchsorted(self._ends, wanted, side="right")
        rows = wanted - np.array([0, *self._ends])[owner]
        # Only files that hold some of these images: a job may have thousands of files.
        paths = {number: self._files[number].path.with_suffix(".parquet") for number in np.unique(owner).tolist()}
        values = {number: pq.read_table(path, columns=[name])[name].to_pylist() for number, path in paths.items()}
        return [values[number][row] for number, row in zip(owner.tolist(), rows.tolist(), strict=True)]


def _order(positions: np.ndarray[Any, Any], count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return the image at each position of an endless stream of `count` images."""
    # A batch may cross the end of an epoch; each epoch has its own shuffle.
    epochs, within = positions // np.uint64(count), positions % np.uint64(count)
    result = np.empty_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        result[here] = shuffled(within[here], count, seed, epoch=int(epoch))
    return result


def _check_alike(artifacts: list[Artifact], contents: list[ShardsContent]) -> None:
    """Raise `AtollError` unless all clusters come from the same preparation."""
    for artifact, content in zip(artifacts, contents, strict=True):
        for key in _SAME_EVERYWHERE:
            if getattr(content, key) != getattr(contents[0], key):
                raise AtollError(f"{artifact.folder} and {artifacts[0].folder} differ in {key}; prepare them together")
