"""The partition: the cluster of every image, and so the expert and the island that trains on it.

`assignments.parquet` has id, fine cluster, cluster (coarse) and distance of every image, in the order of the index. The
rule is the same for all images: the nearest fine center (`centroids.safetensors`) gives the fine cluster, and a table
gives the cluster that it was merged into. Features are streamed from disk, so memory is bounded by
`clusters.sample_rows`, independent of the number of images.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Inputs, to_json
from atoll.core.config_sections import ClustersSection
from atoll.core.errors import AtollError
from atoll.core.manifests import CLUSTERS, FEATURES, ClustersContent
from atoll.core.progress import progress, say
from atoll.core.sizes import Size, nearest_size
from atoll.data.chunks import Chunks, read_rows
from atoll.data.images import THUMBNAIL, BadImage, fit, image_size, open_image, sheet
from atoll.data.index import IMAGES, Index
from atoll.data.kmeans import Floats, GroupName, IntegerArray, fine_count, fit_fine, merge, nearest_center, separation
from atoll.data.shuffle import shuffled
from atoll.data.sources.source import Source
from atoll.data.stages import features
from atoll.data.stages.stage import Stage

NAME = layout.CLUSTERS
ASSIGNMENTS, CENTROIDS, REPORT = "assignments.parquet", "centroids.safetensors", "report.json"
_KEPT = ".kept.safetensors"
"""The rule from before the source changed."""
_CENTERS, _FINE, _SUMS = ".centers.safetensors", ".fine.parquet", ".sums.safetensors"
# Thumbnails on a contact sheet; a choice.
_PER_SHEET = 64
# Separation needs all pairwise cosines, so its memory is quadratic: 4,096 rows take 134 MB in float64.
_REPORT_ROWS = 4096

_SCHEMA = pa.schema([("id", pa.string()), ("fine", pa.int32()), ("coarse", pa.int32()), ("distance", pa.float32())])
_FINE_SCHEMA = pa.schema([("fine", pa.int32()), ("distance", pa.float32())])


class ClustersStage(Stage):
    """The cluster of every image."""

    name, kind, folder = "clusters", CLUSTERS, NAME
    needs = ("features",)
    divisible = False
    follows = frozenset({"ingest", "features", "network"})

    def uses(self) -> str:
        config = self.preparation.config.clusters
        return f"{config.count} by {config.method}"

    def made_from(self) -> Inputs:
        config, index = self.preparation.config.clusters, self.preparation.open_index()
        needed = features.needed(config, len(index.labels))
        used = Artifact(self.preparation.run, features.NAME).open(FEATURES) if needed else None
        network = {name: used.made_from[name] for name in ("model", "resolution", "weights")} if used else None
        made = {"ingest": index.manifest.digest, "features": used and used.digest, "network": network}
        return {**made, "clusters": config.model_dump()}

    def restart(self, artifact: Artifact, inputs: Inputs) -> None:
        """Keep the rule, if it was made with the same network and at least half of its images are still there."""
        made, config = artifact.manifest(), self.preparation.config.clusters
        if made is not None and config.count > 1 and not artifact.path(_KEPT).is_file():
            same = config.method == "features" and made.made_from["network"] == inputs["network"]
            before = pq.read_table(artifact.path(ASSIGNMENTS), columns=["id"])["id"]
            now = pq.read_table(self.preparation.open_index().artifact.path(IMAGES), columns=["id"])["id"]
            if same and pc.mean(pc.is_in(before, value_set=now.combine_chunks())).as_py() >= 0.5:
                say("clusters: kept; new images go to the nearest center")
                artifact.path(CENTROIDS).replace(artifact.path(_KEPT))
            else:
                say(
                    "clusters: made again, because most images, the features network or clusters.method do not allow "
                    "to keep them",
                )
        artifact.restart(self.kind, inputs, keep=lambda path: path.name == _KEPT)

    def make(self, artifact: Artifact) -> ClustersContent:
        index, settings = self.preparation.open_index(), self.preparation.config.clusters
        if settings.method == "random" and settings.count > 1:
            warnings.warn(
                "clusters.method is random: a router cannot learn such clusters, so use it only as an ablation",
                stacklevel=2,
            )
        partition = Partition(artifact, index, settings, index.chunks(Artifact(self.preparation.run, features.NAME)))
        partition.assign()
        report = partition.report()
        artifact.write(REPORT, to_json(report.model_dump(exclude_none=True)))
        contact_sheets(artifact, index, self.preparation.source, examples=report.examples)
        return ClustersContent(**report.model_dump(include=set(ClustersContent.model_fields)))

    def summary(self, content: ClustersContent) -> str:
        parts = [f"sizes {list(content.sizes['train'])}", f"largest/mean {content.imbalance:.3f}"]
        if found := ClusterReport.model_validate(self.artifact.read_json(REPORT)).separation:
            parts += [
                f"{key} {found['clusters'][key]:.3f} (random {found['random'][key]:.3f})" for key in found["clusters"]
            ]
        return f"{', '.join(parts)}; contact sheets: {self.artifact.folder}/cluster_*.png"


class ClusterReport(ClustersContent):
    """The content of report.json."""

    examples: list[list[str]]
    """Ids of some training images of every cluster."""
    separation: dict[str, dict[str, float]] | None = None
    """`kmeans.separation` of the `clusters`, and of a `random` partition for comparison; None without features."""


@dataclass(frozen=True)
class Partition:
    """The steps of one partition. Each writes a file, so that an interrupted job resumes with the next step."""

    artifact: Artifact
    index: Index
    settings: ClustersSection
    features: Chunks

    @property
    def _needs_features(self) -> bool:
        return features.needed(self.settings, len(self.index.labels))

    def assign(self) -> None:
        """Write the table of assignments and, if the partition uses features, the centers."""
        if self._needs_features:
            # If the source changed, the rule may be kept: centers, and the table that merges them.
            kept = load_file(self.artifact.path(_KEPT)) if self.artifact.path(_KEPT).is_file() else None
            self.fit(kept)
            self.assign_fine()
            if kept is None:
                rows = self.rows_by_table(self.merge_fine())
            else:
                self.artifact.write_tensors(CENTROIDS, kept)
                rows = self.rows_by_table(kept["coarse_of_fine"].numpy())
        else:
            rows = self.rows_without_features()
        # One row group per chunk.
        with self.artifact.writing(ASSIGNMENTS) as path, pq.ParquetWriter(path, _SCHEMA) as writer:
            for chunk, columns in enumerate(rows):
                ids = read_rows(self.index.artifact.path(IMAGES), chunk, ["id"])["id"]
                writer.write_table(pa.table([ids, *columns], schema=_SCHEMA))

    def fit(self, kept: dict[str, Tensor] | None) -> None:
        """Fit the fine centers to a random subset of the training features that fits into memory, or keep them."""
        if self.settings.method == "labels" or self.artifact.path(_CENTERS).is_file():
            return
        if kept is not None:
            self.artifact.write_tensors(_CENTERS, {"fine": kept["fine"]})
            return
        rows = self._subset(self.settings.sample_rows)
        count = fine_count(len(rows), self.settings.count, self.settings.num_fine)
        say(f"clusters: fitting {count:,} fine centers to {len(rows):,} images")
        centers = fit_fine(rows, count, self.settings.iterations, seed=self.settings.seed)
        self.artifact.write_tensors(_CENTERS, {"fine": torch.from_numpy(centers)})

    def _subset(self, at_most: int) -> Floats:
        """Return the features (rows, D) of at most `at_most` random training images."""
        # The result is allocated once: a list of parts and their sum would take twice the memory.
        drawn = list(self.draw(at_most))
        result = np.empty((sum(len(rows) for _, rows in drawn), self._dimensions()), dtype=np.float32)
        filled = 0
        for chunk, rows in drawn:
            result[filled : filled + len(rows)] = features.read_chunk(self.features, chunk)[rows].numpy()
            filled += len(rows)
        return result

    def _dimensions(self) -> int:
        return self.features.artifact.read(FEATURES).dimensions

    def draw(self, at_most: int) -> Iterator[tuple[int, IntegerArray]]:
        """Yield (chunk, rows of it) of at most `at_most` random training images, evenly from all chunks."""
        total = self.index.content.splits.get("train", 0)
        if not total:
            raise AtollError("there is no training image: all images are held out; lower data.val_fraction")
        # Each chunk has a quota in proportion to its training images. The quotas are differences of rounded-down
        # cumulative counts, so that they add up to `wanted` exactly.
        wanted, seen = min(at_most, total), 0
        for chunk in range(self.features.count):
            train = np.flatnonzero(self.index.arrays(chunk)["train"])
            before, seen = seen, seen + len(train)
            quota = wanted * seen // total - wanted * before // total
            generator = np.random.Generator(np.random.PCG64([self.settings.seed, chunk]))
            if quota:
                yield chunk, np.sort(generator.choice(train, quota, replace=False))

    def assign_fine(self) -> None:
        """Write the fine cluster of every image, and the feature sums and sizes of the fine clusters.

        Sums and sizes are over the training images, since the balance of the clusters is that of the training data.
        With clusters.method labels, the classes are the fine clusters.
        """
        if self.artifact.path(_SUMS).is_file():
            return
        by_label = self.settings.method == "labels"
        centers = None if by_label else load_file(self.artifact.path(_CENTERS))["fine"].numpy()
        count = len(self.index.labels) if centers is None else len(centers)
        sums, sizes = torch.zeros(count, self._dimensions(), dtype=torch.float64), np.zeros(count, dtype=np.int64)
        with (
            self.artifact.writing(_FINE) as path,
            pq.ParquetWriter(path, _FINE_SCHEMA) as writer,
            progress("clusters", self.index.rows) as bar,
        ):
            for chunk in range(self.features.count):
                rows = features.read_chunk(self.features, chunk).float().numpy()
                if centers is None:
                    fine, distance = self.label_numbers(chunk), np.full(len(rows), np.nan)
                else:
                    fine, distance = nearest_center(rows, centers)
                train = self.index.arrays(chunk)["train"]
                sums.index_add_(0, torch.from_numpy(fine[train]), torch.from_numpy(rows[train]).double())
                sizes += np.bincount(fine[train], minlength=count)
                writer.write_table(pa.table([fine, distance.astype(np.float32)], schema=_FINE_SCHEMA))
                bar.update(len(rows))
        self.artifact.write_tensors(_SUMS, {"sums": sums, "sizes": torch.from_numpy(sizes)})

    def label_numbers(self, chunk: int) -> IntegerArray:
        """Return the class index of every image of a chunk."""
        number = {label: index for index, label in enumerate(self.index.labels)}
        columns = self.index.read(chunk, ["id", "label"])
        for id, label in zip(columns["id"], columns["label"], strict=True):
            if label is None:
                raise AtollError(f"clusters.method is labels, but image {id!r} has no label; use features")
        return np.array([number[label] for label in columns["label"]], dtype=np.int32)

    def merge_fine(self) -> IntegerArray:
        """Merge the fine clusters, write all centers, and return the table from fine clusters to clusters."""
        known = load_file(self.artifact.path(_SUMS))
        sums, sizes = known["sums"].numpy(), known["sizes"].numpy()
        settings = self.settings
        used = np.flatnonzero(sizes)
        part: GroupName = "class" if settings.method == "labels" else "fine cluster"
        merged = merge(
            sums[used], sizes[used], settings.count, max_imbalance=settings.max_imbalance, seed=settings.seed, part=part
        )
        totals = np.zeros((settings.count, sums.shape[1]))
        np.add.at(totals, merged, sums[used])
        coarse = torch.nn.functional.normalize(torch.from_numpy(totals), dim=1).float()
        if settings.method == "labels":
            fine = torch.nn.functional.normalize(torch.from_numpy(sums), dim=1).float()
        else:
            fine = load_file(self.artifact.path(_CENTERS))["fine"]
        # A fine cluster without training images is not part of the merge; it goes to the nearest cluster.
        table = (fine @ coarse.T).argmax(1).to(torch.int32).numpy()
        table[used] = merged
        tensors = {"fine": fine, "coarse": coarse, "coarse_of_fine": torch.from_numpy(table)}
        self.artifact.write_tensors(CENTROIDS, tensors)
        return table

    def rows_by_table(self, coarse_of_fine: IntegerArray) -> Iterator[tuple[IntegerArray, IntegerArray, Floats]]:
        """Map each image's fine cluster to its cluster; yield one (fine, coarse, distance) triple per chunk."""
        with pq.ParquetFile(self.artifact.path(_FINE)) as file:
            for chunk in range(self.features.count):
                table = file.read_row_group(chunk)
                fine = table["fine"].to_numpy()
                yield fine, coarse_of_fine[fine], table["distance"].to_numpy()

    def rows_without_features(self) -> Iterator[tuple[IntegerArray, IntegerArray, Floats]]:
        """Yield (fine, coarse, distance) of every chunk for one cluster, random clusters, or one cluster per class."""
        count, by_label = self.settings.count, self.settings.method == "labels"
        if by_label and count > max(1, len(self.index.labels)):
            known = len(self.index.labels)
            raise AtollError(
                f"clusters.method is labels, but there are {known} classes for {count} clusters; lower clusters.count"
            )
        start = 0
        for chunk, length in enumerate(self.index.lengths):
            if by_label and count > 1:
                coarse = self.label_numbers(chunk)
            else:
                # Random clusters of equal size: a shuffle of all images, dealt out in turn.
                rows = np.arange(start, start + length, dtype=np.uint64)
                start += length
                mixed = shuffled(rows, self.index.rows, self.settings.seed, epoch=0)
                coarse = (mixed % np.uint64(count)).astype(np.int32)
            yield coarse, coarse, np.full(length, np.nan, dtype=np.float32)

    def report(self) -> ClusterReport:
        """Return sizes, imbalance, examples and, if features were used, the separation of the clusters."""
        measured = None
        if self._needs_features:
            rows, drawn = self._subset(_REPORT_ROWS), self.draw(_REPORT_ROWS)
            groups = np.concatenate(
                [read_assignments(self.artifact, chunk, ["coarse"])["coarse"][own] for chunk, own in drawn]
            )
            # The random partition has the same sizes.
            mixed = np.random.Generator(np.random.PCG64(self.settings.seed)).permutation(groups)
            measured = {"clusters": separation(rows, groups), "random": separation(rows, mixed)}
        sizes = {"train": np.zeros(self.settings.count, int), "validation": np.zeros(self.settings.count, int)}
        fine = 0
        for chunk in range(self.features.count):
            table = read_assignments(self.artifact, chunk, ["fine", "coarse"])
            train = self.index.arrays(chunk)["train"]
            sizes["train"] += np.bincount(table["coarse"][train], minlength=self.settings.count)
            sizes["validation"] += np.bincount(table["coarse"][~train], minlength=self.settings.count)
            fine = max(fine, int(table["fine"].max(initial=-1)) + 1)
        return ClusterReport(
            method=self.settings.method,
            sizes={split: tuple(counts.tolist()) for split, counts in sizes.items()},
            imbalance=float(sizes["train"].max() / sizes["train"].mean()),
            num_fine=fine,
            examples=self.examples(),
            separation=measured,
        )

    def examples(self) -> list[list[str]]:
        """Return the ids of some training images of every cluster, ordered by fine cluster."""
        found: list[list[tuple[int, str]]] = [[] for _ in range(self.settings.count)]
        for chunk, drawn in self.draw(_REPORT_ROWS):
            table = read_assignments(self.artifact, chunk, ["id", "fine", "coarse"])
            for row in drawn:
                found[table["coarse"][row]].append((int(table["fine"][row]), table["id"][row]))
        generator = np.random.Generator(np.random.PCG64(self.settings.seed))
        picked = []
        for members in found:
            chosen = generator.permutation(len(members))[:_PER_SHEET]
            picked.append([id for _, id in sorted(members[number] for number in chosen)])
        return picked


