"""The upstream engine against a scripted HTTP server."""

import asyncio
import gzip
import json
import logging
import time
import zlib
from contextlib import aclosing

import brotli
import pytest
import zstandard
from aiohttp import web

from reef.core.errors import ConfigError, EngineError, InputError, UpstreamError
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
        self.asked = []
        self.script = None
        self.aborted = asyncio.Event()

    async def answer(self, request):
        body = await request.read()
        self.seen.append((request.headers, body))
        self.asked.append(request.path_qs)
        try:
            return await self.script(request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.set()
            raise


@pytest.fixture
async def provider():
    made = Provider()
    app = web.Application(client_max_size=2**26)
    for path in ("chat/completions", "responses", "embeddings", "messages", "messages/count_tokens"):
        app.router.add_post(f"/v1/{path}", made.answer)
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
    made = UpstreamEngine(provider.url, key="sk-canary", pause=0.001)
    yield made
    await made.close()


@pytest.fixture
async def anthropic(provider):
    made = UpstreamEngine(provider.url, api="anthropic", key="sk-canary", pause=0.001)
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


def ask(stream=False, body=None, dialect="chat", query="", model=None, **headers):
    data = (
        body or json.dumps({"model": "mine", "stream": stream, "messages": [{"role": "user", "content": "x"}]}).encode()
    )
    return Ask("0" * 32, "r" * 40, dialect, data, stream, headers, query=query, model=model)


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
    await collect(engine, ask(body=body, **{"openai-beta": "x", "x-reef-session": "s", "openai-organization": "o"}))
    headers, sent = provider.seen[0]
    assert sent == body
    assert headers["authorization"] == "Bearer sk-canary"
    assert headers["openai-beta"] == "x"
    assert not {"x-reef-session", "openai-organization"} & {name.lower() for name in headers}
    rewriting = UpstreamEngine(provider.url, model="theirs")
    await collect(rewriting, ask(body=body))
    await rewriting.close()
    headers, sent = provider.seen[1]
    assert "authorization" not in headers
    assert sent == b'{"model":"theirs", "big":123456789012345678901234567890, "messages": []}'


@pytest.mark.parametrize("how", ["whole", "bytes", "crlf"])
async def test_stream_passes_untouched_and_only_its_end_is_terminal(provider, engine, how):
    """case 1, case 6: a byte at a time, CRLF, a comment first; usage in the last chunk."""
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
    with pytest.raises(UpstreamError, match="no answer"):
        await collect(engine, ask())


def raw(data):
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


PACKED = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw),
    ("br", brotli.compress),
    ("zstd", zstandard.compress),
    (None, gzip.compress),
    (None, zstandard.compress),
    ("gzip", bytes),
    ("deflate, gzip", lambda data: gzip.compress(zlib.compress(data))),
]
IDS = ["gzip", "zlib", "deflate", "br", "zstd", "gzip unsaid", "zstd unsaid", "gzip said", "two"]


@pytest.mark.parametrize(("name", "pack"), PACKED, ids=IDS)
@pytest.mark.parametrize("status", [200, 422])
async def test_packed_answers_are_unpacked_and_their_headers_left_out(provider, engine, name, pack, status):
    """Case 7: whole answers and error bodies."""
    provider.script = replies(pack(WHOLE), status, **({"content-encoding": name} if name else {}))
    head, piece, _ = await collect(engine, ask())
    assert piece.data == WHOLE
    assert "content-encoding" not in head.headers
    assert "content-length" not in head.headers
    assert provider.seen[0][0]["accept-encoding"] == "identity"


