"""Rules and skills in requests of plain applications: opt-in, off per request, recorded, within a budget."""

import json

import pytest

from reef.engines.fake import FakeEngine
from reef.harness.apply import Wish
from reef.harness.tree import FILE, Entry, write
from reef.releases import Draft, NewPart

RULE = Entry("brief", "rules", {"text": "Be brief."})
SKILL = Entry("sql", "skill", {"name": "sql-style", "description": "How we write SQL queries.", "text": "Upper case."})
ASK = {"model": "m", "messages": [{"role": "user", "content": "Write an SQL query."}]}
OFF = {"x-reef-harness": "off"}


def publish(gateway, *entries):
    part = NewPart("tree", {FILE: write(entries)})
    head = gateway.chain.head("default")
    release = gateway.chain.publish("default", Draft("publish", {"harness": part}), head.id)
    gateway.board.flip("default", release.id)
    gateway.context.watch.refresh()
    return release.id


async def recorded(gateway, response):
    assert response.status_code == 200, response.text
    return await gateway.closed(response.headers["x-reef-agent-record-id"])


async def test_rules_and_a_skill_reach_the_engine_and_the_record(gateway, client):
    publish(gateway, RULE, SKILL)
    record = await recorded(gateway, await client.post("/v1/chat/completions", json=ASK))
    told = json.loads(record.rendered)["messages"][0]
    assert told["role"] == "system"
    assert "Be brief." in told["content"]
    assert "Upper case." in told["content"]
    assert record.tags["harness"] == "brief sql"
    assert json.loads(record.request) == ASK
    assert gateway.engine.asked[-1].body == record.rendered
    other = ASK | {"messages": [{"role": "user", "content": "Hello."}]}
    record = await recorded(gateway, await client.post("/v1/chat/completions", json=other))
    assert record.tags["harness"] == "brief"
    assert "Upper case." not in record.rendered.decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_off_applies_nothing(gateway, client, stream):
    publish(gateway, RULE, SKILL)
    body = ASK | {"stream": stream}
    record = await recorded(gateway, await client.post("/v1/chat/completions", json=body, headers=OFF))
    assert record.rendered is None
    assert "harness" not in record.tags
    record = await recorded(gateway, await client.post("/v1/chat/completions", json=body))
    assert b"Be brief." in record.rendered
    assert record.tags["harness"] == "brief sql"


async def test_off_is_all_it_can_be(gateway, client):
    for value in ("on", "false", ""):
        response = await client.post("/v1/chat/completions", json=ASK, headers={"x-reef-harness": value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-reef-harness"
        assert "off" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 50, "messages": ASK["messages"]}),
        ("/v1/responses", {"input": "Write an SQL query."}),
        ("/v1/responses", {"input": [{"role": "user", "content": "Write an SQL query."}]}),
    ],
)
async def test_other_dialects_get_the_same(gateway, client, path, body):
    publish(gateway, RULE, SKILL)
    record = await recorded(gateway, await client.post(path, json={"model": "m", **body}))
    assert record.tags["harness"] == "brief sql"
    assert b"Upper case." in record.rendered


async def test_a_count_of_tokens_counts_them(gateway, client):
    body = {"model": "m", "messages": ASK["messages"]}
    before = (await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    publish(gateway, RULE, SKILL)
    after = (await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    plain = (await client.post("/v1/messages/count_tokens", json=body, headers=OFF)).json()["input_tokens"]
    assert after > before == plain
    gateway.engine.dialects = frozenset({"chat"})  # one that cannot count: the estimate knows of them, too
    estimated = (await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    assert estimated > (await client.post("/v1/messages/count_tokens", json=body, headers=OFF)).json()["input_tokens"]


async def test_a_scenario_that_does_not_wish_it_is_left_alone_until_it_does(run, tmp_path):
    wishes = {"default": Wish()}
    async with run(tmp_path, FakeEngine(), wish=lambda name: wishes[name]) as gateway, gateway.client() as client:
        publish(gateway, RULE, SKILL)
        record = await recorded(gateway, await client.post("/v1/chat/completions", json=ASK))
        assert (record.rendered, record.tags) == (None, {"token": "owner"})
        wishes["default"] = Wish(apply=True, skills=0)
        record = await recorded(gateway, await client.post("/v1/chat/completions", json=ASK))
        assert record.tags["harness"] == "brief"
        wishes["default"] = Wish(apply=True)
        record = await recorded(gateway, await client.post("/v1/chat/completions", json=ASK))
        assert record.tags["harness"] == "brief sql"


async def test_what_has_no_room_is_told_and_counted(run, tmp_path):
    long = Entry("long", "rules", {"text": "word " * 500})
    async with run(tmp_path, FakeEngine(), wish=lambda name: Wish(True, 3, 20)) as gateway, gateway.client() as client:
        publish(gateway, RULE, long)
        for _ in range(2):
            record = await recorded(gateway, await client.post("/v1/chat/completions", json=ASK))
        assert (record.tags["harness"], record.tags["harness-left-out"]) == ("brief", "1")
        page = (await client.get("/metrics")).text
        assert 'reef_left_out_total{scenario="default"} 2.0' in page
        publish(gateway, long)  # nothing fits: the request goes as it came, and its record says why
        record = await recorded(gateway, await client.post("/v1/chat/completions", json=ASK))
        assert record.rendered is None
        assert record.tags["harness-left-out"] == "1"


async def test_many_rules_are_a_number_in_the_tag(gateway, client):
    rules = [Entry(f"rule-with-a-long-name-{n:04}", "rules", {"text": f"Rule {n}."}) for n in range(40)]
    publish(gateway, SKILL, *rules)
    record = await recorded(gateway, await client.post("/v1/chat/completions", json=ASK))
    assert record.tags["harness"] == "rules:40 sql"
    publish(gateway, *rules[:4])
    record = await recorded(gateway, await client.post("/v1/chat/completions", json=ASK))
    assert record.tags["harness"].split() == [rule.id for rule in rules[:4]]
