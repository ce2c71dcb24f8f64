"""Previews and validation during training: of the EMA weights, with the same noise and images every time."""

import numpy as np
import torch

from atoll.core.config_sections import Train
from atoll.data.encoders import Encoders
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
    training = task.network.training
    task.network.eval()
    with ema.applied(next(iter(ema.weights))):
        expert = task.expert()
        # Every process validates on all images: a network sharded by FSDP2 must run on all processes together.
        loss = None if expert is None else validate(
            expert.velocity, task.held_out, seed=task.seed, conditioning=expert.conditioning, limit=VALIDATION_IMAGES,
            device=task.device,
        ).mean  # fmt: skip
    task.network.train(training)
    return loss


@torch.no_grad()
def save_preview(task: Task, ema: EMA, logger: MetricsLogger, *, settings: Train) -> None:
    """Sample `settings.sample_count` images and save them as a grid; do nothing for a router."""
    count, content = settings.sample_count, task.shards.content
    if not count:
        return
    training = task.network.training
    task.network.eval()
    with ema.applied(next(iter(ema.weights))):
        expert = task.expert()  # calibrates its bridge for the EMA weights
        if expert is not None:
            source = task.held_out if len(task.held_out) else task.shards
            rows = np.linspace(0, len(source) - 1, count).round().astype(np.int64)
            condition = condition_of(source.read(rows).to(task.device), expert.conditioning)
            noise = rng.normal((count, *content.latents.shape), seed=task.seed, stream=PREVIEW_STREAM, first=0)
            encoders = Encoders.of(content.latents, content.text, run=task.shards.artifacts[0].run)
            sampler = Sampler(Ensemble.of_expert(expert), encoders)
            # Conditions are not prepared once for all steps: FSDP2 gathers a sharded network in its forward pass only.
            how, parts = Settings(steps=PREVIEW_STEPS, guidance_scale=settings.sample_guidance_scale), []
            # In two batches: guidance doubles the rows, and the optimizer's state is in memory too.
            for part in torch.arange(count).chunk(2):
                x = noise[part].to(task.device)
                state = SamplerState(x, BatchConditions.of(condition, part), RoutingState())
                parts.append(sampler.run(state, how))
            latents = torch.cat(parts)
    task.network.train(training)
    if expert is not None:
        # A preview of a network that diverges must not end its training; the loss check does that.
        logger.save_grid(np.stack([np.asarray(image) for image in sampler.decode(latents.nan_to_num())]))
