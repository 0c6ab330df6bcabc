"""HTTP/1.1 to one server: connections that are kept, a response read as it comes, and little work for each request.

Knows: requests with a known length, responses of every framing, proxies (absolute form, CONNECT), limits, timeouts.
Does not know: who is asked for what; redirects, cookies and content encodings are the caller's.

- A connection carries one request at a time and is used again only when its response ended where it should.
- `Unreachable` means that nothing was sent; `Broken` that the server may have worked on the request. A kept connection
  that the server closed just as a request went out is neither: the request goes out again over another.
- The bytes that came before a failure are read before it is raised.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import httptools

KEPT = 30.0  # seconds that a connection without work is kept
MAX_HEAD = 64 * 1024  # bytes of a response's headers, and of whatever else is not its body
STALE = 0.5  # seconds within which a kept connection that ends had been closed before the request came
_FULL = 256 * 1024  # bytes waiting to be read at which a connection stops receiving


class Unreachable(Exception):
    """No connection could be made. `kind` says why in one word; `final`: it would not be otherwise next time."""

    def __init__(self, kind: str, *, final: bool = False, late: bool = False, full: bool = False) -> None:
        super().__init__(kind)
        self.kind = kind
        self.final = final
        self.late = late  # it took too long
        self.full = full  # every connection that there may be is at work


class Broken(Exception):
    """A connection ended, or carried what is no HTTP, before the response was whole."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Response:
    """What a server answers. Header names are in lower case; `some` and `rest` raise Broken or TimeoutError."""

    __slots__ = ("_error", "_line", "_parts", "_size", "_waiter", "ended", "headers", "status")

    def __init__(self, line: _Line) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended = False
        self._line: _Line | None = line
        self._parts: list[bytes] = []
        self._size = 0
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def read(self) -> bool:
        """Whether everything was read."""
        return self.ended and not self._parts

    async def some(self) -> bytes:
        """All the bytes that are there, waiting for the first; empty at the end."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.ended:
                return b""
            await self.wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._line is not None:
            self._line.resume()
        return data

    def close(self) -> None:
        """Stop the server's work, if it is not done."""
        if self._line is not None:
            self._line.abort()

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self.wait()

    def put(self, data: bytes) -> bool:
        """Bytes of the body; whether there are enough for now."""
        self._parts.append(data)
        self._size += len(data)
        return self._size > _FULL

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def finish(self, error: BaseException | None = None) -> None:
        """The connection is done with it."""
        self._line = None
        self._error = error
        self.ended = error is None
        self.wake()


