"""A run whose images have five sizes, with shards written by hand: pixels, classes, two clusters."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import to_yaml
from atoll.core.manifests import SHARDS, ChannelStatistics, LatentSpec, PatchSpec, ShardsContent
from atoll.core.sizes import Size
from atoll.data.density import write_density

SIZES = [Size(16, 16), Size(12, 20), Size(20, 12), Size(8, 24), Size(24, 8)]
"""The default first; 192 to 256 pixels, with sides that are multiples of 4, the patch."""
ROWS = {
    0: {"train": [40, 20, 18, 17, 9], "validation": [8, 5, 4, 3, 2]},
    1: {"train": [24, 30, 19, 3, 0], "validation": [6, 4, 4, 1, 0]},
}
"""Images of each size, by cluster and split. The last sizes are rare, and one is missing in cluster 1."""
LABELS = ("stripes", "dots", "plain")
NETWORK = {"name": "DiT-XS/8", "width": 32, "depth": 2, "heads": 2, "patch": 4}
SETTINGS = {
    "data": {"source": "hand-written", "resolution": 16, "shard_rows": 16},
    "clusters": {"count": 2},
    "latents": {"autoencoder": "pixels"},
    "text": {"encoder": "none"},
    "networks": {"default": NETWORK},
    "train": {
        "total_images": 192, "batch_size": 8, "lr": 1e-3, "warmup_images": 32, "log_every": 32, "save_every": 32,
        "sample_every": 0, "sample_count": 0, "workers": 1, "ema": {"short": 50.0, "long": 500.0},
    },
    "router": {"network": NETWORK, "total_images": 96},
    "student": {"block": 24, "total_images": 96},
}  # fmt: skip


def images(cluster: int, split: str, number: int, *, count: int) -> Tensor:
    """Return images (count, 3, H, W) of one size: a wave of the cluster's frequency, and noise."""
    size = SIZES[number]
    generator = torch.Generator().manual_seed(100 * cluster + 10 * number + (split == "train"))
    down, across = torch.meshgrid(torch.arange(size.height), torch.arange(size.width), indexing="ij")
    phase = 6 * torch.rand(count, 3, 1, 1, generator=generator)
    wave = torch.sin((1 + cluster) * (0.3 * down + 0.2 * across) + phase)
    return (0.7 * wave + 0.2 * torch.randn(count, 3, size.height, size.width, generator=generator)).clamp(-1, 1)


def write_shards(run: Path, cluster: int, *, patches: int = 0, flip: bool = False) -> None:
    """Write the shards of a cluster, files of at most 16 images of one size; with `patches` values for each patch."""
    artifact = Artifact(run, layout.shards(cluster))
    artifact.begin(SHARDS, {"cluster": cluster, "patches": patches, "flip": flip})
    for split, counts in ROWS[cluster].items():
        files = 0
        for number, count in enumerate(counts):
            mean = images(cluster, split, number, count=count)
            for first in range(0, count, 16):
                part = mean[first : first + 16]
                ids = [f"{cluster}-{split}-{SIZES[number]}-{first + row}" for row in range(len(part))]
                label = torch.arange(first, first + len(part), dtype=torch.int32) % len(LABELS)
                tensors = {"mean": part.half(), "label": label}
                if patches and split == "train":
                    grid = (len(part), SIZES[number].height // 4, SIZES[number].width // 4, patches)
                    generator = torch.Generator().manual_seed(number)
                    tensors["patches"] = torch.randint(-127, 128, grid, dtype=torch.int8, generator=generator)
                names = [LABELS[int(value)] for value in label]
                columns = {"id": ids, "caption": [None] * len(ids), "label": names, "attributes": [None] * len(ids)}
                table = pa.table({key: pa.array(values, pa.string()) for key, values in columns.items()})
                stem = f"{split}-{files:06d}"
                with artifact.writing(f"{stem}.parquet") as path:
                    pq.write_table(table, path)
                artifact.write_tensors(f"{stem}.safetensors", {k: part.contiguous() for k, part in tensors.items()})
                files += 1
    content = ShardsContent(
        cluster=cluster,
        clusters=len(ROWS),
        rows={split: sum(counts) for split, counts in ROWS[cluster].items()},
        labels=LABELS,
        source="folder",
        fingerprint="hand-written",
        latents=LatentSpec(
            autoencoder="pixels",
            resolution=16,
            shape=(3, SIZES[0].height, SIZES[0].width),
            sizes=tuple((size.height, size.width) for size in SIZES),
        ),
        statistics=ChannelStatistics(mean=(0.1, 0.0, -0.1), std=(0.5, 0.6, 0.5)),
        text=None,
        flip=flip,
        patches=PatchSpec(model="none", weights="0" * 64, grid=4, steps=(0.1,) * patches) if patches else None,
    )
    write_density(artifact, content)
    artifact.commit(content)


def write_sized(run: Path, *, patches: int = 0, flip: bool = False, **changes: dict[str, object]) -> Path:
    """Write a run with its configuration and shards."""
    sections = {*SETTINGS, *changes}
    values = {section: {**SETTINGS.get(section, {}), **changes.get(section, {})} for section in sections}
    run.mkdir(parents=True)
    (run / configuration.CONFIG_FILE).write_text(to_yaml(configuration.resolve(values)))
    for cluster in ROWS:
        write_shards(run, cluster, patches=patches, flip=flip)
    return run
