"""The training loop: forward, loss, backward, step, EMA, save. One loop for expert, router, monolith and student.

Progress is counted in images, and `images` is the only clock. A step takes `batch_size` positions of an endless stream,
images … images + batch_size - 1, divided into `grad_accum_steps` micro-batches, each divided between the processes:

    micro-batch p, rank r:   positions images + p·micro + r·share …, share = micro / processes, micro = batch / accum

All images of a step have one size. The image at a position, its noise, time and condition dropout are functions of
(seed, position), and the learning rate is a function of `images`. So the state after N images depends on the
configuration and the data alone, not on interruptions or, up to rounding, on the number of processes and micro-batches.
To resume is to load the newest checkpoint, of N images, and to continue at position N; on the same machine, the final
weights have the same bits.

A job stops in an orderly way on SIGTERM or SIGUSR1, or if the callback requests it: all processes agree on the step
after which they stop (`any_rank`), save, and raise `Requeue`. A kill loses the images since the last committed
checkpoint. Checkpoints are written by a thread (`CheckpointSaver`) while training goes on.
"""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.core.artifacts import Artifact
from atoll.core.config_sections import Train
from atoll.core.device import ASYNCHRONOUS, compute_dtype
from atoll.core.errors import AtollError
from atoll.nets.blocks import compile_blocks, compiles_by_default
from atoll.train.checkpoints import Checkpoints, CheckpointSaver, TrainState
from atoll.train.distributed import DistContext, full_tensor
from atoll.train.ema import EMA
from atoll.train.inputs import TrainingInputs, copy_ahead
from atoll.train.metrics_logger import MetricsLogger
from atoll.train.muon import Muon, muon_dtype
from atoll.train.previews import held_out_loss, save_preview
from atoll.train.tasks import Losses, Task

REQUEUE = 75
"""Exit code of a job that was interrupted and saved (EX_TEMPFAIL of sysexits.h): run the same command again."""

NAMED = 16
"""Images that the error of a bad step names: a few lines of text. Each name may be in a file of its own."""


