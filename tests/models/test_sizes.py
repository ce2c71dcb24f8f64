"""The pipeline and the model card of a run whose images have five sizes."""

from pathlib import Path

import pytest
import torch

import atoll
from atoll.apps.models.export import export
from atoll.apps.models.pipeline import AtollPipeline
from atoll.core.errors import AtollError


@pytest.fixture(scope="module")
def folder(sized_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sized") / "export"
    export(sized_run, target)
    return target


def test_width_and_height_give_the_images_of_the_run(folder: Path, sized_run: Path) -> None:
    pipe = AtollPipeline.from_pretrained(folder)
    for routing in ("top-1", "nearest"):
        options = {"label": "dots", "routing": routing, "seed": 3}
        made = pipe(num_inference_steps=3, width=20, height=12, output_type="latent", **options).images
        expected = atoll.load(sized_run).generate(
            label="dots", width=20, height=12, num_inference_steps=3, guidance_scale=4.0, routing=routing, seed=3
        )
        assert torch.equal(made, expected.latents)
        assert pipe(num_inference_steps=1, **options).images[0].size == (16, 16)
    with pytest.raises(AtollError, match="both width and height"):
        pipe(width=20)
    with pytest.raises(AtollError, match="multiples of 4"):
        pipe(width=18, height=12)


def test_the_card_lists_the_sizes(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert "images of 16x16, 20x12, 12x20, 24x8, 8x24 pixels (width x height)" in card
    assert "- Latent shape: 3x16x16 (channels, height, width) by default" in card
