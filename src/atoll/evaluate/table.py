"""The figures of an evaluation as tables for people."""

from typing import Any

from rich.console import Console
from rich.table import Table

LEAST_WIDTH = 112


def show(answer: dict[str, Any]) -> None:
    """Print quality, cost and diagnostics."""
    console = Console()
    console = Console(width=max(console.width, LEAST_WIDTH))
    for extractor in dict.fromkeys(name for model in answer["models"] for name in model.get("metrics", {})):
        console.print(quality(answer, extractor))
    console.print(sampled(answer))
    console.print(costs(answer))
    diagnosed = answer.get("diagnostics", {})
    if diagnosed:
        console.print(errors(diagnosed))
    if "router" in diagnosed.get("experts", {}):
        console.print(router(diagnosed["experts"]))


def quality(answer: dict[str, Any], extractor: str) -> Table:
    """Distances to the real pictures through one network; the floor is what real pictures get against others."""
    names = ("model", "Frechet", "floor", "KID x1000", "precision", "recall", "density", "coverage")
    table = Table(*names, title=f"against real pictures, through {extractor}")
    for model in answer["models"]:
        found = model["metrics"][extractor]
        kid, near = found["kid"], found["precision_recall"]
        kids = f"{1000 * kid['value']:.2f} ± {1000 * kid['standard_error']:.2f}"
        shares = [f"{near[name]:.3f}" for name in ("precision", "recall", "density", "coverage")]
        table.add_row(
            model["label"], f"{found['frechet']['value']:.2f}", f"{found['floor']['frechet']:.2f}", kids, *shares
        )
    return table


def sampled(answer: dict[str, Any]) -> Table:
    """What the samples are like among themselves."""
    table = Table("model", "diversity", "alignment", "refinement", "experts a step", title="samples")
    for model in answer["models"]:
        use = model.get("expert_use")
        active = f"{use['mean_active']:.2f}" if use else "-"
        table.add_row(
            model["label"], _spread(model.get("diversity")), _spread(model.get("alignment")), _refinement(model), active
        )
    return table


def costs(answer: dict[str, Any]) -> Table:
    """What training cost, and what a picture costs."""
    table = Table("model", "parameters", "training FLOPs", "seconds", "memory (estimate)", title="cost")
    for name in ("FLOPs a picture", "seconds a picture", "memory (plan)"):
        table.add_column(name)
    for model in answer["models"]:
        spent, made = model["training"], model.get("sampling")
        picture = ["-"] * 3
        if made:
            picture = [f"{made['flops']:.3g}", f"{made['seconds']:.3f}", _bytes(made["bytes"])]
        numbers = (f"{spent['parameters'] / 1e6:.1f} M", f"{spent['flops']:.3g}", f"{spent['seconds']:.0f}")
        table.add_row(model["label"], *numbers, _bytes(spent["estimated_bytes"]), *picture)
    return table


def errors(diagnosed: dict[str, Any]) -> Table:
    """Held-out error of the velocity by time, of every routing and dense model on the same noisy samples."""
    table = _by_time("held-out velocity error")
    experts = diagnosed.get("experts", {})
    rows = {f"experts {routing}": found for routing, found in experts.get("velocity_error", {}).items()}
    rows |= {
        key.replace("_", " "): experts[key] for key in ("own_cluster_error", "other_clusters_error") if key in experts
    }
    for name, found in {**rows, **diagnosed.get("dense", {})}.items():
        table.add_row(name, *_times(found))
    return table


def router(experts: dict[str, Any]) -> Table:
    """Router and experts by time."""
    table = _by_time("router and experts")
    for name in ("accuracy", "confidence", "calibration_error"):
        table.add_row(name.replace("_", " "), *_times(experts["router"][name]))
    table.add_row("chosen expert is best", *_times(experts["router_choice"]["is_best_share"]))
    table.add_row("disagreement, degrees", *_times(experts["disagreement_degrees"], 1))
    table.add_row("of the top 2, degrees", *_times(experts["disagreement_of_top_2_degrees"], 1))
    return table


def _by_time(title: str) -> Table:
    return Table(title, "mean", *[f"{number / 10:.1f}-" for number in range(10)], caption="by time: 0 data, 1 noise")


def _times(found: dict[str, Any], digits: int = 3) -> list[str]:
    return ["-" if value is None else f"{value:.{digits}f}" for value in (found["mean"], *found["by_time"])]


def _spread(found: dict[str, Any] | None) -> str:
    return f"{found['mean']:.3f} ± {found['standard_error']:.3f}" if found else "-"


def _refinement(model: dict[str, Any]) -> str:
    return f"{model['trajectory']['refinement']:.4f}" if "trajectory" in model else "-"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
