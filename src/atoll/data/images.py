"""Pictures from bytes: every sample becomes a square RGB picture or is refused with a reason."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""Formats that are read. Others are left out on purpose: some of Pillow's readers start outside programs."""

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".pgm"})
"""How the names of picture files end; what a file really holds is told by its content."""

LARGEST = 89_478_485
"""More pixels than this is taken for a decompression bomb; Pillow warns from here on."""

SMALLEST = 8
"""Fewer pixels than this on a side is no picture (web data is full of 1x1 spacers)."""

# What Pillow's decoders raise on damaged data, found by mutating files of every format.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    OverflowError,
    RuntimeError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
)


class BadImage(Exception):  # noqa: N818 - it names the picture's state
    """A sample that cannot be used, with the reason in words; the run lists it and goes on."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return (BadImage, (self.reason,))


def decode(data: bytes, resolution: int, *, largest: int = LARGEST, smallest: int = SMALLEST) -> Image.Image:
    """A square RGB picture: turned upright as EXIF says, laid on white, cut at the centre, resized with Lanczos.

    The content decides the format, not a file name. Of an animation the first frame is taken. Raises `BadImage`.
    """
    if not data:
        raise BadImage("the file is empty (0 bytes)")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage(f"not a picture in a known format; it starts with {data[:12]!r}") from None
    except Image.DecompressionBombError as error:
        raise BadImage(f"taken for a decompression bomb: {error}") from error
    except _DAMAGE as error:
        raise BadImage(f"damaged header: {error}") from error
    width, height = picture.size
    if width * height > largest:
        raise BadImage(f"{width}x{height} pixels are more than the limit of {largest}")
    if min(width, height) < smallest:
        raise BadImage(f"{width}x{height} pixels are too few; the limit is {smallest} on a side")
    _check_range(picture)
    try:
        # JPEG decodes straight to a smaller size; twice what is asked leaves the resize its quality.
        picture.draft(None, (2 * resolution, 2 * resolution))
        upright = ImageOps.exif_transpose(picture)
        return _square(_on_white(upright), resolution)
    except _DAMAGE as error:
        raise BadImage(f"damaged {picture.format} data: {error}") from error


def _check_range(picture: Image.Image) -> None:
    """Refuse numbers of which nobody knows what is white."""
    if picture.mode == "F":
        raise BadImage("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    if picture.mode == "I" and picture.format not in ("PNG", "PPM"):  # which say I for grey of 16 bits
        raise BadImage("32-bit grey values have no fixed range; save it with 8 or 16 bits")


def _on_white(picture: Image.Image) -> Image.Image:
    """RGB of eight bits a channel, whatever came in."""
    if picture.mode.startswith("I"):
        return Image.fromarray(_eight_bits(np.asarray(picture))).convert("RGB")
    if "A" in picture.getbands() or "a" in picture.getbands() or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return picture.convert("RGB")


def _eight_bits(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Grey of 16 bits as 8 bits; Pillow alone would clip it to white."""
    return (pixels.astype(np.uint32) * 255 // 65535).astype(np.uint8)


def _square(picture: Image.Image, resolution: int) -> Image.Image:
    width, height = picture.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    centre = picture.crop((left, top, left + side, top + side))
    return centre.resize((resolution, resolution), Image.Resampling.LANCZOS)
