"""The paths of a run. Other modules take their paths from here, except for the few that only one module uses.

    RUN/atoll.yaml, report.html
    RUN/images                                      images that `atoll.prepare(images=…)` was given
    RUN/root/000001-DIGEST.json                     versions of the root, if the run is shared (verify/trust.py)
    RUN/snapshot/000001-000004.json                 the finished networks as one signed model
    RUN/data/{ingest,features,clusters,latents,text,patches}
    RUN/data/shards/cluster_003
    RUN/{experts/003,router,start,monolith,student,merged}    one folder for each job
    RUN/students/003                                few-step students of single experts
        metrics.jsonl, progress.json, grids/        training metrics, their current state, and preview images
        checkpoints/000000012800                    state to resume from, after 12,800 images
        final                                       the trained network
    RUN/samples                                     images of `atoll sample`
    RUN/evaluation/{latest.json,…}
    RUN/launch/logs                                 one log for each job of `atoll launch`
    RUN/.quarantine/experts/003                     a downloaded network that is being checked

Names are relative to the run and use forward slashes, because they are also keys of an object store.
"""

import re
from pathlib import Path
from typing import Literal

from atoll.core.errors import AtollError, unknown

CONFIG_FILE = "atoll.yaml"
ROOTS, SNAPSHOTS = "root", "snapshot"
STORE_URL = f"{ROOTS}/store.txt"
"""Where `atoll push` has sent the run."""
REPORT_FILE = "report.html"
MANIFEST_FILE = "manifest.json"
METRICS_FILE, PROGRESS_FILE = "metrics.jsonl", "progress.json"

DATA, IMAGES = "data", "images"
INGEST, FEATURES, CLUSTERS = "data/ingest", "data/features", "data/clusters"
LATENTS, TEXT, PATCHES, SHARDS = "data/latents", "data/text", "data/patches", "data/shards"
LAUNCH = "launch"
LAUNCH_LOGS, LAUNCH_LISTS = f"{LAUNCH}/logs", f"{LAUNCH}/local"
LAUNCH_SLURM, LAUNCH_COMMAND, LAUNCH_FAILURES = f"{LAUNCH}/slurm", f"{LAUNCH}/command", f"{LAUNCH}/failures"
SAMPLES = "samples"
QUARANTINE = ".quarantine"
LEASES = "leases"
EXPERT_LEASES = f"{LEASES}/experts"
EVALUATION = "evaluation"
LATEST_EVALUATION = f"{EVALUATION}/latest.json"

ROUTER, START, MONOLITH, STUDENT, MERGED = "router", "start", "monolith", "student", "merged"
DENSE = (MONOLITH, STUDENT, MERGED)
"""Jobs whose result is a model of one network for all clusters. The shared start only serves the experts."""
OTHERS = (ROUTER, START, *DENSE)
"""Jobs that are not experts."""
STUDENTS = "students"
"""The model of all few-step students of single experts, and the folder of their jobs."""
JobKind = Literal["expert", "router", "start", "monolith", "student", "merged"]
MODELS = ("experts", STUDENTS, *DENSE, "expert:K")
"""Model ids: the ensemble of experts or of their few-step students, a dense network, or one expert (`expert:3`)."""

_EXPERT = re.compile(r"experts/(\d{3,})")
JOB_PATTERN = rf"^(experts/[0-9]{{3,5}}|{'|'.join(OTHERS)})$"
"""Pattern of job names, to check those in HTTP requests. It allows 99,999 experts."""
CHECKPOINTS_PATTERN = "experts/[0-9]{3,6}/checkpoints"
"""Pattern of the folders of experts' checkpoints, to check names from untrusted manifests."""


def root(version: int, digest: str) -> str:
    """Return the name of one version of the root. With the digest in it, others cannot occupy the name in advance."""
    return f"{ROOTS}/{version:06d}-{digest}.json"


def snapshot(root: int, version: int) -> str:
    """Return the name of a snapshot under one version of the root."""
    return f"{SNAPSHOTS}/{root:06d}-{version:06d}.json"


def shards(cluster: int) -> str:
    """Return the name of the artifact with a cluster's shards."""
    return f"data/shards/cluster_{cluster:03d}"


def expert_job(number: int) -> str:
    """Return the name of an expert's job."""
    return f"experts/{number:03d}"


def student_job(number: int) -> str:
    """Return the name of the job of an expert's few-step student."""
    return f"{STUDENTS}/{number:03d}"


def expert_number(name: str) -> int | None:
    """Return the expert number of a job or of one of its artifacts; None if it is not an expert's."""
    found = _EXPERT.match(name)
    return int(found.group(1)) if found else None


def is_expert(name: str) -> bool:
    """Return whether a job or artifact belongs to an expert."""
    return expert_number(name) is not None


def model_job(model: str) -> str:
    """Return the job that makes a single-network model: `expert:3`, `monolith`, `student` or `merged`."""
    kind, _, number = model.partition(":")
    if kind == "expert" and number.isdecimal():
        return expert_job(int(number))
    if model not in DENSE:
        raise AtollError(unknown("model", model, MODELS))
    return model


def final(job: str) -> str:
    """Return the name of the artifact with a job's trained network."""
    return f"{job}/final"


def checkpoints(job: str) -> str:
    """Return the name of the folder of a job's checkpoints."""
    return f"{job}/checkpoints"


def checkpoint(job: str, images: int) -> str:
    """Return the name of the checkpoint after `images` training images."""
    # Twelve digits keep the order of names equal to the order of numbers, up to 10^12 images.
    return f"{checkpoints(job)}/{images:012d}"


def leases(job: str) -> str:
    """Return the name of the folder of a job's lease records."""
    return f"{LEASES}/{job}"


def metrics(job: str) -> str:
    """Return the name of a job's metrics.jsonl."""
    return f"{job}/{METRICS_FILE}"


def preview(folder: Path, images: int) -> Path:
    """Return the file of the preview samples after `images` training images; `folder` is the job's."""
    return folder / "grids" / f"{images:012d}.png"


def newest_preview(folder: Path) -> Path | None:
    """Return the file of the latest preview samples in a job's folder, or None."""
    return max((folder / "grids").glob("[0-9]*.png"), default=None)


def jobs(run: Path) -> list[str]:
    """Return the jobs that have a folder in a run: experts by number, then the others."""
    experts = sorted(path.name for path in (run / "experts").glob("[0-9]*") if path.is_dir())
    others = (job for job in sorted(OTHERS) if (run / job).is_dir())
    return [*(f"experts/{name}" for name in experts), *others]


def student_jobs(run: Path) -> list[str]:
    """Return the jobs of single experts' few-step students that have a folder in a run, by number."""
    return sorted(f"{STUDENTS}/{path.name}" for path in (run / STUDENTS).glob("[0-9]*") if path.is_dir())


def shard_folders(run: Path) -> list[str]:
    """Return the names of the shard artifacts that have a folder in a run, by cluster."""
    return [f"data/shards/{path.name}" for path in sorted((run / "data" / "shards").glob("cluster_*"))]
