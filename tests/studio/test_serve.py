"""`atoll serve` as a process: what it refuses, and that told to stop it finishes what it has taken on."""

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
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers

from atoll import cli
from atoll.studio.middleware import Guard, is_loopback
from atoll.studio.registry import Models
from studio.conftest import http, serving
from studio.test_api import events
from train.workers import start_verb, wait_for


@contextmanager
def process_of(run: Path, log: Path, *options: str) -> Iterator[tuple[str, BaseProcess]]:
    """`atoll serve`, and where it is; it is ended if the test did not end it."""
    process = start_verb(log, "serve", str(run), "--port", "0", "--json", *options)
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


def test_told_to_stop_it_finishes_what_runs_and_takes_nothing_new(served_run: Path, tmp_path: Path) -> None:
    with process_of(served_run, tmp_path / "log", "--grace", "600") as (url, process):
        begun, told = threading.Event(), []

        def listen() -> None:
            wanted = {"prompt": "a circle", "steps": 200, "n": 8, "stream": True}
            with http.stream("POST", f"{url}/v1/images", json=wanted) as answer:
                begun.set()
                told.extend(events(answer))

        listener = threading.Thread(target=listen)
        listener.start()
        assert begun.wait(30)
        os.kill(process.pid or 0, signal.SIGTERM)
        wait_for(lambda: http.get(f"{url}/health").status_code == 503)
        refused = http.post(f"{url}/v1/images", json={})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        listener.join()
        process.join(30)
        assert process.exitcode == 0
    names = [name for name, _ in told]
    assert names[-1] == "done"
    assert names.count("image") == 8


@pytest.mark.slow
def test_the_grace_is_bounded(served_run: Path, tmp_path: Path) -> None:
    with process_of(served_run, tmp_path / "log", "--grace", "0.2") as (url, process):
        wanted = {"steps": 250, "n": 16, "stream": True}
        with http.stream("POST", f"{url}/v1/images", json=wanted) as answer:
            os.kill(process.pid or 0, signal.SIGINT)
            assert events(answer)[-1][0] == "failed"
        process.join(30)
        assert process.exitcode == 0


def test_what_it_has_no_time_to_finish_is_told_when_to_come_again(served_run: Path) -> None:
    with serving(served_run) as (url, studio), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, f"{url}/v1/images", json={"steps": 250, "n": 16})
        wait_for(lambda: not studio.engine.idle)
        studio.engine.abandon()
        assert answer.result().status_code == 503
        assert "stopping" in answer.result().json()["error"]["message"]
        assert int(answer.result().headers["retry-after"]) > 0


def test_the_second_signal_ends_what_runs(served_run: Path, tmp_path: Path) -> None:
    with process_of(served_run, tmp_path / "log", "--grace", "600") as (url, process), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, f"{url}/v1/images", json={"steps": 250, "n": 16})
        wait_for(lambda: "atoll_requests_open 1.0" in http.get(f"{url}/metrics").text)
        os.kill(process.pid or 0, signal.SIGINT)
        wait_for(lambda: http.get(f"{url}/health").status_code == 503)
        os.kill(process.pid or 0, signal.SIGINT)
        assert answer.result().status_code == 503
        process.join(60)
        assert process.exitcode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def serve_for_ever_opening(run: str, log: str) -> None:
    """`atoll serve` of a run whose models are so large that none is ever open."""

    def look(self: Models) -> None:
        print("looking")
        time.sleep(600)

    Models.look = look  # type: ignore[method-assign]
    with open(log, "w", buffering=1) as out, redirect_stdout(out):
        sys.exit(cli.main(["serve", run, "--port", "0", "--json"]))


def test_signals_end_it_while_models_are_opened(served_run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = multiprocessing.get_context("spawn").Process(
        target=serve_for_ever_opening, args=(str(served_run), str(log))
    )
    process.start()
    try:
        wait_for(lambda: log.is_file() and "looking" in log.read_text())
        for _ in range(2):
            os.kill(process.pid or 0, signal.SIGINT)
            time.sleep(0.5)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("127.example.com", False)],
)
def test_only_this_machine_needs_no_token(host: str, local: bool) -> None:
    guard = Guard(Starlette(), None)
    named = f"[{host}]:8400" if ":" in host else f"{host}:8400"
    assert is_loopback(host) == local
    assert (guard._stranger(Headers({"host": named})) is None) == local


def test_what_cannot_be_served_is_refused(served_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert cli.main(["serve", *words]) == 2
        return capsys.readouterr().err

    run = str(served_run)
    assert "neither a run" in refused(str(tmp_path))
    assert "a token is needed" in refused(run, "--host", "0.0.0.0")
    assert "a token is needed" in refused(run, "--host", "::")
    assert "printable" in refused(run, "--token", "")
    assert "did you mean 'top-2'?" in refused(run, "--routing", "top2")
    assert "at least 1" in refused(run, "--batch-size", "0")
    assert "takes no settings of a run: --train.lr" in refused(run, "--train.lr", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --port" in refused(run, "--port", str(taken.getsockname()[1]))
    assert "choose another --port" in refused(run, "--port", "70000")
