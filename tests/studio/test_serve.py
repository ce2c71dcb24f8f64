"""`atoll serve` as a process: invalid options, and graceful shutdown."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers

from atoll import cli
from atoll.apps.studio.middleware import SecurityMiddleware, is_loopback
from atoll.apps.studio.registry import ModelRegistry
from studio.conftest import hold_engine, http, serving
from studio.test_api import read_events
from train.workers import start_verb
from waiting import HOUR, wait_for


@contextmanager
def process_of(run: Path, log: Path, *options: str) -> Iterator[tuple[str, BaseProcess]]:
    """Start `atoll serve`; yield its address and process, and kill it if the test did not stop it.

    Its requests wait after one or two steps until they are to end or the file `released` exists beside the log.
    """
    hold = partial(hold_engine, log.with_name("released").exists)
    process = start_verb(log, "serve", str(run), "--port", "0", "--json", "--no-token", *options, prepare=hold)
    try:
        wait_for(lambda: log.is_file() and "url" in log.read_text())
        url = next(json.loads(line)["url"] for line in log.read_text().splitlines() if line.startswith("{"))
        wait_for(lambda: ready(url))
        yield url, process
    finally:
        process.kill()


def ready(url: str) -> bool:
    try:
        return bool(http.get(f"{url}/health").json()["models_ready"])
    except httpx.TransportError:
        return False


def test_the_first_signal_finishes_running_requests_and_rejects_new_ones(served_run: Path, tmp_path: Path) -> None:
    with process_of(served_run, tmp_path / "log", "--grace", "3600") as (url, process):
        started, events = threading.Event(), []

        def read_stream() -> None:
            body = {"prompt": "a circle", "steps": 200, "num_images": 8, "stream": True}
            with http.stream("POST", f"{url}/v1/images", json=body) as response:
                started.set()
                events.extend(read_events(response))

        reader = threading.Thread(target=read_stream)
        reader.start()
        assert started.wait(HOUR)
        os.kill(process.pid or 0, signal.SIGTERM)
        wait_for(lambda: http.get(f"{url}/health").status_code == 503)
        rejected = http.post(f"{url}/v1/images", json={})
        assert rejected.status_code == 503
        assert int(rejected.headers["retry-after"]) > 0
        (tmp_path / "released").touch()
        reader.join()
        process.join(HOUR)
        assert process.exitcode == 0
    names = [name for name, _ in events]
    assert names[-1] == "done"
    assert names.count("image") == 8


@pytest.mark.slow
def test_requests_are_ended_after_the_grace_period(served_run: Path, tmp_path: Path) -> None:
    with process_of(served_run, tmp_path / "log", "--grace", "0.2") as (url, process):
        body = {"steps": 250, "num_images": 16, "stream": True}
        with http.stream("POST", f"{url}/v1/images", json=body) as response:
            os.kill(process.pid or 0, signal.SIGINT)
            assert read_events(response)[-1][0] == "failed"
        process.join(HOUR)
        assert process.exitcode == 0


@pytest.mark.usefixtures("held")
def test_requests_ended_by_shutdown_get_retry_after(served_run: Path) -> None:
    with serving(served_run) as (url, studio), ThreadPoolExecutor(1) as pool:
        response = pool.submit(http.post, f"{url}/v1/images", json={"steps": 250, "num_images": 16})
        wait_for(lambda: not studio.engine.idle)
        studio.engine.cancel_all()
        assert response.result().status_code == 503
        assert "stopping" in response.result().json()["error"]["message"]
        assert int(response.result().headers["retry-after"]) > 0


def test_the_second_signal_ends_running_requests(served_run: Path, tmp_path: Path) -> None:
    with process_of(served_run, tmp_path / "log", "--grace", "3600") as (url, process), ThreadPoolExecutor(1) as pool:
        response = pool.submit(http.post, f"{url}/v1/images", json={"steps": 250, "num_images": 16})
        wait_for(lambda: "atoll_requests_in_progress 1.0" in http.get(f"{url}/metrics").text)
        os.kill(process.pid or 0, signal.SIGINT)
        wait_for(lambda: http.get(f"{url}/health").status_code == 503)
        os.kill(process.pid or 0, signal.SIGINT)
        assert response.result().status_code == 503
        process.join(HOUR)
        assert process.exitcode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def serve_while_loading(run: str, log: str) -> None:
    """Run `atoll serve` with models that take an hour to load."""

    def scan(self: ModelRegistry) -> None:
        print("loading")
        time.sleep(HOUR)

    ModelRegistry.scan = scan  # type: ignore[method-assign]
    with open(log, "w", buffering=1) as out, redirect_stdout(out):
        sys.exit(cli.main(["serve", run, "--port", "0", "--json"]))


def test_signals_stop_the_server_while_models_are_loading(served_run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = multiprocessing.get_context("spawn").Process(target=serve_while_loading, args=(str(served_run), str(log)))
    process.start()
    try:
        wait_for(lambda: log.is_file() and "loading" in log.read_text())
        for _ in range(2):
            os.kill(process.pid or 0, signal.SIGINT)
            time.sleep(0.5)
        process.join(HOUR)
        assert process.exitcode == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("127.example.com", False)],
)
def test_only_loopback_hosts_need_no_token(host: str, local: bool) -> None:
    middleware = SecurityMiddleware(Starlette(), None)
    header = f"[{host}]:8400" if ":" in host else f"{host}:8400"
    assert is_loopback(host) == local
    assert (middleware.check("/v1/run", Headers({"host": header})) is None) == local


def test_invalid_options_are_errors(
    served_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(*words: str) -> str:
        assert cli.main(["serve", *words]) == 2
        return capsys.readouterr().err

    run = str(served_run)
    assert "neither a run" in error_of(str(tmp_path))
    assert "a token is required" in error_of(run, "--no-token", "--host", "0.0.0.0")
    assert "a token is required" in error_of(run, "--no-token", "--host", "::")
    assert "contradict" in error_of(run, "--no-token", "--token", "x" * 16)
    for short in ("", "a", "x" * 15):
        assert f"the token has {len(short)} characters" in error_of(run, "--token", short)
    for unprintable in ("\u00e9" * 16, "x" * 16 + "\n", " " + "x" * 16):
        assert "printable" in error_of(run, "--token", unprintable)
    assert "did you mean 'top-2'?" in error_of(run, "--routing", "top2")
    assert "at least 1" in error_of(run, "--batch-size", "0")
    assert "accepts no settings of a run: --train.lr" in error_of(run, "--train.lr", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --port" in error_of(run, "--port", str(taken.getsockname()[1]))
    assert "choose another --port" in error_of(run, "--port", "70000")
    monkeypatch.setenv("ATOLL_TOKEN", "change-me")
    assert "the token has 9 characters" in error_of(run)
    assert "contradict" in error_of(run, "--no-token")
