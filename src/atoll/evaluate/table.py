"""The result of an evaluation as tables on the terminal."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from atoll.evaluate.results import Diagnostics, EvaluationResult, ExpertDiagnostics, RouterMetrics, Spread
from atoll.experts.validation import Summary

# Rich wraps cells to fit the terminal. Below this width the tables by time are unreadable, so they overflow instead.
MIN_WIDTH = 112


def show(result: EvaluationResult) -> None:
    """Print quality, cost and diagnostics."""
    console = Console()
    console = Console(width=max(console.width, MIN_WIDTH))
    for extractor in result.extractors:
        console.print(quality(result, extractor))
    console.print(sampling(result))
    console.print(costs(result))
    if diagnostics := result.diagnostics:
        console.print(errors(diagnostics))
        if diagnostics.experts and diagnostics.experts.router:
            console.print(router(diagnostics.experts.router, diagnostics.experts))


def quality(result: EvaluationResult, extractor: str) -> Table:
    """Return the distances to the real images in the features of one network, with the real-vs-real baseline."""
    names = ("model", "Frechet", "real vs real", "KID x1000", "precision", "recall", "density", "coverage")
    table = Table(*names, title=f"generated vs real images, {extractor} features")
    for model in result.models:
        found = model.metrics[extractor]
        kid, near = found.kid, found.precision_recall
        kids = f"{1000 * kid.value:.2f} ± {1000 * kid.standard_error:.2f}"
        shares = [f"{share:.3f}" for share in (near.precision, near.recall, near.density, near.coverage)]
        table.add_row(model.label, f"{found.frechet.value:.2f}", f"{found.real_baseline.frechet:.2f}", kids, *shares)
    return table


def sampling(result: EvaluationResult) -> Table:
    """Return diversity, alignment, refinement and the number of experts per step."""
    table = Table("model", "diversity", "alignment", "refinement", "experts per step", title="sampling")
    for model in result.models:
        refinement = f"{model.trajectory.refinement:.4f}" if model.trajectory else "-"
        active = f"{model.expert_use.mean_active:.2f}" if model.expert_use else "-"
        table.add_row(model.label, _spread(model.diversity), _spread(model.alignment), refinement, active)
    return table


def costs(result: EvaluationResult) -> Table:
    """Return the cost of training, and of sampling one image."""
    table = Table("model", "parameters", "training FLOPs", "seconds", "memory (estimate)", title="cost")
    for name in ("FLOPs per image", "seconds per image", "memory (plan)"):
        table.add_column(name)
    for model in result.models:
        training, cost = model.training, model.sampling
        image = [f"{cost.flops:.3g}", f"{cost.seconds:.3f}", _bytes(cost.memory_bytes)] if cost else ["-"] * 3
        numbers = (f"{training.parameters / 1e6:.1f} M", f"{training.flops:.3g}", f"{training.seconds:.0f}")
        table.add_row(model.label, *numbers, _bytes(training.memory_bytes), *image)
    return table


def errors(diagnostics: Diagnostics) -> Table:
    """Return the held-out velocity error by time, of every routing and dense model on the same noisy images."""
    rows: dict[str, Summary | None] = {}
    if experts := diagnostics.experts:
        rows |= {f"experts {routing}": error for routing, error in experts.velocity_error.items()}
        rows |= {"own cluster error": experts.own_cluster_error, "other clusters error": experts.other_clusters_error}
    return _by_time("held-out velocity error", rows | diagnostics.dense)


def router(found: RouterMetrics, experts: ExpertDiagnostics) -> Table:
    """Return the metrics of the router and the disagreement of the experts by time."""
    rows = {
        "accuracy": found.accuracy,
        "confidence": found.confidence,
        "calibration error": found.calibration_error,
        "top-1 is best expert": experts.router_choice.is_best_share if experts.router_choice else None,
        "mean angle, degrees": experts.disagreement_degrees,
        "top-2 angle, degrees": experts.disagreement_of_top_2_degrees,
    }
    return _by_time("router and experts", rows)


def _by_time(title: str, rows: Mapping[str, Summary | None]) -> Table:
    bins = [f"{number / 10:.1f}-" for number in range(10)]
    table = Table(title, "mean", *bins, caption="columns: time bins from t = 0 (data) to t = 1 (noise)")
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
