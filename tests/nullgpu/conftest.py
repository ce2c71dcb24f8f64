"""Runs for the null GPU. They are prepared and trained on the CPU, because the null GPU computes nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PREPARE = """
import sys
from pathlib import Path
from atoll.data.prepare import prepare
from shapes import write_run, write_shapes

folder = Path(sys.argv[1])
network = {"name": "DiT-XS/8", "width": 64, "depth": 2, "heads": 2}
settings = {
    "clusters": {"count": 2},
    "networks": {"default": network},
    "router": {"network": network, "conditioning": "pooled"},
    # Code generation for GPUs needs more of the driver than the null GPU has.
    "train": {"batch_size": 8, "workers": 2, "sample_every": 0, "compile": False},
}
prepare(folder / "run", write_run(folder / "run", write_shapes(folder / "shapes"), **settings))
"""


def run_on_cpu(code: str, *arguments: str) -> None:
    """Run Python code in a process that sees no device."""
    environment = {**os.environ, "FAKE_CUDA_DEVICES": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, *arguments], env=environment, check=True)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared run with two clusters and no network."""
    folder = tmp_path_factory.mktemp("null")
    run_on_cpu(PREPARE, str(folder))
    return folder / "run"


@pytest.fixture
def own_run(run: Path, tmp_path: Path) -> Path:
    """A copy of the prepared run, to train in."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"
