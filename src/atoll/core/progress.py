"""Progress of long work: a bar with rate and remaining time on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm

# As wide as a terminal of 80 columns allows, with a text such as `experts/000 loss 0.412 lr 2e-03` at its end.
_BAR = "{desc}: {percentage:.0f}%|{bar}| {n_fmt}/{total_fmt} [{rate_noinv_fmt}<{remaining}]{postfix}"

# A choice: frequent enough to see that a job is alive, rare enough for a log of hours.
SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """A counter of finished work, such as tqdm's."""

    def update(self, amount: int = 1) -> object:
        """Add to the finished work."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> object:
        """Show a text after the numbers."""


class _Lines:
    """Progress as lines, for logs and pipes."""

    def __init__(self, what: str, total: int, done: int, *, unit: str) -> None:
        self.what, self.total, self.done, self.unit, self.text = what, total, done, unit, ""
        # The rate counts from the first progress in this process: not what an interrupted one left behind, and not the
        # time before, in which a launch prepares the data.
        self.first: tuple[int, float] | None = None
        self.last = time.monotonic()

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        del refresh
        self.text = s

    def update(self, amount: int = 1) -> None:
        self.done += amount
        now = time.monotonic()
        if self.first is None and amount:
            self.first = self.done, now
        if now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            parts = [f"{self.done:,} of {self.total:,} {self.unit}"]
            if self.first and self.done > self.first[0]:
                rate = (self.done - self.first[0]) / max(now - self.first[1], 1e-9)
                parts += [f"{rate:.1f} per second", f"{duration((self.total - self.done) / rate)} left"]
            print(f"{self.what}: {', '.join([*parts, *filter(None, [self.text])])}", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int, done: int = 0, *, unit: str = "images") -> Iterator[Progress]:
    """Show the progress of work of `total` units, of which `done` were finished before."""
    if sys.stderr.isatty():
        with tqdm(
            total=total, initial=done, desc=what, unit="", unit_scale=True, dynamic_ncols=True, bar_format=_BAR
        ) as bar:
            yield bar
    else:
        yield _Lines(what, total, done, unit=unit)


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes, hours or days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
