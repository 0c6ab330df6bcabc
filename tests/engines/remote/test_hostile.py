"""Everything that can go wrong between Reef and a server of an engine: a clear error, or a right answer from another
server; never a wrong one that would be trained on. Afterwards nothing is left over, and serving goes on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import EngineError, ReefError
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.remote.engine import RemoteEngine
from tests.engines.remote import hostile
from tests.engines.remote.hostile import ALWAYS
from tests.engines.remote.kit import (
    BASE,
    FULLS,
    LORAS,
    VLLM,
    Kind,
    World,
    ask,
    engine_of,
    running,
    told,
    trainable,
    truth,
)
from tests.engines.remote.stub import Fault, On, Stub, serving


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that failed is tried again soon."""
    monkeypatch.setattr("reef.engines.remote.pool.OUT", 0.1)


@dataclass(slots=True)
class Outcome:
    """What a caller sees of one request."""

    head: Head | None = None
    pieces: list[Piece] = field(default_factory=list)
    answer: Answer | None = None
    error: ReefError | None = None
    seconds: float = 0.0

    @property
    def learns(self) -> bool:
        """Whether a record of it would be trained on."""
        return self.answer is not None and self.head is not None and self.head.status == 200 and trainable(self.answer)


async def outcome(engine: RemoteEngine, request: Ask, limit: float = 20.0) -> Outcome:
    found, begun = Outcome(), time.monotonic()
    try:
        async with asyncio.timeout(limit), aclosing(engine.answer(request)) as items:  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Head):
                    found.head = item
                elif isinstance(item, Piece):
                    found.pieces.append(item)
                else:
                    found.answer = item
    except ReefError as error:
        found.error = error
    found.seconds = time.monotonic() - begun
    assert found.error is None or len(found.error.message) > 20, found.error  # it says something
    return found


def right(stub: Stub, found: Outcome) -> None:
    """That an answer is whole, and what one set of weights says."""
    assert found.error is None, found.error
    assert found.learns, found.answer
    assert found.answer is not None
    said = next(
        each for each in reversed(stub.said) if each.ids == list((found.answer.choices or ())[0].output_ids or ())
    )
    assert (found.answer.choices or ())[0].logprobs == pytest.approx(truth(stub, found.answer, told(said)))


async def unhurt(engine: RemoteEngine, stub: Stub) -> None:
    """Nothing is left over: the server is free, its weights can change, and it answers."""
    stub.faults.clear()
    async with asyncio.timeout(10):
        await stub.idle()
        while not await engine.ready():
            await asyncio.sleep(0.05)
    assert not stub.paused
    await asyncio.sleep(0.12)
    for release in (FULLS[0], LORAS[0], BASE):  # the first and last need the server for themselves
        right(stub, await outcome(engine, ask(release)))
    assert all(host.busy == 0 for host in engine._pool.hosts)
    assert stub.connections <= 8


@asynccontextmanager
async def hurt(
    kind: Kind, world: World, place: Path, fault: Fault, *, path: str | None = None, times: int = 1, **options: Any
) -> AsyncIterator[tuple[RemoteEngine, Any]]:
    """An engine whose one server, once it is known, has a fault; at the end it must be as good as new."""
    async with running(kind, world, place, **options) as (engine, (stub,)):
        right(stub, await outcome(engine, ask()))
        stub.faults.append(On(kind.ask if path is None else path, fault, times=times))
        yield engine, stub
        await unhurt(engine, stub)


# --- dead -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [hostile.reset(), hostile.hang()], ids=["reset", "hang"])
async def test_another_server_answers_for_one_that_does_not_begin(
    kind: Kind, world: World, place: Path, fault: Fault, stream: bool
) -> None:
    async with running(kind, world, place, 2) as (engine, stubs):
        await engine.load(LORAS[0])
        stubs[0].faults.append(On(kind.ask, fault, times=ALWAYS))
        while not stubs[0].faults[0].happened:  # whichever is asked first
            right(stubs[1], await outcome(engine, ask(LORAS[0], stream=stream)))
        await unhurt_all(engine, stubs)


