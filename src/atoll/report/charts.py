"""Charts as inline SVG, drawn by hand: lines over time, stacked ribbons, and the diagram of the method.

Colours of text, axes and surfaces come from the page's style sheet, so that a chart follows light and dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from atoll.ensemble.images import COLORS
from atoll.report.html import tag

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 40


def colour(expert: int) -> str:
    """The colour of an expert, the same on the whole page."""
    return COLORS[expert % len(COLORS)]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "var(--ink)"
    dashed: bool = False


def nice_step(span: float, wanted: int = 4) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides a span into about so many parts."""
    raw = span / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high."""
    step = nice_step(high - low)
    return [step * place for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def lines(series: Sequence[Line], across: str, up: str, *, about: str, top: float | None = None) -> str:
    """A chart of lines from 0 upwards, with its legend."""
    drawn = [line for line in series if line.points]
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    left, right, high = min(xs), max(xs), top or 1.05 * max(ys) or 1.0
    right = right if right > left else left + 1

    def place(x: float, y: float) -> tuple[float, float]:
        over = (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return LEFT + over, HEIGHT - BOTTOM - min(y, high) / high * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(left, right, high, place=place, across=across, up=up)]
    for line in drawn:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        dash = {"stroke_dasharray": "5 4"} if line.dashed else {}
        parts.append(
            tag("polyline", tag("title", escape(line.name)), points=path, class_="line", stroke=line.colour, **dash)
        )
    chart = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=about, class_="chart")
    return tag("figure", legend([(line.name, line.colour, line.dashed) for line in drawn]), chart, class_="chart")


def _grid(left: float, right: float, high: float, *, place: object, across: str, up: str) -> str:
    assert callable(place)
    parts = []
    for y in ticks(0, high):
        _, at = place(left, y)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        parts.append(tag("text", _short(y), x=LEFT - 6, y=f"{at + 4:.1f}", class_="tick end"))
    for x in ticks(left, right):
        at, _ = place(x, 0)
        parts.append(tag("text", _short(x), x=f"{at:.1f}", y=HEIGHT - BOTTOM + 16, class_="tick middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", escape(across), x=middle, y=HEIGHT - 6, class_="axis middle"))
    turned = f"rotate(-90 12 {(HEIGHT - BOTTOM) / 2})"
    parts.append(tag("text", escape(up), x=12, y=(HEIGHT - BOTTOM) / 2, class_="axis middle", transform=turned))
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:.3g}"


def legend(entries: Sequence[tuple[str, str, bool]]) -> str:
    """Names beside their colours."""
    rows = [
        tag("li", tag("i", style=f"border-color:{shade};border-style:{'dashed' if dashed else 'solid'}"), escape(name))
        for name, shade, dashed in entries
    ]
    return tag("ul", *rows, class_="legend")


def ribbon(shares: Sequence[Sequence[float]], colours: Sequence[str], about: str) -> str:
    """Shares that sum to 1 at every step, stacked, from the first step on the left to the last on the right."""
    width, height = 100.0, 20.0
    step = width / max(1, len(shares) - 1)
    below = [0.0] * len(shares)
    parts = []
    for number, shade in enumerate(colours):
        above = [low + row[number] for low, row in zip(below, shares, strict=True)]
        edge = [f"{place * step:.2f},{height * (1 - value):.2f}" for place, value in enumerate(above)]
        back = [f"{place * step:.2f},{height * (1 - value):.2f}" for place, value in enumerate(below)]
        parts.append(tag("polygon", points=" ".join(edge + back[::-1]), fill=shade))
        below = above
    return tag(
        "svg", *parts, viewBox=f"0 0 {width:g} {height:g}", preserveAspectRatio="none", role="img", aria_label=about,
        class_="ribbon",
    )  # fmt: skip


def diagram(experts: int) -> str:
    """The method: data is split, experts train alone, a router makes them one model."""
    shown = min(experts, 6)
    height = max(150, 34 * shown + 20)
    middle = height / 2
    parts = [_box(4, middle - 30, (84, 60), "all the", "pictures")]
    for number in range(shown):
        y = (number + 0.5) * height / shown
        parts.append(_arrow(88, middle, 128, y2=y))
        parts.append(_box(130, y - 13, (84, 26), f"part {number}", shade=colour(number)))
        parts.append(_arrow(214, y, 250, y2=y))
        parts.append(_box(252, y - 13, (90, 26), f"expert {number}", shade=colour(number), filled=True))
        parts.append(_arrow(342, y, 400, y2=middle))
    parts.append(_box(402, middle - 30, (84, 60), "router", "weighs them"))
    parts.append(_arrow(486, middle, 520, y2=middle))
    parts.append(_box(522, middle - 30, (74, 60), "one", "picture"))
    about = f"All pictures are split into {experts} parts; one expert learns each part; the router weighs the experts."
    return tag("svg", *parts, viewBox=f"0 0 600 {height:g}", role="img", aria_label=about, class_="diagram")


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
