"""The loop beside the bare step, the pause of a checkpoint, memory by size, and two processes beside two threads."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from atoll import config as configuration
from atoll.nets import build
from atoll.run import Artifact
from atoll.train import Job
from atoll.train.checkpoints import Checkpoints, State
from atoll.train.compute import training_bytes
from atoll.train.ema import Averages
from atoll.train.loop import make_optimizer, train
from atoll.train.tasks import condition_of
from atoll.train.world import World
from harness import Row, interleave, run

CHANNELS, SIDE, TEXT, TOKENS = 8, 8, 384, 16
ALONE = World(0, 1, torch.device("cpu"))


def make_run(folder: Path, rows: int = 4096, **train_settings: object) -> configuration.Config:
    """A run with one cluster of random latents and text in the layout of the real shards."""
    artifact = Artifact(folder, "data/shards/cluster_000")
    settings = {
        "clusters": {"count": 1},
        "networks": {"default": "DiT-XS/2"},
        "train": {"grid_every": 0, "log_every": 10**9, "save_every": 10**9, **train_settings},
    }
    config = configuration.resolve(settings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "atoll.yaml").write_text(configuration.to_yaml(config))
    if artifact.begin("shards", {"random": True}):
        return config
    generator = torch.Generator().manual_seed(0)
    shape = [CHANNELS, SIDE, SIDE]
    for split, count in (("train", rows), ("held-out", 64)):
        tensors = {
            "mean": torch.randn(count, *shape, generator=generator).half(),
            "std": torch.full((count, *shape), 0.1).half(),
            "tokens": torch.randn(count * TOKENS, TEXT, generator=generator).half(),
            "lengths": torch.full((count,), TOKENS, dtype=torch.int32),
            "pooled": torch.randn(count, TEXT, generator=generator).half(),
            "label": torch.full((count,), -1, dtype=torch.int32),
        }
        artifact.write_tensors(f"{split}-000000.safetensors", tensors)
    text = {"encoder": "random", "weights": "", "max_tokens": TOKENS, "dimensions": TEXT, "pooled": TEXT}
    latents = {"autoencoder": "pixels", "weights": None, "resolution": SIDE, "shape": shape}
    statistics = {"mean": [0.0] * CHANNELS, "std": [1.0] * CHANNELS}
    artifact.commit(
        {
            "cluster": 0, "clusters": 1, "rows": {"train": rows, "held-out": 64}, "labels": [], "source": "random",
            "fingerprint": "", "latents": latents, "statistics": statistics, "text": text,
        }
    )  # fmt: skip
    return config


def bare_step(job: Job, steps: int) -> float:
    """Samples a second of forward, backward and AdamW alone, on tensors in memory."""
    network = build(job.description)
    optimizer = make_optimizer(network, job.settings)
    batch = job.shards.read(torch.arange(job.settings.batch).numpy())
    x, t, condition = batch.mean.float(), torch.rand(len(batch.index)) * 1000, condition_of(batch, job.told)
    condition = condition.drop(torch.zeros(len(x), dtype=torch.bool))
    for step in range(steps + 2):
        if step == 2:  # the first two warm up
            start = time.perf_counter()
        (network(x, t, condition) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps * len(x) / (time.perf_counter() - start)


def loop_rate(job: Job, folder: Path, steps: int) -> float:
    """Samples a second of the whole loop between its first line of metrics and its last: reading, noising and all."""
    shutil.rmtree(folder / job.name, ignore_errors=True)
    batch = job.settings.batch
    settings = job.settings.model_copy(update={"samples": (steps + 2) * batch, "log_every": 2 * batch})
    train(job.task(), settings, Checkpoints(folder, job.name, {}, ALONE), ALONE)
    lines = [json.loads(line) for line in (folder / job.name / "metrics.jsonl").read_text().splitlines()]
    return (lines[-1]["samples"] - lines[0]["samples"]) / (lines[-1]["seconds"] - lines[0]["seconds"])


def overhead(folder: Path, name: str, batch: int, steps: int, rounds: int) -> Row:
    """The loop's rate over the bare step's, rounds of each in turn."""
    config = make_run(folder, batch=batch, samples=batch * steps)
    config = config.model_copy(update={"networks": {"default": name}})
    job = Job(folder, config, "expert", 0)
    ratios = []
    for _ in range(rounds):
        bare = bare_step(job, steps)
        ratios.append(loop_rate(job, folder, steps) / bare)
    return Row(f"loop / bare step, {name} batch {batch}", sorted(ratios)[len(ratios) // 2], 0.95)


def checkpoint_pause(folder: Path, name: str) -> list[Row]:
    """Seconds of a checkpoint against a plain copy of the same bytes to the disk."""
    config = make_run(folder).model_copy(update={"networks": {"default": name}})
    job = Job(folder, config, "expert", 0)
    network = build(job.description)
    state = State(network, Averages(network, {"ema": 1000.0}), make_optimizer(network, job.settings))
    checkpoints = Checkpoints(folder, "pause", {}, ALONE, keep_last=1)
    state.tensors()
    blob = b"\0" * sum(tensor.numel() * tensor.element_size() for tensor in state.tensors().values())
    counter = iter(range(1, 10_000))

    def plain() -> None:
        with (folder / "blob").open("wb") as stream:
            stream.write(blob)
            stream.flush()
            os.fsync(stream.fileno())

    times = interleave({"save": lambda: checkpoints.save(state, next(counter), {}), "plain": plain}, repeats=5)
    ratio = times["save"] / times["plain"]
    return [
        Row(f"checkpoint of {len(blob) / 1e6:.0f} MB / plain write of as many bytes", ratio, None, "lower"),
        Row("checkpoint pause, seconds", times["save"], None, "lower"),
    ]


def memory(name: str) -> Row:
    """Peak memory of some steps over what --dry-run says, in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import train; train.peak({name!r})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Row(f"peak memory / estimate, {name} batch 32", float(answer.stdout.split()[-1]), None, "lower")