async def unhurt_all(engine: RemoteEngine, stubs: list[Any]) -> None:
    for stub in stubs:
        stub.faults.clear()
    async with asyncio.timeout(10):
        while any(host.why is not None for host in engine._pool.hosts):
            await asyncio.sleep(0.05)
    assert all(host.busy == 0 for host in engine._pool.hosts)


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_listens_and_serving_recovers_when_somebody_does(
    kind: Kind, world: World, place: Path, stream: bool
) -> None:
    async with running(kind, world, place) as (engine, (stub,)):
        right(stub, await outcome(engine, ask(LORAS[0])))
        await stub.die()
        assert not await engine.ready()
        found = await outcome(engine, ask(LORAS[0], stream=stream))
        assert found.head is None
        assert found.error is not None
        assert "running" in found.error.message
        assert found.seconds < 6
        await stub.start()
        await unhurt(engine, stub)


async def test_it_dies_in_the_middle_of_a_stream(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.cut(4, Stub.kill), stub={"delay": 0.002}) as (engine, stub):
        found = await outcome(engine, ask(stream=True, max_tokens=40))
        assert found.head is not None
        assert found.error is not None
        assert found.answer is None
        await asyncio.sleep(0.1)
        await stub.start()


async def test_it_breaks_off_in_the_middle_of_a_whole_answer(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.cut(9)) as (engine, _):
        found = await outcome(engine, ask())
        assert found.error is not None or found.learns
        assert found.answer is None or found.learns


@pytest.mark.parametrize("release", [LORAS[1], FULLS[1]], ids=["lora", "full"])
async def test_it_dies_during_a_load(kind: Kind, world: World, place: Path, release: str) -> None:
    path = kind.load if release in LORAS else kind.swap
    async with hurt(kind, world, place, hostile.dies(), path=path) as (engine, stub):
        with pytest.raises(EngineError):
            async with asyncio.timeout(10):
                await engine.load(release)
        await asyncio.sleep(0.1)
        await stub.start()
        async with asyncio.timeout(10):
            while not await engine.ready():
                await asyncio.sleep(0.05)
        await engine.load(release)
        right(stub, await outcome(engine, ask(release)))


FAILURES = {
    "reset": hostile.reset(),
    "done-but-reset": hostile.done_but_reset(),
    "500": hostile.says(500),
    "503": hostile.says(503, retry_after="1"),
    "html": hostile.page(502),
    "hang": hostile.hang(),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_weights_that_fail_to_change_leave_no_server_paused(
    kind: Kind, world: World, place: Path, name: str
) -> None:
    async with hurt(kind, world, place, FAILURES[name], path=kind.swap, patience=3.0) as (engine, stub):
        found = await outcome(engine, ask(FULLS[0]))
        if found.error is None:
            right(stub, found)
        async with asyncio.timeout(10):
            while stub.paused:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("name", ["reset", "500", "html", "hang"])
async def test_a_resume_that_fails_is_made_up_for(world: World, place: Path, name: str) -> None:
    async with hurt(VLLM, world, place, FAILURES[name], path="/resume", patience=3.0) as (engine, stub):
        await outcome(engine, ask(FULLS[0]))
        await outcome(engine, ask(BASE))
        async with asyncio.timeout(15):
            while stub.paused:
                await outcome(engine, ask(BASE))
                await asyncio.sleep(0.1)


async def test_somebody_who_paused_it_was_killed(world: World, place: Path) -> None:
    """What a process that died between pause and resume leaves: the next one does all of it again."""
    async with running(VLLM, world, place) as (_, (stub,)):
        await stub._pause(stub_seen(mode="keep"))
        stub.version, stub.base = "reef:?", "half-read"
        async with engine_of(VLLM, world, place, stub) as other:
            right(stub, await outcome(other, ask(BASE)))
        assert not stub.paused


def stub_seen(**query: str) -> Any:
    from tests.engines.remote.stub import Seen

    return Seen("POST", "", query, {}, None)


async def test_a_caller_that_leaves_while_weights_change_leaves_no_server_paused(
    kind: Kind, world: World, place: Path
) -> None:
    async with running(kind, world, place, stub={"slow": 0.3}) as (engine, (stub,)):
        right(stub, await outcome(engine, ask()))
        task = asyncio.create_task(engine.load(FULLS[0]))
        while not stub.asked(kind.swap):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10):
            while stub.paused:
                await asyncio.sleep(0.02)
        stub.slow = 0.0
        await unhurt(engine, stub)


