"""docs/reference/shards.md is enough to write shards: this module writes them by the page's rules, without Atoll."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file

SIZES = [(8, 12), (8, 8), (12, 4)]
"""Height and width; the first is the most frequent one."""
LABELS = ["dark", "bright"]
STATISTICS = {"data_mean": None, "data_std": None, "mean": [0.0] * 3, "std": [0.5] * 3}
MAX_TOKENS, WIDTH, POOLED = 4, 6, 5


def write_cluster(folder: Path, cluster: int, rows: dict[str, list[list[int]]], *, several: bool) -> None:
    """Write a cluster with some images in each file, by split and size; with `several` sizes and captions."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(cluster)
    for split, by_size in rows.items():
        number = 0
        for size, files in zip(SIZES, by_size, strict=True):
            for count in files:
                stem = folder / f"{split}-{number:06d}"
                ids = [f"{cluster}-{split}-{number}-{row}" for row in range(count)]
                write_file(stem, ids, rng=rng, size=size, several=several)
                number += 1
    write_density(folder, several=several)
    write_manifest(folder, cluster, {split: sum(map(sum, rows[split])) for split in rows}, several=several)


def write_density(folder: Path, *, several: bool) -> None:
    """Write the Gaussians of latents and captions, with three directions, and the counts of the classes."""
    files = [load_file(file) for file in sorted(folder.glob("train-*.safetensors"))]
    tensors: dict[str, Any] = {}
    for size in SIZES if several else SIZES[:1]:
        latents = [
            part["mean"].reshape(len(part["mean"]), -1) / 0.5 for part in files if part["mean"].shape[2:] == size
        ]
        prefix = "" if size == SIZES[0] else f"{size[1]}x{size[0]}."
        # A size without images has the statistics of noise here; `atoll prepare` resizes the images of other sizes.
        rows = np.concatenate(latents) if latents else np.random.default_rng(0).normal(size=(16, 3 * size[0] * size[1]))
        tensors |= {prefix + name: part for name, part in gaussian(rows, max(1, sum(map(len, latents)))).items()}
    firsts = [np.cumsum(part["captions"]) - part["captions"] if several else slice(None) for part in files]
    pooled = np.concatenate([part["pooled"][first] for part, first in zip(files, firsts, strict=True)])
    tensors |= {f"caption.{name}": part for name, part in gaussian(pooled, 1).items()}
    label = np.concatenate([part["label"] for part in files])
    tensors["classes"] = np.bincount(label[label >= 0], minlength=len(LABELS))
    save_file({name: np.asarray(part, np.float32) for name, part in tensors.items()}, folder / "cluster.safetensors")


def gaussian(rows: Any, count: int) -> dict[str, Any]:
    rows = rows.astype(np.float64)
    _, values, directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    variances = values**2 / len(rows)
    rest = variances[3:].sum() / (rows.shape[1] - 3)
    return {
        "mean": rows.mean(0), "directions": directions[:3], "variances": variances[:3] - rest,
        "rest": rest, "count": count,
    }  # fmt: skip


def write_file(stem: Path, ids: list[str], *, rng: np.random.Generator, size: tuple[int, int], several: bool) -> None:
    counts = rng.integers(1, 4, len(ids)) if several else np.ones(len(ids), int)
    lengths = rng.integers(1, MAX_TOKENS + 1, counts.sum())
    label = rng.integers(-1, 2, len(ids))
    pixels = rng.uniform(-1, 1, (len(ids), 3, *size))
    tensors = {
        "mean": pixels.astype(np.float16),
        "label": label.astype(np.int32),
        "tokens": rng.normal(size=(lengths.sum(), WIDTH)).astype(np.float16),
        "lengths": lengths.astype(np.int32),
        "pooled": rng.normal(size=(len(lengths), POOLED)).astype(np.float16),
    }
    captions = [[f"caption {k} of {id}" for k in range(count)] for id, count in zip(ids, counts, strict=True)]
    columns: dict[str, Any] = {
        "id": pa.array(ids, pa.string()),
        "caption": pa.array([own[0] for own in captions], pa.string()),
        "label": pa.array([None if index < 0 else LABELS[index] for index in label], pa.string()),
        "attributes": pa.array(["{}"] * len(ids), pa.string()),
    }
    if several:
        tensors["captions"] = counts.astype(np.int32)
        tensors["weights"] = rng.uniform(0.5, 2, len(lengths)).astype(np.float32)
        columns["captions"] = pa.array(captions, pa.list_(pa.string()))
    save_file(tensors, stem.with_suffix(".safetensors"))
    pq.write_table(pa.table(columns), stem.with_suffix(".parquet"))


