"""An OpenAI-compatible server as an engine: bytes pass through, a copy is read beside them.

Knows: how to ask such a server, which of its headers a client may see, when its stream really ended, its errors.
Does not know: releases (every release id is answered by the same model) or tokens, so nothing of it trains on policy.

- A stream counts as ended when the `[DONE]` event came after every choice's finish reason; anything else is an error.
- The key is sent in one header and appears nowhere else: error bodies that echo it have it struck out.
- 4xx, 503 and 529 are relayed as they are, except 401 and 403: those are our credentials failing, not the client's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import ClientResponse

from reef.core.errors import ConfigError, EngineError, InputError, UpstreamError
from reef.core.nouns import Choice
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.sse import DONE, Chunks, Event, Events, read_completion

NO_TOKENS = "the engine gives no tokens"
MAX_ERROR = 64 * 1024  # bytes of a provider's error that are kept
_RELAYED = {503, 529}
_FORWARD = ("openai-", "x-stainless-", "idempotency-key", "traceparent", "tracestate", "baggage")
_RETURN = ("content-type", "content-language", "retry-after", "x-ratelimit-", "ratelimit", "openai-", "x-should-retry")
_Body = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UpstreamEngine:
    """`url` goes up to and with `/v1`; `model` replaces the model that every request names.

    Seconds: `connect` to reach the server, `idle` without a byte from it. The first request opens the connection.
    """

    def __init__(
        self, url: str, *, key: str | None = None, model: str | None = None, connect: float = 10.0, idle: float = 300.0
    ) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ConfigError("an upstream's url must hold no credentials; name a variable with key_env", param="url")
        self._url = url.rstrip("/")
        self._host = parts.hostname or "the upstream"
        self._key = key
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=idle)
        self._session: aiohttp.ClientSession | None = None
        self._reached = (0.0, False)  # when it was last looked at, and what was seen

    async def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        try:
            async with self._open().post(
                self._url + "/chat/completions",
                data=self._rewrite(ask.body),
                headers=self._headers(ask),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    items = self._refusal(response)
                elif ask.stream and response.content_type == "text/event-stream":
                    items = self._stream(response)
                else:
                    items = self._whole(response)
                async with aclosing(items):
                    async for item in items:
                        yield item
        except (TimeoutError, aiohttp.ServerTimeoutError):
            raise UpstreamError(
                f"{self._host} did not answer in time; try again, or raise the engine's idle limit", status=504
            ) from None
        except aiohttp.ClientError as error:
            kind = type(error).__name__
            raise UpstreamError(f"{self._host} cannot be reached or broke off ({kind}); check engines.url") from None

    async def load(self, release_id: str) -> None:
        """Nothing to load: the weights are the provider's."""

    async def rate(
        self, release_id: str, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        raise EngineError("an upstream engine cannot rate tokens; guards that need it want engine: local")

    async def ready(self) -> bool:
        """Whether the server answers HTTP at all; looked at no more than every five seconds."""
        at, seen = self._reached
        if time.monotonic() - at < 5.0:
            return seen
        try:
            async with self._open().get(
                self._url + "/models", headers=self._secret(), timeout=aiohttp.ClientTimeout(total=2.0)
            ) as response:
                seen = response.status < 500
        except (TimeoutError, aiohttp.ClientError):
            seen = False
        self._reached = (time.monotonic(), seen)
        return seen

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit of its own on connections: how much may run at once is the gateway's to say.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _secret(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    def _headers(self, ask: Ask) -> dict[str, str]:
        headers = {name: value for name, value in ask.headers.items() if name.startswith(_FORWARD)}
        headers["content-type"] = "application/json"
        headers["accept"] = "text/event-stream" if ask.stream else "application/json"
        headers["accept-encoding"] = "identity" if ask.stream else "gzip, deflate"
        return headers | self._secret()

    def _rewrite(self, body: bytes) -> bytes:
        """The body with our model's name; every other value keeps its exact bytes."""
        if self._model is None:
            return body
        try:
            fields: dict[str, Any] = dict(_Body.decode(body))
        except msgspec.DecodeError:
            raise InputError("the body is not a JSON object") from None
        return msgspec.json.encode(fields | {"model": self._model})

    def _clean(self, body: bytes) -> bytes:
        return body.replace(self._key.encode(), b"***") if self._key else body

    async def _refusal(self, response: ClientResponse) -> AsyncGenerator[Head | Piece | Answer]:
        status = response.status
        body = self._clean(await response.content.read(MAX_ERROR))
        if status in (401, 403):
            error = UpstreamError(
                f"{self._host} refused Reef's credentials ({status}); check the key that engines.key_env names",
                status=status,
            )
            error.code = "upstream_auth"
            raise error
        if 400 <= status < 500 or status in _RELAYED:
            yield _head(response)
            yield Piece(body, terminal=True)
            yield Answer(untrainable=f"the upstream refused ({status})")
            return
        raise UpstreamError(f"{self._host} answered {status}; try again", status=status, body=body)

    async def _whole(self, response: ClientResponse) -> AsyncGenerator[Head | Piece | Answer]:
        body = await response.read()
        said = read_completion(body)
        if not said.choices() and said.error is None:
            raise UpstreamError(f"{self._host} answered 200 with something that is not a chat completion", body=body)
        yield _head(response)
        yield Piece(body, terminal=True)
        yield _answer(said)

    async def _stream(self, response: ClientResponse) -> AsyncGenerator[Head | Piece | Answer]:
        yield _head(response)
        events, said = Events(), Chunks()
        ended = False
        while not ended and (data := await response.content.readany()):
            found = events.feed(data)
            passed, held, ended = _split(found, said)
            if passed:
                yield Piece(passed)
            if ended:
                held += events.rest
        if not ended and (last := events.finish()) is not None:
            passed, held, ended = _split([last], said)
            if passed:
                yield Piece(passed)
        if said.error is not None:
            raise UpstreamError(f"{self._host} ended its stream with an error: {said.error}")
        if not ended:
            raise UpstreamError(f"{self._host} ended its stream without data: {DONE}")
        if not said.finished:
            raise UpstreamError(f"{self._host} ended its stream without a finish_reason")
        await _drain(response)
        yield Piece(held, terminal=True)
        yield _answer(said)


def _split(found: list[Event], said: Chunks) -> tuple[bytes, bytes, bool]:
    """Read events. The bytes before the end marker's event, the bytes from it on, and whether it came."""
    passed: list[bytes] = []
    for place, event in enumerate(found):
        if event.data == DONE and said.error is None:
            return b"".join(passed), b"".join(item.raw for item in found[place:]), True
        if event.data is not None:
            said.feed(event.data)
        passed.append(event.raw)
    return b"".join(passed), b"", False


async def _drain(response: ClientResponse) -> None:
    """Read on to the end of the body, which usually is there already, so that the connection can be used again."""
    try:
        async with asyncio.timeout(0.02):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError):
        pass


def _head(response: ClientResponse) -> Head:
    headers: Mapping[str, str] = {
        lower: value for name, value in response.headers.items() if (lower := name.lower()).startswith(_RETURN)
    }
    upstream_id = response.headers.get("x-request-id") or response.headers.get("request-id")
    return Head(response.status, headers, upstream_id)


def _answer(said: Chunks) -> Answer:
    choices: tuple[Choice, ...] = said.choices()
    return Answer(choices=choices, usage=said.usage, model=said.model, untrainable=NO_TOKENS)
