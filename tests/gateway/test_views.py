"""Pages and filters of records and reports, and sessions."""

import dataclasses

import pytest

from reef.core.nouns import Choice
from reef.experience.sessions import Sessions
from reef.gateway.views import moment
from reef.records import keep
from reef.scenario import serving as watching
from tests.experience.talk import TOOLS, World, chat
from tests.gateway.test_imports import build, build_report

DAY = 86400.0
START = 1577836800.0  # 2020-01-01
PATH = "/reef/scenarios/default"


@pytest.fixture
async def filled(gateway):
    """Five records of three sessions, a day apart; n has score n/4 by its own report."""
    release = gateway.context.watch.get("default").release_id
    made = []
    for n in range(5):
        record = build(
            release,
            session=("a", "b/c d", None)[n % 3],
            tags={"team": f"t{n % 2}"},
            status="aborted" if n == 4 else "complete",
            purpose="evaluation" if n == 3 else "live",
        )
        made.append(dataclasses.replace(record, timing=dataclasses.replace(record.timing, received_at=START + n * DAY)))
    await gateway.store.append_all(made)
    reports = [build_report(record.id, score=n / 4, created_at=START + n * DAY) for n, record in enumerate(made)]
    await gateway.store.append_all(reports)
    return [record.id for record in made], [report.id for report in reports]


async def ask(client, path, kind="records", **given):
    answer = await client.get(f"{PATH}/{path}", params=given)
    assert answer.status_code == 200, answer.text
    return [item["agent_record_id"] for item in answer.json()[kind]]


async def test_filters_of_records(client, filled, gateway):
    ids, _ = filled
    for given, wanted in [
        ({}, (4, 3, 2, 1, 0)),
        ({"session": "a"}, (3, 0)),
        ({"session": "b/c d"}, (4, 1)),
        ({"status": "aborted"}, (4,)),
        ({"purpose": "evaluation"}, (3,)),
        ({"tag": "team:t1"}, (3, 1)),
        ({"tag": "team:t1", "session": "a"}, (3,)),
        ({"tag": "team:"}, ()),
        ({"since": START + 2 * DAY}, (4, 3, 2)),
        ({"until": "2020-01-03"}, (1, 0)),
        ({"since": "2020-01-02T00:00:00Z", "until": "2020-01-04T01:00:00+01:00"}, (2, 1)),
        ({"since": "2021"}, ()),
        ({"until": "2021"}, (4, 3, 2, 1, 0)),
        ({"min_score": 0.5}, (4, 3, 2)),
        ({"max_score": 0.25}, (1, 0)),
        ({"min_score": 0.25, "max_score": 0.5}, (2, 1)),
        ({"release_id": gateway.context.watch.get("default").release_id, "limit": 2}, (4, 3)),
        ({"release_id": "f" * 40}, ()),
    ]:
        assert await ask(client, "records", **given) == [ids[n] for n in wanted], given


async def test_filters_of_reports(client, filled):
    _, ids = filled
    for given, wanted in [
        ({}, (4, 3, 2, 1, 0)),
        ({"min_score": 0.75}, (4, 3)),
        ({"since": START + DAY, "until": START + 3 * DAY}, (2, 1)),
    ]:
        assert await ask(client, "reports", "reports", **given) == [ids[n] for n in wanted], given


async def test_pages_join_without_gaps(client, filled):
    ids, _ = filled
    for path, extra in (("records", {}), ("records", {"min_score": 0}), ("records", {"since": 0})):
        seen, after = [], None
        while True:
            page = (
                await client.get(f"{PATH}/{path}", params={"limit": 2, **extra} | ({"after": after} if after else {}))
            ).json()
            seen += [item["agent_record_id"] for item in page["records"]]
            if (after := page["next"]) is None:
                break
        assert seen == ids[::-1]


async def test_sessions(client, filled):
    ids, _ = filled
    page = (await client.get(f"{PATH}/sessions", params={"limit": 1})).json()
    (first,) = page["sessions"]
    assert (first["session"], first["count"], first["first_at"], first["last_at"]) == (
        "b/c d",
        2,
        START + DAY,
        START + 4 * DAY,
    )
    rest = (await client.get(f"{PATH}/sessions", params={"after": page["next"]})).json()
    assert ([item["session"] for item in rest["sessions"]], rest["next"]) == (["a"], None)
    one = (await client.get(f"{PATH}/sessions/b%2Fc%20d", params={"limit": 1})).json()
    assert (one["session"], [item["agent_record_id"] for item in one["records"]]) == ("b/c d", [ids[1]])
    assert await ask(client, "sessions/b%2Fc%20d", after=one["next"]) == [ids[4]]
    assert await ask(client, "sessions/a") == [ids[0], ids[3]]
    missing = await client.get(f"{PATH}/sessions/zzz")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "session")


