import asyncio
import gzip
import json
import zlib

import brotli
import httpx
import openai
import pytest
import zstandard

from reef.core.errors import BusyError, MissingError
from reef.engines.fake import FakeEngine, Fault


def ask(text="hello there", **fields):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def receipt_of(response):
    return response.headers["x-reef-agent-record-id"]


async def test_one_exchange_is_stored_before_its_answer_leaves(gateway, client):
    response = await client.post("/v1/chat/completions", json=ask(extra={"kept": 1}))
    assert response.status_code == 200
    receipt = receipt_of(response)
    release = gateway.board.get("default").release_id
    assert response.headers["x-request-id"] == receipt
    assert response.headers["x-reef-release-id"] == release
    assert response.headers["x-reef-scenario"] == "default"
    assert response.json()["id"] == f"chatcmpl-{receipt}"
    assert response.json()["choices"][0]["message"]["content"] == f"{release[:7]} heard: hello there"
    record = await gateway.record(receipt)
    assert (record.status, record.purpose, record.release_id) == ("complete", "live", release)
    assert json.loads(record.request)["extra"] == {"kept": 1}
    assert record.choices[0].output_ids
    assert record.choices[0].spans[0].release_id == release
    assert record.sampling.temperature == 1.0
    assert record.untrainable is None
    assert record.rendered is None
    assert record.usage.completion_tokens == 4
    assert record.timing.last > 0


async def test_founding_snippets(gateway):
    with httpx.Client(base_url=gateway.url, headers={"x-api-key": "t-all-rights"}) as client:

        def talk():
            response = client.post("/v1/chat/completions", json={"model": "x", "messages": ask()["messages"]})
            receipt = response.headers["x-reef-agent-record-id"]
            first = client.post("/reef/report", json={"feedback": "wrong answer", "references": [receipt]})
            second = client.post("/reef/report", json={"score": 1.0, "references": [receipt]})
            return first, second

        for response in await asyncio.to_thread(talk):
            assert response.status_code == 200
            assert response.json()["agent_record_id"].startswith("rep_")


async def test_openai_sdk(gateway):
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="t-all-rights", max_retries=0) as sdk:
        whole = await sdk.chat.completions.create(model="any", messages=ask()["messages"])
        assert whole.choices[0].finish_reason == "stop"
        raw = await sdk.chat.completions.with_raw_response.create(model="any", messages=ask()["messages"], stream=True)
        receipt = receipt_of(raw)
        text, finish = "", None
        async for chunk in raw.parse():
            assert len(chunk.choices) == 1
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        assert text == whole.choices[0].message.content
        assert finish == "stop"
        assert [model.id async for model in await sdk.models.list()] == ["fake"]
    record = await gateway.record(receipt)
    assert record.status == "complete"
    assert record.choices[0].text == text
    assert record.timing.first <= record.timing.last


