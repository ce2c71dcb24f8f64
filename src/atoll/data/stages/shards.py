"""The shards: one folder per cluster with all data that its expert needs, and none of the other clusters.

    data/shards/cluster_003/
        train-000000.safetensors      mean, std, tokens, lengths, pooled, label: one row per image; with data.flip
                                      and an autoencoder also mean_mirrored and std_mirrored, and with
                                      features.patch_dimensions patches
        train-000000.parquet          id, caption, label, attributes of the same rows
        validation-000000.safetensors   images that are held out from training
        cluster.safetensors           density of the training images, for `nearest` routing (data/density.py)
        manifest.json                 latent statistics and normalization, encoders, classes, hashes

A file has images of one size; files are ordered by size, the most frequent size of the run first. If some image of the
run has several captions, `tokens`, `lengths` and `pooled` have those of all captions in sequence, `captions` the number
of captions of each image, and `weights` the weight of each caption. docs/reference/shards.md is the exact format.

An island that trains the expert needs only this folder and the run's configuration.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.manifests import (
    CLUSTERS,
    LATENTS,
    PATCHES,
    SHARDS,
    TEXT,
    LatentSpec,
    PatchSpec,
    ShardsContent,
    TextSpec,
)
from atoll.core.progress import progress
from atoll.core.sizes import Size
from atoll.data.chunks import MIRRORED, WorkerShare, read_rows, select_rows
from atoll.data.density import write_density
from atoll.data.index import IMAGES, Index
from atoll.data.stages import clusters, latents, patches, text
from atoll.data.stages.stage import Preparation, Stage
from atoll.encoders.autoencoder import Statistics
from atoll.encoders.hub import public_name
from atoll.nets.arguments import ARGUMENT, SHAPE, SHARED

SPLITS = ("train", "validation")
RowNumbers = np.ndarray[Any, np.dtype[np.int32]]
Members = dict[int, RowNumbers]
"""The images of a shard: rows by chunk, both ascending."""
_COLUMNS = ["id", "captions", "weights", "label", "attributes"]


class ShardsStage(Stage):
    """One artifact per cluster. Workers divide the clusters."""

    name, kind, folder = "shards", SHARDS, layout.shards(0)
    needs = ("clusters", "latents", "text", "patches")
    follows = frozenset(needs)

    def uses(self) -> str:
        return f"{self.preparation.config.data.shard_rows:,} images per file"

    def made_from(self) -> Inputs:
        """Return the common inputs of the shards of all clusters."""
        run, config = self.preparation.run, self.preparation.config
        _, _, text_stage, patches_stage = self.earlier
        return {
            "clusters": Artifact(run, layout.CLUSTERS).open(CLUSTERS).digest,
            "latents": Artifact(run, layout.LATENTS).open(LATENTS).digest,
            "text": None if text_stage.unneeded() else Artifact(run, layout.TEXT).open(TEXT).digest,
            "patches": None if patches_stage.unneeded() else Artifact(run, layout.PATCHES).open(PATCHES).digest,
            "shard_rows": config.data.shard_rows,
            "normalization": config.latents.normalization,
            "flip": config.data.flip,
        }

    def outputs(self) -> list[tuple[Artifact, Inputs]]:
        common, clusters = self.made_from(), range(self.preparation.config.clusters.count)
        return [
            (Artifact(self.preparation.run, layout.shards(cluster)), {**common, "cluster": cluster})
            for cluster in clusters
        ]

    def _share(self, worker: WorkerShare) -> Sequence[tuple[Artifact, Inputs]]:
        return self.outputs()[worker.index :: worker.count]

    def make(self, artifact: Artifact) -> ShardsContent:
        cluster = [made for made, _ in self.outputs()].index(artifact)
        _, _, text_stage, patches_stage = self.earlier
        run, index = self.preparation.run, self.preparation.open_index()
        captions = None if text_stage.unneeded() else _text_spec(run, index)
        parts = None if patches_stage.unneeded() else _patch_spec(run)
        return _Writer.of(self.preparation, captions, parts).cluster(artifact, cluster)

    def state(self) -> str:
        made = 0 if self.first_missing() else sum(artifact.manifest() is not None for artifact, _ in self.outputs())
        return (
            f"{made} of {self.preparation.config.clusters.count} folders"
            if made and not self.done()
            else super().state()
        )

    def summary(self, content: ShardsContent) -> str:
        return f"{content.clusters} folders like {self.artifact.folder}"


@dataclass(frozen=True)
class _Writer:
    """Writer of the shards of one run."""

    run: Path
    index: Index
    config: Config
    latents: LatentSpec
    shapes: Mapping[Size, tuple[int, ...]]
    """Channels, height and width of the latents of every size of the run, the most frequent size first."""
    text: TextSpec | None
    patches: PatchSpec | None

    @classmethod
    def of(cls, preparation: Preparation, text: TextSpec | None, patches: PatchSpec | None) -> "_Writer":
        """Return the writer of a run whose other stages are done."""
        run, index = preparation.run, preparation.open_index()
        encoded = Artifact(run, layout.LATENTS)
        made_from, measured = encoded.open(LATENTS).made_from, encoded.read(LATENTS)
        # The order is that of the index: a manifest has its keys in the order of the alphabet.
        shapes = measured.shapes or dict.fromkeys(index.content.sizes, measured.shape)
        sizes = {size: shapes[str(size)] for size in index.train_sizes()}
        spec = LatentSpec(
            autoencoder=public_name(made_from["autoencoder"]),
            weights=made_from["weights"],
            resolution=made_from["resolution"],
            shape=measured.shape,
            sizes=tuple((height, width) for _, height, width in sizes.values()) if len(sizes) > 1 else None,
        )
        return cls(run, index, preparation.config, spec, sizes, text, patches)

    def cluster(self, artifact: Artifact, cluster: int) -> ShardsContent:
        """Write the shards of one cluster, except those that an interrupted job has written already."""
        rows = dict.fromkeys(SPLITS, 0)
        sizes = Artifact(self.run, layout.CLUSTERS).read(CLUSTERS).sizes
        with progress(f"shards of cluster {cluster}", sum(sizes[split][cluster] for split in SPLITS)) as bar:
            by_size = self._members(cluster)
            for split in SPLITS:
                cut = (_cut(by_size[split, size], self.config.data.shard_rows) for size in self.shapes)
                for number, members in enumerate(chain.from_iterable(cut)):
                    stem = f"{split}-{number:06d}"
                    # The tensors are written last, so a shard with tensors is complete.
                    if not artifact.path(f"{stem}.safetensors").is_file():
                        tensors, table = self._gather(members, split)
                        with artifact.writing(f"{stem}.parquet") as path:
                            pq.write_table(table, path)
                        artifact.write_tensors(f"{stem}.safetensors", tensors)
                    bar.update(count := sum(map(len, members.values())))
                    rows[split] += count
        if not rows["train"]:
            raise AtollError(f"cluster {cluster} has no training image; lower clusters.count")
        if self.text is not None and self.text.base is not None:
            for size, (_, height, width) in self.shapes.items():
                shared = Artifact(self.run, text.NAME).path(SHARED.format(size)).read_bytes()
                artifact.write(SHARED.format(Size(height, width)), shared)
        content = self._content(cluster, rows)
        write_density(artifact, content)
        return content

    def _members(self, cluster: int) -> dict[tuple[str, Size], list[tuple[int, RowNumbers]]]:
        """Return the images of a cluster by split and size: chunks, and rows in the chunk, in the order of the index.

        They take four bytes for each image of the cluster.
        """
        artifact = Artifact(self.run, clusters.NAME)
        found: dict[tuple[str, Size], list[tuple[int, RowNumbers]]] = defaultdict(list)
        for chunk in range(self.index.chunks(artifact).count):
            here = clusters.read_assignments(artifact, chunk, ["coarse"])["coarse"] == cluster
            columns = self.index.arrays(chunk)
            for size in self.shapes:
                of_size = here & (columns["height"] == size.height) & (columns["width"] == size.width)
                for split, of_split in zip(SPLITS, (columns["train"], ~columns["train"]), strict=True):
                    if len(rows := np.flatnonzero(of_size & of_split)):
                        found[split, size].append((chunk, rows.astype(np.int32)))
        return found

    def _gather(self, members: Members, split: str) -> tuple[dict[str, Tensor], pa.Table]:
        """Return the tensors and the table of some images of a split, all of one size, from their chunks."""
        parts: list[dict[str, Tensor]] = []
        tables: list[dict[str, list[Any]]] = []
        number = {label: index for index, label in enumerate(self.index.labels)}
        for chunk, chosen in members.items():
            rows = chosen.tolist()
            stored_rows = read_rows(self.index.artifact.path(IMAGES), chunk, _COLUMNS)
            tables.append(stored_rows.take(rows).to_pydict())
            labels = [number[label] if label is not None else -1 for label in tables[-1]["label"]]
            part = {"label": torch.tensor(labels, dtype=torch.int32)}
            sizes, stored = self.index.sizes(chunk), self.index.chunks(Artifact(self.run, latents.NAME))
            encoded = latents.read_latents(stored, chunk, sizes=sizes, rows=rows)
            # Only training draws mirror images.
            part |= {key: encoded[key] for key in encoded if split == "train" or MIRRORED not in key}
            if self.patches is not None and split == "train":
                part |= select_rows(self._chunk(patches.NAME, chunk), sizes, rows)
            if self.text is not None:
                counts = pc.list_value_length(stored_rows["captions"]).to_numpy().clip(1).tolist()
                part |= _text_rows(self._chunk(text.NAME, chunk), counts, rows)
                if self.text.captions:
                    part |= _caption_weights(tables[-1])
            parts.append(part)
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        columns = {key: [value for table in tables for value in table[key]] for key in _COLUMNS}
        return joined, self._table(columns)

    def _table(self, columns: dict[str, list[Any]]) -> pa.Table:
        captions = columns.pop("captions")
        del columns["weights"]
        columns["caption"] = [own[0] if own else None for own in captions]
        table = {key: pa.array(columns[key], pa.string()) for key in ("id", "caption", "label", "attributes")}
        if self.text is not None and self.text.captions:
            table["captions"] = pa.array(captions, pa.list_(pa.string()))
        return pa.table(table)

    def _chunk(self, artifact: str, chunk: int) -> dict[str, Tensor]:
        chunks = self.index.chunks(Artifact(self.run, artifact))
        return load_file(chunks.artifact.path(chunks.file(chunk)))

    def _content(self, cluster: int, rows: dict[str, int]) -> ShardsContent:
        measured = Artifact(self.run, layout.LATENTS).read(LATENTS).statistics
        return ShardsContent(
            cluster=cluster,
            clusters=self.config.clusters.count,
            rows=rows,
            labels=tuple(self.index.labels),
            source=self.index.manifest.made_from["source"],
            fingerprint=self.index.manifest.made_from["fingerprint"],
            latents=self.latents,
            statistics=latents.normalization(self.config, Statistics.of(measured)).declared(),
            text=self.text,
            flip=self.config.data.flip,
            patches=self.patches,
        )


def _patch_spec(run: Path) -> PatchSpec:
    content = Artifact(run, layout.PATCHES).read(PATCHES)
    return PatchSpec(**content.model_dump(include=set(PatchSpec.model_fields)))


def _text_spec(run: Path, index: Index) -> TextSpec:
    encoded = Artifact(run, layout.TEXT)
    made_from, shapes = encoded.open(TEXT).made_from, encoded.read(TEXT)
    return TextSpec(
        encoder=public_name(made_from["encoder"]),
        weights=made_from["weights"],
        captions=shapes.rows > index.rows,
        **shapes.model_dump(exclude={"rows", "precision"}),
    )


def _cut(members: list[tuple[int, RowNumbers]], count: int) -> Iterator[Members]:
    """Cut (chunk, rows in the chunk) into shards of `count` images, the last one shorter."""
    shard: Members = {}
    room = count
    for chunk, rows in members:
        while len(rows):
            shard[chunk], rows = rows[:room], rows[room:]
            room -= len(shard[chunk])
            if not room:
                yield shard
                shard, room = {}, count
    if shard:
        yield shard


def _text_rows(tensors: dict[str, Tensor], counts: list[int], rows: list[int]) -> dict[str, Tensor]:
    """Return the captions of some images of a chunk, which has those of all images in sequence without padding.

    `counts` has the number of captions of every image of the chunk.
    """
    firsts = np.cumsum(counts) - counts
    captions = torch.tensor([firsts[row] + own for row in rows for own in range(counts[row])])
    if "tokens" not in tensors:
        found = {"pooled": tensors["pooled"][captions]}
        for path in (name.removeprefix(SHAPE) for name in tensors if name.startswith(SHAPE)):
            shapes = tensors[SHAPE + path]
            values = torch.split(tensors[ARGUMENT + path], shapes.prod(1).tolist())
            found[ARGUMENT + path] = torch.cat([values[own] for own in captions])
            found[SHAPE + path] = shapes[captions]
        return found
    starts = tensors["lengths"].cumsum(0) - tensors["lengths"]
    tokens = [tensors["tokens"][starts[own] : starts[own] + tensors["lengths"][own]] for own in captions]
    return {"tokens": torch.cat(tokens), "lengths": tensors["lengths"][captions], "pooled": tensors["pooled"][captions]}


def _caption_weights(table: dict[str, list[Any]]) -> dict[str, Tensor]:
    """Return the number of captions of each image (rows,), and the weight of each caption (captions,)."""
    counts = [max(1, len(captions)) for captions in table["captions"]]
    weights = [own or [1.0] * count for own, count in zip(table["weights"], counts, strict=True)]
    return {
        "captions": torch.tensor(counts, dtype=torch.int32),
        "weights": torch.tensor([weight for own in weights for weight in own], dtype=torch.float32),
    }
