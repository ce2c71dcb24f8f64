"""Small datasets of three kinds, in which ids, splits and rejects depend on earlier images of the source."""

import io
import json
import random
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shapes import draw

KINDS = ("folder", "webdataset", "parquet")


def write_source(kind: str, folder: Path) -> Path:
    """Write about 40 images, some of them bad, with ids that recur and captions that are missing."""
    images = _images(36)
    folder.mkdir(parents=True)
    {"folder": _folder, "webdataset": _tars, "parquet": _tables}[kind](folder, images)
    return folder


def _images(count: int) -> list[bytes]:
    chance, found = random.Random(0), []
    for number in range(count):
        buffer = io.BytesIO()
        draw(("circle", "square", "triangle")[number % 3], chance).save(buffer, "PNG")
        found.append(buffer.getvalue() if number % 12 != 7 else b"no image")
    return found


def _folder(folder: Path, images: list[bytes]) -> None:
    """Two images of one stem, classes, some captions, and metadata of a missing image."""
    for number, image in enumerate(images):
        file = folder / f"class-{number // 10}" / f"{number // 2:03d}{('.png', '.bmp')[number % 2]}"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(image)
        if number // 2 % 3:
            file.with_suffix(".txt").write_text(f"image {number}")
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "lost.png", "text": "lost"}))


def _tars(folder: Path, images: list[bytes]) -> None:
    """Tars of different lengths, the last one cut off; every key occurs in several of them."""
    for shard, (start, end) in enumerate([(0, 3), (3, 20), (20, 31), (31, 36)]):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(start, end):
                parts = {"png": images[number], "json": json.dumps({"number": number}).encode()}
                if number % 3:
                    parts["txt"] = f"image {number}".encode()
                for suffix, data in parts.items():
                    member = tarfile.TarInfo(f"{number % 8}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    last = folder / "3.tar"
    last.write_bytes(last.read_bytes()[:6000])


def _tables(folder: Path, images: list[bytes]) -> None:
    """Two files with row groups that fit no chunk, without ids; some rows are equal, one has no image."""
    rows = [
        {"image": image if number else None, "caption": f"image {number}" if number % 3 else None}
        for number, image in enumerate(images)
    ]
    rows += rows[::9] * 2
    for part, (start, end) in enumerate([(0, 31), (31, len(rows))]):
        pq.write_table(pa.Table.from_pylist(rows[start:end]), folder / f"{part}.parquet", row_group_size=7)
