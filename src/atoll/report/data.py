"""Everything the report tells, gathered from the files of a run; nothing is computed here."""

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

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.manifests import CLUSTERS, EXPERT, ROUTER, ComputeSpec, ExpertContent, RouterContent
from atoll.core.metrics_file import MetricsLine, read_lines
from atoll.core.version import __version__
from atoll.data.dataset import Shards
from atoll.data.stages import clusters, ingest
from atoll.evaluate.models import finished
from atoll.evaluate.results import EvaluationResult

LABELS_LOOKED_AT = 512


@dataclass(frozen=True)
class Job:
    """One finished network: what it declares, and its way there."""

    name: str
    content: ExpertContent | RouterContent
    metrics: list[MetricsLine]

    @property
    def expert(self) -> int | None:
        """The number of an expert; None for router, monolith and student."""
        return layout.expert_number(self.name)

    @property
    def compute(self) -> ComputeSpec:
        """Return what its training cost."""
        assert self.content.compute is not None
        return self.content.compute

    @property
    def title(self) -> str:
        """For people."""
        return self.name.capitalize() if self.expert is None else f"Expert {self.expert}"

    @property
    def objective(self) -> str:
        """How it was trained, in the words of the papers."""
        if self.name in ("router", "student"):
            return {"router": "classification", "student": "distillation"}[self.name]
        assert isinstance(self.content, ExpertContent)
        objective = self.content.objective
        schedule, prediction = objective.schedule.name, objective.prediction
        names = {("linear", "velocity"): "flow matching", ("cosine", "epsilon"): "DDPM"}
        return names.get((schedule, prediction), f"{prediction.replace('_', '-')} on the {schedule} schedule")


@dataclass(frozen=True)
class Cluster:
    """One part of the data."""

    number: int
    size: int
    held_out: int
    sheet: Image.Image
    mostly: str | None
    """Its most frequent classes, if the data has classes."""


@dataclass(frozen=True)
class Findings:
    """A run, as the report sees it."""

    run: Path
    config: Config
    jobs: list[Job]
    """All finished networks."""
    clusters: list[Cluster]
    """The partition; empty on a machine that has none of the preparation."""
    evaluation: EvaluationResult | None
    """The last evaluation."""
    makers: list[str]
    """Who made the images, under which license, where the source says so."""

    @classmethod
    def read(cls, run: Path, config: Config) -> Self:
        """Read a run."""
        jobs = [_read_job(run, name) for name in finished(run)]
        return cls(run, config, jobs, _read_clusters(run), EvaluationResult.read(run), _read_makers(run))

    def job(self, name: str) -> Job | None:
        """A finished network by name."""
        return next((job for job in self.jobs if job.name == name), None)

    @property
    def experts(self) -> list[Job]:
        """The finished experts."""
        return [job for job in self.jobs if job.expert is not None]

    @property
    def pictures(self) -> int | None:
        """Number of training pictures."""
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
    return [Cluster(number, size, out, sheet, _mostly(run, number)) for number, (size, out, sheet) in rows]


def _mostly(run: Path, cluster: int) -> str | None:
    """Name the two most frequent classes of a cluster."""
    shards = Shards.open(run, [cluster])
    names, count = shards.content.labels, min(LABELS_LOOKED_AT, len(shards))
    if not names or not count:
        return None
    labels = shards.read(np.linspace(0, len(shards) - 1, count).round()).label.tolist()
    common = Counter(names[label] for label in labels if label >= 0).most_common(2)
    return " and ".join(f"{name} ({number / count:.0%})" for name, number in common) or None


def _read_makers(run: Path) -> list[str]:
    artifact = Artifact(run, ingest.NAME)
    if artifact.manifest() is None:
        return []
    column = pq.read_table(artifact.path(ingest.IMAGES), columns=["attributes"])["attributes"]
    found = [json.loads(text) for text in column.unique().to_pylist()]
    told = {(row["attribution"], row.get("license", "license unknown")) for row in found if "attribution" in row}
    return [f"{maker} ({license})" for maker, license in sorted(told)]


def machine() -> str:
    """The machine and the software, in a line."""
    name = platform.processor() or platform.machine()
    table = Path("/proc/cpuinfo")
    if table.is_file():
        lines = [line for line in table.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    devices = f", {torch.accelerator.device_count()} accelerators" if torch.accelerator.is_available() else ""
    software = f"Atoll {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores of {name}{devices}; {platform.system()}; {software}"