@pytest.mark.parametrize(("name", "pack"), PACKED, ids=IDS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_packed_streams_are_unpacked(provider, engine, name, pack, size):
    """Case 7: streams, cut anywhere."""
    packed = pack(GOOD)

    async def script(request):
        headers = {"content-type": "text/event-stream"} | ({"content-encoding": name} if name else {})
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for place in range(0, len(packed), size):
            await response.write(packed[place : place + size])
        await response.write_eof()
        return response

    provider.script = script
    head, *pieces, answer = await collect(engine, ask(stream=True))
    assert b"".join(piece.data for piece in pieces) == GOOD
    assert "content-encoding" not in head.headers
    assert answer.usage == Usage(26, 2)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (gzip.compress(WHOLE)[:-9], {"content-encoding": "gzip"}),
        (zlib.compress(WHOLE)[:30] + b"x" * 30, {"content-encoding": "deflate"}),
        (WHOLE, {"content-encoding": "compress"}),
    ],
)
async def test_packed_answers_that_cannot_be_unpacked(provider, engine, body, headers):
    """case 7: an error, never an empty answer."""
    provider.script = replies(body, **headers)
    with pytest.raises(UpstreamError):
        await collect(engine, ask())
    provider.script = replies(body, 422, **headers)
    head, piece, _ = await collect(engine, ask())
    assert (head.status, piece) == (422, Piece(b"", terminal=True))


async def test_a_small_body_that_unpacks_to_a_huge_one(provider, engine, monkeypatch):
    monkeypatch.setattr("reef.engines.upstream.MAX_WHOLE", 1_000_000)
    provider.script = replies(gzip.compress(b" " * 50_000_000), **{"content-encoding": "gzip"})
    with pytest.raises(UpstreamError, match="larger than 1000000 bytes"):
        await collect(engine, ask())
    provider.script = replies(b" " * 1_000_001)
    with pytest.raises(UpstreamError, match="more than 1000000 bytes"):
        await collect(engine, ask())


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
    engine = UpstreamEngine("http://127.0.0.1:9/v1", key="sk-canary", pause=0.001)
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


# --- other dialects ---------------------------------------------------------------------------------------------------

FINAL = {
    "id": "resp_1",
    "object": "response",
    "model": "gpt-x",
    "status": "completed",
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": WORDS, "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "content": [{"type": "text", "text": WORDS}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 2},
}


def named(value):
    return f"event: {value['type']}\n".encode() + event(value)


RESPONSES = (
    named({"type": "response.created", "response": {**FINAL, "status": "in_progress", "output": [], "usage": None}})
    + named({"type": "response.output_item.added", "output_index": 0, "item": {**FINAL["output"][0], "content": []}})
    + named({"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": WORDS})
    + named({"type": "response.output_item.done", "output_index": 0, "item": FINAL["output"][0]})
    + named({"type": "response.completed", "response": FINAL})
)
MESSAGES = (
    named({"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}})
    + named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    + named({"type": "ping"})
    + named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": WORDS}})
    + named({"type": "content_block_stop", "index": 0})
    + named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}})
    + named({"type": "message_stop"})
)
SPOKEN = [
    ("responses", "/v1/responses", FINAL, RESPONSES, b"event: response.completed", "resp_1"),
    ("messages", "/v1/messages", MESSAGE, MESSAGES, b"event: message_stop", "msg_1"),
]


@pytest.mark.parametrize(("dialect", "path", "whole", "stream", "end", "name"), SPOKEN)
@pytest.mark.parametrize("size", [1, 100_000])
async def test_the_dialects_pass_untouched(provider, dialect, path, whole, stream, end, name, size):
    engine = UpstreamEngine(provider.url, key="sk-canary", speaks=["responses", "messages"])
    body = b'{ "model":"mine",\r\n"stream" : true, "input":"\\u5317", "x":1.50 }'
    provider.script = streams(*[stream[place : place + size] for place in range(0, len(stream), size)])
    _, *pieces, answer = await collect(engine, ask(True, body, dialect, "beta=true"))
    assert b"".join(piece.data for piece in pieces) == stream
    assert [piece.terminal for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].data.startswith(end)
    assert provider.asked == [path + "?beta=true"]
    assert provider.seen[0][1] == body
    assert answer.choices[0].text == WORDS
    assert (answer.usage, answer.id, answer.error) == (Usage(3, 2), name, None)
    text = json.dumps(whole).encode()
    provider.script = replies(text)
    head, piece, answer = await collect(engine, ask(False, body, dialect))
    assert (head.status, piece) == (200, Piece(text, terminal=True))
    assert (answer.choices[0].text, answer.usage, answer.id) == (WORDS, Usage(3, 2), name)
    assert provider.asked[1] == path
    await engine.close()


