"""An engine without a model, for tests: the same question to the same release is always answered with the same words.

Knows: OpenAI's chat answers, JSON and SSE, token ids and log-probs consistent with its text, and scripted faults.
Does not know: weights. A release only changes what it says.

A token is a word with the space before it; its id is a digest. Faults are taken from `faults`, one a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from reef.core.errors import ContextError, EngineError
from reef.core.nouns import Choice, Sampling, Span, Usage
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.local.chat import check_stream, read_choices, read_sampling

_WORD = re.compile(r"\s*\S+|\s+$")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request. `at` counts words of the answer; `seconds` is a delay for `slow` and `hang`.

    refuse: EngineError before the head. status: an answer with `status` and an error body, as a provider would.
    cut: the stream ends by an exception. short: it ends without its end marker. hang: no more words. slow: each takes
    `seconds`.
    """

    kind: Literal["refuse", "status", "cut", "short", "hang", "slow"]
    at: int = 0
    seconds: float = 3600.0
    status: int = 429


@dataclass(frozen=True, slots=True)
class _Work:
    """One request, planned: what will be said is known before it begins."""

    ask: Ask
    body: dict[str, Any]
    fault: Fault | None
    prompt: list[str]
    words: list[str]
    count: int
    sampling: Sampling

    @property
    def finish(self) -> str:
        return "length" if len(self.words) == self.sampling.max_tokens else "stop"

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), self.count * len(self.words))