# --- hanging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_no_byte_comes(kind: Kind, world: World, place: Path, stream: bool) -> None:
    async with hurt(kind, world, place, hostile.hang(), times=ALWAYS) as (engine, _):
        found = await outcome(engine, ask(stream=stream))
        assert found.error is not None
        assert found.head is None
        assert found.seconds < 14


async def test_a_stream_stalls(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.stall(3), stub={"delay": 0.002}) as (engine, _):
        found = await outcome(engine, ask(stream=True, max_tokens=30))
        assert found.error is not None
        assert found.answer is None
        assert found.seconds < 14


@pytest.mark.parametrize("release", [LORAS[1], FULLS[1]], ids=["lora", "full"])
@pytest.mark.parametrize("before", [True, False], ids=["undone", "done"])
async def test_a_load_never_returns(kind: Kind, world: World, place: Path, release: str, before: bool) -> None:
    path = kind.load if release in LORAS else kind.swap
    async with hurt(kind, world, place, hostile.hang(before), path=path, patience=3.0) as (engine, stub):
        begun = time.monotonic()
        with pytest.raises(EngineError):
            await engine.load(release)
        assert time.monotonic() - begun < 14
        stub.faults.clear()
        right(stub, await outcome(engine, ask()))  # the base is still to be had


async def test_a_slow_drip_is_still_an_answer(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.drip(0.0002)) as (engine, stub):
        right(stub, await outcome(engine, ask(max_tokens=3)))


# --- lies about weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_that_is_said_to_be_loaded_and_is_the_base(
    kind: Kind, world: World, place: Path, stream: bool
) -> None:
    async with hurt(kind, world, place, hostile.takes_other(""), path=kind.load) as (engine, _):
        found = await outcome(engine, ask(LORAS[1], stream=stream))
        assert found.answer is None
        assert found.error is not None
        assert "loaded" in found.error.message


async def test_an_adapter_that_is_another_releases(kind: Kind, world: World, place: Path) -> None:
    async with running(kind, world, place) as (engine, (stub,)):
        right(stub, await outcome(engine, ask(LORAS[0])))
        stub.faults.append(On(kind.load, hostile.takes_other(stub.loras[LORAS[0]].weights)))
        found = await outcome(engine, ask(LORAS[1]))
        assert found.error is not None
        assert not found.learns


async def test_full_weights_that_are_said_to_be_loaded_and_are_the_old_ones(
    kind: Kind, world: World, place: Path
) -> None:
    async with running(kind, world, place) as (engine, (stub,)):
        right(stub, await outcome(engine, ask()))
        old = stub.base

        async def lie(stub: Any, request: Any, call: Any) -> Any:
            reply = await call()
            stub.base = old
            return reply

        stub.faults.append(On(kind.swap, lie, times=ALWAYS))
        for _ in range(3):  # also when it is tried again
            found = await outcome(engine, ask(FULLS[0]))
            assert not found.learns
            assert found.error is not None
            await asyncio.sleep(0.15)
        stub.faults.clear()
        right(stub, await outcome(engine, ask(BASE)))
        right(stub, await outcome(engine, ask(FULLS[0])))


async def test_one_of_two_servers_lies(kind: Kind, world: World, place: Path) -> None:
    async with running(kind, world, place, 2) as (engine, stubs):
        stubs[0].faults.append(On(kind.load, hostile.takes_other(""), times=ALWAYS))
        await engine.load(LORAS[0])
        for session in ("a", "b", "c", "d"):
            right(stubs[1], await outcome(engine, ask(LORAS[0], session=session)))


