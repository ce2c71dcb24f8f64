"""Evaluation and report of a run whose images have five sizes: every image has the size of the real one."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.apps.evaluate.evaluation import evaluate
from atoll.apps.evaluate.generated import Prompts, generate, prompts_of, rows_by_size
from atoll.apps.evaluate.models import EvaluatedModel
from atoll.apps.evaluate.options import EvaluationOptions
from atoll.apps.report.gallery import Gallery, choose_examples
from atoll.core import config as configuration
from atoll.core.distributed import DistContext
from atoll.core.options import LoadOptions
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.shapes import DataShapes
from atoll.ensemble import SampleSettings
from atoll.experts.cost import image_cost
from sized import LABELS, SIZES

ALONE = DistContext(0, 1, torch.device("cpu"))
QUICK = SampleSettings(steps=2, guidance_scale=2.0)


@pytest.fixture
def run(sized_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(sized_run, tmp_path / "run")
    return tmp_path / "run"


def made(run: Path, prompts: Prompts, model: str = "experts", *, batch_size: int = 64) -> list[np.ndarray]:
    evaluated = EvaluatedModel(run, model, "top-1" if model == "experts" else None)
    images = generate(
        evaluated, prompts, QUICK, purpose="test", batch_size=batch_size, load=LoadOptions(), processes=ALONE
    )
    return [image for chunk in images.chunks() for image in chunk]


def test_prompts_have_the_sizes_of_their_images(sized_run: Path) -> None:
    prompts = prompts_of(sized_run, 2, 60)
    assert prompts.sizes is not None
    assert prompts.labels is not None
    real = set()
    for cluster in range(2):
        shards = Shards.open(sized_run, [cluster], "validation")
        for size, own in shards.by_size(np.arange(len(shards))).items():
            real |= {(cluster, str(size), label) for label in shards.read(own).label.tolist()}
    assert set(zip(prompts.clusters, prompts.sizes, prompts.labels, strict=True)) <= real
    assert len(set(prompts.sizes)) == 5
    assert sorted(row for rows in prompts.by_size().values() for row in rows) == list(range(60))


def test_generated_images_have_the_sizes_of_their_prompts_and_noise_of_their_own(run: Path) -> None:
    prompts = prompts_of(run, 2, 14)
    images = made(run, prompts)
    assert [f"{image.shape[1]}x{image.shape[0]}" for image in images] == prompts.sizes
    again = made(run, prompts, batch_size=3)
    assert all(np.array_equal(a, b) for a, b in zip(images, again, strict=True)), "the stored set is opened"
    # Equal prompts of one size at two positions differ, because their noise does.
    twice = Prompts(None, [0, 0, 0], [0, 0, 0], ["20x12", "16x16", "20x12"])
    first, _, third = made(run, twice, "monolith")
    assert not np.array_equal(first, third)


def test_rows_of_several_sizes_come_back_in_order() -> None:
    images = [np.full((size.height, size.width, 3), number, np.uint8) for number, size in enumerate(3 * SIZES)]
    calls: list[tuple[int, ...]] = []

    def compute(pixels: np.ndarray, rows: list[int]) -> torch.Tensor:
        calls.append(pixels.shape)
        assert [int(image[0, 0, 0]) for image in pixels] == rows
        return torch.tensor(rows)[:, None]

    assert rows_by_size(compute, images)[:, 0].tolist() == list(range(15))
    assert len(calls) == 5


@pytest.mark.slow
def test_the_whole_evaluation(run: Path) -> None:
    options = EvaluationOptions(
        num_images=10, routings=("top-1", "nearest"), steps=(QUICK.steps,),
        guidance_scale=QUICK.guidance_scale, extractors=("efficientnet-lite0",),
        diversity=(3, 2), num_val=4, num_trajectories=6, without=("metrics",),
    )  # fmt: skip
    result = evaluate(run, configuration.load(run), options)
    assert result is not None
    assert [model.label for model in result.models] == ["experts top-1", "experts nearest", "monolith"]
    for model in result.models:
        assert model.trajectory is not None
        assert model.trajectory.num_trajectories == 6
        assert model.diversity is not None
    assert len(result.models[0].trajectory.t) == QUICK.steps
    assert result.diagnostics is not None


def test_the_flops_of_sampling_are_those_of_the_mean_image(sized_run: Path) -> None:
    model = EvaluatedModel(sized_run, "monolith")
    content = model._contents()[0]
    sizes = {SIZES[0]: 3, SIZES[3]: 1}
    each = [image_cost(content.network, DataShapes.of(content).of_size(size)).forward_flops for size in sizes]
    assert each[0] != each[1]
    cost = model.sampling(QUICK, 1.0, sizes)
    assert cost.flops == cost.network_evaluations * ((3 * each[0] + each[1]) // 4)


def test_the_gallery_shows_images_of_the_sizes_of_the_real_ones(run: Path) -> None:
    examples = choose_examples(run, 2, ())
    gallery = Gallery(examples, QUICK)
    for model in (EvaluatedModel(run, "experts", "full"), EvaluatedModel(run, "expert:1")):
        row = gallery.row(model)
        assert [image.size for image in row.images] == [example.real.size for example in examples if example.real]
    assert gallery.row(EvaluatedModel(run, "experts", "full")).probabilities.shape[1] == len(examples)
    given = choose_examples(run, 2, [LABELS[0]])
    assert given[0].size == str(Size(16, 16))