@pytest.mark.parametrize(
    ("dialect", "begun", "error"),
    [
        ("chat", chunk(content="a"), event({"error": {"message": "busy sk-canary"}})),
        (
            "responses",
            named({"type": "response.created", "response": {**FINAL, "status": "in_progress", "output": []}}),
            named({"type": "error", "code": "server_error", "message": "busy sk-canary", "sequence_number": 1}),
        ),
        (
            "messages",
            named({"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}}),
            named({"type": "error", "error": {"type": "overloaded_error", "message": "busy sk-canary"}}),
        ),
    ],
)
async def test_an_error_event_ends_a_stream_and_passes(provider, dialect, begun, error):
    """Also with an end marker behind it; the key that it echoes is struck out."""
    engine = UpstreamEngine(provider.url, key="sk-canary", speaks=["chat", "responses", "messages"])
    for pieces in ([begun, error], [begun + error, DONE], [begun, error + DONE]):
        provider.script = streams(*pieces, pause=0.001)
        _, *passed, answer = await collect(engine, ask(True, dialect=dialect))
        assert b"".join(piece.data for piece in passed) == b"".join(pieces).replace(b"sk-canary", b"***")
        assert [piece.terminal for piece in passed] == [False, True]
        assert passed[0].data == begun
        assert answer.error == "busy ***"
    await engine.close()


@pytest.mark.parametrize(("dialect", "stream"), [(item[0], item[3]) for item in SPOKEN])
async def test_a_stream_cut_before_its_dialects_end_raises(provider, dialect, stream):
    engine = UpstreamEngine(provider.url, speaks=[dialect])
    provider.script = streams(b"".join(part + b"\n\n" for part in stream.split(b"\n\n")[:-2]))
    with pytest.raises(UpstreamError, match="ended its stream without"):
        await collect(engine, ask(True, dialect=dialect))
    await engine.close()


async def test_an_error_with_status_200(provider, engine):
    provider.script = replies(b'{"error":{"message":"no credit for sk-canary"}}')
    head, piece, answer = await collect(engine, ask())
    assert (head.status, piece) == (200, Piece(b'{"error":{"message":"no credit for ***"}}', terminal=True))
    assert answer.error == "no credit for ***"


async def test_embeddings_and_counting(provider, engine, anthropic):
    body = b'{"object":"list","data":[{"embedding":[0.5],"index":0}],"model":"e","usage":{"prompt_tokens":4}}'
    provider.script = replies(body)
    _, piece, answer = await collect(engine, ask(dialect="embeddings"))
    assert (piece.data, answer.usage, answer.choices) == (body, Usage(4, 0), ())
    provider.script = replies(b'{"input_tokens":14}')
    _, piece, answer = await collect(anthropic, ask(dialect="count_tokens", query="beta=true"))
    assert piece.data == b'{"input_tokens":14}'
    assert provider.asked == ["/v1/embeddings", "/v1/messages/count_tokens?beta=true"]
    provider.script = replies(b"{}")
    for made, dialect in ((engine, "embeddings"), (anthropic, "count_tokens")):
        with pytest.raises(UpstreamError, match="no answer"):
            await collect(made, ask(dialect=dialect))


def test_what_an_engine_speaks():
    assert UpstreamEngine("https://api.openai.com/v1").dialects == {"chat", "responses", "embeddings"}
    assert UpstreamEngine("http://127.0.0.1:9/v1").dialects == {"chat", "embeddings"}
    assert UpstreamEngine("http://127.0.0.1:9/v1", api="anthropic").dialects == {"messages", "count_tokens"}
    assert UpstreamEngine("http://127.0.0.1:9/v1", speaks=("chat", "messages")).dialects == {"chat", "messages"}


async def test_a_dialect_that_it_does_not_speak(engine):
    with pytest.raises(InputError, match="does not speak messages"):
        await collect(engine, ask(dialect="messages"))


async def test_headers_for_anthropic(provider, anthropic):
    provider.script = replies(json.dumps(MESSAGE).encode())
    await collect(anthropic, ask(dialect="messages", **{"authorization": "Bearer mine", "x-api-key": "mine"}))
    theirs = {"anthropic-version": "2026-10-21", "anthropic-beta": "a,b", "x-claude-code-session-id": "s"}
    ours = {"x-reef-scenario": "a", "x-session-id": "s", "cookie": "c=d", "accept-encoding": "br", "accept": "x/y"}
    await collect(anthropic, ask(dialect="messages", **theirs, **ours))
    for headers, _ in provider.seen:
        assert headers.getall("x-api-key") == ["sk-canary"]
        assert "authorization" not in headers
    first, second = (headers for headers, _ in provider.seen)
    assert first["anthropic-version"] == "2023-06-01"
    assert {name: second[name] for name in theirs} == theirs
    assert second.getall("anthropic-version") == ["2026-10-21"]
    assert (second["accept-encoding"], second["accept"]) == ("identity", "application/json")
    assert not {"x-reef-scenario", "x-session-id", "cookie"} & {name.lower() for name in second}


async def test_a_requests_own_model_wins_over_the_engines(provider):
    engine = UpstreamEngine(provider.url, model="theirs")
    provider.script = replies(WHOLE)
    body = b'{"messages":[{"model":"mine"}],  "model" : "mine"}'
    await collect(engine, ask(body=body, model="asked"))
    assert provider.seen[0][1] == b'{"messages":[{"model":"mine"}],  "model" : "asked"}'
    await engine.close()


async def test_a_query_that_would_break_the_request_line(provider, engine):
    provider.script = replies(WHOLE)
    await collect(engine, ask(query="a=%20b&c=d e#f\r\nx: y"))
    assert provider.asked[0].startswith("/v1/chat/completions?a=%20b&c=d")
    assert "x" not in provider.seen[0][0]


async def test_a_large_body_is_sent_whole(provider, engine):
    provider.script = replies(WHOLE)
    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 3_000_000 + b'"}]}'
    await collect(engine, ask(body=body))
    assert provider.seen[0][1] == body


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_counted_and_never_made_up(provider, engine, stream):
    """Cases 12 and 13: log-probs that do not stand for every token; bytes null."""
    body = json.dumps({"model": "m", "messages": [], "logprobs": True, "stream": stream}).encode()
    scored = {
        "content": [{"token": "a", "logprob": -0.5, "bytes": None}, {"token": "b", "logprob": -9.5, "bytes": None}]
    }
    choice = {"index": 0, "finish_reason": "stop", "logprobs": scored}
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    if stream:
        thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "logprobs": None}]}
        said = event(thought) + event({"choices": [{**choice, "delta": {"content": "ab"}}]})
        said += event({"choices": [], "usage": usage}) + DONE
        provider.script = streams(said)
    else:
        said = json.dumps({"choices": [{**choice, "message": {"content": "ab"}}], "usage": usage}).encode()
        provider.script = replies(said)
    _, *pieces, answer = await collect(engine, ask(stream, body))
    assert b"".join(piece.data for piece in pieces) == said
    assert answer.choices[0].logprobs is None
    assert answer.untrainable == "the engine gave 2 log-probs for 3 tokens, and no token ids"


