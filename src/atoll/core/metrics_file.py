"""metrics.jsonl: the metrics of a job along its training, one JSON object on each line. This is its one reader.

A job appends to the file while others read it, so the last line may be half written. Readers pass over it.
"""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

TAIL_BYTES = 1 << 16
"""Enough to hold the last whole line: a line has about 1 kB."""


class MetricsLine(BaseModel):
    """What every line has; the loss by time and metrics of one kind of job are extra."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    images: int
    loss: float
    images_per_second: float
    total: int | None = None


def parse_lines(data: bytes) -> list[MetricsLine]:
    """Return the whole lines of a file, or of the end of one."""
    found = []
    for line in data.splitlines():
        try:
            found.append(MetricsLine.model_validate(json.loads(line)))
        except (ValueError, ValidationError):
            continue
    return found


def read_lines(file: Path) -> list[MetricsLine]:
    """Return all lines; none if there is no file yet."""
    return parse_lines(file.read_bytes()) if file.is_file() else []


def last_line(file: Path) -> MetricsLine | None:
    """Return the last line, without reading the whole file; None if there is none yet."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        whole = parse_lines(b"\n".join(stream.read().splitlines()[-2:]))  # the last one may be half written
    return whole[-1] if whole else None