async def test_stream_is_open_when_its_headers_come_and_takes_a_report(run, tmp_path):
    """case 15, case 25: a record from the first header on."""
    async with (
        run(tmp_path, FakeEngine(delay=0.05)) as gateway,
        gateway.client() as client,
        client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        receipt = receipt_of(response)
        record = await gateway.record(receipt)
        assert record.status == "open"
        assert record.owner == "gateway-1-test"
        reported = await client.post("/reef/report", json={"score": 0.5, "references": [f"chatcmpl-{receipt}"]})
        assert reported.status_code == 200
        body = (await response.aread()).decode()
        assert body.endswith("data: [DONE]\n\n")
        assert (await gateway.record(receipt)).status == "complete"  # at once: the end marker waited for it


async def test_stream_usage_only_when_asked(client):
    """case 2: none where it was not asked for."""
    plain = await client.post("/v1/chat/completions", json=ask(stream=True))
    asked = await client.post("/v1/chat/completions", json=ask(stream=True, stream_options={"include_usage": True}))
    assert b'"usage"' not in plain.content
    assert asked.content.count(b'"usage"') == 1
    assert b'"choices":[],"usage"' in asked.content


@pytest.mark.parametrize("kind", ["cut", "short"])
async def test_engine_that_breaks_off_drops_the_socket(gateway, client, kind):
    gateway.engine.faults.append(Fault(kind, at=2))
    pieces = []
    with pytest.raises(httpx.RemoteProtocolError):
        async with client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as response:
            receipt = receipt_of(response)
            async for piece in response.aiter_bytes():
                pieces.append(piece)
    assert b"[DONE]" not in b"".join(pieces)
    record = await gateway.closed(receipt)
    assert record.status == "interrupted"
    assert record.choices[0].text.startswith(record.release_id[:7] + " heard:")
    assert record.error
    assert record.untrainable == "the exchange ended interrupted"


@pytest.mark.parametrize("stream", [True, False])
async def test_refusing_engine_has_a_status_and_a_record(gateway, client, stream):
    gateway.engine.faults.append(Fault("refuse"))
    response = await client.post("/v1/chat/completions", json=ask(stream=stream))
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["code"] == "engine_error"
    record = await gateway.record(receipt_of(response))
    assert (record.status, record.error) == ("failed", "the engine refused; try again")
    assert (await client.post("/v1/chat/completions", json=ask(stream=stream))).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_over_long_prompt(gateway, client, stream):
    response = await client.post("/v1/chat/completions", json=ask("word " * 9000, stream=stream))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == "messages"
    assert (await gateway.record(receipt_of(response))).status == "rejected"


@pytest.mark.parametrize(
    ("route", "kind"), [("chat/completions", "rate_limit_error"), ("messages", "rate_limit_error")]
)
async def test_an_engine_that_is_too_busy_asks_to_come_again(gateway, client, monkeypatch, route, kind):
    async def busy(_):
        raise BusyError("64 new forms of answers wait to be compiled; try again later")
        yield

    monkeypatch.setattr(gateway.engine, "answer", busy)
    response = await client.post(f"/v1/{route}", json=ask(max_tokens=4))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == kind
    assert (await gateway.record(receipt_of(response))).status == "rejected"


@pytest.mark.parametrize("stream", [True, False])
async def test_provider_refusal_is_relayed(gateway, client, stream):
    gateway.engine.faults.append(Fault("status", status=429))
    response = await client.post("/v1/chat/completions", json=ask(stream=stream))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "30"
    assert response.headers["x-upstream-request-id"] == "up-1"
    assert response.json()["error"]["message"] == "status 429"
    record = await gateway.record(receipt_of(response))
    assert (record.status, record.upstream_id) == ("rejected", "up-1")


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_goes_away_stops_the_engine(gateway, client, stream):
    """case 14: also the engine in the process."""
    gateway.engine.faults.append(Fault("hang", at=3))
    if stream:
        async with client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as response:
            receipt = receipt_of(response)
            async for line in response.aiter_lines():
                if "hello" in line or "heard" in line:
                    break
    else:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=ask(), timeout=0.2)
        receipt = gateway.engine.asked[-1].receipt
    begun = asyncio.get_running_loop().time()
    while gateway.engine.stopped == 0:
        assert asyncio.get_running_loop().time() < begun + 1.0
        await asyncio.sleep(0.01)
    if not stream:
        await asyncio.sleep(0.2)
    record = await gateway.closed(receipt)
    assert record.status == "aborted"
    assert record.error == "the client went away"
    if stream:
        assert "heard" in record.choices[0].text
    reported = await client.post("/reef/report", json={"score": 0, "references": [receipt]})
    assert reported.status_code == 200


