"""Previews and validation during training: of the EMA weights, with the same noise and images every time.

A preview is a grid of images; with several sizes of images, it has one row for each size of the job's data.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from atoll.core.config_sections import Train
from atoll.core.sizes import Size
from atoll.data.dataset import Batch
from atoll.encoders.encoders import Encoders
from atoll.ensemble import Ensemble, RoutingState, Sampler, SamplerState, Settings
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.validation import condition_of, validate
from atoll.flow import rng
from atoll.train.ema import EMA
from atoll.train.metrics_logger import MetricsLogger
from atoll.train.tasks import Task

PREVIEW_STREAM = 13
PREVIEW_STEPS = 20
"""Euler steps of a preview: fewer than the 50 of sampling, because previews are only looked at and training waits."""


VALIDATION_IMAGES = 64
"""Held-out images of each cluster for a validation during training: a sixteenth of those after it. A validation
then costs as much as training on 210 images."""


@torch.no_grad()
def held_out_loss(task: Task, ema: EMA) -> float | None:
    """Return the velocity error of the first EMA; None for a router, and without held-out images."""
    if not len(task.held_out):
        return None
    with _first_ema(task, ema):
        expert = task.expert()
        # Every process validates on all images: a network sharded by FSDP2 must run on all processes together.
        return None if expert is None else validate(
            expert.velocity, task.held_out, seed=task.seed, conditioning=expert.conditioning, limit=VALIDATION_IMAGES,
            device=task.device,
        ).mean  # fmt: skip


@contextmanager
def _first_ema(task: Task, ema: EMA) -> Iterator[None]:
    """Evaluate the network with the weights of the first EMA for the duration of a block."""
    training = task.network.training
    task.network.eval()
    with ema.applied(next(iter(ema.weights))):
        yield
    task.network.train(training)


@torch.no_grad()
def save_preview(task: Task, ema: EMA, logger: MetricsLogger, *, settings: Train) -> None:
    """Sample `settings.sample_count` images and save them as a grid; do nothing for a router."""
    content = task.shards.content
    if not settings.sample_count:
        return
    sizes = list(task.shards.image_counts())
    count = -(-settings.sample_count // len(sizes))
    latents = []
    with _first_ema(task, ema):
        expert = task.expert()  # calibrates its bridge for the EMA weights
        if expert is not None:
            encoders = Encoders.of(content.latents, content.text, run=task.shards.artifacts[0].run)
            sampler = Sampler(Ensemble.of_expert(expert), encoders)
            # Conditions are not prepared once for all steps: FSDP2 gathers a sharded network in its forward pass only.
            how = Settings(steps=PREVIEW_STEPS, guidance_scale=settings.sample_guidance_scale)
            for number, size in enumerate(sizes):
                condition = condition_of(_examples(task, size, count).to(task.device), expert.conditioning)
                shape = (count, content.latents.shape[0], size.height, size.width)
                noise = rng.normal(shape, seed=task.seed, stream=PREVIEW_STREAM, first=number * count)
                # In two batches: guidance doubles the rows, and the optimizer's state is in memory too.
                parts = []
                for part in torch.arange(count).chunk(2):
                    x = noise[part].to(task.device)
                    state = SamplerState(x, BatchConditions.of(condition, part), RoutingState())
                    parts.append(sampler.run(state, how))
                latents.append(torch.cat(parts))
    if expert is not None:
        # A preview of a network that diverges must not end its training; the loss check does that.
        decoded = (sampler.decode(part.nan_to_num()) for part in latents)
        images = [np.asarray(image) for part in decoded for image in part]
        logger.save_grid(images, columns=count if len(sizes) > 1 else None)


def _examples(task: Task, size: Size, count: int) -> Batch:
    """Return images of one size, evenly spread: held-out images, or training images if none has that size."""
    source = task.held_out if size in task.held_out.image_counts() else task.shards
    return source.read(source.numbers(size, np.linspace(0, source.image_counts()[size] - 1, count).round()))
