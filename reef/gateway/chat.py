"""POST /v1/chat/completions: one exchange, from the request's bytes to a record on disk and an answer at the client.

Knows: the chat request's few fields that concern us, the order in which things become durable, what each kind of ending
leaves behind.
Does not know: how the engine answers, or what a record is worth to a recipe.

- The release is read once; the engine is asked for exactly that one.
- Not streamed: one insert, committed before the answer leaves. Streamed: opened durably while the engine works, receipt
  in the headers, and only the event with the end marker waits for the record's closing.
- complete: all went out. interrupted: the engine broke off, and so does the answer. aborted: the client went away.
  rejected: the request was refused. failed: the engine could not answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from reef.core.errors import EngineError, InputError, ReefError, StoreError
from reef.core.failpoint import failpoint
from reef.core.ids import new_receipt
from reef.core.nouns import Purpose, Record, Status, Timing
from reef.engines import Answer, Ask, Engine, Head, Piece
from reef.engines.sse import read_chunks
from reef.gateway.body import read_json
from reef.gateway.call import Call, Gone
from reef.gateway.errors import message_of, status_of
from reef.gateway.leash import Leash
from reef.gateway.session import session_of, tags_of
from reef.harness.tree import apply_rules

if TYPE_CHECKING:
    from reef.gateway.app import App

_SECRET = {"authorization", "x-api-key", "cookie", "proxy-authorization"}
_OWN = {"content-length", "content-encoding", "transfer-encoding", "connection", "date", "server"}
"""Headers of an engine's answer that are the server's own to set."""
_STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}

log = logging.getLogger(__name__)


async def complete(app: App, call: Call) -> None:
    """Answer one chat request."""
    received_at, begun = time.time(), time.perf_counter()
    data, body = await read_json(call, app.context.limits.body_bytes)
    check(body)
    capture = _capture(call.headers)
    serving = await app.serving(call)
    purpose: Purpose = "live"
    release_id = serving.release_id
    if (pin := call.headers.get("x-reef-release")) is not None:
        call.token.require("operate")
        release_id, purpose = await _pinned(app, pin, serving.scenario), "evaluation"
    shelved = app.shelf.seen(release_id) or await app.shelf.take(release_id)
    rendered = orjson.dumps(apply_rules(body, shelved.rules)) if shelved.rules else None
    _, engine = app.context.engine_of(serving.scenario)
    receipt, stream = new_receipt(), body.get("stream") is True
    headers = {name: value for name, value in call.headers.items() if name not in _SECRET}
    ask = Ask(receipt, release_id, "chat", rendered or data, stream, headers, 0 if purpose == "live" else 1)
    record = Record(
        id=receipt,
        scenario=serving.scenario,
        release_id=release_id,
        purpose=purpose,
        dialect="chat",
        status="open",
        request=data,
        timing=Timing(received_at),
        rendered=rendered,
        model_asked=body.get("model"),
        session=session_of(call.headers, body),
        tags=tags_of(call.headers),
        client=call.headers.get("user-agent"),
    )
    exchange = Exchange(app, call, engine, ask, record, capture, begun)
    await (exchange.stream() if stream else exchange.whole())


@dataclass(slots=True)
class Exchange:
    """One request on its way through an engine. `begun` is the performance counter at arrival."""

    app: App
    call: Call
    engine: Engine
    ask: Ask
    record: Record
    capture: bool
    begun: float
    first: float | None = None
    head: Head | None = None
    answer: Answer | None = None

    async def whole(self) -> None:
        """Not streamed: the engine's answer, one insert, then the answer to the client."""
        parts: list[bytes] = []
        ended = False
        try:
            with Leash(self.call.receive):
                async with aclosing(self._items()) as items:
                    async for item in items:
                        parts.append(item.data)
                        ended = ended or item.terminal
            if not ended or self.head is None:
                raise EngineError("the engine ended without an answer; try again")
        except Gone:
            await self._close("aborted", "the client went away")
            raise
        except asyncio.CancelledError:
            await self._close("interrupted", "the server stopped before the answer ended")
            raise
        except ReefError as error:
            await self._refuse(error)
            return
        await self._relay(b"".join(parts))

    async def stream(self) -> None:
        """Streamed: opened while the engine begins, closed before the end marker leaves."""
        opening = asyncio.ensure_future(self.app.context.store.append(self.record)) if self.capture else None
        sent: list[bytes] = []
        held: bytes | None = None
        try:
            with Leash(self.call.receive):
                async with aclosing(self._items()) as items:
                    async for item in items:
                        assert self.head is not None
                        if self.head.status != 200:
                            sent.append(item.data)
                            continue
                        if not self.call.started:
                            await self._opened(opening)
                            failpoint("gateway.opened")
                            await self.call.start(200, _STREAMED | self._headers(relay=True))
                        if item.terminal or held is not None:
                            held = (held or b"") + item.data
                        else:
                            sent.append(item.data)
                            await self._send(item.data)
        except Gone:
            await self._settle(opening, "aborted", "the client went away", sent)
            raise
        except asyncio.CancelledError:
            await self._settle(opening, "interrupted", "the server stopped before the answer ended", sent)
            raise
        except ReefError as error:
            if self.call.started:
                await self._settle(opening, "interrupted", error.message, sent)
                self.call.drop(error.message)
            else:
                await self._opened(opening)
                await self._refuse(error)
            return
        except Exception:
            await self._settle(opening, "interrupted", "the gateway failed inside", sent)
            raise
        if self.head is not None and self.head.status != 200:
            await self._opened(opening)
            await self._relay(b"".join(sent))
        elif held is None:
            await self._end_early(opening, sent)
        elif await self._settle(opening, "complete", None, sent):
            await self._send(held, more=False)

    async def _items(self) -> AsyncGenerator[Piece]:
        """The engine's pieces. Head and Answer are kept as they come."""
        items = self.engine.answer(self.ask)
        try:
            async for item in items:
                if isinstance(item, Piece):
                    if self.first is None:
                        self.first = time.perf_counter() - self.begun
                    yield item
                elif isinstance(item, Head):
                    self.head = item
                else:
                    self.answer = item
        except ReefError:
            raise
        except Exception as error:
            log.error("the engine failed inside", exc_info=error)
            raise EngineError("the engine failed inside; its log says why") from error
        finally:
            if (close := getattr(items, "aclose", None)) is not None:
                await close()

    async def _send(self, data: bytes, *, more: bool = True) -> None:
        await self.call.send({"type": "http.response.body", "body": data, "more_body": more})

    async def _relay(self, data: bytes) -> None:
        """Store a whole answer (or a provider's refusal), then send it."""
        assert self.head is not None
        status = self.head.status
        if 200 <= status < 300:
            await self._close("complete", None)
        else:
            excerpt = data[:500].decode("utf-8", "replace")
            await self._close("rejected" if status < 500 else "failed", f"the upstream answered {status}: {excerpt}")
        headers = self._headers(relay=True)
        if status == 409:
            headers.setdefault("x-should-retry", "false")
        await self.call.reply(status, data, headers)

    async def _refuse(self, error: ReefError) -> None:
        """The engine did not answer: leave a record, if there can be one, and answer with the error."""
        receipt = await self._close("rejected" if status_of(error) < 500 else "failed", message_of(error))
        await self.call.fail(error, self._headers(receipt=receipt), self.record.id if receipt else None)

    async def _end_early(self, opening: asyncio.Future[Any] | None, sent: list[bytes]) -> None:
        """The engine came to an end without the end marker."""
        error = EngineError("the engine ended before its answer did; try again")
        if self.call.started:
            await self._settle(opening, "interrupted", error.message, sent)
            self.call.drop(error.message)
        else:
            await self._opened(opening)
            await self._refuse(error)

    async def _opened(self, opening: asyncio.Future[Any] | None) -> None:
        """Wait until the record is open on disk. Cancelling the wait does not cancel the opening."""
        if opening is not None:
            await asyncio.shield(opening)

    async def _settle(
        self, opening: asyncio.Future[Any] | None, status: Status, error: str | None, sent: list[bytes]
    ) -> bool:
        """Close a stream's record. False when that failed: then the answer's end must not be sent.

        An answer that did not end is kept as far as it was sent; its tokens are not known for sure, so it never trains.
        """
        if status != "complete":
            said = read_chunks(b"".join(sent))
            self.answer = Answer(said.choices(), usage=said.usage, model=said.model)
        try:
            await self._opened(opening)
            await self._close(status, error)
        except ReefError as failure:
            self.call.drop(f"its record could not be closed: {failure.message}")
            return False
        return True

    async def _close(self, status: Status, error: str | None) -> bool:
        """Store the exchange as it ended; whether there is a receipt for it.

        A failed exchange whose record cannot be stored either is answered without a receipt; any other raises.
        """
        if not self.capture:
            return False
        answer = self.answer or Answer()
        last = time.perf_counter() - self.begun
        record = replace(
            self.record,
            status=status,
            timing=Timing(self.record.timing.received_at, None, self.first if self.ask.stream else None, last),
            choices=answer.choices or (),
            usage=answer.usage,
            prompt_ids=answer.prompt_ids,
            sampling=answer.sampling,
            model_answered=answer.model,
            upstream_id=self.head.upstream_id if self.head else None,
            error=error,
            untrainable=untrainable(status, answer),
        )
        failpoint("gateway.before_close")
        try:
            await self.app.context.store.append(record)
        except StoreError:
            if status == "complete" or self.call.started:
                raise
            return False
        failpoint("gateway.closed")
        return True

    def _headers(self, *, relay: bool = False, receipt: bool = True) -> dict[str, str]:
        """Reef's headers; with `relay` the engine's too."""
        headers: dict[str, str] = {}
        if self.head is not None:
            if relay:
                headers |= {n: value for n, value in self.head.headers.items() if n not in _OWN and value.isprintable()}
            if self.head.upstream_id is not None:
                headers["x-upstream-request-id"] = self.head.upstream_id
        if self.capture and receipt:
            headers["x-reef-agent-record-id"] = headers["x-request-id"] = self.record.id
        headers["x-reef-release-id"] = self.record.release_id
        headers["x-reef-scenario"] = self.record.scenario
        return headers