async def test_an_adapter_is_listed_that_is_not_there(kind: Kind, world: World, place: Path) -> None:
    async with running(kind, world, place) as (engine, (stub,)):
        right(stub, await outcome(engine, ask()))

        def lists(body: Any) -> Any:
            body["data"].append({"id": LORAS[0], "object": "model", "root": "/nowhere", "parent": stub.name})
            return body

        stub.faults.append(On("/v1/models", hostile.edit(lists), times=ALWAYS))
        right(stub, await outcome(engine, ask(LORAS[0])))
        assert LORAS[0] in stub.loras


async def test_an_adapter_vanishes_between_two_requests(kind: Kind, world: World, place: Path) -> None:
    async with running(kind, world, place) as (engine, (stub,)):
        for stream in (False, True):
            right(stub, await outcome(engine, ask(LORAS[0])))
            stub.loras.clear()
            getattr(stub, "known", {}).clear()
            right(stub, await outcome(engine, ask(LORAS[0], stream=stream)))


async def test_another_models_name_is_in_the_answer(world: World, place: Path) -> None:
    for stream in (False, True):
        async with hurt(VLLM, world, place / str(stream), hostile.edit(lambda body: body | {"model": "gpt-9"})) as (
            engine,
            _,
        ):
            found = await outcome(engine, ask(stream=stream))
            assert found.answer is None
            assert found.error is not None
            assert "gpt-9" in found.error.message


@pytest.mark.parametrize("release", [LORAS[0], FULLS[0]], ids=["lora", "full"])
async def test_a_cache_that_is_not_flushed_is_noticed(kind: Kind, world: World, place: Path, release: str) -> None:
    """The base's cache is full when other weights come, and the server keeps it."""
    async with running(kind, world, place) as (engine, (stub,)):
        question = "the very same question to all of them, long enough to be cached"
        right(stub, await outcome(engine, ask(BASE, question)))
        stub.prefixes.clear = lambda: None
        for wanted in (release, BASE, release, BASE):
            found = await outcome(engine, ask(wanted, question))
            if found.learns:
                right(stub, found)


async def test_another_base_model_under_the_same_address(kind: Kind, world: World, place: Path) -> None:
    """Same tokenizer, other weights: whatever it is asked for, it is not what releases are for."""
    async with running(kind, world, place) as (engine, (stub,)):
        right(stub, await outcome(engine, ask(LORAS[0])))
        right(stub, await outcome(engine, ask(BASE)))
        await stub.die()
        stub.folder = world.other
        stub.fresh()
        assert (await outcome(engine, ask())).error is not None
        await stub.start()
        await asyncio.sleep(0.5)
        for release in (BASE, LORAS[0], LORAS[1], FULLS[0]):
            found = await outcome(engine, ask(release))
            assert not found.learns, release


async def test_a_model_with_another_vocabulary_under_the_same_address(kind: Kind, world: World, place: Path) -> None:
    async with running(kind, world, place) as (engine, (stub,)):
        right(stub, await outcome(engine, ask(LORAS[0])))
        await stub.die()
        honest = stub.brain.text.encode
        stub.brain.text.encode = lambda text: [each + 1 for each in honest(text)]
        assert (await outcome(engine, ask())).error is not None
        await stub.start()
        await asyncio.sleep(0.5)
        found = await outcome(engine, ask(LORAS[0]))
        assert not found.learns
        assert found.error is not None


async def test_two_processes_change_the_weights_in_turns(kind: Kind, world: World, place: Path) -> None:
    """A gateway asks for one release while the learner tries another: what each believes must be what is there."""
    async with (
        running(kind, world, place, stub={"delay": 0.001}) as (one, (stub,)),
        engine_of(kind, world, place, stub) as other,
    ):
        kept: dict[str, str] = {}
        for _ in range(3):
            for engine, release in ((one, FULLS[0]), (other, FULLS[1]), (one, FULLS[0]), (other, BASE), (one, BASE)):
                right(stub, await outcome(engine, ask(release)))
                assert told(stub.said[-1]) == kept.setdefault(release, stub.base)
        assert len(set(kept.values())) == 3


