"""Hostile sources of images. Each holds one honest image, `good`, and attacks that must be rejected one by one."""

import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

SECRET = b"-----BEGIN PRIVATE KEY-----"


def png(side: int = 16) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(side * side * 3, dtype=np.uint8).reshape(side, side, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def png_of(width: int, height: int, *, color: int = 6, depth: int = 8, pixels: bytes | None = None) -> bytes:
    """Return a PNG of zeros, or one that only claims its size; `color` 6 is RGBA, 0 gray, 3 a palette."""
    channels = {0: 1, 2: 3, 3: 1, 6: 4}[color]
    if pixels is None:
        packer, row = zlib.compressobj(1), b"\0" * (1 + width * channels * depth // 8)
        pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    palette = chunk(b"PLTE", b"\0\0\0") if color == 3 else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def tiff_with_tile(side: int) -> bytes:
    """Return a TIFF of 16 x 16 pixels in one compressed tile of any size."""
    tile = zlib.compress(b"\0" * 1000)
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(tile)}
    start = 8 + len(tile) + len(tile) % 2
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    body = tile + b"\0" * (len(tile) % 2)
    return b"II*\0" + struct.pack("<I", start) + body + struct.pack("<H", len(tags)) + entries + b"\0\0\0\0"


def webp_of(side: int) -> bytes:
    """Return an animated WebP that claims a large canvas."""
    canvas = struct.pack("<I", 0x12)[:4] + struct.pack("<I", side - 1)[:3] * 2
    parts = b"VP8X" + struct.pack("<I", 10) + canvas + b"ANIM" + struct.pack("<I", 6) + b"\0" * 6
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WEBP" + parts


IMAGES: dict[str, Callable[[], bytes]] = {
    "rgba": lambda: png_of(9000, 9900, pixels=b""),
    "gray": lambda: png_of(9000, 9900, color=0, pixels=b""),
    "one bit": lambda: png_of(9000, 9900, color=0, depth=1, pixels=b""),
    "palette": lambda: png_of(9000, 9900, color=3, pixels=b""),
    "one line": lambda: png_of(89_000_000, 8, pixels=b""),
    "too many": lambda: png_of(2**31 - 1, 2**31 - 1, pixels=b""),
    "bmp": lambda: b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 8000, 8000, 1, 24, 0, 0, 0, 0, 0, 0),
    "ppm": lambda: b"P6 8000 8000 255\n",
    "gif": lambda: b"GIF89a" + struct.pack("<HHBBB", 60000, 60000, 0, 0, 0) + b"\x2c" + b"\0" * 30,
    "webp": lambda: webp_of(16384),
    "tiff tile": lambda: tiff_with_tile(2**15),
}


def folder_of_bombs(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "good.png").write_bytes(png())
    for name, make in IMAGES.items():
        (folder / f"{name}.png").write_bytes(make())
    with (folder / "sparse.png").open("wb") as file:
        file.truncate(2**40)
    (folder / "caption.png").write_bytes(png())
    with (folder / "caption.txt").open("wb") as file:
        file.truncate(2**40)
    return folder


def folder_of_links(folder: Path) -> Path:
    """Links to secrets that are a valid image and a valid caption, and names of them in the metadata."""
    outside = folder.parent / "private"
    (outside / "deep").mkdir(parents=True)
    (outside / "secret.png").write_bytes(png(24))
    (outside / "secret.txt").write_bytes(SECRET)
    folder.mkdir()
    for name in ("good", "absolute", "relative", "chain", "caption", "own"):
        (folder / f"{name}.png").write_bytes(png())
    (folder / "image.png").symlink_to(outside / "secret.png")
    (folder / "absolute.txt").symlink_to(outside / "secret.txt")
    (folder / "relative.txt").symlink_to("../private/secret.txt")
    (folder / ".hidden").symlink_to(outside / "secret.txt")
    (folder / "chain.txt").symlink_to(".hidden")
    (folder / "caption.txt").symlink_to("../source/../private/secret.txt")
    (folder / "subfolder").symlink_to(outside, target_is_directory=True)
    (folder / "words.txt").write_text("an honest caption")
    (folder / "own.txt").symlink_to("words.txt")
    os.mkfifo(folder / "pipe.png")
    rows = [{"file_name": name} for name in ("../private/secret.png", str(outside / "secret.png"), "x/../../private/y")]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE, *, link: str = "") -> bytes:
    """Return the header of a tar's member that claims any size."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info.tobuf(tarfile.GNU_FORMAT)


def stored(name: str, data: bytes) -> bytes:
    return member(name, len(data)) + data + b"\0" * (-len(data) % 512)


END = b"\0" * 1024
HUGE = 2**40
PAX = b"x"
TARS: dict[str, bytes] = {
    "image claims": member("x.png", HUGE),
    "caption claims": stored("x.png", png()) + member("x.txt", HUGE),
    "json claims": stored("x.png", png()) + member("x.json", HUGE),
    "image of 1 GB": member("x.png", 2**30) + b"\0" * 512,
    "long caption": stored("x.png", png()) + stored("x.txt", b"a" * 2**17),
    "deep json": stored("x.png", png()) + stored("x.json", b"[" * 200_000),
    "deep caption": stored("x.png", png()) + stored("x.json", b'{"caption": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "pax claims": member("x", HUGE, PAX),
    "long name claims": member("x", HUGE, tarfile.GNUTYPE_LONGNAME),
    "pax chain": member("x", 0, PAX) * 1000 + stored("x.png", png()),
    "sparse": member("x.png", 512, tarfile.GNUTYPE_SPARSE) + b"\0" * 512,
    "symbolic link": member("x.png", 0, tarfile.SYMTYPE, link="/etc/passwd"),
    "hard link": member("x.png", 0, tarfile.LNKTYPE, link="../../etc/passwd"),
    "caption link": stored("x.png", png()) + member("x.txt", 0, tarfile.SYMTYPE, link="/etc/passwd"),
    "device": member("x.png", 0, tarfile.CHRTYPE),
}


def tars(folder: Path) -> Path:
    """One tar for each attack, and each begins with an honest image."""
    folder.mkdir(parents=True)
    for number, (name, data) in enumerate(TARS.items()):
        (folder / f"{number:02d} {name}.tar").write_bytes(stored(f"good-{number}.png", png()) + data + END)
    return folder
