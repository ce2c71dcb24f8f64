"""`atoll serve`: start the server, and shut it down gracefully."""

import json
import secrets
import socket
import sys
import time
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from atoll.apps.studio.app import Studio, create_app
from atoll.apps.studio.engine import Engine
from atoll.apps.studio.middleware import is_loopback
from atoll.apps.studio.registry import ModelRegistry
from atoll.apps.studio.serve_options import ServerOptions
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.core.options import QuantizedLoadOptions
from atoll.ensemble import parse
from atoll.experts.pipeline_folder import is_folder

# Seconds for open connections to send their last bytes after all requests have ended.
SEND_SECONDS = 5
# Seconds that a thread may hold the interpreter lock while another waits for it. The engine releases the lock at every
# operation of a network. With Python's default of 5 ms it waits that long whenever another thread reads a request:
# benchmarks/serve.py measured 0.73 to 0.85 of the offline throughput, and 0.91 with 0.3 ms.
SWITCH_INTERVAL_SECONDS = 3e-4
# Connections and requests at once; further requests get the status 503. Half of the usual limit of 1024 open files per
# process: models and the event loop need some too.
MAX_CONNECTIONS = 512
# A random token has 192 bits, in 32 characters. Nobody types it: it is part of the printed address.
MIN_TOKEN_CHARACTERS, RANDOM_TOKEN_BYTES = 16, 24


class Server(uvicorn.Server):
    """A server that finishes its requests before it stops."""

    # uvicorn stops accepting connections as soon as `should_exit` is set. New requests must still get the status 503,
    # so the first signal only closes the engine, and `should_exit` follows when the engine is idle or the time is up.

    def __init__(self, config: uvicorn.Config, models: ModelRegistry, engine: Engine, *, grace: float) -> None:
        super().__init__(config)
        self.models, self.engine, self.grace = models, engine, grace
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Handle a signal: the first rejects new requests, the second ends running ones, the third exits at once."""
        self.force_exit = self.should_exit
        self.models.request_stop()
        self._deadline = time.monotonic() + (self.grace if self._deadline is None else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop now; uvicorn calls this ten times a second."""
        if self._deadline is not None and not self.should_exit:
            self.engine.close()
            late = time.monotonic() >= self._deadline
            if late:
                self.engine.cancel_all()
            self.should_exit = self.engine.idle or late
        return await super().on_tick(counter)


def serve(source: str, load: QuantizedLoadOptions, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM."""
    check(source, options)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    models = ModelRegistry(source, load, batch_size=options.batch_size, routing=options.routing)
    engine = Engine(options.batch_size, options.queue)
    listener, token = open_address(source, options)
    app = create_app(Studio(models, engine, token))
    Server(server_config(app), models, engine, grace=options.grace).run([listener])


def open_address(source: str, options: ServerOptions) -> tuple[socket.socket, str | None]:
    """Return the listening socket and the token, and print the address."""
    listener = listen(options.host, options.port)
    made = None if options.token or options.no_token else secrets.token_urlsafe(RANDOM_TOKEN_BYTES)
    # The address of the web page has a random token in its fragment, which browsers send to no server.
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    page = f"{url}/#token={made}" if made else url
    text = json.dumps({"url": url, "token": made}) if options.json else f"serving {source} at {page}  (Ctrl-C stops it)"
    print(text, flush=True)
    return listener, options.token or made


def server_config(app: ASGIApp) -> uvicorn.Config:
    """Return the configuration of uvicorn."""
    return uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none", lifespan="on",
        timeout_graceful_shutdown=SEND_SECONDS, limit_concurrency=MAX_CONNECTIONS, http="h11", proxy_headers=False,
    )  # fmt: skip


def check(source: str, options: ServerOptions) -> None:
    """Raise AtollError if the options are invalid or unsafe."""
    if not (Path(source) / CONFIG_FILE).is_file() and not is_folder(source):
        raise AtollError(f"{source} is neither a run (it has no atoll.yaml) nor an exported folder")
    parse(options.routing)
    if options.no_token and options.token is not None:
        raise AtollError("a token and --no-token contradict each other; omit one (ATOLL_TOKEN is a token, too)")
    if options.no_token and not is_loopback(options.host):
        raise AtollError(
            f"--host {options.host} can be reached from other machines, so a token is required: omit --no-token, or "
            "use --host 127.0.0.1"
        )
    if (token := options.token) is not None:
        if not (token.isascii() and token.isprintable()) or token != token.strip():
            raise AtollError("the token must consist of printable ASCII characters, without spaces at its ends")
        if len(token) < MIN_TOKEN_CHARACTERS:
            raise AtollError(
                f"the token has {len(token)} characters, which can be guessed; use at least {MIN_TOKEN_CHARACTERS}, or "
                "omit it: atoll serve then makes a random one and prints it"
            )
    if options.batch_size < 1 or options.queue < 0 or options.grace < 0:
        raise AtollError("expected --batch-size of at least 1, and --queue and --grace of at least 0")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # uvicorn's default backlog: connections of a burst wait in the kernel instead of being refused.
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise AtollError(f"cannot listen on {host} port {port}: {error}; choose another --port") from error
