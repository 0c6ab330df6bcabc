"""Connections that say nothing, or never say all of it."""

import asyncio
import contextlib
import socket

import pytest

from reef.engines.fake import FakeEngine
from reef.gateway.context import Limits
from reef.gateway.protocol import Protocol

GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(Protocol, "head_seconds", 0.3)


async def dial(gateway, data):
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"", b""),
        (b"GET /heal", b"HTTP/1.1 408"),
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-half: ", b"HTTP/1.1 408"),
    ],
)
async def test_a_head_that_does_not_end_is_closed(gateway, data, answer):
    reader, writer = await dial(gateway, data)
    found = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    assert found.startswith(answer)
    assert bool(found) == bool(answer)


async def test_a_head_that_drips_is_closed(gateway):
    reader, writer = await dial(gateway, GET[:4])
    reading = asyncio.create_task(reader.read())
    for _ in range(40):
        if reading.done():
            break
        writer.write(b"/")
        await asyncio.sleep(0.05)
    assert b"headers_timeout" in await asyncio.wait_for(reading, 1)
    writer.close()


async def test_half_a_second_request_is_closed(gateway):
    reader, writer = await dial(gateway, GET)
    first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3)
    assert first.startswith(b"HTTP/1.1 200")
    await asyncio.sleep(0.1)
    writer.write(GET[:9])
    rest = await asyncio.wait_for(reader.read(), 3)
    assert b"HTTP/1.1 408" in rest
    writer.close()


async def test_a_connection_in_use_or_kept_is_left_alone(gateway):
    reader, writer = await dial(gateway, GET[:12])
    await asyncio.sleep(0.1)
    writer.write(GET[12:])
    for _ in range(2):
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3)).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.5)
        await reader.read(100)
        writer.write(GET)
    writer.close()


async def test_a_long_answer_outlives_the_clock(run, tmp_path):
    from reef.engines.fake import FakeEngine

    body = {"messages": [{"role": "user", "content": "one two three four"}]}
    async with run(tmp_path, FakeEngine(delay=0.15)) as gateway, gateway.client() as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_connections_over_the_limit_are_told_so(run, tmp_path):
    async with run(tmp_path, limits=Limits(drain_seconds=5, connections=2)) as gateway:
        held = [await dial(gateway, GET) for _ in range(2)]
        for reader, _ in held:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        reader, writer = await dial(gateway, GET)
        answer = await asyncio.wait_for(reader.read(), 3)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in answer
        assert b"retry-after: 1" in answer
        writer.close()
        held[0][1].close()
        for _ in range(100):  # until the server has seen it
            await asyncio.sleep(0.01)
            reader, writer = await dial(gateway, GET)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3)
            writer.close()
            if answer.startswith(b"HTTP/1.1 200"):
                break
        assert answer.startswith(b"HTTP/1.1 200")
        held[1][1].close()


async def test_requests_that_pile_up_on_a_connection_are_bounded(gateway):
    reader, writer = await dial(gateway, GET * 40)
    found = b""
    while found.count(b"HTTP/1.1 200") < 40:
        found += await asyncio.wait_for(reader.read(65536), 3)
    writer.write(GET * 2000)
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.wait_for(reader.read(65536), 3):
            found += piece
    assert found.count(b"HTTP/1.1 200") < 200
    writer.close()


async def test_pipelined_requests_are_answered_in_order(gateway):
    wanted = [b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n"] * 15
    reader, writer = await dial(gateway, b"".join(wanted))
    found = b""
    while found.count(b"HTTP/1.1 ") < len(wanted):
        found += await asyncio.wait_for(reader.read(65536), 3)
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404"] * 15
    writer.close()


async def test_a_client_that_reads_nothing_is_dropped(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Protocol, "stalled_seconds", 0.2)
    engine = FakeEngine(reply=lambda release, body: ("word" * 1000 + " ") * 5000)  # 20 MB
    async with run(tmp_path, engine) as gateway:
        body = b'{"messages":[{"role":"user","content":"x"}]}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t-all-rights\r\n"
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        host, port = gateway.url.removeprefix("http://").split(":")
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, head + b"content-length: %d\r\n\r\n" % len(body) + body)
        for _ in range(1500):
            await asyncio.sleep(0.01)
            if engine.asked and not gateway.server.server_state.connections:
                break
        assert engine.asked
        assert not gateway.server.server_state.connections
        sock.close()


async def test_a_stream_for_a_client_without_chunks_comes_whole(gateway):
    body = b'{"messages":[{"role":"user","content":"one two"}],"stream":true}'
    head = b"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\nauthorization: Bearer t-all-rights\r\n"
    reader, writer = await dial(gateway, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    found = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    top, _, text = found.partition(b"\r\n\r\n")
    assert b"chunked" not in top
    assert b"content-length: %d" % len(text) in top
    assert text.endswith(b"data: [DONE]\n\n")
