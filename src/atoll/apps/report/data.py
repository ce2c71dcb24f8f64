"""The data of the report, read from the files of a run."""

import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image

from atoll.apps.evaluate.models import finished_jobs
from atoll.apps.evaluate.results import EvaluationResult
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.manifests import CLUSTERS, EXPERT, ROUTER, ComputeSpec, ExpertContent, RouterContent, training_costs
from atoll.core.metrics_file import MetricsLine, read_lines
from atoll.core.version import __version__
from atoll.data.dataset import Shards
from atoll.data.index import IMAGES
from atoll.data.stages import clusters, ingest

# Labels to count for the most frequent classes of a cluster: the error of a share is at most 2 %.
COUNTED_LABELS = 512


@dataclass(frozen=True)
class Job:
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
class Cluster:
    """One cluster of the data."""

    number: int
    size: int
    """Number of training images."""
    held_out: int
    """Number of held-out images."""
    sheet: Image.Image
    common_classes: str | None
    """Its most frequent classes, if the data has classes."""


@dataclass(frozen=True)
class ReportData:
    """All data of a run that the report shows."""

    run: Path
    config: Config
    jobs: list[Job]
    """All finished jobs."""
    clusters: list[Cluster]
    """The clusters; empty if the prepared data is on another machine."""
    evaluation: EvaluationResult | None
    """The last evaluation."""
    attributions: list[str]
    """Authors and licenses of the training images, if the source names them."""

    @classmethod
    def read(cls, run: Path, config: Config) -> Self:
        """Read a run."""
        jobs = [_read_job(run, name) for name in finished_jobs(run)]
        return cls(run, config, jobs, _read_clusters(run), EvaluationResult.read(run), _read_attributions(run))

    def job(self, name: str) -> Job | None:
        """Return a finished job by name; None if there is none."""
        return next((job for job in self.jobs if job.name == name), None)

    @property
    def experts(self) -> list[Job]:
        """The finished jobs of experts."""
        return [job for job in self.jobs if job.expert is not None]

    def expert(self, number: int) -> Job | None:
        """Return the finished job of an expert; None if there is none."""
        return self.job(layout.expert_job(number))

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


def _read_job(run: Path, name: str) -> Job:
    artifact = Artifact(run, layout.final(name))
    content = artifact.read(ROUTER) if name == layout.ROUTER else artifact.read(EXPERT)
    return Job(name, content, read_lines(run / layout.metrics(name)))


def _read_clusters(run: Path) -> list[Cluster]:
    artifact = Artifact(run, clusters.NAME)
    if artifact.manifest() is None:
        return []
    sizes = artifact.read(CLUSTERS).sizes
    sheets = [Image.open(artifact.path(f"cluster_{number:03d}.png")) for number in range(len(sizes["train"]))]
    rows = enumerate(zip(sizes["train"], sizes["held-out"], sheets, strict=True))
    return [Cluster(number, size, out, sheet, _common_classes(run, number)) for number, (size, out, sheet) in rows]


def _common_classes(run: Path, cluster: int) -> str | None:
    """Return the two most frequent classes of a cluster with their shares."""
    shards = Shards.open(run, [cluster])
    names, count = shards.content.labels, min(COUNTED_LABELS, len(shards))
    if not names or not count:
        return None
    labels = shards.read(np.linspace(0, len(shards) - 1, count).round()).label.tolist()
    common = Counter(names[label] for label in labels if label >= 0).most_common(2)
    return " and ".join(f"{name} ({number / count:.0%})" for name, number in common) or None


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
