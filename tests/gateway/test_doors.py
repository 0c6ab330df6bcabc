"""What is refused at the door: tokens, routes, methods, types, sizes, headers."""

import asyncio
import gzip
import json
import logging
import sys

import httpx
import pytest

from reef.gateway.auth import Token, Tokens
from reef.gateway.context import Limits
from reef.records.tokens import RIGHTS, Grant, Quota, digest

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-canary"}, {"x-api-key": "sk-canary"}])
async def test_wrong_token(gateway, headers, caplog):
    caplog.set_level(logging.DEBUG)
    async with gateway.client(None) as client:
        for method, path in (("POST", "/v1/chat/completions"), ("POST", "/reef/report"), ("GET", "/reef/status")):
            response = await client.request(method, path, headers=headers, json=ASK if method == "POST" else None)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "canary" not in response.text
    assert "canary" not in caplog.text
    assert not gateway.engine.asked


async def test_either_header_and_any_case(gateway):
    async with gateway.client(None) as client:
        for headers in ({"authorization": "bearer t-all-rights"}, {"X-Api-Key": "t-all-rights"}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_rights_and_scenarios(gateway):
    async with gateway.client("t-infer") as client:
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
        for method, path in (
            ("POST", "/reef/report"),
            ("GET", "/reef/status"),
            ("GET", "/reef/scenarios/default/records"),
            ("POST", "/reef/scenarios/default/rollback"),
        ):
            response = await client.request(method, path, json={})
            assert response.status_code == 403
            assert response.json()["error"]["type"] == "permission_error"
    async with gateway.client("t-one") as client:
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 403
        assert (await client.post("/s/one/v1/chat/completions", json=ASK)).status_code == 200
        assert (await client.get("/reef/scenarios/default/records")).status_code == 403
        assert list((await client.get("/reef/status")).json()["scenarios"]) == ["one"]


async def test_no_auth(run, tmp_path):
    async with run(tmp_path, tokens=Tokens(free=True)) as gateway, gateway.client(None) as client:
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200


def test_tokens():
    tokens = Tokens([("one", Token("first", frozenset({"infer"}))), ("two", Token("second"))])
    assert tokens.find({"authorization": "Bearer two"}).name == "second"
    assert tokens.find({"authorization": "Basic x", "x-api-key": "one"}).name == "first"
    assert "'two'" not in repr(vars(tokens))


async def test_unknown_route(client):
    for path in ("/nothing", "/v1/nothing", "/reef/nothing", "/s/default/reef/report", "/s/x", "/s/"):
        response = await client.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"


async def test_unknown_route_in_its_dialect(client):
    response = await client.post("/v1/messages/none", json={})
    assert response.status_code == 404
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "not_found_error"


async def test_wrong_method(client):
    response = await client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


BAD = [
    (b'{"messages": [', None),
    (b"", None),
    (b"[]", None),
    (b'"text"', None),
    (b'{"messages": NaN}', None),
    (b"\xff\xfe", None),
    (b"{}", "messages"),
    (b'{"messages": []}', "messages"),
    (b'{"messages": "hi"}', "messages"),
    (b'{"messages": [3]}', "messages[0]"),
    (b'{"messages": [{"content":"x"}]}', "messages[0]"),
    (b'{"messages": [{"role":"user","content":"x"}], "max_tokens": -1}', "max_tokens"),
    (b'{"messages": [{"role":"user","content":"x"}], "max_completion_tokens": 1.5}', "max_completion_tokens"),
    (b'{"messages": [{"role":"user","content":"x"}], "stream": "yes"}', "stream"),
    (b'{"messages": [{"role":"user","content":"x"}], "model": 3}', "model"),
    (b'{"messages": [{"role":"user","content":"x"}], "n": 0}', "n"),
]


async def test_bad_bodies(gateway, client):
    for body, param in BAD:
        response = await client.post("/v1/chat/completions", content=body, headers=JSON)
        assert response.status_code == 400, (body, response.text)
        assert response.json()["error"]["param"] == param, body
        assert "x-reef-agent-record-id" not in response.headers
        assert not gateway.engine.asked
    assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200


async def test_malformed_json_has_a_position(client):
    response = await client.post("/v1/chat/completions", content=b'{\n"messages": [}', headers=JSON)
    assert "line 2, column 14" in response.json()["error"]["message"]


async def test_wrong_content_type(gateway, client):
    body = json.dumps(ASK)
    for kind, status in (
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
    ):
        response = await client.post("/v1/chat/completions", content=body, headers={"content-type": kind})
        assert response.status_code == status
    response = await client.post("/v1/chat/completions", content=body)
    assert response.status_code == 200


async def test_unsupported_encoding_lists_what_is(client):
    response = await client.post("/v1/chat/completions", content=b"x", headers={**JSON, "content-encoding": "lzma"})
    assert response.status_code == 415
    assert "gzip, deflate, br, zstd" in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate, br, zstd, identity"


async def test_body_of_65_mib(gateway, client):
    """case 16: over the limit, packed or not, it never reaches an engine."""
    big = b'{"messages": [{"role": "user", "content": "' + b"x" * (65 * 1024 * 1024) + b'"}]}'
    response = await client.post("/v1/chat/completions", content=big, headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    packed = await client.post(
        "/v1/chat/completions", content=gzip.compress(big, 1), headers={**JSON, "content-encoding": "gzip"}
    )
    assert packed.status_code == 413
    assert not gateway.engine.asked
    assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200


async def test_body_too_large_is_refused_before_it_is_sent(gateway):
    """A client that asks first (Expect: 100-continue) is spared the sending; one that does not say, at the limit."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t-all-rights\r\n"
        "content-type: application/json\r\n"
    )
    writer.write((head + "content-length: 99999999999\r\nexpect: 100-continue\r\n\r\n").encode())
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 2)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in answer
    writer.close()


async def test_chunked_body_over_the_limit(run, tmp_path):
    async def endless():
        for _ in range(200):
            yield b"x" * 10_000

    async with run(tmp_path, limits=Limits(body_bytes=100_000)) as gateway, gateway.client() as client:
        response = await client.post("/v1/chat/completions", content=endless(), headers=JSON)
        assert response.status_code == 413
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200


async def raw(gateway, data, *, until=b"}}"):
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        with_error = await asyncio.wait_for(reader.readuntil(until), 3)
    finally:
        writer.close()
    return with_error


@pytest.mark.parametrize(
    "headers",
    [
        b"x-big: " + b"s" * 170_000 + b"\r\n",
        b"".join(b"x-%d: CANARY\r\n" % place for place in range(10_000)),
        b"x-half: " + b"s" * 70_000,  # never ends
    ],
)
async def test_headers_too_large(gateway, headers, caplog):
    """case 16: 170 KB, 10,000 of them, or without an end: a 431 that says the limit, and a line without the secret."""
    top = b"GET /v1/models?key=CANARY HTTP/1.1\r\nhost: x\r\nauthorization: Bearer CANARY\r\n"
    answer = await raw(gateway, top + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "headers_too_large"
    assert "65536 bytes" in error["message"]
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("reef.gateway")]
    assert line.startswith("refused a request from 127.0.0.1: the headers are larger than 65536 bytes")
    assert "CANARY" not in caplog.text


async def test_a_body_too_large_leaves_a_line(run, tmp_path, caplog):
    """case 16: a 413 and a line with route and address, without anything of the request."""
    async with run(tmp_path, limits=Limits(body_bytes=1000)) as gateway, gateway.client() as client:
        big = {"messages": [{"role": "user", "content": "CANARY" * 1000}]}
        for _ in range(30):
            assert (await client.post("/v1/chat/completions?key=CANARY", json=big)).status_code == 413
    lines = [each for each in caplog.records if each.name == "reef.gateway.call"]
    assert 1 <= len(lines) < 30, "a flood of refusals is a flood of lines"
    assert lines[0].getMessage().startswith("refused /v1/chat/completions from 127.0.0.1: the body is larger than 1000")
    assert lines[0].route == "/v1/chat/completions"
    assert "CANARY" not in " ".join(each.getMessage() for each in lines)


async def test_large_headers_within_the_limit(gateway):
    """case 16: a 9 KB token works, and two 8 KB session ids that differ at their end are two sessions."""
    token = "t" * 9_000
    gateway.context.tokens.refresh([Grant("long", digest(token), RIGHTS, None, Quota(), None, 1.0, None, None)])
    sessions = []
    async with gateway.client(token) as client:
        for end in "aab":
            headers = {"x-reef-session": "s" * 8_000 + end}
            response = await client.post("/v1/chat/completions", json=ASK, headers=headers)
            assert response.status_code == 200
            sessions.append((await gateway.record(response.headers["x-reef-agent-record-id"])).session)
    assert sessions[0] == sessions[1] != sessions[2]
    assert [len(session) for session in sessions] == [512] * 3


async def test_not_http(gateway):
    answer = await raw(gateway, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_pipelined_requests_are_answered_in_order(gateway):
    one = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    two = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = await raw(gateway, one + two)
    assert answer.index(b" 200 ") < answer.index(b" 404 ")


async def test_too_many_at_once(run, tmp_path):
    from reef.engines.fake import FakeEngine

    async with (
        run(tmp_path, FakeEngine(delay=0.1), limits=Limits(concurrent=2)) as gateway,
        gateway.client(limits=httpx.Limits(max_connections=10)) as client,
    ):
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=ASK) for _ in range(6)))
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200, 200, 429, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"


async def test_a_bug_is_a_plain_500(gateway, client, monkeypatch, caplog):
    def broken(name):
        raise RuntimeError("secret-detail")

    monkeypatch.setattr(gateway.context.watch, "get", broken)
    response = await client.post("/v1/chat/completions", json=ASK)
    assert response.status_code == 500
    assert "secret-detail" not in response.text
    assert "secret-detail" in caplog.text


async def test_a_body_that_never_comes_is_408(gateway, monkeypatch):
    monkeypatch.setattr("reef.gateway.body.SLOW", 0.1)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t-all-rights\r\n"
    answer = await raw(gateway, head + b'content-length: 100\r\n\r\n{"messages')
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer


async def test_a_client_that_leaves_in_its_body_harms_nothing(gateway, client, caplog):
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t-all-rights\r\n"
    writer.write(head + b'content-length: 100\r\n\r\n{"messages')
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    assert not gateway.engine.asked
    assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
    assert "Traceback" not in caplog.text


async def test_no_torch_in_a_gateway():
    code = "import sys, reef.gateway.serve; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
