"""Progress and messages of long work: a bar on a terminal, lines elsewhere, or calls of a Python function.

The verbs print. The functions of `atoll` run the same code under `listening`, where nothing is printed.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import IO, Protocol

from tqdm import tqdm

# As wide as a terminal of 80 columns allows, with a text such as `experts/000 loss 0.412 lr 2e-03` at its end.
_BAR = "{desc}: {percentage:.0f}%|{bar}| {n_fmt}/{total_fmt} [{rate_noinv_fmt}<{remaining}]{postfix}"

# A choice: frequent enough to see that a job is alive, rare enough for a log of hours.
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Update:
    """The state of some work, or a message."""

    what: str
    """Name of the work, such as `experts/000`; empty for a message."""
    done: int
    total: int
    unit: str
    """What `done` and `total` count: images, steps, jobs."""
    text: str
    """What the bar shows after the numbers, or the message."""


OnProgress = Callable[[Update], object]
_listener: ContextVar[OnProgress | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: OnProgress | None) -> Iterator[None]:
    """Call `listener` instead of printing, in this thread."""
    before = _listener.set(listener or (lambda _: None))
    try:
        yield
    finally:
        _listener.reset(before)


def say(text: str, *, file: IO[str] | None = None) -> None:
    """Print a message at once."""
    if listener := _listener.get():
        listener(Update("", 0, 0, "", text))
    else:
        print(text, file=file, flush=True)


def warn(text: str) -> None:
    """Print a warning; under `listening` it is one of Python's."""
    if _listener.get():
        warnings.warn(text, stacklevel=2)
    else:
        print(f"warning: {text}", file=sys.stderr, flush=True)


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


class _Calls:
    """Progress as calls of a listener."""

    def __init__(self, what: str, total: int, done: int, *, unit: str, listener: OnProgress) -> None:
        self.what, self.total, self.done, self.unit, self.text, self.listener = what, total, done, unit, "", listener

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        del refresh
        self.text = s

    def update(self, amount: int = 1) -> None:
        self.done += amount
        self.listener(Update(self.what, self.done, self.total, self.unit, self.text))


@contextmanager
def progress(what: str, total: int, done: int = 0, *, unit: str = "images") -> Iterator[Progress]:
    """Show the progress of work of `total` units, of which `done` were finished before."""
    if listener := _listener.get():
        yield _Calls(what, total, done, unit=unit, listener=listener)
    elif sys.stderr.isatty():
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
