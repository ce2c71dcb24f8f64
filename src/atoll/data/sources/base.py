"""Where pictures come from: one interface for every kind of data set.

    source = open_source("path/to/folder")     # or tars, parquet, a datasets name, or "emoji"
    describe(source)                           # kind, number and five examples
    for sample in source.samples():
        picture = decode(sample.read(), resolution=64)

A sample that turns out bad while listing (a broken tar, a caption that is not UTF-8) is listed all the same and
`read` raises `BadImage` with the reason; so whoever reads pictures meets every reject in one place.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from typing import Literal, NoReturn, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from atoll.data.images import BadImage, decode

__all__ = ["BadImage", "Options", "Sample", "Source", "decode", "describe"]

Split = Literal["train", "held-out"]
Kind = Literal["folder", "webdataset", "parquet", "datasets", "emoji"]
KINDS: tuple[Kind, ...] = ("folder", "webdataset", "parquet", "datasets", "emoji")


@dataclass(frozen=True)
class Sample:
    """One picture and what is known of it, without its pixels. Can be pickled, so workers can read it."""

    id: str
    """A key that stays when the data is moved or listed again: a relative path without its suffix, a tar's key, an
    id column, or a hash of the content. Never a position. Unique within a source."""
    caption: str | None
    label: str | None
    """Name of the class."""
    attributes: Mapping[str, str]
    """Whatever else is known, such as style, category, attribution, license."""
    split: Split
    read: Callable[[], bytes]
    """The picture's encoded bytes (PNG, JPEG, …). Raises `BadImage`."""

    def __post_init__(self) -> None:
        """Names of files and values of columns may be no valid Unicode; everything that is stored must be."""
        object.__setattr__(self, "id", printable(self.id))
        object.__setattr__(self, "label", None if self.label is None else printable(self.label))
        attributes = {printable(key): printable(value) for key, value in self.attributes.items()}
        object.__setattr__(self, "attributes", attributes)


class Source(Protocol):
    """A data set that can be listed."""

    kind: str
    """What was recognized, in a few words."""
    fingerprint: str
    """Hash of what identifies the content (names, sizes, captions, options); the same after moving the data."""

    def samples(self) -> Iterator[Sample]:
        """Every sample, in an order that depends on the content alone; cheap, since no picture is decoded."""


@dataclass(frozen=True)
class Options:
    """How to read a source. Columns left at None are found by their usual names."""

    kind: Kind | None = None
    """Take the source for this kind, instead of finding out."""
    image: str | None = None
    """Column of the pictures (parquet and datasets)."""
    caption: str | None = None
    """Column or JSON key of the captions."""
    label: str | None = None
    """Column or JSON key of the classes."""
    id: str | None = None
    """Column of the ids."""
    split: str = "train"
    """Split of a datasets name to read."""
    held_out: float = 0.05
    """Share of the captions (of the ids, where there are no captions) that training never sees."""


def bad_sample(id: str, reason: str) -> Sample:
    """A sample that is listed but cannot be read."""
    return Sample(id, None, None, {}, "train", partial(_refuse, reason))


def _refuse(reason: str) -> NoReturn:
    raise BadImage(reason)


def printable(text: str) -> str:
    r"""The text, with what is no valid Unicode written out: files may have names in any encoding (caf\xe9.jpg)."""
    return text.encode("utf-8", "backslashreplace").decode()


def split_of(key: str, held_out: float) -> Split:
    """The side a key falls on: a hash of the key alone, so that equal captions are never torn apart."""
    place = int.from_bytes(hashlib.sha256(printable(key).encode()).digest()[:8], "big") / 2**64
    return "held-out" if place < held_out else "train"


def digest(*parts: str | bytes) -> str:
    """A short hash of some parts, each kept apart from the next."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()[:32]


def describe(source: Source, examples: int = 5, console: Console | None = None) -> int:
    """Print kind, number of samples and some examples picked from all over the source; returns the number."""
    count = held_out = 0

    def counted() -> Iterator[Sample]:
        nonlocal count, held_out
        for sample in source.samples():
            count += 1
            held_out += sample.split == "held-out"
            yield sample

    picked = nsmallest(examples, counted(), key=lambda sample: digest(sample.id))
    table = Table("id", "caption", "label", "split", "attributes")
    for sample in sorted(picked, key=lambda sample: sample.id):
        attributes = ", ".join(f"{name}={value}" for name, value in sample.attributes.items())
        cells = (sample.id, sample.caption or "-", sample.label or "-", sample.split, attributes or "-")
        table.add_row(*(escape(cell if len(cell) <= 100 else cell[:99] + "…") for cell in cells))
    console = console or Console()
    console.print(f"{source.kind}: {count:,} samples, {held_out:,} of them held out", markup=False)
    console.print(table)
    return count
