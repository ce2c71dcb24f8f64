"""Small pieces of HTML: escaped text, pictures inside the page, and numbers that say which figure they are."""

import base64
import io
import json
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from PIL import Image

from atoll.report.texts import GLOSSARY

SMALL = 256
"""Pixels on a side up to which a picture stays a PNG."""


def word(term: str, shown: str | None = None) -> str:
    """A word of the glossary."""
    return f'<abbr title="{escape(GLOSSARY[term])}">{escape(shown or term)}</abbr>'


def prose(text: str, **filled: object) -> str:
    """A text of `words`, filled in, with its [words] of the glossary."""
    linked = re.sub(r"\[([^]]+)]", lambda found: word(found[1]), escape(text.strip(), quote=False))
    return linked.format(**filled)


def tag(name: str, *content: str, **attributes: object) -> str:
    """An element around content that is HTML already; `class_` is class."""
    told = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{told}>{''.join(content)}</{name}>"


def section(anchor: str, title: str, *content: str) -> str:
    """A part of the page."""
    return tag("section", tag("h2", escape(title)), *content, id=anchor)


def missing(what: str, command: str) -> str:
    """What is not there, and how to make it."""
    return tag("p", f"{escape(what)} Make it with: ", tag("code", escape(command)), class_="missing")


def picture(image: Image.Image, about: str, **attributes: object) -> str:
    """A picture inside the page: small ones as PNG, large ones as WebP."""
    buffer, kind = io.BytesIO(), "PNG" if max(image.size) <= SMALL else "WEBP"
    image.convert("RGB").save(buffer, kind, quality=88, optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    told = "".join(f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items())
    size = f'width="{image.width}" height="{image.height}"'
    return f'<img src="data:image/{kind.lower()};base64,{data}" alt="{escape(about)}" {size}{told}>'


Path = Sequence[str | int]


def lookup(tree: Any, path: Path) -> Any:
    """Return the value at a path of fields, keys and positions; None if it is not there."""
    for step in path:
        try:
            tree = tree[step] if hasattr(tree, "__getitem__") else getattr(tree, str(step))
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
    return tree


def number(tree: Any, path: Path, show: Callable[[float], str]) -> str:
    """One figure of an evaluation as text, which carries its place and its exact value; a dash if it is not there."""
    value = lookup(tree, path)
    if value is None:
        return '<span class="none">–</span>'
    return tag("data", escape(show(value)), value=json.dumps(value), data_figure=json.dumps(list(path)))


def fixed(digits: int, scale: float = 1.0) -> Callable[[float], str]:
    """With so many digits after the point, times a scale."""
    return lambda value: f"{value * scale:.{digits}f}"


def power(value: float) -> str:
    """A large number as 1.23 × 10¹⁴."""
    digits, _, exponent = f"{value:.2e}".partition("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits} × 10{raised}"


def megabytes(value: float) -> str:
    """Bytes, in megabytes."""
    return f"{value / 1e6:,.0f} MB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], **attributes: object) -> str:
    """A table whose first column names the rows; it scrolls sideways by itself if the screen is narrow."""
    top = tag("thead", tag("tr", *[tag("th", cell, scope="col") for cell in head]))
    body = [tag("tr", tag("th", row[0], scope="row"), *[tag("td", cell) for cell in row[1:]]) for row in rows]
    return tag("div", tag("table", top, tag("tbody", *body), **attributes), class_="wide", tabindex="0")
