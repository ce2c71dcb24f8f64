"""The calibration of nearest routing by the experts' votes, and how it changes when the last expert joins.

    python recipes/come-and-go/votes.py RUN

The votes are measured on one half of the validation images of each cluster, and the probabilities on the other half.
With "joined", the curves of all experts but the last were measured without it, as if it had joined later.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.data.dataset import Shards
from atoll.experts.calibration import log_posterior, measure, temperature_at, temperatures
from atoll.experts.expert import condition_of
from atoll.experts.run import known_densities
from atoll.experts.validation import ValidationSet
from atoll.nets import Condition

run = Path(sys.argv[1])
densities = list(known_densities(run).values())
images = torch.stack([density.count for density in densities])


def rows(cluster: int, half: int) -> Iterator[tuple[Tensor, Tensor, Condition]]:
    """Yield states, times and conditions of every second validation image."""
    for part in ValidationSet(Shards.open(run, [cluster], "validation"), 0).batches(torch.device("cpu")):
        own = slice(half, None, 2)
        condition = condition_of(part.batch, frozenset({"pooled", "label"}))
        yield part.noised.input[own], part.noised.t[own], condition[own]


def curves(count: int) -> list[object]:
    """Return the curves of the first experts, measured among these alone."""
    return [measure(densities[:count], cluster, rows(cluster, 0)) for cluster in range(count)]


whole = curves(len(densities))
joined = [*curves(len(densities) - 1), whole[-1]]
print("| temperatures | cross-entropy | accuracy | mean confidence |\n|---|---|---|---|")
for name, votes in (("none", [None] * len(whole)), ("votes of all", whole), ("joined", joined)):
    found, sums, count = temperatures(votes, images.tolist()), torch.zeros(3), 0
    for cluster in range(len(densities)):
        for x, t, condition in rows(cluster, 1):
            columns = [
                one.log_density(x, t) - one.count.double().log() + one.log_condition(condition) for one in densities
            ]
            log_p = log_posterior(
                torch.stack(columns, 1), images, 1.0 if found is None else temperature_at(found, t)[:, None]
            )
            right, confidence = log_p.argmax(1) == cluster, log_p.max(1).values.exp()
            sums += torch.stack([-log_p[:, cluster].sum(), right.sum(), confidence.sum()])
            count += len(x)
    print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in (sums / count).tolist()) + " |", flush=True)
    print(f"  T by t: {[] if found is None else [round(value, 1) for value in found.tolist()]}", file=sys.stderr)
