"""The metrics logger: progress bar, metrics.jsonl, previews, and optional trackers.

Losses are summed on the device in ten time bins, because the loss of diffusion training depends strongly on the time.
Nothing is copied to the host until a line is written, so logging does not stall the device.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.progress import progress
from atoll.experts.validation import TIME_BINS
from atoll.train.distributed import DistContext
from atoll.train.tasks import Losses

Tracker = Callable[[dict[str, float], int], None]
"""Called with the metrics of a line and the images seen."""


class MetricsLogger:
    """Accumulates losses between two lines of metrics.jsonl, and writes the lines."""

    def __init__(
        self,
        folder: Path,
        name: str,
        context: DistContext,
        *,
        total: int,
        done: int,
        trackers: Sequence[str],
        seconds: float,
    ) -> None:
        self.folder, self.context, self.done, self.seconds_before = folder, context, done, seconds
        self.total = total
        self._sums: Tensor | None = None
        self._names: list[str] = []
        self._stack = ExitStack()
        self._trackers: list[Tracker] = []
        self._start = self._last = time.monotonic()
        self._last_images = done
        if context.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            truncate_metrics(folder / layout.METRICS_FILE, done)
            self._lines = self._stack.enter_context((folder / layout.METRICS_FILE).open("a", encoding="utf-8"))
            self._trackers = [open_tracker(kind, folder, name, stack=self._stack) for kind in trackers]
            self._bar = self._stack.enter_context(progress(name, total, done))

    def __enter__(self) -> Self:
        """Return the logger, which is open already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file, the progress bar and the trackers."""
        self._stack.close()

    @property
    def seconds(self) -> float:
        """Wall time of the job so far, including the time before it resumed."""
        return self.seconds_before + time.monotonic() - self._start

    @torch.no_grad()
    def add(self, step: Sequence[Losses]) -> None:
        """Add the losses of the micro-batches of a step to the sums and counts by time."""
        for losses in step:
            values = {"loss": losses.loss, **losses.extra}
            self._names = list(values)
            bins = (losses.t * TIME_BINS).long().clamp(max=TIME_BINS - 1)
            # Rows: each metric, then ones, whose sum counts the images of a bin. Sums: (metrics + 1, TIME_BINS).
            rows = torch.stack([value.float() for value in values.values()] + [torch.ones_like(losses.loss)])
            sums = torch.zeros(len(rows), TIME_BINS, device=rows.device).index_add_(1, bins, rows)
            self._sums = sums if self._sums is None else self._sums + sums

    def advance(self, images: int, batch_size: int) -> None:
        """Advance the progress bar by one step."""
        self.done = images
        if self.context.is_main:
            self._bar.update(batch_size)

    def write(self, step: int, lr: float, gradient: float, *, held_out_loss: float | None = None) -> None:
        """Write one line: means since the last line, overall and by time, and the validation if there was one."""
        assert self._sums is not None
        sums = self.context.all_reduce(self._sums).cpu()
        self._sums = None
        if not self.context.is_main:
            return
        now = time.monotonic()
        rate = (self.done - self._last_images) / max(now - self._last, 1e-9)
        self._last, self._last_images = now, self.done
        counts = sums[-1]
        metrics = {name: (row.sum() / counts.sum()).item() for name, row in zip(self._names, sums, strict=False)}
        line: dict[str, float] = {"images": self.done, "step": step, **metrics, "lr": lr, "gradient_norm": gradient}
        line |= {"images_per_second": rate, "seconds": self.seconds, "total": self.total}
        if held_out_loss is not None:
            line["held_out_loss"] = held_out_loss
        for track in self._trackers:
            track({key: float(value) for key, value in line.items()}, self.done)
        bins: dict[str, list[float | None]] = {}
        for name, row in zip(self._names, sums, strict=False):
            pairs = zip(row.tolist(), counts.tolist(), strict=True)
            bins[f"{name}_by_time"] = [value / count if count else None for value, count in pairs]
        self._lines.write(json.dumps({**line, **bins}) + "\n")
        # Flushed line by line: other programs follow the file, and a kill must not lose lines.
        self._lines.flush()
        if isinstance(self._bar, tqdm):
            self._bar.set_postfix(loss=f"{metrics['loss']:.4f}", lr=f"{lr:.1e}", refresh=False)

    def save_grid(self, images: "Sequence[np.ndarray[Any, Any]]", columns: int | None = None) -> None:
        """Save a grid of images (height, width, 3) of eight bits; those of a row have one size."""
        if self.context.is_main:
            target = layout.preview(self.folder, self.done)
            target.parent.mkdir(exist_ok=True)
            grid(images, columns).save(target)


def truncate_metrics(file: Path, images: int) -> None:
    """Remove the lines after the checkpoint that training resumes from, and an incomplete last line."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["images"] <= images:
                kept.append(line)
        except (json.JSONDecodeError, KeyError):  # incomplete, or of a version with other names
            break
    file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def grid(images: "Sequence[np.ndarray[Any, Any]]", columns: int | None = None) -> Image.Image:
    """Arrange images (height, width, 3) in a grid, by default as square as possible; those of a row have one size."""
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


def open_tracker(kind: str, folder: Path, name: str, *, stack: ExitStack) -> Tracker:
    """Open a tracker by name: tensorboard, or a module with the interface of wandb."""
    try:
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = stack.enter_context(SummaryWriter(str(folder / "tensorboard")))

            def to_tensorboard(metrics: dict[str, float], images: int) -> None:
                for key, value in metrics.items():
                    writer.add_scalar(key, value, images)

            return to_tensorboard
        import importlib

        module = importlib.import_module(kind)
    except ImportError as error:
        raise AtollError(f"{kind} is not installed; pip install {kind}, or remove it from train.trackers") from error
    module.init(project="atoll", name=name, dir=str(folder)) if kind == "wandb" else module.init(
        project="atoll", name=name
    )
    stack.callback(module.finish)

    def track(metrics: dict[str, float], images: int) -> None:
        module.log(metrics, step=images)

    return track
