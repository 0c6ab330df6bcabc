"""The embedded engine seen from another process: the Engine seam over a unix socket, and the answer's bytes.

Knows: the engine's wire messages and how a chat completion looks as JSON and as server-sent events, calls included.
Does not know: torch, the model, or what the caller does with the bytes.

- Nothing is handed out before the engine has accepted the prompt, so a refusal still has a status of its own.
- No call waits for ever: an engine that does not begin an answer, load or rate within `patience` is an EngineError.
- A stream ends with each choice's finish_reason, usage when it was asked for, and the marker; or by an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from reef.core import wire
from reef.core.errors import EngineError, InputError, WireError
from reef.core.nouns import Choice, Json, Sampling, Span, Usage
from reef.core.rpc import Client
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.local.tools import Call, Sieve, read_offer

_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
NO_ANSWER = "nothing was drawn: the prompt was only counted"
PATIENCE = 300.0
DONE = b"data: [DONE]\n\n"
M = TypeVar("M", bound=wire.Message)


class LocalEngine:
    """Engine over the socket of the engine process. `model` is the name it is asked for; the process names its own.

    `patience` is in seconds, and long: it is for an engine that hangs, not for one that loads a large model.
    """

    dialects = frozenset({"chat", "count"})

    def __init__(self, socket: Path, *, model: str, patience: float = PATIENCE) -> None:
        self._client, self._model, self._patience = Client(socket), model, patience

    async def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        """Head, Pieces, Answer; see `engines.Engine`. A count is one terminal piece, `{"input_tokens": n}`."""
        if ask.dialect == "count":
            counted = await self._call(wire.Count(body=ask.body), wire.Counted)
            yield Head(200, _JSON)
            yield Piece(orjson.dumps({"input_tokens": counted.tokens}), terminal=True)
            yield Answer(usage=Usage(counted.tokens, 0), model=self._model, untrainable=NO_ANSWER)
            return
        if ask.dialect != "chat":
            raise InputError(f"the embedded engine answers the chat dialect, not {ask.dialect}")
        request = wire.Generate(release_id=ask.release_id, body=ask.body, priority=ask.priority)
        try:
            async with contextlib.aclosing(self._client.stream(request)) as messages:  # type: ignore[type-var]
                async with asyncio.timeout(self._patience):
                    begun = await anext(messages)
                if not isinstance(begun, wire.Begun):
                    raise EngineError(f"the engine began with {type(begun).__name__}")
                draft = Draft(ask, begun)
                yield Head(200, _EVENTS if ask.stream else _JSON, upstream_id=None)
                for data in draft.opening():
                    yield Piece(data)
                async for message in messages:
                    for data in draft.take(message):
                        yield Piece(data)
                for piece in draft.closing():
                    yield piece
                yield draft.answer()
        except WireError as error:
            raise EngineError(f"the engine is not reachable: {error.message}") from None
        except TimeoutError:
            raise EngineError(f"the engine did not begin an answer within {self._patience:g} s") from None

    async def load(self, release_id: str) -> None:
        await self._call(wire.Load(release_id=release_id), wire.Loaded)

    async def rate(
        self, release_id: str, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        given = [list(sequence) for sequence in sequences]
        rated = await self._call(wire.Rate(release_id=release_id, sequences=given, starts=list(starts)), wire.Rated)
        return rated.logprobs

    async def ready(self) -> bool:
        try:
            await self._client.call(wire.Ping(), timeout=2.0)
        except WireError:
            return False
        return True

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, message: wire.Message, expected: type[M]) -> M:
        try:
            found = await self._client.call(message, timeout=self._patience)
        except WireError as error:
            raise EngineError(f"the engine is not reachable: {error.message}") from None
        if not isinstance(found, expected):
            raise EngineError(f"the engine answered {type(message).__name__} with {type(found).__name__}")
        return found


@dataclass(slots=True)
class _Part:
    """One choice as it grows. `text` and `calls` are what the client sees of the text that was sampled."""

    sieve: Sieve
    text: str = ""
    calls: list[dict[str, Json]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    content: list[dict[str, Json]] = field(default_factory=list)  # the public log-probs
    told: int = 0  # of `content`, already streamed
    finish_reason: str | None = None

    def message(self) -> dict[str, Json]:
        """The assistant's message in chat's form."""
        if self.calls:
            return {"role": "assistant", "content": self.text or None, "tool_calls": self.calls}
        return {"role": "assistant", "content": self.text}


class Draft:
    """Turns the engine's messages into the bytes of one answer and, at the end, into what is recorded of it."""

    def __init__(self, ask: Ask, begun: wire.Begun) -> None:
        body: dict[str, Any] = orjson.loads(ask.body)
        options = body.get("stream_options")
        self._receipt, self._stream = ask.receipt, ask.stream
        self._usage = isinstance(options, dict) and options.get("include_usage") is True
        self._logprobs = body.get("logprobs") is True
        self._begun = begun
        self._cached = 0
        offer = read_offer(body)
        self._parts = [_Part(Sieve(offer)) for _ in range(body.get("n") or 1)]
        self._frame: dict[str, Json] = {
            "id": f"chatcmpl-{ask.receipt}",
            "object": "chat.completion.chunk" if ask.stream else "chat.completion",
            "created": int(time.time()),
            "model": begun.model,
        }

    def opening(self) -> list[bytes]:
        if not self._stream:
            return []
        start = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(index, start, None) for index in range(len(self._parts))]

    def take(self, message: wire.Message) -> list[bytes]:
        """The bytes that a message of the engine adds to a stream."""
        if isinstance(message, wire.Delta):
            part = self._parts[message.choice]
            self._grow(part, message)
            return self._add(message.choice, part.sieve.push(message.text))
        if isinstance(message, wire.Finished):
            part = self._parts[message.choice]
            if message.choice == 0:  # the others share its prompt, which counts once
                self._cached = message.cached
            chunks = self._add(message.choice, part.sieve.finish())
            called = part.calls and message.finish_reason == "stop"
            part.finish_reason = "tool_calls" if called else message.finish_reason
            return [*chunks, self._chunk(message.choice, {}, part.finish_reason)] if self._stream else []
        raise EngineError(f"the engine sent {type(message).__name__} in an answer")

    def closing(self) -> list[Piece]:
        if any(part.finish_reason is None for part in self._parts):
            raise EngineError("the engine ended an answer before it was finished")
        if not self._stream:
            choices = [self._choice(index, part) for index, part in enumerate(self._parts)]
            return [Piece(orjson.dumps({**self._frame, "choices": choices, "usage": self._counts()}), terminal=True)]
        pieces = [Piece(DONE, terminal=True)]
        if self._usage:
            pieces.insert(0, Piece(_event({**self._frame, "choices": [], "usage": self._counts()})))
        return pieces

    def answer(self) -> Answer:
        given = self._begun.sampling
        sampling = Sampling(**{**given, "stop": tuple(given.get("stop") or ())})
        return Answer(
            choices=tuple(
                Choice(
                    index=index,
                    text=part.text,
                    finish_reason=part.finish_reason,
                    output_ids=tuple(part.ids),
                    logprobs=tuple(part.logprobs),
                    spans=tuple(part.spans),
                    message=part.message() if part.calls else None,
                )
                for index, part in enumerate(self._parts)
            ),
            prompt_ids=tuple(self._begun.prompt_ids),
            sampling=sampling,
            usage=self._used(),
            model=self._begun.model,
            untrainable=why_not(sampling, self._begun.quantised),
            cached=self._cached,
        )

    def _grow(self, part: _Part, delta: wire.Delta) -> None:
        start = len(part.ids)
        part.ids += delta.ids
        part.logprobs += delta.logprobs
        if part.spans and part.spans[-1].release_id == delta.release_id:
            part.spans[-1] = replace(part.spans[-1], end=len(part.ids))
        elif delta.ids:
            part.spans.append(Span(delta.release_id, start, len(part.ids)))
        if self._logprobs and delta.pieces is not None:
            part.content += _public(delta)

    def _add(self, index: int, items: list[str | Call]) -> list[bytes]:
        """Adds to a choice what it says and calls; the chunks that tell so."""
        part, deltas = self._parts[index], list[dict[str, Json]]()
        for item in items:
            if isinstance(item, str):
                part.text += item
                deltas.append({"content": item})
                continue
            # One row of numbers for all choices, which does not depend on the order they call in.
            number = len(part.calls) * len(self._parts) + index
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": f"call_{self._receipt}_{number}", "type": "function", "function": function}
            deltas.append({"tool_calls": [{"index": len(part.calls), **call}]})
            part.calls.append(call)
        return [self._chunk(index, delta, None) for delta in deltas] if self._stream else []

    def _chunk(self, index: int, delta: dict[str, Json], finish: str | None) -> bytes:
        part = self._parts[index]
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if self._logprobs and len(part.content) > part.told:
            choice["logprobs"] = {"content": part.content[part.told :], "refusal": None}
            part.told = len(part.content)
        usage = {"usage": None} if self._usage else {}
        return _event({**self._frame, "choices": [choice], **usage})

    def _choice(self, index: int, part: _Part) -> dict[str, Json]:
        return {
            "index": index,
            "message": {**part.message(), "refusal": None},
            "logprobs": {"content": part.content, "refusal": None} if self._logprobs else None,
            "finish_reason": part.finish_reason,
        }

    def _used(self) -> Usage:
        return Usage(len(self._begun.prompt_ids), sum(len(part.ids) for part in self._parts))

    def _counts(self) -> dict[str, Json]:
        used = self._used()
        total = used.prompt_tokens + used.completion_tokens
        return {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def why_not(sampling: Sampling, quantised: str | None = None) -> str | None:
    """Why answers drawn like this cannot train on policy; None when they can."""
    if quantised:
        return f"quantised {quantised}: other weights answered than those that are trained"
    if sampling.plain:
        return None
    if sampling.temperature <= 0:
        return "temperature 0: the answer was not drawn from the model's distribution"
    if sampling.top_k:
        return f"top_k {sampling.top_k}: the distribution was cut, and what was left of it was not stored"
    return f"top_p {sampling.top_p:g}: the distribution was cut, and what was left of it was not stored"


def _event(value: dict[str, Json]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _public(delta: wire.Delta) -> list[dict[str, Json]]:
    """Log-probs in the provider's form. Tokens without a text (the one that ends the answer) are left out."""
    found: list[dict[str, Json]] = []
    for number, piece in enumerate(delta.pieces or ()):
        if not piece:
            continue
        top: list[dict[str, Json]] = []
        if delta.top is not None and delta.top_pieces is not None:
            pairs = zip(delta.top_pieces[number], delta.top[number], strict=True)
            top = [_scored(text, logprob) for text, (_, logprob) in pairs]
        found.append({**_scored(piece, delta.logprobs[number]), "top_logprobs": top})
    return found


def _scored(text: str, logprob: float) -> dict[str, Json]:
    """`bytes` is null for a token that is only a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if "�" in text else list(text.encode())}
