"""Previews and validation during training: of the EMA that becomes the result, with the same noise and images.

A preview is a grid of images; with several sizes of images, it has one row for each size of the job's data.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from atoll.core import layout
from atoll.encoders.encoders import Encoders
from atoll.ensemble import Ensemble, RoutingState, Sampler, SamplerState, SampleSettings
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import condition_of
from atoll.experts.validation import validate
from atoll.flow import rng
from atoll.train.ema import EMA
from atoll.train.metrics_logger import MetricsLogger
from atoll.train.tasks import Task

PREVIEW_STEPS = 20
"""Euler steps of a preview: fewer than the 50 of sampling, because previews are only looked at and training waits."""
VALIDATION_IMAGES = 64
"""Validation images of each cluster for a validation during training, a sixteenth of the final validation. It then
costs as much as training on 210 images."""


@torch.no_grad()
def validation_loss(task: Task, ema: EMA) -> float | None:
    """Return the velocity error of the resulting EMA; None for a router, and without validation images."""
    if not len(task.validation):
        return None
    with ema.applied(task.spec.result_ema):
        expert = task.expert()
        # Every process validates on all images: a network sharded by FSDP2 must run on all processes together.
        return None if expert is None else validate(
            expert.velocity, task.validation, seed=task.seed, conditioning=expert.conditioning, limit=VALIDATION_IMAGES,
            device=task.device,
        ).mean  # fmt: skip


@torch.no_grad()
def save_preview(task: Task, ema: EMA, logger: MetricsLogger) -> None:
    """Sample `sample_count` images and save them as a grid; do nothing for a router."""
    shards, settings = task.shards, task.spec.settings
    content, sizes = shards.content, list(shards.image_counts())
    count = -(-settings.sample_count // len(sizes))
    if not count:
        return
    latents = []
    with ema.applied(task.spec.result_ema):
        expert = task.expert()  # calibrates its bridge for the EMA weights
        if expert is None:
            return
        sampler = Sampler(
            Ensemble.of_expert(expert), Encoders.of(content.latents, content.text, run=shards.artifacts[0].run)
        )
        # Conditions are not prepared once for all steps: FSDP2 gathers a sharded network in its forward pass only.
        how = SampleSettings(steps=PREVIEW_STEPS, guidance_scale=settings.sample_guidance_scale)
        for number, size in enumerate(sizes):
            # Images of this size, evenly spread: validation images, or training images if none has this size.
            source = task.validation if size in task.validation.image_counts() else shards
            places = np.linspace(0, source.image_counts()[size] - 1, count).round()
            examples = source.read(source.numbers(size, places)).to(task.device)
            condition = condition_of(examples, expert.conditioning)
            shape = (count, content.latents.shape[0], size.height, size.width)
            noise = rng.normal(shape, seed=task.seed, stream=rng.Stream.PREVIEW, first=number * count)
            # In two batches: guidance doubles the rows, and the optimizer's state is in memory too.
            parts = []
            for part in torch.arange(count).chunk(2):
                state = SamplerState(noise[part].to(task.device), BatchConditions.of(condition, part), RoutingState())
                parts.append(sampler.run(state, how))
            latents.append(torch.cat(parts))
    # A preview of a network that diverges must not end its training; the loss check does that.
    decoded = (sampler.decode(part.nan_to_num()) for part in latents)
    images = [np.asarray(image) for part in decoded for image in part]
    if logger.processes.is_main:
        target = layout.preview(logger.folder, logger.done)
        target.parent.mkdir(exist_ok=True)
        grid(images, count if len(sizes) > 1 else None).save(target)


def grid(images: "Sequence[np.ndarray[Any, Any]]", columns: int | None = None) -> Image.Image:
    """Arrange images (height, width, 3) in a grid, by default as square as possible; a row has one size."""
    columns = columns or int(np.ceil(np.sqrt(len(images))))
    rows = [images[start : start + columns] for start in range(0, len(images), columns)]
    height, width = sum(len(row[0]) for row in rows), max(len(row) * row[0].shape[1] for row in rows)
    sheet, top = np.full((height, width, 3), 255, dtype=np.uint8), 0
    for row in rows:
        for column, image in enumerate(row):
            left = column * image.shape[1]
            sheet[top : top + len(image), left : left + image.shape[1]] = image
        top += len(row[0])
    return Image.fromarray(sheet)
