"""A real browser on a real server: Debian's Chromium through Playwright, `atoll serve` in a process of its own."""

import contextlib
import json
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPResponse
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, Page, Request, Response

from train.workers import start_verb

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 860}


def chromium() -> str | None:
    """Where the browser is."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass(frozen=True)
class Server:
    """A running `atoll serve`."""

    url: str
    token: str | None = None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._open(path, body) as answer:
            text = answer.read().decode()
        return json.loads(text) if answer.headers.get_content_type() == "application/json" else text

    @contextlib.contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[None]:
        """A painting that goes on until the end of the block."""
        with self._open("/v1/images", {**body, "stream": True}) as events:
            assert events.readline() == b"event: queued\n"
            yield

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        answer: HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(self.url + path, data, headers), timeout=60
        )
        return answer


@contextlib.contextmanager
def studio_of(run: Path, *options: str, token: str | None = None, ready: bool = True) -> Iterator[Server]:
    """The run behind a server, with open models if `ready`, until the end of the block; then it must stop by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = run.parent / f"serve-{port}.log"
    secret = ["--token", token] if token else []
    process = start_verb(log, "serve", str(run), "--port", str(port), *secret, *options)
    server = Server(f"http://127.0.0.1:{port}", token)
    try:
        wait_until_it_answers(server, process, log, ready)
        yield server
    finally:
        process.terminate()
        process.join(30)
    assert process.exitcode == 0, log.read_text()


def wait_until_it_answers(server: Server, process: BaseProcess, log: Path, ready: bool) -> None:
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if server.ask("/health")["models_ready"] or not ready:
                return
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < deadline, f"it does not answer: {log.read_text()}"
        time.sleep(0.1)


@dataclass
class Watched:
    """A page, and everything about it that must not happen."""

    page: Page
    host: str
    complaints: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """Answers of 400 and above: some tests want them."""

    def __post_init__(self) -> None:
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", self._sent)
        self.page.on("response", self._answered)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "status of 4" not in message.text:
            self.complaints.append(f"console: {message.text}")

    def _sent(self, request: Request) -> None:
        if not request.url.startswith((self.host, "data:", "blob:")):
            self.complaints.append(f"request to another host: {request.url}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.refusals.append(f"{response.status} {response.url}")


def accessible(page: Page, folder: Path, name: str) -> None:
    """In light and dark: no serious problem of accessibility; a screenshot of each is kept."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.screenshot(path=folder / f"{name}-{scheme}.png", full_page=True)
        found = Axe().run(page).response["violations"]
        grave = [violation for violation in found if violation["impact"] in ("serious", "critical")]
        said = [(violation["id"], [node["html"][:200] for node in violation["nodes"]]) for violation in grave]
        assert not said, f"{name}, {scheme}: {said}"


def fits(page: Page) -> bool:
    """Nothing makes the page wider than the screen."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))
