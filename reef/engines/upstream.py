"""A provider as an engine, OpenAI's or Anthropic's kind: bytes pass through, a copy is read beside them.

Knows: how to ask one, which headers each side may see of the other, when an answer really ended, what is tried again.
Does not know: releases (every release id is answered by the same model) or tokens, so nothing of it trains on policy.

- A stream counts as ended when its dialect's end marker came after everything was finished. An error event ends it too,
  and passes; the `Answer` says so. Anything else is an error.
- The key is sent in one header and appears nowhere else: errors that echo it have it struck out.
- 4xx, 503 and 529 are relayed as they are, except 401 and 403: those are our credentials failing, not the client's.
- Tried again, within one budget: a server that cannot be reached, 429, and what passes (500, 502, 503, 504, 529),
  always before any byte of an answer. Never: a request whose connection broke once it was sent (it may be in work), and
  one whose client tries again by itself (it sends `x-stainless-retry-count`), or the tries would multiply.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from urllib.parse import quote, urlsplit

from reef.core.errors import ConfigError, EngineError, InputError, UpstreamError
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.decode import GZIP, ZSTD, Decoder
from reef.engines.dialect import Reader, reader
from reef.engines.dialect.value import load
from reef.engines.flow import Flow, count_scores, drain, wants_scores
from reef.engines.http import Broken, Client, Response, Unreachable
from reef.engines.rename import rename
from reef.engines.retry import FIRST, Budget, retry_after

NO_TOKENS = "the engine gives no tokens"
MAX_WHOLE = 64 * 1024 * 1024  # bytes of an answer that is not streamed
MAX_ERROR = 1024 * 1024  # bytes of a provider's error that are kept
PATHS = {
    "chat": "/chat/completions",
    "responses": "/responses",
    "embeddings": "/embeddings",
    "messages": "/messages",
    "count_tokens": "/messages/count_tokens",
}
VERSION = "2023-06-01"  # of Anthropic's API, for a client that names none
_AGAIN = {429, 500, 502, 503, 504, 529}
_RELAYED = {503, 529}
_PATH = "/%:@!$&'()*+,;=~"
_QUERY = _PATH + "?"

_FORWARD = (
    *("anthropic-", "openai-", "x-stainless-", "idempotency-key", "traceparent", "tracestate", "baggage"),
    *("session-id", "session_id", "thread-id", "x-session-affinity", "x-parent-session-id", "x-client-request-id"),
    *("x-codex-", "x-claude-code-", "originator", "x-app"),
)
"""What a client's headers for the provider begin with: never Reef's own (x-reef-…, x-session-id), never secrets."""
_RETURN = (
    *("content-type", "content-language", "retry-after", "x-should-retry", "ratelimit", "x-ratelimit-"),
    *("anthropic-ratelimit-", "openai-processing-ms", "openai-version", "openai-model"),
)
"""What a provider's headers for the client begin with: none that names our account there."""
log = logging.getLogger(__name__)


@functools.lru_cache(4096)
def _goes(name: str) -> bool:
    """Whether a client's header is for the provider. Its account there is not: the key is ours."""
    return name.startswith(_FORWARD) and name not in ("openai-organization", "openai-project")


@functools.lru_cache(4096)
def _comes(name: str) -> bool:
    """Whether a provider's header is for the client."""
    return name.startswith(_RETURN)


