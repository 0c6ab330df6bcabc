"""Messages over unix sockets: frames of a 4-byte big-endian length and msgpack, many requests at once on one socket.

- A caller that stops listening to a stream sends `cancel`; the handler's task is cancelled.
- A lost connection fails every request in flight with WireError, at once; the next call dials again.
- The listening socket belongs to the supervisor, so a dial during a restart waits in the backlog, not in an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

from reef.core import errors
from reef.core.wire import Every, Frame, Message, decode, encode

MAX_FRAME = 512 * 1024 * 1024
log = logging.getLogger(__name__)

Handler = Callable[[Message], Awaitable[Message] | AsyncIterator[Message]]
"""Answers one message: a coroutine for a call, an async iterator for a stream."""


async def _read(reader: asyncio.StreamReader) -> Frame | None:
    try:
        length = int.from_bytes(await reader.readexactly(4))
        if length > MAX_FRAME:
            raise errors.WireError(f"frame of {length} bytes; the limit is {MAX_FRAME}")
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _write(writer: asyncio.StreamWriter, frame: Frame) -> None:
    data = encode(frame)
    writer.write(len(data).to_bytes(4) + data)


def _failure(number: int, error: BaseException) -> Frame:
    if isinstance(error, errors.ReefError):
        return Frame(number, "error", None, (type(error).__name__, error.message, error.param))
    log.error("a handler failed", exc_info=error)
    return Frame(number, "error", None, ("WireError", "the process asked failed inside; its log says why", None))


class Client:
    """One connection to another Reef process, dialled at first use and again after a loss."""

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Frame | None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None
        self._dialling = asyncio.Lock()

    async def call(self, message: Message, *, timeout: float | None = None) -> Message:
        """Send one message, return its one answer. Raises the other side's ReefError, or WireError."""
        number, queue = await self._start("call", message)
        answered = False
        try:
            frame = await asyncio.wait_for(queue.get(), timeout)
            answered = True
            return self._unwrap(frame)
        except TimeoutError:
            raise errors.WireError(f"no answer within {timeout} s to {type(message).__name__}") from None
        finally:
            self._finish(number, done=answered)

    async def stream(self, message: Message) -> AsyncIterator[Message]:
        """Send one message, yield its items until the end. Leaving early cancels it on the other side."""
        number, queue = await self._start("stream", message)
        ended = False
        try:
            while True:
                frame = await queue.get()
                if frame is None or frame.kind != "item":
                    ended = True
                if frame is not None and frame.kind == "end":
                    return
                yield self._unwrap(frame)
        finally:
            self._finish(number, done=ended)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump

    async def _start(self, kind: str, message: Message) -> tuple[int, asyncio.Queue[Frame | None]]:
        async with self._dialling:
            if self._writer is None or self._writer.is_closing():
                await self._dial()
        number = next(self._numbers)
        queue: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._waiting[number] = queue
        assert self._writer is not None
        _write(self._writer, Frame(number, kind, cast(Every, message)))
        return number, queue

    async def _dial(self) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise errors.WireError(f"cannot reach {Path(self._path).stem}: {error.strerror or error}") from None
        self._writer = writer
        self._pump = asyncio.create_task(self._receive(reader, writer))

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (frame := await _read(reader)) is not None:
                if (queue := self._waiting.get(frame.number)) is not None:
                    queue.put_nowait(frame)
        finally:
            writer.close()
            if self._writer is writer:
                self._writer = None
                for queue in self._waiting.values():
                    queue.put_nowait(None)

    def _unwrap(self, frame: Frame | None) -> Message:
        if frame is None:
            raise errors.WireError(f"{Path(self._path).stem} went away before it answered")
        if frame.error is not None:
            name, text, param = frame.error
            raise errors.BY_NAME.get(name, errors.WireError)(text, param=param)
        if frame.message is None:
            raise errors.WireError("empty answer")
        return frame.message

    def _finish(self, number: int, *, done: bool) -> None:
        self._waiting.pop(number, None)
        if not done and self._writer is not None and not self._writer.is_closing():
            _write(self._writer, Frame(number, "cancel"))


async def serve(listener: socket.socket, handler: Handler) -> asyncio.Server:
    """Answer messages on a listening unix socket until the server is closed."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running: dict[int, asyncio.Task[None]] = {}

        async def answer(frame: Frame) -> None:
            try:
                assert frame.message is not None
                result = handler(frame.message)
                if frame.kind == "stream":
                    assert isinstance(result, AsyncIterator)
                    async with contextlib.aclosing(result) as items:  # type: ignore[type-var]
                        async for item in items:
                            _write(writer, Frame(frame.number, "item", cast(Every, item)))
                            await writer.drain()
                    _write(writer, Frame(frame.number, "end"))
                else:
                    assert not isinstance(result, AsyncIterator)
                    _write(writer, Frame(frame.number, "reply", cast(Every, await result)))
            except asyncio.CancelledError:
                raise
            except ConnectionError:
                pass
            except Exception as error:
                _write(writer, _failure(frame.number, error))
            finally:
                running.pop(frame.number, None)

        try:
            while (frame := await _read(reader)) is not None:
                if frame.kind == "cancel":
                    if (task := running.get(frame.number)) is not None:
                        task.cancel()
                else:
                    running[frame.number] = asyncio.create_task(answer(frame))
        except asyncio.CancelledError:
            pass  # the process ends: left to propagate, asyncio would log it as the connection's own error
        finally:
            for task in list(running.values()):
                task.cancel()
            writer.close()

    return await asyncio.start_unix_server(connected, sock=listener)
