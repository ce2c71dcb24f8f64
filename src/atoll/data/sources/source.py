"""The interface of all sources of images.

    source = open_source("path/to/folder")     # or tars, parquet, a datasets name, or "emoji"
    describe(survey(source))                   # prints kind, number of images and five examples
    for image in source.images():
        pixels = decode(image.read(), resolution=64)

An image that turns out to be unusable while the source is listed (a broken tar, a caption that is not UTF-8) is listed
nevertheless, and its `read` raises `BadImage` with the reason. So unusable images are handled where images are read.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from types import MappingProxyType
from typing import Literal, NoReturn, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.core.names import Split
from atoll.core.progress import say
from atoll.data.images import BadImage

__all__ = ["Source", "SourceImage", "SourceOptions", "describe", "survey"]

SourceKind = Literal["folder", "webdataset", "parquet", "datasets", "emoji"]
KINDS: tuple[SourceKind, ...] = ("folder", "webdataset", "parquet", "datasets", "emoji")
NONE_IGNORED: Mapping[str, int] = MappingProxyType({})
"""`Source.ignored` of sources that have nothing to ignore."""

# Widths in characters, chosen for a terminal of 80 columns: at least 20 are left for the caption.
_ID_WIDTH, _LABEL_WIDTH = 24, 15


@dataclass(frozen=True)
class SourceImage:
    """One image of a source and its metadata, without pixels. It can be pickled, for use in other processes."""

    id: str
    """A key that does not change when the data is moved or listed again: a relative path without suffix, a tar's key,
    an id column, or a hash of the content. It is never a position, and it is unique within the source."""
    captions: tuple[str, ...]
    """Its captions, all different; empty if it has none."""
    label: str | None
    """Class name."""
    attributes: Mapping[str, str]
    """Other metadata, such as style, category, attribution, license."""
    split: Split
    read: Callable[[], bytes]
    """Return the encoded bytes of the image (PNG, JPEG, …). Raise `BadImage` if that is impossible."""
    weights: tuple[float, ...] | None = None
    """Relative frequency of each caption in training; None if all are equal."""
    file: str | None = None
    """Path of its file below the source, for messages; None if it is no file of its own."""

    @property
    def caption(self) -> str | None:
        """The first caption, which validation uses."""
        return self.captions[0] if self.captions else None

    def __post_init__(self) -> None:
        """Escape invalid Unicode in file names and column values, because everything that is stored must be UTF-8."""
        object.__setattr__(self, "id", escaped(self.id))
        object.__setattr__(self, "file", None if self.file is None else escaped(self.file))
        object.__setattr__(self, "label", None if self.label is None else escaped(self.label))
        attributes = {escaped(key): escaped(value) for key, value in self.attributes.items()}
        object.__setattr__(self, "attributes", attributes)


class Source(Protocol):
    """A dataset whose images can be listed."""

    kind: str
    """What was detected, in a few words."""
    fingerprint: str
    """Hash of what identifies the content (names, sizes, captions, options). Moving the data does not change it."""
    ignored: Mapping[str, int]
    """Number of files that are neither images nor metadata, by suffix; known after `images` has ended."""

    def images(self) -> Iterator[SourceImage]:
        """Yield every image, in an order that depends only on the content. No image is decoded."""


@dataclass(frozen=True)
class SourceOptions:
    """How to read a source. Columns that are None are found by their usual names."""

    kind: SourceKind | None = None
    """Kind of the source; None detects it."""
    image: str | None = None
    """Column of the images (parquet and datasets)."""
    caption: str | Sequence[str] | Mapping[str, float] | None = None
    """Column or JSON key of the captions, several of them, or several with weights."""
    label: str | None = None
    """Column or JSON key of the class labels."""
    id: str | None = None
    """Column of the ids."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    val_fraction: float = 0.05
    """Fraction of the captions (of the ids, for images without captions) that is held out from training."""
    caption_lines: bool = False
    """Whether every line of a .txt file is a caption of its own."""

    @property
    def caption_weights(self) -> dict[str, float]:
        """The given columns or JSON keys of the captions, with their weights; empty if none is given."""
        if isinstance(self.caption, Mapping):
            return dict(self.caption)
        names = [self.caption] if isinstance(self.caption, str) else self.caption or ()
        return dict.fromkeys(names, 1.0)