@pytest.fixture
async def joined(run, tmp_path):
    """A gateway beside a learner's file: a conversation without a name, and one with a title and a sub-agent."""
    async with run(tmp_path, sessions=tmp_path / "sessions.db") as gateway:
        world = World(gateway.store, Sessions(tmp_path / "sessions.db"))
        ids = [await world.ask(chat("u1"), "a1"), await world.ask(chat("u1", "a1", "u2"), "a2")]
        ids.append(await world.ask(chat("go", tools=TOOLS), "ok", session="ses_1"))
        ids.append(await world.ask(chat("title"), "Going", session="ses_1"))
        tags = {"parent-session-id": "ses_1"}
        ids.append(await world.ask(chat("look", tools=TOOLS), "seen", session="ses_2", tags=tags))
        yield gateway, world, ids
        world.sessions.close()


async def test_sessions_that_nobody_named_are_listed_too(joined):
    gateway, world, ids = joined
    async with gateway.client() as client:
        body = (await client.get(f"{PATH}/sessions")).json()
        assert [item["session"] for item in body["sessions"]] == ["ses_2", "ses_1"]
        await world.read()
        body = (await client.get(f"{PATH}/sessions")).json()
        assert (body["joined"], body["next"]) == (True, None)
        found = {item["session"]: item for item in body["sessions"]}
        assert list(found) == ["ses_2", "ses_1", ids[0]]
        assert (found["ses_2"]["within"], found["ses_2"]["named"]) == ("ses_1", True)
        assert [found["ses_1"][name] for name in ("within", "count", "sides", "branches")] == [None, 2, 1, 2]
        lone = found[ids[0]]
        assert (lone["named"], lone["count"], lone["retries"]) == (False, 2, 0)
        assert lone["last_at"] - lone["first_at"] == 10
        pages, after = [], {}
        while after is not None:
            page = (await client.get(f"{PATH}/sessions", params={"limit": 1, **after})).json()
            pages += [item["session"] for item in page["sessions"]]
            after = page["next"] and {"after": page["next"]}
        assert pages == list(found)


async def test_each_record_of_a_session_has_its_place(joined):
    gateway, world, ids = joined
    await world.read()
    async with gateway.client() as client:
        body = (await client.get(f"{PATH}/sessions/{ids[0]}")).json()
        assert [item["agent_record_id"] for item in body["records"]] == ids[:2]
        first, second = (item["place"] for item in body["records"])
        assert (first["parent"], second["parent"], second["turn"], second["kind"]) == (None, ids[0], 1, "main")
        page = (await client.get(f"{PATH}/sessions/{ids[0]}", params={"limit": 1})).json()
        assert [item["agent_record_id"] for item in page["records"]] == ids[:1]
        rest = (await client.get(f"{PATH}/sessions/{ids[0]}", params={"after": page["next"]})).json()
        assert [item["agent_record_id"] for item in rest["records"]] == ids[1:2]
        whole = (await client.get(f"{PATH}/sessions/ses_1")).json()
        assert [item["agent_record_id"] for item in whole["records"]] == ids[2:]
        main, title, sub = (item["place"] for item in whole["records"])
        assert [place["kind"] for place in (main, title, sub)] == ["main", "side", "main"]
        assert "no part of the session" in title["note"]
        assert (sub["session"], sub["branch"], sub["note"]) == ("ses_1", "ses_2", "a sub-agent's turn")
        keep.forget(gateway.state / "records.db", ids[:1])
        left = (await client.get(f"{PATH}/sessions/{ids[0]}")).json()
        assert [item["agent_record_id"] for item in left["records"]] == ids[1:2]


async def test_without_the_learners_file_there_are_the_named_ones(filled, client):
    body = (await client.get(f"{PATH}/sessions")).json()
    assert body["joined"] is False
    assert [(item["named"], item["within"], item["sides"]) for item in body["sessions"]] == [(True, None, None)] * 2
    one = (await client.get(f"{PATH}/sessions/a")).json()
    assert (one["joined"], [item["place"] for item in one["records"]]) == (False, [None, None])


