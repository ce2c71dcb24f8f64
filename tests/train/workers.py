"""Jobs in separate processes, which can be killed: forks of a server that has imported everything."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from waiting import HOUR, wait_for

TINY = {
    "networks": {"default": {"name": "DiT-XS/8", "width": 32, "depth": 2, "heads": 2}},
    "train": {
        "total_images": 160, "batch_size": 8, "lr": 1e-3, "warmup_images": 32,
        "log_every": 32, "save_every": 32, "sample_every": 0,
        "workers": 1, "ema": {"short": 50.0, "long": 500.0},
    },
    "router": {"network": {"name": "DiT-XS/8", "width": 32, "depth": 2, "heads": 2}},
    "student": {"block": 24},
}  # fmt: skip


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["atoll.cli", "atoll.train", "atoll.data.prepare"])


def _work(arguments: list[str], log: str, prepare: Callable[[], None] | None = None) -> None:
    from atoll.cli import main

    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    with open(log, "a") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        code = main(arguments)
    os._exit(code)


def _kill_at_checkpoint(images: int) -> None:
    """Let this process kill itself as soon as it has committed the checkpoint at this number of images."""
    from atoll.train.checkpoints import Checkpoints

    write = Checkpoints.write

    def write_and_die(self: Checkpoints, copy: object, at: int, seconds: float) -> object:
        made = write(self, copy, at, seconds)
        if at == images:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    Checkpoints.write = write_and_die


def stop_at_the_first_line() -> None:
    """Let this process stop itself (SIGSTOP) when it has written its first line of metrics."""
    from atoll.train.metrics_logger import MetricsLogger

    write = MetricsLogger.write

    def write_and_stop(self: MetricsLogger, *arguments: object, **options: object) -> None:
        write(self, *arguments, **options)
        MetricsLogger.write = write
        os.kill(os.getpid(), signal.SIGSTOP)

    MetricsLogger.write = write_and_stop


@contextlib.contextmanager
def stopped(process: multiprocessing.Process) -> Iterator[None]:
    """Wait until a process has stopped itself; let it continue at the end of the block."""
    wait_for(lambda: process.exitcode is not None or psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert process.exitcode is None
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def start(run: Path, *arguments: str, prepare: Callable[[], None] | None = None) -> multiprocessing.Process:
    """Start `atoll train RUN …` in a separate process; call `prepare` there first."""
    return start_verb(run / "log.txt", "train", str(run), *arguments, prepare=prepare)


def start_verb(log: Path, *arguments: str, prepare: Callable[[], None] | None = None) -> multiprocessing.Process:
    """Start `atoll VERB …` in a separate process; call `prepare` there first."""
    process = _context.Process(target=_work, args=(list(arguments), str(log), prepare))
    process.start()
    return process


def finish(run: Path, *arguments: str) -> int:
    """Train to the end; return the exit code."""
    process = start(run, *arguments)
    process.join(HOUR)
    assert process.exitcode is not None, "the job hangs"
    return process.exitcode


def kill_at(run: Path, images: int, *arguments: str) -> None:
    """Train until a checkpoint, at which the job dies of SIGKILL, however busy the machine is."""
    process = start(run, *arguments, prepare=partial(_kill_at_checkpoint, images))
    process.join(HOUR)
    assert process.exitcode == -signal.SIGKILL, (run / "log.txt").read_text()


def kill_after(run: Path, seconds: float, *arguments: str) -> int:
    """Kill the job after some time, unless it ends before; return the exit code."""
    process = start(run, *arguments)
    process.join(seconds)
    if process.exitcode is None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode


def metrics(run: Path, job: str) -> list[dict]:
    return [json.loads(line) for line in (run / job / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of every safetensors file in a folder, by file and name."""
    return {
        f"{file.name}:{key}": value
        for file in sorted(folder.glob("*.safetensors"))
        for key, value in load_file(file).items()
    }


def assert_same_weights(first: Path, second: Path) -> None:
    """Check that weights are equal bit for bit: for jobs of equal batches, on one machine, with one thread each."""
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    assert a, f"nothing in {first}"
    for key in a:
        assert torch.equal(a[key], b[key]), key


def torchrun(run: Path, processes: int, *arguments: str, restarts: int = 0) -> list[str]:
    """Return the command line of the same job under torchrun."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "--max-restarts", str(restarts), "-m", "atoll.cli", "train", str(run), *arguments,
    ]  # fmt: skip
