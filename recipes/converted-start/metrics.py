"""Print the training loss of experts from scratch and converted: metrics.py SCRATCH CONVERTED EXPERT...

Both see the same images, times and noise in the same order, so their losses are comparable image by image.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

BINS = 10

Curve = list[tuple[int, int, float]]
"""(first image, last image, mean loss between them) of each line of metrics.jsonl."""


def read_curve(run: str, expert: str) -> Curve:
    """Read the training loss of an expert."""
    lines = (Path(run) / f"experts/{int(expert):03d}/metrics.jsonl").read_text().splitlines()
    losses = sorted({line["images"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}.items())
    return [(start, end, loss) for (start, _), (end, loss) in pairwise([(0, 0.0), *losses])]


def mean_loss(curve: Curve, start: float, end: float) -> float:
    """Return the mean loss between two numbers of images."""
    parts = [(min(end, b) - max(start, a), loss) for a, b, loss in curve if a < end and b > start]
    return sum(width * loss for width, loss in parts) / sum(width for width, _ in parts)


def images_to_reach(curve: Curve, loss: float, width: float) -> int | None:
    """Return the number of images after which the mean loss of the last `width` images is first at most `loss`."""
    return next((end for _, end, _ in curve if end >= width and mean_loss(curve, end - width, end) <= loss), None)


scratch_run, converted_run, *experts = sys.argv[1:]
for expert in experts:
    scratch, converted = read_curve(scratch_run, expert), read_curve(converted_run, expert)
    total = scratch[-1][1]
    width = total / BINS
    print(f"expert {expert}: mean training loss over the last {width:.0f} images")
    for number in range(BINS):
        pair = [mean_loss(curve, number * width, (number + 1) * width) for curve in (scratch, converted)]
        print(f"  {(number + 1) * width:>8.0f} images   from scratch {pair[0]:.4f}   converted {pair[1]:.4f}")
    last = mean_loss(scratch, total - width, total)
    reached = images_to_reach(converted, last, width)
    print(f"  the converted expert reaches the final loss from scratch after {reached} images")
