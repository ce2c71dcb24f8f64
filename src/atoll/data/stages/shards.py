"""The shards: one folder per cluster with all data that its expert needs, and none of the other clusters.

    data/shards/cluster_003/
        train-000000.safetensors      mean, std, tokens, lengths, pooled, label: one row per image; with data.flip
                                      and an autoencoder also mean_mirrored and std_mirrored, and with
                                      features.patch_dimensions patches
        train-000000.parquet          id, caption, label, attributes of the same rows
        held-out-000000.safetensors   images that are held out from training
        manifest.json                 latent statistics and normalization, encoders, classes, hashes

An island that trains the expert needs only this folder and the run's configuration.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
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
from atoll.data.chunks import Worker
from atoll.data.hub import public_name
from atoll.data.stages import clusters, latents, patches, text
from atoll.data.stages.base import Job, Stage
from atoll.data.stages.ingest import Index

SPLITS = ("train", "held-out")
_COLUMNS = ["id", "caption", "label", "attributes"]


def _outputs(config: Config) -> dict[str, Inputs]:
    return {layout.shards(cluster): {"cluster": cluster} for cluster in range(config.clusters.count)}


def _made_from(job: Job) -> Inputs:
    run, normalization = job.run, job.config.latents.normalization
    return {
        "clusters": Artifact(run, layout.CLUSTERS).open(CLUSTERS).digest,
        "latents": Artifact(run, layout.LATENTS).open(LATENTS).digest,
        "text": None if text.unneeded(job) else Artifact(run, layout.TEXT).open(TEXT).digest,
        "shard_rows": job.config.data.shard_rows,
        # Omitted at its default, so that shards from before the setting existed are not stale.
        **({"normalization": normalization} if normalization == "scale" else {}),
        **({"flip": True} if job.config.data.flip else {}),
        **({} if patches.unneeded(job) else {"patches": Artifact(run, layout.PATCHES).open(PATCHES).digest}),
    }


def _run(job: Job, artifact: Artifact, _: Worker) -> ShardsContent:
    cluster = list(_outputs(job.config)).index(artifact.name)
    has_text, has_patches = not text.unneeded(job), not patches.unneeded(job)
    return _Writer(job.run, Index.open(job.run), has_text, has_patches, job.config).cluster(artifact, cluster)


STAGE = Stage(
    name="shards",
    kind=SHARDS,
    inputs=(clusters.STAGE, latents.STAGE, text.STAGE, patches.STAGE),
    outputs=_outputs,
    made_from=_made_from,
    run=_run,
    uses=lambda config: f"{config.data.shard_rows:,} images per file",
    summary=lambda artifact, content: f"{content.clusters} folders like {artifact.folder}",
)


@dataclass(frozen=True)
class _Writer:
    """Writer of the shards of one run."""

    run: Path
    index: Index
    has_text: bool
    has_patches: bool
    config: Config

    def cluster(self, artifact: Artifact, cluster: int) -> ShardsContent:
        """Write the shards of one cluster, except those that an interrupted job has written already."""
        rows = dict.fromkeys(SPLITS, 0)
        sizes = Artifact(self.run, layout.CLUSTERS).read(CLUSTERS).sizes
        with progress(f"shards of cluster {cluster}", sum(sizes[split][cluster] for split in SPLITS)) as bar:
            for split in SPLITS:
                members = self._members(cluster, split)
                number = 0
                while rows_of_shard := list(islice(members, self.config.data.shard_rows)):
                    stem = f"{split}-{number:06d}"
                    # The tensors are written last, so a shard with tensors is complete.
                    if not artifact.path(f"{stem}.safetensors").is_file():
                        tensors, table = self._gather(rows_of_shard, split)
                        with artifact.writing(f"{stem}.parquet") as path:
                            pq.write_table(table, path)
                        artifact.write_tensors(f"{stem}.safetensors", tensors)
                    bar.update(len(rows_of_shard))
                    rows[split] += len(rows_of_shard)
                    number += 1
        if not rows["train"]:
            raise AtollError(f"cluster {cluster} has no training image; lower clusters.count")
        return self._content(cluster, rows)

    def _members(self, cluster: int, split: str) -> Iterator[tuple[int, int]]:
        """Yield (chunk, row in the chunk) of every image of a cluster and split."""
        artifact = Artifact(self.run, clusters.NAME)
        for chunk in range(self.index.chunks(artifact).count):
            here = clusters.read_assignments(artifact, chunk)["coarse"] == cluster
            is_split = np.array([value == split for value in self.index.read(chunk, ["split"])["split"]])
            for row in np.flatnonzero(here & is_split):
                yield chunk, int(row)

    def _gather(self, members: list[tuple[int, int]], split: str) -> tuple[dict[str, Tensor], pa.Table]:
        """Return the tensors and the table of some images of a split, from their chunks."""
        parts: list[dict[str, Tensor]] = []
        tables: list[dict[str, list[Any]]] = []
        number = {label: index for index, label in enumerate(self.index.labels)}
        # Members are ordered by chunk, so each chunk is loaded once, and the order of the rows is kept.
        by_chunk: dict[int, list[int]] = {}
        for chunk, row in members:
            by_chunk.setdefault(chunk, []).append(row)
        for chunk, chosen in by_chunk.items():
            rows = torch.tensor(chosen)
            read = self.index.read(chunk, _COLUMNS)
            tables.append({key: [values[row] for row in chosen] for key, values in read.items()})
            labels = [number[label] if label is not None else -1 for label in tables[-1]["label"]]
            part = {"label": torch.tensor(labels, dtype=torch.int32)}
            encoded = self._chunk(latents.NAME, chunk)
            # Only training draws mirror images.
            part |= {key: encoded[key][rows] for key in encoded if split == "train" or latents.MIRRORED not in key}
            if self.has_patches and split == "train":
                part["patches"] = self._chunk(patches.NAME, chunk)["patches"][rows]
            if self.has_text:
                part |= _text_rows(self._chunk(text.NAME, chunk), rows)
            parts.append(part)
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        columns = {key: [value for table in tables for value in table[key]] for key in _COLUMNS}
        return joined, pa.table({key: pa.array(values, pa.string()) for key, values in columns.items()})

    def _chunk(self, artifact: str, chunk: int) -> dict[str, Tensor]:
        chunks = self.index.chunks(Artifact(self.run, artifact))
        return load_file(chunks.artifact.path(chunks.file(chunk)))

    def _content(self, cluster: int, rows: dict[str, int]) -> ShardsContent:
        encoded = Artifact(self.run, layout.LATENTS)
        made_from, measured = encoded.open(LATENTS).made_from, encoded.read(LATENTS)
        return ShardsContent(
            cluster=cluster,
            clusters=self.config.clusters.count,
            rows=rows,
            labels=tuple(self.index.labels),
            source=self.index.manifest.made_from["source"],
            fingerprint=self.index.manifest.made_from["fingerprint"],
            latents=LatentSpec(
                autoencoder=public_name(made_from["autoencoder"]),
                weights=made_from["weights"],
                resolution=made_from["resolution"],
                shape=measured.shape,
            ),
            statistics=latents.normalization(self.config, latents.Statistics.of(measured.statistics)).declared(),
            text=self._text() if self.has_text else None,
            flip=self.config.data.flip,
            patches=self._patches() if self.has_patches else None,
        )

    def _patches(self) -> PatchSpec:
        content = Artifact(self.run, layout.PATCHES).read(PATCHES)
        return PatchSpec(**content.model_dump(include=set(PatchSpec.model_fields)))

    def _text(self) -> TextSpec:
        encoded = Artifact(self.run, layout.TEXT)
        made_from, shapes = encoded.open(TEXT).made_from, encoded.read(TEXT)
        return TextSpec(
            encoder=public_name(made_from["encoder"]),
            weights=made_from["weights"],
            **shapes.model_dump(exclude={"rows", "precision"}),
        )


def _text_rows(tensors: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return some captions of a chunk, whose captions are stored in sequence without padding."""
    starts = tensors["lengths"].cumsum(0) - tensors["lengths"]
    tokens = [tensors["tokens"][starts[row] : starts[row] + tensors["lengths"][row]] for row in rows]
    return {"tokens": torch.cat(tokens), "lengths": tensors["lengths"][rows], "pooled": tensors["pooled"][rows]}
