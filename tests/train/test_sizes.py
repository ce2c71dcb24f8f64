"""Training on images of five sizes: batches of one size, exact resume, several processes, and the costs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll import flow
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.distributed import DistContext
from atoll.core.sizes import Size
from atoll.data.shapes import DataShapes
from atoll.experts.cost import image_cost
from atoll.experts.expert import DeviceOptions, condition_of, open_expert
from atoll.experts.run import expert_of_run
from atoll.train.distill import StudentTask
from atoll.train.estimate import JobCosts, job_bytes
from atoll.train.job import build_task, train_job
from atoll.train.loop import Requeue
from atoll.train.merge import merge
from atoll.train.spec import TrainSpec, resolve_job
from sized import NETWORK, ROWS, SETTINGS, SIZES, write_sized
from train.ranks import log, no_hook, run_ranks
from train.workers import assert_same_weights, metrics, weights

Sized = Callable[..., Path]
TRAIN = SETTINGS["train"]
ALONE = DistContext(0, 1, torch.device("cpu"))


@pytest.fixture
def sized(tmp_path: Path) -> Sized:
    """Return a function that writes a run: `sized("name", train={"lr": 1})`."""
    return lambda name="run", **options: write_sized(tmp_path / name, **options)


def resolve(run: Path, kind: str = "expert", expert: int = 0, **overrides: str) -> TrainSpec:
    config = configuration.load(run, {key.replace("__", "."): value for key, value in overrides.items()})
    return resolve_job(run, config, kind, expert=expert if kind == "expert" else None)


class Stop:
    """Stops a job after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, images: int) -> bool:
        del images
        self.steps -= 1
        return self.steps == 0

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        del checkpoint


def test_every_batch_has_one_size_and_all_sizes_are_seen(sized: Sized) -> None:
    task = build_task(resolve(sized(), "monolith", train__grad_accum_steps="2"))
    stream = task.stream(0, replace(ALONE, size=2))
    seen: dict[Size, int] = {}
    for _ in range(40):
        first, second = next(stream), next(stream)
        assert first.noised.input.shape == second.noised.input.shape, "micro-batches of a step"
        assert len(first.index) == 2
        size = Size(*first.noised.input.shape[2:])
        seen[size] = seen.get(size, 0) + 8
    assert seen == task.shards.size_counts(320, task.seed, batch_size=8)
    assert list(task.shards.image_counts()) == SIZES
    assert all(seen[size] > 0 for size in SIZES)


