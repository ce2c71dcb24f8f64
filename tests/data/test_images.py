"""Decoding: unusual images are decoded correctly, and unusable ones are rejected with a reason."""

import io
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from atoll.core.sizes import Size
from atoll.data import images
from atoll.data.images import BadImage, decode, fit, image_size, open_image
from atoll.data.sources.open import open_source


def gradient(width: int = 48, height: int = 32) -> Image.Image:
    """Red grows to the right, green grows downwards: any rotation or mirroring is visible."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([red, green, 0 * red + 64], axis=2).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def reason(data: bytes) -> str:
    with pytest.raises(BadImage) as bad:
        decode(data, 16)
    return bad.value.reason


def test_an_image_is_center_cropped_and_resized() -> None:
    found = decode(encoded(gradient()), 16)
    expected = gradient().crop((8, 0, 40, 32)).resize((16, 16), Image.Resampling.LANCZOS)
    assert (found.mode, found.size) == ("RGB", (16, 16))
    np.testing.assert_array_equal(pixels(found), pixels(expected))


@pytest.mark.parametrize(("kind", "options", "tolerance"), [
    ("PNG", {}, 0), ("BMP", {}, 0), ("TIFF", {}, 0), ("PPM", {}, 0), ("WEBP", {"lossless": True}, 0),
    ("JPEG", {"quality": 98, "subsampling": 0}, 4), ("AVIF", {"quality": 95}, 6), ("GIF", {}, 40),
])  # fmt: skip
def test_every_format_is_decoded(kind: str, options: dict[str, object], tolerance: int) -> None:
    found = decode(encoded(gradient(), kind, **options), 16)
    assert np.abs(pixels(found) - pixels(decode(encoded(gradient()), 16))).max() <= tolerance


def test_heic_is_decoded_upright_or_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pillow_heif")
    assert images._formats()[-1] == "HEIF"
    turned, exif = gradient(), Image.Exif()
    exif[0x0112] = 6
    turned.info["exif"] = exif.tobytes()
    data = encoded(turned, "HEIF", quality=-1)
    assert image_size(data) == (32, 48)
    upright = pixels(decode(encoded(gradient().transpose(Image.Transpose.ROTATE_270)), 16))
    assert np.abs(pixels(decode(data, 16)) - upright).max() <= 6
    monkeypatch.setattr(images, "_formats", lambda: images.FORMATS)
    assert reason(data) == "HEIC needs a package: pip install 'atoll[heic]', or convert it to JPEG"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    turns = {
        1: [], 2: [Image.Transpose.FLIP_LEFT_RIGHT], 3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM], 5: [Image.Transpose.TRANSPOSE], 6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE], 8: [Image.Transpose.ROTATE_270],
    }  # fmt: skip
    lying = gradient()
    for turn in turns[orientation]:
        lying = lying.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decode(encoded(lying, "PNG", exif=exif), 16)
    np.testing.assert_allclose(pixels(found), pixels(decode(encoded(gradient()), 16)), atol=1)


def test_a_large_jpeg_is_decoded_at_reduced_size_without_visible_change() -> None:
    """Decoding at reduced size is for speed; the image looks the same."""
    data = encoded(gradient(640, 512), "JPEG", quality=95)
    full = (
        Image.open(io.BytesIO(data)).convert("RGB").crop((64, 0, 576, 512)).resize((32, 32), Image.Resampling.LANCZOS)
    )
    assert np.abs(pixels(decode(data, 32)) - pixels(full)).max() <= 3


def test_transparent_pixels_become_white() -> None:
    image = Image.new("RGBA", (16, 16), (255, 0, 0, 128))
    np.testing.assert_allclose(pixels(decode(encoded(image), 16))[8, 8], [255, 127, 127], atol=1)
    gray = Image.new("LA", (16, 16), (0, 0))
    assert (pixels(decode(encoded(gray), 16)) == 255).all()


def test_a_transparent_palette_color_becomes_white() -> None:
    image = Image.new("P", (16, 16), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(1, (8, 0, 16, 16))
    found = pixels(decode(encoded(image, transparency=0), 16))
    assert (found[8, 2] == [255, 255, 255]).all()
    assert (found[8, 13] == [0, 0, 255]).all()


def test_a_transparent_rgb_color_becomes_white() -> None:
    image = Image.new("RGB", (16, 16), (9, 9, 9))
    assert (pixels(decode(encoded(image, transparency=(9, 9, 9)), 16)) == 255).all()


def test_cmyk_is_converted_to_rgb() -> None:
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    found = pixels(decode(encoded(cyan, "JPEG", quality=95), 16))[8, 8]
    np.testing.assert_allclose(found, [0, 255, 255], atol=4)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_gray_is_scaled_not_clipped(kind: str) -> None:
    ramp = np.tile(np.linspace(0, 65535, 16).astype(np.uint16), (16, 1))
    found = pixels(decode(encoded(Image.fromarray(ramp), kind), 16))[8, :, 0]
    np.testing.assert_allclose(found, np.linspace(0, 255, 16), atol=1)


def sixteen_bit_rgb() -> bytes:
    """A PNG of 16 bits a channel, which Pillow reads but cannot write."""
    row = b"\0" + struct.pack(">3H", 65535, 32768, 0) * 16
    return png(16, zlib.compress(row * 16), depth=16)


def png(side: int, data: bytes, depth: int) -> bytes:
    header = struct.pack(">IIBBBBB", side, side, depth, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_sixteen_bit_color_is_scaled() -> None:
    np.testing.assert_allclose(pixels(decode(sixteen_bit_rgb(), 16))[8, 8], [255, 128, 0], atol=1)


def test_float_and_32_bit_pixels_are_rejected() -> None:
    assert reason(encoded(Image.new("F", (16, 16), 0.5), "TIFF")).startswith("floating-point pixels")
    for value in (1 << 20, 200):
        assert reason(encoded(Image.new("I", (16, 16), value), "TIFF")).startswith("32-bit gray values")


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    np.testing.assert_allclose(pixels(decode(data, 16))[8, 8], [255, 0, 0], atol=3)


def test_one_bit_images_are_decoded() -> None:
    assert (pixels(decode(encoded(Image.new("1", (16, 16), 1)), 16)) == 255).all()


def test_the_content_decides_the_format_not_the_file_name(tmp_path: Path) -> None:
    """A PNG called .jpg is decoded; a text called .png is rejected with its first bytes."""
    (tmp_path / "really.jpg").write_bytes(encoded(gradient()))
    (tmp_path / "text.png").write_text("This is not an image.")
    (tmp_path / "empty.png").write_bytes(b"")
    found = {image.id: image.read() for image in open_source(tmp_path).images()}
    np.testing.assert_array_equal(pixels(decode(found["really"], 16)), pixels(decode(encoded(gradient()), 16)))
    assert reason(found["text"]) == "not an image in a supported format; it starts with b'This is not '"
    assert reason(found["empty"]) == "the file is empty (0 bytes)"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_truncated_files_are_rejected(kind: str, fraction: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    assert reason(data[: int(len(data) * fraction)])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = encoded(Image.new("1", (12_000, 12_000)))
    assert len(bomb) < 100_000
    assert reason(bomb) == "12000x12000 pixels are more than the limit of 89478485"
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    assert reason(encoded(gradient())) == "48x32 pixels are more than the limit of 1000"


def test_a_huge_size_in_the_header_is_rejected_before_memory_is_allocated() -> None:
    assert reason(png(60_000, b"", depth=8)).startswith("probably a decompression bomb: Image size (3600000000 pixels)")


def test_tiny_images_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(encoded(Image.new("RGB", (1, 1)))) == "1x1 pixels are too few; the limit is 8 on a side"
    monkeypatch.setattr(images, "MIN_SIDE", 1)
    assert decode(encoded(Image.new("RGB", (1, 1))), 16).size == (16, 16)


def test_postscript_is_rejected_so_that_no_program_is_started() -> None:
    """Pillow would start Ghostscript for it."""
    assert reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n").startswith(
        "not an image in a supported format"
    )


SEEDS: list[Callable[[], bytes]] = [
    *(lambda kind=kind: encoded(gradient(), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")),
    lambda: encoded(gradient().convert("CMYK"), "JPEG"),
    lambda: encoded(gradient().convert("P"), "PNG", transparency=3),
    sixteen_bit_rgb,
]


@pytest.mark.filterwarnings("ignore")  # Pillow warns about data that it then rejects
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12),
    cut=st.floats(0.2, 1),
)
def test_damage_gives_an_image_or_a_reason(
    seed: Callable[[], bytes], edits: list[tuple[float, int]], cut: float
) -> None:
    """No damage raises another error than `BadImage`, so that a run continues."""
    data = bytearray(seed())
    for position, value in edits:
        data[int(position * len(data))] = value
    with suppress(BadImage):
        assert decode(bytes(data[: int(cut * len(data))]), 16).size == (16, 16)


def test_one_decode_serves_several_sizes() -> None:
    """A centered part with the ratio of the size, resized: the same as when each size is cut out of the file."""
    image = open_image(encoded(gradient(90, 60)), [Size(16, 16), Size(24, 48)])
    assert (image.mode, image.size) == ("RGB", (90, 60))
    for size, box in ((Size(16, 16), (15, 0, 75, 60)), (Size(24, 48), (0, 7, 90, 52)), (Size(60, 40), (25, 0, 65, 60))):
        expected = gradient(90, 60).crop(box).resize((size.width, size.height), Image.Resampling.LANCZOS)
        np.testing.assert_array_equal(pixels(fit(image, size)), pixels(expected))


def test_a_jpeg_is_decoded_large_enough_for_every_size() -> None:
    """Decoding at a fraction must leave twice the width and height of every size, also of a turned image."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(gradient(1600, 800), "JPEG", quality=95)
    turned = encoded(gradient(1600, 800), "JPEG", quality=95, exif=exif)
    assert open_image(data, [Size(64, 64)]).size == (400, 200)
    assert open_image(data, [Size(64, 64), Size(64, 256)]).size == (800, 400)
    assert open_image(turned, [Size(64, 64)]).size == (200, 400)
    assert open_image(turned, [Size(64, 64), Size(256, 64)]).size == (400, 800)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_size_is_that_of_the_upright_image(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(gradient(48, 32), kind, exif=exif)
    expected = (32, 48) if orientation >= 5 else (48, 32)
    assert image_size(data) == open_image(data, [Size(16, 16)]).size == expected


def test_the_size_is_found_without_the_pixels() -> None:
    data = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)))
    assert image_size(data[: len(data) // 4]) == (96, 64)
    with pytest.raises(BadImage, match="1x1 pixels are too few"):
        image_size(encoded(Image.new("RGB", (1, 1))))
