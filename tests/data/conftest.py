"""A small data set of real files, and a run prepared from it."""

from pathlib import Path

import pytest

from atoll.data.prepare import prepare
from shapes import write_run, write_shapes


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("source") / "shapes")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run with every stage done. Tests must not change it."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    prepare(run, write_run(run, shapes))
    return run
