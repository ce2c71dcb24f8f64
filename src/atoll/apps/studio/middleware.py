"""Middleware before every route: token, host, origin and site checks, a bound on request bodies, security headers."""

import ipaddress
import json
import math
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.apps.studio.schemas import MAX_BODY_BYTES, ApiError
from atoll.apps.studio.tokens import TokenChecker

# The page loads everything from this server. `data:` and `blob:` images are generated images and images that need the
# token. `no-cache` makes browsers revalidate scripts after an update of Atoll.
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    # Pages of other sites cannot embed responses, or keep a reference to the window of the page.
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
# The page contains no data of the run, and it has the dialog for the token. Everything else needs the token.
_PUBLIC = ("/", "/health", "/openapi.json")


class AsciiJSONResponse(JSONResponse):
    """JSON in ASCII: error messages may quote lone surrogates of the request, which UTF-8 cannot encode."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode("ascii")


def error_response(error: ApiError) -> Response:
    """Return the HTTP response of an error."""
    headers = {} if error.retry_after is None else {"retry-after": str(math.ceil(error.retry_after))}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return AsciiJSONResponse({"error": {"message": error.message, "field": error.field}}, error.status, headers)


class SecurityMiddleware:
    """Check token, host, origin and site, bound the size of bodies, and add security headers."""

    # With a token, any host name is accepted (for instance behind a proxy). Without one, the server listens on loopback
    # only, but pages of other sites can still send requests through the user's browser: directly (cross-site requests,
    # which carry an Origin), or under a host name that resolves to 127.0.0.1 (DNS rebinding, which shows in the Host).
    # Both are rejected. Browsers also send Sec-Fetch-Site, which is checked with and without a token.

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.tokens = None if token is None else TokenChecker(token)
        """Checks the token; None accepts every client on this machine."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        error = _check_site(headers, path) or _check_length(headers)
        given = headers.get("authorization", "")
        if error is None and self.tokens is None:
            error = self._check_origin(headers)
        elif error is None and self.tokens is not None and (given or not _is_public(path)):
            error = await self.tokens.check(given, scope.get("client"))
        if error is not None:
            await error_response(error)(scope, receive, _with_headers(send))
            return
        # Routes that are public may still hold details back.
        scope.setdefault("state", {})["authorized"] = self.tokens is None or bool(given)
        await self.app(scope, _bounded(receive), _with_headers(send))

    def _check_origin(self, headers: Headers) -> ApiError | None:
        """Return an error if the host is not this machine, or if the origin is another site."""
        host = headers.get("host", "")
        if not is_loopback(_without_port(host)):
            return ApiError(403, "this server accepts requests for localhost only; to allow others, set a token")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return ApiError(403, "requests from pages of other sites are not allowed")
        return None


def _is_public(path: str) -> bool:
    return path in _PUBLIC or path.startswith("/page/")


def _check_site(headers: Headers, path: str) -> ApiError | None:
    """Return an error if a browser sends the request for a page of another site, or of another port of this host."""
    # `none` is a request of the user: an address that is typed, or a bookmark. A link may lead to the page.
    link = path == "/" and (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin") or link:
        return None
    return ApiError(403, "requests from pages of other sites are not allowed")


def _without_port(host: str) -> str:
    """Return a Host header without its port, and without the brackets of IPv6."""
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]


def _check_length(headers: Headers) -> ApiError | None:
    """Return an error if the declared length of the body is too large, before any of it is read."""
    length = headers.get("content-length", "0")
    # 20 digits are more than any length; int() of a header of many thousand digits would be slow or fail.
    if length.isascii() and length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        return ApiError(413, f"the body has {length[:20]} bytes; the maximum is {MAX_BODY_BYTES}")
    return None


def _bounded(receive: Receive) -> Receive:
    """Return a `receive` that fails once a body exceeds the maximum, for bodies without a (true) declared length."""
    seen = 0

    async def read() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is too large; the maximum is {MAX_BODY_BYTES} bytes")
        return message

    return read


def _with_headers(send: Send) -> Send:
    """Return a `send` that adds the security headers to every response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on this host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def field_of(location: Iterable[object]) -> str | None:
    """Return the request field of a pydantic error location; None if the whole body is invalid."""
    names = [str(part) for part in location if part != "body"]
    return names[0] if names else None
