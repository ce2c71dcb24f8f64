"""Decoding of images: every file becomes a square RGB image, or is rejected with a reason."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""Supported formats. Others are excluded on purpose: some of Pillow's readers start external programs."""

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".pgm"})
"""File name suffixes by which images are found. The format is then detected from the content."""

LARGEST = 89_478_485
"""Largest number of pixels; more is treated as a decompression bomb. This is where Pillow begins to warn."""

LARGEST_DECODED = 2**25
"""Largest number of pixels that are decoded. A pixel takes at most 8 bytes until it is cropped and resized, so each
worker needs at most 270 MB. A JPEG, which is decoded at a fraction of its size, may have more pixels; so photographs of
all common cameras are accepted."""

SMALLEST = 8
"""Smallest side in pixels: web data contains many 1x1 spacers. The value is a choice."""

_STRIP_ROWS = 256
_TILE_WIDTH, _TILE_LENGTH = 322, 323
"""Tags of a TIFF."""

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


class BadImage(Exception):  # noqa: N818 - it names the image's state
    """An image that cannot be used, with the reason. The ingest stage lists it and continues."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    # Worker processes send it by pickle, which would otherwise lose `reason`.
    def __reduce__(self) -> tuple[Any, ...]:
        return (BadImage, (self.reason,))


def decode(
    data: bytes, resolution: int, *, largest: int = LARGEST, decoded: int = LARGEST_DECODED, smallest: int = SMALLEST
) -> Image.Image:
    """Return a square RGB image: upright by EXIF, on white, center-cropped, resized with Lanczos.

    The format is detected from the content, not from a file name. An animation gives its first frame. Raise `BadImage`
    if the image cannot be used.
    """
    if not data:
        raise BadImage("the file is empty (0 bytes)")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage(f"not an image in a supported format; it starts with {data[:12]!r}") from None
    except Image.DecompressionBombError as error:
        raise BadImage(f"probably a decompression bomb: {error}") from error
    except _DAMAGE as error:
        raise BadImage(f"damaged header: {error}") from error
    width, height = image.size
    if width * height > largest:
        raise BadImage(f"{width}x{height} pixels are more than the limit of {largest}")
    if min(width, height) < smallest:
        raise BadImage(f"{width}x{height} pixels are too few; the limit is {smallest} on a side")
    _check_range(image)
    try:
        # A JPEG can be decoded at a fraction of its size. Twice the resolution keeps the quality of the resize.
        image.draft(None, (2 * resolution, 2 * resolution))
        width, height = image.size
        # A TIFF is decoded by tiles, which may be larger than the image.
        tags = getattr(image, "tag_v2", {})
        pixels = max(width * height, int(tags.get(_TILE_WIDTH, 0)) * int(tags.get(_TILE_LENGTH, 0)))
        if pixels > decoded:
            raise BadImage(f"{pixels:,} pixels to decode are more than the limit of {decoded:,}; make it smaller")
        ImageOps.exif_transpose(image, in_place=True)
        return _on_white(_center(image)).resize((resolution, resolution), Image.Resampling.LANCZOS)
    except _DAMAGE as error:
        raise BadImage(f"damaged {image.format} data: {error}") from error


def _check_range(image: Image.Image) -> None:
    """Raise `BadImage` for pixel formats without a defined value of white."""
    if image.mode == "F":
        raise BadImage("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    # Pillow has mode I for 16-bit gray in PNG and PPM, where the range is known.
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        raise BadImage("32-bit gray values have no fixed range; save it with 8 or 16 bits")


def _center(image: Image.Image) -> Image.Image:
    """Return the largest centered square."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side)) if width != height else image


def _on_white(image: Image.Image) -> Image.Image:
    """Return the image as RGB with 8 bits per channel, transparency on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    # Strips bound the memory of the copies in between to a fraction of the image.
    result = Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP_ROWS):
        strip = image.crop((0, top, image.width, min(top + _STRIP_ROWS, image.height)))
        result.paste(_strip_on_white(strip), (0, top))
    return result


def _strip_on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit gray is scaled to 8 bits; Pillow's conversion would clip all values above 255 to white.
        gray = (np.asarray(image).astype(np.uint32) * 255 // 65535).astype(np.uint8)
        return Image.fromarray(gray).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")