def read_assignments(
    artifact: Artifact, chunk: int, columns: list[str] = _SCHEMA.names
) -> dict[str, np.ndarray[Any, Any]]:
    """Return id, fine cluster, cluster and distance of the images of one chunk, or some of these columns."""
    table = read_rows(artifact.path(ASSIGNMENTS), chunk, columns)
    return {name: table[name].to_numpy() for name in columns}


def contact_sheets(artifact: Artifact, index: Index, source: Source, *, examples: list[list[str]]) -> None:
    """Write a page of thumbnails per cluster (`cluster_000.png`, …), to judge the partition by eye.

    `examples` has the ids of each cluster's images. If the run has several sizes, also write one page per size
    (`size_96x64.png`, …).
    """
    pages = {f"cluster_{number:03d}.png": ids for number, ids in enumerate(examples)}
    sizes = {Size.parse(name): bucket for name, bucket in index.content.sizes.items()}
    if len(sizes) > 1:
        # Evenly spread, because sources are often sorted.
        stride = {size: -(-bucket.images // _PER_SHEET) for size, bucket in sizes.items()}
        pages |= {f"size_{size}.png": [] for size in sizes}
        seen: Counter[Size] = Counter()
        for chunk in range(len(index.lengths)):
            for id, size in zip(index.read(chunk, ["id"])["id"], index.sizes(chunk), strict=True):
                if seen[size] % stride[size] == 0:
                    pages[f"size_{size}.png"].append(id)
                seen[size] += 1
    # A set: the source is listed once, and an image may be on two pages.
    wanted = {id for ids in pages.values() for id in ids}
    side = min(THUMBNAIL, int(index.manifest.made_from["resolution"]))
    thumbnails: dict[str, Image.Image] = {}
    for image in source.images():
        if image.id in wanted:
            # An image that became unreadable since the ingest stage is left out.
            with suppress(BadImage):
                data = image.read()
                size = nearest_size(list(sizes), *image_size(data))
                # The largest size with about the same ratio that fits into a square.
                scale = side / max(size.height, size.width)
                target = Size(max(1, round(size.height * scale)), max(1, round(size.width * scale)))
                thumbnails[image.id] = fit(open_image(data, [target]), target, size)
    for name, ids in pages.items():
        with artifact.writing(name) as path:
            sheet([thumbnails[id] for id in ids if id in thumbnails]).save(path, format="PNG")
