"""Waiting in tests: for a condition, never for a duration that depends on how busy the machine is."""

import time
from collections.abc import Callable

HOUR = 3600.0
"""Deadline in seconds of everything that a test waits for. It only ends tests that hang."""


def wait_for(condition: Callable[[], object], what: str = "it") -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + HOUR
    while not condition():
        assert time.monotonic() < deadline, f"{what} never happened"
        time.sleep(0.01)


class Clock:
    """A clock that stands still unless a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
