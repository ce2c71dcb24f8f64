"""Grids of samples during training: averaged weights, fixed noise, fixed captions."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from atoll import flow
from atoll.config import Train
from atoll.data.latents import open_codec
from atoll.flow import randomness
from atoll.nets import Condition
from atoll.train.ema import Averages
from atoll.train.journal import Journal
from atoll.train.tasks import Task, told_something
from atoll.train.validation import condition_of

GRID_STREAM = 13
GRID_STEPS = 20


@torch.no_grad()
def draw_grid(task: Task, averages: Averages, journal: Journal, settings: Train) -> None:
    """Draw `settings.grid_size` pictures and save them; nothing if the task paints no pictures."""
    if not settings.grid_size:
        return
    device = next(task.network.parameters()).device
    source = task.held_out if len(task.held_out) else task.shards
    rows = np.linspace(0, len(source) - 1, settings.grid_size).round().astype(np.int64)
    told: frozenset[str] = getattr(task, "told", frozenset())
    condition = condition_of(source.read(rows).to(device), told)
    shape = (settings.grid_size, *task.shards.facts["latents"]["shape"])
    noise = randomness.normal(shape, seed=task.seed, stream=GRID_STREAM, first=0).to(device)
    training = task.network.training
    task.network.eval()
    with averages.used(next(iter(averages.weights))):
        field = task.velocity()  # its bridge is calibrated for the averaged weights
        if field is not None:
            noise = flow.solve(partial(guided, field, condition, settings.grid_guidance), noise, steps=GRID_STEPS)
    task.network.train(training)
    if field is None:
        return
    codec = open_codec(task.shards.facts["latents"]["autoencoder"])
    journal.picture(codec.decode(task.shards.statistics.restore(noise).cpu()))


def guided(field: Callable[..., Tensor], condition: Condition, guidance: float, x: Tensor, t: Tensor) -> Tensor:
    """Classifier-free guidance around any velocity field."""
    velocity = field(x, t, condition=condition)
    if guidance == 1 or told_something(condition) is None:
        return velocity
    plain = field(x, t, condition=condition.unconditional())
    return plain + guidance * (velocity - plain)
