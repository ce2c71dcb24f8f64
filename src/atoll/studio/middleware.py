"""What stands before every route: who may ask, how much may be sent, and headers that keep the page to itself."""

import hmac
import ipaddress
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.studio.schemas import BODY, RefusalError

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Plain(JSONResponse):
    """JSON of ASCII alone: whatever a message quotes can be sent."""

    def render(self, content: object) -> bytes:
        """The body."""
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode("ascii")


def problem(refusal: RefusalError) -> Response:
    """The answer to a request that is not served."""
    headers = {} if refusal.retry_after is None else {"retry-after": str(math.ceil(refusal.retry_after))}
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Plain({"error": {"message": refusal.message, "field": refusal.field}}, refusal.status, headers)


@dataclass(frozen=True)
class Guard:
    """Checks token, host and origin, and bounds the size of what is sent."""

    app: ASGIApp
    token: str | None
    """What `Authorization: Bearer` must say for /v1 and /metrics; None if anyone on this machine may ask."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        refusal = self._stranger(headers) if self.token is None else self._wrong_token(headers, path, self.token)
        if refusal is None:
            refusal = _too_large(headers)
        if refusal is not None:
            await problem(refusal)(scope, receive, _protected(send))
        else:
            await self.app(scope, _bounded(receive), _protected(send))

    def _stranger(self, headers: Headers) -> RefusalError | None:
        """Pages of others must not reach a server without token: by a name for this machine, or across sites."""
        host = headers.get("host", "")
        if not is_loopback(_name(host)):
            return RefusalError(403, "this server answers to localhost only; for others start it with a token")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return RefusalError(403, "a page of another site may not ask this server")
        return None

    def _wrong_token(self, headers: Headers, path: str, token: str) -> RefusalError | None:
        if not path.startswith(("/v1/", "/metrics")):
            return None
        given = headers.get("authorization", "")
        if not given:
            return RefusalError(401, "a token is needed: send it as Authorization: Bearer TOKEN")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {token}".encode()):
            return RefusalError(401, "this is not the token of this server")
        return None


def _name(host: str) -> str:
    """A host without its port."""
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]


def _too_large(headers: Headers) -> RefusalError | None:
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdecimal() and int(length[:20]) > BODY:
        return RefusalError(413, f"the body has {length[:20]} bytes; at most {BODY} are read")
    return None


def _bounded(receive: Receive) -> Receive:
    """Read no more of a body than is allowed, whatever its sender says of its length."""
    seen = 0

    async def read() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > BODY:
            raise HTTPException(413, f"the body is too large; at most {BODY} bytes are read")
        return message

    return read


def _protected(send: Send) -> Send:
    """Add the headers that every answer has."""

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return with_headers


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to this host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def field_of(places: Iterable[object]) -> str | None:
    """The name of the field at which pydantic found fault."""
    names = [str(place) for place in places if place != "body"]
    return names[0] if names else None