async def test_weights_wait_for_answers_in_work(kind: Kind, world: World, place: Path) -> None:
    async with running(kind, world, place, stub={"delay": 0.01}) as (engine, (stub,)):
        first = asyncio.create_task(outcome(engine, ask(FULLS[0], stream=True, max_tokens=40)))
        while not stub.running:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(outcome(engine, ask(FULLS[1], stream=True, max_tokens=10)))
        for found in await asyncio.gather(first, second):
            right(stub, found)


# --- tokens that are not right ----------------------------------------------------------------------------------------


def vllm_tokens(change: Callable[[dict[str, Any]], None]) -> Fault:
    def each(body: dict[str, Any]) -> dict[str, Any]:
        for choice in body.get("choices") or ():
            if choice.get("token_ids"):
                change(choice)
        return body

    return hostile.edit(each)


def sglang_tokens(change: Callable[[dict[str, Any]], None]) -> Fault:
    """The same changes, on the native form: its ids and log-probs laid out as the other's for a moment."""

    def each(body: dict[str, Any]) -> dict[str, Any]:
        meta = body["meta_info"]
        content = [{"logprob": value, "id": token} for value, token, _ in meta["output_token_logprobs"]]
        choice: dict[str, Any] = {"token_ids": body["output_ids"], "logprobs": {"content": content}}
        change(choice)
        body["output_ids"] = choice.get("token_ids")
        content = (choice.get("logprobs") or {}).get("content")
        if content is None:
            del meta["output_token_logprobs"]
        else:
            meta["output_token_logprobs"] = [[each.get("logprob"), each["id"], None] for each in content]
        return body

    return hostile.edit(each)


