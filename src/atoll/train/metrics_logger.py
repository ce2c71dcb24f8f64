"""The metrics logger: progress bar, progress.json, metrics.jsonl and optional trackers.

Losses are summed on the device in ten time bins, because the loss of diffusion training depends strongly on the time.
Nothing is copied to the host until a line is written, so logging does not stall the device. Between two lines, bar and
progress.json show the losses that the check for bad steps has on the host anyway.
"""

import importlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from atoll.core import layout
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.core.metrics_file import MetricsLine
from atoll.core.progress import progress
from atoll.experts.validation import TIME_BINS
from atoll.train.spec import TrainSpec
from atoll.train.tasks import Losses

_PROGRESS_SECONDS = 1.0
"""Seconds between two versions of progress.json; `atoll launch` reads it as often."""
_STEPS = 50
"""Number of steps over which the shown loss is averaged, roughly: the loss of a single small batch is mostly noise."""
_SMOOTHING = 0.3
"""Weight of the last seconds in the shown speed, as in tqdm."""

Tracker = Callable[[Mapping[str, float | Image], int], None]
"""Called with the metrics of a line, or with an image, and the images seen."""


class MetricsLogger(ExitStack):
    """Accumulates losses between two lines of metrics.jsonl, and writes the lines."""

    def __init__(self, spec: TrainSpec, processes: DistContext, *, done: int, seconds: float) -> None:
        """Open the log of a job that has seen `done` images in `seconds` before."""
        super().__init__()
        self.folder, self.processes, self.done, self.total = (
            spec.run / spec.job,
            processes,
            done,
            spec.settings.total_images,
        )
        self._sums: Tensor | None = None
        self._names: list[str] = []
        self._trackers: list[Tracker] = []
        self._last, self._last_images = time.monotonic(), done
        self._start = self._last - seconds
        self._shown, self._shown_images, self._rate = self._last, done, 0.0
        self._loss, self._losses = 0.0, 0
        if processes.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / layout.METRICS_FILE
            truncate_metrics(file, done)
            (self.folder / layout.PROGRESS_FILE).unlink(missing_ok=True)
            self._lines = self.enter_context(file.open("a", encoding="utf-8"))
            self._trackers = [open_tracker(kind, spec, stack=self) for kind in spec.settings.trackers]
            self._bar = self.enter_context(progress(spec.job, self.total, done))

    @property
    def seconds(self) -> float:
        """Wall time of the job so far, including the time before it resumed."""
        return time.monotonic() - self._start

    @torch.no_grad()
    def add(self, step: Sequence[Losses], images: int, *, lr: float, shown: float) -> None:
        """Add the micro-batches of a step to the sums and counts by time; advance the bar to the images seen so far.

        `shown` is the loss of this step or the one before, on the host; NaN if there is none yet.
        """
        for losses in step:
            values = {"loss": losses.loss, **losses.extra}
            self._names = list(values)
            bins = (losses.t * TIME_BINS).long().clamp(max=TIME_BINS - 1)
            # Rows: each metric, then ones, whose sum counts the images of a bin. Sums: (metrics + 1, TIME_BINS).
            rows = torch.stack([value.float() for value in values.values()] + [torch.ones_like(losses.loss)])
            sums = torch.zeros(len(rows), TIME_BINS, device=rows.device).index_add_(1, bins, rows)
            self._sums = sums if self._sums is None else self._sums + sums
        if not math.isnan(shown):
            self._losses = min(self._losses + 1, _STEPS)
            self._loss += (shown - self._loss) / self._losses
        before, self.done = self.done, images
        if self.processes.is_main:
            self._show(lr)
            self._bar.update(images - before)

    def _show(self, lr: float) -> None:
        """Show loss and learning rate in the bar and, if it is time, in progress.json."""
        if not self._losses:
            return
        now = time.monotonic()
        passed = now - self._shown
        rate = (self.done - self._shown_images) / max(passed, 1e-9)
        rate = self._rate + _SMOOTHING * (rate - self._rate) if self._rate else rate
        line = MetricsLine(images=self.done, loss=self._loss, images_per_second=rate, total=self.total, lr=lr)
        self._bar.set_postfix_str(line.text, refresh=False)
        if passed > _PROGRESS_SECONDS:
            self._shown, self._shown_images, self._rate = now, self.done, rate
            # Replaced as a whole, because others read it at any time.
            temporary = self.folder / f".{layout.PROGRESS_FILE}"
            temporary.write_text(line.model_dump_json() + "\n", encoding="utf-8")
            temporary.replace(self.folder / layout.PROGRESS_FILE)

    def write(self, step: int, lr: float, gradient: float, *, validation_loss: float | None = None) -> None:
        """Write one line: means since the last line, overall and by time, and the validation if there was one."""
        assert self._sums is not None
        sums = self.processes.all_reduce(self._sums).cpu()
        self._sums = None
        if not self.processes.is_main:
            return
        now = time.monotonic()
        rate = (self.done - self._last_images) / max(now - self._last, 1e-9)
        self._last, self._last_images = now, self.done
        counts = sums[-1]
        metrics = {name: (row.sum() / counts.sum()).item() for name, row in zip(self._names, sums, strict=False)}
        line: dict[str, float] = {"images": self.done, "step": step, **metrics, "lr": lr, "gradient_norm": gradient}
        line |= {"images_per_second": rate, "seconds": self.seconds, "total": self.total}
        if validation_loss is not None:
            line["validation_loss"] = validation_loss
        for track in self._trackers:
            track({key: float(value) for key, value in line.items()}, self.done)
        bins: dict[str, list[float | None]] = {}
        for name, row in zip(self._names, sums, strict=False):
            pairs = zip(row.tolist(), counts.tolist(), strict=True)
            bins[f"{name}_by_time"] = [value / count if count else None for value, count in pairs]
        self._lines.write(json.dumps({**line, **bins}) + "\n")
        # Flushed line by line: other programs follow the file, and a kill must not lose lines.
        self._lines.flush()
        (self.folder / layout.PROGRESS_FILE).unlink(missing_ok=True)  # the line is newer

    def write_image(self, name: str, image: Image) -> None:
        """Save a preview, and give it to the trackers."""
        file = layout.preview(self.folder, self.done)
        file.parent.mkdir(exist_ok=True)
        image.save(file)
        for track in self._trackers:
            track({name: image}, self.done)


