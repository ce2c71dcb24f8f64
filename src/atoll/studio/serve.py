"""`atoll serve`: the studio in a process of its own, from start to clean end."""

import json
import socket
import sys
import time
from dataclasses import dataclass
from types import FrameType

import uvicorn

from atoll.core.errors import AtollError
from atoll.ensemble import parse
from atoll.experts.folder import is_folder
from atoll.studio.app import Studio, create_app
from atoll.studio.engine import Engine
from atoll.studio.middleware import is_loopback
from atoll.studio.registry import Models, Opening

LAST_WORDS = 5
"""Seconds for answers that are on their way when everything is finished."""
TURN = 3e-4
"""Seconds for which one thread may keep the interpreter while another wants it. The engine lets it go at every
operation of a network; with Python's own 5 ms it would wait that long whenever a request is being read."""


@dataclass(frozen=True)
class Options:
    """How to serve."""

    host: str = "127.0.0.1"
    port: int = 8400
    token: str | None = None
    queue: int = 64
    grace: float = 60.0
    json: bool = False


class Server(uvicorn.Server):
    """A server that, told to stop, finishes what it has taken on."""

    def __init__(self, config: uvicorn.Config, models: Models, engine: Engine, *, grace: float) -> None:
        super().__init__(config)
        self.models, self.engine, self.grace = models, engine, grace
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as uvicorn calls it
        """Take no more requests and finish the others; the second signal ends these, the third waits for nothing."""
        self.force_exit = self.should_exit
        self.models.cease()
        self._until = time.monotonic() + (self.grace if self._until is None else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now."""
        if self._until is not None and not self.should_exit:
            self.engine.close()
            late = time.monotonic() >= self._until
            if late:
                self.engine.abandon()
            self.should_exit = self.engine.idle or late
        return await super().on_tick(counter)


def serve(source: str, opening: Opening, options: Options) -> None:
    """Serve until told to stop."""
    check(source, opening, options)
    sys.setswitchinterval(TURN)
    models = Models(source, opening)
    engine = Engine(opening.batch_size, options.queue)
    listener = listen(options.host, options.port)
    app = create_app(Studio(models, engine, options.token))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none", lifespan="on",
        timeout_graceful_shutdown=LAST_WORDS,
    )  # fmt: skip
    announce(source, listener, options)
    Server(config, models, engine, grace=options.grace).run([listener])


def check(source: str, opening: Opening, options: Options) -> None:
    """Refuse what cannot or must not be served."""
    if Models(source, opening).run is None and not is_folder(source):
        raise AtollError(f"{source} is neither a run (it has no atoll.yaml) nor an exported folder")
    parse(opening.routing)
    if options.token is None and not is_loopback(options.host):
        raise AtollError(
            f"--host {options.host} can be reached from other machines, so a token is needed: set ATOLL_TOKEN, or "
            "use --host 127.0.0.1"
        )
    if options.token is not None and not (options.token.isascii() and options.token.isprintable() and options.token):
        raise AtollError("the token must be made of printable ASCII characters")
    if opening.batch_size < 1 or options.queue < 0 or options.grace < 0:
        raise AtollError("expected --batch-size of at least 1, and --queue and --grace of at least 0")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise AtollError(f"cannot listen on {host} port {port}: {error}; choose another --port") from error


def announce(source: str, listener: socket.socket, options: Options) -> None:
    """Say where the page is."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(json.dumps({"url": url}) if options.json else f"the studio of {source}: {url}  (Ctrl-C ends it)", flush=True)
