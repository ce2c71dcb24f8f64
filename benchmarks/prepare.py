"""Measure the wall time of `atoll prepare` against a plain loop over the same images and networks.

The loop uses two torch threads. It reads, decodes, resizes and encodes each image once, batch after batch, and writes
one file at the end. It makes neither clusters nor shards, and checks nothing. Both sides load their networks.

The networks are the shipped ones. Without `--quick`, an autoencoder as large as Stable Diffusion's follows, with random
weights, because only its cost matters.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from safetensors.torch import save_file

from atoll.core import config as configuration
from atoll.data.prepare import prepare
from atoll.encoders.autoencoder import open_codec
from atoll.encoders.vision import open_extractor
from harness import Row, interleave, run

SIDE = 512
BATCH = 32
RESOLUTION = {"emoji": 64, "large": 256}
"""Side of the encoded images: that of the shipped autoencoder, and the smallest usual one of Stable Diffusion's."""


def write_images(folder: Path, count: int, side: int) -> Path:
    """Write JPEG images with the soft structure of photographs, each with a caption."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        noise = Image.fromarray(generator.integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8))
        image = noise.resize((side, side), Image.Resampling.BICUBIC).filter(ImageFilter.DETAIL)
        image.save(folder / f"{number:05d}.jpg", quality=90)
        (folder / f"{number:05d}.txt").write_text(f"image number {number}")
    return folder


def write_large(folder: Path) -> Path:
    """Write an autoencoder as large as Stable Diffusion's."""
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    torch.manual_seed(0)
    AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, **blocks).save_pretrained(folder)
    return folder


def settings(images: Path, autoencoder: str, resolution: int) -> configuration.Config:
    return configuration.resolve(
        {
            "data": {"source": str(images), "resolution": resolution, "chunk": 256},
            "clusters": {"count": 2},
            "latents": {"autoencoder": autoencoder, "batch_size": BATCH},
            "features": {"batch_size": BATCH},
            "text": {"encoder": "none"},
        }
    )


def plain_loop(images: Path, autoencoder: str, resolution: int, *, out: Path) -> None:
    """Encode all images as a script would."""
    extractor, codec = open_extractor("efficientnet-lite0"), open_codec(autoencoder)
    files = sorted(images.glob("*.jpg"))
    features, latents = [], []
    for start in range(0, len(files), BATCH):
        opened = [Image.open(file).convert("RGB") for file in files[start : start + BATCH]]
        features.append(extractor(_stack(opened, extractor.side)).half().cpu())
        latents.append({name: part.half().cpu() for name, part in codec.encode(_stack(opened, resolution)).items()})
    joined = {name: torch.cat([part[name] for part in latents]).contiguous() for name in latents[0]}
    save_file({"features": torch.cat(features), **joined}, out)


def _stack(images: list[Image.Image], side: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.stack([np.asarray(image.resize((side, side), Image.Resampling.LANCZOS)) for image in images])


def compare(folder: Path, images: Path, autoencoder: str, *, name: str, warmup: int) -> Iterator[Row]:
    resolution = RESOLUTION[name]
    config = settings(images, autoencoder, resolution)

    def prepared() -> None:
        shutil.rmtree(folder / "run", ignore_errors=True)
        (folder / "run").mkdir()
        prepare(folder / "run", config)

    sides = {
        "prepare": prepared,
        "loop": lambda: plain_loop(images, autoencoder, resolution, out=folder / "loop.safetensors"),
    }
    times = interleave(sides, repeats=3, warmup=warmup)
    count = len(list(images.glob("*.jpg")))
    yield Row(f"prepare ({name}, {count} JPEG of {SIDE} px): rate / plain loop", times["loop"] / times["prepare"], 0.9)
    yield Row(f"prepare ({name}): images per second", count / times["prepare"])


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(2)
    folder = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    try:
        images = write_images(folder / "images", 64 if quick else 1024, SIDE)
        rows = list(compare(folder, images, "emoji", name="emoji", warmup=1))
        if not quick:
            # Few, because each image takes seconds. A warm-up would change little for the same reason.
            few = write_images(folder / "few", 8, SIDE)
            rows += compare(folder, few, str(write_large(folder / "vae")), name="large", warmup=0)
        return rows
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    run("atoll prepare", measure)
