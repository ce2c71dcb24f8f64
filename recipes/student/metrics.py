"""Print the figures of this recipe from the manifests of its run."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT, ROUTER


def main(run: Path) -> None:
    """One table for the networks, one for the router."""
    table = Table("job", "objective", "samples", "FLOPs", "seconds", "held-out velocity error")
    for job in [f"experts/{k:03d}" for k in range(4)] + ["student", "monolith"]:
        facts = Artifact(run, f"{job}/final").open(EXPERT).content
        spent = facts["compute"]
        figures = (
            f"{spent['samples']:,}",
            f"{spent['flops']:.3g}",
            f"{spent['seconds']:.0f}",
            f"{facts['held_out_loss']:.4f}",
        )
        table.add_row(job, facts["objective"]["prediction"], *figures)
    router = Artifact(run, "router/final").open(ROUTER).content
    by_time = Table("t", *(f"{t / 10:.1f}" for t in range(10)), title="router on held-out captions, by time")
    by_time.add_row("accuracy", *(f"{value:.3f}" for value in router["accuracy_by_time"]))
    by_time.add_row("loss", *(f"{value:.3f}" for value in router["loss_by_time"]))
    console = Console(width=120)
    console.print(table)
    console.print(by_time)
    console.print(
        f"prior entropy {router['prior_entropy']:.3f}, largest cluster {router['chance_accuracy']:.3f}, "
        f"temperature {router['temperature']:.3f}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
