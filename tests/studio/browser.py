"""Chromium through Playwright, and `atoll serve` in a separate process."""

import contextlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPResponse
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Request, Response

from train.workers import start_verb
from waiting import HOUR, wait_for

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 860}


def chromium() -> str | None:
    """Return the path of the browser."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass(frozen=True)
class Server:
    """A running `atoll serve`."""

    url: str
    token: str

    def sign_in(self, context: BrowserContext) -> None:
        """Store the token in every tab of a context, as if its first address had contained the token."""
        context.add_init_script(f"sessionStorage.setItem('atoll.token', {json.dumps(self.token)})")

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._open(path, body) as response:
            text = response.read().decode()
        return json.loads(text) if response.headers.get_content_type() == "application/json" else text

    @contextlib.contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[None]:
        """Keep a request running until the end of the block."""
        with self._open("/v1/images", {**body, "stream": True}) as events:
            assert events.readline() == b"event: queued\n"
            yield

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        data = None if body is None else json.dumps(body).encode()
        response: HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(self.url + path, data, headers), timeout=HOUR
        )
        return response


@contextlib.contextmanager
def studio_of(run: Path, *options: str, token: str | None = None, ready: bool = True) -> Iterator[Server]:
    """Serve a run until the end of the block, then stop it gracefully; `ready` waits until a model is loaded."""
    log = run.parent / f"serve-{uuid4().hex}.log"
    secret = ["--token", token] if token else []
    process = start_verb(log, "serve", str(run), "--port", "0", "--json", *secret, *options)
    try:
        wait_for(lambda: not process.is_alive() or (log.is_file() and '"url"' in log.read_text()))
        printed = next(json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"url"'))
        server = Server(printed["url"], token or printed["token"])
        wait_until_ready(server, process, log, ready)
        yield server
    finally:
        process.terminate()
        process.join(HOUR)
    assert process.exitcode == 0, log.read_text()


def wait_until_ready(server: Server, process: BaseProcess, log: Path, ready: bool) -> None:
    deadline = time.monotonic() + HOUR
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if server.request("/health")["models_ready"] or not ready:
                return
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < deadline, f"the server does not respond: {log.read_text()}"
        time.sleep(0.1)


@dataclass
class PageMonitor:
    """Record the console errors, requests to other hosts and error responses of a page."""

    page: Page
    host: str
    errors: list[str] = field(default_factory=list)
    error_responses: list[str] = field(default_factory=list)
    """Responses with a status of 400 or above: some tests expect them."""

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        self.page.on("request", self._on_request)
        self.page.on("response", self._on_response)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "status of 4" not in message.text:
            self.errors.append(f"console: {message.text}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.host, "data:", "blob:")):
            self.errors.append(f"request to another host: {request.url}")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self.error_responses.append(f"{response.status} {response.url}")


def check_accessibility(page: Page, folder: Path, name: str) -> None:
    """Assert that axe-core finds no serious problem in light and dark mode; save a screenshot of each."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.screenshot(path=folder / f"{name}-{scheme}.png", full_page=True)
        found = Axe().run(page).response["violations"]
        serious = [violation for violation in found if violation["impact"] in ("serious", "critical")]
        details = [(violation["id"], [node["html"][:200] for node in violation["nodes"]]) for violation in serious]
        assert not details, f"{name}, {scheme}: {details}"


def fits_viewport(page: Page) -> bool:
    """Return whether the page is not wider than the screen."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))
