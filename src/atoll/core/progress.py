"""Progress of long work: a bar with rate and remaining time on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm

# A choice: frequent enough to see that a job is alive, rare enough for a log of hours.
SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """A counter of finished work, such as tqdm's."""

    def update(self, amount: int = 1) -> object:
        """Add to the finished work."""


class _Lines:
    """Progress as lines, for logs and pipes."""

    def __init__(self, what: str, total: int, done: int, *, unit: str) -> None:
        self.what, self.total, self.done, self.unit = what, total, done, unit
        # The rate counts only this process's work, not what an interrupted one left behind.
        self.before = done
        self.start = self.last = time.monotonic()

    def update(self, amount: int = 1) -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            rate = (self.done - self.before) / (now - self.start)
            left = (self.total - self.done) / rate if rate else float("inf")
            count = f"{self.done:,} of {self.total:,} {self.unit}"
            print(f"{self.what}: {count}, {rate:.1f} per second, {left:.0f} s left", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int, done: int = 0, *, unit: str = "images") -> Iterator[Progress]:
    """Show the progress of work of `total` units, of which `done` were finished before."""
    if sys.stderr.isatty():
        with tqdm(total=total, initial=done, desc=what, unit=f" {unit}", dynamic_ncols=True) as bar:
            yield bar
    else:
        yield _Lines(what, total, done, unit=unit)
