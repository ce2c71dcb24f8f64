"""Budgets of a student's steps: a block of targets waits once, and the steps inside a block do not wait for targets."""

import os
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import torch
from test_training import STEPS, WARM_UP_STEPS, train_steps

import nullgpu
from atoll.core import config as configuration
from atoll.train.distill import StudentTask
from atoll.train.job import build_task
from atoll.train.spec import resolve_job

pytestmark = pytest.mark.slow


def test_steps_inside_a_block_wait_once_and_copy_from_pinned_memory(own_trained_run: Path) -> None:
    """The first step computes the block, which has the targets of all steps."""
    steps = train_steps(own_trained_run, "student", student__block=str(8 * STEPS))
    assert len(steps) == STEPS - WARM_UP_STEPS
    for step in steps:
        assert sum(step.synchronizations.values()) <= 1, step.synchronizations
        assert step.pageable_copies == {}
        assert step.counts["h2d_pinned"] - step.counts["side_copy"] == 1, "targets are copied when they are needed"
        assert step.counts["launch"] > 50, "the step ran on the device"


def test_steps_across_blocks_copy_from_pinned_memory(own_trained_run: Path) -> None:
    """A block of 12 images ends in every second batch of 8."""
    steps = train_steps(own_trained_run, "student", student__block="12")
    assert len(steps) == STEPS - WARM_UP_STEPS
    for step in steps:
        # Weights of teachers that are loaded are not the subject here.
        assert {place for place in step.pageable_copies if not place.startswith("nets/")} == set()


def test_a_block_waits_once_and_copies_from_pinned_memory(trained_run: Path) -> None:
    """With both teachers in memory, so that the cache loads none."""
    task = build_task(resolve_job(trained_run, configuration.load(trained_run, {"student.block": "256"}), "student"))
    assert isinstance(task, StudentTask)
    task.network.to("cuda")
    task._teachers.limit = 2
    task._compute_block(0)
    with nullgpu.watch() as seen:
        targets = task._compute_block(256)
    assert all(part.is_pinned() for part in targets.by_size)
    assert task._teachers.device_options.dtype == torch.bfloat16
    assert list(seen.synchronizations.values()) == [1], seen.synchronizations
    assert seen.pageable_copies == {}
    assert seen.counts["d2h"] == 256
