"""Measure the overhead of `atoll launch`: the same job run directly, and under the supervisor with a lease.

python benchmarks/launcher.py [--quick] [--json]
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Row, interleave, run
from train import make_run

HOUR = 3600.0


def job(folder: Path, launched: bool) -> None:
    """Run one job from start to result."""
    for name in ("experts", "leases", "launch"):
        shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, "-m", "atoll.cli", "train", str(folder), "--expert", "0"]
    before = supervised(folder) if launched else []
    subprocess.run([*before, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def supervised(run: Path) -> list[str]:
    module = "atoll.apps.launch.supervisor"
    return [sys.executable, "-m", module, "--run", str(run), "--step", "experts/000", "--"]


def supervision(folder: Path, seconds: float) -> tuple[float, float]:
    """Return the seconds that the supervisor adds to a command that sleeps, and the CPU time of the supervisor."""
    start = time.perf_counter()
    process = subprocess.Popen([*supervised(folder), "sleep", str(seconds)], stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - start - seconds, usage.ru_utime + usage.ru_stime


def measure(quick: bool) -> list[Row]:
    """Return all rows."""
    images, sleep = (64, 5.0) if quick else (1024, 60.0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        make_run(folder, batch_size=16, total_images=images)
        sides = {"direct": lambda: job(folder, launched=False), "launched": lambda: job(folder, launched=True)}
        times = interleave(sides, repeats=3 if quick else 7, warmup=0 if quick else 1)
        added, cpu = supervision(folder, sleep)
        _, startup = supervision(folder, 0)
    busy = max(0.0, cpu - startup) / sleep
    return [
        Row(f"launched / direct, a job of {times['direct']:.0f} s", times["launched"] / times["direct"]),
        Row("seconds that the supervisor adds to a job", added),
        Row("CPU of the supervisor while the job runs, share of one core", busy, 0.02, "lower"),
        Row("total overhead for an expert of one hour", added / HOUR + busy, 0.02, "lower"),
    ]


if __name__ == "__main__":
    run("atoll launch relative to the direct command", measure)
