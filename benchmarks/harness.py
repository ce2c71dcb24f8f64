"""The common part of all benchmarks: ratios measured in interleaved repeats, printed as a table and as JSON.

python benchmarks/NAME.py [--quick] [--json]
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One measured ratio. `target` is None where the value is only reported."""

    name: str
    value: float
    target: float | None = None
    better: Literal["higher", "lower"] = "higher"

    @property
    def met(self) -> bool | None:
        """Return whether the target is met; None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def interleave(
    sides: dict[str, Callable[[], object]],
    repeats: int = 7,
    warmup: int = 1,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each side. Sides alternate, so drift of the machine affects them equally.

    With `seconds`, repeat for that long, but at least three rounds. `clock` may be that of the processor time.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(warmup):
        for side in sides.values():
            side()
    start, rounds = time.perf_counter(), 0
    gc.disable()
    try:
        while rounds < 3 or (rounds < repeats if seconds is None else time.perf_counter() - start < seconds):
            order = list(sides) if rounds % 2 == 0 else list(reversed(sides))
            for name in order:
                before = clock()
                sides[name]()
                times[name].append(clock() - before)
            rounds += 1
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, object]:
    """Return a description of this machine."""
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def run(title: str, measure: Callable[[bool], Iterable[Row]]) -> None:
    """Parse the two options, measure, and print the table and, with --json, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="fewer rows and repeats: at most 50 seconds on 2 cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    rows = list(measure(options.quick))
    table = Table("name", "value", "target", "met", title=title)
    for row in rows:
        target = "" if row.target is None else f"{'≥' if row.better == 'higher' else '≤'} {row.target:g}"
        table.add_row(row.name, f"{row.value:.4g}", target, {None: "", True: "yes", False: "NO"}[row.met])
    Console(width=120).print(table)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "machine": machine()}))
