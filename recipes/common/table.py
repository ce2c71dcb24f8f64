"""Print the metrics of a recipe as a Markdown table over all evaluated seeds: table.py ROOT RECIPE ARM...

The table has one row per arm, model and routing. With several seeds, cells hold the mean and the standard deviation
over seeds. With one seed, the number after ± of KID is its standard error. If some seeds lack a metric, the number of
seeds that have it follows in parentheses.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Model = dict[str, Any]
COLUMNS: dict[str, Callable[[Model], float]] = {
    "FID": lambda model: model["metrics"]["inception"]["frechet"],
    "KID x1000": lambda model: 1000 * model["metrics"]["inception"]["kid"]["value"],
    "KID x1000, EfficientNet": lambda model: 1000 * model["metrics"]["efficientnet-lite0"]["kid"]["value"],
    "precision": lambda model: model["metrics"]["inception"]["precision_recall"]["precision"],
    "recall": lambda model: model["metrics"]["inception"]["precision_recall"]["recall"],
    "diversity": lambda model: model["diversity"]["mean"],
    "experts per step": lambda model: model["expert_use"]["mean_active"],
    "validation velocity error": lambda model: model["validation_error"],
    "training FLOPs": lambda model: model["training"]["flops"],
    "with teachers": lambda model: model["training"]["flops"] + model["training"]["teachers_flops"],
}


def read_models(root: Path, recipe: str, arm: str) -> dict[str, list[Model]]:
    """Return the results of an arm by label (model and routing), one entry per seed."""
    models: dict[str, list[Model]] = {}
    for file in sorted(root.glob(f"seed*/{arm}/evaluation/{recipe}.json")):
        evaluation = json.loads(file.read_text())
        diagnostics = evaluation.get("diagnostics", {})
        errors = {**diagnostics.get("dense", {}), **diagnostics.get("experts", {}).get("velocity_error", {})}
        for model in evaluation["models"]:
            error = errors.get(model["routing"] if model["model"] == "experts" else model["model"])
            models.setdefault(model["label"], []).append({**model, "validation_error": error and error["mean"]})
    return models


def format_cell(column: str, models: list[Model]) -> str:
    """Return mean and spread of a metric over the seeds, with their number if some seeds lack it."""
    values = [value for value in (read_metric(column, model) for model in models) if value is not None]
    if not values:
        return ""
    mean = statistics.fmean(values)
    if column in ("training FLOPs", "with teachers"):
        return f"{mean:.3g}"
    digits = 1 if column == "FID" or column.startswith("KID") else 3
    seeds = f" ({len(values)})" if len(values) < len(models) else ""
    if len(values) > 1:
        return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}{seeds}"
    if column == "KID x1000" and len(models) == 1:
        return f"{mean:.{digits}f} ± {1000 * models[0]['metrics']['inception']['kid']['standard_error']:.{digits}f}"
    return f"{mean:.{digits}f}{seeds}"


def read_metric(column: str, model: Model) -> float | None:
    """Return one metric of a model; None if it was not measured."""
    try:
        return COLUMNS[column](model)
    except (KeyError, TypeError):
        return None


def main(root: Path, recipe: str, arms: list[str]) -> None:
    """Print the table without its empty columns."""
    rows = [(arm, label, models) for arm in arms for label, models in read_models(root, recipe, arm).items()]
    cells = [[format_cell(column, models) for column in COLUMNS] for _, _, models in rows]
    kept = [number for number in range(len(COLUMNS)) if any(row[number] for row in cells)]
    names = list(COLUMNS)
    print("| arm | model | seeds | " + " | ".join(names[number] for number in kept) + " |")
    print("|" + "---|" * (3 + len(kept)))
    for (arm, label, models), row in zip(rows, cells, strict=True):
        print(f"| {arm} | {label} | {len(models)} | " + " | ".join(row[number] for number in kept) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
