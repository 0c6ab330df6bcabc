"""One HTTP request as the routes see it, and its answer.

Knows: ASGI's three callables, headers read in one pass, JSON answers, error answers.
Does not know: what any route does.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from reef.core.errors import InputError, ReefError
from reef.core.text import dump
from reef.gateway.auth import Token
from reef.gateway.errors import Refusal, body_of, headers_of, message_of, status_of
from reef.gateway.lines import Lines

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

log = logging.getLogger(__name__)
_large = Lines(log, "refused %d more requests with too large bodies")
_NOBODY = Token("nobody", frozenset())


Reply = Callable[[int, list[tuple[bytes, bytes]], bytes], bool]
KEY = "reef.line"
"""Where the extensions of a request's ASGI scope have its `Line`."""


class Line:
    """Whether a request's connection is gone; `cut` is called when it goes. Costs nothing while nothing happens.

    `whole`: the request's body is here, so that taking it waits for nothing. `reply`: sends a whole answer (status,
    header pairs, body) in one write; False when it must go the usual way.
    """

    __slots__ = ("cut", "gone", "reply", "whole")

    def __init__(self, reply: Reply | None = None) -> None:
        self.gone = self.whole = False
        self.cut: Callable[[], None] | None = None
        self.reply = reply

    def lose(self) -> None:
        self.gone = True
        if self.cut is not None:
            self.cut()


class Gone(Exception):
    """The client went away. Not an error of Reef's tree: nobody is left to be answered."""


@dataclass(slots=True)
class Work:
    """How many requests are in work and how many bytes their bodies have, and how many may be at once."""

    most: int
    most_bytes: int = 1 << 40
    running: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Call:
    """A request: `scenario` as its path or header names it (None: not named), `params` the path's variable parts."""

    scope: Scope
    receive: Receive
    send: Send
    path: str
    headers: Mapping[str, str]
    token: Token = _NOBODY
    scenario: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    route: str = "unknown"  # the route's pattern, for logs and metrics: a path may hold anything
    started: bool = False
    dropped: bool = False
    work: Work | None = None
    counted: bool = False
    whole: tuple[int, Mapping[str, str], list[bytes]] | None = None  # an answer that is kept until it is whole
    held: int = 0  # bytes of this request's body in memory

    @property
    def line(self) -> Line | None:
        """The request's connection, where the server is ours."""
        found: Line | None = self.scope.get("extensions", {}).get(KEY)
        return found

    def hold(self, size: int) -> None:
        """Count bytes of this request's body. Refused (503) when the bodies of all requests are too much together."""
        if self.work is not None:
            if self.work.bytes + size > self.work.most_bytes and self.work.bytes > self.held:
                text = "too many large requests at once; try again"
                raise Refusal(503, "too_many_bytes", text, headers={"retry-after": "1"})
            self.work.bytes += size
            self.held += size

    def enter(self) -> None:
        """Count this request as in work. Refused (429) when as many as may be are."""
        if self.work is None or self.counted:
            return
        if self.work.running >= self.work.most:
            raise Refusal(
                429, "too_many_requests", "too many requests at once; try again", headers={"retry-after": "1"}
            )
        self.work.running += 1
        self.counted = True

    def leave(self) -> None:
        """Count it no longer: it waits for its client, or is over."""
        if self.work is not None and self.counted:
            self.work.running -= 1
            self.counted = False

    def end(self) -> None:
        """It is over."""
        self.leave()
        if self.work is not None:
            self.work.bytes -= self.held
            self.held = 0

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def dialect(self) -> str:
        """Whose error form this route answers with."""
        return "anthropic" if "/v1/messages" in self.path else "openai"

    def queries(self) -> dict[str, str]:
        """Every parameter of the query string."""
        return dict(parse_qsl(self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))

    def query(self, name: str) -> str | None:
        return self.queries().get(name)

    def number(self, name: str, default: int | None, most: int) -> int | None:
        """A whole, positive number from the query, at most `most`."""
        text = self.query(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or not int(text[:18]) > 0:
            raise InputError(f"{name} must be a whole number of 1 or more", param=name)
        return min(int(text[:18]), most)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        if self.scope.get("http_version") == "1.0" and "content-length" not in headers:
            self.started, self.whole = True, (status, headers, [])  # a client that does not know chunks
            return
        pairs = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def piece(self, data: bytes, *, more: bool = True) -> None:
        """A part of an answer that was started without a length."""
        if self.whole is None:
            await self.send({"type": "http.response.body", "body": data, "more_body": more})
            return
        status, headers, parts = self.whole
        parts.append(data)
        if not more:
            self.whole = None
            await self.reply(status, b"".join(parts), headers)

    async def reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """The whole answer at once, with its length."""
        line = self.line
        if line is not None and line.reply is not None:
            pairs = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
            self.started = True
            if line.reply(status, pairs, body):
                return
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        await self.reply(status, dump(value), {"content-type": "application/json", **(headers or {})})

    async def fail(
        self, error: BaseException, headers: Mapping[str, str] | None = None, receipt: str | None = None
    ) -> None:
        """Answer with an error. `headers` (a receipt's) come on top of the error's own."""
        status = status_of(error)
        if not isinstance(error, ReefError):
            log.error("%s failed inside", self.route, exc_info=error, extra={"receipt": receipt, "route": self.route})
        elif message_of(error) != error.message:
            log.error("%s: %s", self.route, error.message, extra={"receipt": receipt, "route": self.route})
        elif status == 413:
            _large.tell(self.route, self.scope.get("client"), error.message)
        await self.json(status, body_of(error, self.dialect, receipt), headers_of(error, status) | dict(headers or {}))

    def drop(self, why: str) -> None:
        """Leave the answer unfinished: the server closes the socket, so that the client cannot take it for whole."""
        self.dropped = True
        log.warning("dropped %s: %s", self.route, why, extra={"route": self.route})
