"""Adapters of one base on a third emoji style: all trainings and evaluations of this recipe, one after the other.

    python recipes/base-experts/run.py ROOT            # the same command continues after an interruption
    python recipes/base-experts/run.py ROOT --smoke    # the same with few images, to see that it runs

README.md beside this file has the protocol. Finished trainings and evaluations are not repeated. Every evaluated model
is a row of ROOT/results.jsonl.
"""

import argparse
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pipeline import TOKENS, write_pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from atoll import cli
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import load
from atoll.core.distributed import ALONE
from atoll.core.manifests import EXPERT, SHARDS, ComputeSpec
from atoll.nets import build, save_network
from atoll.nets.io import WEIGHTS_FILE
from atoll.train.job import build_task
from atoll.train.spec import resolve_job

RANK, CLUSTERS, SEEDS = 2, 8, (0, 1, 2)
"""Rank r of a routed adapter, number of adapters, and training seeds."""
BATCH = 16
"""Images per step of every adapter and expert."""
RATES = {"adapters": (3e-3, 1e-2), "whole": (1e-3, 3e-3)}
ROUTER = {"name": "DiT-XS/2", "width": 64, "depth": 2, "heads": 2, "patch": 1}


@dataclass(frozen=True)
class Sizes:
    """Numbers of images: of the base, of one adapter of rank r, of the router, and generated per model."""

    base: int = 40_000
    adapter: int = 8_000
    router: int = 6_400
    generated: int = 256
    categories: str = "activities,animals-nature,food-drink,objects,smileys-emotion,symbols,travel-places"


SMOKE = Sizes(base=128, adapter=1024, router=64, generated=16, categories="food-drink,animals-nature")


@dataclass(frozen=True)
class Arm:
    """What is trained on the third style: one network on all of it, or one on each cluster."""

    name: str
    rank: int | None
    """Rank of the adapters; None trains the whole network."""
    routed: bool = False

    @property
    def jobs(self) -> list[tuple[str, ...]]:
        """Options of `atoll train`, for each network."""
        return [("--expert", str(expert)) for expert in range(CLUSTERS)] if self.routed else [("--monolith",)]


ONE_LARGE, ONE_SMALL = Arm("one-8r", CLUSTERS * RANK), Arm("one-r", RANK)
ROUTED, WHOLE = Arm("routed", RANK, routed=True), Arm("whole", None, routed=True)
AVERAGE, BASE = Arm("average", CLUSTERS * RANK), Arm("base", RANK)


def atoll(*arguments: object) -> None:
    """Run a verb of Atoll in this process, which has imported everything already."""
    print("atoll", *arguments, flush=True)
    if code := cli.main([str(argument) for argument in arguments]):
        raise SystemExit(code)


