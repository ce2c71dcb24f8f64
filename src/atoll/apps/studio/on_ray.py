"""`atoll serve --on ray`: replicas of the server on a Ray cluster behind one address.

    client ── uvicorn in this process: `Front` ── handle of Ray Serve ── replica: `create_app` with its own engine

Ray Serve starts the replicas, adds and removes some with the load, replaces dead ones, and gives each request to the
replica with the fewest. The front sends a request again if its replica dies. That is safe: an image is a function of
its request, and a plain response is sent only when it is complete.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from atoll.apps.launch.ray import connected
from atoll.apps.studio.app import Studio, create_app
from atoll.apps.studio.engine import MAX_RETRY_SECONDS, QUEUE_FULL, UNAVAILABLE, Engine
from atoll.apps.studio.middleware import SecurityMiddleware, error_response
from atoll.apps.studio.registry import ModelRegistry
from atoll.apps.studio.schemas import ApiError
from atoll.apps.studio.serve import SWITCH_INTERVAL_SECONDS, check, open_address, server_config
from atoll.apps.studio.serve_options import ServerOptions
from atoll.core.errors import AtollError
from atoll.core.options import QuantizedLoadOptions

# A request whose replicas die this often has probably killed them; a machine is hardly lost three times in a row.
ATTEMPTS = 3
# Seconds before the next attempt: a lost machine takes several replicas, and Ray needs a moment to notice all of them.
PAUSE_SECONDS = 1.0
# Seconds of high load before Ray adds replicas. Ray's 30 s exceed many requests; loading a model takes about as long.
UPSCALE_SECONDS = 10.0
# Parts of an ASGI scope that are plain values. The others belong to this process.
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)


class Replica:
    """One server without a port: runs the application for requests that arrive through Ray."""

    def __init__(self, source: str, load: QuantizedLoadOptions, options: ServerOptions, token: str | None) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        models = ModelRegistry(source, load, batch_size=options.batch_size, routing=options.routing)
        engine = Engine(options.batch_size, options.queue)
        # Addresses of images are refused: the next request may reach another replica.
        self.app = create_app(Studio(models, engine, token, images=None))
        models.start()
        engine.start()
        models.first_scan_done.wait()  # Ray gives it no request before

    def process(self) -> int:
        """Return the id of its process."""
        return os.getpid()

    async def respond(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Run the application for one request; yield its ASGI messages."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [body]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # when the client is gone, Ray cancels this generator
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            task.cancel()


class Front:
    """The ASGI application of the listening process: forwards requests to the replicas."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle.options(stream=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request; stop when its client disconnects."""
        body, more = b"", True
        while more:
            try:
                message = await receive()
            except HTTPException as error:  # larger than allowed
                await error_response(ApiError(error.status_code, error.detail))(scope, receive, send)
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = [asyncio.ensure_future(self._forward(scope, body, send)), asyncio.ensure_future(disconnected())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        import ray
        from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError

        plain = {key: scope[key] for key in SCOPE if key in scope}
        started, error = False, ApiError(UNAVAILABLE, f"{ATTEMPTS} replicas died while they processed this request")
        for _ in range(ATTEMPTS):
            response, stream, head = self.handle.respond.remote(plain, body), False, None
            try:
                async for message in response:
                    if message["type"] == "http.response.start":
                        # Held back until the first part of the body. A second attempt at a stream has none to send.
                        head = message
                        stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
                        continue
                    if not started and head is not None:
                        started = True
                        await send(head)
                    await send(message)
                return
            except BackPressureError:
                error = ApiError(QUEUE_FULL, "all replicas are busy; retry later", retry_after=MAX_RETRY_SECONDS)
                break
            except (ray.exceptions.RayError, ReplicaUnavailableError) as lost:
                # An error of the application itself, or the rest of a file that was sent in part.
                if isinstance(lost, ray.exceptions.RayTaskError) or (started and not stream):
                    raise
                print(f"a replica died ({type(lost).__name__}); sending its request again", file=sys.stderr, flush=True)
                await asyncio.sleep(PAUSE_SECONDS)
            finally:
                response.cancel()
        if not started:
            await error_response(error)(scope, _nothing, send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


class FrontServer(uvicorn.Server):
    """A server that does not raise its signals again at the end, where Ray's handler would exit with an error."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Finish running requests; after a second signal, exit at once."""
        self.force_exit, self.should_exit = self.should_exit, True


def serve_on_ray(source: str, load: QuantizedLoadOptions, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM, then remove the replicas."""
    check(source, options)
    fewest, most = options.replicas
    if not 1 <= fewest <= most:
        raise AtollError(f"expected --replicas MIN MAX with 1 <= MIN <= MAX, not {fewest} {most}")
    connected()
    try:
        from ray import serve
    except ImportError as error:
        raise AtollError("--on ray needs Ray Serve: pip install 'ray[serve]'") from error
    listener, token = open_address(source, options)
    name = f"atoll-{uuid4().hex[:8]}"
    deployment = serve.deployment(
        name="studio",
        # More than a batch waits in Ray, where replicas that become free can take it.
        max_ongoing_requests=options.batch_size,
        max_queued_requests=options.queue,
        graceful_shutdown_timeout_s=options.grace,
        ray_actor_options={"num_cpus": 1, "num_gpus": options.replica_gpus},
        autoscaling_config={
            "min_replicas": fewest, "max_replicas": most, "upscale_delay_s": UPSCALE_SECONDS,
            "target_ongoing_requests": options.batch_size,
        },
    )(Replica)  # fmt: skip
    # No ports of Ray's own: the address with token and limits is this process.
    serve.start(proxy_location="Disabled")
    try:
        handle = serve.run(deployment.bind(source, load, options, token), name=name, route_prefix=None)
        config = server_config(SecurityMiddleware(Front(handle), token))
        config.lifespan, config.timeout_graceful_shutdown = "off", int(options.grace)
        print(f"{fewest} of {most} replicas are ready", file=sys.stderr, flush=True)
        FrontServer(config).run([listener])
    finally:
        serve.delete(name)
