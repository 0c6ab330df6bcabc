"""Ask an engine questions as one release, many at once, and keep what was already answered.

Knows: chat requests, how to read an answer with or without tokens, retries, what it cost, and that equal parts give
equal answers. Does not know: what an answer is worth, records, scenarios. Nothing asked here is counted as experience.

- Asks have priority 1: live traffic goes first.
- A failure of the engine or the wire is retried twice and is then *missing*, never an empty answer; a request that this
  release makes impossible (its rules leave no room in the context) is the release's own failure, `impossible`.
- Answers are kept in memory by the content of the release's parts, so a published candidate needs no second asking.
- Every try is a call of the bill; what was kept costs nothing. What goes on at the same time asks `apart`, each with a
  bill of its own.
- A question with a job is not asked of the engine: an agent works on it, with the release's tree in its files
  (`harness.episode`). Its own failure is `impossible`, that of its surroundings `missing`, by the same rules.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from reef.core.errors import EngineError, InputError, LimitError, ReefError, UpstreamError, WireError
from reef.core.ids import new_receipt
from reef.core.nouns import Cost, Json, Release, Usage
from reef.engines import Answer, Ask, Engine, Head
from reef.harness.apply import NOTHING, Applied
from reef.harness.episode import Episodes, Job, Outcome

if TYPE_CHECKING:
    from reef.evaluation import Means, Price

TRIES = 3
PAUSE = 0.2  # seconds before the first retry; twice that before the second
PATIENCE = 120.0  # seconds one ask may take: evaluation waits behind live traffic
WIDTH = 16  # asks in flight
KEPT = 4096  # answers remembered
PLAYED = 64  # episodes remembered, which are larger
REST = 2.0  # seconds before an episode is run again; twice that before the second time

FAILURES = (EngineError, WireError, LimitError)
"""What an engine or the wire to it does wrong; nothing that a release could be blamed for."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """A chat request without its model: `messages` as JSON text, so that a question can be a key."""

    messages: str
    max_tokens: int = 20
    temperature: float = 0.0
    seed: int = 0
    job: Job | None = None  # an agent's work instead; the messages are then for people

    @staticmethod
    def of(text: str, **how: Any) -> Question:
        """A single user message."""
        return Question(json.dumps([{"role": "user", "content": text}], ensure_ascii=False), **how)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Token fields are None when the engine gave none. `missing` or `impossible` say why there is none."""

    text: str = ""
    finish_reason: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    missing: str | None = None
    impossible: str | None = None
    usage: Usage | None = None
    outcome: Outcome | None = None  # of an agent's work; `text` is its last words


@dataclass(frozen=True, slots=True)
class Side:
    """Who is asked: a release id, what it adds to each request, and what its answers are kept under."""

    release_id: str
    applied: Applied
    key: str


