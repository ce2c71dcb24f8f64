"""A saved tiny pipeline, drawn images with captions, and runs with experts on this base."""

import csv
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageDraw

from atoll import cli
from base.tiny import OPTIONS, save
from train.conftest import merge

Copy = Callable[..., Path]
FAMILY = "flux"
"""Packed tokens, positions that depend on the size, a pooled prompt and an embedded guidance."""
KINDS = (("red", "cube"), ("blue", "ball"), ("green", "cross"), ("yellow", "bar"))
WORDS = ("a", "one", "that", "a big")
"""Captions begin with these in turn, so that every cluster has captions in both splits."""
ROUTER = {"name": "DiT-XS/2", "width": 32, "depth": 1, "heads": 2, "patch": 1}
SETTINGS: dict[str, Any] = {
    "data": {"resolution": 64, "val_fraction": 0.2, "chunk": 16},
    "clusters": {"count": 2, "num_fine": 8},
    "features": {"resolution": 64},
    "networks": {"default": {"options": OPTIONS[FAMILY], "lora": {"rank": 4, "alpha": 4}}},
    "train": {
        "total_images": 48, "batch_size": 8, "lr": 1e-3, "warmup_images": 8, "log_every": 16, "save_every": 16,
        "sample_every": 0, "workers": 1,
    },
    "router": {"network": ROUTER, "conditioning": "pooled"},
}  # fmt: skip


def draw(
    folder: Path,
    sizes: tuple[tuple[int, int], ...] = ((64, 64),),
    count: int = 48,
    kinds: tuple[tuple[str, str], ...] = KINDS,
) -> Path:
    """Draw figures of some kinds with captions, in images of some sizes (width, height) in turn."""
    folder.mkdir()
    rng, rows = np.random.default_rng(0), [("file_name", "text")]
    for number in range(count):
        color, kind = kinds[number % len(kinds)]
        image = Image.new("RGB", sizes[number % len(sizes)], "white")
        pen, (x, y) = ImageDraw.Draw(image), map(int, rng.integers(4, 30, 2))
        box = (x, y, x + 24, y + (8 if kind == "bar" else 24))
        if kind == "cross":
            pen.line(box, color, 6)
            pen.line((box[0], box[3], box[2], box[1]), color, 6)
        else:
            (pen.ellipse if kind == "ball" else pen.rectangle)(box, color)
        image.save(folder / f"{number:03d}.png")
        rows.append((f"{number:03d}.png", f"{WORDS[number // 4 % 4]} {color} {kind}"))
    with (folder / "metadata.csv").open("w") as file:
        csv.writer(file).writerows(rows)
    return folder


def write_settings(run: Path, base: Path, images: Path, **changes: Any) -> None:
    run.mkdir(parents=True)
    places = {"data": {"source": str(images)}, "networks": {"default": {"base": str(base)}}}
    (run / "atoll.yaml").write_text(yaml.safe_dump(merge(merge(SETTINGS, places), changes)))


@pytest.fixture(scope="session", autouse=True)
def own_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep traces out of the cache of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline. Tests must not change it."""
    return save(FAMILY, tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images with captions. Tests must not change it."""
    return draw(tmp_path_factory.mktemp("source") / "drawings")


@pytest.fixture(scope="session")
def prepared_base(tmp_path_factory: pytest.TempPathFactory, base: Path, drawings: Path) -> Path:
    """A run on this base with two clusters and every stage done. Tests must not change it."""
    run = tmp_path_factory.mktemp("prepared base") / "run"
    write_settings(run, base, drawings)
    assert cli.main(["prepare", str(run)]) == 0
    return run


@pytest.fixture(scope="session")
def trained_base(tmp_path_factory: pytest.TempPathFactory, prepared_base: Path) -> Path:
    """The same run with two experts and a router. Tests must not change it."""
    run = tmp_path_factory.mktemp("trained base") / "run"
    shutil.copytree(prepared_base, run)
    for job in (["--expert", "0"], ["--expert", "1"], ["--router"]):
        assert cli.main(["train", str(run), *job]) == 0
    return run


@pytest.fixture
def new_run(prepared_base: Path, tmp_path: Path) -> Copy:
    """Return a function that copies the prepared run: `new_run("name", train={"lr": 1})`."""

    def copy(name: str = "run", **changes: Any) -> Path:
        run = tmp_path / name
        shutil.copytree(prepared_base / "data" / "shards", run / "data" / "shards")
        values = merge(yaml.safe_load((prepared_base / "atoll.yaml").read_text()), changes)
        (run / "atoll.yaml").write_text(yaml.safe_dump(values))
        return run

    return copy
