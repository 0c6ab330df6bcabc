"""case 33: a secret that is put anywhere never comes back in a log line, a log file, a metric or an error.

Each test hides a canary of its own in one place and looks everywhere. The answer to a prompt and its record may hold
the prompt, of course; an error may repeat a name (a scenario, a release, a field) to the client that sent it, which is
what makes it useful, but no log line or metric does.
"""

import asyncio
import json
import logging
import sqlite3

import httpx
import pytest
from aiohttp import web

from reef.cli.logs import EXTRA, Lines, Log
from reef.engines.upstream import UpstreamEngine
from reef.records import Query
from reef.records.sqlite import SqliteStore
from reef.records.tokens import RIGHTS, Grant, Quota, digest

CANARY = "CANARY0b5e7c1d9f2a48e6"
KEY = "KEY7CANARY0b5e7c1d9f2a48e6"
ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"
HEADERS = (
    "x-reef-session", "x-reef-tag-team", "x-session-id", "user-agent", "cookie", "proxy-authorization", "x-custom",
    "x-codex-turn-metadata", "openai-organization", "anthropic-beta", "x-reef-capture", "accept", "origin", "expect",
    "x-forwarded-for", "referer", "x-request-id", "traceparent", "host",
)  # fmt: skip
GOOD = {
    "id": "x",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
}


class Provider:
    """A provider that answers with what the script says, and repeats whatever it got: headers, query and body."""

    script = "good"

    async def answer(self, request):
        body = await request.text()
        seen = json.dumps({"error": {"message": f"bad: {dict(request.headers)} {request.query_string} {body}"}})
        if self.script == "good":
            return web.json_response(GOOD)
        if self.script == "nonsense":
            return web.Response(text=seen + "}{", content_type="application/json")
        if self.script in ("cut", "in-band"):
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n')
            if self.script == "in-band":
                await response.write(f"data: {seen}\n\n".encode())
            else:
                await response.write(f"data: {seen[:-1]}".encode())
                request.transport.abort()
            return response
        status = int(self.script)
        return web.Response(status=status, text=seen, content_type="application/json", headers={"x-echo": KEY})


class Watched:
    """Everything that could tell: the log's lines, the log file, the terminal, pages and errors."""

    def __init__(self, gateway, provider, folder, client=None):
        self.gateway, self.provider, self.client = gateway, provider, client
        self.file = Log(folder, "gateway")
        self.folder = folder
        self.lines = []
        self.answers = []

    def handle(self, record):
        if record.name.partition(".")[0] in ("httpx", "httpcore", "asyncio"):  # this test's own client
            return
        line = Lines().format(record)
        extra = {name: getattr(record, name, None) for name in EXTRA}
        self.lines.append(f"{line} {record.__dict__['args']} {extra}")
        self.file.line(line)

    async def send(self, method, path, *, token="s-operator", headers=None, **more):
        sent = {"authorization": f"Bearer {token}"} if token else {}
        try:
            answer = await self.client.request(method, path, headers=sent | (headers or {}), **more)
        except httpx.HTTPError:  # broken off, as it should be for a stream that was
            return None
        self.answers.append(answer)
        return answer

    async def check(self, capfd, *, errors=True, canaries=(CANARY, KEY)):
        page = await self.send("GET", "/metrics")
        assert page.status_code == 200
        shown = capfd.readouterr()
        told = {
            "a log line": "\n".join(self.lines),
            "the log file": "".join(path.read_text() for path in self.folder.glob("*.log")),
            "the terminal": shown.out + shown.err,
            "a metric": page.text,
        }
        for number, answer in enumerate(self.answers):
            if errors and answer.status_code >= 400:
                told[f"error {number}: {answer.status_code}"] = answer.text + str(answer.headers)
            elif answer.status_code >= 400:
                told[f"the headers of error {number}"] = str(answer.headers)
        for canary in canaries:
            for place, text in told.items():
                assert canary.lower() not in text.lower(), f"{canary} is in {place}: {text[:2000]}"


