"""Responses and Messages in front of an engine that speaks chat only, and what is recorded of them."""

import dataclasses
import json

import pytest

from reef.engines.fake import FakeEngine, Fault
from reef.gateway.context import Limits
from reef.records import Query

HELLO = {
    "model": "m",
    "max_tokens": 50,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "hello there"}],
}
GREET = {"model": "m", "instructions": "Be brief.", "input": "hello there"}
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses"}
BODIES = {"messages": HELLO, "responses": GREET}
PREFIX = {"messages": "msg_", "responses": "resp_"}
REQUEST_ID = {"messages": "request-id", "responses": "x-request-id"}
ENDS = {"messages": "message_stop", "responses": "response.completed"}


def events(text):
    """(event name, data) of each event of a stream."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def receipt_of(response):
    return response.headers["x-reef-agent-record-id"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_an_exchange_in_another_dialect(gateway, client, dialect, stream):
    sent = json.dumps(BODIES[dialect] | {"stream": stream, "extra": [1, 2]}, indent=1).encode()
    response = await client.post(PATHS[dialect], content=sent, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    receipt = receipt_of(response)
    assert response.headers[REQUEST_ID[dialect]] == receipt
    if stream:
        found = events(response.text)
        assert found[-1][0] == ENDS[dialect]
        first = found[0][1]["message" if dialect == "messages" else "response"]
        assert first["id"] == PREFIX[dialect] + receipt
    else:
        assert response.json()["id"] == PREFIX[dialect] + receipt
    record = await gateway.record(receipt)
    assert (record.dialect, record.status, record.request) == (dialect, "complete", sent)
    asked = json.loads(record.rendered)
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert record.choices[0].text.endswith("hello there")
    assert record.choices[0].output_ids, "tokens are kept: the exchange can train"
    assert record.untrainable is None
    assert record.usage.completion_tokens > 0
    assert json.loads(record.reply)["id"] == PREFIX[dialect] + receipt
    assert record.timing.queued <= record.timing.first <= record.timing.last
    report = await client.post("/reef/report", json={"score": 1, "references": [PREFIX[dialect] + receipt]})
    assert report.status_code == 200, report.text


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_rules_reach_the_engine(gateway, client, dialect):
    gateway.publish_rules("Answer in Latin.")
    response = await client.post(PATHS[dialect], json=BODIES[dialect])
    asked = json.loads((await gateway.record(receipt_of(response))).rendered)
    assert "Answer in Latin." in asked["messages"][0]["content"]
    assert "Be brief." in asked["messages"][0]["content"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_errors_in_anthropics_form(run, tmp_path, stream):
    async with run(tmp_path, FakeEngine(context=8)) as gateway, gateway.client() as client:
        long = HELLO | {"messages": [{"role": "user", "content": "word " * 20}], "stream": stream}
        response = await client.post("/v1/messages", json=long)
        assert response.status_code == 400
        body = response.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["request_id"] == receipt_of(response) == response.headers["request-id"]
        assert "shorten" in body["error"]["message"]
        gateway.engine.faults.append(Fault("status", status=429))
        response = await client.post("/v1/messages", json=HELLO | {"stream": stream})
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert response.headers["retry-after"] == "30"


async def test_an_over_long_prompt_in_openais_form(run, tmp_path):
    async with run(tmp_path, FakeEngine(context=8)) as gateway, gateway.client() as client:
        response = await client.post("/v1/responses", json=GREET | {"input": "word " * 20})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_broken_stream_of_messages_ends_with_its_error_event(gateway, client):
    gateway.engine.faults.append(Fault("cut", at=2))
    response = await client.post("/v1/messages", json=HELLO | {"stream": True})
    name, data = events(response.text)[-1]
    assert (name, data["error"]["type"]) == ("error", "overloaded_error")
    record = await gateway.closed(receipt_of(response))
    assert record.status == "interrupted"
    assert record.untrainable


async def test_a_broken_stream_of_responses_drops_the_socket(gateway, client):
    gateway.engine.faults.append(Fault("cut", at=2))
    with pytest.raises(Exception, match=r"peer closed|incomplete"):
        await client.post("/v1/responses", json=GREET | {"stream": True})


async def test_a_response_is_continued_and_fetched(gateway, client):
    first = await client.post("/v1/responses", json=GREET)
    second = await client.post(
        "/v1/responses", json={"input": "and again", "previous_response_id": first.json()["id"], "stream": True}
    )
    done = events(second.text)[-1][1]["response"]
    third = await client.post("/v1/responses", json={"input": "a third", "previous_response_id": done["id"]})
    asked = json.loads((await gateway.record(receipt_of(third))).rendered)["messages"]
    # Instructions are each request's own; what was said goes on.
    assert [message["role"] for message in asked] == ["user", "assistant"] * 2 + ["user"]
    assert [asked[place]["content"] for place in (0, 2, 4)] == ["hello there", "and again", "a third"]
    for response, body in ((first, first.json()), (third, third.json())):
        fetched = await client.get(f"/v1/responses/{body['id']}")
        assert fetched.json() == body
        assert receipt_of(fetched) == receipt_of(response)
    assert (await client.get(f"/v1/responses/{done['id']}")).json() == done


async def test_a_response_is_there_on_another_worker_at_once(gateway, client, run):
    async with run(gateway.state) as other, other.client() as there:
        for _ in range(20):
            body = (await client.post("/v1/responses", json=GREET)).json()
            assert (await there.get(f"/v1/responses/{body['id']}")).json() == body


async def test_responses_that_cannot_be_continued(gateway, client):
    unstored = await client.post("/v1/responses", json=GREET | {"store": False})
    other = await client.post("/v1/responses", json=GREET, headers={"x-reef-scenario": "other"})
    chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    for wanted in (
        unstored.json()["id"],
        other.json()["id"],
        f"resp_{receipt_of(chat)}",
        "resp_" + "0" * 32,
        "resp_none",
        "",
    ):
        response = await client.post("/v1/responses", json={"input": "x", "previous_response_id": wanted})
        assert response.status_code == 400, wanted
        assert response.json()["error"]["code"] == "previous_response_not_found"
        if wanted:
            assert (await client.get(f"/v1/responses/{wanted}")).status_code == 404


async def test_a_conversation_that_goes_in_a_circle_is_refused(gateway, client):
    first = (await client.post("/v1/responses", json=GREET)).json()
    record = await gateway.record(first["id"].removeprefix("resp_"))
    circle = dataclasses.replace(
        record,
        id="0" * 32,
        answer_id="resp_l",
        request=json.dumps(GREET | {"previous_response_id": "resp_l"}).encode(),
        prompt_ids=None,
        choices=(),
    )
    odd = dataclasses.replace(circle, id="1" * 32, answer_id="resp_odd", request=b"[1]", reply=b"7")
    await gateway.store.append(circle)
    await gateway.store.append(odd)
    response = await client.post("/v1/responses", json={"input": "x", "previous_response_id": "resp_l"})
    assert response.status_code == 400
    assert "circle" in response.json()["error"]["message"]
    assert (await client.post("/v1/responses", json={"input": "x", "previous_response_id": "resp_odd"})).is_success
    assert (await client.get("/v1/responses/resp_odd")).status_code == 200


async def test_a_conversation_that_is_too_long_is_refused(run, tmp_path):
    async with run(tmp_path, limits=Limits(drain_seconds=5, body_bytes=4000)) as gateway, gateway.client() as client:
        last = None
        for _ in range(10):
            response = await client.post("/v1/responses", json=GREET | {"previous_response_id": last})
            if not response.is_success:
                break
            last = response.json()["id"]
    assert response.status_code == 400
    assert "too long" in response.json()["error"]["message"]


async def test_another_scenarios_conversation_is_not_continued_by_its_provider(run, tmp_path):
    engine = FakeEngine()
    async with run(tmp_path, engine) as gateway, gateway.client() as client:
        first = await client.post("/v1/responses", json=GREET, headers={"x-reef-scenario": "theirs"})
        record = await gateway.record(receipt_of(first))
        theirs = dataclasses.replace(record, id="0" * 32, answer_id="resp_provider", prompt_ids=None, choices=())
        await gateway.store.append(theirs)
        engine.dialects = frozenset({"chat", "responses"})
        wanted = {"input": "x", "previous_response_id": "resp_provider", "messages": HELLO["messages"]}
        response = await client.post("/v1/responses", json=wanted)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "previous_response_not_found"
        unknown = await client.post("/v1/responses", json=wanted | {"previous_response_id": "resp_new"})
        assert unknown.is_success, "the provider's own: it knows"


async def test_an_engine_that_speaks_neither_dialect_nor_chat(run, tmp_path):
    engine = FakeEngine()
    engine.dialects = frozenset({"messages"})
    async with run(tmp_path, engine) as gateway, gateway.client() as client:
        response = await client.post("/v1/responses", json=GREET)
        assert response.status_code == 400
        assert "does not speak responses" in response.json()["error"]["message"]


async def test_counting_leaves_no_record(gateway, client):
    body = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    response = await client.post("/v1/messages/count_tokens?beta=true", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] > 0
    assert "x-reef-agent-record-id" not in response.headers
    assert await gateway.store.find(Query("default")) == []


async def test_an_engine_that_cannot_count_says_that_it_guesses(run, tmp_path):
    engine = FakeEngine()
    engine.dialects = frozenset({"chat"})
    async with run(tmp_path, engine) as gateway, gateway.client() as client:
        response = await client.post("/v1/messages/count_tokens", json=HELLO)
    assert response.headers["x-reef-estimated"] == "true"
    assert 1 <= response.json()["input_tokens"] < 100


async def test_embeddings_need_an_engine_that_has_them(client):
    response = await client.post("/v1/embeddings", json={"input": "x", "model": "m"})
    assert response.status_code == 404
    assert "embeddings" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {"max_tokens": 5}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
        ("/v1/messages", HELLO | {"max_tokens": 0}, "max_tokens"),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [1]}, "input[0]"),
        ("/v1/responses", GREET | {"stream": "yes"}, "stream"),
        ("/v1/responses", GREET | {"background": True}, "background"),
        ("/v1/embeddings", {}, "input"),
    ],
)
async def test_wrong_fields_are_named(client, path, body, param):
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert param in response.json()["error"]["message"]


async def test_below_a_scenarios_path(gateway, client):
    response = await client.post("/s/other/v1/messages?beta=true", json=HELLO)
    assert response.headers["x-reef-scenario"] == "other"
    assert (await gateway.record(receipt_of(response))).scenario == "other"


async def test_chat_to_an_engine_without_chat_is_refused(run, tmp_path):
    engine = FakeEngine()
    engine.dialects = frozenset({"messages"})
    async with run(tmp_path, engine) as gateway, gateway.client() as client:
        response = await client.post("/v1/chat/completions", json={"messages": HELLO["messages"]})
    assert response.status_code == 400
    assert "own route" in response.json()["error"]["message"]
