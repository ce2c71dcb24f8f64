"""Decoding of images: every file becomes an RGB image of a given size, or is rejected with a reason.

One decode serves several sizes:

    image = open_image(data, [Size(64, 96), Size(224, 224)])
    small, square = fit(image, Size(64, 96)), fit(image, Size(224, 224))
"""

import io
import struct
import zlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from atoll.core.sizes import Size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""Supported formats. Others are excluded on purpose: some of Pillow's readers start external programs."""

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".pgm", ".heic", ".heif"}
)
"""File name suffixes by which images are found. The format is then detected from the content."""
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1")
"""What follows `ftyp` in the photographs of phones."""


MAX_PIXELS = 89_478_485
"""Largest number of pixels; more is treated as a decompression bomb. This is where Pillow begins to warn."""
MAX_DECODED = 2**25
"""Largest number of pixels that are decoded. A pixel takes at most 8 bytes until it is RGB, so each worker needs at
most 270 MB. A JPEG, which is decoded at a fraction of its size, may have more pixels; so photographs of all common
cameras are accepted."""
MIN_SIDE = 8
"""Smallest side in pixels: web data contains many 1x1 spacers. The value is a choice."""

# Thumbnails and gaps of contact sheets in pixels; choices. Eight thumbnails with gaps are 548 pixels wide, which fits a
# web page.
THUMBNAIL, _GAP, _COLUMNS = 64, 4, 8
_STRIP_ROWS = 256
_TILE_WIDTH, _TILE_LENGTH = 322, 323
"""Tags of a TIFF."""
_ORIENTATION = 0x0112
"""EXIF tag."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by its EXIF orientation. From 5 on, width and height are exchanged."""
_MAX_PROFILE = 2**22
"""Largest color profile in bytes; those of printing presses have up to 3 MB."""

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


def decode(data: bytes, resolution: int) -> Image.Image:
    """Return a square RGB image: `open_image`, and `fit` to the resolution."""
    size = Size.square(resolution)
    return fit(open_image(data, [size]), size)


def image_size(data: bytes) -> tuple[int, int]:
    """Return width and height of an image, upright by EXIF. Pixels are not decoded."""
    image = _open(data)
    width, height = image.size
    return (height, width) if _orientation(image, data) >= 5 else (width, height)


def open_image(data: bytes, targets: Sequence[Size]) -> Image.Image:
    """Return an RGB image for `fit` to the targets: upright by EXIF, in the colors of sRGB, on white.

    The format is detected from the content, not from a file name. An animation gives its first frame. A JPEG may be
    decoded at a fraction of its size, if that is enough for the targets. Raise `BadImage` if the image cannot be used.
    """
    image = _open(data)
    kind, orientation = image.format, _orientation(image, data)
    # Twice the size keeps the quality of the resize.
    wanted = [2 * max(size.width for size in targets), 2 * max(size.height for size in targets)]
    try:
        image.draft(None, (wanted[orientation >= 5], wanted[orientation < 5]))
        width, height = image.size
        # A TIFF is decoded by tiles, which may be larger than the image.
        tags = getattr(image, "tag_v2", {})
        pixels = max(width * height, int(tags.get(_TILE_WIDTH, 0)) * int(tags.get(_TILE_LENGTH, 0)))
        if pixels > MAX_DECODED:
            raise BadImage(f"{pixels:,} pixels to decode are more than the limit of {MAX_DECODED:,}; make it smaller")
        found = _on_white(image)
        del image  # the next copy would be the third one in memory
        return found.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else found
    except _DAMAGE as error:
        raise BadImage(f"damaged {kind} data: {error}") from error


def fit(image: Image.Image, size: Size, ratio: Size | None = None) -> Image.Image:
    """Return the largest centered part of an image with the ratio of `size`, resized to it with Lanczos.

    With `ratio`, the part has the ratio of that size instead, and is stretched to `size`.
    """
    width, height = image.size
    # The part is cut out before the resize: pixels outside it do not enter the result.
    ratio = ratio or size
    part_width = max(1, min(width, round(height * ratio.width / ratio.height)))
    part_height = max(1, min(height, round(width * ratio.height / ratio.width)))
    left, top = (width - part_width) // 2, (height - part_height) // 2
    if (part_width, part_height) != image.size:
        image = image.crop((left, top, left + part_width, top + part_height))
    return image.resize((size.width, size.height), Image.Resampling.LANCZOS)