class Asker:
    """Asks one engine. `renders` gives what a release adds to a request; it may block, being run in a
    thread. `model` is the name put into requests, for engines that need one; `price` what they cost."""

    def __init__(
        self,
        engine: Engine,
        renders: Callable[[Release], Applied] | None = None,
        model: str | None = None,
        price: Price | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self.engine = engine
        self._episodes = episodes
        self._unbilled = Cost()
        self._price = price
        self._renders = renders
        self._model = model
        self._gate = asyncio.Semaphore(WIDTH)
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._played: OrderedDict[Any, Reply] = OrderedDict()

    @classmethod
    def of(cls, means: Means) -> Asker:
        return cls(means.engine, means.renders, means.model, means.price, means.episodes)

    def apart(self) -> Asker:
        """The same asker with a bill of its own: engine, width and what was answered are shared."""
        other = Asker(self.engine, self._renders, self._model, self._price, self._episodes)
        other._gate, other._kept, other._played = self._gate, self._kept, self._played
        return other

    def bill(self) -> Cost:
        """What was spent since the last bill."""
        bill, self._unbilled = self._unbilled, Cost()
        return bill

    async def side(self, release: Release) -> Side:
        """A release as one to be asked. Its key is the content of its parts, so equal parts share their answers."""
        applied = NOTHING if self._renders is None else await asyncio.to_thread(self._renders, release)
        weights = release.parts.get("weights")
        files = sorted((name, digest) for name, (digest, _) in weights.files.items()) if weights else []
        return Side(release.id, applied, json.dumps([files or release.id, applied.key, self._model]))

    async def replies(self, side: Side, questions: Sequence[Question]) -> list[Reply]:
        """One reply per question, in order."""
        return list(await asyncio.gather(*(self.reply(side, question) for question in questions)))

    async def rate(self, side: Side, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """Log-probs of given tokens under one release (rules play no part). EngineError from an engine that cannot."""
        if not sequences:
            return []
        key = (side.key, tuple(map(tuple, sequences)), tuple(starts))
        if key not in self._kept:
            self._keep(key, await again(lambda: self.engine.rate(side.release_id, sequences, starts)))
        rated: list[list[float]] = self._kept[key]
        return rated

    async def reply(self, side: Side, question: Question) -> Reply:
        key = (side.key, question)
        if question.job is not None:
            return await self._work(side, question.job, key)
        if key in self._kept:
            self._kept.move_to_end(key)
            kept: Reply = self._kept[key]
            return kept
        async with self._gate:
            try:
                reply = await again(lambda: self._ask(side, question))
            except InputError as error:
                return Reply(impossible=error.message)
            except FAILURES as error:
                return Reply(missing=error.message)
        self._keep(key, reply)
        return reply

    async def _work(self, side: Side, job: Job, key: Any) -> Reply:
        """An agent's episode under one release, run again twice when its surroundings fail it."""
        if self._episodes is None:
            return Reply(missing="nothing here can run an agent's episode")
        if key in self._played:
            return self._played[key]
        for attempt in range(1, TRIES + 1):
            outcome = await self._episodes.run(job, side.applied.entries, side.release_id)
            self._unbilled += worked(outcome, self._price)
            if outcome.trouble is None:
                break
            log.warning("an episode of %s could not be run: %s", job.agent, outcome.trouble)
            if attempt < TRIES:
                await asyncio.sleep(REST * attempt if PAUSE else 0)
        else:
            return Reply(missing=outcome.trouble, outcome=outcome)
        if outcome.fault is not None:
            log.info("an episode under %s failed: %s", side.release_id[:12], outcome.fault)
        text = outcome.trajectory.final if outcome.trajectory is not None else ""
        reply = Reply(text, impossible=outcome.fault, usage=outcome.usage, outcome=outcome)
        self._played[key] = reply
        while len(self._played) > PLAYED:
            self._played.popitem(last=False)
        return reply

    async def _ask(self, side: Side, question: Question) -> Reply:
        body: dict[str, Any] = {} if self._model is None else {"model": self._model}
        body |= {"messages": json.loads(question.messages), "max_tokens": question.max_tokens}
        body |= {"temperature": question.temperature, "seed": question.seed}
        data = json.dumps(side.applied.apply(body), ensure_ascii=False).encode("utf-8", "surrogatepass")
        ask = Ask(new_receipt(), side.release_id, "chat", data, stream=False, priority=1)
        began, usage = time.monotonic(), None
        try:
            reply = await self._answer(ask)
            usage = reply.usage
            return reply
        finally:
            self._unbilled += cost(usage, time.monotonic() - began, self._price)

    async def _answer(self, ask: Ask) -> Reply:
        status, data, answer = await whole(self.engine, ask)
        if status >= 400:
            raise UpstreamError(f"the engine answered {status}", status=status, body=data)
        return _read(data, answer)

    def _keep(self, key: Any, value: Any) -> None:
        self._kept[key] = value
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)


def cost(usage: Usage | None, seconds: float, price: Price | None) -> Cost:
    """Of one call. Without usage no tokens are known of, and nothing is charged for."""
    usage = usage or Usage(0, 0)
    money = None
    if price is not None:
        money = (usage.prompt_tokens * price.prompt + usage.completion_tokens * price.output) / 1e6
    return Cost(1, usage.prompt_tokens, usage.completion_tokens, seconds, money)


def worked(outcome: Outcome, price: Price | None) -> Cost:
    """Of one episode: the calls that its agent made."""
    return replace(cost(outcome.usage, outcome.seconds, price), calls=outcome.calls)


async def whole(engine: Engine, ask: Ask) -> tuple[int, bytes, Answer]:
    """(status, body, what the engine knows beside it) of a whole answer."""
    status, parts, answer = 200, list[bytes](), Answer()
    async with aclosing(engine.answer(ask)) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Head):
                status = item.status
            elif isinstance(item, Answer):
                answer = item
            else:
                parts.append(item.data)
    return status, b"".join(parts), answer


async def again(call: Callable[[], Coroutine[Any, Any, T] | Awaitable[T]]) -> T:
    """The call's result; an engine's or the wire's failure is tried again twice. Other errors are raised at once."""
    for attempt in range(1, TRIES + 1):
        try:
            async with asyncio.timeout(PATIENCE):
                return await call()
        except TimeoutError:
            failure: ReefError = EngineError(f"no answer within {PATIENCE:.0f} s")
        except FAILURES as error:
            failure = error
        if attempt < TRIES:
            await asyncio.sleep(PAUSE * attempt)
    raise failure


def _read(data: bytes, answer: Answer) -> Reply:
    """The first choice, from what the engine knows of it, else from the bytes a client would see."""
    if answer.choices:
        first = answer.choices[0]
        usage = answer.usage
        if usage is None and answer.prompt_ids is not None:
            usage = Usage(len(answer.prompt_ids), len(first.output_ids or ()))
        return Reply(first.text, first.finish_reason, answer.prompt_ids, first.output_ids, first.logprobs, usage=usage)
    try:
        body = json.loads(data)
        choice = body["choices"][0]
        text = _text(choice["message"].get("content"))
        return Reply(text, choice.get("finish_reason"), usage=answer.usage or _usage(body.get("usage")))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise EngineError("the engine's answer is not a chat completion") from None


def _usage(given: Json) -> Usage | None:
    if not isinstance(given, dict):
        return None
    prompt, output = given.get("prompt_tokens"), given.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(output, int):
        return None
    return Usage(max(0, prompt), max(0, output))


def _text(content: Json) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
