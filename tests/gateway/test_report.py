import asyncio
import contextlib
import itertools
import json
import socket

import pytest

from reef.core import rpc
from reef.core.errors import StoreError
from reef.core.nouns import Report
from reef.core.wire import Done, Wake
from reef.engines.fake import FakeEngine
from reef.records import Query, keep
from tests.gateway.test_imports import build

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def receipt(client):
    return (await client.post("/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"]


async def stored(gateway, scenario="default"):
    return [item for _, item in await gateway.store.find(Query(scenario, kind="report"))]


async def test_every_field_is_stored(gateway, client, receipt):
    second = (await client.post("/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"]
    body = {
        "score": 1,
        "metrics": {"clarity": 0.25},
        "feedback": {"why": "short"},
        "references": [receipt, f"chatcmpl-{second}", receipt],
        "per_receipt": {f"resp_{second}": -2.5},
        "choice": 0,
        "demonstration": {"role": "assistant", "content": "Hello!"},
        "metadata": {"page": 3},
    }
    response = await client.post("/reef/report", json=body)
    assert response.status_code == 200
    answer = response.json()
    assert answer == {
        "agent_record_id": answer["agent_record_id"],
        "scenario": "default",
        "request_type": "report",
        "duplicate": False,
    }
    (report,) = await gateway.store.get([answer["agent_record_id"]])
    assert isinstance(report, Report)
    assert report.references == (receipt, second)
    assert report.per_receipt == {second: -2.5}
    assert (report.score, report.choice) == (1.0, 0)
    assert report.metrics == {"clarity": 0.25}
    assert report.feedback == {"why": "short"}
    assert report.demonstration == {"role": "assistant", "content": "Hello!"}
    assert report.metadata == {"page": 3}


async def test_per_receipt_alone_names_its_references(gateway, client, receipt):
    response = await client.post("/reef/report", json={"per_receipt": {receipt: 0}})
    assert response.status_code == 200
    (report,) = await stored(gateway)
    assert report.references == (receipt,)
    assert report.score is None
    assert report.score_of(receipt) == 0.0


BAD = [
    ({"score": True}, "score"),
    ({"score": "1"}, "score"),
    ({"metrics": {"a": False}}, "metrics.a"),
    ({"metrics": [1]}, "metrics"),
    ({"feedback": 3}, "feedback"),
    ({"feedback": ""}, "score"),
    ({"score": None}, "score"),
    ({"score": 1, "choice": -1}, "choice"),
    ({"score": 1, "choice": True}, "choice"),
    ({"score": 1, "choice": 4}, "choice"),
    ({"score": 1, "metadata": []}, "metadata"),
    ({"demonstration": 4}, "demonstration"),
    ({"demonstration": {"role": "assistant"}}, "demonstration"),
    ({"demonstration": ""}, "demonstration"),
    ({"score": 1, "demonstration": ""}, "demonstration"),
    ({"demonstration": {"role": "assistant", "content": ""}}, "demonstration"),
    ({"demonstration": {"role": "user", "content": "Hello!"}}, "demonstration"),
    ({"demonstration": {"role": ["assistant"], "content": "Hello!"}}, "demonstration"),
    ({"score": 1, "references": []}, "references"),
    ({"score": 1, "references": None}, "references"),
    ({"score": 1, "references": "x"}, "references"),
    ({"score": 1, "references": ["not-a-receipt"]}, "references"),
    ({"score": 1, "references": [3]}, "references"),
    ({"score": 1, "references": ["0" * 32]}, "references"),
    ({"score": 1, "references": ["rep_" + "0" * 32]}, "references"),
    ({"score": 1, "per_receipt": {"f" * 32: 1}}, "per_receipt"),
    ({"score": 1, "agent_record_id": "mine"}, "agent_record_id"),
    ({"scroe": 1}, "scroe"),
    ({"score": 1e308}, "score"),
    ({"score": -1000000.5}, "score"),
    ({"score": 10**30}, "score"),
    ({"metrics": {"a": 1e7}}, "metrics.a"),
    ({"per_receipt": {"f" * 32: 2e6}}, "per_receipt." + "f" * 32),
]


async def test_bad_reports_name_the_field(gateway, client, receipt):
    for change, param in BAD:
        response = await client.post("/reef/report", json={"references": [receipt], **change})
        assert response.status_code == 400, (change, response.text)
        error = response.json()["error"]
        assert error["param"] == param, change
        assert error["type"] == "invalid_request_error"
    assert await stored(gateway) == []


def nested(levels):
    value = "x"
    for _ in range(levels):
        value = {"a": value}
    return value


async def test_what_is_nested_too_deeply_is_refused(gateway, client, receipt):
    """Everybody must be able to read a report again: 64 levels, in whichever field, and a list counts too."""
    for levels, status in [(63, 200), (64, 400), (300, 400), (900, 400)]:
        for name, value in [
            ("feedback", {"why": [nested(levels - 1)]}),
            ("metadata", {"why": nested(levels)}),
            ("demonstration", {"role": "assistant", "content": nested(levels)}),
            ("demonstration", {"role": "assistant", "content": [nested(levels - 1)]}),
        ]:
            if name == "demonstration" and status == 200 and not isinstance(value["content"], list):
                continue
            answer = await client.post("/reef/report", json={"score": 1, "references": [receipt], name: value})
            assert answer.status_code == status, (levels, name, answer.text)
            assert status == 200 or answer.json()["error"]["param"] == name
    for name in ("score", "metrics", "references", "per_receipt", "choice", "agent_record_id", "other"):
        for levels in (300, 1000, 5000):
            body = b'{"references":["%s"],"feedback":"x","%s":%s1%s}' % (
                receipt.encode(),
                name.encode(),
                b"[" * levels,
                b"]" * levels,
            )
            answer = await client.post("/reef/report", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (name, levels)
    assert len(await stored(gateway)) == 3
    assert (await client.get("/reef/scenarios/default/reports")).status_code == 200


async def test_scores_that_are_not_finite(gateway, client, receipt):
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"references": ["{receipt}"], "score": {number}}}'
        response = await client.post("/reef/report", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "score"
        assert "finite" in response.json()["error"]["message"]
    assert await stored(gateway) == []


async def test_the_largest_scores_are_taken(gateway, client, receipt):
    for score in (1e6, -1e6, 1000000):
        response = await client.post("/reef/report", json={"score": score, "references": [receipt]})
        assert response.status_code == 200
    assert {report.score for report in await stored(gateway)} == {1e6, -1e6}


async def test_quoting_a_report_says_so(client, receipt):
    first = (await client.post("/reef/report", json={"score": 1, "references": [receipt]})).json()["agent_record_id"]
    response = await client.post("/reef/report", json={"score": 1, "references": [first]})
    assert response.status_code == 400
    assert "report's id" in response.json()["error"]["message"]


async def test_same_id_twice_and_with_other_content(gateway, client, receipt):
    """case 28: at the same time and one after the other: stored once, said to be a duplicate, a change is a 409."""
    body = {"score": 1, "references": [receipt], "agent_record_id": "rep_mine-1"}
    answers = await asyncio.gather(*(client.post("/reef/report", json=body) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answer.json()["duplicate"] for answer in answers) == [False, True, True, True, True]
    conflict = await client.post("/reef/report", json={**body, "score": 0})
    assert conflict.status_code == 409
    assert conflict.headers["x-should-retry"] == "false"
    (report,) = await stored(gateway)
    assert report.score == 1.0


async def test_scenario_comes_from_the_references(client, receipt):
    other = (await client.post("/s/one/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"]
    body = {"score": 1, "references": [other]}
    assert (await client.post("/reef/report", json=body)).json()["scenario"] == "one"
    disagreeing = await client.post("/reef/report", json=body, headers={"x-reef-scenario": "default"})
    assert (disagreeing.status_code, disagreeing.json()["error"]["param"]) == (400, "x-reef-scenario")
    mixed = await client.post("/reef/report", json={"score": 1, "references": [other, receipt]})
    assert (mixed.status_code, mixed.json()["error"]["param"]) == (400, "references")


async def test_foreign_and_unknown_receipts_look_the_same(gateway, client, receipt):
    async with gateway.client("t-one") as tenant:
        foreign = await tenant.post("/reef/report", json={"score": 1, "references": [receipt]})
        unknown = await tenant.post("/reef/report", json={"score": 1, "references": ["0" * 32]})
    assert foreign.status_code == unknown.status_code == 400
    assert foreign.json()["error"]["message"].replace(receipt, "0" * 32) == unknown.json()["error"]["message"]


async def test_too_large(gateway, client, receipt):
    response = await client.post("/reef/report", json={"feedback": "x" * 1_100_000, "references": [receipt]})
    assert response.status_code == 413
    assert await stored(gateway) == []


@contextlib.asynccontextmanager
async def learner(path, handler):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    server = await rpc.serve(listener, handler)
    try:
        yield
    finally:
        server.close()
        listener.close()


async def post(gateway, score):
    async with gateway.client() as client:
        receipt = (await client.post("/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"]
        return await client.post("/reef/report", json={"score": score, "references": [receipt]})


async def test_the_learner_is_woken(run, tmp_path):
    woken = asyncio.Queue()

    async def handle(message):
        await woken.put(message)
        return Done()

    async with learner(tmp_path / "l.sock", handle), run(tmp_path, learner=tmp_path / "l.sock") as gateway:
        assert (await post(gateway, 1)).status_code == 200
        assert await asyncio.wait_for(woken.get(), 2) == Wake(scenario="default")


async def test_a_hanging_learner_delays_nothing_and_is_woken_again(run, tmp_path):
    calls = []
    release = asyncio.Event()

    async def handle(message):
        calls.append(message)
        await release.wait()
        return Done()

    async with learner(tmp_path / "l.sock", handle), run(tmp_path, learner=tmp_path / "l.sock") as gateway:
        begun = asyncio.get_running_loop().time()
        for score in range(5):
            assert (await post(gateway, score)).status_code == 200
        assert asyncio.get_running_loop().time() - begun < 2.0
        assert len(calls) == 1
        release.set()
        await asyncio.sleep(0.1)
        assert len(calls) == 2  # once more for the four reports that came meanwhile


async def test_a_dead_learner_fails_nothing(run, tmp_path):
    async with run(tmp_path, learner=tmp_path / "nobody.sock") as gateway:
        assert (await post(gateway, 1)).status_code == 200
        async with gateway.client() as client:
            status = (await client.get("/reef/status")).json()
        assert status["learner"] == {"alive": False}
        assert status["scenarios"]["default"]["learner"] is None


async def test_malformed_json_says_where(client):
    response = await client.post(
        "/reef/report", content=b'{"score": 1,\n "references": [}', headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert "line 2" in response.json()["error"]["message"]
    assert json.loads(response.content)["error"]["code"] == "invalid_request"


def answered(gateway, answer_id, scenario="default", **fields):
    """A record whose provider's answer had this id."""
    release = gateway.context.watch.get("default").release_id
    return build(release, answer_id=answer_id, scenario=scenario, **fields)


async def test_an_answer_is_found_by_the_id_inside_it(gateway, client):
    """Clients that hide headers have only that. Of two with one id it is the newest; also one that looks like ours."""
    like_ours = f"chatcmpl-{'ab' * 16}"
    old, new = answered(gateway, "chatcmpl-9xYz"), answered(gateway, "chatcmpl-9xYz")
    other = answered(gateway, like_ours)
    await gateway.store.append_all([old, new, other])
    body = {"references": ["chatcmpl-9xYz", like_ours], "per_receipt": {like_ours: 0.25}, "score": 1}
    assert (await client.post("/reef/report", json=body)).status_code == 200
    (report,) = await stored(gateway)
    assert report.references == (new.id, other.id)
    assert report.per_receipt == {other.id: 0.25}
    unknown = await client.post("/reef/report", json={"references": ["chatcmpl-nobody"], "score": 1})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "references")


async def test_an_answer_id_is_looked_for_only_where_the_token_may_see(gateway, client):
    mine, theirs = answered(gateway, "gen-1", scenario="one"), answered(gateway, "gen-1")
    await client.post("/s/one/v1/chat/completions", json=ASK)  # makes the scenario
    await gateway.store.append_all([mine, theirs])
    body = {"references": ["gen-1"], "score": 1}
    async with gateway.client("t-one") as tenant:
        assert (await tenant.post("/reef/report", json=body)).json()["scenario"] == "one"
        only = await tenant.post("/reef/report", json=body, headers={"x-reef-scenario": "default"})
        assert only.status_code == 403
    assert (await client.post("/reef/report", json=body)).json()["scenario"] == "default"  # the newer one
    named = await client.post("/reef/report", json=body, headers={"x-reef-scenario": "one"})
    assert named.json()["scenario"] == "one"


async def test_per_receipt_alone_with_every_form_of_a_reference(gateway, client, receipt):
    other = answered(gateway, "gen-2")
    await gateway.store.append(other)
    body = {"per_receipt": {f"msg_{receipt}": 0.5, "gen-2": -1}, "metrics": {"speed": 2}}
    assert (await client.post("/reef/report", json=body)).status_code == 200
    (report,) = await stored(gateway)
    assert report.references == (receipt, other.id)
    assert report.per_receipt == {receipt: 0.5, other.id: -1.0}


async def test_a_report_while_the_answer_still_streams(run, tmp_path):
    """case 25: the receipt counts from the moment its header was seen; its choices are not known yet."""
    async with run(tmp_path, FakeEngine(delay=0.2)) as gateway, gateway.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response:
            receipt = response.headers["x-reef-agent-record-id"]
            assert (await gateway.record(receipt)).status == "open"
            said = await client.post("/reef/report", json={"score": 1, "choice": 0, "references": [receipt]})
            assert said.status_code == 200
            async for _ in response.aiter_bytes():
                pass
        assert (await gateway.closed(receipt)).status == "complete"
        assert [report.references for report in await stored(gateway)] == [(receipt,)]


async def test_reports_of_one_moment_have_one_order(gateway, client, receipt, monkeypatch):
    """case 29: 100 reports with the same time; every read gives the same order, that of the log."""
    monkeypatch.setattr("reef.gateway.report.time.time", lambda: 1_700_000_000.0)
    answers = [await client.post("/reef/report", json={"score": n, "references": [receipt]}) for n in range(100)]
    ids = [answer.json()["agent_record_id"] for answer in answers]
    reads = [[report.id for report in await gateway.store.reports_on(receipt)] for _ in range(3)]
    assert reads == [ids] * 3
    path = "/reef/scenarios/default/reports?limit=100"
    assert [item["agent_record_id"] for item in (await client.get(path)).json()["reports"]] == ids[::-1]


async def test_the_same_report_on_another_day_is_the_same(gateway, client, receipt, monkeypatch):
    """case 28: an id is the whole key; the time of a retry does not count, a changed value does."""
    body = {"score": 1, "feedback": "good", "references": [receipt], "agent_record_id": "rep_judge-1"}
    said = []
    for now in (1_700_006_399.0, 1_700_006_401.0):  # either side of midnight
        monkeypatch.setattr("reef.gateway.report.time.time", lambda now=now: now)
        said.append((await client.post("/reef/report", json=body)).json()["duplicate"])
    assert said == [False, True]
    assert (await client.post("/reef/report", json=body | {"feedback": "bad"})).status_code == 409
    ((report,),) = [await stored(gateway)]
    assert (report.feedback, report.created_at) == ("good", 1_700_006_399.0)


async def test_the_same_report_at_two_workers_across_midnight(run, tmp_path, monkeypatch):
    """case 28: whoever gets it and whatever day it is there: one is stored, all others are told so."""
    async with run(tmp_path) as one, run(tmp_path) as other, one.client() as first, other.client() as second:
        receipt = (await first.post("/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"]
        days = itertools.cycle((1_700_006_399.9, 1_700_006_400.1))
        monkeypatch.setattr("reef.gateway.report.time.time", lambda: next(days))
        body = {"score": 1, "metrics": {"clarity": 0.5}, "references": [receipt], "agent_record_id": "rep_judge-2"}
        clients = [first, second] * 8
        answers = await asyncio.gather(*(client.post("/reef/report", json=body) for client in clients))
        assert {answer.status_code for answer in answers} == {200}
        assert sorted(answer.json()["duplicate"] for answer in answers) == [False] + [True] * 15
        changed = [body | {"metrics": {"clarity": 0.75}}, body | {"score": 0.0}, body | {"references": []}]
        refused = [(await second.post("/reef/report", json=each)).status_code for each in changed]
        assert refused == [409, 409, 400]
        ((report,),) = [await stored(one)]
        assert (report.score, report.metrics) == (1.0, {"clarity": 0.5})


async def test_reports_without_an_id_are_each_stored(gateway, client, receipt):
    """case 28: one that was accepted is there, under the id that the answer gave it."""
    body = {"score": 1, "references": [receipt]}
    ids = [(await client.post("/reef/report", json=body)).json()["agent_record_id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert {report.id for report in await stored(gateway)} == set(ids)


async def test_a_report_that_cannot_be_stored_is_not_accepted(gateway, client, receipt, monkeypatch):
    """case 25: the store is away: a 503 that says when to come again, and the retry is no duplicate."""
    body = {"score": 1, "references": [receipt], "agent_record_id": "rep_mine-2"}
    with monkeypatch.context() as broken:

        async def refuse(entry):
            raise StoreError("the disk is full: /secret/place")

        broken.setattr(gateway.store, "append", refuse)
        refused = await client.post("/reef/report", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "/secret/place" not in refused.text
    assert await stored(gateway) == []
    assert (await client.post("/reef/report", json=body)).json()["duplicate"] is False
    assert [report.id for report in await stored(gateway)] == ["rep_mine-2"]


async def test_a_record_erased_while_its_answer_streams_stays_gone(run, tmp_path):
    async with run(tmp_path, FakeEngine(delay=0.2)) as gateway, gateway.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response:
            receipt = response.headers["x-reef-agent-record-id"]
            await asyncio.to_thread(keep.forget, gateway.state / "records.db", [receipt])
            body = b"".join([piece async for piece in response.aiter_bytes()])
        assert body.endswith(b"data: [DONE]\n\n")
        assert await gateway.store.known([receipt]) == []
        refused = await client.post("/reef/report", json={"score": 1, "references": [receipt]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "references")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({"scorer": "nmber", "answer": 5}, "did you mean number?"),
        ({"scorer": "judge", "answer": 5}, "exact, contains, regex, number, schema"),
        ({"scorer": "tests", "answer": "def test_it(): pass"}, "exact, contains, regex, number, schema"),
        ({"scorer": {"use": "code", "call": "os:getcwd"}}, "exact, contains, regex, number, schema"),
        (5, "must be an object like"),
        ({"answer": 5}, "must be an object like"),
        ({"scorer": "number"}, "needs answer"),
        ({"scorer": "number", "answer": "five"}, "the scorer number"),
        ({"scorer": {"use": "number", "tolernce": 1}, "answer": 5}, "did you mean metadata.check.scorer.tolerance"),
        ({"scorer": "regex", "answer": "("}, "cannot be used"),
        ({"scorer": "schema", "answer": {"type": "objekt"}}, "not a JSON schema"),
    ],
)
async def test_a_check_that_judges_nothing_is_refused(gateway, client, receipt, check, words):
    body = {"score": 1, "references": [receipt], "metadata": {"check": check}}
    refused = await client.post("/reef/report", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"].startswith("metadata.check")
    assert error["message"].startswith("metadata.check")
    assert words in error["message"]
    assert await stored(gateway) == []


@pytest.mark.parametrize(
    "metadata",
    [
        {"check": {"scorer": "number", "answer": 5}},
        {"check": {"scorer": {"use": "number", "tolerance": 0.1}, "answer": [5, 6]}},
        {"check": {"scorer": "regex", "answer": "^a+$"}},
        {"check": {"scorer": "schema", "answer": {"type": "object"}}},
        {"checks": {"scorer": "nmber"}},
        {"check": None},
    ],
)
async def test_a_check_that_can_judge_and_other_metadata_are_taken(gateway, client, receipt, metadata):
    body = {"score": 1, "references": [receipt], "metadata": metadata}
    assert (await client.post("/reef/report", json=body)).status_code == 200
    ((report,),) = [await stored(gateway)]
    assert report.metadata == metadata
