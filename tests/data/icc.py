"""Small color profiles (ICC version 2), built from their specification."""

import struct
from collections.abc import Iterable

D50 = (0.9642, 1.0, 0.8249)
# Columns are the primaries of Display P3 and of sRGB, adapted to D50 (from their published profiles).
DISPLAY_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))


def xyz(value: Iterable[float]) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(part * 65536)) for part in value)


def gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256))


def text(value: str) -> bytes:
    data = value.encode() + b"\0"
    return b"desc\0\0\0\0" + struct.pack(">I", len(data)) + data + bytes(78)


def profile(space: bytes, kind: bytes, tags: dict[bytes, bytes], *, connection: bytes = b"XYZ ") -> bytes:
    """Return a profile of a color space (`RGB `, `GRAY`, `CMYK`) and kind (`mntr` for screens, `prtr` for printers)."""
    tags = {b"wtpt": xyz(D50), b"cprt": b"text\0\0\0\0none\0", **tags}
    start = 128 + 4 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name + struct.pack(">II", start + len(data), len(value))
        data += value + bytes(-len(value) % 4)
    header = struct.pack(">I4sI4s4s4s", start + len(data), b"test", 0x02400000, kind, space, connection)
    header += bytes(12) + b"acsp" + bytes(28) + xyz(D50)[8:]
    return header.ljust(128, b"\0") + table + data


def rgb(
    primaries: tuple[tuple[float, ...], ...] = DISPLAY_P3, power: float = 2.2, name: str = "a wide screen"
) -> bytes:
    """Return the profile of a screen: value^power is the share of each primary."""
    tags = {b"desc": text(name)}
    for letter, primary in zip("rgb", primaries, strict=True):
        tags[f"{letter}XYZ".encode()] = xyz(primary)
        tags[f"{letter}TRC".encode()] = gamma(power)
    return profile(b"RGB ", b"mntr", tags)


def gray(power: float = 1.0) -> bytes:
    """Return the profile of gray values whose luminance is value^power."""
    return profile(b"GRAY", b"mntr", {b"desc": text("linear gray"), b"kTRC": gamma(power)})


def cmyk(full_cyan: tuple[int, int, int] = (136, 208, 195)) -> bytes:
    """Return the profile of a printer: K is black, M and Y are colorless, and C has this Lab color (8 bits)."""
    white, black = (255, 128, 128), (0, 128, 128)
    corners = [(full_cyan if c else white) if not k else black for c in (0, 1) for _ in range(4) for k in (0, 1)]
    identity = bytes(range(256))
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + struct.pack(">9i", *(65536 * (i % 4 == 0) for i in range(9)))
    table += identity * 4 + b"".join(map(bytes, corners)) + identity * 3
    return profile(b"CMYK", b"prtr", {b"desc": text("inks"), b"A2B0": table}, connection=b"Lab ")