class Requeue(Exception):  # noqa: N818 - not an error
    """The job was interrupted by a signal or a callback, and saved a checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """The result of training: the EMA weights and the wall time."""

    ema: EMA
    seconds: float


class TrainCallback(Protocol):
    """Hooks into training, called on the main process by the training thread."""

    def on_step(self, images: int) -> bool:
        """Handle the end of a step; return whether the job should save and stop."""

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        """Handle a committed checkpoint. It is called at the end of a later step, since a thread writes checkpoints."""


def train(
    task: Task,
    settings: Train,
    checkpoints: Checkpoints,
    *,
    context: DistContext,
    callback: TrainCallback | None = None,
) -> Outcome:
    """Train up to `settings.total_images`, from the newest checkpoint if there is one."""
    # Network, state and data; a checkpoint is loaded into the state
    if settings.compile is True or (settings.compile == "auto" and compiles_by_default(context.device)):
        compile_blocks(task.network)
    wrapped = context.wrap(task.network, settings.parallel, compute_dtype(context.device, settings.precision))
    state = make_state(task.network, settings, context, auxiliary=task.auxiliary)
    images, seconds = checkpoints.load_newest(state)
    # The batch size is among the inputs that a checkpoint must agree with, so the step count follows from the images.
    state.at_step(images // settings.batch_size)
    # The last save is at the end, whatever `save_every`.
    saves = -(-settings.total_images // settings.save_every) - images // settings.save_every
    context.on_main(lambda: checkpoints.check_space(state, saves if images < settings.total_images else 0))
    stream = task.stream(
        settings.batch_size, images, parts=settings.grad_accum_steps, rank=context.rank, world_size=context.size,
        workers=settings.workers, pin=context.device.type in ASYNCHRONOUS,
    )  # fmt: skip
    batches = copy_ahead(stream, context.device)

    # Saver and logger
    saver = CheckpointSaver(
        checkpoints, lambda made: callback.on_checkpoint(made) if callback and context.is_main else None
    )
    check = StepCheck(task, saver.newest)
    logger = MetricsLogger(
        checkpoints.run / task.name,
        task.name,
        context,
        total=settings.total_images,
        done=images,
        trackers=settings.trackers,
        seconds=seconds,
    )

    def due(every: int) -> bool:
        """Return whether the last step crossed a multiple of `every` images."""
        return bool(every) and (done or images // every > (images - settings.batch_size) // every)

    with logger, stop_signals() as stop, saver:
        while images < settings.total_images:
            lr = learning_rate(images, settings)
            losses = train_step(
                task, wrapped, batches, state=state, lr=lr, settings=settings, context=context, check=check
            )
            logger.add(losses)
            images += settings.batch_size
            state.ema.update(images, settings.batch_size)
            logger.advance(images, settings.batch_size)

            # Stop? A signal may reach only some of the processes, and one step earlier or later. If the last checkpoint
            # failed, the next one raises its error on all processes.
            done = images >= settings.total_images
            stop_requested = callback is not None and context.is_main and callback.on_step(images)
            stopped = context.any_rank(saver.poll() or bool(stop) or stop_requested)

            # Validate and log. A validation ends a line, so that its error stands beside the training loss up to there.
            # So does the burn-in, because the metrics of a line have the same names.
            validated = due(settings.validate_every)
            if stopped or validated or images == task.burn_in or due(settings.log_every):
                error = held_out_loss(task, state.ema) if validated else None
                logger.write(images // settings.batch_size, lr, check.read(), held_out_loss=error)

            # Preview
            if due(settings.sample_every):
                with autocast(context.device, settings):
                    save_preview(task, state.ema, logger, settings=settings)

            # Save
            if stopped or due(settings.save_every):
                check.read()
                saver.save(state, images, logger.seconds)
            if stopped or done:
                saver.wait()
            if stopped and not done:
                raise Requeue(
                    f"{task.name}: interrupted and saved at {images:,} images; run the command again to resume"
                )
    return Outcome(state.ema, logger.seconds)


def train_step(
    task: Task,
    wrapped: nn.Module,
    batches: Iterator[TrainingInputs],
    *,
    state: TrainState,
    lr: float,
    settings: Train,
    context: DistContext,
    check: "StepCheck",
) -> list[Losses]:
    """Make one step: forward and backward of all micro-batches, clipping, and the update of the weights."""
    step: list[tuple[Losses, Tensor]] = []
    for part in range(settings.grad_accum_steps):
        inputs = next(batches)
        # All micro-batches but the last accumulate gradients locally; the last one exchanges them.
        with context.sync_gradients(wrapped, last=part == settings.grad_accum_steps - 1):
            with autocast(context.device, settings):
                losses = task.losses(wrapped, inputs)
            torch.autograd.backward(losses.minimized.mean() / settings.grad_accum_steps)
        step.append((losses, inputs.index))
    if state.auxiliary is not None:
        context.average_gradients(state.auxiliary.network)
    norm = clip(task.network, settings.max_grad_norm)
    check.read()  # the step before this one; the device has this one to work on while the host waits
    # A fused optimizer skips the update on the device if this is 1, as mixed-precision training does.
    bad = check.begin([(losses.minimized.detach(), index) for losses, index in step], norm)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.found_inf = bad  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [losses for losses, _ in step]


def autocast(device: torch.device, settings: Train) -> torch.autocast:
    """Return a context that computes in the precision of training; float32 changes nothing."""
    precision = compute_dtype(device, settings.precision)
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def make_state(
    network: nn.Module, settings: Train, context: DistContext, *, auxiliary: nn.Module | None = None
) -> TrainState:
    """Return the state of a network, its EMAs and its optimizer; the auxiliary network has AdamW and no EMA."""
    other = None
    if auxiliary is not None:
        plain = settings.model_copy(update={"optimizer": "adamw", "ema": {}})
        other = make_state(auxiliary.to(context.device), plain, context)
    return TrainState(network, EMA(network, settings.ema), make_optimizer(network, settings, context), other)


def make_optimizer(network: nn.Module, settings: Train, context: DistContext) -> torch.optim.Optimizer:
    """Return a fused AdamW optimizer, or Muon."""
    betas = (0.9, settings.beta2)
    options: dict[str, Any] = {"lr": settings.lr, "betas": betas, "weight_decay": settings.weight_decay, "fused": True}
    if settings.optimizer == "muon":
        return Muon(network, context, dtype=muon_dtype(context.device, settings.precision), **options)
    return torch.optim.AdamW(network.parameters(), **options)


def clip(network: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to a total norm of at most `max_norm`; return the norm before, on the device."""
    parameters = list(network.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    full = full_tensor(norm)
    # On a CPU, reading the norm costs nothing and saves a pass over all gradients. An accelerator would have to finish
    # its work first; it multiplies by 1 instead.
    if full.device.type != "cpu" or full > max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return full


def learning_rate(images: int, settings: Train) -> float:
    """Return the learning rate: linear warmup, then constant or a cosine to 0."""
    warm = min(1.0, (images + settings.batch_size) / settings.warmup_images) if settings.warmup_images else 1.0
    if settings.lr_schedule == "constant":
        return settings.lr * warm
    return settings.lr * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, images / settings.total_images)))


