"""The gateway in front of a provider: bytes untouched, failures told apart, keys nowhere."""

import asyncio
import json
import logging
import socket

import httpx
import pytest
from aiohttp import web

from reef.engines.upstream import UpstreamEngine

KEY = "sk-canary-0123456789"
BODY = b'{"model": "gpt-x",  "messages": [{"role":"assistant","content":null,"tool_calls":[]}], "stream": %s}'
CHUNK = 'data: {{"id":"up-1","choices":[{{"index":0,"delta":{{"content":"{}"}},"finish_reason":{}}}]}}\r\n\r\n'
GOOD = (
    CHUNK.format("北京🌍", "null")
    + ": keep-alive\r\n\r\n"
    + CHUNK.format("", '"stop"')
    + 'data: {"choices":[],"usage":{"prompt_tokens":26,"completion_tokens":2,"total_tokens":28}}\r\n\r\n'
    + "data: [DONE]\r\n\r\n"
).encode()


@pytest.fixture
async def provider():
    class Provider:
        pass

    Provider.seen, Provider.stopped = [], asyncio.Event()

    async def answer(request):
        Provider.seen.append(await request.read())
        try:
            return await Provider.script(request)
        except (asyncio.CancelledError, ConnectionError):
            Provider.stopped.set()
            raise

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    Provider.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    yield Provider
    await runner.cleanup()


@pytest.fixture
async def relay(run, tmp_path, provider):
    async with run(tmp_path, UpstreamEngine(provider.url, key=KEY, idle=0.5)) as gateway, gateway.client() as client:
        yield gateway, client


def pieces(data, *, size=1, pause=0.0, end=True):
    async def script(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-request-id": "theirs"})
        await response.prepare(request)
        for place in range(0, len(data), size):
            await response.write(data[place : place + size])
            await asyncio.sleep(pause)
        if end:
            await response.write_eof()
        else:
            request.transport.abort()
        return response

    return script


async def send(client, stream):
    return await client.post(
        "/v1/chat/completions",
        content=BODY % (b"true" if stream else b"false"),
        headers={"content-type": "application/json"},
    )


async def test_stream_is_untouched_and_recorded(provider, relay):
    """case 1, case 6: usage in a trailing chunk, letters cut between bytes: all passes as it came and is read."""
    gateway, client = relay
    provider.script = pieces(GOOD)
    response = await send(client, True)
    assert response.content == GOOD
    assert response.headers["x-upstream-request-id"] == "theirs"
    assert provider.seen == [BODY % b"true"]
    record = await gateway.record(response.headers["x-reef-agent-record-id"])
    assert (record.status, record.choices[0].text, record.upstream_id) == ("complete", "北京🌍", "theirs")
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (26, 2)
    assert record.untrainable == "the engine gives no tokens"


async def test_stream_that_is_cut(provider, relay):
    gateway, client = relay
    provider.script = pieces(GOOD[:-20], size=40, end=False)
    with pytest.raises(httpx.RemoteProtocolError):
        async with client.stream("POST", "/v1/chat/completions", json=json.loads(BODY % b"true")) as response:
            receipt = response.headers["x-reef-agent-record-id"]
            await response.aread()
    record = await gateway.closed(receipt)
    assert (record.status, record.choices[0].text) == ("interrupted", "北京🌍")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "code"), [(401, "upstream_auth"), (403, "upstream_auth"), (500, "upstream_error")])
