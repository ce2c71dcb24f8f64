"""What other users of the machine and pages of other sites can do to the studio."""

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atoll.apps.studio import requests, serve
from atoll.apps.studio.app import Studio
from atoll.apps.studio.engine import Engine, GenerationRequest, RequestState
from atoll.apps.studio.registry import ModelRegistry
from atoll.core.options import QuantizedLoadOptions
from atoll.ensemble import SampleSettings
from studio.conftest import http, serving
from train.workers import start_verb
from waiting import HOUR, wait_for

Served = tuple[str, Studio]
TOKEN = "a token of the tests"
RIGHT = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def guarded(served_run: Path) -> Iterator[Served]:
    """A server with a token."""
    with serving(served_run, TOKEN) as server:
        yield server


@pytest.mark.usefixtures("held")
def test_more_requests_at_once_than_connections_are_refused(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 3)
    with serving(served_run) as (url, studio), contextlib.ExitStack() as stack:
        body = {"steps": 250, "num_images": 16, "stream": True}
        for _ in range(2):
            stack.enter_context(http.stream("POST", f"{url}/v1/images", json=body))
        assert http.get(f"{url}/health").status_code == 503
        assert not studio.engine.idle


def test_a_stream_that_its_client_does_not_read_is_cancelled(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SEND_TIMEOUT_SECONDS", 0.01)

    async def stream() -> RequestState:
        events = requests.EventQueue()
        request = RequestState(GenerationRequest(SampleSettings()), served[1].models.get("experts"), events.put)

        async def wait(*_: object) -> Any:
            await asyncio.sleep(HOUR)

        await requests.EventStream(request, events)({"type": "http", "asgi": {"spec_version": "2.3"}}, wait, wait)
        return request

    # In a thread of its own: other tests of this process leave an event loop behind.
    with ThreadPoolExecutor(1) as thread:
        request = thread.submit(asyncio.run, stream()).result(HOUR)
    assert request.end_requested is not None


def test_after_a_wrong_token_the_right_one_works(served_run: Path) -> None:
    forged = {"x-forwarded-for": "192.0.2.1", "forwarded": "for=192.0.2.1"}
    with serving(served_run, TOKEN) as (url, studio):
        for guess in ("", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"bearer {TOKEN}", TOKEN):
            response = http.get(f"{url}/v1/run", headers={"authorization": guess, **forged})
            assert response.status_code == 401
        assert http.get(f"{url}/v1/run", headers=RIGHT).status_code == 200
        assert studio.engine.idle


def test_every_path_but_the_page_needs_the_token(guarded: Served) -> None:
    url, _ = guarded
    routes = ["/v1/run", "/v1/experts", "/v1/clusters", "/v1/clusters/0/contact_sheet.png", "/v1/islands", "/metrics"]
    for path in [*routes, "/v1/islands/experts/000/grid.png", "//v1/run", "/v1", "/docs", "/metrics/", "/%2e/v1/run"]:
        assert http.get(f"{url}{path}").status_code == 401, path
    for method in ("post", "put", "delete", "options"):
        assert getattr(http, method)(f"{url}/v1/images").status_code == 401
    for path in ("/", "/page/api.js", "/health", "/openapi.json"):
        assert http.get(f"{url}{path}").status_code == 200, path


def test_health_contains_no_paths_without_the_token(served_run: Path, tmp_path: Path) -> None:
    """A model that cannot be loaded has an error message with a path."""
    run = tmp_path / "secret-folder"
    run.mkdir()
    (run / "atoll.yaml").write_text((served_run / "atoll.yaml").read_text())
    broken = run / "experts/000/final"
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text("{}")
    with serving(run, TOKEN) as (url, studio):
        wait_for(lambda: bool(studio.models.load_errors))
        for headers in ({}, {"host": "other.example"}):
            text = http.get(f"{url}/health", headers=headers).text
            assert json.loads(text)["reason"] is None
            assert "secret-folder" not in text
        assert http.get(f"{url}/health", headers={"authorization": "Bearer x"}).status_code == 401
        assert "secret-folder" in http.get(f"{url}/health", headers=RIGHT).json()["reason"]
    assert Studio(ModelRegistry(str(run), QuantizedLoadOptions()), Engine(1, 1)).health(details=False).reason is None


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Return modification time and hash of everything below a folder."""
    return {
        path.relative_to(folder).as_posix(): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *folder.rglob("*")]
    }


def test_no_get_writes_into_the_run(guarded: Served, served_run: Path) -> None:
    url, _ = guarded
    before = tree(served_run)
    described = http.get(f"{url}/openapi.json").json()["paths"]
    gets = [path for path, methods in described.items() if "get" in methods]
    assert "/v1/islands" in gets
    for path in [*gets, "/", "/page/main.js"]:
        given = path.replace("{number}", "0").replace("{job}", "experts/000")
        for method in ("get", "head", "options"):
            assert getattr(http, method)(f"{url}{given}", headers=RIGHT).status_code < 500
    assert tree(served_run) == before


SITES = [
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),  # another port of localhost
    ({"sec-fetch-site": "anything"}, 403),
    ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 403),
    ({"sec-fetch-site": "same-origin"}, 200),
    ({"sec-fetch-site": "none"}, 200),
    ({}, 200),
]


@pytest.mark.parametrize(("headers", "status"), SITES)
def test_requests_for_other_sites_are_refused(
    guarded: Served, served: Served, headers: dict[str, str], status: int
) -> None:
    """With and without a token, and even with the right one."""
    for url, known in ((guarded[0], RIGHT), (served[0], {})):
        for path in ("/v1/run", "/metrics", "/page/icon.svg"):
            response = http.get(f"{url}{path}", headers={**headers, **known})
            assert response.status_code == status
            assert response.headers["cross-origin-resource-policy"] == "same-origin"
            assert response.headers["cross-origin-opener-policy"] == "same-origin"
        created = http.post(f"{url}/v1/images", headers={**headers, **known}, json={"num_images": 0})
        assert created.status_code == (422 if status == 200 else 403)
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert http.get(guarded[0], headers=link).status_code == 200
    assert http.get(guarded[0], headers={**link, "sec-fetch-dest": "iframe"}).status_code == 403


def test_a_random_token_is_printed_and_a_given_one_is_not(served_run: Path, tmp_path: Path) -> None:
    logs = {name: tmp_path / name for name in ("random", "given")}
    options = {"random": (), "given": ("--token", TOKEN)}
    processes = [start_verb(logs[name], "serve", str(served_run), "--port", "0", *options[name]) for name in logs]
    try:
        for log in logs.values():
            wait_for(lambda log=log: log.is_file() and "serving" in log.read_text())
        pattern = r"at (http://127\.0\.0\.1:\d+)/#token=([\w-]{32})  "
        ((url, token),) = re.findall(pattern, logs["random"].read_text())
        (other,) = re.findall(r"at (http://127\.0\.0\.1:\d+)  ", logs["given"].read_text())
        for address, right in ((url, token), (other, TOKEN)):
            assert http.get(f"{address}/v1/run").status_code == 401
            assert http.get(f"{address}/v1/run", headers={"authorization": f"Bearer {right}"}).status_code == 200
        assert logs["random"].read_text().count(token) == 1
        assert TOKEN not in logs["given"].read_text()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(HOUR)