class StepCheck:
    """Finds losses and gradients that are not finite, without waiting for the device.

    The optimizer skips a bad step on the device (`begin`). The host reads losses and gradient norm only when the next
    step is queued, before its update (`read`), so the weights stay those of the last good step. On a CPU there is
    nothing to wait for, and `begin` reads at once.
    """

    def __init__(self, task: Task, newest_checkpoint: Callable[[], str]) -> None:
        self._task, self._newest_checkpoint = task, newest_checkpoint
        self._index = torch.empty(0, dtype=torch.long)
        self._values: Tensor | None = None
        self._copied: torch.Event | None = None
        self._norm = math.nan

    def begin(self, step: list[tuple[Tensor, Tensor]], norm: Tensor) -> Tensor:
        """Start the check of a step: losses (batch,) and image numbers (batch,) of its micro-batches, gradient norm.

        Return 1.0 on the device if the step is bad, else 0.0.
        """
        values = torch.cat([*(loss.float() for loss, _ in step), norm.float().view(1)])  # (images + 1,)
        self._index = torch.cat([index for _, index in step])
        if values.device.type in ASYNCHRONOUS:
            self._values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.Event(values.device)
            self._copied.record()
        else:
            self._values = values.cpu()
            self.read()
        return (~values.isfinite()).any().float()

    def read(self) -> float:
        """Raise an error if the last step was bad, or return its gradient norm; wait if it is not finished."""
        if self._values is None:
            return self._norm
        if self._copied is not None:
            self._copied.synchronize()
        values, self._values = self._values, None
        bad = ~values.isfinite()
        if bad.any():
            losses = bad[:-1]
            what, rows = ("loss", self._index[losses]) if losses.any() else ("gradient", self._index)
            shown = ", ".join(self._task.shards.ids(rows[:NAMED].tolist()))
            shown += f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
            raise AtollError(
                f"{self._task.name}: the {what} is not finite on images {shown}. This step was not applied; the newest "
                f"checkpoint is {self._newest_checkpoint()}. Lower train.lr or train.max_grad_norm, or inspect these "
                "images"
            )
        self._norm = float(values[-1])
        return self._norm


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGUSR1 in a list instead of ending the process; training stops if it is not empty."""
    received: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)

    before = {number: signal.signal(number, collect) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # Python handlers that were installed before get the signals too, now that training has stopped.
        for caught in set(received):
            if callable(handler := before[signal.Signals(caught)]):
                handler(caught, None)
