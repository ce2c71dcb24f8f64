"""The result of an evaluation as tables for people."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from atoll.evaluate.results import Diagnostics, EvaluationResult, ExpertDiagnostics, RouterMetrics, Spread
from atoll.experts.validation import Summary

LEAST_WIDTH = 112


def show(result: EvaluationResult) -> None:
    """Print quality, cost and diagnostics."""
    console = Console()
    console = Console(width=max(console.width, LEAST_WIDTH))
    for extractor in result.extractors:
        console.print(quality(result, extractor))
    console.print(sampled(result))
    console.print(costs(result))
    if diagnosed := result.diagnostics:
        console.print(errors(diagnosed))
        if diagnosed.experts and diagnosed.experts.router:
            console.print(router(diagnosed.experts.router, diagnosed.experts))


def quality(result: EvaluationResult, extractor: str) -> Table:
    """Distances to the real pictures through one network; the floor is what real pictures get against others."""
    names = ("model", "Frechet", "floor", "KID x1000", "precision", "recall", "density", "coverage")
    table = Table(*names, title=f"against real pictures, through {extractor}")
    for model in result.models:
        found = model.metrics[extractor]
        kid, near = found.kid, found.precision_recall
        kids = f"{1000 * kid.value:.2f} ± {1000 * kid.standard_error:.2f}"
        shares = [f"{share:.3f}" for share in (near.precision, near.recall, near.density, near.coverage)]
        table.add_row(model.label, f"{found.frechet.value:.2f}", f"{found.floor.frechet:.2f}", kids, *shares)
    return table


def sampled(result: EvaluationResult) -> Table:
    """What the samples are like among themselves."""
    table = Table("model", "diversity", "alignment", "refinement", "experts a step", title="samples")
    for model in result.models:
        refinement = f"{model.trajectory.refinement:.4f}" if model.trajectory else "-"
        active = f"{model.expert_use.mean_active:.2f}" if model.expert_use else "-"
        table.add_row(model.label, _spread(model.diversity), _spread(model.alignment), refinement, active)
    return table


def costs(result: EvaluationResult) -> Table:
    """What training cost, and what a picture costs."""
    table = Table("model", "parameters", "training FLOPs", "seconds", "memory (estimate)", title="cost")
    for name in ("FLOPs a picture", "seconds a picture", "memory (plan)"):
        table.add_column(name)
    for model in result.models:
        spent, made = model.training, model.sampling
        picture = [f"{made.flops:.3g}", f"{made.seconds:.3f}", _bytes(made.bytes)] if made else ["-"] * 3
        numbers = (f"{spent.parameters / 1e6:.1f} M", f"{spent.flops:.3g}", f"{spent.seconds:.0f}")
        table.add_row(model.label, *numbers, _bytes(spent.estimated_bytes), *picture)
    return table


def errors(diagnosed: Diagnostics) -> Table:
    """Held-out error of the velocity by time, of every routing and dense model on the same noisy samples."""
    rows: dict[str, Summary | None] = {}
    if experts := diagnosed.experts:
        rows |= {f"experts {routing}": error for routing, error in experts.velocity_error.items()}
        rows |= {"own cluster error": experts.own_cluster_error, "other clusters error": experts.other_clusters_error}
    return _by_time("held-out velocity error", rows | diagnosed.dense)


def router(found: RouterMetrics, experts: ExpertDiagnostics) -> Table:
    """Router and experts by time."""
    rows = {
        "accuracy": found.accuracy,
        "confidence": found.confidence,
        "calibration error": found.calibration_error,
        "chosen expert is best": experts.router_choice.is_best_share if experts.router_choice else None,
        "disagreement, degrees": experts.disagreement_degrees,
        "of the top 2, degrees": experts.disagreement_of_top_2_degrees,
    }
    return _by_time("router and experts", rows)


def _by_time(title: str, rows: Mapping[str, Summary | None]) -> Table:
    bins = [f"{number / 10:.1f}-" for number in range(10)]
    table = Table(title, "mean", *bins, caption="by time: 0 data, 1 noise")
    for name, found in rows.items():
        if found:
            digits = 1 if "degrees" in name else 3
            values = (found.mean, *(found.by_time or ()))
            table.add_row(name, *["-" if value is None else f"{value:.{digits}f}" for value in values])
    return table


def _spread(found: Spread | None) -> str:
    return f"{found.mean:.3f} ± {found.standard_error:.3f}" if found else "-"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
