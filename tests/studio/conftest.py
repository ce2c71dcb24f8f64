"""Runs to serve, and servers that run in threads of the test process."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from atoll.apps.studio.app import Studio, create_app
from atoll.apps.studio.engine import Engine
from atoll.apps.studio.registry import ModelRegistry
from atoll.apps.studio.serve import listen, server_config
from atoll.core.options import QuantizedLoadOptions
from atoll.ensemble import load
from ensemble.runs import write_run
from waiting import HOUR, wait_for

http = httpx.Client(timeout=HOUR, limits=httpx.Limits(max_keepalive_connections=0))
"""A client with a long timeout, so that no test depends on the speed of the machine."""


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """A run with three text-conditioned experts, router, monolith, student and data. Tests must not change it."""
    run = write_run(tmp_path_factory.mktemp("served") / "run", router_conditioning=("pooled",))
    shutil.copytree(prepared / "data", run / "data")
    return run


@contextmanager
def serving(
    run: Path, token: str | None = None, *, batch_size: int = 8, queue: int = 4, ready: bool = True
) -> Iterator[tuple[str, Studio]]:
    """Serve a run; yield the address and the objects behind the routes, with `ready` once its models are loaded."""
    models = ModelRegistry(str(run), QuantizedLoadOptions(), batch_size=batch_size)
    studio = Studio(models, Engine(batch_size, queue), token)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(server_config(create_app(studio)))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert not ready or models.first_scan_done.wait(HOUR)
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", studio
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def held_loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let models wait before they are loaded, as large ones do; setting the event loads them."""
    released = threading.Event()

    def load_later(*arguments: object, **options: object) -> object:
        released.wait()
        return load(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("atoll.apps.studio.registry.load", load_later)
        try:
            yield released
        finally:
            released.set()


def hold_engine(released: Callable[[], bool]) -> None:
    """Let engines do the first step of each request and then wait until one is to end or `released` holds."""
    run_step = Engine.run_step

    def goes_on(engine: Engine) -> bool:
        requests = list(engine._open)
        # A request may have arrived since the last step: the first ones fit into the batch and need their first step.
        new = any(all(image.step == 0 for image in request.images) for request in requests[: engine.batch_size])
        return new or not requests or any(request.end_requested for request in requests) or released()

    def run_step_later(engine: Engine) -> bool:
        wait_for(lambda: goes_on(engine))
        return run_step(engine)

    Engine.run_step = run_step_later  # type: ignore[method-assign]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold all engines of this process during a test, as networks that take long do."""
    released = threading.Event()
    monkeypatch.setattr(Engine, "run_step", Engine.run_step)
    hold_engine(released.is_set)
    yield
    released.set()


@pytest.fixture(scope="session")
def served(served_run: Path) -> Iterator[tuple[str, Studio]]:
    """A server of `served_run`."""
    with serving(served_run) as server:
        yield server
