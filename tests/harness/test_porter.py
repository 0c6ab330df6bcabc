"""The way out of a room: what is let through, what it looks like then, and what is known to have gone wrong."""

import asyncio
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.harness.porter import Porter, Refused
from tests.harness.fakes import RECEIPT, Gateway


@pytest.fixture
async def gateway():
    async with Gateway() as made:
        yield made


async def through(porter, data):
    """Everything that one connection gets back."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.setblocking(False)
    await porter.open(listener)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(10):
            return (await reader.read()).decode()
    finally:
        writer.close()
        await porter.close()


def request(line, *headers, body=b""):
    return "\r\n".join([line, "host: here", *headers, "", ""]).encode() + body


ASK = request("POST /v1/chat/completions HTTP/1.1", "content-length: 2", body=b"{}")


@pytest.mark.parametrize(
    "line",
    [
        "POST /v1/chat/completions HTTP/1.1",
        "POST /v1/messages?beta=true HTTP/1.1",
        "POST /v1/responses HTTP/1.1",
        "POST /s/a-b.c/v1/messages HTTP/1.1",
        "POST /v1/messages/count_tokens HTTP/1.1",
        "GET /v1/models HTTP/1.1",
        "GET /v1/models/up/gpt-x.1:free HTTP/1.1",
    ],
)
async def test_asking_a_model_is_let_through(gateway, line):
    said = await through(Porter(gateway.address), request(line))
    assert said.startswith("HTTP/1.1 200")
    assert f'"path": "{line.split()[1]}"' in said
    assert len(gateway.seen) == 1


@pytest.mark.parametrize(
    "line",
    [
        "GET /reef/status HTTP/1.1",
        "POST /reef/report HTTP/1.1",
        "GET / HTTP/1.1",
        "GET /metrics HTTP/1.1",
        "POST /v1/../reef/report HTTP/1.1",
        "POST /v1/%2e%2e/reef/report HTTP/1.1",
        "POST /v1/models HTTP/1.1",
        "GET /v1/responses/resp_1 HTTP/1.1",
        "GET /v1/models/../../reef/status?x= HTTP/1.1",
        "GET /v1/models/a/../../../reef/status HTTP/1.1",
        "POST //reef/report HTTP/1.1",
        "POST http://127.0.0.1/reef/report HTTP/1.1",
        "POST http://127.0.0.1/v1/messages HTTP/1.1",
        "CONNECT 127.0.0.1:22 HTTP/1.1",
        "POST /s/a/reef/report HTTP/1.1",
        "POST /s/../v1/messages HTTP/1.1",
        "POST /v1/messages\tHTTP/1.1",
        "POST /v1/messages HTTP/2",
        "nonsense",
        "POST /v1/messages?a\nx-other: 1 HTTP/1.1",
        "POST /v1/messages?\x00 HTTP/1.1",
    ],
)
async def test_everything_else_is_refused(gateway, line):
    said = await through(Porter(gateway.address), request(line))
    assert said.startswith(("HTTP/1.1 403", "HTTP/1.1 400"))
    assert gateway.seen == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request("POST /v1/messages HTTP/1.1", "transfer-encoding: chunked", body=b"0\r\n\r\n"), 411),
        (request("POST /v1/messages HTTP/1.1", "content-length: 2", "content-length: 3"), 411),
        (request("POST /v1/messages HTTP/1.1", "Content-Length: 2", "Transfer-Encoding: x"), 411),
        (request("POST /v1/messages HTTP/1.1", "content-length: -1"), 413),
        (request("POST /v1/messages HTTP/1.1", "content-length: 99999999999"), 413),
        (request("POST /v1/messages HTTP/1.1", "content-length : 2"), 400),
        (request("POST /v1/messages HTTP/1.1", "a: b\n c: d"), 400),
        (request("POST /v1/messages HTTP/1.1", "x: " + "y" * 100_000), 431),
    ],
)
async def test_what_can_be_read_in_two_ways_is_refused(gateway, data, status):
    assert (await through(Porter(gateway.address), data)).startswith(f"HTTP/1.1 {status}")
    assert gateway.seen == []


LINE = st.text(st.characters(max_codepoint=0xFF), max_size=20)
WORD = st.sampled_from(["content-length: 3", "Transfer-Encoding: chunked", "host: x", "connection: a, b", "a: \nb: c"])
PATH = st.sampled_from(["/v1/messages", "/v1/models", "/v1/chat/completions", "/reef/status", "/s/x/v1/messages"])
FIRST = st.tuples(st.sampled_from(["POST", "GET", "PUT"]), PATH, st.just("?") | st.just(""), LINE)


@given(FIRST, st.lists(LINE | WORD, max_size=6))
def test_what_is_passed_on_is_one_plain_request(first, lines):
    method, path, mark, more = first
    data = "\r\n".join([f"{method} {path}{mark}{more} HTTP/1.1", *lines, "", ""]).encode("latin-1")
    try:
        head, size = Porter("http://127.0.0.1:9")._read(data)
    except Refused:
        return
    start, *rest = head.decode("latin-1").split("\r\n")
    assert re.fullmatch(r"(?:POST|GET) /(?:s/x/)?v1/(?:messages|models|chat/completions)[!-~]* HTTP/1\.1", start)
    assert rest[-2:] == ["", ""]
    headers = [line.split(": ", 1) for line in rest[:-2]]
    assert all(re.fullmatch(r"[^\x00-\x20:]+", name) for name, *_ in headers)
    assert not any(re.search(r"[\r\n\x00]", value) for _, value in headers)
    names = [name for name, _ in headers]
    assert "transfer-encoding" not in names
    assert {name: names.count(name) for name in ("content-length", "host", "connection")} == {
        "content-length": 1,
        "host": 1,
        "connection": 1,
    }
    assert dict(headers)["content-length"] == str(size)


async def test_one_connection_is_one_request(gateway):
    hidden = request("POST /reef/report HTTP/1.1", "content-length: 0")
    await through(Porter(gateway.address), ASK + hidden)
    assert [head.split("\r\n")[0] for head, _ in gateway.seen] == ["POST /v1/chat/completions HTTP/1.1"]
    assert gateway.seen[0][1] == b"{}"


async def test_the_head_is_of_our_own_making(gateway):
    headers = ("authorization: Bearer t", "x-reef-harness: on", "X-Reef-Release: r", "connection: keep-alive, x-drop")
    await through(
        Porter(gateway.address), request("GET /v1/models HTTP/1.1", *headers, "x-drop: 1", "upgrade: h2c", "x-keep: 1")
    )
    lines = sorted(gateway.seen[0][0].lower().split("\r\n")[1:-2])
    wanted = ["authorization: bearer t", "connection: close", "content-length: 0", f"host: 127.0.0.1:{gateway.port}"]
    assert lines == sorted([*wanted, "x-keep: 1", "x-reef-harness: off"])


async def test_calls_and_receipts_are_counted_and_bounded(gateway):
    porter = Porter(gateway.address, most=2)
    for _ in range(2):
        assert (await through(porter, ASK)).startswith("HTTP/1.1 200")
    assert not porter.spent
    assert (await through(porter, ASK)).startswith("HTTP/1.1 403")
    assert (await through(porter, request("GET /v1/models HTTP/1.1"))).startswith("HTTP/1.1 200")
    assert (porter.calls, porter.spent, porter.troubles) == (2, True, [])
    assert porter.receipts[:2] == [RECEIPT, RECEIPT]


@pytest.mark.parametrize("status", [200, 400, 403, 413])
async def test_what_the_agent_did_is_no_trouble(status):
    async with Gateway(status) as gateway:
        porter = Porter(gateway.address)
        assert (await through(porter, ASK)).startswith(f"HTTP/1.1 {status}")
        assert porter.troubles == []


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_what_went_wrong_at_the_gateway_is_known(status):
    async with Gateway(status) as gateway:
        porter = Porter(gateway.address)
        await through(porter, ASK)
        assert porter.troubles == [f"Reef answered {status}"]


async def test_an_answer_that_breaks_off_is_known_and_breaks_off_here():
    async with Gateway(broken=True) as gateway:
        porter = Porter(gateway.address)
        head, _, body = (await through(porter, ASK)).partition("\r\n\r\n")
        assert f"content-length: {len(body)}" not in head
        assert porter.troubles == ["an answer of Reef broke off"]


async def test_so_many_connections_and_no_more(gateway, monkeypatch):
    monkeypatch.setattr("reef.harness.porter.MANY", 2)
    porter, listener = Porter(gateway.address), socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    await porter.open(listener)
    lines = [await asyncio.open_connection(*listener.getsockname()) for _ in range(3)]
    async with asyncio.timeout(10):
        assert await lines[2][0].read() == b""
        lines[0][1].write(ASK)
        assert (await lines[0][0].read()).startswith(b"HTTP/1.1 200")
    for _, writer in lines:
        writer.close()
    await porter.close()


async def test_a_gateway_that_is_away_is_known():
    porter = Porter("http://127.0.0.1:9")
    assert (await through(porter, ASK)).startswith("HTTP/1.1 502")
    assert "cannot be reached" in porter.troubles[0]