# --- tries, proxies, connections --------------------------------------------------------------------------------------


def fails(times, status=429, then=WHOLE, **headers):
    left = [times]

    async def script(request):
        left[0] -= 1
        if left[0] >= 0:
            return await replies(b'{"error":{"message":"busy"}}', status, **headers)(request)
        return await replies(then)(request)

    return script


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 529])
async def test_what_passes_is_tried_again(provider, engine, status, caplog):
    """Case 19."""
    caplog.set_level(logging.INFO)
    provider.script = fails(2, status)
    head, *_ = await collect(engine, ask())
    assert (head.status, len(provider.seen)) == (200, 3)
    assert len({body for _, body in provider.seen}) == 1
    assert [
        f"({status}); try" in record.getMessage() for record in caplog.records if record.name.startswith("reef")
    ] == [
        True,
        True,
    ]


@pytest.mark.parametrize("asked", ["30", "abc", "", "-1", "nan", "inf", "0", "Wed, 21 Oct 2015 07:28:00 GMT", None])
async def test_one_budget_bounds_the_tries_and_retry_after_is_passed_on(provider, engine, asked):
    """Case 19: what lies beyond the budget is relayed at once, nonsense is as good as nothing."""
    provider.script = fails(99, 429, **({} if asked is None else {"retry-after": asked}))
    head, piece, _ = await collect(engine, ask())
    assert head.status == 429
    assert piece.data == b'{"error":{"message":"busy"}}'
    assert len(provider.seen) == (1 if asked == "30" else 3)
    assert head.headers.get("retry-after") == asked