@cache
def _formats() -> tuple[str, ...]:
    """Return the formats that can be read here: also HEIC if its package is installed."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return FORMATS
    register_heif_opener(thumbnails=False)
    return (*FORMATS, "HEIF")


def _open(data: bytes) -> Image.Image:
    """Return an image whose header is checked, and whose pixels are not decoded."""
    if not data:
        raise BadImage("the file is empty (0 bytes)")
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
    except UnidentifiedImageError:
        if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS and "HEIF" not in _formats():
            raise BadImage("HEIC needs a package: pip install 'atoll[heic]', or convert it to JPEG") from None
        raise BadImage(f"not an image in a supported format; it starts with {data[:12]!r}") from None
    except Image.DecompressionBombError as error:
        raise BadImage(f"probably a decompression bomb: {error}") from error
    except _DAMAGE as error:
        raise BadImage(f"damaged header: {error}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width}x{height} pixels are more than the limit of {MAX_PIXELS}")
    if min(width, height) < MIN_SIDE:
        raise BadImage(f"{width}x{height} pixels are too few; the limit is {MIN_SIDE} on a side")
    # Some pixel formats have no defined value of white. In PNG and PPM, Pillow's mode I is 16-bit gray.
    if image.mode == "F":
        raise BadImage("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        raise BadImage("32-bit gray values have no fixed range; save it with 8 or 16 bits")
    return image


def _orientation(image: Image.Image, data: bytes) -> int:
    """Return the EXIF orientation, from 1 to 8; 1 for damaged EXIF data, which is no reason to reject an image."""
    if image.format == "TIFF":
        return 1  # Pillow gives the upright size, and turns the pixels when it decodes them
    try:
        if image.format == "PNG" and "exif" not in image.info and (late := _late_exif(data)):
            image.info["exif"] = late
        # PngImageFile.getexif would decode the pixels, to find what follows them.
        found = Image.Image.getexif(image).get(_ORIENTATION)
    except _DAMAGE:
        return 1
    return found if isinstance(found, int) and found in _UPRIGHT else 1


def _late_exif(data: bytes) -> bytes | None:
    """Return the EXIF chunk of a PNG, which may follow the pixels; None if there is none."""
    at = 8 if b"eXIf" in data else len(data)
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"eXIf":
            return data[at + 8 : at + 8 + length]
        at += length + 12
    return None


def _on_white(image: Image.Image) -> Image.Image:
    """Return the image as RGB with 8 bits per channel in the colors of sRGB, transparency on white."""
    profile = _to_srgb(image.info.get("icc_profile") or b"")
    image.load()
    if image.mode == "RGB" and profile is None and "transparency" not in image.info:
        return image
    # Strips bound the memory of the copies in between to a fraction of the image.
    result = Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP_ROWS):
        strip = image.crop((0, top, image.width, min(top + _STRIP_ROWS, image.height)))
        result.paste(_strip_on_white(strip, profile), (0, top))
    return result


def _strip_on_white(image: Image.Image, profile: ImageCms.ImageCmsTransform | None) -> Image.Image:
    alpha = None
    if image.mode.startswith("I"):
        # 16-bit gray is scaled to 8 bits; Pillow's conversion would clip all values above 255 to white.
        image = Image.fromarray((np.asarray(image).astype(np.uint32) * 255 // 65535).astype(np.uint8))
    elif "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        alpha, image = layer.getchannel("A"), image.convert("L") if image.mode == "LA" else layer.convert("RGB")
    elif image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("RGB")
    if profile is not None and (image.mode, profile.input_mode) == ("L", "RGB"):
        image = image.convert("RGB")
    # A profile of another kind of color than the pixels is wrong, so it is ignored.
    fits = profile is not None and profile.input_mode == image.mode
    colors = profile.apply(image) if profile is not None and fits else image.convert("RGB")
    if alpha is None:
        return colors
    colors.putalpha(alpha)
    return Image.alpha_composite(Image.new("RGBA", colors.size, "white"), colors).convert("RGB")


# Images of one source have few different profiles. A transform takes up to 2 MB and some milliseconds to build; 8 is a
# choice. Threads may share it: Little CMS does not write to it.
@lru_cache(maxsize=8)
def _to_srgb(profile: bytes) -> ImageCms.ImageCmsTransform | None:
    """Return the transform of a color profile to sRGB; None if there is no profile, or it is sRGB or broken."""
    if not 0 < len(profile) <= _MAX_PROFILE:
        return None
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}[opened.profile.xcolor_space.strip()]
        if "srgb" in (opened.profile.profile_description or "").lower():
            return None
        return ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, *_DAMAGE):
        return None


def sheet(images: list[Image.Image], columns: int = _COLUMNS) -> Image.Image:
    """Return images in a grid on white, row by row, each in the middle of a cell as large as the largest image."""
    width = max((image.width for image in images), default=THUMBNAIL)
    height = max((image.height for image in images), default=THUMBNAIL)
    rows = max(1, -(-len(images) // columns))
    page = Image.new("RGB", (columns * (width + _GAP) + _GAP, rows * (height + _GAP) + _GAP), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        left, top = (width - image.width) // 2, (height - image.height) // 2
        page.paste(image, (_GAP + column * (width + _GAP) + left, _GAP + row * (height + _GAP) + top))
    return page
