"""CIFAR-10 at length: all trainings and evaluations of this recipe, one after the other, in order of value.

    python recipes/regime/run.py ROOT                 # measure what is left; the same command continues later
    python recipes/regime/run.py ROOT --list          # what is done, what is left, and the hours
    python recipes/regime/run.py ROOT --only experts  # the rows of arms whose name begins with this

README.md beside this file has the protocol. A step is one evaluation. It is done if its rows are in results.jsonl
beside this file, so a new ROOT, or another machine, goes on with what is left. A step trains the networks that it needs
and ROOT lacks. Trainings resume from their checkpoints, evaluations from their chunks.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file

from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT
from atoll.data.dataset import Shards

TOTAL, STEPS, CLUSTERS = 256, 4000, 8
"""Images per step of all experts together, steps, and experts."""
RATES = (2e-3, 4e-3, 8e-3)
GRID_STEPS = STEPS // 10
SNAPSHOTS = 5
"""Checkpoints that are evaluated, evenly spaced in images; the last one is the result."""
NETWORK = {"name": "ModernDiT-XS/4", "width": 96, "depth": 4, "heads": 3}
OBJECTIVE = "flow-matching-logit-normal"
EVALUATION = ["--steps", "25", "--num-real", "10000", "--num-val", "256", "--batch-size", "128", "--allow-small"]
EXECUTABLE = str(Path(sys.executable).with_name("atoll"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
RESULTS = Path(__file__).with_name("results.jsonl")
TRAINING_HOURS = 0.8
"""An arm on one quiet core: 1,024,000 images at 370 images per second."""


@dataclass(frozen=True)
class Arm:
    """A run with one seed: a dense network, or experts."""

    name: str
    seed: int
    rate: float
    steps: int = STEPS
    clusters: int = CLUSTERS
    dense_batch: int | None = None
    """Batch size of a monolith; None trains experts."""
    start: float = 0.0
    """Share of the FLOPs that a shared start takes."""
    start_rate: float | None = None
    """Learning rate of the shared start, which has the batch size of the monolith."""
    data: str = "base"
    ddpm: tuple[int, ...] = ()
    """Experts that are trained with DDPM instead of flow matching."""
    bridge: str = ""
    """Conversion of these experts: exact, published-linear or published-schedule; by default the calibrated one."""

    @property
    def label(self) -> str:
        """The arm's folder below its seed."""
        count = "" if self.clusters == CLUSTERS else f"-k{self.clusters}"
        return self.name + count + (f"-{self.bridge}" if self.bridge else "")

    @property
    def images(self) -> int:
        """Images that each network sees after the shared start."""
        every = TOTAL * self.steps
        return every if self.dense_batch else round(every * (1 - self.start)) // self.clusters

    @property
    def training_hours(self) -> float:
        """Estimate the training on one quiet core. DDPM experts join those of flow matching, trained before."""
        share = 0.0 if self.bridge else len(self.ddpm) / self.clusters if self.ddpm else 1.0
        return TRAINING_HOURS * share * self.steps / STEPS

    @property
    def jobs(self) -> dict[str, str]:
        """Folders of its networks, and the options of `atoll train` for them."""
        if self.dense_batch:
            return {"monolith": "--monolith"}
        experts = {f"experts/{expert:03d}": f"--expert {expert}" for expert in range(self.clusters)}
        return ({"start": "--start"} if self.start else {}) | experts


