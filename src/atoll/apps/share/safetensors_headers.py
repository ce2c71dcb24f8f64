"""Check the headers of safetensors files that somebody else wrote, before any tensor is read.

A safetensors file is an 8-byte little-endian length n, n bytes of JSON (dtype, shape and byte offsets of each tensor),
and the data. The tensors must fill the data without gap or overlap, so a file cannot hide other bytes.
"""

import math
from pathlib import Path

from atoll.verify.untrusted import Refused, strict_json

MAX_HEADER = 4 << 20
"""Maximum size of a header, in bytes. A checkpoint takes 175 per tensor, so 4 MB describe 24,000 tensors."""
# Bytes per element.
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def safetensors_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor; refuse a malformed header, gaps, overlaps and trailing bytes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise Refused(f"{file.name} is not a safetensors file: its header would have {length:,} of {size:,} bytes")
        header = strict_json(stream.read(length), f"the header of {file.name}", MAX_HEADER)
    if not isinstance(header, dict):
        raise Refused(f"the header of {file.name} is not an object")
    _check_metadata(header.pop("__metadata__", {}), file.name)
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, start, end = _tensor_entry(entry, name, file.name)
        tensors[name] = (dtype, shape)
        spans.append((start, end, name))
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            raise Refused(f"{file.name}: tensor {name[:80]!r} starts at {start}, expected {position} (gap or overlap)")
        position = end
    if position != size - 8 - length:
        raise Refused(f"{file.name}: tensors take {position:,} bytes, the file has {size - 8 - length:,} for them")
    return tensors


def _check_metadata(metadata: object, file: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Refused(f"{file}: the metadata must map names to strings")


def _tensor_entry(entry: object, name: str, file: str) -> tuple[str, tuple[int, ...], int, int]:
    what = f"{file}: tensor {name[:80]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Refused(f"{what} must have exactly the fields dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise Refused(f"{what} has dtype {str(dtype)[:40]!r}; known: {', '.join(DTYPES)}")
    # At most 8 dimensions of less than 2^50 elements: no real tensor has more, and the products below stay cheap.
    valid = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and len(shape) <= 8
    if not valid or not all(type(n) is int and 0 <= n < 1 << 50 for n in [*shape, *offsets]):
        raise Refused(f"{what} has a shape or offsets that are not lists of valid integers")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype]:
        raise Refused(
            f"{what} of {shape} takes {offsets[1] - offsets[0]} bytes; expected {math.prod(shape) * DTYPES[dtype]}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]
