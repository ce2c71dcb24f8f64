"""Measure the training loop over the bare step, checkpoints, memory, and two processes against two threads."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.config import to_yaml
from atoll.core.distributed import DistContext
from atoll.core.manifests import SHARDS
from atoll.data.dataset import Shards
from atoll.nets import build
from atoll.train import TrainSpec, build_task, resolve_job
from atoll.train.align import Projector
from atoll.train.checkpoints import Checkpoints, CheckpointSaver, TrainState
from atoll.train.ema import EMA
from atoll.train.estimate import job_bytes
from atoll.train.loop import make_optimizer, make_state, train
from atoll.train.tasks import ExpertTask, Forward, Losses, TrainingInputs, condition_of
from harness import Row, interleave, run

CHANNELS, SIDE, TEXT, TOKENS = 8, 8, 384, 16
GRID, PATCH_DIMENSIONS = 4, 64
ALONE = DistContext(0, 1, torch.device("cpu"))


def make_run(folder: Path, rows: int = 4096, *, flip: bool = False, **train_settings: object) -> configuration.Config:
    """Write a run with one cluster of random latents, text and patch features, in the format of real shards."""
    artifact = Artifact(folder, "data/shards/cluster_000")
    settings = {
        "features": {"patch_dimensions": PATCH_DIMENSIONS},
        "clusters": {"count": 1},
        "networks": {"default": "DiT-XS/2"},
        "train": {"sample_every": 0, "log_every": 10**9, "save_every": 10**9, **train_settings},
    }
    config = configuration.resolve(settings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "atoll.yaml").write_text(to_yaml(config))
    if artifact.begin(SHARDS, {"random": True}):
        return config
    generator = torch.Generator().manual_seed(0)
    shape = [CHANNELS, SIDE, SIDE]
    # Noise around one image, which a few steps can learn: a shared run refuses networks that have learned nothing.
    center = torch.randn(shape, generator=generator)
    for split, count in (("train", rows), ("validation", 64)):
        tensors = {
            "mean": (center + 0.1 * torch.randn(count, *shape, generator=generator)).half(),
            "std": torch.full((count, *shape), 0.1).half(),
            "tokens": torch.randn(count * TOKENS, TEXT, generator=generator).half(),
            "lengths": torch.full((count,), TOKENS, dtype=torch.int32),
            "pooled": torch.randn(count, TEXT, generator=generator).half(),
            "label": torch.full((count,), -1, dtype=torch.int32),
            "patches": torch.randint(
                -127, 128, (count, GRID, GRID, PATCH_DIMENSIONS), dtype=torch.int8, generator=generator
            ),
        }
        if flip:
            tensors |= {f"{name}_mirrored": tensors[name].flip(-1) for name in ("mean", "std")}
        artifact.write_tensors(f"{split}-000000.safetensors", tensors)
    text = {"encoder": "local", "weights": "", "max_tokens": TOKENS, "dimensions": TEXT, "pooled": TEXT}
    latents = {"autoencoder": "pixels", "weights": None, "resolution": SIDE, "shape": shape}
    statistics = {"mean": [0.0] * CHANNELS, "std": [1.0] * CHANNELS}
    artifact.commit(
        {
            "cluster": 0, "clusters": 1, "rows": {"train": rows, "validation": 64}, "labels": [], "source": "random",
            "fingerprint": "", "latents": latents, "statistics": statistics, "text": text, "flip": flip,
            "patches": {"model": "local", "weights": "", "grid": GRID, "steps": [0.1] * PATCH_DIMENSIONS},
        }
    )  # fmt: skip
    return config


class Bare:
    """A step of forward, backward and optimizer only, on tensors in memory; with alignment if the job has it."""

    def __init__(self, job: TrainSpec) -> None:
        self.network = build(job.network)
        self.align = None if job.align is None else (job.align, Projector(job.align))
        projector = None if self.align is None else self.align[1]
        self.optimizers = make_state(self.network, job.settings, ALONE, auxiliary=projector).optimizers
        batch = Shards.open(job.run, [0]).read(torch.arange(job.settings.batch_size).numpy(), patches=True)
        self.patches = batch.patches
        condition = condition_of(batch, job.conditioning)
        self.x, self.t = batch.mean.float(), torch.rand(len(batch.index)) * 1000
        self.condition = condition.drop(torch.zeros(len(self.x), dtype=torch.bool))

    def step(self) -> float:
        """Make one step; return its seconds."""
        start = time.perf_counter()
        if self.align is None:
            loss = (self.network(self.x, self.t, self.condition) - self.x).square().mean()
        else:
            spec, projector = self.align
            output, tokens = self.network(self.x, self.t, self.condition, tap=spec.block)
            loss = (output - self.x).square().mean() + projector(
                tokens, self.patches, spec.token_grid(*self.x.shape[2:])
            ).mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start


class Interleaved(ExpertTask):
    """An expert's task that runs a bare step before each step of the loop and times both."""

    bare: Bare
    seconds: dict[str, list[float]]
    ended: float

    def losses(self, forward: Forward, inputs: TrainingInputs) -> Losses:
        """Time the loop from call to call, without the bare step in between."""
        now = time.perf_counter()
        self.seconds["loop"].append(now - self.ended)
        self.seconds["bare"].append(self.bare.step())
        object.__setattr__(self, "ended", time.perf_counter())
        return super().losses(forward, inputs)


