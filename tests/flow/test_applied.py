"""Rules in requests, and reports on sessions, on a real `reef serve` with two gateways and a learner."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.kit.served import served

CONFIG = """
reef: {{engine: fake, recipe: feedback_rules, workers: 2, port: {port}, state_dir: {state}}}
training: {{backend: fake}}
"""
ASK = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}


@pytest.fixture
def reef(tmp_path: Path) -> Iterator[httpx.Client]:
    with (
        served(tmp_path / "run" / "state", CONFIG) as (url, token),
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=30) as client,
    ):
        yield client


def fresh(reef: httpx.Client, **headers: str) -> httpx.Response:
    """An answer over a connection of its own: any gateway may give it."""
    both = dict(reef.headers) | headers
    answer = httpx.post(f"{reef.base_url}/v1/chat/completions", json=ASK, headers=both, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def applied(reef: httpx.Client) -> set[bool]:
    """Whether the rule is in the requests, over a dozen of them."""
    found = set()
    for _ in range(12):
        receipt = fresh(reef).headers["x-reef-agent-record-id"]
        record = reef.get(f"/reef/scenarios/default/records/{receipt}").json()
        assert bool(record["rendered"]) == ("harness" in record["tags"])
        found.add(bool(record["rendered"]))
    return found


def until(wanted: set[bool], reef: httpx.Client) -> None:
    for _ in range(60):
        if (found := applied(reef)) == wanted:
            return
        time.sleep(0.1)
    raise AssertionError(found)


def test_a_rule_is_applied_as_its_recipe_wishes_and_as_a_person_says(reef: httpx.Client) -> None:
    fresh(reef, **{"x-reef-session": "first"})
    told = reef.post("/reef/report", json={"session": "first", "feedback": "Answer in one short sentence."})
    assert told.status_code == 200, told.text
    until({True}, reef)
    for harness, wanted in (({"apply": False}, {False}), ({"apply": True}, {True}), (None, {True})):
        changed = reef.patch("/reef/scenarios/default", json={"harness": harness})
        assert changed.status_code == 200, changed.text
        until(wanted, reef)
    wrong = reef.patch("/reef/scenarios/default", json={"harness": {"aply": True}})
    assert wrong.status_code == 400
    assert "harness.apply" in wrong.json()["error"]["message"]


def test_a_session_is_known_to_every_gateway_at_once(reef: httpx.Client) -> None:
    for number in range(20):
        session = f"run-{number}"
        receipts = [fresh(reef, **{"x-reef-session": session}).headers["x-reef-agent-record-id"] for _ in range(2)]
        told = httpx.post(
            f"{reef.base_url}/reef/report",
            json={"session": session, "score": 1},
            headers=dict(reef.headers),
            timeout=30,
        )
        assert told.status_code == 200, told.text
        quoted = [
            report
            for report in reef.get("/reef/scenarios/default/reports?limit=1").json()["reports"]
            if report["agent_record_id"] == told.json()["agent_record_id"]
        ]
        assert [report["references"] for report in quoted] == [receipts]
