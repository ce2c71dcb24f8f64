"""What launching costs an expert: the same job run plainly, and as an attempt under a lease.

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
    """One whole job, from its start to its result."""
    for name in ("experts", "leases", "launch"):
        shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, "-m", "atoll.cli", "train", str(folder), "--expert", "0"]
    before = attempt(folder) if launched else []
    subprocess.run([*before, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def attempt(run: Path) -> list[str]:
    module = "atoll.launch.supervisor"
    return [sys.executable, "-m", module, "--run", str(run), "--step", "experts/000", "--"]


def supervision(folder: Path, seconds: float) -> tuple[float, float]:
    """Seconds that an attempt adds to a command that only sleeps, and the processor time that it took itself."""
    start = time.perf_counter()
    process = subprocess.Popen([*attempt(folder), "sleep", str(seconds)], stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - start - seconds, usage.ru_utime + usage.ru_stime


def measure(quick: bool) -> list[Row]:
    """All rows."""
    samples, sleep = (64, 5.0) if quick else (1024, 60.0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        make_run(folder, batch=16, samples=samples)
        sides = {"plain": lambda: job(folder, launched=False), "launched": lambda: job(folder, launched=True)}
        times = interleave(sides, repeats=3 if quick else 7, warmup=0 if quick else 1)
        added, processor = supervision(folder, sleep)
        _, at_once = supervision(folder, 0)
    busy = max(0.0, processor - at_once) / sleep
    return [
        Row(f"launched / plain, a whole job of {times['plain']:.0f} s", times["launched"] / times["plain"]),
        Row("seconds that an attempt adds to a job", added),
        Row("supervision: share of one core while the job runs", busy, 0.02, "lower"),
        Row("both, on an expert of one hour", added / HOUR + busy, 0.02, "lower"),
    ]


if __name__ == "__main__":
    run("atoll launch beside the plain command", measure)
