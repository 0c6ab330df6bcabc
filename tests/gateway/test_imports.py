"""Finished exchanges and reports from elsewhere: both forms, all or none, and the same again is harmless."""

import dataclasses
import json
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.ids import new_receipt, new_report
from reef.core.nouns import Choice, Record, Report, Sampling, Span, Timing, Usage
from reef.engines.fake import FakeEngine
from reef.records import Query, keep, raw

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def build(release_id, **fields):
    answer = Choice(0, "It is 4.", "stop", (101, 7, 2), (-0.5, -1.25, -0.0625), (Span(release_id, 0, 3),))
    whole = Record(
        id=new_receipt(),
        scenario="default",
        release_id=release_id,
        purpose="live",
        dialect="chat",
        status="complete",
        request=b'{"model":"m",  "messages":[{"role":"user","content":"2+2?"}]}',
        timing=Timing(1_700_000_000.5, 0.01, 0.2, 0.9),
        choices=(answer,),
        usage=Usage(12, 3),
        prompt_ids=(5, 6, 7),
        sampling=Sampling(max_tokens=12, seed=3),
        model_asked="m",
        session="s1",
        tags={"team": "blue"},
    )
    return dataclasses.replace(whole, **fields)


def build_report(*references, **fields):
    given = {"score": 1.0, **fields}
    return Report(**{"id": new_report(), "scenario": "default", "created_at": 5.0, "references": references} | given)


def lines(*entries):
    return [json.loads(raw.line(entry)) for entry in entries]


async def send(client, *entries, **more):
    return await client.post("/reef/records/batch", json={"records": list(entries)}, **more)


def serving(gateway):
    return gateway.context.watch.get("default").release_id


async def test_our_own_form_comes_back_exactly(gateway, client):
    record = build(serving(gateway), request=b"\xff\x00 not text", rendered="gerendert é".encode(), reply=b"{}")
    report = build_report(record.id, per_receipt={record.id: 0.5}, feedback={"why": ["short"]}, metadata={"n": 1})
    answer = await send(client, *lines(record, report))
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "records": [
            {"agent_record_id": record.id, "request_type": "inference", "scenario": "default"},
            {"agent_record_id": report.id, "request_type": "report", "scenario": "default"},
        ],
        "duplicates": 0,
        "erased": 0,
    }
    assert await gateway.store.get([record.id, report.id]) == [record, report]
    assert (await send(client, *lines(record, report))).json()["duplicates"] == 2


