"""One HTTP/1.1 connection that asks and reads, with as little of its own time as Python allows.

Knows: a request as bytes around a counter of fixed width, response heads, lengths and chunks.
Does not know: what is measured. Each request differs in its counter, as no two real requests are equal.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

WIDTH = 16  # digits of the counter
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the bytes before and after its counter."""

    before: bytes
    after: bytes

    def numbered(self) -> Iterator[bytes]:
        """The request again and again, each with a number that was not used before."""
        start = int.from_bytes(os.urandom(6), "big")
        for number in itertools.count(start):
            yield b"%b%0*d%b" % (self.before, WIDTH, number, self.after)


def request(headers: Mapping[str, str], kilobytes: float = 0.2, *, chunks: int = 0) -> Request:
    """A chat completion of about that size: a short new question after a history that every request shares.

    `chunks`: ask for a stream of that many.
    """
    mark = "0" * WIDTH
    messages = [{"role": "system", "content": "You answer in one word."}]
    rest = int(kilobytes * 1000) - 200
    while rest > 0:
        role = "user" if len(messages) % 2 else "assistant"
        part = min(rest, 4000)
        messages.append({"role": role, "content": f"{len(messages)} " + "What came before. " * (part // 18)})
        rest -= part
    messages.append({"role": "user", "content": f"The capital of France? ({mark})"})
    fields = {"stream": True, "max_tokens": chunks} if chunks else {}
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        "accept: application/json",
        "user-agent: bench/1",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    left, _, right = body.rpartition(mark.encode())
    return Request("\r\n".join([*head, "", ""]).encode() + left, right)


class Wire(asyncio.Protocol):
    """One connection; `ask` one request at a time, answered with (head, body)."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._buffer = b""

    @classmethod
    async def open(cls, port: int) -> Wire:
        _, wire = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return wire

    def ask(self, data: bytes) -> asyncio.Future[tuple[bytes, bytes]]:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answer

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end < 4 or self._answer is None:
            return
        head = self._buffer[: end - 2]
        if length := _LENGTH.search(head):
            whole = len(self._buffer) >= end + int(length[1])
        else:
            whole = self._buffer.endswith(b"0\r\n\r\n")
        if whole and not self._answer.done():
            self._answer.set_result((head, self._buffer[end:]))
            self._buffer = b""

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))


def ok(head: bytes) -> bool:
    return head.startswith(b"HTTP/1.1 200")


def header(head: bytes, name: str) -> str | None:
    """A response header's value."""
    found = re.search(rb"\r\n" + re.escape(name.encode()) + rb": *([^\r]*)\r\n", head, re.IGNORECASE)
    return found[1].decode() if found else None
