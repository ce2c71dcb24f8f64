"""Slots of `atoll launch` on a machine with eight GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

pytestmark = pytest.mark.slow


def test_every_gpu_gets_an_island(run: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        "FAKE_CUDA_DEVICES": "8",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "atoll.cli", "launch", str(run), "--print"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "# 8 at a time" in done.stdout
    experts = [line for line in done.stdout.splitlines() if "--expert " in line]
    assert len(experts) == 2
    assert all(f"CUDA_VISIBLE_DEVICES={gpu} " in line for gpu, line in enumerate(experts))
