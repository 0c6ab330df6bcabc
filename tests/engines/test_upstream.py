"""The upstream engine against a scripted HTTP server."""

import asyncio
import gzip
import json
import zlib
from contextlib import aclosing

import pytest
from aiohttp import web

from reef.core.errors import ConfigError, EngineError, UpstreamError
from reef.core.nouns import Usage
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.upstream import NO_TOKENS, UpstreamEngine

WORDS = "北京🌍 hello"


def event(value):
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n".encode()


def chunk(finish=None, **delta):
    return event({"id": "up", "model": "gpt-x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 26, "completion_tokens": 2, "total_tokens": 28}})
DONE = b"data: [DONE]\n\n"
GOOD = chunk(content=WORDS) + chunk("stop") + USAGE + DONE
WHOLE = json.dumps(
    {
        "id": "up",
        "model": "gpt-x",
        "choices": [{"index": 0, "message": {"content": WORDS}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    },
    ensure_ascii=False,
).encode()


class Provider:
    """Answers each request by `script(request, body)`; keeps what it was sent."""

    def __init__(self):
        self.seen = []
        self.script = None
        self.aborted = asyncio.Event()

    async def answer(self, request):
        body = await request.read()
        self.seen.append((request.headers, body))
        try:
            return await self.script(request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.set()
            raise


@pytest.fixture
async def provider():
    made = Provider()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    app.router.add_get("/v1/models", lambda request: web.json_response({"data": []}))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    yield made
    await runner.cleanup()


@pytest.fixture
async def engine(provider):
    made = UpstreamEngine(provider.url, key="sk-canary")
    yield made
    await made.close()


def replies(body, status=200, **headers):
    async def script(request):
        return web.Response(body=body, status=status, headers=headers, content_type="application/json")

    return script


def streams(*pieces, cut=False, pause=0.0, kind="text/event-stream"):
    async def script(request):
        response = web.StreamResponse(headers={"content-type": kind, "x-request-id": "req-9"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause)
        if cut:
            request.transport.abort()
        else:
            await response.write_eof()
        return response

    return script


def ask(stream=False, body=None, **headers):
    data = (
        body or json.dumps({"model": "mine", "stream": stream, "messages": [{"role": "user", "content": "x"}]}).encode()
    )
    return Ask("0" * 32, "r" * 40, "chat", data, stream, headers)


async def collect(engine, request):
    async with aclosing(engine.answer(request)) as items:
        return [item async for item in items]


async def test_whole_answer_passes_untouched(provider, engine):
    provider.script = replies(WHOLE, **{"x-request-id": "req-1", "set-cookie": "a=b", "x-ratelimit-remaining": "4"})
    head, piece, answer = await collect(engine, ask())
    assert head == Head(200, {"content-type": "application/json", "x-ratelimit-remaining": "4"}, "req-1")
    assert piece == Piece(WHOLE, terminal=True)
    assert isinstance(answer, Answer)
    assert answer.choices[0].text == WORDS
    assert (answer.usage, answer.model, answer.untrainable) == (Usage(3, 2), "gpt-x", NO_TOKENS)


async def test_what_is_sent(provider, engine):
    provider.script = replies(WHOLE)
    body = b'{"model":"mine", "big":123456789012345678901234567890, "messages": []}'
    await collect(engine, ask(body=body, **{"openai-beta": "x", "x-reef-session": "s", "user-agent": "me"}))
    headers, sent = provider.seen[0]
    assert sent == body
    assert headers["authorization"] == "Bearer sk-canary"
    assert headers["openai-beta"] == "x"
    assert "x-reef-session" not in headers
    rewriting = UpstreamEngine(provider.url, model="theirs")
    await collect(rewriting, ask(body=body))
    await rewriting.close()
    headers, sent = provider.seen[1]
    assert "authorization" not in headers
    assert sent == b'{"model":"theirs","big":123456789012345678901234567890,"messages":[]}'


@pytest.mark.parametrize("how", ["whole", "bytes", "crlf"])
async def test_stream_passes_untouched_and_only_its_end_is_terminal(provider, engine, how):
    good = GOOD if how != "crlf" else b": hello\r\n\r\n" + GOOD.replace(b"\n", b"\r\n")
    pieces = [good] if how == "whole" else [good[place : place + 1] for place in range(len(good))]
    provider.script = streams(*pieces)
    head, *rest, answer = await collect(engine, ask(stream=True))
    assert head.status == 200
    assert head.upstream_id == "req-9"
    assert b"".join(piece.data for piece in rest) == good
    assert [piece.terminal for piece in rest] == [False] * (len(rest) - 1) + [True]
    assert rest[-1].data.strip() == b"data: [DONE]"
    assert answer.choices[0].text == WORDS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage == Usage(26, 2)


async def test_end_marker_without_a_blank_line(provider, engine):
    provider.script = streams(chunk("stop", content="a"), b"data: [DONE]")
    *_, last, answer = await collect(engine, ask(stream=True))
    assert last == Piece(b"data: [DONE]", terminal=True)
    assert answer.choices[0].text == "a"


@pytest.mark.parametrize(
    "script",
    [
        streams(chunk(content="a"), chunk("stop")),  # no end marker
        streams(chunk(content="a"), DONE),  # no finish reason
        streams(DONE),  # no choice at all
        streams(),
        streams(chunk(content="a"), cut=True),
        streams(chunk(content="a"), event({"error": {"message": "overloaded"}}), DONE),
    ],
)
async def test_streams_that_do_not_end_properly_raise(provider, engine, script):
    provider.script = script
    seen = []
    with pytest.raises(EngineError):
        async with aclosing(engine.answer(ask(stream=True))) as items:
            async for item in items:
                seen.append(item)
    assert isinstance(seen[0], Head)
    assert not any(item.terminal for item in seen[1:])
    assert not any(isinstance(item, Answer) for item in seen)


@pytest.mark.parametrize("status", [400, 402, 404, 413, 422, 429, 503, 529])
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_are_relayed(provider, engine, status, stream):
    body = b'{"error":{"message":"no: sk-canary"}}'
    provider.script = replies(body, status, **{"retry-after": "Wed, 21 Oct 2099 07:28:00 GMT"})
    head, piece, answer = await collect(engine, ask(stream=stream))
    assert (head.status, head.headers["retry-after"]) == (status, "Wed, 21 Oct 2099 07:28:00 GMT")
    assert piece == Piece(body.replace(b"sk-canary", b"***"), terminal=True)
    assert answer.choices is None


@pytest.mark.parametrize(("status", "code"), [(401, "upstream_auth"), (403, "upstream_auth"), (500, "upstream_error")])
async def test_failures_that_are_not_the_clients(provider, engine, status, code):
    provider.script = replies(b'{"error":{"message":"bad key sk-canary"}}', status)
    with pytest.raises(UpstreamError) as caught:
        await collect(engine, ask())
    assert caught.value.code == code
    assert "canary" not in caught.value.message


async def test_redirects_and_nonsense(provider, engine):
    provider.script = replies(b"", 302, location="http://elsewhere.invalid/")
    with pytest.raises(UpstreamError):
        await collect(engine, ask())
    provider.script = replies(b"<html>")
    with pytest.raises(UpstreamError, match="not a chat completion"):
        await collect(engine, ask())


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("status", [200, 422])
async def test_packed_answers_are_unpacked_and_their_headers_left_out(provider, engine, name, pack, status):
    provider.script = replies(pack(WHOLE), status, **{"content-encoding": name})
    head, piece, _ = await collect(engine, ask())
    assert piece.data == WHOLE
    assert "content-encoding" not in head.headers
    assert "content-length" not in head.headers


async def test_packed_stream(provider, engine):
    async def script(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "content-encoding": "gzip"})
        await response.prepare(request)
        await response.write(gzip.compress(GOOD))
        await response.write_eof()
        return response

    provider.script = script
    _, *pieces, answer = await collect(engine, ask(stream=True))
    assert b"".join(piece.data for piece in pieces) == GOOD
    assert answer.usage == Usage(26, 2)


async def test_json_where_a_stream_was_asked_for(provider, engine):
    provider.script = replies(WHOLE)
    head, piece, answer = await collect(engine, ask(stream=True))
    assert head.headers["content-type"].startswith("application/json")
    assert piece == Piece(WHOLE, terminal=True)
    assert answer.choices[0].text == WORDS


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_early_stops_the_provider(provider, engine, stream):
    if stream:
        provider.script = streams(*[chunk(content="a")] * 500, pause=0.05)
        async with aclosing(engine.answer(ask(stream=True))) as items:
            async for item in items:
                if isinstance(item, Piece):
                    break
    else:

        async def slow(request):
            await asyncio.sleep(20)

        provider.script = slow
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await collect(engine, ask())
    await asyncio.wait_for(provider.aborted.wait(), 1.0)


async def test_timeouts(provider):
    async def slow(request):
        await asyncio.sleep(20)

    provider.script = slow
    engine = UpstreamEngine(provider.url, idle=0.1)
    with pytest.raises(UpstreamError) as caught:
        await collect(engine, ask())
    assert caught.value.status == 504
    provider.script = streams(chunk(content="a"), chunk(content="b"), pause=1.0)
    with pytest.raises(UpstreamError):
        await collect(engine, ask(stream=True))
    await engine.close()


async def test_nobody_there():
    with pytest.raises(ConfigError):
        UpstreamEngine("http://user:secret@127.0.0.1:9/v1")
    engine = UpstreamEngine("http://127.0.0.1:9/v1", key="sk-canary")
    with pytest.raises(UpstreamError) as caught:
        await collect(engine, ask())
    assert "canary" not in caught.value.message
    assert not await engine.ready()
    await engine.close()


async def test_ready_load_and_rate(provider, engine):
    assert await engine.ready()
    await engine.load("r" * 40)
    with pytest.raises(EngineError):
        await engine.rate("r" * 40, [[1, 2]], [1])


async def test_connections_are_used_again(provider, engine):
    peers = set()

    async def script(request):
        peers.add(request.transport.get_extra_info("peername"))
        return await streams(GOOD)(request)

    provider.script = script
    for _ in range(3):
        await collect(engine, ask(stream=True))
    assert len(peers) == 1
