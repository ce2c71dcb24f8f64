"""Fixtures shared by all tests."""

from pathlib import Path

import pytest
import torch

from shapes import write_run, write_shapes

# Tests run in two workers on two cores: one thread each, or they wait for one another.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("source") / "shapes")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run with every stage done. Tests must not change it."""
    from atoll.data.prepare import prepare

    run = tmp_path_factory.mktemp("prepared") / "run"
    prepare(run, write_run(run, shapes))
    return run
