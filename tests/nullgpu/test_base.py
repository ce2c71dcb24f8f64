"""Budgets of experts on a base model on an accelerator: how often the host waits, and what it copies."""

import os
import shutil
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

from test_training import train_steps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lora", ["{rank: 4, alpha: 4}", "{rank: 4, alpha: 4, quantize: int8}"])
def test_a_step_of_an_adapter_waits_twice_and_copies_no_pageable_memory(
    base_run: Path, tmp_path: Path, lora: str
) -> None:
    run = shutil.copytree(base_run, tmp_path / "run", ignore=shutil.ignore_patterns("experts"))
    for step in train_steps(run, "expert", train__total_images="800", networks__default__lora=lora):
        # Beyond the wait of every step: one for the prompts of the images, since images of one call have equal shapes.
        assert sum(step.synchronizations.values()) <= 2, step.synchronizations
        assert step.pageable_copies == {}
        assert step.counts["h2d_pinned"] > 8, "the arguments of the prompts"
        assert step.counts["launch"] > 50, "the step ran on the device"
