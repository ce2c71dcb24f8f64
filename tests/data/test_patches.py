"""Patch features: their projection to integers, their grid, and what the shards contain."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image
from safetensors.torch import load_file
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from atoll.core.errors import AtollError
from atoll.data.chunks import WorkerShare
from atoll.data.dataset import Shards
from atoll.data.prepare import prepare
from atoll.data.stages.patches import RANGE, Projection, grid_side
from atoll.encoders.vision import _Pooled, open_extractor
from shapes import write_run

ALL = [0, 1, 2]


def test_integers_have_an_error_of_half_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4000, 12, generator=generator) * torch.linspace(5, 0.5, 12) + 3
    fitted = Projection.fit(features.split(300), 8)
    # The exact components, from a singular value decomposition of all rows at once.
    centered = (features.double() - features.double().mean(0)).numpy()
    _, singular, directions = np.linalg.svd(centered, full_matrices=False)
    assert_allclose(fitted.step, singular[:8] / np.sqrt(4000) * RANGE / 127, rtol=1e-5)
    assert_allclose(np.abs(np.diag(directions[:8] @ fitted.directions.numpy())), 1, atol=1e-5)
    exact = centered @ fitted.directions.numpy()
    restored = fitted.encode(features).double().numpy() * fitted.step.numpy()
    inside = np.abs(exact) <= 127 * fitted.step.numpy()
    assert inside.mean() > 0.999
    assert (np.abs(restored - exact)[inside] <= np.broadcast_to(0.501 * fitted.step.numpy(), exact.shape)[inside]).all()
    assert fitted.encode(features).dtype == torch.int8


def test_more_dimensions_than_the_features_have_are_an_error() -> None:
    with pytest.raises(AtollError, match="patch_dimensions is 9, but the features network has 8 values"):
        Projection.fit([torch.randn(20, 8)], 9)


@pytest.mark.parametrize(
    ("side", "stored", "grid"),
    [
        (8, 12 * 8 * 8 * 2 * 2, 4),  # emoji of 64 px: twelve channels, mean and std
        (32, 3 * 32 * 32 * 2, 8),  # pixels of 32 px
        (32, 4 * 32 * 32 * 2 * 2, 16),  # Stable Diffusion's latents of 256 px
        (32, 4 * 32 * 32 * 2, 8),  # the same without std
        (7, 100, 1),
        (2, 16, 1),
    ],
)
def test_the_grid_is_bounded_by_the_bytes_of_the_latents(side: int, stored: int, grid: int) -> None:
    assert grid_side(side, stored, 64) == grid


def test_shards_have_the_patches_of_their_images(with_patches: Path, shapes: Path) -> None:
    """The expected values come from the files of the source."""
    shards, rows = Shards.open(with_patches, ALL), np.array([3, 41, 0, 70])
    batch, spec = shards.read(rows, patches=True), shards.content.patches
    assert spec is not None
    assert (spec.grid, len(spec.steps)) == (8, 64)
    assert batch.patches is not None
    assert batch.patches.shape == (4, 8, 8, 64)
    assert batch.patches[0].nbytes <= 1.1 * batch.mean[0].nbytes
    projection = Projection(**load_file(with_patches / "data/patches/projection.safetensors"))
    extractor = open_extractor("efficientnet-lite0", 64)
    for row, id in enumerate(shards.ids(rows.tolist())):
        image = Image.open(shapes / f"{id}.png").resize((64, 64), Image.Resampling.LANCZOS)
        expected = projection.encode(extractor.symmetric_patches(np.array(image)[None], (8, 8)))[0]
        assert (expected.int() - batch.patches[row].int()).abs().max() <= 1  # rounding depends on the batch size
    assert shards.read(rows).patches is None
    validation = load_file(next((with_patches / "data/shards").rglob("validation-*.safetensors")))
    assert "patches" not in validation


def test_a_mirrored_image_has_the_mirrored_grid(with_patches: Path) -> None:
    shards, rows = Shards.open(with_patches, ALL), np.array([3, 41])
    plain, mirrored = shards.read(rows, patches=True), shards.read(rows, torch.tensor([True, False]), patches=True)
    assert plain.patches is not None
    assert mirrored.patches is not None
    assert torch.equal(mirrored.patches[0], plain.patches[0].flip(1))
    assert torch.equal(mirrored.patches[1], plain.patches[1])
    # It is the grid of the mirror image, which a network that is not equivariant does not give by itself.
    extractor = open_extractor("efficientnet-lite0", 64)
    image = np.random.default_rng(0).integers(0, 255, (1, 4, 4, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    mirror_image = np.ascontiguousarray(image[:, :, ::-1])
    exact = extractor.symmetric_patches(mirror_image, (4, 4))
    assert_allclose(extractor.symmetric_patches(image, (4, 4)).flip(2), exact, atol=1e-5)
    assert (extractor.patches(image, (4, 4)).flip(2) - extractor.patches(mirror_image, (4, 4))).abs().max() > 1


def test_several_workers_give_the_same_shards(with_patches: Path, tmp_path: Path, shapes: Path) -> None:
    run = tmp_path / "run"
    config = write_run(run, shapes, features={"patch_dimensions": 64}, data={"flip": True})
    prepare(run, config, ["ingest", "latents"])
    for index in (1, 2, 0):
        prepare(run, config, ["patches"], worker=WorkerShare(index, 3))
    prepare(run, config)
    for file in [*(with_patches / "data/patches").iterdir(), *(with_patches / "data/shards").rglob("*.*")]:
        assert file.read_bytes() == (run / file.relative_to(with_patches)).read_bytes(), file


def test_patch_tokens_of_a_transformer_are_without_class_and_registers() -> None:
    torch.manual_seed(0)
    config = Dinov2WithRegistersConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, num_register_tokens=4
    )
    network = Dinov2WithRegistersModel(config).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        states, found = network(x).last_hidden_state, _Pooled(network).patches(x)
    assert states.shape == (2, 1 + 4 + 16, 16)
    assert found.shape == (2, 16, 4, 4)
    assert torch.equal(found[:, :, 1, 2], states[:, 5 + 4 * 1 + 2])
