"""Previews and validation during training: of the EMA that becomes the result, with the same noise and images.

A preview is a grid of images; with several sizes of images, it has one row for each size of the job's data. The preview
of a router is a plot of its probabilities for validation images.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from atoll.core import layout
from atoll.encoders.encoders import Encoders
from atoll.ensemble import Ensemble, RoutingState, Sampler, SamplerState, SampleSettings
from atoll.ensemble.sampler import Trace
from atoll.ensemble.saving import draw_trace
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import condition_of
from atoll.experts.validation import validate
from atoll.flow import rng
from atoll.flow.schedules import TIMESTEP_SCALE
from atoll.train.ema import EMA
from atoll.train.metrics_logger import MetricsLogger
from atoll.train.tasks import RouterTask, Task

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
    """Save a grid of `sample_count` sampled images; for a router, a plot of its probabilities for as many images."""
    if not task.spec.settings.sample_count:
        return
    with ema.applied(task.spec.result_ema):
        router = isinstance(task, RouterTask)
        preview = plot_routing(task) if router else sample_grid(task)
    if preview is not None and logger.processes.is_main:
        logger.write_image("routing" if router else "samples", preview)


def plot_routing(task: Task) -> Image.Image:
    """Plot a router's probabilities of the clusters for images at all noise levels, from noise (t = 1) to data."""
    content, settings = task.shards.content, task.spec.settings
    size = next(iter(task.shards.image_counts()))  # a plot has images of one size
    source = task.validation if size in task.validation.image_counts() else task.shards
    places = np.linspace(0, source.image_counts()[size] - 1, settings.sample_count).round()
    examples = source.read(source.numbers(size, places)).to(task.device)
    condition = condition_of(examples, task.spec.conditioning)
    latents = source.statistics.normalize(examples.mean.float())
    noise = rng.normal(tuple(latents.shape), seed=task.seed, stream=rng.Stream.PREVIEW, first=0).to(task.device)
    times, found = torch.linspace(1, 0, PREVIEW_STEPS + 1)[:-1], []
    for t in times.tolist():
        timestep = torch.full((len(latents),), TIMESTEP_SCALE * t, device=task.device)
        found.append(task.network((1 - t) * latents + t * noise, timestep, condition).float().softmax(1))
    weights = torch.stack(found).cpu()  # (steps, images, experts)
    codec = Encoders.of(content.latents, content.text, run=task.shards.artifacts[0].run).autoencoder()
    pixels = codec.decode(examples.mean.float()).cpu().numpy()
    names = tuple(map(layout.expert_job, task.spec.clusters))
    return draw_trace(Trace(times, weights, weights, names), [Image.fromarray(image) for image in pixels])


def sample_grid(task: Task) -> Image.Image | None:
    """Sample images with the captions of validation images, in a grid; return None for a student without previews."""
    shards, settings = task.shards, task.spec.settings
    content, sizes = shards.content, list(shards.image_counts())
    count = -(-settings.sample_count // len(sizes))
    latents = []
    expert = task.expert()  # calibrates its bridge for the EMA weights
    if expert is None:
        return None
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
    return grid(images, count if len(sizes) > 1 else None)


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