async def test_failures_that_are_ours(provider, relay, caplog, status, code, stream):
    gateway, client = relay
    caplog.set_level(logging.DEBUG)

    async def script(request):
        return web.json_response({"error": {"message": f"Incorrect API key: {KEY}"}}, status=status)

    provider.script = script
    response = await send(client, stream)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == code
    record = await gateway.record(response.headers["x-reef-agent-record-id"])
    assert record.status == "failed"
    for text in (response.text, str(response.headers), caplog.text, repr(record)):
        assert KEY not in text


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_that_are_the_clients(provider, relay, stream):
    gateway, client = relay

    async def script(request):
        body = {"error": {"message": f"slow down ({KEY})", "code": "rate"}}
        return web.json_response(body, status=429, headers={"retry-after": "0.2"})

    provider.script = script
    response = await send(client, stream)
    assert (response.status_code, response.headers["retry-after"]) == (429, "0.2")
    assert response.json()["error"] == {"message": "slow down (***)", "code": "rate"}
    assert (await gateway.record(response.headers["x-reef-agent-record-id"])).status == "rejected"


async def test_a_provider_that_hangs_is_504(provider, relay):
    async def script(request):
        await asyncio.sleep(10)

    provider.script = script
    _, client = relay
    response = await send(client, False)
    assert response.status_code == 504


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_away_stops_the_provider(provider, relay, stream):
    gateway, client = relay
    if stream:
        provider.script = pieces(CHUNK.format("a", "null").encode() * 400, size=80, pause=0.05)
        async with client.stream("POST", "/v1/chat/completions", json=json.loads(BODY % b"true")) as response:
            receipt = response.headers["x-reef-agent-record-id"]
            async for _ in response.aiter_bytes():
                break
        await asyncio.wait_for(provider.stopped.wait(), 1.0)
        assert (await gateway.closed(receipt)).status == "aborted"
    else:

        async def script(request):
            await asyncio.sleep(10)

        provider.script = script
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=json.loads(BODY % b"false"), timeout=0.2)
        await asyncio.wait_for(provider.stopped.wait(), 1.0)


async def test_a_provider_that_is_away_is_named_when_the_server_is_not_ready(run, tmp_path, provider):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    async with run(tmp_path, UpstreamEngine(f"http://127.0.0.1:{port}/v1")) as gateway, gateway.client() as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reason"].startswith("provider ")
        assert answer.json()["reason"].endswith(" refused the connection; is it running?")
    async with run(tmp_path, UpstreamEngine(provider.url)) as gateway, gateway.client() as client:
        assert (await client.get("/readyz")).status_code == 200, "one that answers anything is there"


async def test_a_providers_5xx_is_logged_when_nothing_is_tried_after_it(relay, provider, caplog):
    async def script(request):
        return web.Response(status=500, text="PRIVATE")

    provider.script = script
    _, client = relay
    for _ in range(3):
        answer = await client.post(
            "/v1/chat/completions", content=BODY % b"false", headers={"x-stainless-retry-count": "0"}
        )
        assert answer.status_code == 502
    (line,) = [line for line in caplog.records if "the provider" in line.getMessage()]  # an outage is no flood
    assert (line.levelname, line.getMessage()) == ("WARNING", "the provider 127.0.0.1 answered 500")
    assert (len(line.receipt), line.status) == (32, 500)
    assert "PRIVATE" not in caplog.text


async def test_a_provider_lists_its_own_models(run, tmp_path):
    asked = []

    async def listed(request):
        asked.append(request.headers.get("authorization"))
        return web.json_response({"data": [{"id": "gpt-x"}, {"id": 7}, "odd", {"id": "org/y"}]})

    app = web.Application()
    app.router.add_get("/v1/models", listed)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    async with run(tmp_path, UpstreamEngine(url, key=KEY), models=()) as gateway, gateway.client() as client:
        for _ in range(3):
            page = (await client.get("/v1/models")).json()
            assert [item["id"] for item in page["data"]] == ["gpt-x", "org/y"]
        assert (await client.get("/v1/models/org/y")).status_code == 200
        assert (await client.get("/v1/models/other")).status_code == 404
        assert asked == [f"Bearer {KEY}"]
    await runner.cleanup()
    async with run(tmp_path, UpstreamEngine(url), models=()) as gateway, gateway.client() as client:
        assert (await client.get("/v1/models")).json()["data"] == []