@dataclass(frozen=True)
class Step:
    """One entry of the queue: an evaluation of an arm, with the training that it needs."""

    arm: Arm
    routings: str = "top-1"
    """Of experts, with spaces between them."""
    images: int = 5000
    guidance: float = 1.0
    at: int = SNAPSHOTS
    """Checkpoint of the networks, from 1 to SNAPSHOTS."""
    diversity: bool = False
    """Whether to measure the diversity within a class: LPIPS of eight images for each of 40 labels."""

    @property
    def name(self) -> str:
        """Describe the step in a line."""
        arm = self.arm
        routings = "" if arm.dense_batch else f", {self.routings}"
        return (
            f"{arm.label}, seed {arm.seed}, {self.at / SNAPSHOTS:.0%} of the images: "
            f"{self.images} images{routings}, guidance {self.guidance:g}"
        )

    @property
    def hours(self) -> float:
        """Estimate the evaluation on one quiet core, without training: 0.15 s for an image, and the real images."""
        count = 1 if self.arm.dense_batch else len(self.routings.split())
        return 0.05 + count * self.images * 0.15 / 3600

    def is_done(self, rows: list[dict[str, Any]]) -> bool:
        """Return whether all rows of this evaluation are among those that were measured."""
        about = self.about()
        found = {row["routing"] for row in rows if row["num_images"] == self.images and about.items() <= row.items()}
        return found >= ({None} if self.arm.dense_batch else set(self.routings.split()))

    def about(self) -> dict[str, Any]:
        """Return the columns of the rows that name this evaluation."""
        arm = self.arm
        share = self.at / SNAPSHOTS
        return {
            "arm": arm.label,
            "seed": arm.seed,
            "steps": arm.steps,
            "rate": arm.rate,
            "share": share,
            "guidance": self.guidance,
        }


