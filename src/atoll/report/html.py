"""Small pieces of HTML: escaped text, inline images, tables, and metrics that carry their path and exact value."""

import base64
import io
import json
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from PIL import Image

from atoll.report.texts import GLOSSARY

# Images up to this many pixels a side are stored as PNG, without loss. Larger ones would make the page heavy: WebP at
# quality 88 is a fraction of the size, without visible artifacts.
SMALL = 256


def term(name: str, shown: str | None = None) -> str:
    """Return a term of the glossary, explained on hover."""
    return f'<abbr title="{escape(GLOSSARY[name])}">{escape(shown or name)}</abbr>'


def prose(text: str, **filled: object) -> str:
    """Return a text of `texts` as HTML, filled in, with its [terms] explained."""
    linked = re.sub(r"\[([^]]+)]", lambda found: term(found[1]), escape(text.strip(), quote=False))
    return linked.format(**filled)


def _attributes(values: dict[str, object]) -> str:
    # class is a keyword of Python, so it is given as class_; data_metric becomes data-metric.
    return "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in values.items())


def tag(name: str, *content: str, **attributes: object) -> str:
    """Return an element around content that is HTML already; `class_` is class."""
    return f"<{name}{_attributes(attributes)}>{''.join(content)}</{name}>"


def section(anchor: str, title: str, *content: str) -> str:
    """Return a section of the page."""
    return tag("section", tag("h2", escape(title)), *content, id=anchor)


def missing(what: str, command: str) -> str:
    """Return a note about something missing, with the command that creates it."""
    return tag("p", f"{escape(what)} Run: ", tag("code", escape(command)), class_="missing")


def img(image: Image.Image, alt: str, **attributes: object) -> str:
    """Return an inline image: small ones as PNG, large ones as WebP."""
    buffer, kind = io.BytesIO(), "PNG" if max(image.size) <= SMALL else "WEBP"
    image.convert("RGB").save(buffer, kind, quality=88, optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    size = f'width="{image.width}" height="{image.height}"'
    return f'<img src="data:image/{kind.lower()};base64,{data}" alt="{escape(alt)}" {size}{_attributes(attributes)}>'


Path = Sequence[str | int]


def lookup(tree: Any, path: Path) -> Any:
    """Return the value at a path of fields, keys and positions; None if the path does not exist."""
    for step in path:
        try:
            tree = tree[step] if hasattr(tree, "__getitem__") else getattr(tree, str(step))
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
    return tree


def metric(tree: Any, path: Path, show: Callable[[float], str]) -> str:
    """Return one metric of an evaluation as text, with its path and exact value; a dash if it was not measured."""
    value = lookup(tree, path)
    if value is None:
        return '<span class="none">–</span>'
    return tag("data", escape(show(value)), value=json.dumps(value), data_metric=json.dumps(list(path)))


def fixed(digits: int, scale: float = 1.0) -> Callable[[float], str]:
    """Return a formatter with a fixed number of decimals, for values times a scale."""
    return lambda value: f"{value * scale:.{digits}f}"


def power(value: float) -> str:
    """Format a large number as 1.23 × 10¹⁴."""
    digits, _, exponent = f"{value:.2e}".partition("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits} × 10{raised}"


def megabytes(value: float) -> str:
    """Format bytes as megabytes."""
    return f"{value / 1e6:,.0f} MB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], **attributes: object) -> str:
    """Return a table whose first column has the row headers. On a narrow screen only the table scrolls sideways."""
    top = tag("thead", tag("tr", *[tag("th", cell, scope="col") for cell in head]))
    body = [tag("tr", tag("th", row[0], scope="row"), *[tag("td", cell) for cell in row[1:]]) for row in rows]
    return wide(tag("table", top, tag("tbody", *body), **attributes))


def wide(content: str) -> str:
    """Return a box that scrolls sideways; it takes the keyboard focus, so that the arrow keys scroll it."""
    return tag("div", content, class_="wide", tabindex="0")
