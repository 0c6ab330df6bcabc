"""The public client package, unmodified, from a thread against a running gateway: inference, reports, imports."""

import asyncio
import json

import pytest

from reef.records import Query
from tests.gateway.conftest import TOKEN

client_package = pytest.importorskip("reef_client")
record_import = pytest.importorskip("reef_client.record_import")
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def away(gateway):
    return client_package.ReefClient(gateway.url, token=TOKEN, timeout_s=10)


async def test_inference_and_reports(gateway, away):
    """What it sends beside the body (a recipe, a version) changes nothing, and its answers are what it expects."""

    def use():
        body, receipt = away.inference_with_record(
            "other",
            "/v1/chat/completions",
            ASK,
            recipe="sao",
            artifact_version="3",
            extra_headers={"x-reef-session": "s"},
        )
        first = away.report("other", {"score": 1.0}, references=[receipt], recipe="sao")
        second = away.report("other", {"score": 0, "references": [body["id"]]})
        return body, receipt, first, second

    body, receipt, first, second = await asyncio.to_thread(use)
    record = await gateway.record(receipt)
    assert body["choices"][0]["message"]["content"] == record.choices[0].text
    assert (record.scenario, record.session) == ("other", "s")
    reports = await gateway.store.get([first["agent_record_id"], second["agent_record_id"]])
    assert [(report.score, report.references) for report in reports] == [(1.0, (receipt,)), (0.0, (receipt,))]
    assert first == {**first, "scenario": "other", "request_type": "report"}


async def test_a_typed_report(gateway, away):
    class Grade:
        def to_dict(self, *, references):
            return {"references": list(references), "metrics": {"clarity": 0.5}}

    def use():
        _, receipt = away.inference_with_record("default", "/v1/chat/completions", ASK)
        return receipt, away.report("default", Grade(), references=[receipt])

    receipt, said = await asyncio.to_thread(use)
    (report,) = await gateway.store.get([said["agent_record_id"]])
    assert (report.references, report.metrics) == ((receipt,), {"clarity": 0.5})


async def test_errors_carry_their_status(away):
    def use():
        with pytest.raises(client_package.ReefClientError) as refused:
            away.report("default", {"score": 1}, references=["0" * 32])
        with pytest.raises(client_package.ReefClientError) as missing:
            away.get("/reef/scenarios/nobody/releases")
        return refused.value, missing.value

    refused, missing = await asyncio.to_thread(use)
    assert (refused.status, missing.status) == (400, 404)
    assert json.loads(refused.body)["error"]["param"] == "references"


def write(path, count):
    rows = []
    for n in range(count):
        request = {"messages": [{"role": "user", "content": f"{n}+1?"}], "session_note": n}
        answer = {"choices": [{"message": {"role": "assistant", "content": str(n + 1)}}]}
        payload = {**request, "response": answer}
        rows.append({"agent_record_id": f"sample-{n}", "request_type": "inference", "payload": payload})
        grade = {"references": [f"sample-{n}"], "score": n / 10, "feedback": "ok"}
        rows.append({"agent_record_id": f"score-{n}", "request_type": "report", "payload": grade})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def test_an_import_and_the_same_again(gateway, tmp_path, capsys):
    """Batches of 7 split records from the reports on them; importing again stores nothing twice."""
    path = tmp_path / "records.jsonl"
    write(path, 20)

    def bring(progress):
        return record_import.import_records_file(
            path, url=gateway.url, scenario="bench", token=TOKEN, batch_size=7, progress_path=tmp_path / progress
        )

    assert await asyncio.to_thread(bring, "one") == 40
    records = [record for _, record in await gateway.store.find(Query("bench"))]
    reports = [report for _, report in await gateway.store.find(Query("bench", kind="report"))]
    assert (len(records), len(reports)) == (20, 20)
    scores = {report.references[0]: report.score for report in reports}
    assert [scores[record.id] for record in records[::-1]] == [n / 10 for n in range(20)]
    assert [record.choices[0].text for record in records[::-1]] == [str(n + 1) for n in range(20)]
    assert await asyncio.to_thread(bring, "two") == 40
    assert len(await gateway.store.find(Query("bench"))) == 20


async def test_an_import_stops_at_what_is_wrong_and_goes_on_there(gateway, tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    write(path, 6)
    bad = json.dumps(
        {"agent_record_id": "score-x", "request_type": "report", "payload": {"references": ["no"], "score": 1}}
    )
    whole = path.read_text().splitlines()
    path.write_text("\n".join([*whole[:6], bad, *whole[6:]]) + "\n")

    def bring():
        return record_import.import_records_file(path, url=gateway.url, scenario="bench", token=TOKEN, batch_size=2)

    with pytest.raises(ValueError, match="HTTP 400"):
        await asyncio.to_thread(bring)
    assert len(await gateway.store.find(Query("bench"))) == 3


async def test_our_own_export_goes_through_it(gateway, tmp_path, capsys):
    """Lines of `reef export --shape raw` have the fields it looks at."""
    from reef.records import raw
    from tests.gateway.test_imports import build, build_report

    record = build(gateway.context.watch.get("default").release_id)
    path = tmp_path / "raw.jsonl"
    path.write_bytes(raw.line(record) + raw.line(build_report(record.id)))

    def bring():
        return record_import.import_records_file(path, url=gateway.url, scenario="default", token=TOKEN)

    assert await asyncio.to_thread(bring) == 2
    assert await gateway.record(record.id) == record
