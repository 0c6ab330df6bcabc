"""Who gets whose answer, and what counts as order when clocks and ids cannot be trusted."""

import asyncio
import json
import time

import pytest

from reef.engines.fake import FakeEngine
from reef.records.tokens import Grant, Quota, digest
from tests.gateway.conftest import TOKEN, running
from tests.gateway.test_imports import build, build_report, lines, send

ASK = {"model": "m", "messages": [{"role": "user", "content": "the very same prompt"}]}
PATHS = {
    "/v1/chat/completions": ASK,
    "/v1/messages": ASK | {"max_tokens": 50},
    "/v1/responses": {"model": "m", "input": "the very same prompt"},
}
RECEIPT = "x-reef-agent-record-id"


def grant(name, scenario, release=None):
    rights = frozenset({"infer", "report"})
    return Grant(name, digest(f"s-{name}"), rights, (scenario,), Quota(), release, 1.0, None, None)


@pytest.fixture
async def shared(tmp_path):
    """Two tenants with a scenario each, of which one serves another release than the other."""
    engine = FakeEngine(reply=lambda release, body: f"said by {release}", delay=0.001)
    async with running(tmp_path, engine) as gateway:
        for name in ("red", "blue"):
            gateway.ensure(name, {})
        gateway.publish_rules("Be blue.", "blue")
        gateway.context.tokens.refresh([grant("red", "red"), grant("blue", "blue")])
        yield gateway


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_the_same_prompt_of_many(shared, path, stream):
    """case 31: two tokens, scenarios, releases, at the same time: each gets its own, no receipt twice."""
    serving = {name: shared.context.watch.get(name).release_id for name in ("red", "blue")}
    assert serving["red"] != serving["blue"]
    body = PATHS[path] | {"stream": stream}
    async with shared.client("s-red") as red, shared.client("s-blue") as blue:
        asked = [(name, client) for _ in range(15) for name, client in (("red", red), ("blue", blue))]
        answers = await asyncio.gather(*(client.post(f"/s/{name}{path}", json=body) for name, client in asked))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers[RECEIPT] for answer in answers}) == len(answers) == len(shared.engine.asked)
    for (name, _), answer in zip(asked, answers, strict=True):
        record = await shared.record(answer.headers[RECEIPT])
        assert record.scenario == answer.headers["x-reef-scenario"] == name
        assert record.release_id == answer.headers["x-reef-release-id"] == serving[name]
        assert record.choices[0].text == f"said by {serving[name]}"
        if not stream:
            assert f"said by {serving[name]}" in answer.text
    for asked in shared.engine.asked:  # a release's rules reach its own requests only
        assert ("Be blue." in asked.body.decode()) == (asked.release_id == serving["blue"])


async def test_the_same_prompt_before_and_after_a_release(shared):
    """case 31: what one release said is never the answer of the next."""
    async with shared.client("s-red") as red:
        before = await red.post("/s/red/v1/chat/completions", json=ASK)
        second = shared.publish_rules("Be brief.", "red")
        after = await red.post("/s/red/v1/chat/completions", json=ASK)
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in (before, after)]
    assert texts == [f"said by {before.headers['x-reef-release-id']}", f"said by {second}"]
    assert before.headers[RECEIPT] != after.headers[RECEIPT]


async def test_what_is_anothers_cannot_be_reached_by_its_id(shared):
    """case 31: a response, a receipt, a session of the same name: none leads over to another tenant."""
    headers = {"x-reef-session": "same"}
    async with shared.client("s-red") as red, shared.client("s-blue") as blue:
        mine = await red.post("/s/red/v1/responses", json=PATHS["/v1/responses"], headers=headers)
        name = mine.json()["id"]
        assert (await red.get(f"/s/red/v1/responses/{name}")).status_code == 200
        assert (await blue.get(f"/s/blue/v1/responses/{name}")).status_code == 404
        assert (await blue.get(f"/s/red/v1/responses/{name}")).status_code == 403
        more = {"model": "m", "input": "go on", "previous_response_id": name}
        assert (await blue.post("/s/blue/v1/responses", json=more, headers=headers)).status_code == 400
        report = {"score": 1, "references": [mine.headers[RECEIPT]]}
        assert (await blue.post("/reef/report", json=report)).status_code == 400
        assert (await red.post("/reef/report", json=report)).status_code == 200


