"""Print the tables of README.md from results.jsonl: `table.py [FILE]`.

Rows with several seeds have mean and standard deviation over them; a row of one seed is marked *, and its ± is the
standard error of KID.
"""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FINAL_IMAGES, CURVE_IMAGES = 5000, 2048


def spread(rows: list[Row], metric: str, digits: int) -> str:
    """Return a metric as mean ± standard deviation over seeds."""
    values = [row[metric] for row in rows if row.get(metric) is not None]
    if not values:
        return ""
    if len(values) > 1:
        return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"
    error = f" ± {rows[0]['kid_error']:.{digits}f}" if metric == "kid" else ""
    return f"{values[0]:.{digits}f}{error}"


def print_table(title: str, rows: Iterable[Row], keys: tuple[str, ...]) -> None:
    """Print one line for each value of the keys, over all seeds."""
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        # An evaluation that was repeated after an interruption gives the same row again.
        groups.setdefault(tuple(row[key] for key in keys), {})[row["seed"]] = row
    if not groups:
        return
    head = (
        *keys,
        "seeds",
        "KID x1000",
        "FID",
        "precision",
        "recall",
        "diversity",
        "validation error",
        "training FLOPs",
    )
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for values, by_seed in groups.items():
        seeds = list(by_seed.values())
        names = ["" if value is None else str(value) for value in values]
        cells = [spread(seeds, "kid", 1), spread(seeds, "fid", 1), spread(seeds, "precision", 3)]
        cells += [
            spread(seeds, "recall", 3),
            spread(seeds, "diversity", 3),
            spread(seeds, "validation_error", 4),
            f"{seeds[0]['flops']:.3g}",
        ]
        count = f"{len(seeds)}{' *' if len(seeds) == 1 else ''}"
        print(f"| {' | '.join([*names, count, *cells])} |")


def main(file: Path) -> None:
    """Print all tables that have rows."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    grid = [row for row in rows if row["arm"].startswith("grid-")]
    whole = [row for row in rows if row not in grid and row["share"] == 1]
    plain = [row for row in whole if row["guidance"] == 1]
    print_table("Learning rates, a tenth of the budget", grid, ("arm", "routing"))
    print_table("The end", [row for row in plain if row["num_images"] == FINAL_IMAGES], ("arm", "routing"))
    curve = [row for row in rows if row["guidance"] == 1 and row["num_images"] == CURVE_IMAGES]
    print_table("Over the training", curve, ("arm", "routing", "share"))
    print_table("Guidance", [row for row in whole if row["guidance"] > 1], ("arm", "routing", "guidance"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("results.jsonl"))
