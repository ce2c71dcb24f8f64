"""The numbers of an evaluation as tables, for the terminal and for the report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from atoll.apps.evaluate.results import Baseline, EvaluationResult, ModelResult
from atoll.core.disk import size_text
from atoll.experts.validation import Summary

# Rich wraps cells to fit the terminal. Below this width the tables by time are unreadable, so they overflow instead.
MIN_WIDTH = 112


@dataclass(frozen=True)
class Number:
    """A number as text, with its exact value."""

    value: float | None
    text: str


def number(value: float | None, show: str | Callable[[float], str] = "{:.3f}", error: float | None = None) -> Number:
    """Format a number, with its standard error if there is one; a dash if it was not measured."""
    show = show.format if isinstance(show, str) else show
    text = "–" if value is None else show(value)
    return Number(value, text if error is None else f"{text} ± {show(error)}")


def power(value: float) -> str:
    """Format a large number as 1.23 × 10¹⁴."""
    digits, _, exponent = f"{value:.2e}".partition("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits} × 10{raised}"


def kid(value: float) -> str:
    """Format a KID, which is customarily multiplied by 1000."""
    return f"{1000 * value:.2f}"


@dataclass(frozen=True)
class NumberTable:
    """Numbers by model; the last row may be the real-vs-real baseline."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[ModelResult | Baseline, tuple[Number, ...]], ...]


ModelRows = list[tuple[ModelResult | Baseline, dict[str, Number]]]


def tables(result: EvaluationResult) -> list[NumberTable]:
    """Return quality (one table for each feature network), sampling and costs of all models."""
    found = []
    for extractor in result.extractors:
        rows: ModelRows = []
        # Only the Frechet distance in Inception features is called FID.
        frechet = "FID" if extractor.startswith("inception") else "Frechet distance"
        for model in result.models:
            metrics = model.metrics[extractor]
            quality = {frechet: number(metrics.frechet, "{:.2f}")}
            if metrics.kid:
                quality["KID × 1000"] = number(metrics.kid.value, kid, metrics.kid.standard_error)
            if model.variant and model.sampling:
                # Beside the model's own longest sampling, few steps stand apart from the model's quality.
                quality = {"evaluations": number(model.sampling.network_evaluations, "{:.4g}"), **quality}
                longest = result.longest(model).metrics[extractor].kid
                if metrics.kid and longest and longest.value > 0:
                    quality["of its longest"] = number(metrics.kid.value / longest.value, "{:.2f}")
            if near := metrics.precision_recall:
                names = ("precision", "recall", "density", "coverage")
                quality |= {name: number(getattr(near, name)) for name in names}
            rows.append((model, quality))
        # The baseline depends on the real images and the number of generated ones, so any model's serves.
        if real := metrics.real_baseline:
            baseline = number(real.kid.value, kid, real.kid.standard_error)
            rows.append((real, {frechet: number(real.frechet, "{:.2f}"), "KID × 1000": baseline}))
        found.append(_table(f"Generated vs real images, {extractor} features", rows))
    sampling: ModelRows = []
    trained: ModelRows = []
    sampled: ModelRows = []
    for model in result.models:
        generated, training, image = {}, model.training, model.sampling
        if model.diversity:
            generated["diversity"] = number(model.diversity.mean, error=model.diversity.standard_error)
        if model.alignment:
            generated["alignment"] = number(model.alignment.mean, error=model.alignment.standard_error)
        if model.trajectory:
            generated["refinement"] = number(model.trajectory.refinement, "{:.4f}")
        if model.expert_use:
            generated["experts per step"] = number(model.expert_use.mean_active, "{:.2f}")
        if error := result.validation_error(model):
            generated["validation error"] = number(error.mean)
        sampling.append((model, generated))
        cost = {
            "parameters": number(training.parameters, lambda count: f"{count / 1e6:.1f} M"),
            "FLOPs": number(training.flops, power),
            "with teachers": number(training.teachers_flops and training.flops + training.teachers_flops, power),
            "time": number(training.seconds, "{:.0f} s"),
            "longest job": number(training.longest_job_seconds, "{:.0f} s"),
            "memory": number(training.memory_bytes, size_text),
        }
        if result.longest(model) is model:  # training does not depend on the steps
            trained.append((model, cost))
        if image:
            cost = {
                "FLOPs": number(image.flops, power),
                "time": number(image.seconds, "{:.3f} s"),
                "memory": number(image.memory_bytes, size_text),
                "weights": number(image.weights_bytes, size_text),
            }
            sampled.append((model, cost))
    found += [_table("Sampling", sampling), _table("Cost of training", trained), _table("Cost of one image", sampled)]
    return [table for table in found if table.columns]


def _table(title: str, rows: ModelRows) -> NumberTable:
    """Arrange numbers in a table, without the columns that were not measured."""
    names = {name: None for _, row in rows for name, cell in row.items() if cell.value is not None}
    cells = tuple((about, tuple(row.get(name, number(None)) for name in names)) for about, row in rows)
    return NumberTable(title, tuple(names), cells)


def show(result: EvaluationResult) -> None:
    """Print all tables, and the diagnostics by time."""
    console = Console()
    console = Console(width=max(console.width, MIN_WIDTH))
    for table in tables(result):
        shown = Table("model", *table.columns, title=table.title)
        for row, numbers in table.rows:
            label = "real vs real" if isinstance(row, Baseline) else row.label
            shown.add_row(label, *[cell.text for cell in numbers])
        console.print(shown)
    diagnostics = result.diagnostics
    if diagnostics is None:
        return
    errors: dict[str, Summary | None] = {}
    if experts := diagnostics.experts:
        errors |= {f"experts {routing}": error for routing, error in experts.velocity_error.items()}
        errors |= {"own cluster error": experts.own_cluster_error, "other clusters error": experts.other_clusters_error}
    console.print(_by_time("validation velocity error", errors | diagnostics.dense))
    if experts and (router := experts.router):
        rows = {
            "accuracy": router.accuracy,
            "confidence": router.confidence,
            "calibration error": router.calibration_error,
            "top-1 is best expert": experts.router_choice_is_best,
            "mean angle, degrees": experts.disagreement_degrees,
            "top-2 angle, degrees": experts.disagreement_of_top_2_degrees,
        }
        console.print(_by_time("router and experts", rows))


def _by_time(title: str, rows: Mapping[str, Summary | None]) -> Table:
    bins = [f"{start / 10:.1f}-" for start in range(10)]
    table = Table(title, "mean", *bins, caption="columns: time bins from t = 0 (data) to t = 1 (noise)")
    for name, found in rows.items():
        if found:
            digits = "{:.1f}" if "degrees" in name else "{:.3f}"
            table.add_row(name, *[number(value, digits).text for value in (found.mean, *(found.by_time or ()))])
    return table
