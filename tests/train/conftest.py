"""A prepared run with tiny networks, copied for every test that trains in it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.workers import TINY, finish

Copy = Callable[..., Path]


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = merge(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return merged


@pytest.fixture
def new_run(prepared: Path, tmp_path: Path) -> Copy:
    """Return a function that copies the prepared run: `new_run("name", train={"lr": 1})`."""
    return copier(prepared, tmp_path, TINY)


def copier(prepared: Path, tmp_path: Path, settings: dict[str, Any]) -> Copy:
    """Return such a function, with other settings."""

    def copy(name: str = "run", only: list[int] | None = None, **changes: Any) -> Path:
        run = tmp_path / name
        run.mkdir()
        values = merge(merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), settings), changes)
        (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        for cluster in range(3) if only is None else only:
            folder = f"data/shards/cluster_{cluster:03d}"
            shutil.copytree(prepared / folder, run / folder)
        return run

    return copy


@pytest.fixture(scope="session")
def trained_experts(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three finished experts of three objectives. Tests must not change it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(prepared / "data" / "shards", run / "data" / "shards")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY)
    values["experts"] = {"default": "flow-matching", 1: "ddpm", 2: "v-prediction"}
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for expert in range(3):
        assert finish(run, "--expert", str(expert)) == 0
    return run
