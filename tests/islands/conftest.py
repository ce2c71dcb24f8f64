"""Stores of every kind, and runs to share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from atoll.islands.store import Store
from islands.servers import CREDENTIALS, moto, new_bucket

pytest_plugins = ["train.conftest"]


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a running S3 server; the environment has its credentials."""
    os.environ.update(CREDENTIALS)
    with moto() as address:
        yield address


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a fresh place in S3, reached through the environment as anyone would."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    return new_bucket(s3)


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh place of every kind."""
    if request.param == "s3":
        url: str = request.getfixturevalue("bucket")
        return url
    return f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid4().hex}"


@pytest.fixture
def store(place: str) -> Store:
    return Store.open(place)


Opener = Callable[[], Store]