def peak(name: str) -> None:
    """Print measured over estimated memory of three steps."""
    with tempfile.TemporaryDirectory() as scratch:
        config = make_run(Path(scratch), rows=256, batch=32, samples=96)
        job = Job(Path(scratch), config.model_copy(update={"networks": {"default": name}}), "expert", 0)
        estimate = training_bytes(job.cost, 32, 1, half=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        train(job.task(), job.settings, Checkpoints(Path(scratch), job.name, {}, ALONE), ALONE)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / estimate)


def scaling(folder: Path, samples: int) -> Row:
    """Two processes of one thread over one process of two threads, each as a whole command."""
    make_run(folder, batch=64, samples=samples, log_every=samples)
    rates = {}
    command = ["-m", "atoll.cli", "train", str(folder), "--expert", "0", "--train.parallel", "ddp"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for label, start, threads in (("one", [], "2"), ("two", launch, "1")):
        shutil.rmtree(folder / "experts", ignore_errors=True)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
        arguments = [sys.executable, *start, *command]
        subprocess.run(arguments, env=environment, check=True, capture_output=True)
        last = json.loads((folder / "experts/000/metrics.jsonl").read_text().splitlines()[-1])
        rates[label] = samples / last["seconds"]
    return Row("DDP of 2 processes / 1 process of 2 threads", rates["two"] / rates["one"])


def measure(quick: bool) -> list[Row]:
    """All rows."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = [("DiT-XS/2", 64)] if quick else [("DiT-XS/2", 64), ("DiT-S/2", 64)]
        rows = [
            overhead(folder / str(i), name, batch, 6 if quick else 10, 3 if quick else 5)
            for i, (name, batch) in enumerate(sizes)
        ]
        rows += checkpoint_pause(folder / "pause", "DiT-XS/2" if quick else "DiT-S/2")
        if not quick:
            rows += [memory(name) for name in ("DiT-XS/2", "DiT-S/2", "DiT-B/2")]
            rows.append(scaling(folder / "ddp", 64 * 16))
    return rows


if __name__ == "__main__":
    run("atoll.train beside the bare step", measure)