def unreadable_image(id: str, reason: str) -> SourceImage:
    """Return an image that is listed but whose `read` raises `BadImage` with this reason."""
    return SourceImage(id, (), None, {}, "train", partial(_raise_bad_image, reason))


# A module-level function instead of a lambda, because images must be picklable.
def _raise_bad_image(reason: str) -> NoReturn:
    raise BadImage(reason)


def escaped(text: str) -> str:
    r"""Return the text with invalid Unicode escaped, since file names may have any encoding (caf\xe9.jpg)."""
    return text.encode("utf-8", "backslashreplace").decode()


def split_of(key: str, val_fraction: float) -> Split:
    """Return the split of a key, as a function of its hash, so that equal captions are always in one split."""
    # The hash is uniform in [0, 1). A larger fraction holds out everything that a smaller one does, and more.
    position = int.from_bytes(hashlib.sha256(escaped(key).encode()).digest()[:8], "big") / 2**64
    return "validation" if position < val_fraction else "train"


def digest(*parts: str | bytes) -> str:
    """Return a hash of some parts, in 32 hexadecimal digits."""
    # Each part is preceded by its length: ("ab", "c") and ("a", "bc") have different hashes.
    state = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()[:32]


@dataclass(frozen=True)
class Survey:
    """The numbers of images and classes of a source, readable or not, and some of the images."""

    kind: str
    images: int
    train: int
    """Number of images of the training split."""
    labels: int
    """Number of classes."""
    examples: tuple[SourceImage, ...]
    ignored: Mapping[str, int]
    """`Source.ignored`."""


def survey(source: Source, examples: int = 5) -> Survey:
    """Count the images of a source, and choose some examples."""
    count = validation = 0
    labels: set[str] = set()

    def counted() -> Iterator[SourceImage]:
        nonlocal count, validation
        for image in source.images():
            count += 1
            validation += image.split == "validation"
            if image.label is not None:
                labels.add(image.label)
            yield image

    # The smallest hashes are a random choice that is the same every time, in one pass and constant memory.
    picked = nsmallest(examples, counted(), key=lambda image: digest(image.id))
    return Survey(source.kind, count, count - validation, len(labels), tuple(picked), source.ignored)


def describe(found: Survey, console: Console | None = None) -> None:
    """Print the kind, the number of images and the examples."""
    if console is None:
        console = Console()
        with console.capture() as captured:
            describe(found, console)
        say(captured.get().rstrip("\n"))
        return
    table = Table()
    # One line per image: long cells end in an ellipsis. rich narrows the columns without `no_wrap` first, so the
    # caption gets what the other columns leave.
    table.add_column("id", no_wrap=True, max_width=_ID_WIDTH)
    table.add_column("caption")
    table.add_column("label", no_wrap=True, max_width=_LABEL_WIDTH)
    table.add_column("split", no_wrap=True)
    for image in sorted(found.examples, key=lambda image: image.id):
        others = f" (+{len(image.captions) - 1})" if len(image.captions) > 1 else ""
        cells = (image.id, (image.caption or "-") + others, image.label or "-", image.split)
        table.add_row(*(Text(" ".join(cell.split()), no_wrap=True, overflow="ellipsis") for cell in cells))
    validation = found.images - found.train
    console.print(f"{found.kind}: {found.images:,} images, {validation:,} of them for validation", markup=False)
    if found.ignored:
        suffixes = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(found.ignored.items()))
        console.print(f"ignored files: {suffixes}", markup=False)
    console.print(table)
    # Values of attributes are long (attributions, licenses) and often equal in all images: only their names follow.
    if attributes := list(dict.fromkeys(name for image in found.examples for name in image.attributes)):
        console.print(f"attributes: {', '.join(attributes)}", markup=False)