class Queue:
    """The steps and their folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.child: subprocess.Popen[bytes] | None = None

    # Data

    def prepare(self, name: str, source: Path, clusters: int) -> None:
        """Prepare the data with one number of clusters."""
        run = self.root / name
        run.mkdir(parents=True, exist_ok=True)
        (run / "atoll.yaml").write_text(json.dumps(data_settings(source, clusters)))
        self.call("prepare", str(run))

    def fetch(self) -> None:
        """Fetch CIFAR-10 and prepare it."""
        if not (self.root / "cifar10/train.parquet").exists():
            self.execute([sys.executable, "recipes/common/cifar10.py", str(self.root / "cifar10")])
        self.prepare("base", self.root / "cifar10/train.parquet", CLUSTERS)

    def recount(self, clusters: int) -> None:
        """Prepare another number of clusters of the same images."""
        run = self.root / f"base-k{clusters}"
        for part in ("ingest", "features", "latents"):
            link(self.root / "base/data" / part, run / "data" / part)
        self.prepare(run.name, self.root / "cifar10/train.parquet", clusters)

    def relabel(self) -> None:
        """Write CIFAR-10 with labels of class and cluster, for the monolith that is conditioned on the cluster."""
        cluster_of: dict[str, int] = {}
        for cluster in range(CLUSTERS):
            for split in ("train", "validation"):
                shards = Shards.open(self.root / "base", [cluster], split)
                cluster_of |= dict.fromkeys(shards.ids(list(range(len(shards)))), cluster)
        table = pq.read_table(self.root / "cifar10/train.parquet")
        names = [
            f"{label} {cluster_of[identifier]}"
            for label, identifier in zip(table["label"].to_pylist(), table["id"].to_pylist(), strict=True)
        ]
        target = self.root / "cifar10-clusters/train.parquet"
        target.parent.mkdir(exist_ok=True)
        column = table.column_names.index("label")
        pq.write_table(table.set_column(column, "label", pa.array(names)), target, row_group_size=1000)
        self.prepare("base-labels", target, CLUSTERS)

    # Training

    def folder(self, arm: Arm) -> Path:
        """Return the folder of an arm, with its data and settings."""
        run = self.root / f"seed{arm.seed}" / arm.label
        run.mkdir(parents=True, exist_ok=True)
        if not (run / "data").exists():
            (run / "data").symlink_to(self.root / arm.data / "data")
        data = json.loads((self.root / arm.data / "atoll.yaml").read_text())
        (run / "atoll.yaml").write_text(json.dumps({**data, **network_settings(arm)}, indent=1))
        return run

    def train(self, arm: Arm) -> None:
        """Train the networks of an arm that are missing, and keep the checkpoints that are evaluated."""
        self.fetch()
        if arm.data == "base-labels":
            self.relabel()
        if arm.clusters != CLUSTERS:
            self.recount(arm.clusters)
        run = self.folder(arm)
        if arm.ddpm:
            # All experts of another bridge are those of the calibrated one. Its other six are those of flow matching.
            source = replace(arm, bridge="") if arm.bridge else replace(arm, name="experts", ddpm=())
            self.train(source)
            for expert in range(CLUSTERS):
                if expert not in arm.ddpm:
                    link(self.folder(source) / f"experts/{expert:03d}", run / f"experts/{expert:03d}")
                elif arm.bridge:
                    command = ["recipes/bridge/set_bridge.py", self.folder(source), run, expert, arm.bridge]
                    self.execute([sys.executable, *map(str, command)])
        every = arm.images // SNAPSHOTS
        for folder, job in arm.jobs.items():
            if (run / folder / "final/manifest.json").exists():
                continue
            child = subprocess.Popen([EXECUTABLE, "train", str(run), *job.split()], env=ENVIRONMENT)
            self.child = child
            while child.poll() is None:
                time.sleep(1)
                for checkpoint in run.glob("**/checkpoints/*[0-9]"):
                    images = int(checkpoint.name)
                    if images % every == 0 and images < arm.images and (checkpoint / "manifest.json").exists():
                        link(checkpoint, checkpoint.parents[1] / "snapshots" / str(images))
            if child.returncode:
                raise SystemExit(child.returncode)

    def router(self, arm: Arm) -> Path:
        """Train the router that the arms of a seed and a number of clusters share, and return its folder."""
        run = self.folder(replace(arm, name="router", rate=4e-3, steps=STEPS, start=0.0, start_rate=None, ddpm=()))
        self.call("train", str(run), "--router")
        return run / "router"

    # Evaluation

    def measure(self, step: Step) -> None:
        """Train what a step needs, measure it, and append its rows to results.jsonl."""
        arm = step.arm
        self.train(arm)
        run = self.folder(arm) if step.at == SNAPSHOTS else self.snapshot(arm, step.at)
        if not arm.dense_batch and not (run / "router").exists():
            (run / "router").symlink_to(self.router(arm))
        # The features of the real images are computed once.
        reference = self.root / arm.data / "reference"
        link(reference, run / "evaluation/reference")
        models = "monolith" if arm.dense_batch else f"experts --routings {step.routings}"
        parts = "trajectories" if step.diversity else "diversity trajectories"
        if step.at < SNAPSHOTS or step.guidance > 1 or (step.images < 5000 and arm.steps > GRID_STEPS):
            parts += " diagnostics"
        options = [
            "--num-images",
            str(step.images),
            "--guidance-scale",
            str(step.guidance),
            "--without",
            *parts.split(),
        ]
        self.call("evaluate", str(run), "--models", *models.split(), *options, *EVALUATION)
        link(run / "evaluation/reference", reference)
        result = json.loads((run / "evaluation/latest.json").read_text())
        with RESULTS.open("a") as file:
            file.writelines(json.dumps({**step.about(), **row}) + "\n" for row in rows_of(result))

    def snapshot(self, arm: Arm, at: int) -> Path:
        """Return a run whose networks have the EMA weights of a snapshot."""
        run, images = self.folder(arm), arm.images * at // SNAPSHOTS
        copy = run.with_name(f"{run.name}@{at}")
        copy.mkdir(exist_ok=True)
        shutil.copy(run / "atoll.yaml", copy)
        if not (copy / "data").exists():
            (copy / "data").symlink_to((run / "data").resolve())
        for job in (job for job in arm.jobs if job != "start"):
            final, target = Artifact(run, f"{job}/final"), Artifact(copy, f"{job}/final")
            manifest = final.open(EXPERT)
            inputs = {**manifest.made_from, "images": images}
            if target.begin(EXPERT, inputs):
                continue
            ema = load_file(run / job / "snapshots" / str(images) / "state-00000.safetensors")
            for name in manifest.files:
                if name.startswith("density"):
                    shutil.copy(final.path(name), target.path(name))
                elif name.endswith(".safetensors"):
                    weights = load_file(final.path(name))
                    target.write_tensors(name, {key: ema.get(f"ema.ema.{key}", old) for key, old in weights.items()})
                else:
                    shutil.copy(final.path(name), target.path(name))
            content = final.read(EXPERT)
            assert content.compute is not None
            flops = content.compute.flops * images // content.compute.images
            compute = content.compute.model_copy(update={"images": images, "flops": flops})
            target.commit(content.model_copy(update={"compute": compute}))
        return copy

    def rate(self, kind: str) -> float:
        """Return the rate of a kind of arm: the lowest KID, or within its standard error the lowest error."""
        found = [
            row for row in measured() if row["arm"].startswith(f"grid-{kind}-") and row["routing"] in (None, "top-1")
        ]
        if len(found) < len(RATES):
            return max(RATES)  # for the list, before the grid is measured
        best = min(found, key=lambda row: row["kid"])
        close = [row for row in found if row["kid"] <= best["kid"] + best["kid_error"]]
        return float(min(close, key=lambda row: row["validation_error"])["rate"])

    # Processes

    def call(self, *arguments: str) -> None:
        """Run a verb of Atoll."""
        self.execute([EXECUTABLE, *arguments])

    def execute(self, command: list[str]) -> None:
        """Run a command; end with its exit code if it fails."""
        self.child = subprocess.Popen(command, env=ENVIRONMENT)
        if code := self.child.wait():
            raise SystemExit(code)

    def stop(self, number: int, _: Any) -> None:
        """Pass SIGTERM on, so that a training saves a checkpoint; its exit code then ends the queue."""
        if self.child is not None:
            self.child.send_signal(number)

    # The list

    def steps(self) -> Iterator[Step]:
        """Yield all steps in order of value."""
        for rate in RATES:
            for kind, batch in (("monolith", TOTAL), ("small-batch", TOTAL // CLUSTERS), ("experts", None)):
                arm = Arm(f"grid-{kind}-{rate:g}", 0, rate, steps=GRID_STEPS, dense_batch=batch)
                yield Step(arm, images=1024)
        arms = self.arms(0)
        names = ("experts", "monolith", "small-batch", "shared-start")
        yield from (Step(arms[name], diversity=name == "experts") for name in (*names, "cluster-label"))
        for name in (*names, "cluster-label"):
            yield from (Step(arms[name], images=2048, at=at) for at in range(1, SNAPSHOTS + 1))
        for name in ("experts", "shared-start"):
            yield Step(arms[name], "top-2 nearest oracle", images=2048)
        for seed in range(3):
            of_seed = self.arms(seed)
            if seed:
                yield from (Step(of_seed[name], diversity=name == "experts") for name in names)
            for bridge in ("", "exact", "published-linear", "published-schedule"):
                arm = replace(of_seed["experts"], name="heterogeneous", ddpm=(0, 4), bridge=bridge)
                yield Step(arm, diversity=True)
        for share in (0.1, 0.5):
            yield Step(replace(arms["shared-start"], name=f"shared-start-{share:g}", start=share))
        for clusters, routing in ((4, "top-1"), (16, "top-3")):
            yield Step(replace(arms["experts"], clusters=clusters, data=f"base-k{clusters}"), routing)
        for guidance in (1.5, 2.0, 3.0):
            yield from (Step(arms[name], images=2048, guidance=guidance) for name in names)

    def arms(self, seed: int) -> dict[str, Arm]:
        """Return the arms (a) to (e) of a seed."""
        dense, small, experts = (self.rate(kind) for kind in ("monolith", "small-batch", "experts"))
        return {
            "monolith": Arm("monolith", seed, dense, dense_batch=TOTAL),
            "small-batch": Arm("small-batch", seed, small, dense_batch=TOTAL // CLUSTERS),
            "experts": Arm("experts", seed, experts),
            "shared-start": Arm("shared-start", seed, experts, start=0.25, start_rate=dense),
            "cluster-label": Arm("cluster-label", seed, dense, dense_batch=TOTAL, data="base-labels"),
        }


def measured() -> list[dict[str, Any]]:
    """Return all rows that were measured."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def data_settings(source: Path, clusters: int) -> dict[str, Any]:
    """Return the settings of the data."""
    return {
        "data": {"source": str(source), "resolution": 32, "val_fraction": 0.02, "flip": True},
        "features": {"resolution": 64},
        "latents": {"autoencoder": "pixels"},
        "text": {"encoder": "none"},
        "clusters": {"count": clusters},
    }