@pytest.fixture
async def watched(run, tmp_path):
    provider = Provider()
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", provider.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    logs = tmp_path / "logs"
    logs.mkdir()
    engine = UpstreamEngine(url, key=KEY, idle=0.5, retries=1, pause=0.01)
    async with run(tmp_path / "state", engine) as gateway, gateway.client(token=None) as client:
        made = Watched(gateway, provider, logs, client)
        grants = [
            ("operator", "s-operator", None, None),
            ("right", f"right-{CANARY}", None, None),
            ("expired", f"expired-{CANARY}", 5.0, None),
            ("revoked", f"revoked-{CANARY}", None, 5.0),
        ]
        gateway.context.tokens.refresh(
            Grant(name, digest(secret), RIGHTS, None, Quota(), None, 1.0, expires, revoked)
            for name, secret, expires, revoked in grants
        )
        handler = logging.Handler(logging.DEBUG)
        handler.emit = made.handle
        root = logging.getLogger()
        before = root.level
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        yield made
        root.removeHandler(handler)
        root.setLevel(before)
    await runner.cleanup()


def test_the_search_finds_what_is_there(tmp_path):
    """The test's own eyes: a line with the canary as argument, extra or trace is seen."""
    made = Watched(None, None, tmp_path)
    try:
        raise ValueError(CANARY)
    except ValueError as error:
        told = (type(error), error, error.__traceback__)
    for more in ({"args": (CANARY,), "msg": "%s"}, {"msg": "", "receipt": CANARY}, {"msg": "", "exc_info": told}):
        made.lines.clear()
        made.handle(logging.makeLogRecord({"name": "reef", "levelname": "INFO"} | more))
        assert CANARY in made.lines[0]
    assert CANARY in (tmp_path / "gateway.log").read_text()


@pytest.mark.parametrize("kind", ["right", "wrong", "expired", "revoked"])
async def test_in_a_token(watched, capfd, kind):
    secret = f"{kind}-{CANARY}"
    for header in ("Bearer {}", "Basic {}", "{}", "x-api-key"):
        headers = {"x-api-key": secret} if header == "x-api-key" else {"authorization": header.format(secret)}
        before = len(watched.answers)
        for method, path, body in (
            ("POST", CHAT, ASK),
            ("POST", CHAT, {}),
            ("POST", "/v1/messages", ASK | {"max_tokens": 5}),
            ("GET", "/reef/status", None),
            ("GET", "/reef/scenarios/default/records", None),
            ("GET", "/nowhere", None),
        ):
            await watched.send(method, path, token=None, headers=headers, json=body)
        good = kind == "right" and header in ("Bearer {}", "x-api-key")
        codes = [answer.status_code for answer in watched.answers[before : before + 2]]
        assert codes == ([200, 400] if good else [401, 401])
    await watched.check(capfd)


@pytest.mark.parametrize("token", ["s-operator", "wrong"])
async def test_in_a_query(watched, capfd, token):
    for method, path in (
        ("GET", f"/reef/status?token={CANARY}"),
        ("GET", f"/reef/scenarios/default/records?limit={CANARY}"),
        ("GET", f"/reef/scenarios/default/records?status={CANARY}"),
        ("GET", f"/reef/scenarios/default/records?after={CANARY}"),
        ("GET", f"/v1/models?limit={CANARY}"),
        ("GET", f"/nowhere?key={CANARY}"),
        ("DELETE", f"{CHAT}?key={CANARY}"),
    ):
        await watched.send(method, path, token=token)
    for script in ("good", "401", "500", "504"):
        watched.provider.script = script
        await watched.send("POST", f"{CHAT}?key={CANARY}", token=token, json=ASK)
        await watched.send("POST", f"{CHAT}?{CANARY}", token=token, json=ASK)
    await watched.check(capfd)


@pytest.mark.parametrize("token", ["s-operator", "wrong"])
async def test_in_a_path_that_leads_nowhere(watched, capfd, token):
    for method, path in (
        ("GET", f"/{CANARY}"),
        ("GET", f"/v1/{CANARY}/x"),
        ("GET", f"/reef/{CANARY}"),
        ("GET", f"/s/default/{CANARY}"),
        ("DELETE", f"/v1/models/{CANARY}"),
    ):
        assert (await watched.send(method, path, token=token)).status_code in (401, 404, 405)
    await watched.check(capfd)