async def test_an_episode_stays_with_its_release(shared):
    """case 18: a model version is kept for a whole episode, whatever is served meanwhile, in each dialect."""
    first = shared.context.watch.get("red").release_id
    shared.context.tokens.refresh([grant("episode", "red", first), grant("red", "red")])
    seen, before = [], None
    async with shared.client("s-episode") as episode, shared.client("s-red") as live:
        for turn, path in enumerate([*PATHS, "/v1/responses"]):
            shared.publish_rules(f"Rule {turn}.", "red")
            body = PATHS[path] | ({"previous_response_id": before} if before else {})
            answer = await episode.post(f"/s/red{path}", json=body)
            if path == "/v1/responses":
                before = answer.json()["id"]
            seen.append((answer.headers["x-reef-release-id"], f"said by {first}" in answer.text))
            moved = await live.post(f"/s/red{path}", json=PATHS[path])
            assert moved.headers["x-reef-release-id"] != first
    assert seen == [(first, True)] * 4


async def test_a_clock_that_jumps(shared, monkeypatch):
    """case 30: an hour back, a day ahead, to 1970: order is that of the log, and nothing is refused or lost."""
    real, off = time.time, [0.0]
    monkeypatch.setattr("time.time", lambda: max(1.0, real() + off[0]))
    receipts, reports, times = [], [], []
    async with shared.client(TOKEN) as client:
        for off[0] in (0.0, -3600.0, 86_400.0, -86_400.0, -1e10, 3.2e9, 0.0):
            body = ASK | {"stream": len(receipts) % 2 == 1}
            answer = await client.post("/s/red/v1/chat/completions", json=body, headers={"x-reef-session": "e"})
            assert answer.status_code == 200
            receipts.append(answer.headers[RECEIPT])
            times.append((await shared.closed(receipts[-1])).timing.received_at)
            said = await client.post("/reef/report", json={"score": len(reports), "references": receipts[-1:]})
            assert said.status_code == 200
            reports.append(said.json()["agent_record_id"])
        assert times != sorted(times)
        assert receipts != sorted(receipts), "the ids carry these times"

        async def pages(kind):
            found, after = [], None
            while True:
                where = f"/reef/scenarios/red/{kind}?limit=2" + (f"&after={after}" if after else "")
                page = (await client.get(where)).json()
                found += [item["agent_record_id"] for item in page[kind]]
                if (after := page["next"]) is None:
                    return found

        for _ in range(3):
            assert await pages("records") == receipts[::-1]
            assert await pages("reports") == reports[::-1]
        session = (await client.get("/reef/scenarios/red/sessions/e")).json()
        assert [item["agent_record_id"] for item in session["records"]] == receipts
    events = await shared.store.events("red", 0, 100)
    closings = [event.ref for event in events if event.kind == "closed"]
    assert closings == receipts
    assert [event.ref for event in events if event.kind == "report"] == reports
    records = await shared.store.get(receipts)
    assert all(record.timing.last is not None and 0 <= record.timing.last < 60 for record in records), "a duration"


async def test_ids_that_clients_make(shared):
    """case 30: ids with times of their own, in the future, in the past, or none: order is that of their arrival."""
    release = shared.context.watch.get("red").release_id
    ids = ["f" * 12 + "7" + "f" * 19, "0" * 12 + "7" + "0" * 19, "a" * 32, "1" * 32, "9" * 32]
    moments = [4e9, 5.0, 1e9, 2e9, 1.5e9]
    names = ["rep_zz", "rep_00", "rep_" + "f" * 32, "rep_mine", "rep_" + "0" * 32]
    async with shared.client(TOKEN) as client:
        for name, moment, report in zip(ids, moments, names, strict=True):
            record = build(release, id=name, scenario="red")
            fields = {"scenario": "red", "id": report, "created_at": moment}
            answer = await send(client, *lines(record, build_report(name, **fields)))
            assert answer.status_code == 200, answer.text
            said = {"score": 0.5, "references": [name], "agent_record_id": f"{report}-2"}
            assert (await client.post("/reef/report", json=said)).status_code == 200
        found = (await client.get("/reef/scenarios/red/records?limit=100")).json()["records"]
        assert [item["agent_record_id"] for item in found] == ids[::-1]
        told = (await client.get("/reef/scenarios/red/reports?limit=100")).json()["reports"]
        wanted = [each for name in names for each in (name, f"{name}-2")]
        assert [item["agent_record_id"] for item in told] == wanted[::-1]
        again = await send(client, *lines(build(release, id=ids[0], scenario="red")))
        assert again.json()["duplicates"] == 1
    assert json.loads(again.content)["records"][0]["agent_record_id"] == ids[0]
