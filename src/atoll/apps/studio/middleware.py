"""Middleware before every route: token, host, origin and site checks, a bound on request bodies, security headers."""

import hmac
import ipaddress
import json
import math
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.apps.studio.schemas import MAX_BODY_BYTES, ApiError

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
# The random name of a generated image is as long as a token.
_PUBLIC_FOLDERS = ("/page/", "/v1/files/")


class AsciiJSONResponse(JSONResponse):
    """JSON in ASCII: error messages may quote lone surrogates of the request, which UTF-8 cannot encode."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode("ascii")


def error_response(error: ApiError) -> Response:
    """Return the HTTP response of an error."""
    headers = {} if error.retry_after is None else {"retry-after": str(math.ceil(error.retry_after))}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    # The form of OpenAI's API, whose clients raise an error type for each status and show `type` and `code`.
    kind = (
        "server_error"
        if error.status >= 500
        else "rate_limit_error"
        if error.status == 429
        else "invalid_request_error"
    )
    codes = {(401, None): "invalid_api_key", (404, "model"): "model_not_found", (429, None): "rate_limit_exceeded"}
    code = codes.get((error.status, error.field))
    detail = {"message": error.message, "type": kind, "param": error.field, "code": code}
    return AsciiJSONResponse({"error": detail}, error.status, headers)


class SecurityMiddleware:
    """Check token, host, origin and site, bound the size of bodies, and add security headers."""

    # With a token, any host name is accepted (for instance behind a proxy). Without one, the server listens on loopback
    # only, but pages of other sites can still send requests through the user's browser: directly (cross-site requests,
    # which carry an Origin), or under a host name that resolves to 127.0.0.1 (DNS rebinding, which shows in the Host).
    # Both are rejected. Browsers also send Sec-Fetch-Site, which is checked with and without a token.

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.token = token
        """None accepts every client on this machine."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, seen = Headers(scope=scope), 0

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    found.setdefault(name, value)
            await send(message)

        async def receive_bounded() -> Message:
            # For bodies without a (true) declared length.
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is too large; the maximum is {MAX_BODY_BYTES} bytes")
            return message

        if error := self.check(scope["path"], headers):
            await error_response(error)(scope, receive, send_with_headers)
            return
        # Routes that are public may still hold details back.
        scope.setdefault("state", {})["authorized"] = self.token is None or bool(headers.get("authorization"))
        await self.app(scope, receive_bounded, send_with_headers)

    def check(self, path: str, headers: Headers) -> ApiError | None:
        """Return the error of a request that must not reach the routes, before any of its body is read."""
        # A page of another site, or of another port of this host. `none` is a request of the user: an address that is
        # typed, or a bookmark. A link may lead to the page.
        other_site = ApiError(403, "requests from pages of other sites are not allowed")
        link = (path, headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("/", "navigate", "document")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not link:
            return other_site
        # 20 digits are more than any length; int() of a header of many thousand digits would be slow or fail.
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            return ApiError(413, f"the body has {length[:20]} bytes; the maximum is {MAX_BODY_BYTES}")
        if self.token is None:
            # The host without its port, and without the brackets of IPv6.
            host, origin = headers.get("host", ""), headers.get("origin")
            name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
            if not is_loopback(name):
                return ApiError(403, "this server accepts requests for localhost only; to allow others, set a token")
            return other_site if origin is not None and origin.partition("://")[2] != host else None
        given = headers.get("authorization", "")
        if not given:
            public = path in _PUBLIC or path.startswith(_PUBLIC_FOLDERS)
            return None if public else ApiError(401, "a token is required; send it as Authorization: Bearer TOKEN")
        # A comparison in constant time does not reveal how many characters were right.
        right = hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {self.token}".encode())
        return None if right else ApiError(401, "the token is wrong")


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