@pytest.mark.parametrize("token", ["s-operator", "wrong"])
async def test_in_a_name(watched, capfd, token):
    """A name may come back to the client that sent it; nobody else reads it."""
    name = CANARY.lower()
    for method, path, headers in (
        ("POST", f"/s/{name}x/reef/report", {}),
        ("POST", f"/s/{CANARY}{CHAT}", {}),
        ("GET", f"/v1/models/{CANARY}", {}),
        ("GET", f"/v1/responses/{CANARY}", {}),
        ("GET", f"/reef/scenarios/{name}", {}),
        ("GET", f"/reef/scenarios/{name}/records", {}),
        ("GET", f"/reef/scenarios/default/reports?{CANARY}=1", {}),
        ("GET", f"/reef/scenarios/default/records/{CANARY}", {}),
        ("GET", f"/reef/scenarios/default/releases/{CANARY}", {}),
        ("GET", f"/reef/scenarios/default/releases?after={CANARY}", {}),
        ("POST", f"/reef/scenarios/{name}/rollback", {}),
        ("POST", CHAT, {"x-reef-scenario": CANARY}),
        ("POST", CHAT, {"x-reef-release": CANARY}),
        ("POST", CHAT, {"content-encoding": CANARY}),
        ("POST", CHAT, {"content-type": CANARY}),
    ):
        answer = await watched.send(method, path, token=token, headers=headers, json=ASK if method == "POST" else None)
        assert answer.status_code >= 400, path
    await watched.check(capfd, errors=False)


def asks():
    prompt = ASK | {"messages": [{"role": "user", "content": f"my key is {CANARY}"}]}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "c1", "content": f"env: {CANARY}"}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": CANARY}]}
    yield CHAT, prompt
    yield CHAT, ASK | {"messages": [*ASK["messages"], asked, tool]}
    yield CHAT, ASK | {"tools": [{"type": "function", "function": {"name": "f", "description": CANARY}}]}
    yield "/v1/messages", prompt | {"max_tokens": 5}
    yield "/v1/messages", ASK | {"max_tokens": 5, "messages": [*ASK["messages"], used, result]}
    yield "/v1/responses", {"model": "m", "input": f"my key is {CANARY}"}


@pytest.mark.parametrize("script", ["good", "nonsense", "cut", "401", "500", "504"])
async def test_in_what_is_asked(watched, capfd, script):
    """A provider that fails is Reef's to report, without a word of what it said (a refusal, 4xx, is the client's)."""
    watched.provider.script = script
    for path, body in asks():
        for stream in (False, True):
            await watched.send("POST", path, json=body | {"stream": stream})
    await watched.check(capfd)


@pytest.mark.parametrize("script", ["400", "422", "429", "in-band"])
async def test_in_what_a_provider_refuses(watched, capfd, script):
    """Its words are the client's to read, who sent what is in them; nobody else reads them."""
    watched.provider.script = script
    for path, body in asks():
        for stream in (False, True):
            await watched.send("POST", path, json=body | {"stream": stream})
    assert script == "in-band" or {answer.status_code for answer in watched.answers} == {int(script)}
    await watched.check(capfd, errors=False)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_the_providers_key_in_its_error(watched, capfd, path):
    """A provider that repeats the key it was sent: in a refusal of any kind."""
    for script in ("400", "401", "402", "403", "404", "409", "413", "422", "500", "529"):
        watched.provider.script = script
        for stream in (False, True):
            answer = await watched.send("POST", path, json=ASK | {"max_tokens": 5, "stream": stream})
            assert answer.status_code >= 400
    await watched.check(capfd)


async def test_the_providers_key_in_its_stream(watched, capfd):
    for script in ("in-band", "cut", "nonsense"):
        watched.provider.script = script
        for stream in (False, True):
            answer = await watched.send("POST", CHAT, json=ASK | {"stream": stream})
            assert answer is None or KEY not in answer.text
    await watched.check(capfd)


async def test_in_a_header(watched, capfd):
    for script in ("good", "500"):
        watched.provider.script = script
        for name in HEADERS:
            await watched.send("POST", CHAT, headers={name: CANARY}, json=ASK)
    for name in HEADERS:
        await watched.send("GET", "/reef/status", headers={name: CANARY})
    await watched.check(capfd)