def first_score(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(choice: dict[str, Any]) -> None:
        choice["logprobs"]["content"][0]["logprob"] = value

    return change


def gone(choice: dict[str, Any]) -> None:
    choice["logprobs"] = None


FLAWS: dict[str, Callable[[dict[str, Any]], None]] = {
    "an id less": lambda choice: choice["token_ids"].pop(),
    "an id more": lambda choice: choice["token_ids"].append(7),
    "a log-prob less": lambda choice: choice["logprobs"]["content"].pop(),
    "a log-prob more": lambda choice: choice["logprobs"]["content"].append({"logprob": -1.0, "id": 7}),
    "positive": first_score(0.5),
    "null": first_score(None),
    "text": first_score("-1.0x"),
    "infinite": first_score(-1e400),
    "lost": first_score(-9999.0),
    "no log-probs": gone,
    "no ids": lambda choice: choice.update(token_ids=[]),
    "ids that are none": lambda choice: choice.update(token_ids=["x" for _ in choice["token_ids"]]),
    "negative ids": lambda choice: choice["token_ids"].__setitem__(0, -5),
    "ids beyond the vocabulary": lambda choice: choice["token_ids"].__setitem__(0, 10**6),
    "other ids": lambda choice: choice["token_ids"].__setitem__(0, choice["token_ids"][0] % 200 + 5),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FLAWS)
async def test_tokens_that_cannot_be_are_never_trained_on(
    kind: Kind, world: World, place: Path, name: str, stream: bool
) -> None:
    fault = (vllm_tokens if kind is VLLM else sglang_tokens)(FLAWS[name])
    async with hurt(kind, world, place, fault) as (engine, _):
        found = await outcome(engine, ask(stream=stream))
        assert not found.learns
        if found.error is None:  # the client has its answer
            assert found.answer is not None
            assert found.answer.untrainable
            assert (found.answer.choices or ())[0].text


async def test_nan_is_no_log_prob(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.numbers("NaN")) as (engine, _):
        found = await outcome(engine, ask())
        assert not found.learns
        assert b"NaN" not in b"".join(piece.data for piece in found.pieces)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_of_another_request(kind: Kind, world: World, place: Path, stream: bool) -> None:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("prompt_token_ids"):  # as long, so that counting does not tell
            body["prompt_token_ids"] = [
                *body["prompt_token_ids"][:6],
                *[200 - each % 100 for each in body["prompt_token_ids"][6:]],
            ]
        if "meta_info" in body:
            body["meta_info"]["prompt_tokens"] += 1
        return body

    async with hurt(kind, world, place, hostile.edit(change)) as (engine, _):
        assert not (await outcome(engine, ask(stream=stream))).learns


@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_is_not_what_the_tokens_say(kind: Kind, world: World, place: Path, stream: bool) -> None:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        if "text" in body:
            body["text"] += "and more that no token says"
        for choice in body.get("choices") or ():
            told = choice.get("delta") or choice.get("message") or {}
            if told.get("content"):
                told["content"] += "and more that no token says"
        return body

    async with hurt(kind, world, place, hostile.edit(change)) as (engine, _):
        assert not (await outcome(engine, ask(stream=stream))).learns


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_server_aborted(kind: Kind, world: World, place: Path, stream: bool) -> None:
    """Somebody else paused the server, and every answer ended where it was."""
    async with running(kind, world, place, stub={"delay": 0.01}) as (engine, (stub,)):
        right(stub, await outcome(engine, ask()))
        task = asyncio.create_task(outcome(engine, ask(stream=stream, max_tokens=60)))
        while not (stub.said and stub.said[-1].finish is None and len(stub.said[-1].ids) > 2):
            await asyncio.sleep(0.005)
        stub.stop_all()
        assert not (await task).learns
        await unhurt(engine, stub)


# --- the wire ---------------------------------------------------------------------------------------------------------


WIRE = {
    "wrong json": hostile.garbage(),
    "empty": hostile.garbage(b""),
    "a number": hostile.garbage(b"42"),
    "a list": hostile.garbage(b"[]"),
    "other json": hostile.garbage(b'{"hello": "world"}'),
    "html 200": hostile.says(200, hostile.HTML, kind="text/html"),
    "html 502": hostile.page(502),
    "500": hostile.says(500),
    "503": hostile.says(503),
    "503 later": hostile.says(503, retry_after="2"),
    "429": hostile.says(429),
    "429 later": hostile.says(429, retry_after="7"),
    "401": hostile.says(401),
    "404": hostile.says(404),
    "redirect": hostile.redirects("http://127.0.0.1:1/elsewhere"),
    "endless": hostile.endless(),
    "endless error": hostile.endless(b"x" * 65536),
    "bomb": hostile.bomb(),
    "stream bomb": hostile.bomb(stream=True),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WIRE)
async def test_what_is_no_answer_is_none(kind: Kind, world: World, place: Path, name: str, stream: bool) -> None:
    async with hurt(kind, world, place, WIRE[name], times=ALWAYS) as (engine, _):
        found = await outcome(engine, ask(stream=stream), limit=30)
        assert not found.learns
        if found.error is None:
            assert found.head is not None
            assert found.head.status in (400, 404, 429, 503)
            assert found.answer is not None
            assert found.answer.untrainable
            if "later" in name:
                assert "retry-after" in found.head.headers
        assert b"<html>" not in b"".join(piece.data for piece in found.pieces) or found.head.status >= 400


@pytest.mark.parametrize("path", ["/v1/models", "ask", "load", "swap"])
@pytest.mark.parametrize("name", ["wrong json", "a list", "html 200", "html 502", "500", "401", "bomb"])
async def test_what_is_no_answer_to_a_call(kind: Kind, world: World, place: Path, name: str, path: str) -> None:
    """While weights are put there: a release is there and answers, or it is an error."""
    where = {"ask": kind.ask if kind is not VLLM else "/v1/completions", "load": kind.load, "swap": kind.swap}.get(
        path, path
    )
    for release in (LORAS[1], FULLS[1]):
        async with hurt(kind, world, place / release[:3], WIRE[name], path=where) as (engine, stub):
            found = await outcome(engine, ask(release))
            if found.error is None:
                right(stub, found)


async def test_a_stream_without_its_end(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.endings(done=False)) as (engine, _):
        found = await outcome(engine, ask(stream=True))
        assert found.error is not None
        assert found.answer is None


async def test_a_stream_whose_last_chunk_comes_twice(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.endings(last=2), stub={"delay": 0.001}) as (engine, stub):
        found = await outcome(engine, ask(stream=True))
        if found.learns:
            right(stub, found)


async def test_a_stream_that_is_cut_before_its_end(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.events(lambda whole: whole[:-2])) as (engine, _):
        found = await outcome(engine, ask(stream=True))
        assert found.error is not None
        assert found.answer is None


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/octet-stream"])
async def test_a_stream_under_another_name(kind: Kind, world: World, place: Path, content_type: str) -> None:
    async with hurt(kind, world, place, hostile.typed(content_type), stub={"delay": 0.001}) as (engine, stub):
        found = await outcome(engine, ask(stream=True))
        if found.learns:
            right(stub, found)
        else:
            assert found.error is not None


async def test_a_whole_answer_under_another_name(kind: Kind, world: World, place: Path) -> None:
    async with hurt(kind, world, place, hostile.typed("text/plain")) as (engine, stub):
        found = await outcome(engine, ask())
        if found.error is None:
            right(stub, found)


# --- adapters that collide, slots, disks, clocks ----------------------------------------------------------------------


async def test_a_name_that_somebody_else_gave(kind: Kind, world: World, place: Path) -> None:
    """An adapter of that name is there, from elsewhere, and was used: its cache is there too."""
    async with running(kind, world, place) as (engine, (stub,)):
        right(stub, await outcome(engine, ask()))
        other = str(world.known[LORAS[1]].files["adapter_config.json"].parent)
        async with engine_of(kind, world, place.parent / "stranger", stub) as stranger:
            await stranger._pool.hosts[0].server.put("lora", LORAS[0], other)
            host = stranger._pool.hosts[0]
            await host.meet()
            question = ask(LORAS[0], "a question long enough to be in the cache")
            async with aclosing(stranger._from(host, LORAS[0], question)) as items:  # type: ignore[type-var]
                async for _ in items:
                    pass
        found = await outcome(engine, ask(LORAS[0], "a question long enough to be in the cache"))
        if found.error is None:
            right(stub, found)
            assert stub.loras[LORAS[0]].path != other


async def test_no_slot_is_free(kind: Kind, world: World, place: Path) -> None:
    said = {"error": {"message": "No free lora slots", "code": 500}, "success": False, "error_message": "No free slots"}
    async with hurt(kind, world, place, hostile.says(500, said), path=kind.load) as (engine, stub):
        found = await outcome(engine, ask(LORAS[1]))
        assert found.error is not None
        assert "slots" in found.error.message
        right(stub, await outcome(engine, ask()))


async def test_adapters_above_the_servers_own_limit(kind: Kind, world: World, place: Path) -> None:
    few = {"loras": 1} if kind is VLLM else {"max_loaded": 1}
    async with running(kind, world, place, stub=few) as (engine, (stub,)):
        for release in (*LORAS, *LORAS):
            found = await outcome(engine, ask(release))
            right(stub, found)


async def test_adapters_above_our_limit_go(
    kind: Kind, world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reef.engines.remote.pool.RECENT", 0.0)
    async with running(kind, world, place, loras=1) as (engine, (stub,)):
        for release in LORAS:
            right(stub, await outcome(engine, ask(release)))
        assert len(stub.loras) <= 2
        right(stub, await outcome(engine, ask(LORAS[0])))


@pytest.mark.parametrize("release", [LORAS[0], FULLS[0]], ids=["lora", "full"])
async def test_a_folder_that_the_server_does_not_see(kind: Kind, world: World, place: Path, release: str) -> None:
    async with running(kind, world, place, seen_as="/not/mounted/there") as (engine, (stub,)):
        with pytest.raises(EngineError) as caught:
            await engine.load(release)
        assert "/not/mounted/there" in caught.value.message or "seen_as" in caught.value.message
        assert not stub.paused
        right(stub, await outcome(engine, ask()))


async def test_files_that_vanish_after_they_were_loaded(kind: Kind, world: World, place: Path) -> None:
    import shutil

    async with running(kind, world, place, stub={"loras": 1} if kind is VLLM else {"max_loaded": 1}) as (
        engine,
        (stub,),
    ):
        right(stub, await outcome(engine, ask(LORAS[0])))
        shutil.rmtree(place / "weights" / LORAS[0])
        right(stub, await outcome(engine, ask(LORAS[1])))  # the server drops the first
        found = await outcome(engine, ask(LORAS[0]))
        if found.error is None and found.head is not None and found.head.status == 200:
            right(stub, found)
        right(stub, await outcome(engine, ask(BASE)))


async def test_a_clock_that_goes_backwards(
    kind: Kind, world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, begun = time.time, time.time()
    monkeypatch.setattr(time, "time", lambda: begun - 3600 * (honest() - begun) - 86400)
    honest_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: honest_ns() - 86400 * 10**9)
    async with running(kind, world, place, loras=1, turn=0.05) as (engine, (stub,)):
        for release in (BASE, LORAS[0], FULLS[0], LORAS[1], FULLS[1], BASE, LORAS[2]):
            right(stub, await outcome(engine, ask(release)))


async def test_a_turn_that_was_noted_in_the_future(kind: Kind, world: World, place: Path) -> None:
    """The clock was put back by an hour since a process noted whose turn it is."""
    async with running(kind, world, place, turn=0.05) as (engine, (stub,)):
        right(stub, await outcome(engine, ask(FULLS[0])))
        later = time.time() + 3600
        for path in place.rglob("*"):
            if path.is_file():
                os.utime(path, (later, later))
        right(stub, await outcome(engine, ask(FULLS[1])))
        right(stub, await outcome(engine, ask(LORAS[0])))


# --- all of it --------------------------------------------------------------------------------------------------------


async def test_a_bad_hour_leaves_nothing_behind(kind: Kind, world: World, place: Path) -> None:
    """One fault after another on two servers, many at once; then connections, files and locks are as before."""
    faults = [
        *(WIRE["500"], WIRE["wrong json"], WIRE["html 502"], WIRE["503"]),
        *(hostile.reset(), hostile.cut(3), hostile.endings(done=False), hostile.late(0.05)),
    ]
    async with running(kind, world, place, 2, stub={"delay": 0.001}) as (engine, stubs):
        for release in (BASE, LORAS[0], FULLS[0]):
            assert (await outcome(engine, ask(release))).learns
        open_files = len(os.listdir("/proc/self/fd"))
        for number, fault in enumerate(faults * 2):
            stubs[number % 2].faults.append(On(kind.ask, fault, skip=number % 3))
            requests = [
                ask((BASE, LORAS[0], FULLS[0])[at % 3], f"question {at}", stream=stream, session=f"s{at % 5}")
                for at in range(6)
                for stream in (False, True)
            ]
            done = await asyncio.gather(*(outcome(engine, each, limit=30) for each in requests))
            for found in done:
                if found.learns:
                    said = [said for stub in stubs for said in stub.said]
                    ids = list((found.answer.choices or ())[0].output_ids or ())
                    assert any(each.ids == ids and told(each) for each in said)
            for stub in stubs:
                stub.faults.clear()
            async with asyncio.timeout(15):
                while any(host.why is not None for host in engine._pool.hosts):
                    await asyncio.sleep(0.02)
        assert all(host.busy == 0 for host in engine._pool.hosts)
        for stub in stubs:
            async with asyncio.timeout(10):
                await stub.idle()
            assert not stub.paused
        for release in (FULLS[1], BASE, LORAS[0]):
            assert (await outcome(engine, ask(release))).learns
        assert len(os.listdir("/proc/self/fd")) < open_files + 60
    await asyncio.sleep(0.05)
    assert all(stub.connections == 0 for stub in stubs)


async def test_nothing_is_left_once_it_is_closed(kind: Kind, world: World, place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stub = kind.honest(world)
    async with serving(stub):
        for _ in range(5):
            async with engine_of(kind, world, place, stub) as engine:
                right(stub, await outcome(engine, ask(LORAS[0])))
                right(stub, await outcome(engine, ask(FULLS[0])))
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
