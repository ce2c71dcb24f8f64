"""Buckets in `atoll prepare`: which sizes a run has, and what every stage stores for images of several sizes."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image
from safetensors.torch import load_file

from atoll import cli
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import INGEST, LATENTS
from atoll.core.sizes import Size
from atoll.data.buckets import merge_small, side_multiple
from atoll.data.chunks import select_rows
from atoll.data.index import Index
from atoll.data.prepare import prepare
from atoll.data.stages.patches import Projection
from atoll.encoders.autoencoder import downscaling, latent_shapes, open_codec
from atoll.encoders.vision import open_extractor
from autoencoders import write_autoencoder
from shapes import chunk_files, write_run

SHAPES = {"wide": (60, 40), "tall": (40, 60), "square": (50, 50)}
COUNT = 60


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three ratios in turn, and one that is too small for its bucket."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = random.Random(0)
    for number in range(COUNT):
        name, (width, height) = list(SHAPES.items())[number % 3]
        # Random blocks, so that no two images are equal.
        blocks = Image.frombytes("RGB", (width // 10, height // 10), rng.randbytes(width * height * 3 // 100))
        blocks.resize((width, height), Image.Resampling.NEAREST).save(folder / f"{number:03d}-{name}.png")
    Image.new("RGB", (15, 10), "red").save(folder / "tiny.png")
    return folder


SETTINGS = {
    "data": {"buckets": "auto", "max_rejects": 0.05},
    "text": {"encoder": "none"},
    "clusters": {"count": 2},
    "networks": {"default": "DiT-XS/4"},
    "router": {"network": "DiT-XS/4"},
    "student": {"network": "DiT-XS/4"},
}


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory, photographs: Path) -> Path:
    """A run in pixel space with patch features and flips. Tests must not change it."""
    folder = tmp_path_factory.mktemp("buckets")
    changes = {**SETTINGS, "features": {"patch_dimensions": 8}, "data": {**SETTINGS["data"], "flip": True}}
    prepare(folder / "run", write_run(folder / "run", photographs, **changes))
    return folder / "run"


def rows_of(run: Path) -> list[tuple[int, int, str, Size]]:
    """Chunk, row in the chunk, id and size of every image of the index."""
    index = Index.open(run)
    return [
        (chunk, row, id, size)
        for chunk in range(len(index.lengths))
        for row, (id, size) in enumerate(zip(index.read(chunk, ["id"])["id"], index.sizes(chunk), strict=True))
    ]


def expected(photographs: Path, id: str, size: Size) -> np.ndarray:
    """The image as Pillow resizes it; its ratio is that of the size, so nothing is cropped."""
    return np.array(Image.open(photographs / f"{id}.png").resize((size.width, size.height), Image.Resampling.LANCZOS))


def test_each_image_has_the_size_of_its_ratio(buckets: Path) -> None:
    found = {name: {size for _, _, id, size in rows_of(buckets) if name in id} for name in SHAPES}
    assert found == {"wide": {Size(24, 36)}, "tall": {Size(36, 24)}, "square": {Size(32, 32)}}
    content = Artifact(buckets, "data/ingest").read(INGEST)
    assert {name: (own.images, own.cropped) for name, own in content.sizes.items()} == {
        "36x24": (20, 0.0), "32x32": (20, 0.0), "24x36": (20, 0.0),
    }  # fmt: skip
    rejected = (buckets / "data/ingest/rejected.txt").read_text()
    assert rejected.startswith(
        "tiny.png\t15x10 pixels are too few for 36x24: they would be enlarged by more than data.max"
    )
    assert rejected.count("\n") == 1
    assert json.loads((buckets / "data/ingest/listing.json").read_text())["sizes"] == ["32x32", "24x36", "36x24"]


def test_latents_have_the_pixels_of_their_size(buckets: Path, photographs: Path) -> None:
    index, codec = Index.open(buckets), open_codec("pixels")
    for chunk, row, id, size in rows_of(buckets):
        stored = load_file(chunk_files(buckets, "latents")[chunk])
        mean = select_rows({k: v for k, v in stored.items() if "mean" in k}, index.sizes(chunk), [row])["mean"][0]
        assert torch.equal(mean, codec.encode(expected(photographs, id, size)[None])["mean"][0].half())
    content = Artifact(buckets, "data/latents").read(LATENTS)
    train = list(index.train_sizes())
    assert content.shape == (3, train[0].height, train[0].width)
    assert content.shapes == {str(size): (3, size.height, size.width) for size in train}


def test_statistics_are_those_of_all_pixels_of_the_training_images(buckets: Path, photographs: Path) -> None:
    splits = {row["id"]: row["split"] for row in pq.read_table(buckets / "data/ingest/images.parquet").to_pylist()}
    pixels = [
        expected(photographs, id, size).reshape(-1, 3) / 127.5 - 1
        for _, _, id, size in rows_of(buckets)
        if splits[id] == "train"
    ]
    values = torch.from_numpy(np.concatenate(pixels)).half().double()
    found = Artifact(buckets, "data/latents").read(LATENTS).statistics
    assert_allclose(found.mean, values.mean(0), atol=1e-6)
    assert_allclose(found.std, values.std(0, correction=0), rtol=1e-6)


def test_patches_have_the_ratio_of_the_bucket(buckets: Path, photographs: Path) -> None:
    """Grids have patches of 2 x 2 latents; the network gets about 64² pixels in multiples of its stride."""
    extractor = open_extractor("efficientnet-lite0", 64)
    projection = Projection(**load_file(buckets / "data/patches/projection.safetensors"))
    grids, index = {Size(24, 36): (12, 18), Size(36, 24): (18, 12), Size(32, 32): (16, 16)}, Index.open(buckets)
    inputs = {Size(24, 36): Size(48, 80), Size(36, 24): Size(80, 48), Size(32, 32): Size(64, 64)}
    for chunk, row, id, size in rows_of(buckets)[:6]:
        stored = load_file(chunk_files(buckets, "patches")[chunk])
        patches = select_rows(stored, index.sizes(chunk), [row])["patches"][0]
        assert patches.shape == (*grids[size], 8)
        pixels = expected(photographs, id, inputs[size])[None]
        wanted = projection.encode(extractor.symmetric_patches(pixels, grids[size]))[0]
        assert (wanted.int() - patches.int()).abs().max() <= 1  # rounding depends on the batch size


def test_there_is_a_contact_sheet_for_each_size(buckets: Path) -> None:
    """Thumbnails have the ratio of their size and a longer side of 32 pixels, 4 pixels apart."""
    for size, (width, height) in {"36x24": (32, 21), "24x36": (21, 32), "32x32": (32, 32)}.items():
        page = np.asarray(Image.open(buckets / f"data/clusters/size_{size}.png"))
        inked = np.argwhere((page[: height + 8, : width + 8] != 255).any(2))
        assert tuple(inked.min(0)) == (4, 4)
        assert tuple(inked.max(0)) == (height + 3, width + 3)
        lefts, tops = range(4, page.shape[1], width + 4), range(4, len(page), height + 4)
        cells = [page[top : top + height, left : left + width] for top in tops for left in lefts]
        assert sum((cell != 255).any() for cell in cells) == Index.open(buckets).content.sizes[size].images


@pytest.mark.parametrize("workers", [2, 5])
def test_several_workers_give_the_same_bytes(buckets: Path, photographs: Path, tmp_path: Path, workers: int) -> None:
    run = tmp_path / "run"
    changes = {**SETTINGS, "features": {"patch_dimensions": 8}, "data": {**SETTINGS["data"], "flip": True}}
    write_run(run, photographs, **changes)
    for index in reversed(range(workers)):
        assert cli.main(["prepare", str(run), "--worker", f"{index}/{workers}"]) == 0
    names = [path.relative_to(buckets) for path in (buckets / "data").rglob("*") if path.is_file()]
    assert len(names) > 30
    assert [name for name in names if (run / name).read_bytes() != (buckets / name).read_bytes()] == []


def test_an_autoencoder_gives_latents_of_several_shapes(photographs: Path, tmp_path: Path) -> None:
    vae = write_autoencoder(tmp_path / "vae")
    assert downscaling(str(vae)) == 2
    changes = {**SETTINGS, "latents": {"autoencoder": str(vae), "dtype": "float32"}, "clusters": {"count": 1}}
    config = write_run(tmp_path / "run", photographs, **changes)
    assert side_multiple(config, 2) == 8
    prepare(tmp_path / "run", config, ["ingest", "latents"])
    sizes = Artifact(tmp_path / "run", "data/ingest").read(INGEST).sizes
    assert all(Size.parse(name).width % 8 == Size.parse(name).height % 8 == 0 for name in sizes)
    codec, index = open_codec(str(vae)), Index.open(tmp_path / "run")
    seen = set()
    for chunk, row, id, size in rows_of(tmp_path / "run")[:8]:
        stored = load_file(chunk_files(tmp_path / "run", "latents")[chunk])
        own = {name: value for name, value in stored.items() if "/" in name}
        mean = select_rows(own, index.sizes(chunk), [row])["mean"][0]
        assert mean.shape == latent_shapes(str(vae), size)["mean"] == (4, size.height // 2, size.width // 2)
        if "square" in id:
            assert_allclose(mean, codec.encode(expected(photographs, id, size)[None])["mean"][0], atol=1e-3)
        seen.add(size)
    assert len(seen) > 1


def test_a_list_of_sizes_is_taken_as_it_is(photographs: Path, tmp_path: Path) -> None:
    data = {**SETTINGS["data"], "buckets": ["32x32", "44x28"]}
    config = write_run(tmp_path / "run", photographs, **{**SETTINGS, "data": data})
    prepare(tmp_path / "run", config, ["ingest"])
    assert Artifact(tmp_path / "run", "data/ingest").read(INGEST).sizes.keys() == {"32x32", "44x28"}
    with pytest.raises(AtollError, match="data/ingest is stale: buckets was"):
        prepare(tmp_path / "run", write_run(tmp_path / "other", photographs, **SETTINGS), ["ingest"])
    wrong = {**SETTINGS, "data": {**data, "buckets": ["30x32"]}}
    with pytest.raises(AtollError, match="the sides of 30x32 are not multiples of 4"):
        prepare(tmp_path / "wrong", write_run(tmp_path / "wrong", photographs, **wrong), ["ingest"])


def test_small_buckets_are_merged_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(250):
        size = (60, 40) if number == 7 else (48, 48) if number % 2 else (40, 60)
        Image.new("RGB", size, (number, 0, 0)).save(source / f"{number:03d}.png")
    prepare(tmp_path / "run", write_run(tmp_path / "run", source, **SETTINGS), ["ingest"])
    shown = capsys.readouterr().out
    assert "buckets: 2 sizes; fewer than 1% of 250 sampled images are nearest to these" in shown
    assert "36x24 (1)" in shown
    assert "24x36 125 (0.0%), 32x32 125 (0.3%)" in shown


def test_merging_takes_the_smallest_first() -> None:
    square, wide, wider = Size(8, 8), Size(8, 10), Size(8, 12)
    shapes = [(8, 8)] * 990 + [(10, 8)] * 6 + [(12, 8)] * 4
    kept, left_out = merge_small((square, wide, wider), shapes)
    assert kept == (square, wide), "the images of the widest go to the wide one, which is then large enough"
    assert left_out == {wider: 4}
    assert merge_small((square, wide), []) == ((square,), {})


def test_patches_of_all_networks_divide_the_sides() -> None:
    config = configuration.resolve(
        {"networks": {"default": "DiT-XS/2", 1: {"_class_name": "UNetExpert"}, 2: {"_class_name": "PixArtExpert"}}}
    )
    assert side_multiple(config, 3) == 3 * 8
    # The student has the default network.
    three = {"name": "DiT-XS/4", "patch": 3}
    assert side_multiple(configuration.resolve({"networks": {"default": three}, "router": {"network": three}}), 1) == 3