class _Line(asyncio.Protocol):
    """One connection. The parser calls the methods that begin with `on_`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._response: Response | None = None
        self._parser: Any = None
        self._headers: dict[str, str] = {}
        self._head = 0  # bytes of headers
        self._other = 0  # bytes since the last of the body: heads, trailers, what frames the chunks
        self._fed = False  # the bytes that came last had some of the body
        self._whole = False  # the response ended
        self._keep = False
        self._paused = False
        self.heard = False  # a byte came since the request was sent
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._when = 0.0  # of the timer

    def start(self, data: bytes) -> Response:
        """Send a request."""
        self._response = response = Response(self)
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._head, self._other, self._whole, self._keep = {}, 0, 0, False, False
        self.heard = False
        self._until(self._client.idle)
        self._transport.write(data)
        return response

    def usable(self) -> bool:
        return not self._transport.is_closing() and self._loop.time() < self._deadline

    def abort(self) -> None:
        self._transport.abort()
        self._done(Broken("closed"))

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._deadline = self._loop.time() + self._client.idle
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._response is None:  # nobody asked
            self._transport.abort()
            return
        self.heard = True
        self._deadline = self._loop.time() + self._client.idle
        self._fed = False
        try:
            self._parser.feed_data(data)
            self._other = 0 if self._fed else self._other + len(data)
            if self._other > MAX_HEAD and not self._whole:
                raise httptools.HttpParserError("too much that is no body")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep = False
            if not self._whole:
                self._transport.abort()
                self._done(Broken(type(error).__name__))
                return
        if self._whole:
            self._done(None)
        elif self._response is not None:
            self._response.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost(self)
        if self._timer is not None:
            self._timer.cancel()
        response = self._response
        if response is None:
            return
        framed = "content-length" in response.headers or "transfer-encoding" in response.headers
        ended = error is None and response.status != 0 and not framed
        self._keep = False
        self._done(None if ended else Broken(type(error).__name__ if error is not None else "Disconnected"))

    def on_message_begin(self) -> None:
        if self._whole:
            self._keep = False  # there is more than was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > MAX_HEAD:
            raise ValueError("the headers are too large")
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._response is not None and not self._whole:
            self._response.headers = self._headers
            self._response.status = status
            self._keep = self._parser.should_keep_alive()
        self._headers = {}

    def on_body(self, data: bytes) -> None:
        self._fed = True
        response = self._response
        if response is not None and not self._whole and response.put(data) and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._response is not None and self._response.status:
            self._whole = True

    def _done(self, error: BaseException | None) -> None:
        response, self._response = self._response, None
        if response is None:
            return
        self._client.freed()
        if self._keep and error is None and self._idle():
            self.resume()
            self._until(KEPT)
            self._client.keep(self)
        elif not self._transport.is_closing():
            self._transport.close()
        response.finish(error)

    def _idle(self) -> bool:
        return not self._transport.is_closing() and not self._transport.get_write_buffer_size()

    def _until(self, seconds: float) -> None:
        self._deadline = self._loop.time() + seconds
        if self._timer is None or self._when > self._deadline:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._when = self._deadline
        self._timer = self._loop.call_at(self._when, self._look)

    def _look(self) -> None:
        """Too long without a byte, or without work."""
        now = self._loop.time()
        if self._paused and self._response is not None:  # it is we who do not read
            self._deadline = now + self._client.idle
        if now < self._deadline:
            self._arm()
            return
        self._transport.abort()
        self._done(TimeoutError())


class Client:
    """Requests to the server of `url`, `https://host:port` or `http://…`.

    Seconds: `connect` to reach it, `idle` without a byte from it. `connections`: the most at once, 0 no limit; a
    request waits `connect` seconds for one of them.
    `proxy`: an HTTP proxy's URL, which may hold its credentials.
    """

    def __init__(
        self, url: str, *, connect: float, idle: float, connections: int = 0, proxy: str | None = None
    ) -> None:
        parts = urlsplit(url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._place = parts.netloc.rpartition("@")[2]
        self._proxy = urlsplit(proxy) if proxy else None
        self._pass = _credentials(self._proxy.username, self._proxy.password) if self._proxy else ""
        self._connect_seconds = connect
        self.idle = idle
        self._slots = asyncio.Semaphore(connections) if connections else None
        self._lines: set[_Line] = set()
        self._free: list[_Line] = []  # without work; the last is the latest used
        self._context: ssl.SSLContext | None = None

    def head(self, method: str, target: str, headers: Mapping[str, str]) -> bytes:
        """A request's first lines, to which each request adds what is its own."""
        if self._proxy is not None and not self._tls:
            target = f"http://{self._place}{target}"
            headers = {**headers, **({"proxy-authorization": self._pass} if self._pass else {})}
        lines = [f"{method} {target} HTTP/1.1", f"host: {self._place}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n"

    async def send(self, head: bytes, body: bytes = b"") -> Response:
        """Send a request (`head` with its own headers, each ended by CRLF) and wait for the response's head.

        Unreachable, Broken, or TimeoutError. A kept connection that ends at once without a byte was closed by the
        server just before the request came: it is sent again over another.
        """
        data = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        while True:
            await self._take()
            response: Response | None = None
            begun, line = asyncio.get_running_loop().time(), self._kept()
            kept = line is not None
            try:
                line = line or await self._open()
                response = line.start(data)
                await response.head()
                return response
            except Broken:
                assert line is not None
                if not kept or line.heard or asyncio.get_running_loop().time() - begun > STALE:
                    raise
            except BaseException:
                if response is not None:
                    response.close()
                else:
                    self.freed()
                raise

    @property
    def full(self) -> bool:
        """Whether every connection that there may be is at work."""
        return self._slots is not None and self._slots.locked()

    async def _take(self) -> None:
        """Wait for a connection's turn."""
        if self._slots is None:
            return
        if not self._slots.locked():
            await self._slots.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._connect_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Unreachable("Full", final=True, full=True) from None

    def close(self) -> None:
        self._free.clear()
        for line in [*self._lines]:
            line.abort()

    def keep(self, line: _Line) -> None:
        self._free.append(line)

    def lost(self, line: _Line) -> None:
        self._lines.discard(line)
        if line in self._free:
            self._free.remove(line)

    def freed(self) -> None:
        if self._slots is not None:
            self._slots.release()

    def _kept(self) -> _Line | None:
        while self._free:
            if (line := self._free.pop()).usable():
                return line
            line.abort()
        return None

    async def _open(self) -> _Line:
        try:
            async with asyncio.timeout(self._connect_seconds):
                if self._tls and self._context is None:
                    self._context = await asyncio.to_thread(ssl.create_default_context)
                if self._proxy is None:
                    line = await self._reach(self._host, self._port, self._context)
                elif self._tls:
                    line = await self._tunnel(self._proxy)
                else:
                    line = await self._reach(self._proxy.hostname or "", self._proxy.port or 80, None)
        except TimeoutError:
            raise Unreachable("Timeout", late=True) from None
        except (OSError, EOFError) as error:
            raise Unreachable(type(error).__name__, final=isinstance(error, ssl.SSLError)) from None
        self._lines.add(line)
        return line

    async def _reach(self, host: str, port: int, tls: ssl.SSLContext | None) -> _Line:
        """A connection to the first of a host's addresses that answers; each has its share of the time."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failure: OSError = OSError(f"{host} has no address")
        for family, _, _, _, address in found:
            try:
                async with asyncio.timeout(self._connect_seconds / len(found)):
                    _, line = await loop.create_connection(
                        lambda: _Line(self),
                        str(address[0]),
                        port,
                        ssl=tls,
                        family=family,
                        server_hostname=host if tls else None,
                    )
                    return line
            except OSError as error:  # TimeoutError is one
                failure = error
        raise failure

    async def _tunnel(self, proxy: SplitResult) -> _Line:
        """A connection through a proxy that sees nothing of what goes over it."""
        loop = asyncio.get_running_loop()
        transport, opening = await loop.create_connection(_Opening, proxy.hostname or "", proxy.port or 80)
        try:
            place = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
            secret = f"proxy-authorization: {self._pass}\r\n" if self._pass else ""
            transport.write(f"CONNECT {place} HTTP/1.1\r\nhost: {place}\r\n{secret}\r\n".encode("latin-1"))
            status = await opening.status
            if not status.startswith("2"):
                raise Unreachable(f"the proxy answered {status}", final=True)
            line = _Line(self)
            assert self._context is not None
            inner = await loop.start_tls(transport, line, self._context, server_hostname=self._host)
            if inner is None:
                raise EOFError
            line.connection_made(inner)
        except BaseException:
            transport.abort()
            raise
        return line


class _Opening(asyncio.Protocol):
    """A proxy's answer to CONNECT: `status` is three digits, or whatever else stands there."""

    def __init__(self) -> None:
        self.status: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self.status.done() or (b"\r\n\r\n" not in self._data and len(self._data) < MAX_HEAD):
            return
        self.status.set_result(self._data[9:12].decode("latin-1"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.status.done():
            self.status.set_exception(EOFError("the proxy hung up"))


def _credentials(name: str | None, password: str | None) -> str:
    if name is None:
        return ""
    pair = f"{unquote(name)}:{unquote(password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()