def network_settings(arm: Arm) -> dict[str, Any]:
    """Return the settings of an arm's networks and their training."""
    every = TOTAL * arm.steps
    objectives = {"default": OBJECTIVE, **dict.fromkeys(arm.ddpm, "ddpm")}
    train = {**schedule(every // arm.clusters), "batch_size": TOTAL // arm.clusters, "lr": arm.rate}
    # Compiled blocks train 1.5 times as fast on a CPU.
    train |= {"lr_schedule": "cosine", "seed": arm.seed, "sample_every": 0, "compile": arm.steps > GRID_STEPS}
    return {
        "networks": {"default": NETWORK},
        "experts": objectives,
        "router": {
            "network": NETWORK,
            "conditioning": "auto",
            "total_images": TOTAL * STEPS // 8,
            "batch_size": 64,
            "lr": 1e-3,
        },
        "train": train,
        "monolith": {**schedule(every), "batch_size": arm.dense_batch or TOTAL},
        "shared_start": {"flops_share": arm.start, "batch_size": TOTAL, "lr": arm.start_rate or arm.rate},
    }


def schedule(images: int) -> dict[str, Any]:
    """Return warmup (5 % of the images), half-life of the EMA (2.5 %), and the intervals of saving and logging."""
    return {
        "total_images": images,
        "warmup_images": images // 20,
        "ema": {"ema": images // 40},
        "save_every": images // 20,
        "log_every": images // 40,
    }


def link(source: Path, target: Path) -> None:
    """Copy a folder by hard links, completely or not at all; do nothing without source or with target."""
    if not source.is_dir() or target.exists():
        return
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, part, copy_function=os.link)
    part.rename(target)


def rows_of(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of an evaluation: model, routing, metrics and cost."""
    diagnostics = result.get("diagnostics", {})
    errors = {**diagnostics.get("dense", {}), **diagnostics.get("experts", {}).get("velocity_error", {})}
    for model in result["models"]:
        metrics = model["metrics"]["inception"]
        error = errors.get(model.get("routing") or model["model"])
        yield {
            "model": model["model"],
            "routing": model.get("routing"),
            "num_images": metrics["protocol"]["num_images"],
            "kid": 1000 * metrics["kid"]["value"],
            "kid_error": 1000 * metrics["kid"]["standard_error"],
            "fid": metrics["frechet"],
            "precision": metrics["precision_recall"]["precision"],
            "recall": metrics["precision_recall"]["recall"],
            "diversity": (model.get("diversity") or {}).get("mean"),
            "validation_error": error and error["mean"],
            "flops": model["training"]["flops"],
        }


def main() -> None:
    """Run the queue, or list it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--list", action="store_true", help="print the steps and exit")
    parser.add_argument("--only", default="", metavar="NAME", help="only the arms whose name begins with this")
    options = parser.parse_args()
    queue = Queue(options.root)
    steps = [step for step in queue.steps() if step.arm.label.startswith(options.only)]
    if options.list:
        rows, left, trained = measured(), 0.0, set[Arm]()
        for step in steps:
            done = step.is_done(rows)
            training = 0.0 if done or step.arm in trained else step.arm.training_hours
            trained |= set() if done else {step.arm}
            left += 0.0 if done else step.hours + training
            print(f"{'done' if done else 'left'}  {step.hours + training:5.2f} h  {step.name}")
        print(f"left: about {left:.1f} hours of one quiet core, with the trainings that ROOT may already have")
        return
    signal.signal(signal.SIGTERM, queue.stop)
    for step in steps:
        if not step.is_done(measured()):
            print(f"== {step.name}", flush=True)
            queue.measure(step)


if __name__ == "__main__":
    main()
