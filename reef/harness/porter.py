"""The way out of a room: HTTP requests to one gateway, and of those the ones that ask a model.

Knows: just enough HTTP/1.1 to read one request's head, decide, and pass bytes on. Does not know: tokens (the gateway
judges them), dialects, or who asks.

- One request a connection, each way, so that what is let through is exactly what was looked at.
- A request is passed on with a head of our own making; what belongs to a connection, or could be read in two ways, is
  left out or refused. `x-reef-harness: off` is always said: the tree is in the client's files already.
- It counts what went wrong at the gateway, which says nothing of the agent: `troubles`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

HEAD: Final = 64 * 1024
BODY: Final = 64 * 1024 * 1024
CONNECT = 10.0
PIECE: Final = 1 << 16
MANY: Final = 64  # connections at once
ASKS = re.compile(r"(?:/s/[a-z0-9][a-z0-9._-]{0,62})?/v1/(?:chat/completions|messages|responses|embeddings)")
COUNTS = re.compile(r"(?:/s/[a-z0-9][a-z0-9._-]{0,62})?/v1/messages/count_tokens")
LISTS = re.compile(r"(?:/s/[a-z0-9][a-z0-9._-]{0,62})?/v1/models(?:/[\w@:-][\w.@:-]{0,99}){0,4}")
_OURS = {"connection", "keep-alive", "proxy-connection", "proxy-authorization", "te", "trailer", "upgrade", "expect"}
_OURS |= {"host", "content-length", "transfer-encoding", "x-reef-harness", "x-reef-release", "http2-settings"}
_AWAY = {401, 404, 408, 429}


class Refused(Exception):
    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(slots=True)
class Porter:
    """Answers the connections of a listening socket, from `open` to `close`. `calls` were let through to a model, at
    most `most`; `receipts` are of their answers."""

    address: str
    most: int = 500
    calls: int = 0
    refused: list[str] = field(default_factory=list)  # what was asked for and not let through
    troubles: list[str] = field(default_factory=list)
    receipts: list[str] = field(default_factory=list)
    spent: bool = False  # more was asked than `most`
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def open(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._answer, sock=listener, limit=HEAD)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MANY:
            writer.close()
            return
        self._tasks.add(task)
        try:
            try:
                head, size = self._read(await reader.readuntil(b"\r\n\r\n"))
                await self._pass(head, size, reader, writer)
            except Refused as refusal:
                self.refused.append(str(refusal))
                writer.write(_refusal(refusal))
                await writer.drain()
            except asyncio.LimitOverrunError:
                writer.write(_refusal(Refused("431 Request Header Fields Too Large", "the head is too long")))
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # the client went away
        finally:
            self._tasks.discard(task)
            writer.close()

    def _read(self, data: bytes) -> tuple[bytes, int]:
        """(the head to pass on, bytes of body). Refused."""
        first, *lines = data.decode("latin-1")[:-4].split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or not re.fullmatch(r"[!-~]+", words[1]):
            raise Refused("400 Bad Request", "not an HTTP/1.1 request")
        method, target, _ = words
        path = target.partition("?")[0]
        asks = method == "POST" and ASKS.fullmatch(path)
        if not (asks or (method == "POST" and COUNTS.fullmatch(path)) or (method == "GET" and LISTS.fullmatch(path))):
            raise Refused("403 Forbidden", f"an episode can only ask a model, not {method[:20]} {path[:200]}")
        headers = [_header(line) for line in lines]
        named = [name for name, _ in headers]
        if "transfer-encoding" in named or named.count("content-length") > 1:
            raise Refused("411 Length Required", "send the body with one content-length")
        length = next((value for name, value in headers if name == "content-length"), "0")
        if not length.isdecimal() or not length.isascii() or int(length) > BODY:
            raise Refused("413 Content Too Large", f"a body has at most {BODY} bytes")
        if asks and self.calls >= self.most:
            self.spent = True
            raise Refused("403 Forbidden", f"this episode has asked {self.most} times, which is all it may")
        self.calls += bool(asks)
        hidden = {word.strip().lower() for name, value in headers if name == "connection" for word in value.split(",")}
        kept = [f"{name}: {value}" for name, value in headers if name not in _OURS | hidden]
        host = urlsplit(self.address).netloc
        kept += [f"host: {host}", "connection: close", f"content-length: {int(length)}", "x-reef-harness: off"]
        return "\r\n".join([f"{method} {target} HTTP/1.1", *kept, "", ""]).encode("latin-1"), int(length)

    async def _pass(self, head: bytes, size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = urlsplit(self.address)
        try:
            async with asyncio.timeout(CONNECT):
                back, forth = await asyncio.open_connection(at.hostname, at.port or 80, limit=HEAD)
        except (OSError, TimeoutError) as error:
            self.troubles.append(f"Reef cannot be reached ({error or 'no answer'})")
            raise Refused("502 Bad Gateway", "Reef cannot be reached") from None
        sending = asyncio.create_task(_send(head, size, reader, forth))
        try:
            await self._back(back, writer)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            forth.close()

    async def _back(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The answer as it comes, to its end; what is wrong with it that the agent has no part in."""
        try:
            head = await back.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            self.troubles.append("Reef ended the connection without an answer")
            return
        text = head.decode("latin-1").lower()
        if found := re.search(r"\r\nx-reef-agent-record-id: *([0-9a-f]{32})\r\n", text):
            self.receipts.append(found[1])
        length = re.search(r"\r\ncontent-length: *(\d+)\r\n", text)
        chunked = "\r\ntransfer-encoding: chunked\r\n" in text
        status = int(text[9:12]) if text[9:12].isdecimal() else 0
        if status in _AWAY or status >= 500 or not status:
            self.troubles.append(f"Reef answered {status}")
        writer.write(head)
        got, end = 0, b""
        with contextlib.suppress(ConnectionError):
            while data := await back.read(PIECE):
                got, end = got + len(data), (end + data)[-5:]
                writer.write(data)
                await writer.drain()
        if writer.is_closing():
            return  # the client did not wait for the end
        if (length and got < int(length[1])) or (chunked and end != b"0\r\n\r\n"):
            self.troubles.append("an answer of Reef broke off")
            if writer.transport is not None:
                writer.transport.abort()


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search(r"[\x00-\x08\x0a-\x1f]", value):
        raise Refused("400 Bad Request", "a header line is not one")
    return name.lower(), value.strip()


async def _send(head: bytes, size: int, reader: asyncio.StreamReader, forth: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        forth.write(head)
        while size > 0 and (data := await reader.read(min(size, PIECE))):
            size -= len(data)
            forth.write(data)
            await forth.drain()
        if size > 0:
            forth.close()  # the client went away before its request was whole


def _refusal(refusal: Refused) -> bytes:
    body = json.dumps({"error": {"type": "permission_error", "code": "episode", "message": str(refusal)}}).encode()
    head = f"HTTP/1.1 {refusal.status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + body