async def test_in_a_body_that_is_wrong(watched, capfd):
    for data in (
        f'{{"{CANARY}": ',
        f'{{"messages": "{CANARY}"}}',
        f'{{"messages": [{{"role": "user", "content": "{CANARY}"}}], "max_tokens": "{CANARY}"}}',
        f'{{"messages": ["{CANARY}"]}}',
        f'{{"messages": [{{"content": "{CANARY}"}}]}}',
        f'{{"model": ["{CANARY}"], "messages": [{{"role": "user", "content": ""}}]}}',
        f'"{CANARY}"',
        f"{CANARY}",
        f"\xff{CANARY}",
        f'{{"messages": [{{"role": "user", "content": "\\ud800{CANARY}"}}]}}',
        f'{{"messages": [{{"role": "user", "content": "{CANARY}"}}], "stream": "{CANARY}"}}',
        f'{{"feedback": "{CANARY}", "references": 5}}',
        f'{{"demonstration": ["{CANARY}"], "references": ["{"0" * 32}"]}}',
        f'{{"score": 1, "metadata": {{"a": "{CANARY}"}}, "references": ["{"0" * 32}"]}}',
    ):
        for path in (CHAT, "/v1/messages", "/v1/responses", "/v1/embeddings", "/reef/report", "/reef/scenarios"):
            headers = {"content-type": "application/json"}
            await watched.send("POST", path, headers=headers, content=data.encode("latin-1"))
    await watched.check(capfd)


@pytest.mark.parametrize("script", ["good", "400", "401", "500", "in-band", "cut"])
async def test_on_disk(watched, capfd, script):
    """The state folder, from which data sets are made, has neither the tokens that came nor the provider's key."""
    watched.provider.script = script
    right = {"authorization": f"Bearer right-{CANARY}", "cookie": f"c={CANARY}", "proxy-authorization": CANARY}
    for path, body in ((CHAT, ASK), ("/v1/messages", ASK | {"max_tokens": 5})):
        for stream in (False, True):
            await watched.send("POST", path, token=None, headers=right, json=body | {"stream": stream})
    await watched.check(capfd)
    await watched.gateway.store.close()
    files = [path for path in watched.gateway.state.rglob("*") if path.is_file()]
    assert any(path.name == "records.db" for path in files)
    with sqlite3.connect(watched.gateway.state / "records.db") as db:
        assert db.execute("SELECT count(*) FROM records").fetchone()[0] == 4
        said = repr([db.execute(f"SELECT * FROM {name}").fetchall() for name in ("records", "tags")])
    store = SqliteStore(watched.gateway.state / "records.db", owner="checker-0-0")
    await store.start()
    said += repr([entry for _, entry in await store.find(Query("default"))])  # with what is packed
    await store.close()
    for canary in (CANARY, KEY):
        assert canary not in said
        for path in files:
            assert canary.encode() not in path.read_bytes(), f"{canary} is in {path.name}"


async def test_when_the_store_fails(watched, capfd):
    """What fails inside is logged, without what was in the request."""
    await watched.gateway.store.close()
    for path in (f"{CHAT}?key={CANARY}", f"/s/default{CHAT}"):
        await watched.send("POST", path, json=ASK | {"messages": [{"role": "user", "content": CANARY}]})
    await watched.send("GET", "/reef/scenarios/default/records/" + "0" * 32 + f"?{CANARY}")
    assert {answer.status_code for answer in watched.answers} == {503}
    await watched.check(capfd)


async def test_when_the_client_sends_no_http(watched, capfd):
    for data in (
        f"GET /{CANARY} HTTP/9.9\r\n\r\n",
        f"{CANARY}\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {CANARY}\r\n\r\n",
        f"GET / HTTP/1.1\r\nhost: a\r\n{CANARY}\r\n\r\n",
        f"GET /{CANARY * 4000} HTTP/1.1\r\nhost: a\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {CANARY}\r\ntransfer-encoding: chunked\r\n\r\n"
        f"{CANARY}\r\n",
    ):
        reader, writer = await asyncio.open_connection(*watched.gateway.url.removeprefix("http://").split(":"))
        writer.write(data.encode())
        try:
            async with asyncio.timeout(2):
                answer = await reader.read()
        except (ConnectionError, TimeoutError):
            answer = b""
        assert CANARY.encode() not in answer
        writer.close()
    await watched.check(capfd)