class UpstreamEngine:
    """`url` goes up to and with `/v1`; `model` replaces the model that every request names.

    `speaks` are the provider's dialects; by default messages and count_tokens for `api` anthropic, chat and embeddings
    for openai, and responses where the host is OpenAI's own. Seconds: `connect` to reach the server, `idle` without a
    byte from it. `connections` is the most at once, 0 no limit. `proxy` is an HTTP proxy's URL; with `trust_env` it
    comes from the usual variables. `pause` is the first wait between tries. The first request opens the connection.
    """

    def __init__(
        self,
        url: str,
        *,
        api: str = "openai",
        key: str | None = None,
        model: str | None = None,
        speaks: Collection[str] | None = None,
        retries: int = 2,
        retry_seconds: float = 10.0,
        connect: float = 10.0,
        idle: float = 300.0,
        connections: int = 0,
        proxy: str | None = None,
        trust_env: bool = False,
        pause: float = FIRST,
    ) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ConfigError("an upstream's url must hold no credentials; name a variable with key_env", param="url")
        if not url.isascii() or parts.query or parts.fragment:
            raise ConfigError("an upstream's url is plain text that ends with its path (…/v1)", param="url")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "an upstream's key has characters that no key has; look for a line break", param="key_env"
            )
        self._host = parts.hostname or "the upstream"
        self.dialects = frozenset(speaks or _spoken(api, self._host))
        if proxy is None and trust_env:
            proxy = _proxy(parts.scheme, parts.netloc)
        if proxy is not None and not proxy.startswith("http://"):
            raise ConfigError("an upstream's proxy is an HTTP proxy, http://host:port", param="proxy")
        self._path = quote(parts.path.rstrip("/"), safe=_PATH)
        self._paths = {dialect: self._path + PATHS[dialect] for dialect in self.dialects}
        self._heads: dict[tuple[str, bool], bytes] = {}
        self._readers: dict[str, Callable[[], Reader]] = {}
        self._key = key
        self._model = model
        self._fixed = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "reef"}
        if key:
            self._fixed |= {"x-api-key": key} if api == "anthropic" else {"authorization": f"Bearer {key}"}
        self._retries, self._retry_seconds, self._pause = retries, retry_seconds, pause
        self._client = Client(url, connect=connect, idle=idle, connections=connections, proxy=proxy)
        self._listed: tuple[float, Sequence[str]] = (float("-inf"), ())
        self._reached = (float("-inf"), False)  # when it was last looked at, and what was seen
        self.why: str | None = None  # what was wrong when it was last not ready
        self._warned, self._unsaid = float("-inf"), 0

    async def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        response: Response | None = None
        try:
            response = await self._send(ask)
            if response.status != 200:
                for item in await self._refusal(ask, response):
                    yield item
            elif ask.stream and response.content_type == "text/event-stream":
                flow = Flow(self._host, ask, response, self._reader(ask.dialect))
                yield self._head(response)
                while (piece := await flow.next()) is not None:
                    yield self._struck(piece) if flow.said.error is not None and piece.terminal else piece
                yield self._answer(ask, flow.said, flow.scored)
            else:
                for item in await self._whole(ask, response):
                    yield item
        except (Unreachable, Broken, TimeoutError) as error:
            if isinstance(error, Unreachable) and error.full:
                raise UpstreamError(
                    f"all connections to {self._host} are at work; try again, or raise engines.connections", status=503
                ) from None
            if isinstance(error, TimeoutError) or (isinstance(error, Unreachable) and error.late):
                raise UpstreamError(
                    f"{self._host} did not answer in time; try again, or raise the engine's idle limit", status=504
                ) from None
            did = "cannot be reached" if isinstance(error, Unreachable) else "broke off"
            raise UpstreamError(f"{self._host} {did} ({error.kind}); try again, or check engines.url") from None
        finally:
            if response is not None:
                response.close()  # does nothing once it ended

    async def load(self, release_id: str) -> None:
        """Nothing to load: the weights are the provider's."""

    async def rate(
        self, release_id: str, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        raise EngineError("an upstream engine cannot rate tokens; guards that need it want engine: local")

    async def ready(self) -> bool:
        """Whether the server answers HTTP at all; looked at no more than every five seconds."""
        at, seen = self._reached
        if time.monotonic() - at < 5.0 or (seen and self._client.full):
            return seen
        try:
            async with self._listing(2.0) as response:
                seen = response.status < 500
                self.why = None if seen else f"answers {response.status}"
                await drain(response)
        except (Unreachable, Broken, TimeoutError) as error:
            seen = False
            self.why = _failure(error)
        self._reached = (time.monotonic(), seen)
        return seen

    async def models(self) -> Sequence[str]:
        """What the provider lists, asked at most once a minute; nothing when it cannot be asked."""
        at, listed = self._listed
        if time.monotonic() - at < 60.0:
            return listed
        try:
            async with self._listing(5.0) as response:
                body = load(await self._read(response, MAX_ERROR)) if response.status == 200 else None
        except (Unreachable, Broken, TimeoutError, UpstreamError):
            return ()
        data = body.get("data") if isinstance(body, dict) else None
        names = [item.get("id") for item in data if isinstance(item, dict)] if isinstance(data, list) else []
        self._listed = time.monotonic(), tuple(name for name in names if isinstance(name, str) and len(name) <= 200)
        return self._listed[1]

    @asynccontextmanager
    async def _listing(self, seconds: float) -> AsyncIterator[Response]:
        """The provider's answer to being asked for its models."""
        async with asyncio.timeout(seconds):
            response = await self._client.send(self._client.head("GET", self._path + "/models", self._fixed))
            try:
                yield response
            finally:
                response.close()

    async def close(self) -> None:
        self._client.close()
        await asyncio.sleep(0)  # in which the connections go

    def _begin(self, ask: Ask) -> bytes:
        """A request's first lines and headers: ours, then those of the client's that are for the provider."""
        if (path := self._paths.get(ask.dialect)) is None:
            raise InputError(f"{self._host} does not speak {ask.dialect}; add it to the engine's speaks if it does")
        head = None if ask.query else self._heads.get((ask.dialect, ask.stream))
        if head is None:
            fixed = self._fixed | {"accept": "text/event-stream" if ask.stream else "application/json"}
            target = f"{path}?{quote(ask.query, safe=_QUERY)}" if ask.query else path
            head = self._client.head("POST", target, fixed)
            if not ask.query:
                self._heads[ask.dialect, ask.stream] = head
        theirs = [f"{name}: {value}\r\n" for name, value in ask.headers.items() if _goes(name) and value.isprintable()]
        if ask.dialect in ("messages", "count_tokens") and "anthropic-version" not in ask.headers:
            theirs.append(f"anthropic-version: {VERSION}\r\n")
        return head + "".join(theirs).encode("latin-1", "replace") if theirs else head

    def _reader(self, dialect: str) -> Reader:
        if (make := self._readers.get(dialect)) is None:
            made = reader(dialect)
            self._readers[dialect] = type(made)
            return made
        return make()

    async def _send(self, ask: Ask) -> Response:
        """The provider's answer, its head read: the first that is worth no other try."""
        head = self._begin(ask)
        model = ask.model or self._model
        body = rename(ask.body, model) if model is not None else ask.body
        once = self._retries == 0 or "x-stainless-retry-count" in ask.headers
        budget: Budget | None = None
        while True:
            asked, failure, response = None, None, None
            try:
                response = await self._client.send(head, body)
            except Unreachable as error:
                if once or error.final:
                    raise
                failure, why = error, error.kind
            else:
                if once or response.status not in _AGAIN:
                    return response
                asked, why = retry_after(response.headers), str(response.status)
            budget = budget or Budget(self._retries, self._retry_seconds, self._pause)
            if (wait := budget.wait(asked)) is None:
                log.info("%s: %s failed (%s) at try %d, the last", ask.receipt, self._host, why, budget.tries)
                if response is None:
                    raise failure or AssertionError
                return response
            log.info("%s: %s failed (%s); try %d in %.2f s", ask.receipt, self._host, why, budget.tries, wait)
            if response is not None:
                try:
                    await drain(response)
                finally:
                    response.close()
            await asyncio.sleep(wait)

    async def _refusal(self, ask: Ask, response: Response) -> list[Head | Piece | Answer]:
        status = response.status
        if status >= 500:
            self._warn(ask.receipt, status)
        body = self._clean(await self._read(response, MAX_ERROR, cut=True))
        if status in (401, 403):
            error = UpstreamError(
                f"{self._host} refused Reef's credentials ({status}); check the key that engines.key_env names",
                status=status,
            )
            error.code = "upstream_auth"
            raise error
        if 400 <= status < 500 or status in _RELAYED:
            refused = Answer(untrainable=f"the upstream refused ({status})")
            return [self._head(response), Piece(body, terminal=True), refused]
        raise UpstreamError(f"{self._host} answered {status}; try again", status=status, body=body)

    def _warn(self, receipt: str, status: int) -> None:
        """A line for a provider's 5xx that nothing was tried after; one a second, so that an outage is no flood."""
        now = time.monotonic()
        if now - self._warned < 1.0:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more times since the last such line)" if self._unsaid else ""
        self._warned, self._unsaid = now, 0
        told = {"receipt": receipt, "status": status}
        log.warning("the provider %s answered %d%s", self._host, status, more, extra=told)

    async def _whole(self, ask: Ask, response: Response) -> list[Head | Piece | Answer]:
        body = await self._read(response, MAX_WHOLE)
        said = self._reader(ask.dialect)
        said.whole(body)
        if not (said.finished or said.error is not None or said.id or said.choices()):
            raise UpstreamError(
                f"{self._host} answered 200 with something that is no answer ({ask.dialect})", body=body
            )
        scored = count_scores(body) if wants_scores(ask) else None
        piece = Piece(body, terminal=True)
        if said.error is not None:
            piece = self._struck(piece)
        return [self._head(response), piece, self._answer(ask, said, scored)]

    async def _read(self, response: Response, limit: int, *, cut: bool = False) -> bytes:
        """A whole body, unpacked. Over the limit: cut there, or an error."""
        data = await response.some()
        if not response.read:
            parts, size = [data], len(data)
            while piece := await response.some():
                parts.append(piece)
                size += len(piece)
                if size > limit:
                    if cut:
                        break
                    raise UpstreamError(f"{self._host} answered with more than {limit} bytes")
            data = b"".join(parts)
        encoding = response.headers.get("content-encoding")
        if encoding is None and not data.startswith((GZIP, ZSTD)):
            return data[:limit] if cut else data
        try:
            decoder, plain = Decoder(encoding, limit), list[bytes]()
            for piece in decoder.pieces(data):
                if plain:
                    await asyncio.sleep(0)  # there may be much more
                plain.append(piece)
            return b"".join([*plain, decoder.finish()])
        except UpstreamError:
            if cut:
                return b""  # an error without its text is still an error
            raise

    def _head(self, response: Response) -> Head:
        upstream_id: str | None = None
        headers: dict[str, str] = {}
        for name, value in response.headers.items():
            if self._key and self._key in value:
                value = value.replace(self._key, "***")
            if _comes(name):
                headers[name] = value
            elif upstream_id is None and name in ("x-request-id", "request-id"):
                upstream_id = value if value.isprintable() and len(value) <= 256 else None
        return Head(response.status, headers, upstream_id)

    def _answer(self, ask: Ask, said: Reader, scored: int | None) -> Answer:
        untrainable, usage = NO_TOKENS, said.usage
        if scored and usage is not None and scored != usage.completion_tokens:
            untrainable = f"the engine gave {scored} log-probs for {usage.completion_tokens} tokens, and no token ids"
        error, reply = said.error, said.reply
        if error is not None and self._key:
            error, reply = error.replace(self._key, "***"), self._clean(reply) if reply is not None else None
        return Answer(
            choices=said.choices(),
            usage=usage,
            model=said.model,
            untrainable=untrainable,
            reply=reply,
            id=said.id,
            error=error,
        )

    def _struck(self, piece: Piece) -> Piece:
        return Piece(self._clean(piece.data), piece.terminal)

    def _clean(self, body: bytes) -> bytes:
        return body.replace(self._key.encode(), b"***") if self._key else body


def _failure(error: Exception) -> str:
    """What a server did that could not be asked, as people say it."""
    if isinstance(error, TimeoutError) or (isinstance(error, Unreachable) and error.late):
        return "does not answer"
    if isinstance(error, Broken):
        return f"broke off ({error.kind})"
    if error.args[0] == "ConnectionRefusedError":
        return "refused the connection; is it running?"
    if error.args[0] == "gaierror":
        return "has no address; check the name in engines.url"
    return f"cannot be reached ({error.args[0]})"


def _spoken(api: str, host: str) -> Collection[str]:
    if api == "anthropic":
        return ("messages", "count_tokens")
    return ("chat", "embeddings", "responses") if host == "api.openai.com" else ("chat", "embeddings")


def _proxy(scheme: str, place: str) -> str | None:
    """The proxy that the environment names for a server."""
    return None if urllib.request.proxy_bypass(place) else urllib.request.getproxies().get(scheme)