async def test_retry_after_is_waited_for(provider, engine):
    """Case 19: a fraction of a second (for dates see test_retry)."""
    until = time.monotonic() + 0.2
    provider.script = fails(1, 503, **{"retry-after": "0.2"})
    head, *_ = await collect(engine, ask())
    assert (head.status, len(provider.seen)) == (200, 2)
    assert time.monotonic() >= until


async def test_a_client_that_tries_again_itself_is_not_helped(provider, engine):
    """Case 19: tries do not multiply."""
    provider.script = fails(99)
    await collect(engine, ask(**{"x-stainless-retry-count": "0"}))
    assert len(provider.seen) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422])
async def test_what_does_not_pass_is_not_tried_again(provider, engine, status):
    provider.script = fails(99, status)
    try:
        await collect(engine, ask())
    except UpstreamError:
        assert status == 401
    assert len(provider.seen) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_may_have_been_worked_on_is_not_tried_again(provider, engine, stream):
    async def script(request):
        request.transport.abort()
        return web.Response()

    provider.script = script
    with pytest.raises(UpstreamError):
        await collect(engine, ask(stream))
    assert len(provider.seen) == 1


async def test_no_tries_after_the_first_byte(provider, engine):
    provider.script = streams(chunk(content="a"), cut=True)
    with pytest.raises(UpstreamError):
        await collect(engine, ask(True))
    assert len(provider.seen) == 1