@pytest.mark.parametrize("kind", ["expert", pytest.param("router", marks=pytest.mark.slow)])
def test_an_interrupted_job_resumes_to_the_same_bits(sized: Sized, kind: str) -> None:
    """With flips and gradient accumulation, stopped after 4, 2 and 3 of 12 steps."""
    train = {**TRAIN, "total_images": 96, "grad_accum_steps": 2, "workers": 2, "save_every": 24, "log_every": 8}
    options = {"flip": True, "train": train}
    straight, broken = sized("straight", **options), sized("broken", **options)
    job = "experts/000" if kind == "expert" else "router"
    train_job(resolve(straight, kind))
    for steps in (4, 2, 3):
        with pytest.raises(Requeue):
            train_job(resolve(broken, kind), Stop(steps))
    train_job(resolve(broken, kind))
    assert_same_weights(straight / job / "final", broken / job / "final")
    first, second = ([line["loss"] for line in metrics(run, job)] for run in (straight, broken))
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_equal_one(sized: Sized, parallel: str) -> None:
    alone, two = sized("alone"), sized("two", train={**TRAIN, "parallel": parallel})
    train_job(resolve(alone))
    assert run_ranks(two, "--expert", "0", hook=no_hook) == [0, 0], log(two, 0).read_text()[-2000:]
    one, both = ([line["loss"] for line in metrics(run, "experts/000")] for run in (alone, two))
    assert both == pytest.approx(one, rel=1e-4)
    first, second = (weights(run / "experts/000/final") for run in (alone, two))
    for key in first:
        assert (first[key] - second[key]).abs().max() < 2e-4, key
    losses = [json.loads((run / "experts/000/final/manifest.json").read_text())["content"]["validation_loss"]
              for run in (alone, two)]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_flops_are_those_of_the_sizes_that_were_seen(sized: Sized) -> None:
    run = sized()
    spec = resolve(run, train__optimizer="muon")
    train_job(spec)
    task = build_task(spec)
    seen = task.shards.size_counts(192, task.seed, batch_size=8)
    assert len(seen) == 5
    assert sum(seen.values()) == 192
    # Images times (3 · forward + the share of Muon), by size.
    expected = 0
    for size, images in seen.items():
        cost = image_cost(spec.network, spec.shapes.of_size(size))
        expected += images * (3 * cost.forward_flops + cost.muon_flops // 8)
    compute = json.loads((run / "experts/000/final/manifest.json").read_text())["content"]["compute"]
    assert compute["flops"] == expected
    assert expected != 192 * image_cost(spec.network, spec.shapes.of_size(SIZES[0])).training_flops(spec.settings)


def test_estimates_have_the_mean_flops_and_the_memory_of_the_largest_size(sized: Sized) -> None:
    spec = resolve(sized())
    counts = ROWS[0]["train"]
    flops = [image_cost(spec.network, spec.shapes.of_size(size)).forward_flops for size in SIZES]
    mean = sum(count * each for count, each in zip(counts, flops, strict=True)) // sum(counts)
    assert JobCosts.of(spec).forward_flops_per_image == mean
    largest = max(SIZES, key=lambda size: size.area)
    both = [job_bytes(spec.network, shapes, spec.settings, device=torch.device("cuda"), objective=spec.objective)
            for shapes in (spec.shapes, spec.shapes.of_size(largest))]  # fmt: skip
    assert both[0] == both[1]
    assert spec.network.size == 16


@pytest.mark.parametrize(("size", "side"), [((16, 16), 16), ((12, 20), 16), ((8, 24), 16), ((96, 64), 64)])
def test_positions_of_a_size_that_is_not_square_are_those_of_a_square_of_its_area(
    size: tuple[int, int], side: int
) -> None:
    assert DataShapes((3, *size), None, ()).side == side


@pytest.mark.slow
def test_the_student_regresses_the_teachers_of_every_size(sized: Sized) -> None:
    run = sized()
    for expert in range(2):
        train_job(resolve(run, expert=expert))
    spec = resolve(run, "student")
    task = build_task(spec)
    assert isinstance(task, StudentTask)
    seen = set()
    for step in range(12):
        positions = np.arange(8 * step, 8 * (step + 1), dtype=np.uint64)
        targets = task._targets(8 * step, 8)
        numbers = task.shards.order(positions, task.seed, 8)
        for row, number in enumerate(numbers):
            batch = task.shards.read(np.array([number]))
            teacher = open_expert(
                expert_of_run(run, f"experts/{int(batch.cluster):03d}"), task.shards.statistics, DeviceOptions()
            )
            x0 = task.shards.latents(batch, seed=task.seed, position=8 * step + row)
            noised = flow.Objective().corrupt(x0, seed=task.seed, position=8 * step + row)
            with torch.no_grad():
                expected = teacher.velocity(noised.input, noised.t, condition_of(batch, teacher.conditioning))
            torch.testing.assert_close(targets[row : row + 1], expected, rtol=1e-4, atol=1e-4)
            seen.add(tuple(expected.shape[2:]))
    assert len(seen) >= 4
    made = train_job(spec)
    assert made.content["validation_loss"] > 0


@pytest.mark.slow
def test_previews_have_a_row_for_each_size(sized: Sized) -> None:
    run = sized()
    changes = {"train__sample_every": "192", "train__sample_count": "10", "train__sample_guidance_scale": "1"}
    train_job(resolve(run, **changes))
    with Image.open(next((run / "experts/000/grids").iterdir())) as sheet:
        # Two images of each of five sizes.
        assert sheet.size == (2 * max(size.width for size in SIZES), sum(size.height for size in SIZES))


@pytest.mark.slow
def test_alignment_with_patches_of_every_size(sized: Sized) -> None:
    run = sized(patches=6, features={"patch_dimensions": 6})
    spec = resolve(run, train__align="{until: 0.5}")
    task = build_task(spec)
    for inputs in (next(task.stream(8 * step, ALONE)) for step in range(8)):
        losses = task.losses(task.network, inputs)
        assert inputs.patches is not None
        assert losses.extra["alignment"].shape == (8,)
    plain = train_job(resolve(sized("plain", patches=6)))
    made = train_job(spec)
    aligned = sum(
        count * spec.align.flops_of((size.height // 4, size.width // 4), (size.height // 4, size.width // 4))
        for size, count in task.shards.size_counts(96, task.seed, batch_size=8).items()
    )
    assert made.content["compute"]["flops"] - plain.content["compute"]["flops"] == aligned


@pytest.mark.slow
def test_experts_of_a_shared_start_can_be_merged(sized: Sized) -> None:
    run = sized(shared_start={"flops_share": 0.25})
    for kind, expert in (("start", 0), ("expert", 0), ("expert", 1)):
        train_job(resolve(run, kind, expert=expert))
    made = merge(run, configuration.load(run))
    assert made.content["validation_loss"] > 0


def test_a_network_whose_patch_does_not_fit_a_size_is_an_error(sized: Sized) -> None:
    run = sized(networks={"default": {**NETWORK, "patch": 8}})
    with pytest.raises(Exception, match=r"a DiT does not take latents of shape \(3, 12, 20\)"):
        train_job(resolve(run))
