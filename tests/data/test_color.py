"""Colors: profiles are applied, broken ones are ignored, and orientations are found wherever a file has them."""

import io
import struct
import threading

import icc
import numpy as np
import pytest
from PIL import Image

from atoll.core.sizes import Size
from atoll.data.images import BadImage, decode, image_size, open_image


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def center(data: bytes) -> list[int]:
    return np.asarray(decode(data, 16))[8, 8].astype(int).tolist()


def to_srgb(color: tuple[int, ...], primaries: tuple[tuple[float, ...], ...], power: float) -> np.ndarray:
    """The closed form: shares of the primaries, XYZ, shares of the primaries of sRGB, and its transfer curve."""
    light = np.array(primaries).T @ (np.array(color) / 255) ** power
    shares = np.clip(np.linalg.solve(np.array(icc.SRGB).T, light), 0, 1)
    return 255 * np.where(shares <= 0.0031308, 12.92 * shares, 1.055 * shares ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG", "WEBP", "AVIF"])
@pytest.mark.parametrize("color", [(200, 100, 50), (30, 60, 220), (90, 200, 120), (128, 128, 128)])
def test_the_profile_of_a_wide_screen_is_applied(kind: str, color: tuple[int, int, int]) -> None:
    options: dict[str, object] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    data = encoded(Image.new("RGB", (16, 16), color), kind, icc_profile=icc.rgb(), **options)
    # Two are for the rounding of Little CMS, four more for the lossy formats.
    tolerance = 6 if kind in ("JPEG", "AVIF") else 2
    np.testing.assert_allclose(center(data), to_srgb(color, icc.DISPLAY_P3, 2.2), atol=tolerance)


def test_the_profile_is_applied_to_the_palette() -> None:
    image = Image.new("P", (16, 16), 0)
    image.putpalette([200, 100, 50])
    data = encoded(image, icc_profile=icc.rgb())
    np.testing.assert_allclose(center(data), to_srgb((200, 100, 50), icc.DISPLAY_P3, 2.2), atol=2)


def test_transparency_is_blended_after_the_profile() -> None:
    data = encoded(Image.new("RGBA", (16, 16), (200, 100, 50, 128)), icc_profile=icc.rgb())
    opaque = to_srgb((200, 100, 50), icc.DISPLAY_P3, 2.2)
    np.testing.assert_allclose(center(data), 255 + 128 / 255 * (opaque - 255), atol=2)


@pytest.mark.parametrize(("mode", "value"), [("L", 128), ("LA", (128, 255)), ("I;16", 32896)])
def test_a_profile_of_gray_values_is_applied(mode: str, value: int) -> None:
    """Half of the light is 188 in sRGB."""
    data = encoded(Image.new(mode, (16, 16), value), icc_profile=icc.gray(1.0))
    np.testing.assert_allclose(center(data), [188, 188, 188], atol=1)


def test_a_profile_of_a_screen_is_applied_to_gray_values() -> None:
    data = encoded(Image.new("L", (16, 16), 128), icc_profile=icc.rgb(icc.SRGB, power=1.0))
    np.testing.assert_allclose(center(data), [188, 188, 188], atol=1)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_the_profile_of_a_printer_is_applied(kind: str) -> None:
    """The ink of this printer that is called cyan is red."""
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    options: dict[str, object] = {"quality": 100} if kind == "JPEG" else {}
    np.testing.assert_allclose(center(encoded(cyan, kind, **options)), [0, 255, 255], atol=4)
    np.testing.assert_allclose(center(encoded(cyan, kind, icc_profile=icc.cmyk(), **options)), [251, 0, 8], atol=4)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    "profile",
    [
        b"not a profile",
        icc.rgb()[:200],
        icc.rgb()[:128] + bytes(300),
        icc.gray(),
        icc.cmyk(),
        icc.rgb() + bytes(2**22),
        icc.rgb(name="my sRGB, more or less"),
    ],
    ids=["text", "cut", "no tags", "gray", "inks", "too large", "sRGB"],
)
def test_a_broken_or_wrong_profile_changes_nothing(profile: bytes) -> None:
    """No pixel differs, and the image is not rejected. A profile that is called sRGB is not applied either."""
    plain, tagged = decode(encoded(NOISE, "TIFF"), 16), decode(encoded(NOISE, "TIFF", icc_profile=profile), 16)
    np.testing.assert_array_equal(np.asarray(tagged), np.asarray(plain))


def test_mutated_profiles_never_reject_an_image() -> None:
    rng = np.random.default_rng(0)
    for original in (icc.rgb(), icc.cmyk(), icc.gray()):
        for _ in range(100):
            profile = bytearray(original)
            for at in rng.integers(0, len(profile), 4):
                profile[at] = rng.integers(0, 256)
            assert decode(encoded(NOISE, "TIFF", icc_profile=bytes(profile)), 16).size == (16, 16)


def test_threads_share_a_profile() -> None:
    """Little CMS must not write to the shared transform."""
    colors = [(value, 255 - value, value // 2) for value in range(0, 256, 16)]
    files = [encoded(Image.new("RGB", (64, 64), color), icc_profile=icc.rgb()) for color in colors]
    expected = [decode(data, 16).tobytes() for data in files]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(20):
            wrong.extend(i for i, data in enumerate(files) if decode(data, 16).tobytes() != expected[i])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def png_chunks(data: bytes) -> list[bytes]:
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        chunks.append(data[at : at + length + 12])
        at += length + 12
    return chunks


@pytest.mark.parametrize("late", [False, True])
def test_a_png_may_have_its_orientation_after_the_pixels(late: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = Image.new("RGB", (48, 32), "red")
    wide.paste("blue", (0, 0, 24, 32))
    chunks = png_chunks(encoded(wide, exif=exif))
    (own,) = (chunk for chunk in chunks if chunk[4:8] == b"eXIf")
    if late:
        chunks.remove(own)
        chunks.insert(-1, own)
    data = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    upright = open_image(data, [Size(16, 16)])
    assert image_size(data) == upright.size == (32, 48)
    # Turned clockwise, the left half is above.
    assert (upright.getpixel((16, 4)), upright.getpixel((16, 44))) == ((0, 0, 255), (255, 0, 0))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_data_does_not_reject_an_image() -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encoded(Image.new("RGB", (48, 32), "red"), kind, exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage")
        assert image_size(data) == (48, 32)
        np.testing.assert_allclose(center(data), [255, 0, 0], atol=4)


def test_only_the_first_frame_of_an_animation_is_decoded() -> None:
    """A damaged second frame is no reason to reject the image."""
    frames = [Image.new("RGB", (32, 16), color) for color in ("red", "blue")]
    frames[1].putpixel((3, 3), (9, 9, 9))
    for kind in ("GIF", "PNG"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert image_size(data) == (32, 16)
        assert center(data) == [255, 0, 0]
    gif = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert center(gif[:-40]) == [255, 0, 0]
    with pytest.raises(BadImage):
        decode(gif[:30], 16)
