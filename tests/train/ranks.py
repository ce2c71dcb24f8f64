"""One job on two processes, without torchrun, which would end a process that hangs."""

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from train.workers import _context
from waiting import HOUR

Hook = Callable[[Path, int], None]
"""Called with the run and the rank before the job starts."""


def _work(run: Path, rank: int, port: int, arguments: list[str], hook: Hook) -> None:
    """Run `atoll` with some arguments on one of two processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from atoll.cli import main

    torch.set_num_threads(1)
    with log(run, rank).open("a") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            hook(run, rank)
            code = main(arguments)
        except Exception:
            traceback.print_exc()
            code = 1
    os._exit(code)


def log(run: Path, rank: int) -> Path:
    return run / f"log-{rank}.txt"


def run_ranks(run: Path, *arguments: str, hook: Hook, verb: str = "train", together: bool = False) -> list[int | None]:
    """Run `atoll VERB RUN …` on two processes; return their exit codes, None for one that had to be killed.

    With `together`, a process that fails ends the other, as torchrun does.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[BaseProcess] = [
        _context.Process(target=_work, args=(run, rank, port, [verb, str(run), *arguments], hook)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + HOUR
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if None not in codes or (together and any(codes)):
            break
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    return codes


def no_hook(run: Path, rank: int) -> None:
    """Do not change the job."""


def slow_hashing(run: Path, rank: int, *, phase: str) -> None:
    """Let the main process hash for two seconds in one phase, with a timeout of half a second in the training group."""
    import torch.distributed as dist

    from atoll.core import artifacts
    from atoll.core.artifacts import Artifact
    from atoll.train import job
    from atoll.train.checkpoints import Checkpoints

    owner, name = {"save": (Checkpoints, "write"), "resume": (Checkpoints, "load_newest"), "end": (job, "commit")}[
        phase
    ]
    # A checkpoint is hashed while it is written; otherwise files are read and hashed.
    hashing, function = (Artifact, "write_parts") if phase == "save" else (artifacts, "sha256_of")
    work, hash_file = getattr(owner, name), getattr(hashing, function)
    slept: list[bool] = []

    def hash_slowly(*arguments):
        if rank == 0 and not slept:
            time.sleep(2)
        slept.append(True)
        return hash_file(*arguments)

    @wraps(work)
    def with_short_timeout(*arguments, **options):
        before = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
        setattr(hashing, function, hash_slowly)
        try:
            return work(*arguments, **options)
        finally:
            dist.distributed_c10d._set_pg_timeout(before)
            setattr(hashing, function, hash_file)

    setattr(owner, name, with_short_timeout)


def full_disk(run: Path, rank: int) -> None:
    """Make the main process fail when it writes the result."""
    from atoll.train import job

    def fail(*arguments, **options):
        raise OSError("no space left on device")

    job.save_network = fail


def die(run: Path, rank: int, *, who: int) -> None:
    """Kill the main process (0) while it writes the result, or the other one (1) while both validate."""
    from atoll.experts.validation import ValidationSet
    from atoll.train import job

    def exit_now(*arguments, **options):
        os._exit(9)

    if who == 0:
        job.save_network = exit_now
    elif rank == 1:
        ValidationSet.gather = exit_now


def record_batches(run: Path, rank: int) -> None:
    """Write the first row of every batch that this process validates to a file."""
    from atoll.experts.validation import ValidationSet

    batches = ValidationSet.batches

    def recorded(self, device, processes=None):
        if processes is None:  # not shared among the processes
            yield from batches(self, device)
            return
        with (run / f"rows-{rank}.txt").open("a") as file:
            for part in batches(self, device, processes):
                file.write(f"{part.first} {len(part.batch.index)}\n")
                yield part

    ValidationSet.batches = recorded