async def test_a_server_that_is_not_there_yet_is_tried_again():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    engine = UpstreamEngine(f"http://127.0.0.1:{port}/v1", pause=0.4)
    asked = asyncio.ensure_future(collect(engine, ask()))
    await asyncio.sleep(0.05)

    async def answer(request):
        return web.Response(body=WHOLE, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    assert (await asked)[1].data == WHOLE
    await engine.close()
    await runner.cleanup()


@pytest.fixture
async def proxy():
    """An HTTP proxy that keeps the heads it got, forwards absolute forms, and refuses to CONNECT."""
    heads = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(head.decode())
        method, target, _ = head.split(b" ", 2)
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        else:
            host, _, path = target.removeprefix(b"http://").partition(b"/")
            name, _, port = host.partition(b":")
            up_reader, up_writer = await asyncio.open_connection(name.decode(), int(port))
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            up_writer.write(
                head.replace(target, b"/" + path).replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n")
            )
            up_writer.write(await reader.readexactly(length))
            while data := await up_reader.read(65536):
                writer.write(data)
            up_writer.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://me:sk-proxy@127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    server.close()


@pytest.mark.parametrize("trust_env", [False, True])
async def test_through_a_proxy(provider, proxy, monkeypatch, trust_env):
    address, heads = proxy
    if trust_env:
        monkeypatch.setenv("http_proxy", address)
        monkeypatch.setenv("https_proxy", address)
        monkeypatch.setenv("no_proxy", "elsewhere.invalid")
    given = {"trust_env": True} if trust_env else {"proxy": address}
    provider.script = streams(GOOD)
    engine = UpstreamEngine(provider.url, key="sk-canary", **given)
    _, *pieces, _ = await collect(engine, ask(True))
    assert b"".join(piece.data for piece in pieces) == GOOD
    assert heads[0].startswith(f"POST {provider.url}/chat/completions HTTP/1.1")
    assert "proxy-authorization: basic" in heads[0].lower()
    await engine.close()
    engine = UpstreamEngine("https://provider.invalid/v1", key="sk-canary", pause=0.001, **given)
    with pytest.raises(UpstreamError) as caught:
        await collect(engine, ask())
    assert heads[1].startswith("CONNECT provider.invalid:443 HTTP/1.1")
    assert "sk-canary" not in heads[1]
    assert "sk-" not in str(caught.value)
    await engine.close()


async def test_no_proxy_is_kept_to(provider, proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy[0])
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    provider.script = replies(WHOLE)
    for trust_env in (True, False):
        engine = UpstreamEngine(provider.url, trust_env=trust_env)
        await collect(engine, ask())
        await engine.close()
    assert proxy[1] == []


async def test_all_connections_at_work(provider):
    """Whoever waits for one is told so, is not tried again, and the engine stays ready."""
    engine = UpstreamEngine(provider.url, connections=1, connect=0.05, pause=0.001)
    assert await engine.ready()
    begun, go = asyncio.Event(), asyncio.Event()

    async def script(request):
        begun.set()
        await go.wait()
        return web.Response(body=WHOLE, content_type="application/json")

    provider.script = script
    first = asyncio.ensure_future(collect(engine, ask()))
    await begun.wait()
    with pytest.raises(UpstreamError, match=r"all connections to .* are at work") as caught:
        await collect(engine, ask())
    assert caught.value.status == 503
    engine._reached = (float("-inf"), True)  # long ago
    assert await engine.ready()
    go.set()
    await first
    assert len(provider.seen) == 1
    await engine.close()


async def test_connections_are_bounded_where_asked(provider):
    engine = UpstreamEngine(provider.url, connections=2)
    busy, most = 0, 0

    async def script(request):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.01)
        busy -= 1
        return await replies(WHOLE)(request)

    provider.script = script
    await asyncio.gather(*[collect(engine, ask()) for _ in range(6)])
    assert most == 2
    await engine.close()


async def test_engines_keep_to_their_own_provider_and_key(provider):
    """Several upstreams in one process: neither keys nor connections are shared."""
    provider.script = replies(WHOLE)
    engines = [UpstreamEngine(provider.url, key=f"sk-{name}", model=name) for name in "ab"]
    await asyncio.gather(*[collect(engine, ask()) for engine in engines * 3])
    asked = sorted((headers["authorization"], json.loads(body)["model"]) for headers, body in provider.seen)
    assert asked == [("Bearer sk-a", "a")] * 3 + [("Bearer sk-b", "b")] * 3
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_key_is_echoed_nowhere(provider, engine, status, stream, caplog):
    """Case 33."""
    caplog.set_level(logging.DEBUG)
    echo = dict.fromkeys(("x-ratelimit-key", "retry-after", "openai-organization", "x-request-id"), "sk-canary")
    provider.script = replies(b'{"error":{"message":"bad key sk-canary"}}', status, **echo)
    try:
        seen = repr(await collect(engine, ask(stream)))
    except UpstreamError as error:
        seen = repr(error) + error.message + repr(error.body)
    assert "sk-canary" not in seen
    assert "sk-canary" not in caplog.text
    assert "sk-canary" not in repr(engine)


def test_a_key_with_a_line_break_is_refused_unseen():
    with pytest.raises(ConfigError) as caught:
        UpstreamEngine("http://127.0.0.1:9/v1", key="sk-canary\nx: y")
    assert "canary" not in str(caught.value)


async def test_the_form_of_an_answer_is_the_provider_s_to_hold(provider, engine):
    """Fields that the embedded engine reads pass as they are, also those that it would refuse."""
    provider.script = replies(WHOLE)
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}},
        "structured_outputs": {"grammar": "start: ", "whitespace_pattern": " ?"},
        "guided_regex": "(",
    }
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    await collect(engine, ask(body=body))
    sent = json.loads(provider.seen[-1][1])
    assert {name: sent[name] for name in fields} == fields