async def test_not_captured(gateway, client):
    for stream in (False, True):
        response = await client.post(
            "/v1/chat/completions", json=ask(stream=stream), headers={"x-reef-capture": "false"}
        )
        assert response.status_code == 200
        assert "x-reef-agent-record-id" not in response.headers
        assert "x-request-id" not in response.headers
        with pytest.raises(MissingError):
            await gateway.record(gateway.engine.asked[-1].receipt)
    response = await client.post("/v1/chat/completions", json=ask(), headers={"x-reef-capture": "no"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-reef-capture"


async def test_rules_of_the_served_release_join_the_request(gateway, client):
    before = await client.post("/v1/chat/completions", json=ask())
    release = gateway.publish_rules("Answer in French.")
    after = await client.post("/v1/chat/completions", json=ask())
    assert after.headers["x-reef-release-id"] == release
    record = await gateway.record(receipt_of(after))
    rendered = json.loads(record.rendered)
    assert rendered["messages"][0]["role"] == "system"
    assert "Answer in French." in rendered["messages"][0]["content"]
    assert gateway.engine.asked[-1].body == record.rendered
    assert json.loads(record.request) == ask()
    pinned = await client.post(
        "/v1/chat/completions", json=ask(), headers={"x-reef-release": before.headers["x-reef-release-id"][:12]}
    )
    record = await gateway.record(receipt_of(pinned))
    assert record.release_id == before.headers["x-reef-release-id"]
    assert (record.purpose, record.rendered) == ("evaluation", None)
    assert gateway.engine.asked[-1].priority == 1


async def test_pinning_needs_the_right_and_a_release_of_the_scenario(gateway, client):
    other = gateway.ensure("other", {}).release_id
    gateway.context.watch.refresh()
    gateway.publish_rules("only here", "other")
    head = gateway.board.get("other").release_id
    for pin, status in ((head, 404), ("0" * 40, 404), ("zz", 404)):
        response = await client.post("/v1/chat/completions", json=ask(), headers={"x-reef-release": pin})
        assert response.status_code == status, response.text
    headers = {"x-reef-scenario": "other", "x-reef-release": other}
    assert (await client.post("/v1/chat/completions", json=ask(), headers=headers)).status_code == 200
    async with gateway.client("t-infer") as weak:
        refused = await weak.post("/v1/chat/completions", json=ask(), headers=headers)
    assert refused.status_code == 403
    assert "operate" in refused.json()["error"]["message"]


async def test_session_and_tags(gateway, client):
    cases = [
        ({"x-reef-session": "a", "session-id": "b"}, {}, "a"),
        ({"x-reef-tag-session": "t"}, {}, "t"),
        ({"session_id": "c", "x-claude-code-session-id": "d"}, {"prompt_cache_key": "k"}, "c"),
        ({}, {"metadata": {"user_id": '{"session_id":"inner","account":"x"}'}}, "inner"),
        ({}, {"metadata": {"user_id": "user_1_account__session_0a1b2c3d-1"}}, "0a1b2c3d-1"),
        ({}, {"prompt_cache_key": "k"}, "k"),
        ({}, {}, None),
    ]
    for headers, fields, session in cases:
        response = await client.post("/v1/chat/completions", json=ask(**fields), headers=headers)
        assert (await gateway.record(receipt_of(response))).session == session
    headers = {"x-reef-tag-user": "u1", "x-claude-code-agent-id": "sub", "user-agent": "tester/1"}
    response = await client.post("/v1/chat/completions", json=ask(), headers=headers)
    record = await gateway.record(receipt_of(response))
    assert record.tags == {"user": "u1", "agent-id": "sub", "token": "owner"}
    assert record.client == "tester/1"
    assert "authorization" not in gateway.engine.asked[-1].headers


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data, wbits=-15)),
        ("br", brotli.compress),
        ("zstd", zstandard.compress),
        ("identity", bytes),
    ],
)
async def test_packed_bodies(gateway, client, name, pack):
    data = json.dumps(ask()).encode()
    headers = {"content-encoding": name, "content-type": "application/json"}
    response = await client.post("/v1/chat/completions", content=pack(data), headers=headers)
    assert response.status_code == 200, response.text
    assert (await gateway.record(receipt_of(response))).request == data
    broken = await client.post("/v1/chat/completions", content=pack(data)[:-4], headers=headers)
    assert broken.status_code == 400


async def test_scenarios_by_header_path_and_first_use(gateway, client):
    by_header = await client.post("/v1/chat/completions", json=ask(), headers={"x-reef-scenario": "new-one"})
    by_path = await client.post("/s/new-one/v1/chat/completions", json=ask())
    assert by_header.headers["x-reef-scenario"] == by_path.headers["x-reef-scenario"] == "new-one"
    assert gateway.chain.head("new-one").seq == 0
    wrong = await client.post("/s/new-one/v1/chat/completions", json=ask(), headers={"x-reef-scenario": "default"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-reef-scenario")
    bad = await client.post("/v1/chat/completions", json=ask(), headers={"x-reef-scenario": "No Name"})
    assert bad.status_code == 400
    together = await asyncio.gather(
        *(client.post("/s/many/v1/chat/completions", json=ask()) for _ in range(8)),
    )
    assert {response.status_code for response in together} == {200}
    assert len(gateway.chain.history("many")) == 1


async def test_scenarios_are_not_made_where_that_is_forbidden(run, tmp_path):
    async with run(tmp_path, create_scenarios=False) as gateway, gateway.client() as client:
        response = await client.post("/s/unknown/v1/chat/completions", json=ask())
        assert response.status_code == 404
        assert gateway.chain.head("unknown") is None
        assert (await client.post("/v1/chat/completions", json=ask())).status_code == 200


async def test_store_that_cannot_write_gives_503_and_no_receipt(gateway, client, monkeypatch):
    from reef.core.errors import StoreError

    async def full(entry):
        raise StoreError("the disk is full; free some space")

    monkeypatch.setattr(gateway.store, "append", full)
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json=ask(stream=stream))
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "x-reef-agent-record-id" not in response.headers
        assert response.json()["error"]["code"] == "store_unavailable"
    monkeypatch.undo()
    assert (await client.post("/v1/chat/completions", json=ask())).status_code == 200


async def test_end_marker_never_leaves_when_the_record_cannot_be_closed(gateway, client, monkeypatch):
    from reef.core.errors import StoreError

    append = gateway.store.append

    async def full(entry):
        if entry.status != "open":
            raise StoreError("the disk is full")
        return await append(entry)

    monkeypatch.setattr(gateway.store, "append", full)
    with pytest.raises(httpx.RemoteProtocolError):
        async with client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as response:
            receipt = receipt_of(response)
            async for piece in response.aiter_bytes():
                assert b"[DONE]" not in piece
    assert (await gateway.record(receipt)).status == "open"  # recovery closes it
