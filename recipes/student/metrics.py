"""Print the results of this recipe from the manifests of its run: metrics.py RUN."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT, ROUTER


def main(run: Path) -> None:
    """Print one table of the networks and one of the router."""
    networks = Table("network", "prediction", "images seen", "FLOPs", "seconds", "validation velocity error")
    for job in [f"experts/{k:03d}" for k in range(4)] + ["student", "monolith"]:
        manifest = Artifact(run, f"{job}/final").read(EXPERT)
        assert manifest.compute is not None
        networks.add_row(
            job,
            manifest.objective.prediction,
            f"{manifest.compute.images:,}",
            f"{manifest.compute.flops:.3g}",
            f"{manifest.compute.seconds:.0f}",
            f"{manifest.validation_loss:.4f}",
        )
    router = Artifact(run, "router/final").read(ROUTER)
    by_time = Table("t", *(f"{t / 10:.1f}" for t in range(10)), title="router on validation captions, by time")
    by_time.add_row("accuracy", *(f"{value:.3f}" for value in router.accuracy_by_time or ()))
    by_time.add_row("loss", *(f"{value:.3f}" for value in router.loss_by_time or ()))
    console = Console(width=120)
    console.print(networks)
    console.print(by_time)
    console.print(
        f"entropy of the prior {router.prior_entropy:.3f}, largest cluster {router.chance_accuracy:.3f}, "
        f"temperature {router.temperature:.3f}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