def overhead(folder: Path, name: str, batch_size: int, *, steps: int, arm: str = "") -> Row:
    """Measure the rate of the loop (with reading, noising, EMA and logging) over that of the bare step.

    `arm` is a flag that both have: flip, align or muon.
    """
    flags = {"flip": {"flip": True}, "align": {"align": {"until": 1.0}}, "muon": {"optimizer": "muon"}}.get(arm, {})
    config = make_run(folder, batch_size=batch_size, total_images=batch_size * steps, log_every=8 * batch_size, **flags)
    job = resolve_job(folder, config.model_copy(update={"networks": {"default": name}}), "expert", expert=0)
    plain = build_task(job)
    task = Interleaved(**{field: getattr(plain, field) for field in plain.__dataclass_fields__})
    timed = {"bare": Bare(job), "seconds": {"loop": [], "bare": []}, "ended": time.perf_counter()}
    for key, value in timed.items():
        object.__setattr__(task, key, value)
    train(task, Checkpoints(folder, job.job, {}, ALONE))
    loop, bare = (sum(task.seconds[which][3:]) for which in ("loop", "bare"))  # the first ones warm up
    return Row(f"loop / bare step, {name}, batch size {batch_size}{arm and f', {arm}'}", bare / loop, 0.95)


def checkpoint_pause(folder: Path, name: str) -> list[Row]:
    """Measure the pause of training and the writing of a checkpoint, against a write of as many bytes to the disk."""
    config = make_run(folder).model_copy(update={"networks": {"default": name}})
    job = resolve_job(folder, config, "expert", expert=0)
    network = build(job.network)
    state = TrainState(network, EMA(network, {"ema": 1000.0}), make_optimizer(network, job.settings, ALONE))
    saver = CheckpointSaver(Checkpoints(folder, "pause", {}, ALONE, keep_last=1), lambda _: None)
    blob = b"\0" * sum(tensor.numel() * tensor.element_size() for tensor in state.tensors().values())
    counter = iter(range(1, 10_000))

    def plain() -> None:
        with (folder / "blob").open("wb") as stream:
            stream.write(blob)
            stream.flush()
            os.fsync(stream.fileno())

    pauses = []

    def save() -> None:
        start = time.perf_counter()
        saver.save(state, next(counter), 0.0)
        pauses.append(time.perf_counter() - start)
        saver.wait()

    times = interleave({"save": save, "plain": plain}, repeats=5)
    ratio = times["save"] / times["plain"]
    return [
        Row(f"checkpoint of {len(blob) / 1e6:.0f} MB / write of as many bytes", ratio, None, "lower"),
        Row("checkpoint, seconds until it is committed", times["save"], None, "lower"),
        Row("checkpoint pause, seconds until training continues", statistics.median(pauses[1:]), None, "lower"),
    ]


def memory(name: str) -> Row:
    """Measure the peak memory of some steps over the estimate of --dry-run, in a separate process."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import train; train.peak({name!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Row(f"peak memory / estimate, {name}, batch size 32", float(result.stdout.split()[-1]), None, "lower")


def peak(name: str) -> None:
    """Print the measured over the estimated memory of three steps."""
    with tempfile.TemporaryDirectory() as scratch:
        config = make_run(Path(scratch), rows=256, batch_size=32, total_images=96)
        job = resolve_job(Path(scratch), config.model_copy(update={"networks": {"default": name}}), "expert", expert=0)
        estimate = job_bytes(job.network, job.shapes, job.settings, device=torch.device("cpu"), objective=job.objective)
        before = memory_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak (VmHWM)
        train(build_task(job), Checkpoints(Path(scratch), job.job, {}, ALONE))
        print((memory_bytes("VmHWM") - before) / estimate)


def memory_bytes(field: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) memory of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def scaling(folder: Path, images: int) -> Row:
    """Measure two processes of one thread over one process of two threads, each as a whole command."""
    make_run(folder, batch_size=64, total_images=images, log_every=images)
    rates = {}
    command = ["-m", "atoll.cli", "train", str(folder), "--expert", "0", "--train.parallel", "ddp"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for label, start, threads in (("one", [], "2"), ("two", launch, "1")):
        shutil.rmtree(folder / "experts", ignore_errors=True)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
        arguments = [sys.executable, *start, *command]
        subprocess.run(arguments, env=environment, check=True, capture_output=True)
        last = json.loads((folder / "experts/000/metrics.jsonl").read_text().splitlines()[-1])
        rates[label] = images / last["seconds"]
    return Row("DDP of 2 processes / 1 process of 2 threads", rates["two"] / rates["one"])


def measure(quick: bool) -> list[Row]:
    """Return all rows."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = [("DiT-XS/2", 64)] if quick else [("DiT-XS/2", 64), ("DiT-S/2", 64)]
        rows = [
            overhead(folder / f"{i}{arm}", name, batch_size, steps=20 if quick else 40, arm=arm)
            for i, (name, batch_size) in enumerate(sizes)
            for arm in ("", "flip", "align", "muon")
        ]
        rows += checkpoint_pause(folder / "pause", "DiT-XS/2" if quick else "DiT-S/2")
        if not quick:
            rows += [memory(name) for name in ("DiT-XS/2", "DiT-S/2", "DiT-B/2")]
            rows.append(scaling(folder / "ddp", 64 * 16))
    return rows


if __name__ == "__main__":
    run("Training relative to the bare step", measure)