class Recipe:
    """The folder of all runs."""

    def __init__(self, root: Path, sizes: Sizes) -> None:
        self.root, self.sizes = root.resolve(), sizes
        self.pipeline, self.results = self.root / "pipeline", self.root / "results.jsonl"

    # The base

    def settings(self, pipeline: Path, styles: str, clusters: int, rank: int | None) -> dict[str, Any]:
        """Return the settings of data and network."""
        lora = None if rank is None else {"rank": rank, "alpha": rank}
        network = {"base": str(pipeline), "options": {"max_sequence_length": TOKENS}, "lora": lora}
        source = f"emoji:styles={styles};skin-tones=no;categories={self.sizes.categories}"
        return {
            "data": {"source": source, "val_fraction": 0.1},
            "features": {"resolution": 128},
            "clusters": {"count": clusters},
            "networks": {"default": network},
        }

    def train_base(self) -> None:
        """Train a dense network on two styles, and put it into the pipeline."""
        if self.pipeline.exists():
            return
        untrained, run = self.root / "untrained", self.root / "dense"
        if not untrained.exists():
            write_pipeline(str(untrained))
        train = train_settings(self.sizes.base, 1e-3, seed=0, batch=64)
        write(run, self.settings(untrained, "noto,twemoji", 1, None) | {"train": train})
        atoll("prepare", run)
        atoll("train", run, "--monolith")
        trained = load_file(run / "monolith/final" / WEIGHTS_FILE)
        part = self.root / "pipeline.part"
        shutil.copytree(untrained, part, dirs_exist_ok=True)
        weights = {name.removeprefix("network."): tensor for name, tensor in trained.items()}
        save_file(weights, part / "transformer" / WEIGHTS_FILE, {"format": "pt"})
        part.rename(self.pipeline)

    # Arms

    def folder(self, arm: Arm, seed: int, rate: float, images: int, *, name: str | None = None) -> Path:
        """Return the run of an arm, with its settings and the data that all arms share."""
        run = self.root / f"seed{seed}" / (name or arm.name)
        router = {"network": ROUTER, "conditioning": "auto", "total_images": self.sizes.router, "lr": 2e-3}
        sections = {"train": train_settings(images, rate, seed), "router": {**router, "batch_size": 64}}
        write(run, self.settings(self.pipeline, "openmoji", CLUSTERS, arm.rank) | sections)
        for name, target in (("data", self.root / "data/data"), ("evaluation/reference", self.root / "reference")):
            link = run / name
            link.parent.mkdir(exist_ok=True)
            if not link.is_symlink():
                target.mkdir(exist_ok=True)
                link.symlink_to(target)
        return run

    def flops(self, arm: Arm, job: str) -> int:
        """Count the FLOPs of training on one image: the products of a forward and a backward pass."""
        run = self.folder(arm, 0, 1e-3, BATCH, name=f"count-{arm.name}")
        expert = 0 if job == "expert" else None
        task = build_task(resolve_job(run, load(run), job, expert=expert))  # type: ignore[arg-type]
        inputs = next(task.stream(0, ALONE))
        with FlopCounterMode(display=False) as counter:
            task.losses(task.network, inputs).minimized.mean().backward()
        return counter.get_total_flops() // len(inputs.index)

    def budgets(self) -> dict[str, dict[str, int]]:
        """Return images of each network, and FLOPs, of every arm: all have the FLOPs of `one-r`."""
        routing = self.sizes.router * self.flops(ROUTED, "router")
        total = self.sizes.adapter * self.flops(ONE_SMALL, "monolith")
        found = {}
        for arm in (ONE_LARGE, ONE_SMALL, ROUTED, WHOLE):
            each = self.flops(arm, "expert" if arm.routed else "monolith")
            images = int((total - routing) / CLUSTERS / each if arm.routed else total / each) // BATCH * BATCH
            spent = images * each * (CLUSTERS if arm.routed else 1)
            found[arm.name] = {"images": images, "flops": spent + (routing if arm.routed else 0)}
        found[AVERAGE.name] = {"images": found[ROUTED.name]["images"], "flops": found[ROUTED.name]["flops"] - routing}
        return {**found, BASE.name: {"images": 0, "flops": 0}}

    def train(self, arm: Arm, run: Path) -> float:
        """Train the networks of an arm; return the validation error, of experts each on its own cluster."""
        for job in arm.jobs:
            atoll("train", run, *job)
        if not arm.routed:
            error = Artifact(run, "monolith/final").read(EXPERT).validation_loss
            return float("nan") if error is None else error
        finals = [Artifact(run, layout.final(layout.expert_job(expert))).read(EXPERT) for expert in range(CLUSTERS)]
        pairs = [(one.validation_loss, size) for one, size in zip(finals, self.cluster_sizes(run), strict=True)]
        return sum(error * size for error, size in pairs if error is not None) / sum(size for _, size in pairs)

    def cluster_sizes(self, run: Path) -> list[int]:
        """Return the number of training images of each cluster."""
        shards = (Artifact(run, layout.shards(cluster)).read(SHARDS) for cluster in range(CLUSTERS))
        return [one.rows["train"] for one in shards]

    def rates(self, budgets: dict[str, dict[str, int]]) -> dict[str, float]:
        """Choose the learning rates by the validation error after a quarter of the images, with seed 0."""
        file = self.root / "rates.json"
        if not file.exists():
            errors = []
            for arm in (ONE_LARGE, ROUTED, WHOLE):
                images = max(BATCH, budgets[arm.name]["images"] // 4 // BATCH * BATCH)
                for rate in RATES["whole" if arm.rank is None else "adapters"]:
                    run = self.folder(arm, 0, rate, images, name=f"grid-{arm.name}-{rate:g}")
                    errors.append((self.train(arm, run), arm.name, rate))
            file.write_text(json.dumps(errors))
        # From the highest error to the lowest: the last one of an arm stays.
        chosen = {name: rate for _, name, rate in sorted(json.loads(file.read_text()), reverse=True)}
        print("learning rates", chosen, flush=True)
        return {**chosen, ONE_SMALL.name: chosen[ONE_LARGE.name]}

    def write_adapter(self, run: Path, weights: dict[str, Tensor] | None = None) -> float | None:
        """Write an adapter that is not trained as the merged network of a run; return its validation error.

        Without weights it is a new adapter, which changes nothing.
        """
        spec = resolve_job(run, load(run), "merged")
        if spec.result.begin(EXPERT, {"adapter": run.name}) is None:
            network = build(spec.network)
            network.load_state_dict(weights or network.state_dict())
            task = replace(build_task(spec), network=network.eval())
            content = task.finish(ComputeSpec(images=0, parameters=0, flops=0, seconds=0.0))
            save_network(network, spec.result.folder)
            spec.result.commit(content)
        return spec.result.read(EXPERT).validation_loss

    def evaluate(self, arm: Arm, run: Path, seed: int, model: str, about: dict[str, Any]) -> None:
        """Measure a model, and append the row to results.jsonl."""
        rows = self.results.read_text().splitlines() if self.results.exists() else []
        if any((row["arm"], row["seed"]) == (arm.name, seed) for row in map(json.loads, rows)):
            return
        parts = ("diversity", "trajectories", "diagnostics")
        sizes = ["--num-images", self.sizes.generated, "--num-real", 1200, "--batch-size", 128, "--allow-small"]
        sampling = ["--steps", 20, "--guidance-scale", 1, "--seed", seed]
        atoll("evaluate", run, "--models", model, "--routings", "top-1", *sampling, *sizes, "--without", *parts)
        (result,) = json.loads((run / layout.LATEST_EVALUATION).read_text())["models"]
        found = result["metrics"]["inception"]
        measured = {
            "kid": found["kid"]["value"], "kid_error": found["kid"]["standard_error"], "fid": found["frechet"],
            "num_images": self.sizes.generated,
        }  # fmt: skip
        with self.results.open("a") as file:
            file.write(json.dumps({"arm": arm.name, "seed": seed, **about, **measured}) + "\n")

    def run(self) -> None:
        """Do everything that is not done."""
        self.train_base()
        data = self.root / "data"
        write(data, self.settings(self.pipeline, "openmoji", CLUSTERS, RANK))
        atoll("prepare", data)
        budgets = self.budgets()
        (self.root / "budgets.json").write_text(json.dumps(budgets, indent=1))
        print(json.dumps(budgets), flush=True)
        rates = self.rates(budgets)
        for seed in SEEDS:
            runs: dict[str, Path] = {}
            for arm in (ONE_LARGE, ROUTED, ONE_SMALL, AVERAGE, WHOLE, BASE):
                if arm == BASE and seed:
                    continue  # it has no training
                own, rate = budgets[arm.name], rates.get(arm.name)
                run = runs[arm.name] = self.folder(arm, seed, rate or 1e-3, own["images"] or BATCH)
                if arm == AVERAGE:
                    error = self.write_adapter(run, mean_product(runs[ROUTED.name], self.cluster_sizes(run)))
                elif arm == BASE:
                    error = self.write_adapter(run)
                else:
                    error = self.train(arm, run)
                if arm == ROUTED:
                    atoll("train", run, "--router")
                if arm == WHOLE and not (run / "router").is_symlink():
                    (run / "router").symlink_to(runs[ROUTED.name] / "router")
                model = "experts" if arm.routed else "merged" if arm in (AVERAGE, BASE) else "monolith"
                about = {"rank": arm.rank, "rate": rate, "validation_error": error, **own}
                self.evaluate(arm, run, seed, model, about)


def train_settings(images: int, rate: float, seed: int, batch: int = BATCH) -> dict[str, Any]:
    """Return the training settings: warmup of 5 %, cosine decay, one EMA with a half-life of 2.5 % of the images."""
    return {
        "total_images": images, "batch_size": batch, "lr": rate, "lr_schedule": "cosine", "seed": seed,
        "warmup_images": images // 20, "ema": {"ema": max(1.0, images / 40)}, "sample_every": 0,
        "log_every": max(1, images // 10), "save_every": max(1, images // 2), "workers": 1,
    }  # fmt: skip


def mean_product(run: Path, sizes: list[int]) -> dict[str, Tensor]:
    """Return the adapter of rank 8r whose product is the mean of the products B A of eight adapters of rank r.

    Stacked along the rank, [w1 B1, w2 B2, …] [A1; A2; …] = w1 B1 A1 + w2 B2 A2 + …; the weights w are the shares of
    the clusters' images. The mean of the A times the mean of the B would be something else.
    """
    folders = [run / layout.final(layout.expert_job(expert)) for expert in range(CLUSTERS)]
    adapters = [load_file(folder / WEIGHTS_FILE) for folder in folders]
    shares = [size / sum(sizes) for size in sizes]
    made = {}
    for name in adapters[0]:
        if ".lora_A." in name:
            made[name] = torch.cat([own[name] for own in adapters])
        else:
            made[name] = torch.cat([share * own[name] for share, own in zip(shares, adapters, strict=True)], 1)
    return made


def write(run: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a run; JSON is YAML."""
    run.mkdir(parents=True, exist_ok=True)
    (run / layout.CONFIG_FILE).write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--smoke", action="store_true", help="few images")
    options = parser.parse_args()
    Recipe(options.root, SMOKE if options.smoke else Sizes()).run()
