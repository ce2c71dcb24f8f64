"""A small run with everything trained: experts, router, monolith and student."""

import shutil
from pathlib import Path

import pytest
import yaml

from atoll import cli
from train.conftest import merge
from train.workers import TINY


@pytest.fixture(scope="session")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests add to its `evaluation` folder and change nothing else."""
    run = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(prepared / "data", run / "data")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY)
    values["experts"] = {"default": "flow-matching", 1: "ddpm"}
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for job in (["--expert", "0"], ["--expert", "1"], ["--expert", "2"], ["--router"], ["--monolith"], ["--student"]):
        assert cli.main(["train", str(run), *job]) == 0
    return run
