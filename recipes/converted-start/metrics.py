"""Loss over samples of experts from scratch and from a converted start: figures.py SCRATCH CONVERTED EXPERT...

Both see the same pictures, times and noise in the same order, so their losses compare sample by sample.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

BINS = 10


def spans(run: str, expert: str) -> list[tuple[int, int, float]]:
    """(from, to, mean loss) of each line of the log, counted in samples."""
    lines = (Path(run) / f"experts/{int(expert):03d}/metrics.jsonl").read_text().splitlines()
    found = sorted({line["samples"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}.items())
    return [(start, end, loss) for (start, _), (end, loss) in pairwise([(0, 0.0), *found])]


def mean(curve: list[tuple[int, int, float]], start: float, end: float) -> float:
    """The mean loss between two numbers of samples."""
    parts = [(min(end, b) - max(start, a), loss) for a, b, loss in curve if a < end and b > start]
    return sum(width * loss for width, loss in parts) / sum(width for width, _ in parts)


def reached(curve: list[tuple[int, int, float]], loss: float, width: float) -> int | None:
    """Samples after which the mean loss of the last `width` samples is that low for the first time."""
    return next((end for _, end, _ in curve if end >= width and mean(curve, end - width, end) <= loss), None)


scratch_run, converted_run, *experts = sys.argv[1:]
for expert in experts:
    scratch, converted = spans(scratch_run, expert), spans(converted_run, expert)
    total = scratch[-1][1]
    width = total / BINS
    print(f"expert {expert}: mean loss up to this many samples, over {width:.0f}")
    for number in range(BINS):
        pair = [mean(curve, number * width, (number + 1) * width) for curve in (scratch, converted)]
        print(f"  {(number + 1) * width:>8.0f}   from scratch {pair[0]:.4f}   converted {pair[1]:.4f}")
    last = mean(scratch, total - width, total)
    print(f"  the last of them from scratch is reached by the converted start after {reached(converted, last, width)}")
