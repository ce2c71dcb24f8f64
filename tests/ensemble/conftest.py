from pathlib import Path

import pytest

from atoll.export.writer import export
from ensemble.runs import write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts of three objectives and two sizes, told text. Tests must not change it."""
    return write_run(tmp_path_factory.mktemp("ensemble") / "run")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """The export of `run`, with a text encoder. Tests must not change it."""
    folder = tmp_path_factory.mktemp("exported") / "pipeline"
    export(run, folder)
    return folder


@pytest.fixture(scope="session")
def told_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `run`, told classes: no text encoder, so its export is small. Tests must not change it."""
    return write_run(tmp_path_factory.mktemp("told") / "run", told=("label",))


@pytest.fixture(scope="session")
def told_export(tmp_path_factory: pytest.TempPathFactory, told_run: Path) -> Path:
    """The export of `told_run`. Tests must not change it."""
    folder = tmp_path_factory.mktemp("told export") / "pipeline"
    export(told_run, folder)
    return folder
