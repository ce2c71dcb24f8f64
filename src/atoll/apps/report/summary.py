"""The data of the report, read from the files of a run."""

import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pyarrow.parquet as pq
import torch

from atoll.apps.evaluate.models import finished_jobs
from atoll.apps.evaluate.results import EvaluationResult
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.manifests import CLUSTERS, EXPERT, ROUTER, ComputeSpec, ExpertContent, RouterContent, training_costs
from atoll.core.metrics_file import MetricsLine, read_lines
from atoll.core.version import __version__
from atoll.data.index import IMAGES, Index
from atoll.data.stages import clusters, ingest

# Chunks of the index that are read for captions and labels, evenly spread. This bounds the time for a large dataset.
CLUSTER_CHUNKS = 16


@dataclass(frozen=True)
class JobSummary:
    """A finished training job: the content of its manifest, and its metrics."""

    name: str
    content: ExpertContent | RouterContent
    metrics: list[MetricsLine]

    @property
    def expert(self) -> int | None:
        """The number of the expert; None for other jobs."""
        return layout.expert_number(self.name)

    @property
    def compute(self) -> ComputeSpec:
        """The training cost."""
        assert self.content.compute is not None
        return self.content.compute

    @property
    def title(self) -> str:
        """The name of the job in charts and tables."""
        if self.expert is not None:
            return f"Expert {self.expert}"
        return "Shared start" if self.name == layout.START else self.name.capitalize()

    @property
    def objective(self) -> str:
        """The training objective, by its usual name."""
        if self.name in ("router", "student"):
            return {"router": "classification", "student": "distillation"}[self.name]
        assert isinstance(self.content, ExpertContent)
        objective = self.content.objective
        schedule, prediction = objective.schedule.name, objective.prediction
        names = {("linear", "velocity"): "flow matching", ("cosine", "epsilon"): "DDPM"}
        return names.get((schedule, prediction), f"{prediction.replace('_', '-')} prediction, {schedule} schedule")


@dataclass(frozen=True)
class ClusterSummary:
    """One cluster of the data, for the report and the studio."""

    number: int
    size: int
    """Number of training images."""
    validation: int
    """Number of validation images."""
    sheet: Path
    """The file of its contact sheet."""
    captions: list[str]
    """Distinct captions of its training images, the first one of each."""
    labels: list[tuple[str, float]]
    """Classes of its training images with their shares, the most frequent first; empty if the data has no classes."""


def read_clusters(run: Path) -> list[ClusterSummary]:
    """Return the clusters of a run; none if the prepared data is on another machine."""
    artifact = Artifact(run, clusters.NAME)
    if artifact.manifest() is None or Artifact(run, ingest.NAME).manifest() is None:
        return []
    index, sizes = Index.open(run), artifact.read(CLUSTERS).sizes
    captions: list[dict[str, None]] = [{} for _ in sizes["train"]]
    labels: list[Counter[str]] = [Counter() for _ in sizes["train"]]
    count = index.chunks(artifact).count
    for chunk in range(0, count, -(-count // CLUSTER_CHUNKS)):
        rows = index.read(chunk, ["captions", "label", "split"])
        groups = clusters.read_assignments(artifact, chunk)["coarse"].tolist()
        for own, label, split, group in zip(rows["captions"], rows["label"], rows["split"], groups, strict=True):
            if split == "train":
                captions[group].update(dict.fromkeys(own[:1]))
                labels[group].update([label] if label is not None else [])
    return [
        ClusterSummary(
            number,
            size,
            sizes["validation"][number],
            artifact.path(f"cluster_{number:03d}.png"),
            list(captions[number]),
            [(str(name), found / labels[number].total()) for name, found in labels[number].most_common()],
        )
        for number, size in enumerate(sizes["train"])
    ]


@dataclass(frozen=True)
class ReportData:
    """All data of a run that the report shows."""

    run: Path
    config: Config
    jobs: list[JobSummary]
    """All finished jobs."""
    clusters: list[ClusterSummary]
    """The clusters; empty if the prepared data is on another machine."""
    evaluation: EvaluationResult | None
    """The last evaluation."""
    attributions: list[str]
    """Authors and licenses of the training images, if the source names them."""

    @classmethod
    def read(cls, run: Path, config: Config) -> Self:
        """Read a run."""
        jobs = []
        for name in finished_jobs(run):
            artifact = Artifact(run, layout.final(name))
            content = artifact.read(ROUTER) if name == layout.ROUTER else artifact.read(EXPERT)
            jobs.append(JobSummary(name, content, read_lines(run / layout.metrics(name))))
        return cls(run, config, jobs, read_clusters(run), EvaluationResult.read(run), _read_attributions(run))

    def job(self, name: str) -> JobSummary | None:
        """Return a finished job by name; None if there is none."""
        return next((job for job in self.jobs if job.name == name), None)

    @property
    def experts(self) -> list[JobSummary]:
        """The finished jobs of experts."""
        return [job for job in self.jobs if job.expert is not None]

    @property
    def flops_share(self) -> float | None:
        """The training FLOPs of the monolith as a share of those of all experts; None without a monolith."""
        monolith = self.job(layout.MONOLITH)
        spent = sum(one.flops for one in training_costs(job.content for job in self.experts))
        return monolith.compute.flops / spent if monolith else None

    @property
    def num_images(self) -> int | None:
        """The number of training images; None if the prepared data is on another machine."""
        return sum(cluster.size for cluster in self.clusters) or None


def _read_attributions(run: Path) -> list[str]:
    artifact = Artifact(run, ingest.NAME)
    if artifact.manifest() is None:
        return []
    column = pq.read_table(artifact.path(IMAGES), columns=["attributes"])["attributes"]
    found = [json.loads(text) for text in column.unique().to_pylist()]
    named = {(row["attribution"], row.get("license", "license unknown")) for row in found if "attribution" in row}
    return [f"{author} ({license})" for author, license in sorted(named)]


def machine() -> str:
    """Return the machine and the software in one line."""
    name = platform.processor() or platform.machine()
    # platform.processor() is empty on most Linux systems.
    table = Path("/proc/cpuinfo")
    if table.is_file():
        lines = [line for line in table.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    devices = f", {torch.accelerator.device_count()} accelerators" if torch.accelerator.is_available() else ""
    software = f"Atoll {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{name}, {os.cpu_count()} cores{devices}; {platform.system()}; {software}"
