"""The loop: forward, loss, backward, step, average, save. One for expert, router, monolith and student."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import torch
from torch import nn

from atoll.core.artifacts import Artifact
from atoll.core.config_sections import Train
from atoll.core.errors import AtollError
from atoll.data.dataset import Batch
from atoll.train.checkpoints import Checkpoints, State
from atoll.train.distributed import World, whole
from atoll.train.ema import EMA
from atoll.train.metrics_logger import Journal
from atoll.train.previews import draw_grid
from atoll.train.tasks import Task

REQUEUE = 75
"""Exit code of a job that was asked to stop and saved: run the same command again (EX_TEMPFAIL)."""


class Requeue(Exception):  # noqa: N818 - not an error
    """The job was told to stop; everything is saved."""


@dataclass(frozen=True)
class Outcome:
    """What is left after the last step."""

    ema: EMA
    seconds: float


class Watch(Protocol):
    """Whoever looks on while a job trains; the first process calls it."""

    def stepped(self, images: int) -> bool:
        """A step was made; whether the job should save and stop."""

    def saved(self, checkpoint: Artifact) -> None:
        """A checkpoint was committed."""


def train(
    task: Task, settings: Train, checkpoints: Checkpoints, *, world: World, watch: Watch | None = None
) -> Outcome:
    """Train until `settings.total_images`, from the newest checkpoint if there is one."""
    precision = getattr(torch, settings.precision)
    wrapped = world.wrap(task.network, settings.parallel, precision)
    forward = torch.compile(wrapped) if settings.compile else wrapped
    state = State(task.network, EMA(task.network, settings.ema), make_optimizer(task.network, settings))
    images, seconds = checkpoints.load_newest(state)
    state.at_step(images // settings.batch_size)
    micro = settings.batch_size // settings.grad_accum_steps
    stream = task.shards.stream(
        micro, task.seed, images, rank=world.rank, world_size=world.size, workers=settings.workers
    )
    journal = Journal(
        checkpoints.run / task.name,
        task.name,
        world,
        total=settings.total_images,
        done=images,
        trackers=settings.trackers,
        seconds=seconds,
    )
    autocast = torch.autocast(world.device.type, precision, enabled=precision != torch.float32)
    with journal, stop_signals() as stop:
        while images < settings.total_images:
            lr = learning_rate(images, settings)
            for part in range(settings.grad_accum_steps):
                batch = next(stream).to(world.device)
                position = images + part * micro + world.rank * (micro // world.size)
                with world.gradients(wrapped, last=part == settings.grad_accum_steps - 1):
                    with autocast:
                        losses = task.losses(forward, batch, position)
                    check_finite(losses.loss, batch, task, checkpoints=checkpoints)
                    torch.autograd.backward(losses.loss.mean() / settings.grad_accum_steps)
                journal.add(losses)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
            norm = clip(task.network, settings.max_grad_norm)
            if not math.isfinite(norm):
                raise_not_finite("gradient", batch, task, checkpoints=checkpoints)
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            images += settings.batch_size
            state.ema.update(images, settings.batch_size)

            journal.advance(images, settings.batch_size)
            told = watch is not None and world.first and watch.stepped(images)
            done, stopped = images >= settings.total_images, world.agree(bool(stop) or told)
            if done or stopped or due(images, settings.log_every, settings.batch_size):
                journal.write(images // settings.batch_size, lr, norm)
            if settings.sample_every and (done or due(images, settings.sample_every, settings.batch_size)):
                with autocast:
                    draw_grid(task, state.ema, journal, settings=settings)
            if done or stopped or due(images, settings.save_every, settings.batch_size):
                checkpoint = checkpoints.save(state, images, journal.seconds)
                if watch is not None and world.first:
                    watch.saved(checkpoint)
            if stopped and not done:
                raise Requeue(f"{task.name}: stopped at {images:,} images and saved; the same command continues")
    return Outcome(state.ema, journal.seconds)


def make_optimizer(network: nn.Module, settings: Train) -> torch.optim.AdamW:
    """AdamW, fused."""
    return torch.optim.AdamW(
        network.parameters(),
        lr=settings.lr,
        betas=(0.9, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


def clip(network: nn.Module, largest: float) -> float:
    """Scale the gradient down to a norm of at most `largest`, and return what it was; a small one is not touched."""
    parameters = list(network.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    known = float(whole(norm))
    if known > largest:
        nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return known


def learning_rate(images: int, settings: Train) -> float:
    """Linear warm-up, then constant or a cosine to 0; a function of the images seen, so it needs no state."""
    warm = min(1.0, (images + settings.batch_size) / settings.warmup_images) if settings.warmup_images else 1.0
    if settings.lr_schedule == "constant":
        return settings.lr * warm
    return settings.lr * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, images / settings.total_images)))


def due(images: int, every: int, batch: int) -> bool:
    """Whether this step crossed a multiple of `every` images."""
    return images // every > (images - batch) // every


def check_finite(loss: torch.Tensor, batch: Batch, task: Task, *, checkpoints: Checkpoints) -> None:
    """Stop before a loss that is not a number reaches the weights."""
    if not bool(loss.isfinite().all()):
        raise_not_finite("loss", batch, task, checkpoints=checkpoints, bad=~loss.isfinite())


def raise_not_finite(
    what: str, batch: Batch, task: Task, *, checkpoints: Checkpoints, bad: torch.Tensor | None = None
) -> None:
    """Name the images and the last good checkpoint."""
    rows = batch.index if bad is None else batch.index[bad]
    ids = task.shards.ids(rows.tolist())
    shown = ", ".join(ids[:16]) + (f" and {len(ids) - 16} more" if len(ids) > 16 else "")
    raise AtollError(
        f"{task.name}: the {what} is not finite on images {shown}. Nothing of this step was kept; the last good "
        f"checkpoint is {checkpoints.newest()}. Lower train.lr or train.max_grad_norm, or look at those images"
    )


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGUSR1 ask for an orderly stop; the list is not empty once one has come."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for heard in set(received):  # whoever waited for it before hears of it too
            if callable(handler := before[signal.Signals(heard)]):
                handler(heard, None)
