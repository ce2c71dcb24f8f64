"""Limits of connections: a deadline for every request and response, and a number of connections per client.

uvicorn closes idle connections between two requests, but it waits forever for the rest of a request that has begun.
So a client could exhaust the server with connections that send one byte a minute, or that never read their response.

A connection is *waiting* while it has no complete request: before its first request, between two, and within the
headers or the body of one. If a client opens more connections than its limit, its oldest waiting connection is closed
to make room for the new one. Other users of this machine share one address with the user of the server. Refusing the
new connection instead would let them lock the user out with connections that send nothing.
"""

import asyncio
from typing import Self

from uvicorn.protocols.http.h11_impl import H11Protocol

# A request is at most 16 kB of headers and MAX_BODY_BYTES of body, so 15 s allow for lines of 50 kbit/s.
REQUEST_SECONDS = 15.0
# Seconds that a client may leave the full send buffer (64 kB) of its connection unread: 1 kB/s.
RESPONSE_SECONDS = 60.0
# A browser opens six connections to a server. 64 are ten tabs, or the 32 clients of benchmarks/serve.py twice.
MAX_CONNECTIONS_PER_CLIENT = 64
# Half of the usual limit of 1024 open files per process; models and sockets of the event loop need some too.
MAX_CONNECTIONS = 512
_CLOSING = b"connection: close\r\ncontent-length: 0\r\n\r\n"
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSING
_REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n" + _CLOSING


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with deadlines and a limit of connections."""

    _request_timer: asyncio.TimerHandle | None = None
    _response_timer: asyncio.TimerHandle | None = None
    opened: float = 0.0
    """Time at which the connection was opened."""

    @property
    def waiting(self) -> bool:
        """Whether the connection has no complete request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request; close another connection if there are too many."""
        super().connection_made(transport)
        self.opened = self.loop.time()
        others = [each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self]
        others = [each for each in others if not each.transport.is_closing()]
        own = [each for each in others if each._address == self._address]
        if len(own) >= MAX_CONNECTIONS_PER_CLIENT:
            self._make_room(own)
        elif len(others) >= MAX_CONNECTIONS:
            self._make_room(others)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Handle some bytes of a request; a complete request ends its deadline."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Start the deadline of the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Start the deadline for reading a response."""
        super().pause_writing()
        self._response_timer = self.loop.call_later(RESPONSE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """End the deadline for reading a response."""
        super().resume_writing()
        _cancel(self._response_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all deadlines."""
        super().connection_lost(exc)
        _cancel(self._request_timer)
        _cancel(self._response_timer)

    @property
    def _address(self) -> str | None:
        return self.client[0] if self.client else None

    def _make_room(self, others: list[Self]) -> None:
        """Close the oldest waiting connection, or this one if all others have a request in progress."""
        if waiting := [each for each in others if each.waiting]:
            min(waiting, key=lambda each: each.opened).transport.abort()
        else:
            self.transport.write(_REFUSED)
            self.transport.close()

    def _watch(self) -> None:
        """Start the deadline of a request if the connection waits for one, or end it."""
        if not self.waiting or self.transport.is_closing():
            _cancel(self._request_timer)
            self._request_timer = None
        elif self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._close_late)

    def _close_late(self) -> None:
        """Close a connection whose request did not arrive in time."""
        self._request_timer = None
        if self.cycle is None or not self.cycle.response_started:
            self.transport.write(_TIMEOUT)
        # `close` would wait for a client that does not read.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
