"""Reports on a session: its own records, once and for all, whoever else uses the same name."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reef.core.nouns import Report
from reef.engines.fake import FakeEngine
from reef.gateway.auth import Tokens
from reef.records import Query
from reef.records.tokens import TokenTable
from tests.gateway.conftest import TOKENS, running

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def ask(client, session, **more):
    headers = {"x-reef-session": session, **more}
    answer = await client.post("/v1/chat/completions", json=ASK, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-reef-agent-record-id"]


async def stored(gateway, answer):
    assert answer.status_code == 200, answer.text
    (report,) = await gateway.store.get([answer.json()["agent_record_id"]])
    assert isinstance(report, Report)
    return report


async def test_a_session_stands_for_its_receipts(gateway, client):
    mine = [await ask(client, "a") for _ in range(3)]
    await ask(client, "b")
    answer = await client.post("/reef/report", json={"session": "a", "score": 1, "feedback": "good"})
    report = await stored(gateway, answer)
    assert report.references == tuple(mine)
    assert (report.score, report.feedback, report.scenario) == (1.0, "good", "default")
    assert answer.json()["records"] == 3
    assert answer.headers["x-reef-scenario"] == "default"
    headed = await client.post("/reef/report", json={"score": 0}, headers={"x-reef-session": "a"})
    assert (await stored(gateway, headed)).references == tuple(mine)


async def test_the_name_is_the_one_that_the_client_sent(gateway, client):
    long = "s" * 2000
    sent = [{"x-claude-code-session-id": "cc"}, {"session-id": "codex"}, {"x-session-id": long}]
    for headers in sent:
        answer = await client.post("/v1/chat/completions", json=ASK, headers=headers)
        (session,) = headers.values()
        told = await client.post("/reef/report", json={"session": session, "score": 1})
        assert (await stored(gateway, told)).references == (answer.headers["x-reef-agent-record-id"],)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"session": "a", "references": ["0" * 32]}, "session"),
        ({"session": "a", "references": []}, "session"),
        ({"session": ""}, "session"),
        ({"session": 3}, "session"),
        ({}, "references"),
        ({"session": None}, "references"),
        ({"session": "a", "choice": 9}, "choice"),
        ({"session": "a", "per_receipt": {"f" * 32: 1}}, "per_receipt"),
        ({"session": "a", "agent_record_id": "mine"}, "agent_record_id"),
    ],
)
async def test_wrong_ones_name_the_field(gateway, client, body, param):
    await ask(client, "a")
    answer = await client.post("/reef/report", json={"score": 1, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert await gateway.store.find(Query("default", kind="report")) == []


async def test_an_unknown_session_says_what_to_do(gateway, client):
    for headers in ({}, {"x-reef-scenario": "nowhere"}):
        answer = await client.post("/reef/report", json={"session": "new", "score": 1}, headers=headers)
        assert answer.status_code == 404
    message = (await client.post("/reef/report", json={"session": "new", "score": 1})).json()["error"]["message"]
    assert "x-reef-session" in message
    assert "receipts" in message
    with_capture_off = {"x-reef-session": "quiet", "x-reef-capture": "false"}
    await client.post("/v1/chat/completions", json=ASK, headers=with_capture_off)
    assert (await client.post("/reef/report", json={"session": "quiet", "score": 1})).status_code == 404


async def test_only_live_records_that_came_to_something(gateway, client):
    good = await ask(client, "a")
    release = gateway.board.get("default").release_id
    await ask(client, "a", **{"x-reef-release": release})  # an evaluation
    bad = await client.post("/v1/chat/completions", json=ASK | {"max_tokens": 0}, headers={"x-reef-session": "a"})
    assert bad.status_code == 400
    report = await stored(gateway, await client.post("/reef/report", json={"session": "a", "score": 1}))
    assert report.references == (good,)


async def test_sent_again_it_quotes_what_it_did(gateway, client):
    first = await ask(client, "a")
    body = {"session": "a", "score": 1, "agent_record_id": "rep_mine"}
    assert (await client.post("/reef/report", json=body)).json()["duplicate"] is False
    await ask(client, "a")
    again = await client.post("/reef/report", json=body)
    assert again.json() | {"duplicate": True, "records": 1} == again.json()
    assert (await stored(gateway, again)).references == (first,)
    other = await client.post("/reef/report", json=body | {"score": 0})
    assert other.status_code == 409
    await ask(client, "b")
    elsewhere = await client.post("/reef/report", json=body | {"session": "b"})
    assert elsewhere.status_code == 409


async def test_sent_twice_at_once_while_records_come(gateway, client):
    await ask(client, "a")

    async def talk():
        for _ in range(6):
            await ask(client, "a")

    body = {"session": "a", "score": 1, "agent_record_id": "rep_race"}
    _, *answers = await asyncio.gather(talk(), *(client.post("/reef/report", json=body) for _ in range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
    assert sorted(answer.json()["duplicate"] for answer in answers) == [False] + [True] * 5
    assert len({answer.json()["records"] for answer in answers}) == 1


async def test_while_a_record_still_streams(run, tmp_path):
    async with run(tmp_path, FakeEngine(delay=0.05)) as gateway, gateway.client() as client:
        body, headers = ASK | {"stream": True, "max_tokens": 20}, {"x-reef-session": "live"}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            receipt = answer.headers["x-reef-agent-record-id"]
            assert (await gateway.record(receipt)).status == "open"
            told = await client.post("/reef/report", json={"session": "live", "score": 1})
            assert (await stored(gateway, told)).references == (receipt,)
            await answer.aread()
        assert (await gateway.closed(receipt)).status == "complete"


async def test_another_scenario_and_another_token_are_never_looked_into(run, tmp_path):
    async with run(tmp_path) as gateway:
        table = TokenTable(gateway.board)
        secrets = {name: table.create(name) for name in ("ann", "bob")}
        gateway.context.tokens.refresh(table.list())
        gateway.ensure("other", {})
        gateway.context.watch.refresh()
        async with gateway.client(secrets["ann"]) as ann, gateway.client(secrets["bob"]) as bob:
            hers, his = await ask(ann, "1"), await ask(bob, "1")
            there = await ask(ann, "1", **{"x-reef-scenario": "other"})
            for client, body, headers, receipt in (
                (ann, {"session": "1"}, {}, hers),
                (bob, {"session": "1"}, {}, his),
                (ann, {"session": "1"}, {"x-reef-scenario": "other"}, there),
            ):
                told = await client.post("/reef/report", json={**body, "score": 1}, headers=headers)
                assert (await stored(gateway, told)).references == (receipt,)
            missed = await bob.post(
                "/reef/report", json={"session": "1", "score": 1}, headers={"x-reef-scenario": "other"}
            )
            assert missed.status_code == 404
            mine = {"session": "1", "score": 1, "agent_record_id": "rep_ann"}
            assert (await ann.post("/reef/report", json=mine)).status_code == 200
            assert (await bob.post("/reef/report", json=mine)).status_code == 409
        new = table.rotate("ann")
        gateway.context.tokens.refresh(table.list())
        for secret in (new, secrets["ann"]):  # whoever rotates a token keeps its sessions
            async with gateway.client(secret) as client:
                told = await client.post("/reef/report", json={"session": "1", "score": 1})
                assert (await stored(gateway, told)).references == (hers,)


async def test_a_token_without_the_scenario_is_refused(run, tmp_path):
    async with run(tmp_path, tokens=Tokens(TOKENS)) as gateway, gateway.client("t-one") as client:
        answer = await client.post("/reef/report", json={"session": "a", "score": 1})
        assert answer.status_code == 403
        assert "x-reef-scenario" in answer.json()["error"]["message"]


STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["ask", "stream", "report"])), min_size=2, max_size=12
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
async def test_two_runs_whose_reports_cross(tmp_path_factory, steps):
    """Two runs in one scenario, each a session, interleaved in any way: a report quotes what its run had by then."""
    async with running(tmp_path_factory.mktemp("cross"), FakeEngine()) as gateway, gateway.client() as client:
        had = {"a": [], "b": []}
        for session, what in [*steps, ("a", "ask"), ("b", "ask")]:
            if what == "report":
                told = await client.post("/reef/report", json={"session": session, "score": 1})
                if not had[session]:
                    assert told.status_code == 404
                    continue
                assert list((await stored(gateway, told)).references) == had[session]
                continue
            body = ASK | {"stream": what == "stream"}
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-reef-session": session})
            had[session].append(answer.headers["x-reef-agent-record-id"])
        scores = {"a": 1.0, "b": 0.0}
        answers = await asyncio.gather(
            *(client.post("/reef/report", json={"session": name, "score": score}) for name, score in scores.items())
        )
        for name, answer in zip(scores, answers, strict=True):
            report = await stored(gateway, answer)
            assert (list(report.references), report.score) == (had[name], scores[name])
