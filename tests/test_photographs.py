"""Photographs of three ratios from files to images: prepare, train, router, evaluate, report, export and pipeline."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import atoll
from atoll import cli
from atoll.apps.evaluate.feature_sets import reference_features
from atoll.apps.models.pipeline import AtollPipeline
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT, SHARDS
from shapes import write_run

SHAPES = [((60, 40), 40), ((40, 60), 26), ((48, 48), 14)]
"""Width and height of the images, and their number; the buckets of 32² pixels for them are 36x24, 24x36 and 32x32."""
NETWORK = {"name": "DiT-XS/4", "width": 32, "depth": 2, "heads": 2}
TRAIN = {
    "total_images": 64, "batch_size": 8, "warmup_images": 16, "log_every": 32, "save_every": 32, "sample_every": 32,
    "sample_count": 6, "workers": 1,
}  # fmt: skip
EVALUATE = ["--num-images", "14", "--steps", "2", "--num-real", "24", "--extractors", "efficientnet-lite0"]
EVALUATE += ["--diversity", "3", "2", "--num-val", "4", "--num-trajectories", "4", "--routings", "top-1", "nearest"]
EXPECTED = {"36x24", "24x36", "32x32"}


def write_photographs(folder: Path) -> Path:
    """Write JPEG files of the three ratios with two captions each, one of them turned by EXIF."""
    folder.mkdir()
    pixels, lines = np.random.default_rng(0), []
    shapes = [shape for shape, count in SHAPES for _ in range(count)]
    random.Random(0).shuffle(shapes)
    for number, (width, height) in enumerate(shapes):
        low, high = (0, 90) if number % 2 else (120, 255)
        small = Image.fromarray(pixels.integers(low, high, (3, 3, 3), dtype=np.uint8))
        image, exif = small.resize((width, height), Image.Resampling.BICUBIC), Image.Exif()
        if number == 0:
            image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), 6
        image.save(folder / f"{number:03d}.jpg", quality=95, exif=exif)
        captions = [f"photograph {number}", f"{'dark' if number % 2 else 'bright'} photograph {number}"]
        lines.append(json.dumps({"file_name": f"{number:03d}.jpg", "captions": captions}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.slow
def test_photographs_of_three_ratios_from_files_to_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, source = tmp_path / "run", write_photographs(tmp_path / "photographs")
    write_run(
        run, source, data={"buckets": "auto", "flip": True}, clusters={"count": 2},
        features={"resolution": 64, "patch_dimensions": 8}, networks={"default": NETWORK}, train=TRAIN,
        router={"network": NETWORK, "total_images": 32}, student={"total_images": 32, "block": 24},
    )  # fmt: skip
    for worker in range(2):
        assert cli.main(["prepare", str(run), "--worker", f"{worker}/2"]) == 0
    shown = capsys.readouterr().out
    for size, count in (("36x24", 40), ("24x36", 26), ("32x32", 14)):
        assert f"{size} {count} (" in shown
    data = Artifact(run, "data/shards/cluster_000").read(SHARDS)
    assert data.latents.sizes == ((24, 36), (36, 24), (32, 32))
    assert data.text is not None
    assert data.text.captions
    align = ["--train.align.weight", "0.5"]
    for job in (["--expert", "0", *align], ["--expert", "1", *align], ["--router"], ["--monolith"], ["--student"]):
        assert cli.main(["train", str(run), *job]) == 0
    preview = Image.open(run / "experts/000/grids/000000000064.png")
    assert preview.size == (2 * 36, 24 + 36 + 32)  # one row of two images for each size
    assert set(map(tuple, Artifact(run, "experts/000/final").read(EXPERT).latents.sizes)) == {
        (24, 36), (36, 24), (32, 32)
    }  # fmt: skip

    assert cli.main(["evaluate", str(run), *EVALUATE, "--allow-small"]) == 0
    result = json.loads((run / "evaluation/latest.json").read_text())
    assert [model["label"] for model in result["models"]] == [
        "experts top-1", "experts nearest", "monolith", "student",
    ]  # fmt: skip
    for model in result["models"]:
        assert model["metrics"]["efficientnet-lite0"]["frechet"] > 0
        assert model["trajectory"]["refinement"] > 0
    reference = reference_features(run, configuration.load(run), "train", num_real=24, vision="efficientnet-lite0")
    assert len(reference) == 24
    assert cli.main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size > 10_000

    assert cli.main(["export", str(run), str(tmp_path / "export")]) == 0
    # The pipeline needs neither the run nor its data.
    sampler = atoll.load(run)
    assert {str(size) for size in sampler.sizes} == EXPECTED
    made = {
        (width, height): sampler.generate(
            "photograph 3", width=width, height=height, num_inference_steps=2, guidance_scale=3.0, seed=5
        ).latents
        for width, height in ((36, 24), (24, 36))
    }
    shutil.move(run, tmp_path / "elsewhere")
    pipe = AtollPipeline.from_pretrained(tmp_path / "export")
    for (width, height), expected in made.items():
        options = {"width": width, "height": height, "num_inference_steps": 2, "guidance_scale": 3.0, "seed": 5}
        assert torch.equal(pipe("photograph 3", output_type="latent", **options).images, expected)
        assert pipe("photograph 3", **options).images[0].size == (width, height)
