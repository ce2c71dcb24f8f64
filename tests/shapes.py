"""A small dataset of real image files, and the configuration of a run on it."""

import json
import random
import shutil
from pathlib import Path

from PIL import Image, ImageDraw

from atoll.core import config as configuration
from atoll.core.config import to_yaml

SETTINGS = {
    "data": {"resolution": 32, "chunk": 16, "shard_rows": 20, "val_fraction": 0.15, "max_rejects": 0.05},
    "features": {"resolution": 64, "batch_size": 8},
    "clusters": {"count": 3},
    "latents": {"autoencoder": "pixels", "batch_size": 8},
    "text": {"max_tokens": 12, "batch_size": 8},
}
COLORS = {"circle": "crimson", "square": "seagreen", "triangle": "royalblue"}


def draw(kind: str, rng: random.Random) -> Image.Image:
    image = Image.new("RGB", (40, 40), "white")
    pen = ImageDraw.Draw(image)
    x, y, side = rng.randint(2, 12), rng.randint(2, 12), rng.randint(14, 24)
    box = (x, y, x + side, y + side)
    if kind == "circle":
        pen.ellipse(box, fill=COLORS[kind])
    elif kind == "square":
        pen.rectangle(box, fill=COLORS[kind])
    else:
        pen.polygon([(x, y + side), (x + side, y + side), (x + side / 2, y)], fill=COLORS[kind])
    return image


def write_shapes(folder: Path, count: int = 99) -> Path:
    """Write images of three shapes with captions, and one file that is not an image."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for number in range(count):
        kind = list(COLORS)[number % 3]
        stem = folder / f"{kind}-{number:03d}"
        draw(kind, rng).save(stem.with_suffix(".png"))
        stem.with_suffix(".txt").write_text(f"a {kind} with the number {number}")
    (folder / "broken.png").write_bytes(b"")
    (folder / "broken.txt").write_text("nothing to see")
    return folder


def write_run(run: Path, source: Path, **changes: dict[str, object]) -> configuration.Config:
    """Write a run's configuration for the shapes."""
    values = {section: {**SETTINGS.get(section, {}), **changes.get(section, {})} for section in {*SETTINGS, *changes}}
    values["data"]["source"] = str(source)
    config = configuration.resolve(values)
    run.mkdir(parents=True)
    (run / configuration.CONFIG_FILE).write_text(to_yaml(config))
    return config


def chunk_files(run: Path, stage: str) -> list[Path]:
    """Return the files of a stage of the pass, in the order of the chunks."""
    keys = json.loads((run / "data/ingest/chunks.json").read_text())
    return [run / "data" / stage / f"{key}.safetensors" for key in keys]


def rewrite(prepared: Path, run: Path, shapes: Path, *, stages: tuple[str, ...], **changes: dict) -> Path:
    """Prepare a run from the finished stages of another one."""
    from atoll.data.prepare import prepare

    config = write_run(run, shapes, **changes)
    for stage in stages:
        shutil.copytree(prepared / "data" / stage, run / "data" / stage)
    prepare(run, config)
    return run
