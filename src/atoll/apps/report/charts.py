"""The geometry of the charts of the report; its template draws them as inline SVG.

A plotting library would be one more dependency, and its images would not follow the light and dark colors of the page's
style sheet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from atoll.ensemble.saving import COLORS


def color(expert: int) -> str:
    """Return the color of an expert, the same on the whole page."""
    return COLORS[expert % len(COLORS)]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = "var(--ink)"
    dashed: bool = False


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return about `wanted` round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    # The 1e-9 keeps the ends: 0.3 / 0.1 is slightly below 3.
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Chart:
    """A line chart, whose y axis starts at 0 and ends at `top`, or a little above the largest value."""

    # In units of the SVG, which are pixels where two charts stand side by side. The margins hold ticks and axis labels.
    WIDTH: ClassVar[int] = 440
    HEIGHT: ClassVar[int] = 250
    LEFT: ClassVar[int] = 46
    RIGHT: ClassVar[int] = 12
    TOP: ClassVar[int] = 12
    BOTTOM: ClassVar[int] = 40

    lines: Sequence[Line]
    x_label: str
    y_label: str
    alt: str
    top: float | None = None
    log_x: bool = False

    @cached_property
    def ends(self) -> tuple[float, float, float]:
        """The first and the last x, and the largest y."""
        xs, ys = zip(*(point for line in self.lines for point in line.points), strict=True)
        first, last = min(xs), max(xs)
        return first, last if last > first else first + 1, self.top or 1.05 * max(ys) or 1.0

    @property
    def x_ticks(self) -> list[float]:
        """Round values of x; the powers of two on a logarithmic axis."""
        first, last, _ = self.ends
        if not self.log_x:
            return ticks(first, last)
        return [2.0**power for power in range(math.ceil(math.log2(first)), math.floor(math.log2(last)) + 1)]

    def x(self, value: float) -> float:
        """Return the position of an x in the SVG."""
        first, last, _ = self.ends
        if self.log_x:
            first, last, value = math.log(first), math.log(last), math.log(value)
        return self.LEFT + (value - first) / (last - first) * (self.WIDTH - self.LEFT - self.RIGHT)

    def y(self, value: float) -> float:
        """Return the position of a y in the SVG, whose axis points down."""
        high = self.ends[2]
        return self.HEIGHT - self.BOTTOM - min(value, high) / high * (self.HEIGHT - self.TOP - self.BOTTOM)
