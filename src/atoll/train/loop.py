"""The training loop: forward, loss, backward, step, EMA, save. One loop for all training jobs.

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
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.core.artifacts import Artifact
from atoll.core.config_sections import WEAK, TrainSection
from atoll.core.device import ASYNCHRONOUS, compute_dtype
from atoll.core.distributed import DistContext, full_tensor
from atoll.core.errors import AtollError
from atoll.core.progress import say
from atoll.flow import rng
from atoll.nets.blocks import compile_blocks, compiles_by_default, transformer_blocks
from atoll.train.checkpoints import Checkpoints, CheckpointSaver, TrainState
from atoll.train.ema import EMA
from atoll.train.metrics_logger import MetricsLogger
from atoll.train.muon import Muon
from atoll.train.previews import save_preview, validation_loss
from atoll.train.tasks import Losses, Task, TrainingInputs

REQUEUE = 75
"""Exit code of a job that was interrupted and saved (EX_TEMPFAIL of sysexits.h): run the same command again."""

NAMED = 16
"""Images that the error of a bad step names: a few lines of text. Each name may be in a file of its own."""


class Requeue(Exception):  # noqa: N818 - not an error
    """The job was interrupted by a signal or a callback, and saved a checkpoint."""


class TrainCallback(Protocol):
    """Hooks into training, called on the main process by the training thread."""

    def on_step(self, images: int) -> bool:
        """Handle the end of a step; return whether the job should save and stop."""

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        """Handle a committed checkpoint. It is called at the end of a later step, since a thread writes checkpoints."""


def train(task: Task, checkpoints: Checkpoints, callback: TrainCallback | None = None) -> tuple[EMA, float]:
    """Train from the newest checkpoint, if there is one, to the end; return the EMAs and the seconds of training."""
    settings, processes = task.spec.settings, checkpoints.processes
    # Network, state and data; a checkpoint is loaded into the state
    if settings.compile is True or (settings.compile == "auto" and compiles_by_default(processes.device)):
        compile_blocks(task.network)
    wrapped = processes.wrap(
        task.network,
        settings.parallel,
        compute_dtype(processes.device, settings.precision),
        blocks=transformer_blocks(task.network),
    )
    state = make_state(task.network, settings, processes, auxiliary=task.auxiliary)
    images, seconds = checkpoints.load_newest(state)
    # The batch size is among the inputs that a checkpoint must agree with, so the step count follows from the images.
    state.at_step(images // settings.batch_size)
    # The last save is at the end, whatever `save_every`.
    saves = -(-settings.total_images // settings.save_every) - images // settings.save_every
    processes.on_main(lambda: checkpoints.check_space(state, saves if images < settings.total_images else 0))
    batches = task.stream(images, processes)
    burn_in = 0 if task.spec.align is None else task.spec.align.images

    # Saver and logger
    saver = CheckpointSaver(checkpoints, callback.on_checkpoint if callback and processes.is_main else lambda _: None)
    check = StepCheck(task, saver.newest)
    logger = MetricsLogger(task.spec, processes, done=images, seconds=seconds)

    def due(every: int) -> bool:
        """Return whether the last step crossed a multiple of `every` images, or was the last of all."""
        last = images >= settings.total_images
        return bool(every) and (last or images // every > (images - settings.batch_size) // every)

    with logger, stop_signals() as stop, saver:
        while images < settings.total_images:
            lr = learning_rate(images, settings)
            # The dropout of an adapter draws from torch's own generator, which checkpoints do not contain.
            torch.manual_seed(rng.key(task.seed, rng.Stream.ADAPTER_DROPOUT, images + processes.rank))
            losses = train_step(task, wrapped, batches, state=state, lr=lr, processes=processes, check=check)
            images += settings.batch_size
            state.ema.update(images, settings.batch_size)
            logger.add(losses, images, lr=lr, shown=check.loss)

            # Stop? A signal may reach only some of the processes, and one step earlier or later. If the last checkpoint
            # failed, the next one raises its error on all processes.
            done = images >= settings.total_images
            stop_requested = callback is not None and processes.is_main and callback.on_step(images)
            stopped = processes.any_rank(saver.poll() or bool(stop) or stop_requested)

            # Validate and log. A validation ends a line, so that its error stands beside the training loss up to there.
            # So does the burn-in, because the metrics of a line have the same names.
            validated = due(settings.validate_every)
            if stopped or validated or images == burn_in or due(settings.log_every):
                error = validation_loss(task, state.ema) if validated else None
                check.finish()
                logger.write(images // settings.batch_size, lr, check.norm, validation_loss=error)

            # Preview
            if due(settings.sample_every):
                with autocast(processes.device, settings):
                    save_preview(task, state.ema, logger)

            # Save
            if stopped or due(settings.save_every):
                check.finish()
                saver.save(state, images, logger.seconds)
            if stopped or done:
                saver.wait()
            if stopped and not done:
                raise Requeue(
                    f"{task.spec.job}: interrupted and saved at {images:,} images; run the command again to resume"
                )
    return state.ema, logger.seconds


def train_step(
    task: Task,
    wrapped: nn.Module,
    batches: Iterator[TrainingInputs],
    *,
    state: TrainState,
    lr: float,
    processes: DistContext,
    check: "StepCheck",
) -> list[Losses]:
    """Make one step: forward and backward of all micro-batches, clipping, and the update of the weights."""
    settings = task.spec.settings
    step: list[tuple[Losses, Tensor]] = []
    for part in range(settings.grad_accum_steps):
        inputs = next(batches)
        # All micro-batches but the last accumulate gradients locally; the last one exchanges them.
        with processes.sync_gradients(wrapped, last=part == settings.grad_accum_steps - 1):
            with autocast(processes.device, settings):
                losses = task.losses(wrapped, inputs)
            torch.autograd.backward(losses.minimized.mean() / settings.grad_accum_steps)
        step.append((losses, inputs.index))
    if state.auxiliary is not None:
        processes.average_gradients(state.auxiliary.network)
    norm = clip(task.network, settings.max_grad_norm)
    check.finish()  # of the step before this one; the device has this one to work on while the host waits
    # A fused optimizer skips the update on the device if this is 1, as mixed-precision training does.
    shown = torch.cat([losses.loss.detach() for losses, _ in step]).mean()
    bad = check.begin([(losses.minimized.detach(), index) for losses, index in step], norm, shown)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.found_inf = bad  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [losses for losses, _ in step]


def autocast(device: torch.device, settings: TrainSection) -> torch.autocast:
    """Return a context that computes in the precision of training; float32 changes nothing."""
    precision = compute_dtype(device, settings.precision)
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def make_state(
    network: nn.Module, settings: TrainSection, processes: DistContext, *, auxiliary: nn.Module | None = None
) -> TrainState:
    """Return the state of a network, its EMAs and its optimizer; the auxiliary network has AdamW and no EMA."""
    other = None
    if auxiliary is not None:
        plain = settings.model_copy(update={"optimizer": "adamw", "ema": {}, "weak_share": 0.0})
        other = make_state(auxiliary.to(processes.device), plain, processes)
    half_lives, ends = dict(settings.ema), {}
    if settings.weak_share:
        half_lives[WEAK] = settings.ema[settings.result_ema or next(iter(settings.ema))]
        ends[WEAK] = settings.weak_images
    ema = EMA(network, half_lives, ends)
    return TrainState(network, ema, make_optimizer(network, settings, processes), other)


def make_optimizer(network: nn.Module, settings: TrainSection, processes: DistContext) -> torch.optim.Optimizer:
    """Return a fused AdamW optimizer, or Muon."""
    betas = (0.9, settings.beta2)
    options: dict[str, Any] = {"lr": settings.lr, "betas": betas, "weight_decay": settings.weight_decay, "fused": True}
    if settings.optimizer == "muon":
        return Muon(network, processes, settings.precision, **options)
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


def learning_rate(images: int, settings: TrainSection) -> float:
    """Return the learning rate: linear warmup, then constant or a cosine to 0."""
    warm = min(1.0, (images + settings.batch_size) / settings.warmup_images) if settings.warmup_images else 1.0
    if settings.lr_schedule == "constant":
        return settings.lr * warm
    return settings.lr * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, images / settings.total_images)))


class StepCheck:
    """Finds losses and gradients that are not finite, without waiting for the device.

    The optimizer skips a bad step on the device (`begin`). The host reads losses and gradient norm only when the next
    step is queued, before its update (`finish`), so the weights stay those of the last good step. On a CPU there is
    nothing to wait for, and `begin` finishes at once.
    """

    def __init__(self, task: Task, newest_checkpoint: Callable[[], str]) -> None:
        self._task, self._newest_checkpoint = task, newest_checkpoint
        self._index = torch.empty(0, dtype=torch.long)
        self._values: Tensor | None = None
        self._copied: torch.Event | None = None
        self.norm = self.loss = math.nan
        """Gradient norm and mean loss of the last step that was finished."""

    def begin(self, step: list[tuple[Tensor, Tensor]], norm: Tensor, mean: Tensor) -> Tensor:
        """Start the check of a step: losses (batch,) and image numbers (batch,) of its micro-batches, gradient norm.

        `mean` is the mean loss without regularization. Return 1.0 on the device if the step is bad, else 0.0.
        """
        parts = [*(loss.float() for loss, _ in step), norm.float().view(1), mean.float().view(1)]
        values = torch.cat(parts)  # (images + 2,)
        self._index = torch.cat([index for _, index in step])
        if values.device.type in ASYNCHRONOUS:
            self._values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.Event(values.device)
            self._copied.record()
        else:
            self._values = values.cpu()
            self.finish()
        return (~values[:-1].isfinite()).any().float()

    def finish(self) -> None:
        """Wait for the last step, and raise an error if it was bad."""
        if self._values is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        values, self._values = self._values, None
        bad = ~values[:-1].isfinite()
        if bad.any():
            losses = bad[:-1]
            what, rows = ("loss", self._index[losses]) if losses.any() else ("gradient", self._index)
            shown = ", ".join(self._task.shards.ids(rows[:NAMED].tolist()))
            shown += f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
            raise AtollError(
                f"{self._task.spec.job}: the {what} is not finite on images {shown}. This step was not applied; the "
                f"newest checkpoint is {self._newest_checkpoint()}. Lower train.lr or train.max_grad_norm, or inspect "
                "these images"
            )
        self.norm, self.loss = values[-2:].tolist()


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM, SIGUSR1 and Ctrl-C in a list instead of ending the process; training stops if it is not empty.

    A second Ctrl-C ends the process at once. Ctrl-C is left to a handler that was installed before.
    """
    received: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT:
            if number in received:
                raise KeyboardInterrupt
            say("stopping: saving a checkpoint first (press Ctrl-C again to skip this)", file=sys.stderr)
        received.append(number)

    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # Python handlers that were installed before get the signals too, now that training has stopped.
        for caught in set(received) - {signal.SIGINT}:
            if callable(handler := before[signal.Signals(caught)]):
                handler(caught, None)