def write_manifest(folder: Path, cluster: int, rows: dict[str, int], *, several: bool) -> None:
    text = {"encoder": "minilm", "weights": None, "max_tokens": MAX_TOKENS, "dimensions": WIDTH, "pooled": POOLED}
    latents = {"autoencoder": "pixels", "weights": None, "resolution": 8, "shape": [3, *SIZES[0]]}
    content = {
        "cluster": cluster, "clusters": 2, "rows": rows, "labels": LABELS, "source": "made by a test",
        "fingerprint": "1", "statistics": STATISTICS, "flip": True, "patches": None,
        "latents": {**latents, "sizes": SIZES if several else None},
        "text": {**text, "captions": several, "base": None},
    }  # fmt: skip
    files = {
        file.name: {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size": file.stat().st_size}
        for file in folder.iterdir()
    }
    head = {"format": 1, "kind": "shards", "version": 1, "made_from": {"program": "a test"}}
    value = {**head, "content": content, "files": files}
    data = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(data, encoding="utf-8")


ONE = {"train": [[20, 13], [], []], "validation": [[5], [], []]}
SEVERAL = [
    {"train": [[20, 9], [14], [7]], "validation": [[5], [3], []]},
    {"train": [[16], [], [11]], "validation": [[4], [], [2]]},
]


def write_run(run: Path, *, several: bool) -> Path:
    for cluster in range(2):
        rows = SEVERAL[cluster] if several else ONE
        write_cluster(run / "data" / "shards" / f"cluster_{cluster:03d}", cluster, rows, several=several)
    settings = {
        "data": {"flip": True},
        "clusters": {"count": 2},
        "latents": {"autoencoder": "pixels"},
        "networks": {"default": {"name": "DiT-XS/4", "width": 32, "depth": 1, "heads": 2}},
        "train": {"total_images": 48, "batch_size": 8, "conditioning": "both", "sample_every": 0, "workers": 1},
    }
    (run / "atoll.yaml").write_text(json.dumps(settings))
    return run


@pytest.mark.parametrize("several", [False, True])
def test_an_expert_trains_on_shards_that_the_page_describes(tmp_path: Path, several: bool) -> None:
    from atoll.core.artifacts import Artifact
    from atoll.core.config import load
    from atoll.core.manifests import EXPERT, SHARDS
    from atoll.data.dataset import Shards
    from atoll.data.density import fit_density
    from atoll.experts.run import expert_of_run
    from atoll.train.job import train_job
    from atoll.train.spec import resolve_job
    from atoll.verify.untrusted import strict_manifest

    run = write_run(tmp_path / "run", several=several)
    for cluster in range(2):
        manifest = run / "data" / "shards" / f"cluster_{cluster:03d}" / "manifest.json"
        # The bytes are those that Atoll itself would write for these values.
        parsed = strict_manifest(manifest.read_bytes(), "the manifest")
        content = SHARDS.parse(parsed, manifest)
        assert json.loads(manifest.read_text())["content"] == json.loads(content.model_dump_json())
    shards = Shards.open(run, [0, 1], verify=True)
    assert len(shards) == sum(sum(map(sum, rows["train"])) for rows in (SEVERAL if several else [ONE, ONE]))
    train_job(resolve_job(run, load(run), "expert", expert=1))
    found = Artifact(run, "experts/001/final").read(EXPERT, verify=True)
    assert found.compute is not None
    assert found.compute.images == 48
    assert found.validation_loss is not None
    assert np.isfinite(found.validation_loss)
    assert found.latents.sizes == (tuple(SIZES) if several else None)
    # Its density is the one of the shards, for the same sizes and conditions as the one that Atoll fits to them.
    density, fitted = expert_of_run(run, "experts/001").density, fit_density(Shards.open(run, [1]))
    assert density is not None
    assert fitted is not None
    assert density.tensors().keys() == fitted.tensors().keys()
    assert density.images == fitted.images
    assert density.classes is not None
    assert torch.equal(density.classes, fitted.classes)
    torch.testing.assert_close(density.caption.mean, fitted.caption.mean, atol=1e-3, rtol=1e-3)


def test_the_page_names_every_tensor_column_and_field() -> None:
    """What the writer of `atoll prepare` and the manifests have is on the page."""
    from atoll.core.manifests import LatentSpec, ShardsContent, TextSpec

    page = (Path(__file__).parents[2] / "docs/reference/shards.md").read_text(encoding="utf-8")
    fields = {name for kind in (ShardsContent, LatentSpec, TextSpec) for name in kind.model_fields}
    tensors = {"mean", "std", "mean_mirrored", "std_mirrored", "tokens", "lengths", "pooled", "captions", "weights"}
    density = {"directions", "variances", "rest", "count", "classes", "cluster.safetensors"}
    names = fields | tensors | density | {"id", "caption", "attributes"}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