class FakeEngine:
    """`reply(release_id, body)` gives the text; by default it names the release and repeats the last message.

    `delay` is slept before each word. `stopped` counts answers that were closed early, `asked` keeps every Ask.
    """

    dialects = frozenset({"chat", "count"})

    def __init__(
        self,
        *,
        model: str = "fake",
        reply: Callable[[str, dict[str, Any]], str] | None = None,
        delay: float = 0.0,
        tokens: bool = True,
        context: int = 8192,
    ) -> None:
        self.model = model
        self.faults: deque[Fault] = deque()
        self.broken: set[str] = set()  # releases that cannot be loaded
        self.loaded: list[str] = []
        self.asked: deque[Ask] = deque(maxlen=1000)
        self.stopped = 0
        self.is_ready = True
        self._reply = reply or _echo
        self._delay = delay
        self._tokens = tokens
        self._context = context

    async def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        self.asked.append(ask)
        fault = self.faults.popleft() if self.faults else None
        body = orjson.loads(ask.body)
        if fault is not None and fault.kind == "refuse":
            raise EngineError("the engine refused; try again")
        if ask.release_id in self.broken:
            raise EngineError(f"release {ask.release_id} cannot be loaded; roll back to another")
        if fault is not None and fault.kind == "status":
            yield Head(fault.status, {"content-type": "application/json", "retry-after": "30"}, "up-1")
            yield Piece(_error(fault.status), terminal=True)
            yield Answer(untrainable="refused")
            return
        if ask.dialect == "count":
            count = len(_prompt(body))
            yield Head(200, {"content-type": "application/json"})
            yield Piece(orjson.dumps({"input_tokens": count}), terminal=True)
            yield Answer(usage=Usage(count, 0), model=self.model, untrainable="nothing was drawn")
            return
        work = self._plan(ask, body, fault)
        done = False
        try:
            async with aclosing(self._stream(work) if ask.stream else self._whole(work)) as items:
                async for item in items:
                    yield item
            done = True
            yield self._answer(work)
        finally:
            self.stopped += not done

    async def load(self, release_id: str) -> None:
        if release_id in self.broken:
            raise EngineError(f"release {release_id} cannot be loaded")
        self.loaded.append(release_id)

    async def rate(
        self, release_id: str, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        return [
            [_logprob(release_id, token) for token in sequence[start:]]
            for sequence, start in zip(sequences, starts, strict=True)
        ]

    async def ready(self) -> bool:
        return self.is_ready

    async def close(self) -> None:
        """Nothing is open."""

    def _plan(self, ask: Ask, body: dict[str, Any], fault: Fault | None) -> _Work:
        prompt = _prompt(body)
        if len(prompt) > self._context:
            raise ContextError(
                f"the prompt is {len(prompt)} tokens; the model reads {self._context}: shorten it", param="messages"
            )
        sampling, count = _sampling(body)
        words = _split(self._reply(ask.release_id, body))[: sampling.max_tokens]
        return _Work(ask, body, fault, prompt, words, count, sampling)

    async def _stream(self, work: _Work) -> AsyncGenerator[Head | Piece]:
        yield Head(200, {"content-type": "text/event-stream; charset=utf-8"})
        for index in range(work.count):
            yield Piece(self._chunk(work, index, {"role": "assistant", "content": ""}))
            for place, word in enumerate(work.words):
                await self._pause(place, work.fault)
                yield Piece(self._chunk(work, index, {"content": word}))
            yield Piece(self._chunk(work, index, {}, work.finish))
        if work.fault is not None and work.fault.kind == "short":
            return
        if (work.body.get("stream_options") or {}).get("include_usage"):
            yield Piece(_data(self._envelope(work, "chat.completion.chunk", [], _plain(work.usage))))
        yield Piece(b"data: [DONE]\n\n", terminal=True)

    async def _whole(self, work: _Work) -> AsyncGenerator[Head | Piece]:
        for place in range(len(work.words)):
            await self._pause(place, work.fault)
        yield Head(200, {"content-type": "application/json"})
        message = {"role": "assistant", "content": "".join(work.words)}
        choices = [
            {"index": index, "message": message, "finish_reason": work.finish, "logprobs": None}
            for index in range(work.count)
        ]
        yield Piece(orjson.dumps(self._envelope(work, "chat.completion", choices, _plain(work.usage))), terminal=True)

    async def _pause(self, place: int, fault: Fault | None) -> None:
        if self._delay:
            await asyncio.sleep(self._delay)
        if fault is None or fault.kind == "short":
            return
        if fault.kind == "slow" or (place == fault.at and fault.kind == "hang"):
            await asyncio.sleep(fault.seconds)
        elif place == fault.at and fault.kind == "cut":
            raise EngineError("the engine broke off in the middle of an answer")

    def _answer(self, work: _Work) -> Answer:
        text, release_id = "".join(work.words), work.ask.release_id
        if not self._tokens:
            choices = tuple(Choice(index, text, work.finish) for index in range(work.count))
            return Answer(choices, usage=work.usage, model=self.model, untrainable="the engine gives no tokens")
        ids = tuple(map(token_id, work.words))
        logprobs = tuple(_logprob(release_id, token) for token in ids)
        spans = (Span(release_id, 0, len(ids)),)
        choices = tuple(
            Choice(index, text, work.finish, output_ids=ids, logprobs=logprobs, spans=spans)
            for index in range(work.count)
        )
        return Answer(choices, tuple(map(token_id, work.prompt)), work.sampling, work.usage, self.model)

    def _envelope(self, work: _Work, kind: str, choices: list[dict[str, Any]], usage: Any = None) -> dict[str, Any]:
        envelope = {
            "id": f"chatcmpl-{work.ask.receipt}",
            "object": kind,
            "created": 0,
            "model": self.model,
            "choices": choices,
        }
        return envelope if usage is None else envelope | {"usage": usage}

    def _chunk(self, work: _Work, index: int, delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish}
        return _data(self._envelope(work, "chat.completion.chunk", [choice]))


def token_id(word: str) -> int:
    """The token id of one word: 24 bits of its digest."""
    return int.from_bytes(hashlib.sha256(word.encode("utf-8", "replace")).digest()[:3])


def _split(text: str) -> list[str]:
    return _WORD.findall(text)


def _prompt(body: dict[str, Any]) -> list[str]:
    return _split("\n".join(str(message.get("content")) for message in body["messages"]))


def _logprob(release_id: str, token: int) -> float:
    digest = hashlib.sha256(f"{release_id}:{token}".encode()).digest()
    return -(1 + int.from_bytes(digest[:2])) / 65536


def _echo(release_id: str, body: dict[str, Any]) -> str:
    return f"{release_id[:7]} heard: {body['messages'][-1].get('content')}"


def _sampling(body: dict[str, Any]) -> tuple[Sampling, int]:
    """As the embedded engine reads them, so that a test meets the same refusals. Nothing here is cut or stopped."""
    check_stream(body)
    given = read_sampling(body)
    return Sampling(given.temperature, given.top_p, max_tokens=given.max_tokens, seed=given.seed), read_choices(body)


def _plain(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _error(status: int) -> bytes:
    error = {"message": f"status {status}", "type": "upstream", "code": "scripted", "param": None}
    return orjson.dumps({"error": error})
