"""Charts as inline SVG: lines over time, stacked bands, and the diagram of the method.

They are written by hand: a plotting library would be one more dependency, and its images would not follow the light and
dark colors of the page's style sheet.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from atoll.ensemble.images import COLORS
from atoll.report.html import tag

# In units of the SVG, which are pixels where two charts stand side by side. The margins hold ticks and axis labels.
WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 40
# More experts than this do not fit the diagram of the method at a readable size.
DIAGRAM_EXPERTS = 6


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


def nice_step(span: float, wanted: int = 4) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that divides a span into at most about `wanted` parts."""
    raw = span / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high."""
    step = nice_step(high - low)
    # The 1e-9 keeps the ends: 0.3 / 0.1 is slightly below 3.
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def lines(series: Sequence[Line], x_label: str, y_label: str, *, alt: str, top: float | None = None) -> str:
    """Return a line chart with its legend; the y axis starts at 0."""
    drawn = [line for line in series if line.points]
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    left, right, high = min(xs), max(xs), top or 1.05 * max(ys) or 1.0
    right = right if right > left else left + 1

    def to_svg(x: float, y: float) -> tuple[float, float]:
        # The y axis of SVG points down.
        over = (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return LEFT + over, HEIGHT - BOTTOM - min(y, high) / high * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(left, right, high, to_svg=to_svg, x_label=x_label, y_label=y_label)]
    for line in drawn:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (to_svg(*point) for point in line.points))
        dash = {"stroke_dasharray": "5 4"} if line.dashed else {}
        parts.append(
            tag("polyline", tag("title", escape(line.name)), points=path, class_="line", stroke=line.color, **dash)
        )
    chart = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=alt, class_="chart")
    return tag("figure", legend([(line.name, line.color, line.dashed) for line in drawn]), chart, class_="chart")


def _grid(
    left: float,
    right: float,
    high: float,
    *,
    to_svg: Callable[[float, float], tuple[float, float]],
    x_label: str,
    y_label: str,
) -> str:
    parts = []
    for y in ticks(0, high):
        _, at = to_svg(left, y)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        parts.append(tag("text", _short(y), x=LEFT - 6, y=f"{at + 4:.1f}", class_="tick end"))
    for x in ticks(left, right):
        at, _ = to_svg(x, 0)
        parts.append(tag("text", _short(x), x=f"{at:.1f}", y=HEIGHT - BOTTOM + 16, class_="tick middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", escape(x_label), x=middle, y=HEIGHT - 6, class_="axis middle"))
    turned = f"rotate(-90 12 {(HEIGHT - BOTTOM) / 2})"
    parts.append(tag("text", escape(y_label), x=12, y=(HEIGHT - BOTTOM) / 2, class_="axis middle", transform=turned))
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:.3g}"


def legend(entries: Sequence[tuple[str, str, bool]]) -> str:
    """Return names beside their colors."""
    rows = [
        tag("li", tag("i", style=f"border-color:{shade};border-style:{'dashed' if dashed else 'solid'}"), escape(name))
        for name, shade, dashed in entries
    ]
    return tag("ul", *rows, class_="legend")


def band(shares: Sequence[Sequence[float]], colors: Sequence[str], alt: str) -> str:
    """Return a stacked area chart of shares (steps, experts) that sum to 1; the first step is on the left."""
    width, height = 100.0, 20.0
    step = width / max(1, len(shares) - 1)
    below = [0.0] * len(shares)
    parts = []
    # One polygon for each expert: its upper edge from left to right, then its lower edge back.
    for number, shade in enumerate(colors):
        above = [low + row[number] for low, row in zip(below, shares, strict=True)]
        edge = [f"{i * step:.2f},{height * (1 - value):.2f}" for i, value in enumerate(above)]
        back = [f"{i * step:.2f},{height * (1 - value):.2f}" for i, value in enumerate(below)]
        parts.append(tag("polygon", points=" ".join(edge + back[::-1]), fill=shade))
        below = above
    return tag(
        "svg", *parts, viewBox=f"0 0 {width:g} {height:g}", preserveAspectRatio="none", role="img", aria_label=alt,
        class_="band",
    )  # fmt: skip


def diagram(experts: int) -> str:
    """Return the diagram of the method: clusters, experts and router."""
    shown = min(experts, DIAGRAM_EXPERTS)
    height = max(150, 34 * shown + 20)
    middle = height / 2
    parts = [_box(4, middle - 30, (84, 60), "training", "images")]
    for number in range(shown):
        y = (number + 0.5) * height / shown
        parts.append(_arrow(88, middle, 128, y2=y))
        parts.append(_box(130, y - 13, (84, 26), f"cluster {number}", shade=color(number)))
        parts.append(_arrow(214, y, 250, y2=y))
        parts.append(_box(252, y - 13, (90, 26), f"expert {number}", shade=color(number), filled=True))
        parts.append(_arrow(342, y, 400, y2=middle))
    parts.append(_box(402, middle - 30, (84, 60), "router"))
    parts.append(_arrow(486, middle, 520, y2=middle))
    parts.append(_box(522, middle - 30, (74, 60), "image"))
    alt = f"The training images are divided into {experts} clusters, with one expert each; a router combines them"
    return tag("svg", *parts, viewBox=f"0 0 600 {height:g}", role="img", aria_label=alt, class_="diagram")


def _box(x: float, y: float, size: tuple[float, float], *words: str, shade: str = "", filled: bool = False) -> str:
    width, height = size
    style = f"stroke:{shade};" if shade else ""
    style += f"fill:{shade};fill-opacity:.22" if filled else ""
    box = tag("rect", x=x, y=f"{y:.1f}", width=width, height=height, rx=6, class_="box", style=style)
    start = y + height / 2 + 4 - 7.5 * (len(words) - 1)
    texts = [
        tag("text", escape(text), x=x + width / 2, y=f"{start + 15 * line:.1f}", class_="label middle")
        for line, text in enumerate(words)
    ]
    return box + "".join(texts)


def _arrow(x1: float, y1: float, x2: float, *, y2: float) -> str:
    bend = (x1 + x2) / 2
    return tag("path", d=f"M{x1} {y1:.1f}C{bend} {y1:.1f} {bend} {y2:.1f} {x2} {y2:.1f}", class_="arrow")
