"""`atoll serve` as a process: what it refuses, and that told to stop it finishes what it has taken on."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import pytest

from atoll import cli
from studio.conftest import http
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
            assert [name for name, _ in events(answer)][-1] == "cancelled"
        process.join(30)
        assert process.exitcode == 0


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
    assert "at least 1" in refused(run, "--batch", "0")
    assert "no settings of runs" in refused(run, "--train.lr", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --port" in refused(run, "--port", str(taken.getsockname()[1]))
    assert "choose another --port" in refused(run, "--port", "70000")
