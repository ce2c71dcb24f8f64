"""Run `atoll` commands in child processes that can be killed, each with its environment."""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from waiting import HOUR

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["atoll.cli", "atoll.train", "atoll.data.prepare", "atoll.apps.share.worker"])


def _work(arguments: list[str], environment: dict[str, str], log: str, prepare: Callable[[], None] | None) -> None:
    from atoll.cli import main

    if prepare is not None:
        prepare()
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(log, "a", buffering=1) as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        code = main(arguments)
        sys.stdout.flush()
    os._exit(code)


def start(
    log: Path, environment: dict[str, str], *arguments: str, prepare: Callable[[], None] | None = None
) -> multiprocessing.Process:
    """Start an `atoll` command, after `prepare` in the same process; its output goes to `log`."""
    process = _context.Process(target=_work, args=(list(arguments), environment, str(log), prepare))
    process.start()
    return process


def end(process: multiprocessing.Process, log: Path, code: int = 0) -> None:
    """Wait for a command; check its exit code."""
    process.join(HOUR)
    assert process.exitcode == code, f"exit code {process.exitcode}:\n{log.read_text()}"