def check(body: Mapping[str, Any]) -> None:
    """InputError for what no engine should be asked. Fields that are not known pass."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a list with at least one message", param="messages")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{place}] must be an object with a role", param=f"messages[{place}]")
    for name, kind, what in (("model", str, "a string"), ("stream", bool, "true or false")):
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise InputError(f"{name} must be {what}", param=name)
    for name in ("max_tokens", "max_completion_tokens", "n"):
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"{name} must be a whole number of 1 or more", param=name)


def untrainable(status: Status, answer: Answer) -> str | None:
    """Why no choice of an exchange can train on policy; None when it can."""
    if status != "complete":
        return f"the exchange ended {status}"
    if answer.untrainable is not None:
        return answer.untrainable
    choices = answer.choices or ()
    if not answer.prompt_ids or not choices or any(c.output_ids is None or c.logprobs is None for c in choices):
        return "the engine gave no tokens"
    if answer.sampling is None or not answer.sampling.plain:
        return "sampling was not plain: it takes temperature above 0, top_p 1 and no top_k"
    return None


def _capture(headers: Mapping[str, str]) -> bool:
    value = headers.get("x-reef-capture")
    if value is not None and value.strip().lower() != "false":
        raise InputError(
            "x-reef-capture can only be false; leave it out to have the exchange stored", param="x-reef-capture"
        )
    return value is None


async def _pinned(app: App, pin: str, scenario: str) -> str:
    """The full id of the release a request pins: one of its own scenario's, or a candidate."""
    release = (await app.shelf.take(pin.strip())).release
    if release.scenario != scenario:
        raise InputError(f"release {pin!r} is not of scenario {scenario!r}", param="x-reef-release")
    return release.id
