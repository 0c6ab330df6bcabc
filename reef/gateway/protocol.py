"""The HTTP/1.1 connection: uvicorn's httptools protocol with limits on headers and on what is thrown away.

Knows: bytes of a request's head, one connection at a time. Does not know: routes or tokens.

- A head larger than the limit, or with too many headers, is answered 431 and the connection closed.
- A body that comes after its answer (refused early) is thrown away, up to a limit, so that the client reads the answer
  instead of a reset connection.
"""

from __future__ import annotations

from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEADER_BYTES = 64 * 1024
HEADERS = 256
DISCARDED = 80 * 1024 * 1024


class Protocol(HttpToolsProtocol):
    """`limits(header_bytes, headers)` makes a subclass with other limits."""

    header_bytes = HEADER_BYTES
    header_count = HEADERS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = 0  # bytes of the head that is being read
        self._reading = False  # in a head
        self._ended = False  # whether another request ended in this read, so that its bytes are not all of one head
        self._discarded = 0
        self._refused = False

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

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._head, self._discarded = True, 0, 0

    def on_headers_complete(self) -> None:
        self._reading = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.header_bytes or len(self.headers) > self.header_count:
            self._refuse()
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
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._write(400, "invalid_http", "this is not valid HTTP/1.1; check the request line and headers")

    def _refuse(self) -> None:
        text = f"the headers are larger than {self.header_bytes} bytes, or more than {self.header_count}; send less"
        self._write(431, "headers_too_large", text)

    def _write(self, status: int, code: str, message: str) -> None:
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an answer is under way: nothing may be put into it
            return
        error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
        body = orjson.dumps({"error": error})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def limited(header_bytes: int, headers: int) -> type[Protocol]:
    """The protocol with these limits."""
    return type("Protocol", (Protocol,), {"header_bytes": header_bytes, "header_count": headers})
