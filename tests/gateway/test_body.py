"""Bodies that are packed, cut, or never come."""

import asyncio
import gzip
import json
import zlib

import pytest
import zstandard

from reef.core.errors import InputError
from reef.gateway.body import unpack
from reef.gateway.context import Limits
from reef.gateway.errors import Refusal

ASK = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t-all-rights\r\n"
    b"content-type: application/json\r\n"
)
PLAIN = bytes(range(256)) * 1000


def gzips(*parts):
    return b"".join(gzip.compress(part, mtime=0) for part in parts)  # no time: it is in the names of tests


def zstds(*parts):
    return b"".join(map(zstandard.ZstdCompressor().compress, parts))


def streamed(data):
    """zstd as a stream writes it: without the length of its content."""
    packer = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzips(PLAIN)),
        ("gzip", gzips(PLAIN[:100], b"", PLAIN[100:70_000], PLAIN[70_000:])),
        ("x-gzip", gzips(PLAIN[:9], PLAIN[9:]) + bytes(600)),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", zlib.compress(PLAIN)[2:-4]),
        ("zstd", zstds(PLAIN)),
        ("zstd", zstds(PLAIN[:100], b"", PLAIN[100:])),
        ("zstd", streamed(PLAIN)),
        ("zstd", b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstds(PLAIN)),  # with a frame to be skipped
    ],
)
def test_all_of_a_packed_body_is_read(encoding, data):
    assert unpack(data, encoding, len(PLAIN)) == PLAIN
    with pytest.raises(Refusal) as caught:
        unpack(data, encoding, len(PLAIN) - 1)
    assert caught.value.status == 413


@pytest.mark.parametrize(
    ("encoding", "data"), [("gzip", gzips(b"x", PLAIN)), ("deflate", zlib.compress(PLAIN)), ("zstd", streamed(PLAIN))]
)
def test_a_packed_body_that_is_cut_says_so(encoding, data):
    for end in (-1, -3, -20, len(data) // 2, 30, 0):
        with pytest.raises(InputError, match=f"truncated {encoding} stream"):
            unpack(data[:end], encoding, 1 << 20)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzips(b"{}") + b"rest"),
        ("gzip", gzips(b"") * 10_001),
        ("zstd", zstds(b"{}") + b"rest"),
        ("zstd", zstds(b"") * 10_001),
        ("deflate", b"\x78"),
        ("zstd", b"{}{}{}{}{}{}"),
    ],
)
def test_what_is_no_packed_body(encoding, data):
    with pytest.raises(InputError):
        unpack(data, encoding, 1 << 20)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_bomb_is_not_unpacked(encoding):
    bomb = bytes(300 * 1024 * 1024)
    packed = gzip.compress(bomb, 1) if encoding == "gzip" else zstds(bomb)
    del bomb
    with pytest.raises(Refusal):
        unpack(packed, encoding, 1 << 20)


async def test_packed_bodies_over_http(client):
    body = json.dumps(ASK).encode()
    for encoding, data, status in (
        ("gzip", gzips(body[:20], body[20:]), 200),
        ("zstd", zstds(body[:20], body[20:]), 200),
        ("zstd", zstds(body)[:-4], 400),
    ):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        response = await client.post("/v1/chat/completions", content=data, headers=headers)
        assert response.status_code == status
    assert "truncated zstd stream" in response.json()["error"]["message"]


async def dial(gateway, data):
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


async def test_a_body_of_which_nothing_comes_is_408(gateway, monkeypatch):
    monkeypatch.setattr("reef.gateway.body.SLOW", 0.1)
    reader, writer = await dial(gateway, HEAD + b"content-length: 100\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer


async def test_a_body_that_drips_is_408_in_the_end(gateway, monkeypatch):
    monkeypatch.setattr("reef.gateway.body.WHOLE", 0.4)
    reader, writer = await dial(gateway, HEAD + b"content-length: 100\r\n\r\n")
    reading = asyncio.create_task(reader.read())
    for _ in range(60):
        if reading.done():
            break
        writer.write(b" ")
        await asyncio.sleep(0.05)
    assert (await asyncio.wait_for(reading, 1)).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_clients_that_send_no_body_take_nobodys_place(run, tmp_path):
    async with run(tmp_path, limits=Limits(concurrent=2, drain_seconds=5)) as gateway, gateway.client() as client:
        silent = [await dial(gateway, HEAD + b"content-length: 100\r\n\r\n") for _ in range(8)]
        await asyncio.sleep(0.05)
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
        assert (await client.get("/reef/status")).status_code == 200
        for _, writer in silent:
            writer.close()


async def test_a_stop_does_not_wait_for_bodies(run, tmp_path):
    async with run(tmp_path, limits=Limits(drain_seconds=20)) as gateway:
        reader, writer = await dial(gateway, HEAD + b"content-length: 100\r\n\r\n")
        idle, other = await dial(gateway, b"")
        half, third = await dial(gateway, b"GET /heal")
        await asyncio.sleep(0.05)
        gateway.server.stop()
        assert gateway.task is not None
        await asyncio.wait_for(asyncio.shield(gateway.task), 4)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"send the request again" in answer
        assert await idle.read() == await half.read() == b""
        for each in (writer, other, third):
            each.close()
        assert not gateway.engine.asked
