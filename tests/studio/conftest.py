"""Runs to serve, and servers of them in threads of the tests."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from atoll.studio.app import Studio, create_app
from atoll.studio.engine import Engine
from atoll.studio.registry import Models, Opening
from atoll.studio.serve import listen
from ensemble.runs import write_run

http = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""A patient client: how fast the machine is decides no test."""


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """Three experts told text, router, monolith, student, and data. Tests must not change it."""
    run = write_run(tmp_path_factory.mktemp("served") / "run", router_conditioning=("pooled",))
    shutil.copytree(prepared / "data", run / "data")
    return run


@contextmanager
def serving(run: Path, token: str | None = None, batch: int = 8, queue: int = 4) -> Iterator[tuple[str, Studio]]:
    """A server of a run: its address, and what is behind it."""
    models = Models(str(run), Opening(batch=batch))
    studio = Studio(models, Engine(batch, queue), token)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(studio), log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert models.looked.wait(60)
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", studio
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def served(served_run: Path) -> Iterator[tuple[str, Studio]]:
    """A server of `served_run`."""
    with serving(served_run) as server:
        yield server