async def test_everything_that_is_stored_can_be_read(gateway, client):
    """What a provider answered, or an older version took, may be no text for UTF-8, or nested beyond all measure."""
    deep = {"a": 1}
    for _ in range(800):
        deep = {"a": deep}
    lone = "a\ud800b"
    record = build(
        gateway.context.watch.get("default").release_id,
        choices=(Choice(0, lone, "stop", message={"role": "assistant", "content": lone, "tool_calls": deep}),),
        request=b'{"model":"\\ud800"}',
        reply=b'{"deep":' + b"[" * 2000 + b"]" * 2000 + b"}",
        prompt_ids=None,
        model_asked=lone,
        model_answered=lone,
        client=lone,
        answer_id=lone,
        error=lone,
        session="s",
    )
    reports = [
        build_report(record.id, feedback=deep, metadata={lone: [lone]}),
        build_report(record.id, demonstration=lone, metrics={lone: 0.5}, metadata={"n": 2**80}),
    ]
    await gateway.store.append_all([record, *reports])
    for path in ("records", f"records/{record.id}", "reports", "sessions", "sessions/s"):
        answer = await client.get(f"{PATH}/{path}")
        assert answer.status_code == 200, (path, answer.text[:200])
        assert "\\ud800" not in answer.text or path == f"records/{record.id}"
    whole = (await client.get(f"{PATH}/records/{record.id}")).json()
    assert (whole["choices"][0]["text"], whole["model_answered"]) == ("a\ufffdb", "a\ufffdb")
    assert whole["choices"][0]["message"]["tool_calls"] == deep
    assert whole["request"] == '{"model":"\\ud800"}'
    assert [report["feedback"] for report in whole["reports"]] == [deep, None]
    assert whole["reports"][1]["metadata"] == {"n": 2**80}
    assert (await client.get(f"{PATH}/records", params={"limit": 1})).json()["records"][0]["model_asked"] == "a\ufffdb"


async def test_a_scenario_is_found_as_soon_as_it_is_made(run, tmp_path, monkeypatch):
    """At another worker, which has not looked at the board since."""
    monkeypatch.setattr(watching, "PERIOD", 60.0)
    async with run(tmp_path) as one, run(tmp_path) as other, one.client() as first, other.client() as second:
        for path in ("records", "reports", "sessions", "releases", "records/" + "a" * 32):
            name = path.partition("/")[0] + str(len(path))
            assert (await second.get(f"/reef/scenarios/{name}/{path}")).status_code == 404
            assert (await first.post("/reef/scenarios", json={"name": name})).status_code == 201
            answer = await second.get(f"/reef/scenarios/{name}/{path}")
            assert answer.status_code == (404 if "/" in path else 200), answer.text
            assert "no record" in answer.text or answer.status_code == 200


async def test_wrong_parameters_are_named(client, filled):
    for path, given, param in [
        ("records", {"sesion": "a"}, "sesion"),
        ("records", {"dialect": "chat"}, "dialect"),
        ("records", {"status": "done"}, "status"),
        ("records", {"tag": "team"}, "tag"),
        ("records", {"since": "yesterday"}, "since"),
        ("records", {"since": "27"}, "since"),
        ("records", {"until": "20250131"}, "until"),
        ("records", {"until": "nan"}, "until"),
        ("records", {"min_score": "inf"}, "min_score"),
        ("records", {"max_score": "x"}, "max_score"),
        ("records", {"limit": "0"}, "limit"),
        ("records", {"after": "-1"}, "after"),
        ("reports", {"session": "a"}, "session"),
        ("sessions", {"status": "open"}, "status"),
        ("sessions/a", {"tag": "x:y"}, "tag"),
    ]:
        answer = await client.get(f"{PATH}/{path}", params=given)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (given, answer.text)
    message = (await client.get(f"{PATH}/reports?session=a")).json()["error"]["message"]
    assert message.endswith("there are: after, limit, since, until, min_score, max_score")


def test_moments():
    assert moment("1234567890.5", "since") == 1234567890.5
    assert moment("0", "since") == 0.0
    assert moment("2027", "since") == moment("2027-01-01", "since") == 1798761600.0
    assert moment("1970-01-01T00:01", "since") == 60.0
    assert moment("1970-01-01 00:01", "since") == 60.0
    assert moment("1970-01-01T01:00:00 01:00", "since") == 0.0  # a plus that became a space
