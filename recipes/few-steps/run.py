"""Few steps: evaluate the models of a run with several numbers of steps, and append the rows to results.jsonl.

    python recipes/few-steps/run.py RUN                     # the table: all routings and the monolith
    python recipes/few-steps/run.py RUN --shift 2           # with another timestep shift
    python recipes/few-steps/run.py RUN --steps 2 4 --solver heun
    python recipes/few-steps/run.py --table [--figure FILE] # the tables of README.md, from results.jsonl

The protocol is in README.md. The same command continues after an interruption, and computes no set of images twice.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from atoll.apps.evaluate.evaluation import evaluate
from atoll.apps.evaluate.options import EvaluationOptions
from atoll.apps.evaluate.results import ModelResult
from atoll.core import config as configuration

RESULTS = Path(__file__).with_name("results.jsonl")
STEPS = (1, 2, 4, 8, 25, 50)
ROUTINGS = ("top-1", "top-2", "drawn", "once", "nearest", "oracle")
TITLES = {"inception": "KID x 1000", "efficientnet-lite0": "KID x 1000 in EfficientNet features"}
COLORS = {name: f"C{number}" for number, name in enumerate((*ROUTINGS, "students, top-1"))} | {"monolith": "black"}
"""Lines of the figure: one color for a model in all panels."""


def rows_of(model: ModelResult) -> list[dict[str, Any]]:
    """Return a row for each feature network."""
    found = []
    for extractor, metrics in model.metrics.items():
        protocol, kid = metrics.protocol, metrics.kid
        assert kid is not None
        assert metrics.precision_recall is not None
        assert model.sampling is not None
        found.append({
            "model": model.model, "routing": model.routing, "solver": protocol.solver, "steps": protocol.steps,
            "shift": protocol.shift, "evaluations": round(model.sampling.network_evaluations, 2),
            "num_images": protocol.num_images, "extractor": extractor, "frechet": round(metrics.frechet, 2),
            "kid": round(1000 * kid.value, 2), "kid_error": round(1000 * kid.standard_error, 2),
            "precision": round(metrics.precision_recall.precision, 3),
        })  # fmt: skip
    return found


def measure(options: argparse.Namespace) -> None:
    """Evaluate the run and append what is new."""
    config = configuration.load(options.run)
    chosen = EvaluationOptions(
        num_images=options.num_images,
        num_real=options.num_real,
        models=tuple(options.models),
        routings=tuple(options.routings),
        steps=tuple(options.steps),
        solver=(options.solver,),
        guidance_scale=1.0,
        shift=options.shift,
        extractors=tuple(options.extractors),
        prompts=options.prompts,
        without=("diversity", "diagnostics", "trajectories"),
        allow_small=True,
    )
    result = evaluate(options.run, config, chosen)
    assert result is not None
    known = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    about = {"data": options.name or options.run.name, "seed": config.train.seed}
    lines = [json.dumps({**about, **row}) for model in result.models for row in rows_of(model)]
    RESULTS.write_text("".join(f"{line}\n" for line in dict.fromkeys(known + lines)))


def name_of(row: dict[str, Any]) -> str:
    """Return the model, routing and solver of a row."""
    parts = [row["model"]] if row["model"] == "students" else []
    parts += [row["model"] if row["routing"] is None else row["routing"]]
    parts += [row["solver"]] if row["solver"] != "euler" else []
    return ", ".join([*parts, *([f"shift {row['shift']:g}"] if row["shift"] != 1 else [])])


Cell = list[dict[str, Any]]
"""The rows of one model and number of steps, one for each seed."""


def show(figure: Path | None) -> None:
    """Print KID for each dataset and feature network with its ratio to the row's 25 steps, then FID and precision.

    Several seeds give their mean and standard deviation; a cell of fewer seeds than others of its table has a †. A cell
    of fewer images than the others has a *, and neither FID nor precision, which depend on their number.
    """
    rows = sorted(map(json.loads, RESULTS.read_text().splitlines()), key=lambda row: row["num_images"])
    # Of several rows of one measurement, the one with the most images is the last, which stays.
    single = {(row["data"], row["extractor"], name_of(row), row["steps"], row["seed"]): row for row in rows}
    groups: dict[tuple[str, str], dict[str, dict[int, Cell]]] = {}
    for (data, extractor, name, count, _), row in single.items():
        groups.setdefault((data, extractor), {}).setdefault(name, {}).setdefault(count, []).append(row)
    for (data, extractor), models in groups.items():
        cells = [cell for found in models.values() for cell in found.values()]
        seeds = max(len(cell) for cell in cells)
        most = max(row["num_images"] for cell in cells for row in cell)
        steps = sorted({count for found in models.values() for count in found})
        heads = [f"{count} step{'s' * (count > 1)}" for count in steps]
        print(f"\n{data}, {TITLES[extractor]}, {seeds} seed{'s' * (seeds > 1)}")
        print(f"\n| model | {' | '.join(heads)} |\n|---|{'---|' * len(steps)}")
        for name, found in models.items():
            texts = [kid(found[count], found.get(25), seeds, most) if count in found else "" for count in steps]
            print(f"| {name} | {' | '.join(texts)} |")
        if extractor != "inception":
            continue
        print("\n| model | FID at " + " | ".join(heads) + " | precision at " + " | ".join(heads) + " |")
        print(f"|---|{'---|' * 2 * len(steps)}")
        for name, every in models.items():
            found = {count: cell for count, cell in every.items() if cell[0]["num_images"] == most}
            distance = [f"{mean(found[count], 'frechet'):.0f}" if count in found else "" for count in steps]
            precision = [f"{mean(found[count], 'precision'):.2f}" if count in found else "" for count in steps]
            print(f"| {name} | {' | '.join(distance + precision)} |")
    if figure is not None:
        # Data whose name has a comma differ in their prompts.
        panels = {name: models for (name, extractor), models in groups.items() if extractor == "inception"}
        draw({name: models for name, models in panels.items() if "," not in name}, figure)


def mean(cell: Cell, key: str) -> float:
    """Return the mean over the seeds."""
    return statistics.fmean(row[key] for row in cell)


def kid(cell: Cell, longest: Cell | None, seeds: int, most: int) -> str:
    """Return KID with its error, the marks of `show`, and the mean ratio to `longest` over the seeds that both have."""
    error = cell[0]["kid_error"] if len(cell) == 1 else statistics.stdev(row["kid"] for row in cell)
    text = f"{mean(cell, 'kid'):.1f} ± {error:.1f}" + " †" * (len(cell) < seeds) + " *" * (cell[0]["num_images"] < most)
    of_longest = {row["seed"]: row["kid"] for row in longest or [] if longest is not cell}
    ratios = [row["kid"] / of_longest[row["seed"]] for row in cell if row["seed"] in of_longest]
    return text + (f" ({statistics.fmean(ratios):.2f})" if ratios else "")


def draw(data: dict[str, dict[str, dict[int, Cell]]], figure: Path) -> None:
    """Draw KID over network evaluations per image: a panel for each dataset, a line for each model with Euler steps."""
    from matplotlib import pyplot

    size = (1.2 + 4.2 * len(data), 3.6)
    page, panels = pyplot.subplots(1, len(data), figsize=size, layout="constrained", squeeze=False)
    for axes, (title, models) in zip(panels[0], data.items(), strict=True):
        for name, found in models.items():
            points = sorted((mean(cell, "evaluations"), mean(cell, "kid")) for cell in found.values())
            if len(points) > 1 and name in COLORS:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=COLORS[name])
        axes.set(title=title, xscale="log", xlabel="network evaluations per image", ylabel="KID x 1000", ylim=(0, None))
        axes.set_xticks([1, 2, 4, 8, 25, 50], ["1", "2", "4", "8", "25", "50"], minor=False)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    page.savefig(figure, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure few steps.")
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--name", help="name of the data in the tables; the default is the folder's")
    parser.add_argument("--models", nargs="+", default=["experts", "monolith"])
    parser.add_argument("--routings", nargs="+", default=ROUTINGS)
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS)
    parser.add_argument("--solver", default="euler")
    parser.add_argument("--shift", type=float, default=1.0)
    parser.add_argument("--num-images", type=int, default=512)
    parser.add_argument("--num-real", type=int, default=10_000, help="real images of the reference")
    parser.add_argument("--prompts", default="train")
    parser.add_argument("--extractors", nargs="+", default=["inception"])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    show(arguments.figure) if arguments.table else measure(arguments)
