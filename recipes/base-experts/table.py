"""Print the results of run.py as a Markdown table: table.py [RESULTS.jsonl]. ± is the standard deviation over seeds."""

import json
import statistics
import sys
from pathlib import Path

ARMS = {
    "one-8r": "(i) one adapter of rank 16",
    "one-r": "(ii) one adapter of rank 2",
    "routed": "(iii) eight routed adapters of rank 2, top-1",
    "average": "(iv) average of the eight, one adapter of rank 16",
    "whole": "(v) eight whole experts, top-1",
    "base": "base without adapter",
}


def cell(values: list[float], digits: int) -> str:
    """Return mean and spread."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def main(file: Path) -> None:
    """Print one row for each arm."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    print("| arm | seeds | KID x 1000 | of each seed | FID | validation error | images per network | training FLOPs |")
    print("|---|---|---|---|---|---|---|---|")
    for arm, name in ARMS.items():
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
        if not own:
            continue
        kids = [1000 * row["kid"] for row in own]
        errors = [row["validation_error"] for row in own]
        each = ", ".join(f"{kid:.1f}" for kid in kids)
        fids = cell([row["fid"] for row in own], 1)
        print(
            f"| {name} | {len(own)} | {cell(kids, 1)} | {each} | {fids} | {cell(errors, 3)} | {own[0]['images']:,} | "
            f"{own[0]['flops']:.3g} |"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("results.jsonl"))
