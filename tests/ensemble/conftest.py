from pathlib import Path

import pytest

from ensemble.runs import write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts of three objectives and two sizes, told text. Tests must not change it."""
    return write_run(tmp_path_factory.mktemp("ensemble") / "run")
