"""What every engine keeps to: order of items, one terminal piece, early leaving, errors before the head."""

import asyncio
import contextlib
import json
import tempfile
from contextlib import aclosing
from pathlib import Path

import pytest
from aiohttp import web

from reef.core.errors import EngineError, ReefError
from reef.engines import Answer, Ask, Head, Piece, WeightFiles
from reef.engines.fake import FakeEngine
from reef.engines.sse import Events
from reef.engines.upstream import UpstreamEngine

RELEASE = "f" * 40


@contextlib.asynccontextmanager
async def fake():
    engine = FakeEngine(delay=0.01)
    yield engine
    await engine.close()


@contextlib.asynccontextmanager
async def upstream():
    """An upstream engine in front of a fake one behind HTTP."""
    inner = FakeEngine(delay=0.01, tokens=False)

    async def answer(request):
        body = await request.read()
        stream = bool(json.loads(body).get("stream"))
        response = web.StreamResponse()
        try:
            async for item in inner.answer(Ask("0" * 32, RELEASE, "chat", body, stream)):
                if isinstance(item, Head):
                    response.headers.update(item.headers)
                    await response.prepare(request)
                elif isinstance(item, Piece):
                    await response.write(item.data)
        except ReefError as error:
            return web.json_response({"error": {"message": error.message}}, status=400)
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", lambda request: web.json_response({"data": []}))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine = UpstreamEngine(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1")
    yield engine
    await engine.close()
    await runner.cleanup()


@contextlib.asynccontextmanager
async def local():
    """The embedded engine with a tiny random model, over its socket."""
    from tests.engines.kit import Releases, make_tiny, running

    with tempfile.TemporaryDirectory() as folder:
        releases = Releases({RELEASE: WeightFiles("base", {}, {})})
        async with running(make_tiny(Path(folder) / "tiny"), releases) as engine:
            yield engine


@contextlib.asynccontextmanager
async def away(name):
    """An engine with servers of its own, over two stubs of their interface (tests/engines/remote)."""
    from tests.engines.kit import make_tiny
    from tests.engines.remote.kit import KINDS, World, running

    (kind,) = [each for each in KINDS if each.name == name]
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder) / "tiny")
        world = World(tiny, tiny, {RELEASE: WeightFiles("base", {}, {})})
        wordy = {"delay": 0.005, "ending": -9.0}
        async with running(kind, world, Path(folder) / "place", 2, stub=wordy) as (engine, _):
            yield engine


def vllm():
    return away("vllm")


def sglang():
    return away("sglang")


@pytest.fixture(params=[fake, upstream, local, vllm, sglang], ids=["fake", "upstream", "local", "vllm", "sglang"])
async def engine(request):
    async with request.param() as made:
        yield made


def ask(stream, text="one two three", **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream, "max_tokens": 12, **fields}
    return Ask("0" * 32, RELEASE, "chat", json.dumps(body).encode(), stream)


async def collect(engine, request):
    async with aclosing(engine.answer(request)) as items:
        return [item async for item in items]


@pytest.mark.parametrize("stream", [False, True])
async def test_head_pieces_answer(engine, stream):
    head, *pieces, answer = await collect(engine, ask(stream))
    assert isinstance(head, Head)
    assert head.status == 200
    assert head.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert [piece.terminal for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert isinstance(answer, Answer)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is None if stream and isinstance(engine, UpstreamEngine) else answer.usage.completion_tokens > 0


async def test_stream_ends_with_its_marker_and_says_what_the_answer_holds(engine):
    _, *pieces, answer = await collect(engine, ask(True))
    events = Events().feed(b"".join(piece.data for piece in pieces))
    assert events[-1].data == "[DONE]"
    chunks = [json.loads(event.data) for event in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == answer.choices[0].text
    assert chunks[-1]["choices"][0]["finish_reason"] == answer.choices[0].finish_reason


async def test_tokens_are_all_there_or_none_are(engine):
    *_, answer = await collect(engine, ask(False))
    for choice in answer.choices:
        if choice.output_ids is None:
            assert answer.untrainable
            assert choice.logprobs is None
        else:
            assert len(choice.output_ids) == len(choice.logprobs) > 0
            assert all(logprob <= 0 for logprob in choice.logprobs)
            assert [(span.start, span.end) for span in choice.spans] == [(0, len(choice.output_ids))]
            assert answer.prompt_ids
            assert answer.sampling


async def test_several_choices(engine):
    *_, answer = await collect(engine, ask(False, n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


async def test_leaving_early_is_clean(engine):
    async with aclosing(engine.answer(ask(True, max_tokens=200))) as items:
        async for item in items:
            if isinstance(item, Piece):
                break
    head, *_ = await asyncio.wait_for(collect(engine, ask(False)), 5)
    assert head.status == 200


async def test_over_long_prompt_is_refused_before_anything_runs(engine):
    try:
        head, *_ = await collect(engine, ask(False, "word " * 9000))
    except ReefError as error:
        assert error.code == "context_length_exceeded"  # noqa: PT017
    else:
        assert head.status == 400


async def test_ready_load_rate(engine):
    assert await engine.ready()
    await engine.load(RELEASE)
    try:
        rated = await engine.rate(RELEASE, [[1, 2, 3], [4, 5]], [1, 1])
    except EngineError:
        return
    assert [len(values) for values in rated] == [2, 1]
