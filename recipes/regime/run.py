"""CIFAR-10 at length: all trainings and evaluations of this recipe, one after the other, in order of value.

    python recipes/regime/run.py ROOT            # run what is left; the same command continues after an interruption
    python recipes/regime/run.py ROOT --list     # what is done, what is left, and the hours

README.md beside this file has the protocol. A step is done if its file in ROOT/done exists. Every measured row is
appended to ROOT/results.jsonl. Trainings resume from their checkpoints, evaluations from their chunks.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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

    @property
    def label(self) -> str:
        """The arm's folder below its seed."""
        return self.name if self.clusters == CLUSTERS else f"{self.name}-k{self.clusters}"

    @property
    def images(self) -> int:
        """Images that each network sees after the shared start."""
        every = TOTAL * self.steps
        return every if self.dense_batch else round(every * (1 - self.start)) // self.clusters

    @property
    def jobs(self) -> list[str]:
        """Options of `atoll train` for each of its networks."""
        if self.dense_batch:
            return ["--monolith"]
        return (["--start"] if self.start else []) + [f"--expert {expert}" for expert in range(self.clusters)]


@dataclass(frozen=True)
class Step:
    """One entry of the queue."""

    name: str
    hours: float
    """Estimate for one quiet core."""
    work: Callable[[], None]


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
                shards = Shards.open(self.root / "base", [cluster], split)  # type: ignore[arg-type]
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
        """Train all networks of an arm, and keep the checkpoints that are evaluated."""
        run = self.folder(arm)
        every = arm.images // SNAPSHOTS
        for job in arm.jobs:
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

    def router(self, seed: int, clusters: int) -> None:
        """Train the router of a seed, which its arms share."""
        self.folder(arm := Arm("experts", seed, rate=4e-3, clusters=clusters, data=data_name(clusters)))
        self.call("train", str(self.folder(arm)), "--router")

    # Evaluation

    def evaluate(self, arm: Arm, routings: str, images: int, *, guidance: float = 1.0, at: int | None = None) -> None:
        """Measure an arm, at its end or at one of its snapshots, and append the rows to results.jsonl."""
        run = self.folder(arm) if at is None else self.snapshot(arm, at)
        router = self.root / f"seed{arm.seed}" / Arm("experts", 0, 0, clusters=arm.clusters).label / "router"
        if not arm.dense_batch and not (run / "router").exists():
            (run / "router").symlink_to(router)
        # The features of the real images are computed once.
        reference = self.root / arm.data / "reference"
        link(reference, run / "evaluation/reference")
        models = (
            ["--models", "monolith"] if arm.dense_batch else ["--models", "experts", "--routings", *routings.split()]
        )
        parts = "diversity trajectories" if at is None and guidance == 1.0 else "diversity trajectories diagnostics"
        options = ["--num-images", str(images), "--guidance-scale", str(guidance), "--without", *parts.split()]
        self.call("evaluate", str(run), *models, *options, *EVALUATION)
        link(run / "evaluation/reference", reference)
        result = json.loads((run / "evaluation/latest.json").read_text())
        with (self.root / "results.jsonl").open("a") as file:
            for row in rows_of(result):
                share = 1.0 if at is None else at / SNAPSHOTS
                about = {"arm": arm.label, "seed": arm.seed, "steps": arm.steps, "rate": arm.rate, "share": share}
                file.write(json.dumps({**about, "guidance": guidance, **row}) + "\n")

    def snapshot(self, arm: Arm, at: int) -> Path:
        """Return a run whose networks have the EMA weights of a snapshot."""
        run, images = self.folder(arm), arm.images * at // SNAPSHOTS
        copy = run.with_name(f"{run.name}@{at}")
        copy.mkdir(exist_ok=True)
        shutil.copy(run / "atoll.yaml", copy)
        if not (copy / "data").exists():
            (copy / "data").symlink_to((run / "data").resolve())
        jobs = ["monolith"] if arm.dense_batch else [f"experts/{expert:03d}" for expert in range(arm.clusters)]
        for job in jobs:
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

    def choose(self) -> None:
        """Choose a rate for each arm of the grid: the lowest KID, or within its standard error the lowest error."""
        rows = [json.loads(line) for line in (self.root / "results.jsonl").read_text().splitlines()]
        chosen = {}
        for kind in ("monolith", "small-batch", "experts"):
            found = [
                row for row in rows if row["arm"].startswith(f"grid-{kind}-") and row["routing"] in (None, "top-1")
            ]
            best = min(found, key=lambda row: row["kid"])
            close = [row for row in found if row["kid"] <= best["kid"] + best["kid_error"]]
            chosen[kind] = min(close, key=lambda row: row["validation_error"])["rate"]
        (self.root / "rates.json").write_text(json.dumps(chosen))
        print(chosen, flush=True)

    def rate(self, kind: str) -> float:
        """Return the chosen rate of a kind of arm; before the grid has run, a value for the list."""
        file = self.root / "rates.json"
        return float(json.loads(file.read_text())[kind]) if file.exists() else 4e-3

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
        yield Step("prepare", 0.5, self.fetch)
        yield Step("router-0", 0.2, lambda: self.router(0, CLUSTERS))
        for rate in RATES:
            for kind, batch in (("monolith", TOTAL), ("small-batch", TOTAL // CLUSTERS), ("experts", None)):
                arm = Arm(f"grid-{kind}-{rate:g}", 0, rate, steps=GRID_STEPS, dense_batch=batch)
                yield Step(f"train-{arm.name}", 0.16, lambda arm=arm: self.train(arm))
                yield Step(f"evaluate-{arm.name}", 0.08, lambda arm=arm: self.evaluate(arm, "top-1", 1024))
        yield Step("choose-rates", 0.0, self.choose)
        arms = self.arms(0)
        for name in ("experts", "monolith", "small-batch", "shared-start"):
            yield from self.whole(arms[name])
        yield Step("relabel", 0.4, self.relabel)
        yield from self.whole(arms["cluster-label"])
        for name in ("monolith", "experts", "small-batch", "shared-start", "cluster-label"):
            yield from self.curve(arms[name])
        for seed in (1, 2):
            yield Step(f"router-{seed}", 0.2, lambda seed=seed: self.router(seed, CLUSTERS))
            for name in ("monolith", "experts", "small-batch", "shared-start"):
                yield from self.whole(self.arms(seed)[name])
        for seed in range(3):
            yield from self.whole(self.heterogeneous(seed))
        for share in (0.1, 0.5):
            arm = replace(arms["shared-start"], name=f"shared-start-{share:g}", start=share)
            yield from self.whole(arm)
        for clusters, routing in ((4, "top-1"), (16, "top-3")):
            yield Step(f"prepare-k{clusters}", 0.1, lambda clusters=clusters: self.recount(clusters))
            yield Step(f"router-0-k{clusters}", 0.2, lambda clusters=clusters: self.router(0, clusters))
            arm = Arm("experts", 0, self.rate("experts"), clusters=clusters, data=data_name(clusters))
            yield from self.whole(arm, routing)
        for guidance in (1.5, 2.0, 3.0):
            for name in ("monolith", "experts", "small-batch", "shared-start"):
                yield Step(
                    f"guidance-{guidance:g}-{name}",
                    0.15,
                    lambda name=name, guidance=guidance: self.evaluate(arms[name], "top-1", 2048, guidance=guidance),
                )

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

    def heterogeneous(self, seed: int) -> Arm:
        """Return the arm with two DDPM experts; the other six are linked from the arm with flow matching."""
        arm = Arm("heterogeneous", seed, self.rate("experts"), ddpm=(0, 4))
        source = self.root / f"seed{seed}/experts/experts"
        for expert in set(range(CLUSTERS)) - set(arm.ddpm):
            if (source / f"{expert:03d}/final/manifest.json").exists():
                link(source / f"{expert:03d}", self.root / f"seed{seed}/heterogeneous/experts/{expert:03d}")
        return arm

    def whole(self, arm: Arm, routing: str = "top-1") -> Iterator[Step]:
        """Yield the training of an arm and its evaluations at the end; other routings with fewer images, on seed 0."""
        name = f"{arm.label}-{arm.seed}"
        yield Step(f"train-{name}", 1.6 * arm.steps / STEPS, lambda: self.train(arm))
        yield Step(f"evaluate-{name}", 0.35, lambda: self.evaluate(arm, routing, 5000))
        if not arm.dense_batch and arm.seed == 0 and routing == "top-1":
            others = "top-2 nearest oracle"
            yield Step(f"evaluate-{name}-routings", 0.45, lambda: self.evaluate(arm, others, 2048))

    def curve(self, arm: Arm) -> Iterator[Step]:
        """Yield the evaluations of an arm at its snapshots and at its end, with equally many images."""
        for at in range(1, SNAPSHOTS):
            yield Step(
                f"evaluate-{arm.label}-{arm.seed}@{at}", 0.15, lambda at=at: self.evaluate(arm, "top-1", 2048, at=at)
            )
        yield Step(f"evaluate-{arm.label}-{arm.seed}@end", 0.15, lambda: self.evaluate(arm, "top-1", 2048))


def data_name(clusters: int) -> str:
    """Return the folder of the data with a number of clusters."""
    return "base" if clusters == CLUSTERS else f"base-k{clusters}"


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
            "validation_error": error and error["mean"],
            "flops": model["training"]["flops"],
        }


def main() -> None:
    """Run the queue, or list it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--list", action="store_true", help="print the steps and exit")
    options = parser.parse_args()
    queue, done = Queue(options.root), options.root / "done"
    done.mkdir(parents=True, exist_ok=True)
    if options.list:
        left = 0.0
        for step in queue.steps():
            file = done / step.name
            left += 0 if file.exists() else step.hours
            print(
                f"{'done ' + file.read_text().strip() if file.exists() else 'left':12} {step.hours:5.2f} h  {step.name}"
            )
        print(f"left: about {left:.1f} hours of one quiet core")
        return
    signal.signal(signal.SIGTERM, queue.stop)
    # The rates of later steps are known once `choose-rates` is done, so the list is made anew after every step.
    while step := next((step for step in queue.steps() if not (done / step.name).exists()), None):
        start = time.monotonic()
        print(f"== {step.name}", flush=True)
        step.work()
        (done / step.name).write_text(f"{(time.monotonic() - start) / 3600:.2f} h\n")


if __name__ == "__main__":
    main()