def truncate_metrics(file: Path, images: int) -> None:
    """Remove the lines after the checkpoint that training resumes from, and an incomplete last line."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["images"] <= images:
                kept.append(line)
        except json.JSONDecodeError:  # incomplete
            break
    file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def open_tracker(kind: str, spec: TrainSpec, *, stack: ExitStack) -> Tracker:
    """Open a tracker by name: tensorboard, or a module with the interface of wandb."""
    folder = spec.run / spec.job
    try:
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = stack.enter_context(SummaryWriter(str(folder / "tensorboard")))

            def to_tensorboard(values: Mapping[str, float | Image], images: int) -> None:
                for key, value in values.items():
                    if isinstance(value, Image):
                        writer.add_image(key, np.asarray(value), images, dataformats="HWC")
                    else:
                        writer.add_scalar(key, value, images)

            return to_tensorboard
        module = importlib.import_module(kind)
    except ImportError as error:
        raise AtollError(f"{kind} is not installed; pip install {kind}, or remove it from train.trackers") from error
    options = {"dir": str(folder)} if kind == "wandb" else {}
    # Each job is a run of the tracker. Its name has no slash, because Trackio stores images in a folder of this name.
    name = spec.job.replace("/", "-")
    module.init(project="atoll", group=spec.run.name, name=f"{spec.run.name}-{name}", **options)
    stack.callback(module.finish)

    def track(values: Mapping[str, float | Image], images: int) -> None:
        shown = {key: module.Image(value) if isinstance(value, Image) else value for key, value in values.items()}
        module.log(shown, step=images)

    return track
