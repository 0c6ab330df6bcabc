"""Connections that say nothing, or never say all of it."""

import asyncio

import pytest

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