async def test_what_the_server_recorded_itself_is_a_duplicate(gateway, client):
    receipts = []
    for _ in range(3):
        receipts.append((await client.post("/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"])
    await client.post("/reef/report", json={"score": 0.5, "references": receipts})
    entries = [entry for kind in ("record", "report") for _, entry in await gateway.store.find(Query("default", kind))]
    answer = await send(client, *lines(*entries))
    assert (answer.status_code, answer.json()["duplicates"]) == (200, 4)


async def test_a_release_of_another_chain_is_replaced_and_the_record_never_trains(gateway, client):
    record = build("f" * 40)
    assert (await send(client, *lines(record))).status_code == 200
    stored = await gateway.record(record.id)
    assert stored.release_id == serving(gateway)
    assert stored.untrainable.startswith("imported from another release chain")
    assert dataclasses.replace(stored, release_id="f" * 40, untrainable=None) == record
    gateway.publish_rules("Be brief.")  # the present release is another one now: still the same record
    assert (await send(client, *lines(record))).json()["duplicates"] == 1


async def test_tokens_are_kept_only_with_all_of_them(gateway, client):
    half = dataclasses.replace(build(serving(gateway)), prompt_ids=None)
    assert (await send(client, *lines(half))).status_code == 200
    stored = await gateway.record(half.id)
    assert (stored.untrainable, stored.choices[0].output_ids, stored.choices[0].logprobs) == ("imported", None, None)
    assert (await send(client, *lines(half))).json()["duplicates"] == 1


ENVELOPES = [
    {
        "agent_record_id": "sample-1",
        "request_type": "inference",
        "payload": {
            "messages": [{"role": "user", "content": "2+2?"}],
            "response": {"choices": [{"message": {"role": "assistant", "content": "4"}}]},
        },
    },
    {"agent_record_id": "score-1", "request_type": "report", "payload": {"references": ["sample-1"], "score": 1}},
]


async def test_envelopes_with_ids_of_their_own(gateway, client):
    answer = await send(client, *ENVELOPES, headers={"x-reef-scenario": "other"})
    assert answer.status_code == 200, answer.text
    assert [item["agent_record_id"] for item in answer.json()["records"]] == ["sample-1", "score-1"]
    ((_, record),) = await gateway.store.find(Query("other"))
    ((_, report),) = await gateway.store.find(Query("other", kind="report"))
    assert json.loads(record.request) == {"messages": [{"role": "user", "content": "2+2?"}]}
    assert (record.choices[0].text, record.purpose, record.untrainable) == ("4", "live", "imported")
    assert (report.references, report.score) == ((record.id,), 1.0)
    assert (await send(client, *ENVELOPES, headers={"x-reef-scenario": "other"})).json()["duplicates"] == 2
    later = {
        "agent_record_id": "score-2",
        "request_type": "report",
        "payload": {"references": ["sample-1"], "score": 0},
    }
    assert (await send(client, later, headers={"x-reef-scenario": "other"})).status_code == 200
    said = await client.post("/reef/report", json={"references": ["sample-1"], "score": 3})
    assert said.json()["scenario"] == "other"


async def test_envelopes_of_the_other_dialects(gateway, client):
    anthropic = {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": "four"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 3, "output_tokens": 1},
    }
    entry = {"agent_record_id": "a", "request_type": "inference", "payload": ASK | {"response": anthropic}}
    text = {"agent_record_id": "b", "request_type": "inference", "payload": ASK | {"response": "plain"}}
    pytest.importorskip("reef.engines.dialect.messages")
    assert (await send(client, entry, text)).status_code == 200
    found = {record.dialect: record for _, record in await gateway.store.find(Query("default"))}
    assert found["messages"].choices[0].text == "four"
    assert found["messages"].answer_id == "msg_abc"
    assert found["chat"].choices[0].text == "plain"


async def test_one_entry(gateway, client):
    first = await client.post("/reef/records", json=ENVELOPES[0])
    again = await client.post("/reef/records", json=ENVELOPES[0])
    assert first.json() == {
        "agent_record_id": "sample-1",
        "request_type": "inference",
        "scenario": "default",
        "duplicate": False,
    }
    assert again.json()["duplicate"] is True


def bad(gateway):
    good = lines(build(serving(gateway)))[0]
    report = lines(build_report(good["agent_record_id"]))[0]
    without = {name: value for name, value in good.items() if name != "timing"}
    return [
        (3, "records[1]"),
        ({}, "records[1].agent_record_id"),
        (good | {"request_type": "x"}, "records[1].request_type"),
        (good | {"agent_record_id": 4}, "records[1].agent_record_id"),
        (good | {"scroe": 1}, "records[1].scroe"),
        (good | {"scenario": ["default"]}, "records[1].scenario"),
        (good | {"reply": "[1]"}, "records[1].reply"),
        (good | {"status": "open"}, "records[1].status"),
        (good | {"status": "done"}, "records[1].status"),
        (good | {"request": 4}, "records[1].request"),
        (good | {"request": {"base64": "%"}}, "records[1].request"),
        (good | {"choices": [{"index": 0, "text": 4}]}, "records[1].choices[0].text"),
        (good | {"choices": [{"index": 0, "text": "", "logprobs": [1]}]}, "records[1].choices[0].logprobs"),
        (good | {"choices": [{"index": 2**31, "text": ""}]}, "records[1].choices[0].index"),
        (good | {"choices": [{"index": 2**63, "text": ""}]}, "records[1].choices[0].index"),
        (good | {"choices": [{"index": -1, "text": ""}]}, "records[1].choices[0].index"),
        *((good | {name: "\ud800"}, f"records[1].{name}") for name in ("answer_id", "session", "client", "dialect")),
        (good | {"tags": {"agent-id": "\ud800"}}, "records[1].tags"),
        (ENVELOPES[0] | {"session": "\ud800"}, "records[1].session"),
        (
            ENVELOPES[0] | {"payload": ASK | {"response": {"choices": [{"index": 2**40}]}}},
            "records[1].payload.response",
        ),
        (good | {"timing": {"received_at": "x"}}, "records[1].timing.received_at"),
        (without, "records[1].timing"),
        (report | {"score": True}, "records[1].score"),
        (report | {"references": []}, "records[1].references"),
        (report | {"references": ["f" * 32]}, "records[1].references"),
        (report | {"references": ["nobody"]}, "records[1].references"),
        (report | {"created_at": "x"}, "records[1].created_at"),
        (ENVELOPES[0] | {"payload": []}, "records[1].payload"),
        (ENVELOPES[0] | {"payload": {}}, "records[1].payload.messages"),
        (ENVELOPES[0] | {"payload": ASK | {"response": 4}}, "records[1].payload.response"),
        (ENVELOPES[0] | {"mood": 1}, "records[1].mood"),
        (ENVELOPES[1] | {"payload": {"references": ["sample-9"], "score": 1}}, "records[1].references"),
    ]


async def test_a_bad_entry_is_named_and_nothing_of_its_batch_is_stored(gateway, client):
    for entry, param in bad(gateway):
        body = json.dumps({"records": [lines(build(serving(gateway)))[0], entry]})
        answer = await client.post("/reef/records/batch", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (entry, answer.text)
        assert answer.json()["error"]["message"].startswith("records[1]")
    assert await gateway.store.find(Query("default")) == []


async def test_other_content_under_a_known_id_is_a_conflict(gateway, client):
    record = build(serving(gateway))
    await send(client, *lines(record))
    other = dataclasses.replace(record, model_asked="another")
    answer = await send(client, *lines(build(serving(gateway)), other))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    assert answer.json()["error"]["message"].startswith(f"records[1]: record {record.id} is already")
    assert len(await gateway.store.find(Query("default"))) == 1


async def test_a_running_stream_is_not_ended_from_outside(run, tmp_path):
    """The record of an answer under way is its own: an import that claims to know its end is refused."""
    async with run(tmp_path, FakeEngine(delay=0.05)) as gateway, gateway.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as response:
            receipt = response.headers["x-reef-agent-record-id"]
            opened = await gateway.record(receipt)
            forged = build(serving(gateway), id=receipt, request=opened.request, choices=(Choice(0, "FORGED", "stop"),))
            answers = [await send(client, *lines(build(serving(gateway)), forged))]
            answers.append(await client.post("/reef/records", json=lines(forged)[0]))
            answers.append(await client.post("/reef/records", json=ENVELOPES[0] | {"agent_record_id": receipt}))
            body = b"".join([piece async for piece in response.aiter_bytes()])
        assert [answer.status_code for answer in answers] == [409, 409, 409]
        assert "still being answered" in answers[0].json()["error"]["message"]
        assert body.endswith(b"data: [DONE]\n\n")
        record = await gateway.closed(receipt)
        assert (record.status, record.untrainable) == ("complete", None)
        pieces = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
        said = [each["delta"].get("content") or "" for piece in pieces for each in piece["choices"]]
        assert record.choices[0].text == "".join(said) != ""
        assert len(await gateway.store.find(Query("default"))) == 1
        assert (await send(client, *lines(record))).json()["duplicates"] == 1


def nested(levels):
    value = "x"
    for _ in range(levels):
        value = {"a": value}
    return value


async def test_bodies_that_are_no_json_are_kept_and_an_answer_is_an_object(gateway, client):
    """A request is what it was; an answer is a JSON object of its dialect, or absent."""
    kept = [
        build(serving(gateway), request=request, reply=reply, dialect="responses")
        for request, reply in [
            (b"not json", None),
            (b"[1]", b'{"id":"resp_a"}'),
            (b"\xff", b'{"a":"\\ud800"}'),
            (b'{"input":"hi","previous_response_id":5}', b" {} "),
        ]
    ]
    assert (await send(client, *lines(*kept))).status_code == 200
    assert await gateway.store.get([record.id for record in kept]) == kept
    for reply in (b"zz", b"[1]", b"5", b"\xff", b"", b'{"a":' * 2000 + b"1" + b"}" * 2000):
        answer = await send(client, *lines(build(serving(gateway)), build(serving(gateway), reply=reply)))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "records[1].reply"), reply[:20]


async def test_a_response_cannot_go_on_from_itself(gateway, client):
    """By its receipt, in any form, by its provider's id, or by the id it is imported with."""
    receipt = "ab" * 16
    for name, answer_id, before in [
        (receipt, None, receipt),
        (receipt, None, f"resp_{receipt}"),
        (receipt, "resp_l", "resp_l"),
        ("mine", None, "mine"),
        (f"resp_{receipt}", None, f"resp_{receipt}"),
    ]:
        request = b'{"input":"x","previous\\u005fresponse_id":"%s"}' % before.encode()
        record = build(serving(gateway), request=request, dialect="responses", answer_id=answer_id, reply=b"{}")
        answer = await send(client, lines(record)[0] | {"agent_record_id": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "records[0].request"), answer.text
    said = {"id": "resp_l", "object": "response", "output": []}
    payload = {"input": "x", "previous_response_id": "resp_l", "response": said}
    answer = await send(client, ENVELOPES[0] | {"payload": payload})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "records[0].payload.previous_response_id")
    assert await gateway.store.find(Query("default")) == []
    earlier = ENVELOPES[0] | {"payload": payload | {"previous_response_id": "resp_k"}}
    assert (await send(client, earlier)).status_code == 200


async def test_depth(gateway, client):
    """What is nested too deeply to be read by everybody is refused at the door, by name; never a failure inside."""
    record = build(serving(gateway))
    said = dataclasses.replace(record.choices[0], message={"role": "assistant", "content": None})
    for levels, status in [(64, 200), (65, 400), (300, 400), (900, 400)]:
        report = build_report(record.id, metadata=nested(levels))
        answer = await send(client, *lines(record, report))
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["param"] == "records[1].metadata"
    for levels in (500, 600, 900, 980, 1000, 1020, 3000, 50_000):
        message = b'{"a":' * levels + b"1" + b"}" * levels
        whole = raw.line(build(serving(gateway), choices=(said,))).replace(b'"content":null', b'"content":' + message)
        answer = await client.post("/reef/records", content=whole, headers={"content-type": "application/json"})
        assert answer.status_code == (200 if levels == 500 else 400), (levels, answer.text)
        for name in (b"payload", b"scenario", b"agent_record_id", b"request", b"tags", b"session", b"references"):
            body = b'{"agent_record_id":"d","request_type":"inference","%s":%s}' % (name, message)
            answer = await client.post("/reef/records", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (levels, name)
        for part in (b'"messages":%s', b'"messages":[],"response":{"choices":[{"message":{"content":%s}}]}'):
            given = b'"payload":{%s}' % (part % message)
            body = b'{"agent_record_id":"d%d","request_type":"inference",%s}' % (levels + len(part), given)
            answer = await client.post("/reef/records", content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400), (levels, part, answer.text)
    for path in ("records", "reports"):
        assert (await client.get(f"/reef/scenarios/default/{path}")).status_code == 200
    for _, item in await gateway.store.find(Query("default")):
        assert (await client.get(f"/reef/scenarios/default/records/{item.id}")).status_code == 200


async def test_lone_surrogates_come_in_and_are_read(gateway, client):
    entry = {
        "agent_record_id": "\ud800",
        "request_type": "inference",
        "session": "s",
        "payload": {"model": "\udfff", "messages": [{"role": "user", "content": "\ud800"}], "response": "\ud800!"},
    }
    headers = {"content-type": "application/json"}
    answer = await client.post("/reef/records", content=json.dumps(entry), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["agent_record_id"] == "\ufffd"
    ((_, stored),) = await gateway.store.find(Query("default"))
    assert stored.answer_id == "\ufffd"
    assert (await client.post("/reef/records", content=json.dumps(entry), headers=headers)).json()["duplicate"]
    wrong = await client.post("/reef/records", content=json.dumps(entry | {"\ud800": 1}), headers=headers)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "records[0].\ufffd")


async def test_what_was_erased_is_passed_over(gateway, client):
    first, second = build(serving(gateway)), build(serving(gateway))
    alone, both = build_report(first.id), build_report(first.id, second.id, per_receipt={first.id: 0.5})
    await send(client, *ENVELOPES, *lines(first))
    ids = [
        first.id,
        *(await client.get("/reef/scenarios/default/records")).json()["records"][1]["agent_record_id"].split(),
    ]
    keep.forget(gateway.state / "records.db", ids)
    answer = await send(client, *ENVELOPES, *lines(first, alone, second, both))
    assert (answer.status_code, answer.json()["duplicates"]) == (200, 4), answer.text
    assert [record for _, record in await gateway.store.find(Query("default"))] == [second]
    ((_, left),) = await gateway.store.find(Query("default", kind="report"))
    assert (left.references, left.per_receipt) == ((second.id,), {})


async def test_an_export_from_before_an_erasure_still_comes_in(gateway, client):
    """A report that was robbed of a reference is the same report: as it was before, and as it is now."""
    first, second = build(serving(gateway)), build(serving(gateway))
    both = build_report(first.id, second.id, per_receipt={first.id: 0.5, second.id: 1.0})
    before = lines(first, second, both)
    await send(client, *before)
    keep.forget(gateway.state / "records.db", [first.id])
    (now,) = await gateway.store.get([both.id])
    assert now.references == (second.id,)
    for entries in (before, lines(second, now), lines(second, both)):
        answer = await send(client, *entries)
        assert (answer.status_code, answer.json()["duplicates"]) == (200, len(entries)), answer.text
    assert await gateway.store.get([both.id]) == [now]
    for other in (
        dataclasses.replace(both, score=0.0),
        dataclasses.replace(both, per_receipt={second.id: 0.25}),
        dataclasses.replace(now, feedback="more"),
    ):
        assert (await send(client, *lines(other))).status_code == 409


async def test_limits_of_a_batch(gateway, client):
    for body in ({}, {"records": []}, {"records": {}}, {"records": [ENVELOPES[0]], "more": 1}):
        assert (await client.post("/reef/records/batch", json=body)).status_code == 400
    many = [ENVELOPES[0] | {"agent_record_id": f"n{n}"} for n in range(1001)]
    assert (await send(client, *many)).json()["error"]["message"] == "1001 records; the limit is 1000 in a batch"
    assert (await send(client, *many[:1000])).status_code == 200
    large = ENVELOPES[0] | {"payload": ASK | {"response": "x" * 9_000_000}}
    assert (await send(client, large)).status_code == 200
    assert (await send(client, large | {"payload": ASK | {"response": "x" * 11_000_000}})).status_code == 413


async def test_rights_and_scenarios(gateway, client):
    async with gateway.client("t-infer") as app:
        assert (await send(app, ENVELOPES[0])).status_code == 403
    async with gateway.client("t-one") as tenant:
        assert (await send(tenant, ENVELOPES[0])).status_code == 403  # the default scenario is not theirs
        assert (await send(tenant, ENVELOPES[0] | {"scenario": "one"})).json()["records"][0]["scenario"] == "one"
    mixed = [ENVELOPES[0] | {"scenario": name} for name in ("one", "two")]
    assert (await send(client, *mixed)).json()["error"]["message"].startswith("the entries are of several scenarios")


text = st.text(max_size=12) | st.just("\ud800 lone")
record_lines = st.builds(
    lambda request, reply, said, ids, tags, untrainable, error: build(
        "c" * 40,
        request=request,
        reply=reply,
        choices=(Choice(0, said, None, ids, tuple(-float(n) for n in ids), message={"role": "assistant", "x": said}),),
        tags=tags,
        untrainable=untrainable,
        error=error,
    ),
    st.binary(max_size=40) | text.map(lambda value: value.encode("utf-8", "surrogatepass")),
    st.none() | st.binary(max_size=20),
    text,
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    st.dictionaries(st.sampled_from("abc"), text, max_size=2),
    st.none() | text,
    st.none() | text,
)


@given(record_lines)
@settings(max_examples=150, deadline=None)
def test_a_line_reads_back_as_the_record_it_was(record):
    body = raw.load(raw.line(record))
    made = raw.read_record(body, receipt=record.id, scenario=record.scenario, release_id=record.release_id)
    assert made == record


def test_log_probs_that_json_has_no_numbers_for():
    infinite = Choice(0, "x", "stop", (1, 2), (float("-inf"), -1.0))
    record = build("c" * 40, choices=(infinite,))
    body = json.loads(raw.line(record), parse_constant=pytest.fail)
    assert raw.read_record(body, receipt=record.id, scenario="default", release_id="c" * 40) == record


@pytest.mark.parametrize("name", ["sample-1", "chatcmpl-theirs", "a/b c?"])
async def test_an_imported_record_is_read_by_its_own_id(client, name):
    await send(client, ENVELOPES[0] | {"agent_record_id": name})
    found = await client.get(f"/reef/scenarios/default/records/{quote(name, safe='')}")
    assert (found.status_code, found.json()["answer_id"]) == (200, name), found.text
    assert (await client.get("/reef/scenarios/default/records/sample-2")).status_code == 404
