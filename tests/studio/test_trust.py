"""What other users of the machine and pages of other sites can do to the studio."""

import asyncio
import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from atoll.apps.studio import connections, serve, tokens
from atoll.apps.studio.app import Studio
from atoll.apps.studio.engine import Engine
from atoll.apps.studio.registry import ModelRegistry
from atoll.core.options import QuantizedLoadOptions
from studio.conftest import http, serving
from train.workers import start_verb
from waiting import HOUR, wait_for

Served = tuple[str, Studio]
TOKEN = "a token of the tests"
RIGHT = {"authorization": f"Bearer {TOKEN}"}
# One byte short of everything that a request consists of.
HEADERS = b"POST /v1/images HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
BEGINNINGS = {
    "nothing": b"",
    "one byte": b"P",
    "half of the headers": HEADERS,
    "half of the body": HEADERS + b"\r\n{",
    "half of a chunked body": HEADERS.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"\r\n1\r\n{\r\n",
    "a second request": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\n",
}


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HOUR)


def rest_of(connection: socket.socket) -> bytes:
    """Return everything until the server closes the connection; fail after an hour."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            received += part
    return received


@pytest.fixture(scope="module")
def guarded(served_run: Path) -> Iterator[Served]:
    """A server with a token."""
    with serving(served_run, TOKEN) as server:
        yield server


class Deadline:
    """The deadline of the request of one connection, which a test lets pass."""

    def __init__(self, protocol: connections.BoundedProtocol) -> None:
        self.protocol, self.received = protocol, 0

    @property
    def timer(self) -> object:
        return self.protocol._request_timer

    def expire(self) -> None:
        """Do what the timer does in the end, unless the server has closed the connection already."""

        def late() -> None:
            if self.protocol._request_timer is not None:
                self.protocol._request_timer.cancel()
                self.protocol._close_late()

        self.protocol.loop.call_soon_threadsafe(late)


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> dict[int, Deadline]:
    """The deadlines of all connections, by the port of the client. They pass after an hour, or by `expire`."""
    found: dict[int, Deadline] = {}
    made, received = connections.BoundedProtocol.connection_made, connections.BoundedProtocol.data_received

    def connection_made(self: connections.BoundedProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        found[transport.get_extra_info("peername")[1]] = Deadline(self)

    def data_received(self: connections.BoundedProtocol, data: bytes) -> None:
        received(self, data)
        found[self.transport.get_extra_info("peername")[1]].received += len(data)

    monkeypatch.setattr(connections, "REQUEST_SECONDS", HOUR)
    monkeypatch.setattr(connections.BoundedProtocol, "connection_made", connection_made)
    monkeypatch.setattr(connections.BoundedProtocol, "data_received", data_received)
    return found


def deadline_of(connection: socket.socket, deadlines: dict[int, Deadline], sent: int) -> Deadline:
    """Return the deadline of a connection after the server has received what was sent."""
    port = connection.getsockname()[1]
    wait_for(lambda: port in deadlines and deadlines[port].received >= sent)
    return deadlines[port]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_request_that_does_not_arrive_is_closed(
    guarded: Served, deadlines: dict[int, Deadline], beginning: str
) -> None:
    url, _ = guarded
    # A body is read only after the token was checked, so a request without one has its response already.
    expected = {"half of the body": 401, "half of a chunked body": 401, "a second request": 200}.get(beginning, 408)
    with connect(url) as slow:
        slow.sendall(BEGINNINGS[beginning])
        deadline = deadline_of(slow, deadlines, len(BEGINNINGS[beginning]))
        received = slow.recv(65536) if expected != 408 else b""
        wait_for(lambda: deadline.timer is not None or deadline.protocol.transport.is_closing())
        deadline.expire()
        received += rest_of(slow)
    assert received.startswith(f"HTTP/1.1 {expected}".encode())
    assert http.get(f"{url}/v1/run", headers=RIGHT).status_code == 200


@pytest.mark.parametrize("with_token", [True, False])
def test_the_body_has_a_deadline_too(guarded: Served, deadlines: dict[int, Deadline], with_token: bool) -> None:
    """With the right token, the application waits for the rest of the body; each byte does not restart the deadline."""
    url, studio = guarded
    with connect(url) as slow:
        known = f"Authorization: Bearer {TOKEN}\r\n".encode() if with_token else b""
        headers = HEADERS.replace(b"Length: 2", b"Length: 1000") + known + b"\r\n"
        slow.sendall(headers)
        deadline = deadline_of(slow, deadlines, len(headers))
        first, received = deadline.timer, b""
        if with_token:
            for number in range(1, 4):
                slow.sendall(b" ")
                deadline_of(slow, deadlines, len(headers) + number)
                assert deadline.timer is first is not None
        else:
            received = slow.recv(65536)
        deadline.expire()
        received += rest_of(slow)
    assert received.startswith(b"HTTP/1.1 408" if with_token else b"HTTP/1.1 401")
    assert studio.engine.idle
    assert http.get(f"{url}/v1/run", headers=RIGHT).status_code == 200


def test_a_client_that_does_not_read_is_closed(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 10,000 pipelined requests have 200 MB of responses, more than the buffers of both sides."""
    monkeypatch.setattr(connections, "RESPONSE_SECONDS", 0.3)
    lost, url = threading.Event(), guarded[0]
    original = connections.BoundedProtocol.connection_lost

    def connection_lost(self: connections.BoundedProtocol, exc: Exception | None) -> None:
        original(self, exc)
        lost.set()

    with connect(url) as slow:
        monkeypatch.setattr(connections.BoundedProtocol, "connection_lost", connection_lost)
        with contextlib.suppress(ConnectionError):
            slow.sendall(b"GET /page/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000)
        assert lost.wait(HOUR)
    assert http.get(f"{url}/v1/run", headers=RIGHT).status_code == 200


@pytest.mark.parametrize("limit", ["MAX_CONNECTIONS_PER_CLIENT", "MAX_CONNECTIONS"])
def test_slow_connections_do_not_keep_others_out(guarded: Served, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """A new connection closes the oldest one that waits, never one with a request in progress."""
    monkeypatch.setattr(connections, limit, 8)
    url, studio = guarded
    body = {"steps": 100, "num_images": 4, "stream": True}
    with contextlib.ExitStack() as stack:
        events = stack.enter_context(http.stream("POST", f"{url}/v1/images", json=body, headers=RIGHT))
        slow = [stack.enter_context(connect(url)) for _ in range(40)]
        for number, each in enumerate(slow):
            with contextlib.suppress(ConnectionError):
                each.sendall(list(BEGINNINGS.values())[number % 4])
        for _ in range(10):
            assert http.get(f"{url}/v1/run", headers=RIGHT).status_code == 200
        assert rest_of(slow[0]) == b""  # the oldest
        assert "event: done" in events.read().decode()
    wait_for(lambda: studio.engine.idle)


def test_more_requests_at_once_than_connections_are_refused(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS_PER_CLIENT", 2)
    with serving(served_run) as (url, studio), contextlib.ExitStack() as stack:
        body = {"steps": 250, "num_images": 16, "stream": True}
        for _ in range(2):
            stack.enter_context(http.stream("POST", f"{url}/v1/images", json=body))
        with connect(url) as third:
            third.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert rest_of(third).startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1")
        assert not studio.engine.idle


def test_guesses_are_checked_one_by_one(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one wrong token the others wait for their turn; a connection that has sent the right one does not."""
    monkeypatch.setattr(tokens, "GUESS_SECONDS", 1000.0)
    monkeypatch.setattr(tokens, "MAX_WAITING", 3)
    monkeypatch.setattr(serve, "SEND_SECONDS", 1)
    with serving(served_run, TOKEN) as (url, _), httpx.Client(timeout=HOUR) as honest, contextlib.ExitStack() as stack:
        assert honest.get(f"{url}/v1/run", headers=RIGHT).status_code == 200
        assert http.get(f"{url}/v1/run", headers={"authorization": "Bearer guess"}).status_code == 401
        # These wait, the right one among them: a fast response would tell a guesser that it is right.
        for guess in ("first", "second", TOKEN):
            waiting = stack.enter_context(connect(url))
            waiting.sendall(
                f"GET /v1/run HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {guess}\r\n\r\n".encode()
            )
        refused = http.get(f"{url}/health", headers={"authorization": "Bearer fourth"})
        while refused.status_code == 401:  # the others have not arrived yet
            refused = http.get(f"{url}/health", headers={"authorization": "Bearer fourth"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "3000"
        assert "too many wrong tokens" in refused.json()["error"]["message"]
        assert honest.get(f"{url}/v1/run", headers=RIGHT).status_code == 200
        assert http.get(url).status_code == 200  # the page
    assert tokens._network("2001:db8::1") == tokens._network("2001:db8::ffff") != tokens._network("2001:db8:0:1::1")


def test_after_a_wrong_token_the_right_one_works(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "GUESS_SECONDS", 0.01)
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
    assert tokens.random_token() != tokens.random_token()
