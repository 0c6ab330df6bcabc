"""HTTP to one server of an engine: calls with JSON, and answers that are read as they come.

Knows: the key, time limits, what a server's refusal says. Does not know: what is called for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from reef.core.errors import ConfigError, UpstreamError
from reef.core.nouns import Json
from reef.engines.dialect.value import load
from reef.engines.http import Broken, Client, Response, Unreachable
from reef.engines.remote import Down

MAX_BODY = 64 * 1024 * 1024  # bytes of an answer that is not streamed
_PATIENT = 86400.0  # seconds; each call has a limit of its own
_PATH = "/%:@!$&'()*+,;=~?"


class Door:
    """`url` is a server's address without /v1. Seconds: `connect` to reach it, `idle` without a byte from it."""

    def __init__(self, url: str, *, key: str | None = None, connect: float = 10.0, idle: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ConfigError("an engine's url must hold no credentials; name a variable with key_env", param="url")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("the engine's key has characters that no key has; look for a line break", param="key_env")
        self.url = url
        self.host = parts.netloc
        self._path = quote(parts.path.rstrip("/"), safe=_PATH)
        self._key = key
        self._fixed = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "reef"}
        if key:
            self._fixed["authorization"] = f"Bearer {key}"
        self._client = Client(url, connect=connect, idle=idle)
        self._calls = Client(url, connect=connect, idle=_PATIENT)  # a reload sends nothing until it is done

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = 30.0
    ) -> Json:
        """A call's answer: JSON, or text where it is none. Down, or UpstreamError for any status but 2xx."""
        data = b"" if body is None else orjson.dumps(body)
        try:
            async with asyncio.timeout(seconds):
                response = await self._send(self._calls, method, path, data)
                try:
                    answer = await self.read(response)
                finally:
                    response.close()
        except TimeoutError:
            raise Down(f"{self.url} did not answer {path} within {seconds:g} s; does it hang?") from None
        if not 200 <= response.status < 300:
            raise UpstreamError(
                f"{self.url} refused {path} ({response.status}): {self.told(answer)}",
                status=response.status,
                body=answer,
            )
        found = load(answer)
        return answer.decode("utf-8", "replace") if found is None else found

    async def ask(self, path: str, body: bytes, *, stream: bool) -> Response:
        """The head of an answer, whatever its status; the caller closes it. Down."""
        try:
            return await self._send(self._client, "POST", path, body, stream=stream)
        except TimeoutError:
            raise Down(f"{self.url} did not begin an answer in time; raise the engine's idle limit if it may") from None

    async def read(self, response: Response, limit: int = MAX_BODY) -> bytes:
        """A whole body. Down when it breaks off."""
        parts, size = [], 0
        try:
            while piece := await response.some():
                parts.append(piece)
                size += len(piece)
                if size > limit:
                    raise UpstreamError(f"{self.url} answered with more than {limit} bytes")
        except Broken as error:
            raise Down(f"{self.url} broke off ({error.kind})") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def told(self, body: bytes) -> str:
        """What a refusal says, without the key."""
        found = load(body)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or str(found)
        text = found if isinstance(found, str) else body.decode("utf-8", "replace")
        return (text.replace(self._key, "***") if self._key else text)[:500]

    def clean(self, body: bytes) -> bytes:
        return body.replace(self._key.encode(), b"***") if self._key else body

    async def close(self) -> None:
        self._client.close()
        self._calls.close()
        await asyncio.sleep(0)  # in which the connections go

    async def _send(self, client: Client, method: str, path: str, body: bytes, *, stream: bool = False) -> Response:
        fixed = self._fixed | {"accept": "text/event-stream" if stream else "application/json"}
        try:
            return await client.send(client.head(method, self._path + path, fixed), body)
        except Unreachable as error:
            why = "refused the connection; is it running?" if error.kind == "ConnectionRefusedError" else error.kind
            raise Down(f"{self.url} cannot be reached: {why}") from None
        except Broken as error:
            raise Down(f"{self.url} broke off ({error.kind})") from None
