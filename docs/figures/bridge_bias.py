"""Draw docs/figures/bridge_bias.png and print the numbers of benchmarks/README.md: what the published conversion costs.

    python docs/figures/bridge_bias.py

An ideal epsilon expert of a Gaussian mixture, trained under three schedules, is bridged to velocity in all three modes.
"""

from pathlib import Path

import matplotlib
import torch

from atoll import flow

matplotlib.use("Agg")
from matplotlib import pyplot

SCHEDULES = ("cosine", "ddpm-linear", "ddpm-scaled-linear")
SAMPLES, TIMES = 400, torch.linspace(1e-3, 1 - 1e-3, 199, dtype=torch.float64)


def mixture() -> flow.GaussianMixture:
    """Six tilted Gaussians in 16 dimensions, of about unit variance as a whole, like normalised latents."""
    generator = torch.Generator().manual_seed(0)
    means = 0.8 * torch.randn(6, 16, generator=generator, dtype=torch.float64)
    roots = 0.15 * torch.randn(6, 16, 16, generator=generator, dtype=torch.float64)
    covariances = roots @ roots.mT + 0.02 * torch.eye(16, dtype=torch.float64)
    return flow.GaussianMixture(torch.ones(6, dtype=torch.float64), means, covariances)


def relative_errors(data: flow.GaussianMixture, name: str, mode: str) -> torch.Tensor:
    """Root mean square error of the velocity over that of the velocity itself, at each time."""
    schedule = flow.schedule(name)
    bridge = flow.Bridge(schedule, "epsilon", mode)
    errors = []
    for time in TIMES:
        generator = torch.Generator().manual_seed(1)
        t = time.expand(SAMPLES)
        x0 = data.sample(SAMPLES, generator)
        x = flow.LINEAR.add_noise(x0, torch.randn(x0.shape, generator=generator, dtype=x0.dtype), t)
        query = bridge.query(x, t)
        output = data.predict(query.state, query.time.clamp(1e-6, 1), "epsilon", schedule=schedule)
        truth = data.velocity(x, t)
        errors.append((bridge.velocity(output, x, t) - truth).square().mean().sqrt() / truth.square().mean().sqrt())
    return torch.stack(errors)


def main() -> None:
    """Draw and print."""
    data = mixture()
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    print(f"{'schedule':<20} {'mode':<20} {'mean':>9} {'median':>9} {'largest':>9}")
    for number, name in enumerate(SCHEDULES):
        for mode, style in (("published-linear", "-"), ("published-schedule", "--"), ("exact", ":")):
            errors = relative_errors(data, name, mode)
            print(f"{name:<20} {mode:<20} {errors.mean():9.2e} {errors.median():9.2e} {errors.max():9.2e}")
            axes.semilogy(TIMES, errors.clamp(min=1e-16), style, color=f"C{number}", label=f"{name}, {mode}")
    axes.set(xlabel="t (0 is data, 1 is noise)", ylabel="relative error of the velocity", ylim=(1e-16, 100))
    axes.set_title("An ideal epsilon expert, bridged to the linear path")
    axes.legend(fontsize="small", loc="center")
    axes.grid(alpha=0.3)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
