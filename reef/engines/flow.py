"""A provider's stream on its way to the client: its bytes as they came, a reader beside them, the end held back.

Knows: when a stream has ended properly, packed streams, log-probs that do not stand for every token.
Does not know: how the stream was asked for, or any dialect's events (a `dialect.Reader` is handed in).

- The bytes from the event that ends the stream on are one terminal piece: whoever sends them on decides when.
- A stream that ends otherwise raises. What came until then has passed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from reef.core.errors import UpstreamError
from reef.engines import Ask, Piece
from reef.engines.decode import GZIP, STEP, ZSTD, Decoder
from reef.engines.dialect import Reader
from reef.engines.dialect.value import load
from reef.engines.http import Broken, Response
from reef.engines.sse import Event, Events

MAX_STREAM = 256 * 1024 * 1024  # bytes of one stream, unpacked
MAX_REST = 1024 * 1024  # bytes behind its end that still pass
ENDS = {"chat": "data: [DONE]", "responses": "response.completed", "messages": "message_stop"}


class Flow:
    """A stream passing: its bytes as they came, a reader beside them, the end held back."""

    def __init__(
        self, host: str, ask: Ask, response: Response, said: Reader, show: Callable[[Event], bytes] | None = None
    ) -> None:
        """`show`: an event's bytes as they pass on, once the reader has it; None: as they came."""
        self.said = said
        self._show = show or (lambda event: event.raw)
        self.scored: int | None = 0 if wants_scores(ask) else None
        self._host = host
        self._end = ENDS.get(ask.dialect, "its end")
        self._response = response
        self._events = Events()
        encoding = response.headers.get("content-encoding")
        self._decoder = Decoder(encoding, MAX_STREAM) if encoding else None
        self._begun = False
        self._size = 0
        self._plain: Iterator[bytes] = iter(())  # what the last bytes unpack to
        self._held: bytes | None = None
        self._ended = False

    async def next(self) -> Piece | None:
        """The next bytes, the last of them terminal, then None. UpstreamError when the end is not a proper one."""
        while self._held is None:
            plain = await self._some()
            if plain is not None:
                found = self._events.feed(plain)
            else:
                last = self._events.finish()
                found = [] if last is None else [last]
            passed = self._take(found)
            if plain is None and self._held is None:
                raise UpstreamError(f"{self._host} ended its stream without {self._end}")
            if passed:
                return Piece(passed)
        if self._ended:
            return None
        if self.said.error is None and not self.said.finished:
            raise UpstreamError(f"{self._host} ended its stream without a finish_reason")
        self._ended = True
        return Piece(self._held + self._events.rest + await self._rest(), terminal=True)

    def _take(self, found: list[Event]) -> bytes:
        """Read events; the bytes before the one that ends the stream."""
        for place, event in enumerate(found):
            if event.data is None:
                continue
            if self.scored is not None:
                self.scored += count_scores(event.data)
            if self.said.event(event):
                self._held = b"".join([self._show(item) for item in found[place:]])
                found = found[:place]
                break
        return self._show(found[0]) if len(found) == 1 else b"".join([self._show(item) for item in found])

    async def _some(self) -> bytes | None:
        """The next plain bytes, None at the end. Much that unpacks from little comes step by step."""
        data = next(self._plain, None)
        if data is not None:
            await asyncio.sleep(0)
        else:
            packed = await self._response.some()
            if not packed:
                return None
            data = self._unpack(packed)
        self._size += len(data)
        if self._size > MAX_STREAM:
            raise UpstreamError(f"{self._host} streamed more than {MAX_STREAM} bytes")
        return data

    def _unpack(self, data: bytes) -> bytes:
        """The first of the plain bytes; the others wait in `_plain`."""
        if not self._begun and self._decoder is None and data.startswith((GZIP[:1], ZSTD[:1])):
            self._decoder = Decoder(None, MAX_STREAM)  # packed without saying so: no event begins like this
        self._begun = True
        if self._decoder is None:
            return data
        self._plain = self._decoder.pieces(data)
        return next(self._plain, b"")

    async def _rest(self) -> bytes:
        """What still comes behind the end, within the moment it takes to see the body's own end."""
        parts, size = [], 0
        try:
            while (data := next(self._plain, None)) is not None and size <= MAX_REST:
                parts.append(data)
                size += len(data)
                await asyncio.sleep(0)
            if data is None and (packed := await drain(self._response)):
                parts.append(self._unpack(packed))
                parts += [*itertools.islice(self._plain, MAX_REST // STEP)]
        except UpstreamError:
            pass
        return b"".join(parts)[:MAX_REST]


async def drain(response: Response) -> bytes:
    """Read on to the end of the body, which usually is there already, so that the connection can be used again."""
    parts = []
    try:
        if not response.read:
            async with asyncio.timeout(0.02):
                while data := await response.some():
                    parts.append(data)
    except (TimeoutError, Broken):
        pass
    return b"".join(parts)


def wants_scores(ask: Ask) -> bool:
    return ask.dialect == "chat" and b'"logprobs"' in ask.body


def count_scores(text: str | bytes) -> int:
    """How many tokens of a chat answer, or of a chunk, have a log-prob."""
    try:
        choices: Any = load(text)
        choices = choices["choices"]
        return sum(len((choice.get("logprobs") or {}).get("content") or ()) for choice in choices)
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0
