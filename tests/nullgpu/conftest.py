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
    "data": {"flip": True},
    "features": {"patch_dimensions": 64},
    "clusters": {"count": 2},
    "networks": {"default": network},
    "router": {"network": network, "conditioning": "pooled"},
    # Code generation for GPUs needs more of the driver than the null GPU has.
    "train": {"batch_size": 8, "workers": 2, "sample_every": 0, "compile": False},
}
prepare(folder / "run", write_run(folder / "run", write_shapes(folder / "shapes"), **settings))
"""
TRAIN = """
import sys
from pathlib import Path
from atoll.core import config as configuration
from atoll.train import resolve_job, train_job

run = Path(sys.argv[1])
config = configuration.load(run, {"train.total_images": "64", "router.total_images": "64", "experts.1": "ddpm"})
for number in range(config.clusters.count):
    train_job(resolve_job(run, config, "expert", expert=number))
for kind in ("router", "monolith"):
    train_job(resolve_job(run, config, kind))
"""
PREPARE_PHOTOGRAPHS = """
import sys
from pathlib import Path
from atoll.data.prepare import prepare
from photographs import write_photographs_run

run = Path(sys.argv[1])
settings = {"data": {"chunk": 31}, "features": {"batch_size": 4}, "latents": {"batch_size": 4}}
prepare(run, write_photographs_run(run, **settings), ["ingest", "patches"])
"""


TRAIN_ON_BASE = """
import sys
from pathlib import Path
from atoll import cli
from base.conftest import FAMILY, draw, write_settings
from base.tiny import save

folder = Path(sys.argv[1])
run = folder / "run"
write_settings(run, save(FAMILY, folder / "base"), draw(folder / "drawings"), train={"compile": False})
for arguments in (["prepare"], ["train", "--expert", "0"], ["train", "--expert", "1"], ["train", "--router"]):
    assert cli.main([arguments[0], str(run), *arguments[1:]]) == 0
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


@pytest.fixture(scope="session")
def trained_run(run: Path) -> Path:
    """A run with two experts of different objectives, a conditioned router and a monolith, all hardly trained."""
    folder = run.parent / "trained"
    shutil.copytree(run, folder)
    run_on_cpu(TRAIN, str(folder))
    return folder


@pytest.fixture(scope="session")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two adapters of a tiny base and a router."""
    folder = tmp_path_factory.mktemp("base")
    run_on_cpu(TRAIN_ON_BASE, str(folder))
    return folder / "run"


@pytest.fixture(scope="session")
def photographs_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images of five sizes, with index and patch features."""
    run = tmp_path_factory.mktemp("photographs") / "run"
    run_on_cpu(PREPARE_PHOTOGRAPHS, str(run))
    return run


@pytest.fixture
def own_run(run: Path, tmp_path: Path) -> Path:
    """A copy of the prepared run, to train in."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def own_trained_run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to train in."""
    shutil.copytree(trained_run, tmp_path / "run")
    return tmp_path / "run"
