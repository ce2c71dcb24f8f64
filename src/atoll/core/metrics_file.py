"""Reader of metrics.jsonl: the training metrics of a job, one JSON object per line.

A job appends to the file while other processes read it, so the last line may be incomplete. It is skipped.

Between two lines, progress.json has the current state of the job in the same format.
"""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.core.layout import METRICS_FILE, PROGRESS_FILE

TAIL_BYTES = 1 << 16
"""How much of the end of the file is read to find its last complete line. A line has about 1 kB, so 64 kB suffice."""


class MetricsLine(BaseModel):
    """The fields that every line has. Other fields, such as the loss by time, are ignored here."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    images: int
    """Images seen so far."""
    loss: float
    """Mean training loss since the line before."""
    images_per_second: float
    """Training speed since the line before."""
    total: int | None = None
    """Images to train on in all."""
    lr: float | None = None
    """Learning rate."""

    @property
    def text(self) -> str:
        """Loss and learning rate, for people."""
        return f"loss {self.loss:.4g}" + ("" if self.lr is None else f" lr {self.lr:.1e}")

    @property
    def seconds_left(self) -> float | None:
        """Time left at the current speed; None if it is unknown."""
        known = self.total is not None and self.images_per_second > 0
        return max(0, (self.total or 0) - self.images) / self.images_per_second if known else None


def parse_lines(data: bytes) -> list[MetricsLine]:
    """Return the complete lines in the content of a file or of its end."""
    found = []
    for line in data.splitlines():
        try:
            found.append(MetricsLine.model_validate(json.loads(line)))
        except (ValueError, ValidationError):
            continue
    return found


def read_lines(file: Path) -> list[MetricsLine]:
    """Return all complete lines; an empty list if there is no file yet."""
    return parse_lines(file.read_bytes()) if file.is_file() else []


def last_line(file: Path) -> MetricsLine | None:
    """Return the last complete line without reading the whole file; None if there is none yet."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        # Two lines, since the last one may be incomplete.
        complete = parse_lines(b"\n".join(stream.read().splitlines()[-2:]))
    return complete[-1] if complete else None


def progress_of(folder: Path) -> MetricsLine | None:
    """Return the current state of a job by its folder; None if it has not begun."""
    try:
        found = parse_lines((folder / PROGRESS_FILE).read_bytes())
    except FileNotFoundError:
        found = []
    return found[0] if found else last_line(folder / METRICS_FILE)
