"""Images of several ratios with several captions, and a run on them with everything that depends on the size."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from atoll.core import config as configuration
from shapes import write_run

BUCKETS = {"64x64": 20, "96x48": 14, "48x96": 10, "80x48": 9, "48x80": 7}
"""Five sizes, each with its number of images. Sides are multiples of 16: a patch of 2 times the factor 8."""
NETWORK = {"name": "DiT-XS/2", "width": 32, "depth": 2, "heads": 2}
SETTINGS = {
    "data": {
        "resolution": 64, "buckets": list(BUCKETS), "flip": True, "caption": {"short": 1, "long": 3},
        "chunk": 9, "shard_rows": 8,
    },
    "features": {"patch_dimensions": 8},
    "clusters": {"count": 2},
    "latents": {"autoencoder": "emoji"},
    "networks": {"default": NETWORK},
    "router": {"network": NETWORK},
}  # fmt: skip
"""Flips and an autoencoder, so that shards have the latents of mirror images; patch features; small chunks."""


def write_photographs(
    folder: Path, shapes: Mapping[tuple[int, int], int], *, long_captions: Callable[[int], int]
) -> Path:
    """Write a number of images for each (width, height); `long_captions` of each, by its number, beside a short one."""
    folder.mkdir()
    rng, pixels, lines = random.Random(0), np.random.default_rng(0), []
    listed = [shape for shape, count in shapes.items() for _ in range(count)]
    rng.shuffle(listed)
    for number, (width, height) in enumerate(listed):
        name = f"{number:03d}.png"
        # Two kinds of image for two clusters: smooth and dark, or coarse and bright.
        small = pixels.integers(*((0, 90) if number % 2 else (120, 255)), (3, 3, 3), dtype=np.uint8)
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC if number % 2 else 0).save(
            folder / name
        )
        words = ("from near", "from far")[: long_captions(number)]
        long = [f"photograph {number}, {word}" for word in words]
        lines.append(json.dumps({"file_name": name, "short": f"photo {number}", "long": long}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def write_photographs_run(run: Path, **changes: dict[str, object]) -> configuration.Config:
    """Write images of five ratios with three captions each beside a run, and the configuration of the run."""
    # A little wider than the buckets, so that they are cropped and resized.
    sides = {bucket: map(int, bucket.split("x")) for bucket in BUCKETS}
    shapes = {(2 * width + 3, 2 * height): BUCKETS[bucket] for bucket, (width, height) in sides.items()}
    source = write_photographs(run.parent / "photographs", shapes, long_captions=lambda _: 2)
    (source / "980.png").write_bytes(b"")  # the index has a rejected image too
    sections = {*SETTINGS, *changes}
    values = {section: {**SETTINGS.get(section, {}), **changes.get(section, {})} for section in sections}
    return write_run(run, source, **values)
