"""Measure the overhead of bridge and noising relative to a network."""

import torch

from atoll import flow
from atoll.nets import DiT, DiTConfig
from harness import Row, interleave, run

SHAPE = (64, 4, 16, 16)


def measure(quick: bool) -> list[Row]:
    """Return the time of bridged networks and of noising over that of the bare network or of torch.randn."""
    torch.manual_seed(0)
    network = DiT(DiTConfig.named("DiT-S/2", channels=SHAPE[1], out_channels=SHAPE[1], size=SHAPE[2])).eval()
    x, t = torch.randn(SHAPE), torch.full((SHAPE[0],), 0.7)
    seconds = 12 if quick else 60

    def predict(state: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return network(state, time)

    bridged = {name: flow.objective(name).bridge().wrap(predict) for name in ("ddpm", "ddpm-linear", "v-prediction")}
    with torch.inference_mode():
        sides = {"bare": lambda: predict(x, 1000 * t)}
        sides |= {name: lambda field=field: field(x, t) for name, field in bridged.items()}
        times = interleave(sides, seconds=seconds)
    rows = [Row(f"bridge from {name} / bare network", times[name] / times["bare"], 1.02, "lower") for name in bridged]

    objective = flow.objective("flow-matching")
    sides = {
        "noising": lambda: objective.corrupt(x, seed=0, step=1),
        "randn": lambda: torch.randn(SHAPE),
        "forward": lambda: network(x, 1000 * t),
    }
    with torch.inference_mode():
        times = interleave(sides, seconds=seconds)
    rows.append(Row("noising by position / torch.randn", times["noising"] / times["randn"], None, "lower"))
    rows.append(Row("noising by position / network forward", times["noising"] / times["forward"], 0.02, "lower"))
    return rows


if __name__ == "__main__":
    run("atoll.flow relative to a DiT-S/2, batch size 64", measure)
