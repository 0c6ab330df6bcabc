"""Streaming: what the gateway adds to the first byte and to each chunk of a stream of 200 chunks at 5 ms.

Knows: the streaming upstream (`source`) writes the moment of sending into each chunk, by the machine's one monotonic
clock, so a chunk's delay is measured exactly. Does not know: what is between the upstream and this client.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import uvloop

from kit.ask import request
from kit.server import Trouble

CHUNKS, SHORT, TIMES = 200, 2, 20  # of a whole stream; of a short one, and how many of those
_SENT = re.compile(rb'"content": ?"(\d+) "')


@dataclass(slots=True)
class Heard:
    """What streams were like, in milliseconds: to the first byte, from one chunk to the next, each chunk's way."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)


class _Listener(asyncio.Protocol):
    def __init__(self) -> None:
        self.arrivals: list[int] = []
        self.sent: list[int] = []
        self.first = 0
        self.done = asyncio.get_running_loop().create_future()
        self.head = b""
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.first = self.first or now
        self.head = self.head or data[:300]
        self._rest += data
        place = 0
        for found in _SENT.finditer(self._rest):
            self.sent.append(int(found[1]))
            self.arrivals.append(now)
            place = found.end()
        if b"[DONE]" in self._rest and not self.done.done():
            self.done.set_result(None)
        self._rest = self._rest[max(place, len(self._rest) - 400) :]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(Trouble(f"a stream broke off: {self.head.decode(errors='replace')}"))


def warm(port: int, headers: Mapping[str, str], streams: int) -> None:
    """Short streams that only open the way."""
    uvloop.run(_hear(port, headers, streams, SHORT))


def listen(port: int, headers: Mapping[str, str], streams: int) -> Heard:
    """Hear that many streams at once; before them short ones, as many at once, for the time to the first byte."""
    gc.disable()
    try:
        return uvloop.run(_listen(port, headers, streams))
    finally:
        gc.enable()


async def _listen(port: int, headers: Mapping[str, str], streams: int) -> Heard:
    first: list[float] = []
    for _ in range(TIMES):
        first += (await _hear(port, headers, streams, SHORT)).first
    heard = await _hear(port, headers, streams, CHUNKS)
    return Heard(first, heard.gaps, heard.delays)


async def _hear(port: int, headers: Mapping[str, str], streams: int, chunks: int) -> Heard:
    """Streams that begin at moments spread over more than one period."""
    heard, numbered = Heard(), request(headers, chunks=chunks).numbered()
    loop = asyncio.get_running_loop()

    async def one(number: int) -> None:
        transport, listener = await loop.create_connection(_Listener, "127.0.0.1", port)
        await asyncio.sleep(0.001 * number)
        begun = time.monotonic_ns()
        transport.write(next(numbered))
        await listener.done
        transport.close()
        if len(listener.sent) != chunks:
            raise Trouble(f"a stream had {len(listener.sent)} chunks of {chunks}: {listener.head.decode()}")
        heard.first.append((listener.first - begun) / 1e6)
        heard.gaps += [(b - a) / 1e6 for a, b in itertools.pairwise(listener.arrivals)]
        heard.delays += [(b - a) / 1e6 for a, b in zip(listener.sent, listener.arrivals, strict=True)]

    await asyncio.gather(*(one(number) for number in range(streams)))
    return heard
