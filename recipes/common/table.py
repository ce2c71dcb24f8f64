"""The figures of a recipe as a table, over all seeds that were measured: table.py ROOT RECIPE ARM...

One row for each model and routing of each arm; with several seeds the mean, and the standard deviation over seeds.
With one seed the figure behind ± of KID is its own standard error. A number in brackets: of so many seeds only.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Model = dict[str, Any]
COLUMNS: dict[str, Callable[[Model], float]] = {
    "FID": lambda model: model["metrics"]["inception"]["frechet"]["value"],
    "KID x1000": lambda model: 1000 * model["metrics"]["inception"]["kid"]["value"],
    "KID x1000, EfficientNet": lambda model: 1000 * model["metrics"]["efficientnet-lite0"]["kid"]["value"],
    "precision": lambda model: model["metrics"]["inception"]["precision_recall"]["precision"],
    "recall": lambda model: model["metrics"]["inception"]["precision_recall"]["recall"],
    "diversity": lambda model: model["diversity"]["mean"],
    "experts a step": lambda model: model["expert_use"]["mean_active"],
    "held-out error": lambda model: model["held_out_error"],
    "training FLOPs": lambda model: model["training"]["flops"],
}


def answers(root: Path, recipe: str, arm: str) -> dict[str, list[Model]]:
    """What was measured of an arm, by model and routing: one entry for each seed."""
    found: dict[str, list[Model]] = {}
    for file in sorted(root.glob(f"seed*/{arm}/evaluation/{recipe}.json")):
        answer = json.loads(file.read_text())
        diagnosed = answer.get("diagnostics", {})
        errors = {**diagnosed.get("dense", {}), **diagnosed.get("experts", {}).get("velocity_error", {})}
        for model in answer["models"]:
            error = errors.get(model["routing"] or model["model"])
            found.setdefault(model["label"], []).append({**model, "held_out_error": error and error["mean"]})
    return found


def cell(column: str, models: list[Model]) -> str:
    """Mean and spread of one figure over the seeds that have it; how many, if not all have."""
    values = [value for value in (figure(column, model) for model in models) if value is not None]
    if not values:
        return ""
    mean = statistics.fmean(values)
    if column == "training FLOPs":
        return f"{mean:.3g}"
    digits = 1 if column == "FID" or column.startswith("KID") else 3
    few = f" ({len(values)})" if len(values) < len(models) else ""
    if len(values) > 1:
        return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}{few}"
    if column == "KID x1000" and len(models) == 1:
        return f"{mean:.{digits}f} ± {1000 * models[0]['metrics']['inception']['kid']['standard_error']:.{digits}f}"
    return f"{mean:.{digits}f}{few}"


def figure(column: str, model: Model) -> float | None:
    """One figure of one model, if it was measured."""
    try:
        return COLUMNS[column](model)
    except (KeyError, TypeError):
        return None


def main(root: Path, recipe: str, arms: list[str]) -> None:
    """Print the table, leaving out columns in which nothing is said."""
    rows = [(arm, label, models) for arm in arms for label, models in answers(root, recipe, arm).items()]
    cells = [[cell(column, models) for column in COLUMNS] for _, _, models in rows]
    said = [number for number in range(len(COLUMNS)) if any(row[number] for row in cells)]
    names = list(COLUMNS)
    print("| arm | model | seeds | " + " | ".join(names[number] for number in said) + " |")
    print("|" + "---|" * (3 + len(said)))
    for (arm, label, models), row in zip(rows, cells, strict=True):
        print(f"| {arm} | {label} | {len(models)} | " + " | ".join(row[number] for number in said) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
