"""One exchange with an engine: from the ask to a record on disk and an answer at the client.

Knows: the order in which things become durable, what each kind of ending leaves behind.
Does not know: dialects' fields, how the engine answers, or what a record is worth to a recipe.

- Not streamed: one insert, committed before the answer leaves. Streamed: opened durably while the engine works, receipt
  in the headers, and only the event with the end marker waits for the record's closing.
- complete: all went out. interrupted: the engine broke off, and so does the answer. aborted: the client went away.
  rejected: the request was refused. failed: the engine could not answer.
- A lenient scenario is answered also when the store cannot write: without a receipt, `x-reef-recorded: false` says so,
  and the record is stored when the store is back (`spool.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from reef.core.errors import ConflictError, EngineError, InputError, LimitError, ReefError, StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import Record, Status, Timing
from reef.engines import Answer, Head, Piece
from reef.engines.dialect import read
from reef.gateway.call import Call, Gone
from reef.gateway.errors import body_of, message_of, status_of
from reef.gateway.leash import Leash

if TYPE_CHECKING:
    from reef.gateway.app import App

Items = AsyncIterator[Head | Piece | Answer]

_OWN = {"content-length", "content-encoding", "transfer-encoding", "connection", "date", "server"}
"""Headers of an engine's answer that are the server's own to set."""
_STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_GONE = "the client went away"
_STOPPED = "the server stopped before the answer ended"
_LATE = "its record could not be stored in time"
_ODD = "its answer could not be stored"
_COMMENT = b": keep-alive\n\n"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Exchange:
    """One request on its way through an engine. `begun` is the performance counter at arrival.

    `ask` starts the engine's work. `facts` are the fields of its record that are known from the start; the record is
    made of them when it ends (frozen ones are costly to copy). `capture` False: nothing of it is stored.
    """

    app: App
    call: Call
    ask: Callable[[], Items]
    facts: dict[str, Any]
    received_at: float
    streamed: bool
    capture: bool
    begun: float
    lost: bool = False  # to be captured, but the store cannot: there is no receipt
    asked: float | None = None
    first: float | None = None
    head: Head | None = None
    answer: Answer | None = None
    record: Record | None = None  # as it ended
    worked: float = 0.0  # seconds until the engine was done
    commit: float = 0.0  # seconds spent waiting for the store
    sent: int = 0
    status: int = 200

    async def run(self) -> None:
        try:
            await (self.stream() if self.streamed else self.whole())
        finally:
            self._observe()

    @property
    def receipt(self) -> str | None:
        """The exchange's receipt, if it has (or will have) one."""
        return self.id if self.capture and not self.lost else None

    @property
    def id(self) -> str:
        return str(self.facts["id"])

    @property
    def dialect(self) -> str:
        return str(self.facts["dialect"])

    @property
    def lenient(self) -> bool:
        """Whether its scenario is answered also when the store cannot write."""
        return self.app.context.lenient(self.facts["scenario"])

    @property
    def tokens(self) -> int | None:
        """Tokens the exchange came to; about how many when it broke off; None when nothing ran."""
        if self.answer is not None and self.answer.usage is not None:
            return self.answer.usage.prompt_tokens + self.answer.usage.completion_tokens
        if self.first is None or self.status >= 400:
            return None
        said = self.record.choices if self.record is not None else ()
        return (len(self.facts["request"]) + sum(len(choice.text) for choice in said)) // 4

    async def whole(self) -> None:
        """Not streamed: the engine's answer, one insert, then the answer to the client."""
        parts: list[bytes] = []
        ended = False
        try:
            with Leash(self.call):
                async with aclosing(self._items()) as items:
                    async for item in items:
                        parts.append(item.data)
                        ended = ended or item.terminal
            if not ended or self.head is None:
                raise EngineError("the engine ended without an answer; try again")
        except Gone:
            await self._close("aborted", _GONE)
            raise
        except asyncio.CancelledError:
            await self._close("interrupted", _STOPPED)
            raise
        except ReefError as error:
            await self._refuse(error)
            return
        await self._relay(parts[0] if len(parts) == 1 else b"".join(parts))

    async def stream(self) -> None:
        """Streamed: opened while the engine begins, closed before the end marker leaves."""
        opening = asyncio.ensure_future(self._store(self._begun())) if self.capture else None
        sent: list[bytes] = []
        held: list[bytes] = []
        try:
            with Leash(self.call):
                async with aclosing(self._items()) as items, self._awake() as awake:
                    async for item in items:
                        assert self.head is not None
                        if self.head.status != 200:
                            sent.append(item.data)
                            continue
                        if not self.call.started:
                            await self._opened(opening)
                            failpoint("gateway.opened")
                            await self.call.start(200, _STREAMED | self._headers(relay=True))
                        if item.terminal or held:
                            held.append(item.data)
                        else:
                            sent.append(item.data)
                            awake()
                            await self._send(item.data)
        except Gone:
            await self._settle(opening, "aborted", _GONE, sent)
            raise
        except asyncio.CancelledError:
            await self._settle(opening, "interrupted", _STOPPED, sent)
            raise
        except ReefError as error:
            await self._broken(opening, error, sent)
            return
        except Exception:
            await self._settle(opening, "interrupted", "the gateway failed inside", sent)
            raise
        if self.head is not None and self.head.status != 200:
            await self._open_quietly(opening)
            await self._relay(b"".join(sent))
        elif not held:
            await self._broken(opening, EngineError("the engine ended before its answer did; try again"), sent)
        elif self.answer is not None and self.answer.error is not None:  # the error event is the answer's end
            await self._settle(opening, "interrupted", self.answer.error, [*sent, *held])
            await self._send(b"".join(held), more=False)
        elif await self._settle(opening, "complete", None, sent):
            await self._send(b"".join(held), more=False)

    async def _items(self) -> AsyncGenerator[Piece]:
        """The engine's pieces. Head and Answer are kept as they come."""
        self.asked = time.perf_counter() - self.begun
        items = self.ask()
        most = self.app.context.limits.stream_bytes
        try:
            async for item in items:
                if isinstance(item, Piece):
                    if self.first is None:
                        self.first = time.perf_counter() - self.begun
                    self.sent += len(item.data)
                    if self.sent > most:
                        raise LimitError(f"the answer is longer than {most} bytes; see limits.stream_bytes")
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
            self.worked = time.perf_counter() - self.begun - self.asked
            if (close := getattr(items, "aclose", None)) is not None:
                await close()

    @asynccontextmanager
    async def _awake(self) -> AsyncGenerator[Callable[[], None]]:
        """Comments into a stream that has had no news for a while; every piece ends between two events."""
        loop = asyncio.get_running_loop()
        quiet = self.app.context.limits.quiet_seconds
        last = loop.time()
        task: asyncio.Task[None] | None = None

        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer, task, last
            now = loop.time()
            if now - last >= quiet and self.call.started and (task is None or task.done()):
                last = now
                task = asyncio.create_task(self._send(_COMMENT))
            timer = loop.call_later(max(0.01, last + quiet - now), look)

        def note() -> None:
            nonlocal last
            last = loop.time()

        timer = loop.call_later(quiet, look)
        try:
            yield note
        finally:
            timer.cancel()
            if task is not None and not task.done():
                task.cancel()

    async def _send(self, data: bytes, *, more: bool = True) -> None:
        await self.call.piece(data, more=more)

    async def _relay(self, data: bytes) -> None:
        """Store a whole answer (or a provider's refusal), then send it."""
        assert self.head is not None
        status = self.status = self.head.status
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
        self.status = status_of(error)
        await self._close("rejected" if self.status < 500 else "failed", message_of(error))
        await self.call.fail(error, self._headers(), self.receipt)

    async def _broken(self, opening: asyncio.Future[None] | None, error: ReefError, sent: list[bytes]) -> None:
        """The answer did not come to its end: an error with a status of its own, or a stream that breaks off.

        Messages has an error event that its clients know what to do with; elsewhere the socket is dropped.
        """
        if not self.call.started:
            await self._open_quietly(opening)
            await self._refuse(error)
            return
        await self._settle(opening, "interrupted", error.message, sent)
        if self.dialect != "messages" or self.call.dropped:
            self.call.drop(error.message)
            return
        body = orjson.dumps(body_of(error, "anthropic", self.receipt))
        await self._send(b"event: error\ndata: " + body + b"\n\n", more=False)

    async def _opened(self, opening: asyncio.Future[None] | None) -> None:
        """Wait until the record is open on disk. Cancelling the wait does not cancel the opening.

        StoreError when it cannot be opened and the scenario needs its records; else the answer goes unrecorded.
        """
        if opening is None or self.lost:
            return
        begun = time.perf_counter()
        try:
            await asyncio.shield(opening)
        except StoreError:
            if not self.lenient:
                raise
            self.lost = True
        finally:
            self.commit += time.perf_counter() - begun

    async def _open_quietly(self, opening: asyncio.Future[None] | None) -> None:
        """Before a refusal is stored: whether the opening worked no longer matters."""
        if opening is not None:
            await asyncio.wait([opening])
            opening.exception()

    async def _settle(
        self, opening: asyncio.Future[None] | None, status: Status, error: str | None, sent: list[bytes]
    ) -> bool:
        """Close a stream's record. False when that failed: then the answer's end must not be sent.

        An answer that did not end is kept as far as it was sent; its tokens are not known for sure, so it never trains.
        """
        if status != "complete":
            said = read(self.dialect, b"".join(sent), stream=True)
            self.answer = Answer(said.choices(), usage=said.usage, model=said.model, id=said.id)
        try:
            await self._opened(opening)
            await self._close(status, error)
        except ReefError as failure:
            self.call.drop(f"its record could not be closed: {failure.message}")
            return False
        return True

    async def _close(self, status: Status, error: str | None) -> None:
        """Store the exchange as it ended. Afterwards `receipt` says whether there is one.

        What cannot be stored now is stored when the store is back, if the scenario is lenient or its record is open
        already. The answer goes on without its record when it failed anyway or the scenario is lenient; else it raises.
        """
        record = self.record = self._ended(status, error)
        if not self.capture:
            return
        if self.lost:
            self.app.spool.put(record)
            return
        failpoint("gateway.before_close")
        begun = time.perf_counter()
        try:
            try:
                await self._store(record)
            except InputError as failure:  # an answer so odd that it has no row: the rest of the exchange is kept
                log.error("an answer could not be stored: %s", failure.message, extra={"receipt": record.id})
                record = self.record = replace(record, choices=(), reply=None, prompt_ids=None, untrainable=_ODD)
                await self._store(record)
        except StoreError as failure:
            lenient = self.lenient
            if not lenient and self.call.started:
                self.app.spool.put(replace(record, status="interrupted", error=failure.message, untrainable=_LATE))
            if not lenient and (status == "complete" or self.call.started):
                raise
            if lenient:
                self.app.spool.put(record)
            self.lost = not self.call.started
        finally:
            self.commit += time.perf_counter() - begun
        failpoint("gateway.closed")

    async def _store(self, record: Record) -> None:
        left = self.app.context.limits.store_seconds
        if not self.call.started:  # a client waits for its first byte no longer than that in all
            left -= self.commit
        task, late = asyncio.current_task(), False
        assert task is not None

        def give_up() -> None:
            nonlocal late
            late = True
            task.cancel()

        timer = task.get_loop().call_later(left, give_up)  # asyncio.timeout would cost each request four times as much
        try:
            await self.app.context.store.append(record)
        except ConflictError:
            erased = getattr(self.app.context.store, "erased", None)
            if erased is None or not await erased([record.id]):
                raise  # else it was erased on request while it ran: its client still gets the answer's end
        except asyncio.CancelledError:
            if not late or task.uncancel() > 0:
                raise
            raise StoreError("the record store did not answer in time; look at its disk, then retry") from None
        finally:
            timer.cancel()

    def _begun(self) -> Record:
        """The record as it is opened."""
        return Record(**self.facts, status="open", timing=Timing(self.received_at))

    def _ended(self, status: Status, error: str | None) -> Record:
        """The record of the exchange as it ended."""
        answer = self.answer or Answer()
        last = time.perf_counter() - self.begun
        return Record(
            **self.facts,
            status=status,
            timing=Timing(self.received_at, self.asked, self.first, last),
            reply=answer.reply if status == "complete" else None,
            choices=answer.choices or (),
            usage=answer.usage,
            prompt_ids=answer.prompt_ids,
            sampling=answer.sampling,
            model_answered=answer.model,
            upstream_id=self.head.upstream_id if self.head else None,
            answer_id=answer.id if answer.id is not None and self.id not in answer.id else None,
            error=error,
            untrainable=untrainable(status, answer),
        )

    def _observe(self) -> None:
        """Metrics and, for a person who looks, a line in the log."""
        record = self.record or self._ended("interrupted", "the gateway failed inside")
        whole = time.perf_counter() - self.begun
        self.app.metrics.exchange(
            scenario=record.scenario,
            dialect=record.dialect,
            status=record.status,
            http_status=self.status,
            overhead=max(0.0, whole - self.worked),
            engine=self.worked,
            first=self.first,
            commit=self.commit,
            usage=record.usage,
            cached=self.answer.cached if self.answer is not None else 0,
            bytes_in=len(record.request),
            bytes_out=self.sent,
        )
        if log.isEnabledFor(logging.DEBUG):
            told: dict[str, object] = {"receipt": self.receipt, "scenario": record.scenario, "route": self.call.route}
            told |= {"status": self.status, "seconds": round(whole, 6)}
            log.debug("%s %s", record.dialect, record.status, extra=told)

    def _headers(self, *, relay: bool = False) -> dict[str, str]:
        """Reef's headers; with `relay` the engine's too."""
        headers: dict[str, str] = {}
        facts, head = self.facts, self.head
        if head is not None:
            if relay:
                for name, value in head.headers.items():
                    if name not in _OWN and value.isprintable():
                        headers[name] = value
            if head.upstream_id is not None:
                headers["x-upstream-request-id"] = head.upstream_id
        if self.lost:
            headers["x-reef-recorded"] = "false"
        elif self.capture:
            name = "request-id" if facts["dialect"] == "messages" else "x-request-id"
            headers["x-reef-agent-record-id"] = headers[name] = facts["id"]
        headers["x-reef-release-id"] = facts["release_id"]
        headers["x-reef-scenario"] = facts["scenario"]
        return headers


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
