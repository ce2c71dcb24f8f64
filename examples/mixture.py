"""Sample from five experts with five objectives as one model, on data with a known density.

    python examples/mixture.py [--out runs/mixture.png]

The data is a Gaussian mixture of five clusters. Each cluster has an exact expert with a different objective: DDPM with
a cosine schedule, DDPM with linear betas, x0-prediction, v-prediction, flow matching. A bridge converts each prediction
into a velocity, and the exact router weights the velocities. The same is done with both readings of HDDM's published
conversion. The table gives the errors of the samples; the plot shows the samples.
"""

import argparse
from pathlib import Path
from typing import get_args

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from atoll import flow
from atoll.core.names import BridgeMode

OBJECTIVES = ["ddpm", "ddpm-linear", "x0", "v-prediction", "flow-matching"]
COLORS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377"]
NUM_SAMPLES, STEPS, SIDE = 4000, 50, 480


def data() -> flow.GaussianMixture:
    """Return a mixture of five clusters around a circle."""
    angles = 2 * torch.pi * torch.arange(5, dtype=torch.float64) / 5
    means = 2.5 * torch.stack([angles.cos(), angles.sin()], 1)
    roots = torch.stack([torch.tensor([[0.3, 0.0], [0.1 * k - 0.2, 0.2 + 0.05 * k]]).double() for k in range(5)])
    return flow.GaussianMixture(torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).double(), means, roots @ roots.mT)


def ensemble(mixture: flow.GaussianMixture, mode: str) -> flow.solvers.VelocityField:
    """Return the sum of the experts' velocities, weighted by the router."""
    objectives = [flow.objective(name) for name in OBJECTIVES]
    bridges = [o.bridge(mode=mode if o.prediction == "epsilon" else "exact") for o in objectives]
    experts = [mixture.part([k]) for k in range(len(OBJECTIVES))]

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        weights, total = mixture.posterior(x, t), torch.zeros_like(x)
        for k, (expert, bridge) in enumerate(zip(experts, bridges, strict=True)):
            query = bridge.query(x, t)
            output = expert.predict(
                query.state, query.time.clamp(min=1e-6), bridge.prediction, schedule=bridge.schedule
            )
            total += weights[:, k, None] * bridge.velocity(output, x, t)
        return total

    return velocity


def sample_errors(mixture: flow.GaussianMixture, x: torch.Tensor) -> dict[str, float]:
    """Return the largest errors over the clusters: of their share of the samples, their mean and their variance."""
    nearest = torch.cdist(x, mixture.means).argmin(1)
    shares, means, spreads = [], [], []
    for k in range(len(mixture.weights)):
        mine = x[nearest == k]
        shares.append((len(mine) / len(x) - mixture.weights[k]).abs().item())
        means.append((mine.mean(0) - mixture.means[k]).norm().item())
        spreads.append((torch.cov(mine.T).trace() / mixture.covariances[k].trace()).item() - 1)
    return {
        "max share error": max(shares),
        "max mean error": max(means),
        "max relative variance error": max(map(abs, spreads)),
    }


def draw(mixture: flow.GaussianMixture, panels: dict[str, torch.Tensor], out: Path) -> None:
    """Draw scatter plots side by side."""
    sheet = Image.new("RGB", (SIDE * len(panels), SIDE + 24), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (title, x) in enumerate(panels.items()):
        pen.text((SIDE * number + 12, 6), title, fill="black")
        nearest = torch.cdist(x, mixture.means).argmin(1).tolist()
        points = ((x + 4.2) / 8.4 * SIDE).clamp(2, SIDE - 3).tolist()
        for (px, py), cluster in zip(points, nearest, strict=True):
            left, top = SIDE * number + px, 24 + py
            pen.ellipse((left - 1, top - 1, left + 1, top + 1), fill=COLORS[cluster])
    out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(out)


def main() -> None:
    """Sample with each bridge, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("runs/mixture.png"), help="file of the plot")
    out = parser.parse_args().out
    mixture = data()
    noise = torch.randn(NUM_SAMPLES, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    panels = {"data": mixture.sample(NUM_SAMPLES, torch.Generator().manual_seed(1))}
    for mode in get_args(BridgeMode):
        field = ensemble(mixture, mode)
        panels[f"{mode} bridge"] = flow.solve(field, noise, steps=STEPS, solver="heun")
    table = Table("metric", *panels, title=f"Five objectives as one model, {NUM_SAMPLES} samples, {STEPS} Heun steps")
    columns = [sample_errors(mixture, x) for x in panels.values()]
    for name in columns[0]:
        table.add_row(name, *(f"{column[name]:.3f}" for column in columns))
    Console(width=120).print(table)
    draw(mixture, panels, out)
    print(f"plot: {out}")


if __name__ == "__main__":
    main()
