"""Checks of the density file of a contributed expert: names, shapes and counts, before its values are compared."""

import math
from pathlib import Path

from safetensors import safe_open

from atoll.core.manifests import LatentSpec, ShardsContent
from atoll.core.sizes import Size
from atoll.experts.density import CAPTION_RANK, RANK
from atoll.verify.untrusted import Refused

TensorHeader = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def max_density_bytes(data: ShardsContent) -> int:
    """Return an upper bound of the density file in bytes.

    In float32: principal directions (rank, latent size) and a mean of each size, the same for pooled captions, one
    count per class, and a margin of a few rows for the small tensors.
    """
    captions = (CAPTION_RANK + 8) * (data.text.pooled or 0) if data.text else 0
    return 4 * ((RANK + 16) * sum(_latent_values(data.latents).values()) + captions + len(data.labels))


def check_density_file(data: ShardsContent, found: dict[str, TensorHeader], file: Path) -> None:
    """Refuse a density file with other tensors than those of the run's sizes and conditioning, or with wrong counts."""
    sizes, rows = _latent_values(data.latents), data.rows["train"]
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, values in sizes.items():
        shapes |= _density_shapes(found, prefix, values)
    if data.text:
        shapes |= _density_shapes(found, "caption.", data.text.pooled or 0)
    if data.labels:
        shapes["classes"] = (len(data.labels),)
    if {name: shape for name, (_, shape) in found.items()} != shapes:
        each = ", ".join(map(str, sizes.values()))
        raise Refused(f"{file.name} does not hold a density of latents with {each} values and of their conditioning")
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in shapes if not name.endswith(("mean", "directions"))}
    # Means and directions are large, and `measured` compares them with the shards; here the small tensors suffice.
    images = sum(tensors[f"{prefix}count"].item() for prefix in sizes)
    # A size without images counts as one image. `measured` compares each count with the shards.
    if not rows <= images < rows + len(sizes):
        raise Refused(f"{file.name} counts {images} images as its count; expected {rows}")
    if "caption.count" in tensors and (count := tensors["caption.count"].item()) != 1:
        raise Refused(f"{file.name} counts {count} images as its caption.count; expected 1")
    if "classes" in tensors and tensors["classes"].sum() > rows:
        raise Refused(f"{file.name} counts {tensors['classes'].sum().item()} images with a class; there are {rows}")
    for name, tensor in tensors.items():
        if tensor.numel() and (tensor.min() < 0 or (name.endswith("rest") and not tensor)):
            raise Refused(f"{file.name}: {name} is not positive")


def _latent_values(latents: LatentSpec) -> dict[str, int]:
    """Return the number of values of the latents of each size, by the prefix of their tensors in a density file."""
    channels, others = latents.shape[0], (latents.sizes or ())[1:]
    return {"": math.prod(latents.shape)} | {f"{Size(*size)}.": channels * math.prod(size) for size in others}


def _density_shapes(found: dict[str, TensorHeader], prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    rank = found.get(f"{prefix}variances", ("", (0,)))[1]
    shapes = {"mean": (size,), "directions": (*rank, size), "variances": rank, "rest": (), "count": ()}
    return {prefix + name: shape for name, shape in shapes.items()}
