"""Sampling and evaluation on two processes give the bits of one process."""

import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from atoll import cli
from atoll.apps.evaluate import feature_sets as features
from atoll.apps.evaluate import generated
from evaluate.test_evaluate import SMALL
from train.ranks import log, run_ranks

SAMPLE = ["a red circle", "a blue square", "--num-images", "10", "--batch-size", "4", "--steps", "3", "--save-routing"]
"""Three batches: two for the first process, one for the second."""
EVALUATE = [*SMALL, "--models", "experts", "--without", "diagnostics", "trajectories"]


def small_chunks(run: Path, rank: int) -> None:
    """Divide the sets of the evaluation into three chunks instead of one."""
    del run, rank
    generated.CHUNK = features.CHUNK = 4


def images(run: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)) for path in (run / "samples").glob("*.png")}


def test_two_processes_give_the_images_of_one(trained: Path, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    for run in (alone, both):
        shutil.copytree(trained, run, ignore=shutil.ignore_patterns("evaluation", "samples"))
    # Each verb has processes of its own, as under torchrun. In the same ones, a fast rank could connect to the store of
    # the first verb while that closes.
    for verb, arguments in (("sample", SAMPLE), ("evaluate", EVALUATE)):
        assert run_ranks(both, *arguments, verb=verb, hook=small_chunks) == [0, 0], log(both, 1).read_text()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the two processes: kernels divide sums by the number of threads
    chunk = generated.CHUNK
    try:
        small_chunks(alone, 0)
        assert cli.main(["sample", str(alone), *SAMPLE]) == 0
        assert cli.main(["evaluate", str(alone), *EVALUATE]) == 0
    finally:
        torch.set_num_threads(threads)
        generated.CHUNK = features.CHUNK = chunk
    expected = images(alone)
    assert len(expected) == 12
    assert expected.keys() == images(both).keys()
    for name, pixels in images(both).items():
        assert np.array_equal(pixels, expected[name]), name
    sets = [sorted((run / "evaluation" / "generated").rglob("0*.safetensors")) for run in (alone, both)]
    assert len(sets[0]) == len(sets[1]) >= 3
    for one, two in zip(*sets, strict=True):
        assert one.relative_to(alone) == two.relative_to(both)
        assert torch.equal(*(load_file(file)["images"] for file in (one, two)))
    latest = [(run / "evaluation" / "latest.json").is_file() for run in (alone, both)]
    assert latest == [True, True]
