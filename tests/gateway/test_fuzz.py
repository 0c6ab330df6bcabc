"""Damaged requests at the socket and damaged bytes at the parsers: a clear answer or a closed socket, never a fault."""

import asyncio
import gzip
import json
import random
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import InputError
from reef.engines.dialect import MODULES, read
from reef.engines.sse import Events
from reef.gateway.body import parse, unpack
from reef.gateway.errors import Refusal
from tests.gateway.conftest import TOKEN

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "北京 hello"}], "stream": True}).encode()
REPORT = json.dumps({"score": 1, "references": ["0" * 32], "metrics": {"a": 1e5}}).encode()
ROUTES = (
    (b"POST /v1/chat/completions", CHAT),
    (b"POST /v1/responses", CHAT.replace(b"messages", b"input")),
    (b"POST /v1/messages?beta=true", CHAT),
    (b"POST /reef/report", REPORT),
    (b"GET /reef/scenarios/default/records?limit=3", b""),
)
PARTS = (b"\r\n", b"\0", b"\xff\xfe", b'"', b"}", b"[" * 300, b"chunked", b"-1", b"9" * 25, b"\xed\xa0\x80", b"\\ud800")


def request(start, body):
    return (
        b"%s HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer %s\r\n"
        b"content-type: application/json\r\n%s\r\n%s"
        % (
            start,
            TOKEN.encode(),
            b"content-length: %d\r\n" % len(body) if body else b"",
            body,
        )
    )


def damage(data, chance):
    """A few bytes flipped, cut, doubled, or something put in."""
    whole = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(whole))
        kind = chance.randrange(4)
        if kind == 0:
            whole[place] = chance.randrange(256)
        elif kind == 1:
            del whole[place : place + chance.randint(1, 40)]
        elif kind == 2:
            whole[place:place] = whole[place : place + chance.randint(1, 40)]
        else:
            whole[place:place] = chance.choice(PARTS)
        if not whole:
            return b"\r\n"
    return bytes(whole)


async def send(port, data):
    """All bytes that come back until the server closes or is quiet, which it is when it waits for more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        answer = b""
        while piece := await asyncio.wait_for(reader.read(65536), 0.25):
            answer += piece
        return answer
    except TimeoutError:
        return answer
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("seed", range(4))
async def test_damaged_requests(gateway, client, caplog, seed):
    chance = random.Random(seed)
    port = int(gateway.url.rsplit(":", 1)[1])
    answered = 0
    for _ in range(60):
        damaged = damage(request(*chance.choice(ROUTES)), chance)
        answer = await send(port, damaged)
        answered += bool(answer)
        if answer:
            assert answer.startswith(b"HTTP/1.1 "), (damaged, answer)
            assert not answer.startswith(b"HTTP/1.1 500"), (damaged, answer)
    assert answered > 30
    assert "failed inside" not in caplog.text
    assert (await client.get("/healthz")).status_code == 200
    good = await client.post("/v1/chat/completions", content=CHAT, headers={"content-type": "application/json"})
    assert (await gateway.closed(good.headers["x-reef-agent-record-id"])).status == "complete"


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_bodies_that_are_anything(data):
    try:
        assert isinstance(parse(data), dict)
    except InputError:
        pass


PACKERS = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstandard.compress}


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(PACKERS)), st.binary(max_size=2000), st.data())
def test_packed_bodies_that_are_damaged(name, plain, draw):
    packed = PACKERS[name](plain)
    assert unpack(packed, name, 10_000) == plain
    place = draw.draw(st.integers(0, len(packed) - 1))
    value = draw.draw(st.integers(0, 255))
    for damaged in (packed[:place], packed[:place] + bytes([value]) + packed[place + 1 :], packed + bytes([value])):
        try:
            assert len(unpack(damaged, name, 10_000)) <= 10_000
        except (InputError, Refusal):
            pass


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(MODULES)),
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from(
                [
                    b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n',
                    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"x"}}\n\n',
                    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n',
                    b'data: {"type":"message_start","message":{"id":1,"usage":[]}}\r\n\r\n',
                    b'data: {"type":"response.completed","response":{"output":[{"type":"message","content":7}]}}\n\n',
                    b"data: [DONE]\n\n",
                ]
            ),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_answers_that_are_anything(dialect, pieces, stream):
    data = b"".join(pieces)
    said = read(dialect, data, stream=stream)
    said.choices()
    assert said.finished in (True, False)
    events = Events()
    found = [event for piece in pieces for event in events.feed(piece)]
    assert b"".join(event.raw for event in found) + events.rest == data
