"""Files that others wrote: sources of images and folders of models.

A downloaded folder may contain links to private files of whoever prepares it, and files that claim or decompress to
much more than they hold. So files are read only below the root that the user named, and only up to a size.
"""

import os
import stat
from functools import lru_cache
from pathlib import Path

from atoll.data.images import BadImage

MAX_IMAGE_BYTES = 2**28
"""Largest encoded image: 8 bytes for each of the most pixels that are decoded, which is 16-bit RGBA uncompressed."""
MAX_CAPTION_BYTES = 2**16
"""Largest caption, label or attribute. Text encoders cut captions at some hundred tokens, a few kilobytes."""
MAX_JSON_BYTES = 2**20
"""Largest JSON file of one image: several times the longest captions with all other metadata."""
MAX_TABLE_BYTES = 2**30
"""Largest metadata.jsonl or metadata.csv: ten million images with 100 characters each. It is read into memory."""


def link_outside(root: str | Path, path: str | Path) -> str | None:
    """Return the reason why a link must not be followed: it leads out of the root; None if it may, or is no link."""
    if not os.path.islink(path):
        return None
    target = os.path.realpath(path)
    if any(os.path.commonpath([target, allowed]) == allowed for allowed in _roots(os.path.realpath(root))):
        return None
    return f"a link to {target}, which is outside {root}; links are followed only within the folder"


@lru_cache(maxsize=16)
def _roots(root: str) -> list[str]:
    """Return the root and, for a folder in the hub's cache, the folder of the blobs that its files are links to."""
    for folder in [Path(root), *Path(root).parents]:
        if folder.parent.name == "snapshots":
            blobs = folder.parent.parent / "blobs"
            # The folder of the blobs must not be a link itself, since somebody else may have written the whole tree.
            return [root, str(blobs)] if blobs.is_dir() and os.path.realpath(blobs) == str(blobs) else [root]
    return [root]


def read_below(root: str, file: str, *, limit: int = MAX_IMAGE_BYTES, what: str = "it") -> bytes:
    """Return the content of a regular file below a root; raise `BadImage` if it is elsewhere or too large."""
    if reason := link_outside(root, file):
        raise BadImage(f"{what} is {reason}")
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for somebody who writes to it.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as data:
            found = os.fstat(data.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadImage(f"{what} is not a regular file")
            check_size(found.st_size, limit, what)
            return data.read(found.st_size)
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror}") from error


def check_size(size: int, limit: int, what: str) -> None:
    """Raise `BadImage` if something has more bytes than its limit."""
    if size > limit:
        raise BadImage(f"{what} has {size:,} bytes; the limit is {limit:,}")
