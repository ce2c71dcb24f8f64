"""Experts on several devices compute at the same time, by the simulated clocks of the null GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

pytestmark = pytest.mark.slow
CODE = """
import json, sys
from dataclasses import replace
import torch
import nullgpu
import atoll
from atoll.ensemble import Ensemble
from atoll.experts.batch_conditions import BatchConditions

torch.set_grad_enabled(False)
sampler = atoll.load(sys.argv[1])
prompts, rows, found = sampler.encode(["a red circle", "a blue square"]), torch.arange(16) % 2, {}
for experts in (4, 8):
    first = sampler.ensemble.references[0]
    references = [
        replace(first, declaration=replace(first.declaration, clusters=(number,)))
        for number in range(experts)
    ]
    many = Ensemble(references, device_options=sampler.ensemble.device_options)
    x, cluster = torch.zeros(16, *many.shape, device=many.device), torch.arange(16) % experts
    kept, new = (BatchConditions.of(prompts, rows, reused=True) for _ in range(2))
    many.velocity(x, 0.5, kept, routing="oracle", cluster=cluster)  # loads the experts
    for name, conditions in {"prepared": kept, "to prepare": new, "not prepared": prompts[rows]}.items():
        with nullgpu.watch() as seen:
            many.velocity(x, 0.5, conditions, routing="oracle", cluster=cluster)
        work = seen.counts["launch"] + seen.counts["gemm"]
        found[f"{experts} experts, {name}"] = {"devices": len(set(many.cache.devices)), "work": work, "time": seen.time}
print(json.dumps(found))
"""


def evaluations(run: Path, devices: int) -> dict[str, dict[str, int]]:
    """Return the kernels of evaluations in which all experts have equal batches, and how long they take."""
    environment = {
        **os.environ,
        "FAKE_CUDA_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", CODE, str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    assert all(case["work"] > 200 for case in found.values()), "the experts ran on the devices"
    assert {case["devices"] for case in found.values()} == {devices}
    return found


def test_one_device_runs_one_kernel_after_the_other(trained_run: Path) -> None:
    for name, case in evaluations(trained_run, devices=1).items():
        assert case["time"] == case["work"], name


def test_four_devices_take_at_most_a_third_of_the_time(trained_run: Path) -> None:
    for name, case in evaluations(trained_run, devices=4).items():
        assert 3 * case["time"] <= case["work"], name
