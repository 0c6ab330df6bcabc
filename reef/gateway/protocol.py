"""The HTTP/1.1 connection: uvicorn's httptools protocol with limits on headers and on what is thrown away.

Knows: bytes of a request's head, one connection at a time. Does not know: routes or tokens.

- A head larger than the limit, or with too many headers, is answered 431 and the connection closed.
- A connection that is idle from the start, or whose head does not end in time, is closed; with half a head it is
  answered 408. At a stop, a request whose body is still to come is answered 503 after a moment.
- A body that comes after its answer (refused early) is thrown away, up to a limit, so that the client reads the answer
  instead of a reset connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from reef.gateway.call import KEY, Line
from reef.gateway.lines import Lines

HEADER_BYTES = 64 * 1024
HEADERS = 256
CONNECTIONS = 4096
PIPELINED = 64  # requests that may wait on one connection for the answers before theirs
STALLED = 30.0  # seconds in which a client that is sent something must read some of it
DISCARDED = 80 * 1024 * 1024
HEAD = 60.0  # seconds from a connection, or a head's first byte, to the head's end
STOPPING = 1.0  # seconds a stop waits for the rest of a request's body
_refusals = Lines(logging.getLogger(__name__), "refused %d more requests with too large headers")


class Protocol(HttpToolsProtocol):
    """`limited(header_bytes, headers, connections)` makes a subclass with other limits."""

    header_bytes = HEADER_BYTES
    header_count = HEADERS
    most_connections = CONNECTIONS
    head_seconds = HEAD
    stop_seconds = STOPPING
    stalled_seconds = STALLED

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = 0  # bytes of the head that is being read
        self._reading = False  # in a head
        self._ended = False  # whether another request ended in this read, so that its bytes are not all of one head
        self._discarded = 0
        self._refused = False
        self._clock: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            text = "this server has as many connections open as it may; close some, or try again"
            self._write(503, "too_many_connections", text, kind="api_error")
            return
        self._wind(self.head_seconds, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwind()
        self._flowing()
        super().connection_lost(exc)
        if self.cycle is not None and not self.cycle.response_complete:
            cast(Line, (self.cycle.scope["extensions"] or {})[KEY]).lose()

    def shutdown(self) -> None:
        super().shutdown()
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self._wind(self.stop_seconds, self._abandon)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._ended = False
        super().data_received(data)
        if self._reading and not self._ended and not self._refused:
            # A head that has not ended in this read; its parser holds what it got so far.
            self._head += len(data)
            if self._head > self.header_bytes:
                self._refuse()
        if self._clock is None and (self.cycle is None or self.cycle.response_complete):
            # Bytes, but no request in work: a head that goes on, or what is left of a refused body. uvicorn has just
            # put its own clock away, and one byte now and then would hold the connection for good.
            self._wind(self.head_seconds, self._late)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:  # these first: else each answer lets another read in, and what waits grows without end
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None and not self.transport.is_closing():
            self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._flowing()

    def _watch(self, left: int) -> None:
        """Close a connection whose client reads nothing of what it is sent: `left` bytes wait for it now."""

        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if now >= left:
                self.transport.abort()
            else:
                self._watch(now)

        self._stall = self.loop.call_later(self.stalled_seconds, look)

    def _flowing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {KEY: Line(self._reply)}  # type: ignore[dict-item]
        self._reading, self._head, self._discarded = True, 0, 0

    def on_headers_complete(self) -> None:
        self._reading = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.header_bytes or len(self.headers) > self.header_count:
            self._refuse()
            return
        self._unwind()
        if len(self.pipeline) >= PIPELINED:
            self._refused = True  # what was answered went out; the rest may be sent again on other connections
            self.transport.close()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > DISCARDED:
                self.transport.close()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._ended = True
        if not self._refused:
            cast(dict[str, Any], self.scope)["extensions"][KEY].whole = True
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._write(400, "invalid_http", "this is not valid HTTP/1.1; check the request line and headers")

    def _reply(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """A whole answer in one write. Names and values are ours or were checked (`exchange`), so nobody looks again.

        What is unusual goes the usual way, by the cycle's own `send`.
        """
        cycle = self.cycle
        if (
            cycle is None
            or cycle.response_started
            or cycle.disconnected
            or not cycle.keep_alive
            or self.flow.write_paused
            or self.pipeline
            or cycle.scope["method"] == "HEAD"
        ):
            return False
        parts = [STATUS_LINE[status]]
        for name, value in cycle.default_headers:
            parts += (name, b": ", value, b"\r\n")
        for name, value in headers:
            if name == b"connection":
                return False
            parts += (name, b": ", value, b"\r\n")
        parts += (b"content-length: %d\r\n\r\n" % len(body), body)
        cycle.response_started = cycle.response_complete = True
        self.transport.write(b"".join(parts))
        cycle.message_event.set()
        cycle.on_response()
        return True

    def _wind(self, seconds: float, ring: Callable[[], None]) -> None:
        self._unwind()
        if not self.transport.is_closing():
            self._clock = self.loop.call_later(seconds, ring)

    def _unwind(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        if self._reading and not self._refused:
            text = f"the headers were not whole after {self.head_seconds:.0f} s; send them again"
            self._write(408, "headers_timeout", text)
        else:
            self.transport.close()

    def _abandon(self) -> None:
        """The server stops, and this request's body has not come: nothing was begun, so it may go elsewhere."""
        if not self.cycle.more_body or self.cycle.response_started or self.transport.is_closing():
            return
        self.cycle.response_started = self.cycle.response_complete = True  # nobody else writes one now
        self._write(503, "stopping", "the server is stopping; send the request again", kind="api_error")
        self.cycle.message_event.set()

    def _refuse(self) -> None:
        text = f"the headers are larger than {self.header_bytes} bytes, or more than {self.header_count}; send less"
        _refusals.tell("", self.client, text)
        self._write(431, "headers_too_large", text)

    def _write(self, status: int, code: str, message: str, kind: str = "invalid_request_error") -> None:
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an answer is under way: nothing may be put into it
            return
        error = {"message": message, "type": kind, "code": code, "param": None}
        body = orjson.dumps({"error": error})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        if status == 503:
            head = b"retry-after: 1\r\n" + head
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def limited(header_bytes: int, headers: int, connections: int) -> type[Protocol]:
    """The protocol with these limits."""
    given = {"header_bytes": header_bytes, "header_count": headers, "most_connections": connections}
    return type("Protocol", (Protocol,), given)
